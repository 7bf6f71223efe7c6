"""Ray as a run starts it on this machine: what it takes, and where it keeps its sessions. Imports no Ray."""

from __future__ import annotations

import os
import stat
from pathlib import Path

OBJECT_STORE_BYTES = 80 * 2**20
"""Only control passes through Ray, so its object store stays near the smallest that it accepts."""


def sessions_folder() -> Path:
    """Where the sessions lie: Ray opens its own folders to everybody of the machine, so they are in one of this user.

    Near the root, for the sockets in it have long names; RAY_TMPDIR moves it.
    """
    return Path(os.environ.get("RAY_TMPDIR") or "/tmp") / f"leeway-{os.geteuid()}-ray" / "r"


def make_sessions_folder() -> Path:
    """The same, made where it is not there.

    Raises:
        OSError: it cannot be made, or the folder around it is somebody else's or open to others.
    """
    folder = sessions_folder()
    try:
        folder.parent.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.parent.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(
                f"{folder.parent} is not a folder of this user alone, and Ray's sockets would lie in it: remove it, or "
                "set RAY_TMPDIR"
            ) from None
    return folder
