"""The actor on one core, everything else of a run on another.

Everything starts on the second core, because it inherits that from the command; this moves each actor, with its engine
and all of their threads, as soon as it is seen.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.lib.runs import MeasurementFailed
from launch.observe.status import StatusError, read_status


@dataclass
class Cores:
    """Two cores, and who is where."""

    actors: int
    others: int
    moved: set[int] = field(default_factory=set)
    """Process ids of actors and their engines."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command that puts whatever follows on the second core."""
        return "taskset", "--cpu-list", str(self.others)

    def look(self, folder: Path) -> None:
        """Move the actors that a run's status.json names, and their engines."""
        try:
            snapshot = read_status(folder / "status.json")
        except StatusError:
            return  # it is still being started
        for actor in snapshot.actors:
            if actor.pid:
                self._move(actor.pid)

    def check(self) -> None:
        """Was every actor moved, with its engine?

        Raises:
            MeasurementFailed: no; the figures would mean something else.
        """
        if len(self.moved) < 2:
            raise MeasurementFailed(
                f"{len(self.moved)} processes of the actor were seen, not two (itself and its engine), so it was not "
                "put on a core of its own"
            )

    def _move(self, pid: int) -> None:
        try:
            parent = psutil.Process(pid)
            family = [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in family:
            if _move_threads(process.pid, self.actors):
                self.moved.add(process.pid)


def two_cores() -> Cores:
    """The first two that this process may use.

    Raises:
        MeasurementFailed: there is only one.
    """
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        raise MeasurementFailed(f"two cores are needed, and this process may use {len(mine)}; see `taskset -p $$`")
    return Cores(actors=mine[0], others=mine[1])


def _move_threads(pid: int, core: int) -> bool:
    """Every thread of a process; a new one inherits the core of the thread that makes it."""
    try:
        threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except FileNotFoundError:
        return False
    for thread in threads:
        try:
            if os.sched_getaffinity(thread) != {core}:
                os.sched_setaffinity(thread, {core})
        except ProcessLookupError:
            continue  # it has ended
    return True
