"""All that the report knows of one run."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buffer.errors import BufferError
from launch.report.samples import BufferData, read_buffer
from launch.report.series import Metrics, read_json_lines, read_metrics
from launch.report.spans import Lanes, read_lanes
from launch.run_folder import RunFolder, owner_of

FIRST_EVENTS, LAST_EVENTS = 60, 240
"""That are shown of a run with more."""
BUFFER_LIMIT_S = 12.0
MAX_EVENT_TEXT = 1200
"""Characters of an event on the page."""


@dataclass(frozen=True)
class Evaluation:
    """Held-out accuracy of one version."""

    version: int
    greedy: float | None
    sampled: float | None
    num_problems: int


@dataclass
class Events:
    """What happened, in order; of a run with many the first and the last."""

    shown: list[Mapping[str, Any]] = field(default_factory=list)
    num_left_out: int = 0
    evaluations: list[Evaluation] = field(default_factory=list)
    failed: str = ""
    """Why the run failed, where it said so."""
    interrupted: bool = False


@dataclass
class RunData:
    """One run."""

    name: str
    root: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved config, as TOML has it."""
    metrics: Metrics = field(default_factory=Metrics)
    events: Events = field(default_factory=Events)
    summary: Mapping[str, Any] | None = None
    lanes: Lanes | None = None
    buffer: BufferData | None = None
    exit_status: int | None = None
    """Of the command that worked on the run last; None while it lives, or where it was killed."""
    is_live: bool = False
    """A command works on it now."""
    missing: list[str] = field(default_factory=list)
    """What could not be read, a sentence each."""
    read_s: float = 0.0
    """How long reading took."""

    @property
    def ended(self) -> str:
        """How the run ended, in a word or two."""
        known = {0: "finished", 1: "failed", 130: "interrupted"}
        if self.exit_status is not None:
            return known.get(self.exit_status, f"ended with {self.exit_status}")
        if self.is_live:
            return "running"
        if self.events.failed:
            return "failed"
        if self.summary is None:
            return "no end recorded"
        return "interrupted" if self.summary.get("accuracy_after") is None and self.events.interrupted else "finished"

    @property
    def num_steps(self) -> int:
        """Of metrics.jsonl, or of the timeline, which has those too that tracking.log_every leaves out."""
        return max(self.metrics.num_steps, self.lanes.num_steps if self.lanes is not None else 0)

    @property
    def trained_tokens(self) -> int:
        """Completion tokens, by the same rule; that of the two which has more steps has more of them."""
        return max(self.metrics.spent.tokens, self.lanes.trained_tokens if self.lanes is not None else 0)

    @property
    def ledger(self) -> Mapping[str, int] | None:
        """Of the summary, else of the buffer as it lies there."""
        if self.summary is not None and isinstance(self.summary.get("ledger"), dict):
            return dict(self.summary["ledger"])
        return self.buffer.ledger if self.buffer is not None else None

    def knob(self, dotted: str) -> Any:  # noqa: ANN401 -- any TOML value
        """A value of the config; None where it is unset or unknown."""
        value: Any = self.config
        for key in dotted.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


def collect(folder: RunFolder, *, buffer_limit_s: float = BUFFER_LIMIT_S) -> RunData:
    """Read what there is of a run. Nothing that is missing, torn or damaged is an error: `missing` names it.

    Args:
        folder: of the run; it may be live.
        buffer_limit_s: how long to look at the buffer, which may hold millions of groups.
    """
    began = time.monotonic()
    run = RunData(folder.name, folder.root)
    for read in (_read_config, _read_metrics, _read_events, _read_summary, _read_end, _read_timeline):
        try:
            read(folder, run)
        except (OSError, ValueError) as error:
            run.missing.append(_why_not(error, folder))
    try:
        run.buffer = read_buffer(folder.root, buffer_limit_s)
    except (BufferError, OSError, ValueError) as error:
        run.missing.append(f"The buffer cannot be read, so there are no samples and no distributions: {error}.")
    else:
        _tell_of_buffer(run, run.buffer)
    run.read_s = time.monotonic() - began
    return run


def _why_not(error: OSError | ValueError, folder: RunFolder) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(str(error.filename)).name} is not there{_CONSEQUENCES.get(Path(str(error.filename)).name, '')}."
    return f"Part of {folder.root} cannot be read: {error}."


_CONSEQUENCES = {
    "summary.json": ": the run has not ended, or it failed or was killed before it could write it",
    "metrics.jsonl": ", so there are no curves",
    "events.jsonl": ", so there are no events and no accuracies",
    "timeline.jsonl": ": the run is of an older Leeway, or it ended before it began",
    "config.toml": ", so the config is not known",
}


def _read_config(folder: RunFolder, run: RunData) -> None:
    run.config = tomllib.loads(folder.config.read_text(encoding="utf-8"))


def _read_metrics(folder: RunFolder, run: RunData) -> None:
    run.metrics = read_metrics(folder.metrics)
    if run.metrics.num_torn:
        run.missing.append(f"{_lines(run.metrics.num_torn)} of metrics.jsonl could not be read and left out.")
    if not run.metrics.num_steps:
        run.missing.append("metrics.jsonl has no step yet, so there are no curves.")


def _read_summary(folder: RunFolder, run: RunData) -> None:
    run.summary = _read_object(folder.summary)


def _read_end(folder: RunFolder, run: RunData) -> None:
    if folder.status.is_file():  # a run of an older Leeway has none, and its summary says enough
        ended = _read_object(folder.status).get("ended")
        run.exit_status = ended.get("exit_status") if isinstance(ended, dict) else None
        run.is_live = run.exit_status is None and owner_of(folder) is not None


def _read_object(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} holds no object")  # noqa: TRY004 -- as of what is no JSON
    return found


def _read_timeline(folder: RunFolder, run: RunData) -> None:
    run.lanes = read_lanes(folder.timeline)
    if run.lanes is None:
        run.missing.append("timeline.jsonl is empty, so there is no timeline.")


def _read_events(folder: RunFolder, run: RunData) -> None:
    torn: list[int] = []
    events = run.events
    first: list[Mapping[str, Any]] = []
    last: list[Mapping[str, Any]] = []
    for event in read_json_lines(folder.events, torn):
        _note(events, event)
        text = str(event.get("text", ""))
        if len(text) > MAX_EVENT_TEXT:
            event["text"] = f"{text[:MAX_EVENT_TEXT]} ... and {len(text) - MAX_EVENT_TEXT:,} more characters"
        if len(first) < FIRST_EVENTS:
            first.append(event)
            continue
        last.append(event)
        if len(last) > LAST_EVENTS:
            last.pop(0)
            events.num_left_out += 1
    events.shown = first + last
    if torn:
        run.missing.append(f"{_lines(len(torn))} of events.jsonl could not be read and left out.")


def _note(events: Events, event: Mapping[str, Any]) -> None:
    kind, text = event.get("kind"), str(event.get("text", ""))
    if kind == "resumed":  # what ended it before is over
        events.failed, events.interrupted = "", False
    if kind == "failed":
        events.failed = text
    if kind == "interrupt":
        events.interrupted = True
    if kind == "evaluated":
        versions = list(_versions(str(event.get("eval/version", ""))))
        greedy, sampled = event.get("eval/accuracy_greedy"), event.get("eval/accuracy_sampled")
        if versions:
            events.evaluations.append(Evaluation(max(versions), greedy, sampled, event.get("eval/num_problems") or 0))


def _versions(text: str) -> Iterator[int]:
    for each in text.split(","):
        number = each.rpartition(".")[2]
        if number.isdigit():
            yield int(number)


def _tell_of_buffer(run: RunData, buffer: BufferData) -> None:
    if buffer.num_looked_at < buffer.num_groups and buffer.num_looked_at:
        run.missing.append(
            f"Of {buffer.num_groups:,} groups in the buffer the first {buffer.num_looked_at:,} were looked at: "
            "there was no time for more."
        )
    if buffer.damaged:
        run.missing.append(f"{buffer.damaged[0]}. `leeway buffer verify {run.root}` names all that is damaged.")


def _lines(number: int) -> str:
    return f"{number} line{'s' * (number > 1)}"


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The keys of a config with their values, as text."""
    for key, value in config.items():
        if isinstance(value, Mapping) and (not prefix or prefix.startswith("pools.")):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, ensure_ascii=False, default=str)
