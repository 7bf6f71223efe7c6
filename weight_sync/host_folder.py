"""What processes of one machine share: a folder that goes with the last of its users, and locks.

Every user of a HostFolder holds a shared lock in it. The last to close removes it; what killed processes left behind
has no holder, and the next one to start removes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from common.files import discard, try_lock
from weight_sync.manifest import TransferFailed

log = logging.getLogger(__name__)

_USERS_NAME = "users.lock"
_SHM = Path("/dev/shm")
"""A folder of mode 0700 is made in it, and checked."""
_OPEN_S = 10.0
_POLL_S = 0.02
_DEAD = ".dead"
"""Ends the name of a folder that is being removed."""


class HostFolder:
    """A folder that exists while it is used."""

    def __init__(self, path: Path, *, kin: str = "leeway-{user}-.*") -> None:
        """Make it, or join its users; remove the folders of its kind, beside it, that nobody uses.

        `kin` is a regular expression for the names of its kind, in which `{user}` is the number of this user.

        Raises:
            TransferFailed: it cannot be made, or belongs to somebody else.
        """
        self.path = path
        deadline = time.monotonic() + _OPEN_S
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _sweep(path, re.compile(kin.format(user=os.geteuid())))
            while (users := _join(path)) is None:
                if time.monotonic() >= deadline:
                    raise TransferFailed(f"{path} is being removed by another process for {_OPEN_S:g} s")
                time.sleep(_POLL_S)
        except OSError as error:
            raise TransferFailed(
                f"{path} cannot be used to keep fetched weights ({error}). Set TMPDIR in [launch.env] to a "
                "folder of this machine that can be written"
            ) from error
        self._users: BinaryIO = users

    def is_there(self) -> bool:
        """Return whether it is still the folder that was joined: tmpfiles or systemd's RemoveIPC may remove it."""
        return is_at(self._users, self.path / _USERS_NAME)

    def close(self) -> None:
        """Leave; the last user removes the folder. Idempotent."""
        if self._users.closed:
            return
        with self._users:
            try:
                _remove_if_alone(self.path, self._users)
            except OSError as error:
                log.warning("%s stays: it cannot be removed (%s)", self.path, error)


def folder_for(run_id: str, store_id: str, needed_bytes: int) -> Path:
    """Return where this machine keeps versions of a store, at most `needed_bytes` at a time.

    That is /dev/shm, or the temporary folder if that is too small.
    """
    name = f"leeway-{os.geteuid()}-{re.sub('[^A-Za-z0-9.-]', '_', run_id)[:80]}-{store_id[:12]}"
    # by its size, not by what is free: all processes of the machine must come to the same answer
    if _SHM.is_dir() and os.access(_SHM, os.W_OK) and _size_of(_SHM) >= needed_bytes:
        return _SHM / name
    return Path(tempfile.gettempdir()) / name


def _join(path: Path) -> BinaryIO | None:
    """Hold the users' lock; None: the folder is being removed."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        try:
            found = path.lstat()
        except FileNotFoundError:
            return None
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise TransferFailed(
                f"{path} is not a folder that this user alone may write; weights are not taken from it. Remove it"
            ) from None
    with contextlib.suppress(FileNotFoundError):
        return locked(path / _USERS_NAME, shared=True)
    return None


def _remove_if_alone(path: Path, users: BinaryIO) -> None:
    if not try_lock(users) or not is_at(users, path / _USERS_NAME):
        return
    # the name first: a process that joins from here on makes a folder of its own
    dead = path.with_name(f".{path.name}.{os.getpid()}{_DEAD}")
    path.rename(dead)
    discard(dead)


def _sweep(mine: Path, kin: re.Pattern[str]) -> None:
    """Remove the folders of killed processes; not this one, which is to be used."""
    for path in mine.parent.glob(f"leeway-{os.geteuid()}-*"):
        if path == mine or kin.fullmatch(path.name) is None:
            continue
        try:
            with (path / _USERS_NAME).open("r+b") as users:
                _remove_if_alone(path, users)
            if not path.exists():
                log.info("removed %s, which nobody uses any more", path)
        except OSError as error:
            log.debug("%s stays: %s", path, error)
    for dead in mine.parent.glob(f".leeway-{os.geteuid()}-*{_DEAD}"):
        discard(dead)


def _size_of(folder: Path) -> int:
    facts = os.statvfs(folder)
    return facts.f_blocks * facts.f_frsize


def lock_within(
    path: Path,
    patience_s: float,
    *,
    who: str,
    what: str,
    progress: Callable[[], int] = lambda: 0,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> BinaryIO:
    """Wait for an exclusive lock, which lasts until the file is closed or the process ends.

    The file, made if missing, names `who` holds it. A timeout is that `progress`, a number that changes while the
    holder proceeds, stays the same for `patience_s`.

    Raises:
        TransferFailed: timeout; names the holder, and `what` the lock is for.
    """
    seen, moved_at = progress(), clock()
    while True:
        lock = locked(path)
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


def is_at(file: BinaryIO, path: Path) -> bool:
    """Return whether the open file is still the one of that name."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(file.fileno())
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)


def locked(path: Path, *, shared: bool = False) -> BinaryIO | None:
    """Return the file, made if missing, locked until it is closed; None: another process holds the lock."""
    file = path.open("ab", buffering=0)
    # else its last holder has removed it between open and lock
    if try_lock(file, shared=shared) and is_at(file, path):
        return file
    file.close()
    return None


def _holder(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:200] or "an unnamed process"
    except OSError as error:
        return f"a process that cannot be named ({error})"
