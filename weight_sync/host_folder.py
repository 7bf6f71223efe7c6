"""Resources shared by processes of one machine: a folder that its last user removes, and locks.

Every user of a `HostFolder` holds a shared lock in it, and the last user to close removes the folder. Folders of killed
processes have no lock holder; the next process to start removes these folders.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from leeway.common.files import discard, try_lock
from leeway.weight_sync.manifest import TransferFailed

log = logging.getLogger(__name__)

_USERS_NAME = "users.lock"
_SHM = Path("/dev/shm")
"""World-writable folder. Folders in it are created with mode 0700, and their owner and mode are checked."""
_OPEN_S = 10.0
_POLL_S = 0.02
_DEAD = ".dead"
"""Suffix of a folder that is being removed."""


class HostFolder:
    """A folder that exists as long as a process uses it."""

    def __init__(self, path: Path, *, siblings: str = "leeway-{user}-.*") -> None:
        """Create the folder or join its users; remove unused folders beside it that match `siblings`.

        `siblings` is a regular expression for folder names; `{user}` in it stands for the numeric user id.

        Raises:
            TransferFailed: the folder cannot be created, or belongs to another user.
        """
        self.path = path
        deadline = time.monotonic() + _OPEN_S
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _sweep(path, re.compile(siblings.format(user=os.geteuid())))
            while (users := _join(path)) is None:
                if time.monotonic() >= deadline:
                    raise TransferFailed(f"another process has not finished removing {path} within {_OPEN_S:g} s")
                time.sleep(_POLL_S)
        except OSError as error:
            raise TransferFailed(
                f"cannot use {path} for fetched weights ({error}). Set TMPDIR in [launch.env] to a writable "
                "folder of this machine"
            ) from error
        self._users: BinaryIO = users

    def is_there(self) -> bool:
        """Return whether the joined folder still exists: tmpfiles or systemd's RemoveIPC may remove it."""
        return is_at(self._users, self.path / _USERS_NAME)

    def close(self) -> None:
        """Release the folder; its last user removes it. Idempotent."""
        if self._users.closed:
            return
        with self._users:
            try:
                _remove_if_alone(self.path, self._users)
            except OSError as error:
                log.warning("cannot remove %s: %s", self.path, error)


def folder_for(run_id: str, store_id: str, needed_bytes: int) -> Path:
    """Return the folder in which this machine stages versions of a store, at most `needed_bytes` at a time.

    The folder is in /dev/shm, or in the temporary folder if /dev/shm is too small.
    """
    name = f"leeway-{os.geteuid()}-{re.sub('[^A-Za-z0-9.-]', '_', run_id)[:80]}-{store_id[:12]}"
    # compare the size of /dev/shm, not its free space: all processes of the machine must choose the same folder
    if _SHM.is_dir() and os.access(_SHM, os.W_OK) and shutil.disk_usage(_SHM).total >= needed_bytes:
        return _SHM / name
    return Path(tempfile.gettempdir()) / name


def _join(path: Path) -> BinaryIO | None:
    """Acquire a shared lock on the users' file; return None if the folder is being removed."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        try:
            found = path.lstat()
        except FileNotFoundError:
            return None
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise TransferFailed(
                f"{path} must be a folder writable by this user alone, so weights are not read from it: remove it"
            ) from None
    with contextlib.suppress(FileNotFoundError):
        return locked(path / _USERS_NAME, shared=True)
    return None


def _remove_if_alone(path: Path, users: BinaryIO) -> None:
    if not try_lock(users) or not is_at(users, path / _USERS_NAME):
        return
    # rename first: a process that joins from now on creates its own folder
    dead = path.with_name(f".{path.name}.{os.getpid()}{_DEAD}")
    path.rename(dead)
    discard(dead)


def _sweep(own: Path, siblings: re.Pattern[str]) -> None:
    """Remove the folders of killed processes beside this one."""
    for path in own.parent.glob(f"leeway-{os.geteuid()}-*"):
        if path == own or siblings.fullmatch(path.name) is None:
            continue
        try:
            with (path / _USERS_NAME).open("r+b") as users:
                _remove_if_alone(path, users)
            if not path.exists():
                log.info("removed %s, which no process uses", path)
        except OSError as error:
            log.debug("cannot remove %s: %s", path, error)
    for dead in own.parent.glob(f".leeway-{os.geteuid()}-*{_DEAD}"):
        discard(dead)


def lock_within(
    path: Path,
    timeout_s: float,
    *,
    owner: str,
    what: str,
    progress: Callable[[], int] = lambda: 0,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> BinaryIO:
    """Acquire an exclusive lock, held until the file is closed or the process exits.

    Creates the file if missing and writes `owner` to it. Times out if `progress`, a number that changes while the
    holder works, stays the same for `timeout_s`.

    Raises:
        TransferFailed: timeout; the message names the holder and `what`, the protected resource.
    """
    last, changed_at = progress(), clock()
    while True:
        lock = locked(path)
        if lock is not None:
            lock.truncate(0)
            lock.write(f"{owner} (process {os.getpid()})".encode())
            lock.flush()
            return lock
        if (current := progress()) != last:
            last, changed_at = current, clock()
        elif clock() - changed_at >= timeout_s:
            raise TransferFailed(
                f"{what}: waited {timeout_s:g} s for {_holder(path)}, which holds {path} without progress. "
                "If that process is stopped, kill it: the next process resumes its work"
            )
        pause(_POLL_S)


def is_at(file: BinaryIO, path: Path) -> bool:
    """Return whether `path` still names the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def locked(path: Path, *, shared: bool = False) -> BinaryIO | None:
    """Open a file, created if missing, and lock it until it is closed; return None if the lock is taken."""
    file = path.open("ab", buffering=0)
    # the last holder may have removed the file between open and lock
    if try_lock(file, shared=shared) and is_at(file, path):
        return file
    file.close()
    return None


def _holder(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:200] or "an unnamed process"
    except OSError as error:
        return f"an unknown process ({error})"
