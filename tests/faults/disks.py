"""Small disks for tests: tmpfs, and ext4 on a loop device. A disk needs root and is unmounted after its test."""

import os
import shutil
import subprocess
from pathlib import Path

MIB = 2**20


def run(*command: object) -> None:
    """Run a program; on failure show its stderr."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stderr}"


class Mounts:
    """Mounted disks, unmounted in reverse order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mounted: list[Path] = []

    def tmpfs(self, name: str, size_mib: int) -> Path:
        """Mount a tmpfs of this size; return its folder."""
        return self._mount(name, "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs")

    def ext4(self, name: str, size_mib: int) -> tuple[Path, Path]:
        """Mount a new ext4 in an image file; return its folder and the image."""
        image = self._folder / f"{name}.img"
        with image.open("wb") as file:
            file.truncate(size_mib * MIB)
        run("mkfs.ext4", "-q", "-F", image)
        return self.image(name, image), image

    def image(self, name: str, image: Path) -> Path:
        """Mount the ext4 file system of an image, which replays its journal as after a power cut. Return the folder."""
        return self._mount(name, "-o", "loop", image)

    def unmount(self, folder: Path) -> None:
        run("umount", folder)
        self._mounted.remove(folder)

    def close(self) -> None:
        for folder in reversed(self._mounted):
            subprocess.run(["umount", "-l", str(folder)], capture_output=True, timeout=60, check=False)
        self._mounted.clear()

    def _mount(self, name: str, *options: object) -> Path:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        run("mount", *options, folder)
        self._mounted.append(folder)
        return folder


def fill(folder: Path, *, leave_bytes: int) -> Path:
    """Write a file that leaves `leave_bytes` of free space; return the file, so that the caller can delete it."""
    ballast = folder / "ballast"
    free = shutil.disk_usage(folder).free
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - leave_bytes)
    return ballast


def copy_snapshot(image: Path, copy: Path) -> None:
    """Copy the image of a disk while only the kernel may write to the image; retry until the copy equals the image."""
    for _ in range(50):
        run("cp", "--sparse=always", image, copy)
        if subprocess.run(["cmp", "-s", str(image), str(copy)], timeout=60, check=False).returncode == 0:
            return
    raise AssertionError(f"{image} never stopped changing")
