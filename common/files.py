"""Atomic and durable file writes, memory maps and file locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a full disk or quota."""
_LOCK_PAUSE_S = 0.05

leftovers: dict[Path, str] = {}  # paths that this process could not remove, each with an error message


class NoLocks(OSError):
    """A file system does not support locks; the message names its folder and the fix."""


def sync(path: Path) -> None:
    """Sync the content of a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(temporary: Path, path: Path) -> None:
    """Sync a temporary file or the entries of a temporary folder, and rename it durably to `path` beside it."""
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def write_durably(path: Path, data: bytes) -> None:
    """Write a file that is complete or absent after any crash; raise OSError if the disk is full or not writable."""
    with _whole_file(path, 0o666) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync(path.parent)


def write_whole(path: Path, buffers: Iterable[bytes | memoryview], size_bytes: int = 0) -> None:
    """Write a file atomically: other processes never read a partial file.

    The file is not synced: its data must have a checksum and be replaceable. With the total `size_bytes`, ext4 writes
    three times as fast and a full disk raises at once. After OSError (such as a full disk), no temporary file remains.
    """
    with _whole_file(path, 0o666) as file:
        if size_bytes:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        file.writelines(buffers)


def private_file(path: Path) -> contextlib.AbstractContextManager[BinaryIO]:
    """Open a file with mode 0600 that gets its final name at the end of the block; atomic, like `write_whole`."""
    return _whole_file(path, 0o600)


@contextlib.contextmanager
def _whole_file(path: Path, mode: int) -> Iterator[BinaryIO]:
    if path.exists() and not path.is_file():  # the rename below would replace a device, such as /dev/null
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    temporary = temporary_beside(path)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def discard(path: Path) -> None:
    """Remove a file, or as much of a folder as possible; log once per path if something remains."""
    shutil.rmtree(path, ignore_errors=True)
    try:
        path.unlink() if path.is_file() else shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        if path not in leftovers:
            leftovers[path] = f"{path} cannot be removed and takes up disk space ({error}): remove it manually"
            logging.getLogger(__name__).warning("%s", leftovers[path])


def mapped(path: Path) -> memoryview:
    """Return a read-only memory map of a file, which is freed with its last view; raise OSError on failure."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:  # an empty file cannot be mapped
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def try_lock(file: int | BinaryIO, *, shared: bool = False, limit_s: float = 0.0) -> bool:
    """Lock a file or folder until it is closed or this process exits; return False if the lock is not free in time.

    Waits up to `limit_s` seconds. Raises NoLocks if the file system does not support locks.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOCK_PAUSE_S)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL):
                raise
            path = os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}")
            raise NoLocks(
                f"the file system of {Path(path).parent} does not support locks ({error.strerror}), which prevent two "
                "commands from writing the same files: use another folder (--run.dir FOLDER for runs), or enable locks"
            ) from None
        else:
            return True


def temporary_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")
