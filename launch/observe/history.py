"""History: what a run's folder tells the command that resumes it of the commands before."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.observe.status import Accuracy, StatusError, read_status
from launch.run_folder import RunFolder, RunIdentity


@dataclass(frozen=True)
class History:
    """Everything before this command."""

    identity: RunIdentity
    rows: Sequence[Mapping[str, Any]]
    """Reports of steps in metrics.jsonl, as they came: a step that was taken again is there again."""
    before: Accuracy | None
    """The first evaluation, of a model that is not trained yet; None where there was none."""
    wall_s: float
    """Seconds that the commands before worked on the run."""
    changes: str = ""
    """Which keys of the config are other than before, as a sentence; empty where none is."""

    @property
    def last_step(self) -> int:
        """The last step in metrics.jsonl; a checkpoint may be older."""
        return max((int(row["step"]) for row in self.rows), default=0)

    def start(self, step: int) -> str:
        """Where the run goes on, and what was changed; `step` is that of its newest checkpoint, 0 where it has none."""
        place = f"the checkpoint of step {step}" if step else "the model, for there is no checkpoint"
        return f"{place}; changed: {self.changes}" if self.changes else place

    @classmethod
    def read(cls, folder: RunFolder, changes: str = "") -> History:
        """Read what is there, after `repair`.

        Raises:
            ConfigError: `run.json` is not there, or damaged.
            ValueError: a line of the files is no JSON.
        """
        identity = folder.read_identity()
        rows = [row for row in _lines(folder.metrics) if "loss" in row]
        evaluated = (Accuracy.of_event(event) for event in _lines(folder.events) if event["kind"] == "evaluated")
        first = next(evaluated, None)
        before = first if first is not None and first.newest == 0 else None
        wall_s = 0.0
        with suppress(StatusError):  # a command that ended before it said anything
            wall_s = read_status(folder.status).wall_s
        return cls(identity, rows, before, wall_s, changes)


def repair(folder: RunFolder) -> list[str]:
    """End the last line of each file of lines, or remove it where a crash cut it off; says which it changed.

    Raises:
        OSError: a file cannot be written.
    """
    done: list[str] = []
    for path in (folder.metrics, folder.events):
        if not path.exists():
            continue
        with path.open("rb+") as file:
            data = file.read()
            if not data or data.endswith(b"\n"):
                continue
            start = data.rfind(b"\n") + 1
            if _is_json(data[start:]):
                file.write(b"\n")
                done.append(f"the last line of {path.name} was not ended, and is now")
            else:
                file.truncate(start)
                done.append(f"{len(data) - start} bytes of a line that was cut off are removed from {path.name}")
    return done


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}, is no JSON: {error}; remove that line") from None
            yield row


def _is_json(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except ValueError:
        return False
