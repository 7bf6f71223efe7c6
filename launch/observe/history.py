"""History: what a run's folder tells the command that resumes it of the commands before."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.observe.status import Accuracy, StatusError, read_status
from launch.run_folder import RunFolder, RunIdentity


@dataclass(frozen=True)
class History:
    """Everything before this command."""

    identity: RunIdentity
    last_step: int
    """The last step in metrics.jsonl; a checkpoint may be older."""
    before: Accuracy | None
    """The first evaluation, of a model that is not trained yet; None where there was none."""
    wall_s: float
    """Seconds that the commands before worked on the run."""
    num_redone: int = 0
    changes: str = ""
    """Which keys of the config, and which contents, are other than before, as a sentence; empty where none is."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """As `contents` of launch.resume gives them now."""

    def start(self, step: int) -> str:
        """Where the run goes on, and what was changed; `step` is that of its newest checkpoint, 0 where it has none."""
        place = f"the checkpoint of step {step}" if step else "the model, for there is no checkpoint"
        return f"{place}; changed: {self.changes}" if self.changes else place

    @classmethod
    def read(cls, folder: RunFolder, changes: str = "", digests: Mapping[str, str] = {}) -> History:
        """Read what is there, after `repair`.

        Raises:
            ConfigError: `run.json` is not there, or damaged.
            ValueError: a line of the files is no JSON.
        """
        identity = folder.read_identity()
        last_step = max(lines_by_step(folder.metrics), default=0)
        evaluated = (Accuracy.of_event(event) for event in _lines(folder.events) if event["kind"] == "evaluated")
        first = next(evaluated, None)
        before = first if first is not None and first.policy_version == 0 else None
        wall_s, num_redone = 0.0, 0
        with suppress(StatusError):  # a command that ended before it said anything
            status = read_status(folder.status)
            wall_s, num_redone = status.wall_s, status.steps_redone
        return cls(identity, last_step, before, wall_s, num_redone, changes, digests)


def repair(folder: RunFolder) -> list[str]:
    """End the last line of each file of lines, or remove it where a crash cut it off; says which it changed.

    Raises:
        OSError: a file cannot be written.
    """
    done: list[str] = []
    for path in (folder.metrics, folder.events, folder.evaluations):
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


def lines_by_step(path: Path) -> dict[int, str]:
    """Return the row of each step as a line."""
    return {row["step"]: f"{json.dumps(row)}\n" for row in _lines(path)}


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
