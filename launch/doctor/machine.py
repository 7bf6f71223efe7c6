"""Disk, memory, /dev/shm, open files, and the clock."""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from launch.doctor.finding import Finding, ok, problem, warning
from launch.doctor.needs import MachineNeeds
from launch.errors import ConfigError
from launch.host import OBJECT_STORE_BYTES
from launch.run_folder import check_writable

GIB = 2**30
OPEN_FILES = 4096
"""Ray, the services and the engines of a small run take a few hundred; a large one has thousands of connections."""
SLOW_FSYNC_S = 0.02
NUM_SYNCS = 15
CLOCK_SKEW_S = 2.0
RELEASED_S = 1_700_000_000.0
"""A clock before this time (November 2023) was never set."""
NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "lustre", "ceph", "glusterfs", "beegfs", "gpfs", "afs"}
    | {"fuse.sshfs", "fuse.glusterfs", "fuse.gcsfuse", "fuse.s3fs", "fuse.rclone", "fuse.juicefs", "fuse.blobfuse2"}
)
"""File systems on which a lock or a memory map may not mean what LMDB takes it to mean."""


def check_disk(runs: Path, needs: MachineNeeds | None) -> list[Finding]:
    """Can the folder of the runs be written, is it on a disk that LMDB can trust, fast enough and large enough?"""
    try:
        check_writable(runs, "run.dir")
    except ConfigError as error:
        return problem("runs", str(error), "give another place as --run.dir FOLDER")
    folder = existing(runs)
    return [
        *_check_file_system(folder, file_system_of(folder)),
        *_check_sync(folder),
        *_check_room(folder, shutil.disk_usage(folder).free, needs),
    ]


def _check_file_system(folder: Path, kind: str) -> list[Finding]:
    if kind in NETWORK:
        return warning(
            "file system",
            f"{folder} lies on {kind}: LMDB's memory map and locks are only trustworthy on a disk of this machine",
            "put the runs on a local disk: --run.dir FOLDER",
        )
    if kind == "overlay":
        return warning(
            "file system",
            f"{folder} lies in a container's own layer (overlay), which is gone when the container is removed",
            "mount a volume and give it as --run.dir FOLDER",
        )
    if kind in ("tmpfs", "ramfs"):
        return warning(
            "file system", f"{folder} lies in memory ({kind}), and is gone after a reboot", "--run.dir FOLDER on a disk"
        )
    return ok("file system", f"{folder} lies on {kind}")


def _check_sync(folder: Path) -> list[Finding]:
    try:
        took_s = sync_s(folder)
    except OSError as error:
        return problem(
            "fsync", f"a file in {folder} cannot be written and synced ({error.strerror})", "free some space"
        )
    if took_s > SLOW_FSYNC_S:
        return warning(
            "fsync",
            f"{1000 * took_s:.1f} ms in {folder}: every commit of the buffer waits for one",
            "use a faster disk; or buffer.durability = 'interval', which survives kill -9 but no power cut",
        )
    return ok("fsync", f"{1000 * took_s:.2f} ms in {folder}")


def _check_room(folder: Path, free_bytes: int, needs: MachineNeeds | None) -> list[Finding]:
    free = f"{free_bytes / GIB:.1f} GiB free in {folder}"
    if needs is None:
        if free_bytes < 2 * GIB:
            return warning("disk", free, "the demo writes 0.1 GiB, a model of 1 B parameters 50 GiB; free some space")
        return ok("disk", free)
    wanted = f"{needs.disk_bytes / GIB:.1f} GiB for {needs.disk_parts}"
    if free_bytes < needs.disk_bytes:
        return problem(
            "disk",
            f"{free}, and the run may write {wanted}",
            "free some space, give another --run.dir, or lower buffer.capacity_gib or learner.keep_checkpoints",
        )
    return ok("disk", f"{free}; the run may write {wanted}")


def check_shm(needs: MachineNeeds | None, shm: Path = Path("/dev/shm")) -> list[Finding]:
    """Ray's object store lies there, and weights that came over the network."""
    if not shm.is_dir():
        return warning("/dev/shm", "is not there: Ray uses the disk instead", "mount a tmpfs there")
    free = shutil.disk_usage(shm).free
    wanted = OBJECT_STORE_BYTES + (needs.staging_bytes if needs is not None else 0)
    if free < wanted:
        return warning(
            "/dev/shm",
            f"{free / 2**20:.0f} MiB free, and {wanted / 2**20:.0f} MiB are wanted for Ray's object store and weights "
            "that come over the network: those go to the temporary folder instead",
            "in a container, --shm-size 8g; or set weight_sync.staging_dir",
        )
    return ok("/dev/shm", f"{free / GIB:.1f} GiB free, {wanted / GIB:.1f} GiB wanted")


def check_memory(needs: MachineNeeds | None) -> list[Finding]:
    """Is there room for the engines and the stages?"""
    available = min(psutil.virtual_memory().available, _limit_of_container())
    if needs is None:
        if available < 4 * GIB:
            return warning("memory", f"{available / GIB:.1f} GiB available; the demo takes 4 GiB", "end other programs")
        return ok("memory", f"{available / GIB:.1f} GiB available")
    wanted = f"about {needs.memory_bytes / GIB:.1f} GiB for {needs.memory_parts}"
    if available < needs.memory_bytes:
        return problem(
            "memory",
            f"{available / GIB:.1f} GiB available, and the run takes {wanted}",
            "lower actors.num_actors, actors.kv_cache_gib or learner.num_stages; or spread the run over hosts",
        )
    return ok("memory", f"{available / GIB:.1f} GiB available; the run takes {wanted}")


def check_open_files() -> list[Finding]:
    """How many files and connections may a process have?"""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < OPEN_FILES:
        return warning("open files", f"{soft} at most (hard limit {hard})", f"ulimit -n {max(65536, OPEN_FILES)}")
    return ok("open files", "no limit" if soft < 0 else f"{soft} at most")


def check_clock(runs: Path) -> list[Finding]:
    """Is the clock set, and does the disk's server agree?"""
    now = time.time()
    if now < RELEASED_S:
        return problem("clock", f"it is {time.strftime('%Y-%m-%d', time.gmtime(now))} here", "set the clock")
    with tempfile.NamedTemporaryFile(dir=existing(runs)) as file:
        file.write(b"what time is it?")
        file.flush()
        skew_s = os.fstat(file.fileno()).st_mtime - now
    if abs(skew_s) > CLOCK_SKEW_S:
        return warning(
            "clock",
            f"the server of {runs} is {skew_s:+.0f} s from this machine: timelines of several hosts will not fit",
            "run an NTP client on both",
        )
    return ok("clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)))


def existing(folder: Path) -> Path:
    """The folder, or the first of its parents that is there."""
    found = folder.absolute()
    while not found.exists():
        found = found.parent
    return found


def file_system_of(folder: Path) -> str:
    """The kind of file system that a folder lies on, as the kernel names it."""
    path = folder.resolve()
    mounts = [(Path(each.mountpoint), each.fstype) for each in psutil.disk_partitions(all=True)]
    above = [(len(mount.parts), kind) for mount, kind in mounts if path.is_relative_to(mount)]
    return max(above, default=(0, "unknown"), key=lambda each: each[0])[1]


def sync_s(folder: Path) -> float:
    """Median seconds to write a page and have it on disk, leaving nothing behind."""
    took: Sequence[float] = []
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(NUM_SYNCS):
            file.write(b"\0" * 4096)
            file.flush()
            started = time.perf_counter()
            os.fsync(file.fileno())
            took = [*took, time.perf_counter() - started]
    return statistics.median(took)


def _limit_of_container() -> int:
    """Bytes that a container may use; without a limit, more than there are."""
    limit = 2**62
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such group, or "max"
            limit = min(limit, int(Path(path).read_text()))
    return limit
