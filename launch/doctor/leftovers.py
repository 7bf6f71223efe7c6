"""What dead runs left on this machine, with the command that removes it. Nothing is removed here."""

from __future__ import annotations

import fcntl
import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from launch.doctor.finding import Finding, ok, warning
from launch.host import role_processes, sessions_folder
from launch.observe.status import StatusError, look
from launch.run_folder import RunFolder, owner_of

_LARGE_BYTES = 2**30
"""Ray keeps the logs of each session: below this they are not worth a word."""


def check_leftovers(
    places: Sequence[Path] = (Path("/dev/shm"), Path(tempfile.gettempdir())), sessions: Path | None = None
) -> list[Finding]:
    """Processes, staged weights and Ray's sessions of runs that are over."""
    found = [*_processes(), *_staging(places), *_sessions(sessions or sessions_folder())]
    return found or ok("leftovers", "none of dead runs")


def _processes() -> list[Finding]:
    """Roles whose command is gone."""
    by_run: dict[Path, list[int]] = {}
    for found in role_processes():
        by_run.setdefault(found.run, []).append(found.process.pid)
    return [
        finding
        for root, pids in by_run.items()
        if (root / "run.json").exists() and _is_over(RunFolder(root))
        for finding in warning(
            "processes",
            f"{len(pids)} of the run {root} live on, and its command does not",
            f"kill -9 {' '.join(map(str, pids))}",
        )
    ]


def _is_over(folder: RunFolder) -> bool:
    """Whether the command of a run is gone. On a shared disk its lock may be seen on its own host alone."""
    try:
        if owner_of(folder) is not None:
            return False
        seen = look(folder)
    except StatusError:  # it ended before it said anything
        return True
    except OSError:  # somebody else's
        return False
    return bool(seen.gone) or seen.status.ended is not None


def _staging(places: Sequence[Path]) -> list[Finding]:
    """Folders of fetched weights that nobody uses; the next run on this machine removes them too."""
    dead = [path for place in places for path in _unused(place)]
    if not dead:
        return []
    size = sum(_size(path) for path in dead)
    return warning(
        "staged weights",
        f"{len(dead)} folders with {size / 2**20:.0f} MiB that no process uses",
        f"rm -rf {' '.join(shlex.quote(str(path)) for path in dead[:8])}",
    )


def _unused(place: Path) -> Iterator[Path]:
    for path in place.glob(f"leeway-{os.geteuid()}-*"):
        try:
            with (path / "users.lock").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # in use, removed meanwhile, somebody else's, or nothing of ours
            continue
        yield path


def _sessions(folder: Path) -> list[Finding]:
    """Logs and sockets of Ray's sessions, where no Ray lives."""
    dead = [path for path in folder.glob("session_*") if path.is_dir() and not path.is_symlink()]
    if not dead or any(_is_ray(process) for process in psutil.process_iter()):
        return []
    size = sum(_size(path) for path in dead)
    if size < _LARGE_BYTES:
        return []
    return warning(
        "Ray sessions",
        f"{len(dead)} of earlier runs with {size / 2**30:.1f} GiB in {folder}",
        f"rm -rf {folder}/session_*",
    )


def _size(folder: Path) -> int:
    """Bytes of all files in it."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.lstat(os.path.join(parent, name)).st_size
            except OSError:  # removed meanwhile
                continue
    return size


def _is_ray(process: psutil.Process) -> bool:
    try:
        return process.name() in ("raylet", "gcs_server")
    except psutil.Error:
        return False
