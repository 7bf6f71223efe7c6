"""Looking at a run from outside, through its files: which run is meant, and does its command still live?"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path

from launch.errors import ConfigError
from launch.run_folder import RunFolder, open_run, owner_of
from launch.state.snapshot import Snapshot, SnapshotError, read_snapshot

STALE_S = 60.0
"""A command on another host writes every few seconds; one that has not for so long is taken for gone."""
SILENT_S = 10.0
"""After so long without a new figure it is said how old they are."""


@dataclass(frozen=True)
class Sight:
    """A run as it is seen at one moment."""

    snapshot: Snapshot
    now_s: float
    gone: str
    """Why its command is thought gone though it said no farewell, and what to do; else empty."""
    resuming: str = ""
    """That another command goes on with it, of which the snapshot does not know yet; else empty."""

    @property
    def is_well(self) -> bool:
        """It goes on, or is done."""
        if self.resuming:
            return True
        if self.snapshot.ended is not None:
            return self.snapshot.ended.exit_status == 0
        return not self.gone


def find_run(path: Path | None) -> RunFolder:
    """The run that is meant; without a path the newest in runs/.

    Raises:
        ConfigError: there is none.
    """
    if path is not None:
        return open_run(path)
    runs = sorted(Path("runs").glob("*/config.toml"), key=lambda config: config.parent.stat().st_mtime)
    if not runs:
        raise ConfigError("there is no run in runs/; give the folder that `leeway train` named")
    return RunFolder(runs[-1].parent)


def look(folder: RunFolder) -> Sight:
    """See how a run is now.

    Raises:
        SnapshotError: nothing can be seen of it.
    """
    try:
        snapshot = read_snapshot(folder.status)
    except SnapshotError as error:
        if folder.status.exists() or owner_of(folder) is None:
            raise
        raise SnapshotError(f"the run {folder.root} has only just begun; look again in a few seconds") from error
    now_s, owner = time.time(), owner_of(folder)
    if owner is not None and owner != snapshot.pid:
        who = f"a command (process {owner})" if owner else "a command"
        return Sight(snapshot, now_s, "", f"{who} is just going on with it")
    return Sight(snapshot, now_s, _why_gone(folder, snapshot, now_s, owner))


def _why_gone(folder: RunFolder, snapshot: Snapshot, now_s: float, owner: int | None) -> str:
    if snapshot.ended is not None:
        return ""
    silent_s = now_s - snapshot.written_s
    if snapshot.host == socket.gethostname():
        if owner is not None:
            return ""
        who = f"the command (process {snapshot.pid})"
    elif silent_s <= STALE_S:
        return ""
    else:
        who = f"the command (process {snapshot.pid} on {snapshot.host})"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(snapshot.written_s))
    return f"{who} is gone since {since}, nothing runs; `leeway resume {folder.root}` goes on"
