"""What the files of a run say: its rows, and what a command that resumes it needs of the commands before."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.observe.status import Accuracy, StatusError, read_status
from launch.run_folder import RunFolder, RunIdentity


class Rows:
    """Reads a file of JSON lines while another process appends to it; a line that is not whole yet is left."""

    def __init__(self, path: Path, *, at_end: bool = False) -> None:
        """Begin at the first line, or behind the last one."""
        self._path, self._offset = path, 0
        if at_end:
            with path.open("rb") as file:
                self._offset = file.seek(0, os.SEEK_END)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the rows since the last call; none while there is no file.

        Raises:
            ValueError: a line is no JSON.
        """
        if not self._path.exists():
            return
        with self._path.open("rb") as file:  # opened anew: NFS checks then what another host has written
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{self._path} has a line that is no JSON: {error}; remove that line") from None


def cut_torn_line(path: Path) -> int:
    """Cut off a last line that a crash left without an end; return the size of the file in bytes."""
    if not path.is_file():  # not there yet, or a device
        return 0
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - 2**20))
        return file.truncate(start + file.read().rfind(b"\n") + 1)


def joined(folder: RunFolder) -> Iterator[dict[str, Any]]:
    """Yield the row of each step with the columns of the actors, of whose lines for a step the last counts.

    Raises:
        ValueError: a line is no JSON.
    """
    of_actors = {row["step"]: row for row in Rows(folder.actors).read()}
    for row in Rows(folder.metrics).read():
        yield row | of_actors.get(row["step"], {})


@dataclass(frozen=True)
class History:
    """Everything before this command."""

    identity: RunIdentity
    last_step: int
    """The last step in metrics.jsonl; a checkpoint may be older."""
    evaluations: Sequence[Accuracy]
    wall_s: float
    """Seconds that the commands before worked on the run."""
    num_redone: int = 0
    changes: str = ""
    """Which keys of the config, and which contents, are other than before, as a sentence; empty where none is."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """As `contents` of launch.resume gives them now."""

    @property
    def before(self) -> Accuracy | None:
        """The first evaluation, if it is of a model that is not trained yet."""
        first = self.evaluations[0] if self.evaluations else None
        return first if first is not None and first.policy_version == 0 else None

    def start(self, step: int) -> str:
        """Where the run goes on, and what was changed; `step` is that of its newest checkpoint, 0 where it has none."""
        place = f"the checkpoint of step {step}" if step else "the model, for there is no checkpoint"
        return f"{place}; changed: {self.changes}" if self.changes else place

    @classmethod
    def read(cls, folder: RunFolder, changes: str = "", digests: Mapping[str, str] = {}) -> History:
        """Read what is there.

        Raises:
            ConfigError: `run.json` is not there, or damaged.
            ValueError: a line of the files is no JSON.
        """
        identity = folder.read_identity()
        last_step = max((row["step"] for row in Rows(folder.metrics).read()), default=0)
        evaluations, wall_s, num_redone = list[Accuracy](), 0.0, 0
        with suppress(StatusError):  # a command that ended before it wrote one
            status = read_status(folder.status)
            evaluations, wall_s, num_redone = status.evaluations, status.wall_s, status.steps_redone
        return cls(identity, last_step, evaluations, wall_s, num_redone, changes, digests)
