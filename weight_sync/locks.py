"""Locks between processes of one machine: files that the system unlocks when their holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from weight_sync.errors import TransferFailed

_POLL_S = 0.02


def lock_within(
    path: Path,
    patience_s: float,
    *,
    who: str,
    what: str,
    progress: Callable[[], int] = lambda: 0,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> IO[bytes]:
    """Wait for a lock that one process holds at a time.

    Args:
        path: of the lock's file, which says who holds it; made if missing. Its holder may remove it.
        patience_s: give up when the holder makes no progress for so long.
        who: a name for this process, for those that wait for it.
        what: what the lock is for, for the error.
        progress: a number that changes while the holder gets on.
        clock: monotonic, in seconds.
        pause: sleeps for so many seconds.

    Returns:
        The open file; closing it, or the end of the process, gives the lock back.

    Raises:
        TransferFailed: names the holder.
    """
    seen, moved_at = progress(), clock()
    while True:
        lock = try_lock(path)
        if lock is not None:
            lock.truncate(0)
            lock.write(f"{who} (process {os.getpid()})".encode())
            lock.flush()
            return lock
        if (now_seen := progress()) != seen:
            seen, moved_at = now_seen, clock()
        elif clock() - moved_at >= patience_s:
            raise TransferFailed(
                f"{what}: waited {patience_s:g} s for {_holder(path)}, which holds {path} and does not get on. "
                "Is that process stopped? It may be killed: the next one goes on where it was"
            )
        pause(_POLL_S)


def is_at(file: IO[bytes], path: Path) -> bool:
    """Is the open file still the one of that name?"""
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(file.fileno())
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)


def try_lock(path: Path) -> IO[bytes] | None:
    """The lock, or None where somebody else holds it."""
    # closed by the caller: the lock lives as long as the file is open
    file = path.open("ab", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    if not is_at(file, path):  # removed by its last holder between open and lock
        file.close()
        return None
    return file


def _holder(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:200] or "an unnamed process"
    except OSError as error:
        return f"a process that cannot be named ({error})"
