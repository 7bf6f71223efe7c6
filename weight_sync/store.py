"""The folder of published versions.

    FOLDER/NEWEST                          the newest version, as text; replaced atomically
    FOLDER/0.17/part-0.safetensors         what stage 0 holds
    FOLDER/0.17/part-0.json                its entries; a sign that stage 0 is done
    FOLDER/0.17/manifest.json              written last: it makes the version exist
    FOLDER/0.17/readers.lock               shared lock of everyone who reads, exclusive lock of retention

Every file appears by write to a temporary name, fsync, rename, fsync of the folder. A crash at any
point leaves either the version as it was or a folder without a manifest, which is not a version
and is removed when a later one is committed.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError, safe_open

from weight_sync.files import write_durably
from weight_sync.manifest import (
    Manifest,
    PublishFailed,
    TensorEntry,
    WeightsCorrupt,
    WeightsGone,
    checksum_of,
    decode,
    encode,
)
from weight_sync.staleness import PolicyVersion

MANIFEST_NAME = "manifest.json"
_NEWEST_NAME = "NEWEST"
_LOCK_NAME = "readers.lock"


class WeightStore:
    """Reads and commits versions. Any number of readers, on any machine that mounts the folder; one committer."""

    def __init__(self, folder: Path) -> None:
        """Open the store.

        Args:
            folder: where versions lie; created if missing.
        """
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def version_folder(self, version: PolicyVersion) -> Path:
        """Where the files of `version` lie, whether it exists or not."""
        return self.folder / str(version)

    def newest(self) -> PolicyVersion | None:
        """The newest committed version, or None before the first. One small read: cheap enough to poll.

        Raises:
            WeightsCorrupt: the pointer holds something else than a version.
        """
        path = self.folder / _NEWEST_NAME
        try:
            text = path.read_text(encoding="ascii", errors="replace")
        except FileNotFoundError:
            return None
        try:
            return PolicyVersion.parse(text.strip())
        except ValueError as error:
            raise WeightsCorrupt(f"{path}: {error}") from error

    def committed(self) -> list[PolicyVersion]:
        """All versions that exist, oldest first."""
        return sorted(version for version, folder in self._folders() if (folder / MANIFEST_NAME).exists())

    def manifest(self, version: PolicyVersion) -> Manifest:
        """The manifest of a version.

        Raises:
            WeightsGone: the version does not exist.
            WeightsCorrupt: its manifest was changed, or belongs to another version.
        """
        path = self.version_folder(version) / MANIFEST_NAME
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise WeightsGone(f"version {version} is not in {self.folder}: {path.name} is missing") from error
        manifest = decode(data, Manifest, path)
        if manifest.policy != version:
            raise WeightsCorrupt(f"{path}: describes version {manifest.policy}, not {version}")
        return manifest

    def tensors(self, manifest: Manifest) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Every tensor of a version, memory-mapped and checked against its entry before it is handed out.

        Raises:
            WeightsCorrupt: names the file and the tensor that is not as published.
        """
        folder = self.version_folder(manifest.policy)
        by_part: dict[str, list[TensorEntry]] = {}
        for entry in manifest.tensors:
            by_part.setdefault(entry.part, []).append(entry)
        for part, entries in by_part.items():
            yield from _read_part(folder / part, entries)

    def verify(self, version: PolicyVersion) -> Manifest:
        """Read every tensor of a version against its checksum.

        Returns:
            The manifest, now known to describe what is on disk.

        Raises:
            WeightsGone: the version does not exist.
            WeightsCorrupt: names the file and the tensor that is not as published.
        """
        manifest = self.manifest(version)
        for _ in self.tensors(manifest):
            pass
        return manifest

    def lock_for_reading(self, version: PolicyVersion) -> IO[bytes]:
        """Keep retention from removing a version until the returned file is closed (or its process dies).

        Raises:
            WeightsGone: the version does not exist, or is being removed right now.
        """
        folder = self.version_folder(version)
        try:
            # closed by the caller: the lock lives as long as the file is open
            lock = (folder / _LOCK_NAME).open("rb")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise WeightsGone(f"version {version} is not in {self.folder}; retention may have removed it") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise WeightsGone(f"version {version} is being removed from {self.folder} by retention") from error
        # between open and lock retention may have come first
        if not (folder / MANIFEST_NAME).exists():
            lock.close()
            raise WeightsGone(f"version {version} is not in {self.folder}; retention has removed it")
        return lock

    def commit(self, manifest: Manifest, keep_versions: int) -> None:
        """Make a version exist and the newest; then remove what is no longer needed.

        Args:
            manifest: describes parts that are already on disk.
            keep_versions: how many versions stay, this one included; those being read stay as well.

        Raises:
            PublishFailed: the version is not newer than the newest.
        """
        newest = self.newest()
        if newest is not None and manifest.policy <= newest:
            raise PublishFailed(
                f"version {manifest.policy} cannot follow {newest} in {self.folder}: versions only grow. "
                "A restarted learner begins a new incarnation; an old learner that still runs must be stopped"
            )
        folder = self.version_folder(manifest.policy)
        write_durably(folder / _LOCK_NAME, b"")
        write_durably(folder / MANIFEST_NAME, encode(manifest))
        write_durably(self.folder / _NEWEST_NAME, f"{manifest.policy}\n".encode())
        self._retain(manifest.policy, keep_versions)

    def _retain(self, newest: PolicyVersion, keep_versions: int) -> None:
        keep = set(self.committed()[-keep_versions:])
        for version, folder in self._folders():
            if version in keep or version >= newest:
                continue
            if (folder / MANIFEST_NAME).exists():
                _remove_unless_read(folder)
            else:
                # a publish that never finished; later versions are being written, earlier ones never will be
                shutil.rmtree(folder, ignore_errors=True)

    def _folders(self) -> Iterator[tuple[PolicyVersion, Path]]:
        for path in list(self.folder.iterdir()):
            with contextlib.suppress(ValueError):
                yield PolicyVersion.parse(path.name), path


def _read_part(path: Path, entries: list[TensorEntry]) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            present = set(file.keys())
            for entry in entries:
                if entry.name not in present:
                    raise WeightsCorrupt(f"{path}: tensor '{entry.name}' of the manifest is missing")
                tensor = file.get_tensor(entry.name)
                _check(path, entry, tensor)
                yield entry, tensor
    except FileNotFoundError as error:
        raise WeightsCorrupt(f"{path}: missing, though the manifest names it") from error
    except (SafetensorError, OSError) as error:
        raise WeightsCorrupt(f"{path}: not a readable safetensors file: {error}") from error


def _check(path: Path, entry: TensorEntry, tensor: torch.Tensor) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
        raise WeightsCorrupt(
            f"{path}: tensor '{entry.name}' is {dtype}{list(tensor.shape)}, "
            f"the manifest says {entry.dtype}{list(entry.shape)}"
        )
    found = checksum_of(tensor)
    if found != entry.checksum:
        raise WeightsCorrupt(
            f"{path}: tensor '{entry.name}' has checksum {found}, the manifest says {entry.checksum}; "
            "the file was changed after it was published"
        )


def _remove_unless_read(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError, BlockingIOError), (folder / _LOCK_NAME).open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # first the manifest: whoever comes from here on finds no version
        (folder / MANIFEST_NAME).unlink()
        shutil.rmtree(folder, ignore_errors=True)
