"""The folder of a run's weights: can it be used, and who uses it?"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path
from typing import IO

from launch.errors import ConfigError
from weight_sync.store import WeightStore

KEY = "weight_sync.folder"
CLAIM_NAME = "RUN"
"""A file that the command of a run holds locked from its start to its end; it says which run."""


def check_weights_folder(folder: Path) -> None:
    """See that a run could publish there, leaving nothing behind.

    Raises:
        ConfigError: it cannot be made or written, or is that of another run.
    """
    check_writable(folder, KEY)
    if not folder.exists():
        return
    try:
        with contextlib.suppress(FileNotFoundError), (folder / CLAIM_NAME).open("rb") as file:
            _lock(file, folder, fcntl.LOCK_SH)
        newest = WeightStore(folder).newest()
    except OSError as error:
        raise ConfigError(f"{KEY} = '{folder}' cannot be read: {error}; choose another folder") from None
    if newest is not None:
        raise ConfigError(
            f"{KEY} = '{folder}' holds the weights of an earlier run, up to version {newest}, and those of this run "
            "would not count as newer. Remove them, or choose another folder"
        )


def claim_weights_folder(folder: Path, run: Path) -> IO[bytes]:
    """Make the folder and keep other runs out of it until the returned file is closed, or this process ends.

    Args:
        folder: where versions lie.
        run: the run's folder, for whom it refuses.

    Raises:
        ConfigError: another run uses it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # closed by the caller: the claim lives as long as the file is open
        claim = (folder / CLAIM_NAME).open("a+b")
    except OSError as error:
        raise ConfigError(f"{KEY} = '{folder}' cannot be written: {error}; choose another folder") from None
    try:
        _lock(claim, folder, fcntl.LOCK_EX)
    except ConfigError:
        claim.close()
        raise
    claim.truncate(0)
    claim.write(f"{run}, process {os.getpid()}\n".encode())
    claim.flush()
    return claim


def check_writable(folder: Path, key: str) -> None:
    """See that a folder could be made and written, leaving nothing behind.

    Args:
        folder: it, or the first of its parents that is there, is looked at.
        key: of the config, for the error.

    Raises:
        ConfigError: one sentence that names the key and what to try.
    """
    found = folder
    try:
        while not found.exists() and found != found.parent:
            found = found.parent
        if not found.is_dir():
            raise ConfigError(f"{key} = '{folder}': {found} is a file; choose a folder")
        Path(tempfile.mkdtemp(dir=found)).rmdir()
    except OSError as error:
        raise ConfigError(
            f"{key} = '{folder}': {found} cannot be written ({error.strerror}); choose another folder, or change its "
            "rights"
        ) from None


def _lock(file: IO[bytes], folder: Path, how: int) -> None:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        who = file.read(4096).decode("utf-8", "replace").strip() or "another run"
        raise ConfigError(
            f"{KEY} = '{folder}' is in use by a run that is alive ({who}); choose another folder, or end that run"
        ) from None
