"""RunData: all that the report knows of one run, and the curves of metrics.jsonl."""

from __future__ import annotations

import json
import math
import tomllib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from buffer.errors import BufferError
from launch.observe.metrics import POOL_PREFIX
from launch.observe.status import Accuracy
from launch.report.samples import BufferData, read_buffer
from launch.report.svg import Point
from launch.report.timeline import Timeline, read_timeline
from launch.run_folder import RunFolder, owner_of

FIRST_EVENTS, LAST_EVENTS = 60, 240
"""That are shown of a run with more."""
BUFFER_LIMIT_S = 12.0
MAX_EVENT_TEXT = 1200
"""Characters of an event on the page."""
MAX_BUCKETS = 300
"""Of one curve; each shows its least and its greatest value."""
CURVES = (
    *("reward/mean", "loss", "grad_norm", "length/trained_mean", "lag/token_mean", "lag/token_max"),
    *("mismatch/lag0_abs", "mismatch/k3", "off_policy/ess_token", "off_policy/ess_sequence"),
    *("perf/generated_tokens_per_s", "perf/trained_tokens_per_s", "buffer/ledger_gap"),
    *("time/weight_pause", "time/wait_for_policy"),
)
"""Metrics that the page draws or sums up, beside those of pools and of `TIMES`."""
TIMES = ("wait_for_batch", "reference", "forward", "loss", "backward", "optimizer", "publish")
"""What a step's time is spent on."""
OTHER = "other"
TOKENS = "batch/completion_tokens"


class Series:
    """A metric over the steps, 16 bytes each."""

    def __init__(self) -> None:
        self._x, self._y = array("d"), array("d")

    def add(self, x: float, y: float) -> None:
        """One more point, with x growing."""
        self._x.append(x)
        self._y.append(y)

    def go_back(self, x: float) -> None:
        """Forget what is not before x."""
        while self._x and self._x[-1] >= x:
            self._x.pop()
            self._y.pop()

    @property
    def points(self) -> list[Point]:
        """At most 2 * MAX_BUCKETS, in order of x."""
        return thinned(list(zip(self._x, self._y, strict=True)))

    @property
    def total(self) -> float:
        """Of all points."""
        return math.fsum(self._y)

    @property
    def mean(self) -> float | None:
        """Of all points; None where there is none."""
        return self.total / len(self._y) if self._y else None

    def mean_at_ends(self, share: float) -> tuple[float, float] | None:
        """Means of the first and of the last points, this share of all of them; None where there is no point."""
        num = max(1, int(share * len(self._y)))
        return (math.fsum(self._y[:num]) / num, math.fsum(self._y[-num:]) / num) if self._y else None


def thinned(points: Sequence[Point], most: int = MAX_BUCKETS) -> list[Point]:
    """The least and the greatest point of each of `most` buckets of neighbours, so that every spike stays."""
    width = max(1, math.ceil(len(points) / most))
    if width <= 2:
        return list(points)
    found: list[Point] = []
    for start in range(0, len(points), width):
        bucket = points[start : start + width]
        found += sorted({min(bucket, key=_height), max(bucket, key=_height)})
    return found


def _height(point: Point) -> float:
    return point[1]


@dataclass
class Metrics:
    """What metrics.jsonl says."""

    series: dict[str, Series] = field(default_factory=dict)
    """By metric, over steps."""
    last: dict[str, Any] = field(default_factory=dict)
    """The newest row of a step."""
    num_steps: int = 0
    version: int = 0

    def take_in(self, row: dict[str, Any]) -> None:
        """One row of a step; a step that is taken again counts as it was taken last."""
        step = row["step"]
        if step <= self.num_steps:
            for series in self.series.values():
                series.go_back(step)
        self.num_steps, self.version, self.last = step, row.get("version", self.version), row
        wanted = (*CURVES, *(f"time/{name}" for name in TIMES), *(name for name in row if name.startswith(POOL_PREFIX)))
        values = {name: value for name in wanted if _is_finite(value := row.get(name))}
        if _is_finite(whole := row.get("time/step")):
            values[OTHER] = max(0.0, whole - math.fsum(values.get(f"time/{name}", 0.0) for name in TIMES[1:]))
        if _is_finite(tokens := row.get(TOKENS)) and not row.get("skipped"):
            values[TOKENS] = tokens
        for name, value in values.items():
            self.series.setdefault(name, Series()).add(step, value)

    def of(self, name: str) -> list[Point]:
        """A curve; empty where the run has none."""
        return self.series[name].points if name in self.series else []

    def mean(self, name: str) -> float | None:
        """Over all steps; None where there is none."""
        return self.series[name].mean if name in self.series else None

    @property
    def trained_tokens(self) -> int:
        """Completion tokens of the steps whose rows are there."""
        return int(self.series[TOKENS].total) if TOKENS in self.series else 0

    @property
    def seconds(self) -> dict[str, float]:
        """What the learner's time was spent on: by `TIMES` and "other"."""
        names = {**{f"time/{name}": name for name in TIMES}, OTHER: OTHER}
        return {name: self.series[key].total for key, name in names.items() if key in self.series}


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _json_lines(path: Path, torn: list[int]) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; the numbers of lines that cannot be read go to `torn`."""
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield decode(line)
            except msgspec.MsgspecError:
                torn.append(number)


@dataclass
class Events:
    """What happened, in order; of a run with many the first and the last."""

    shown: list[dict[str, Any]] = field(default_factory=list)
    num_left_out: int = 0
    evaluations: list[Accuracy] = field(default_factory=list)
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
    timeline: Timeline | None = None
    buffer: BufferData | None = None
    exit_status: int | None = None
    """Of the command that worked on the run last; None while it lives, or where it was killed."""
    is_live: bool = False
    """A command works on it now."""
    missing: list[str] = field(default_factory=list)
    """What could not be read, a sentence each."""

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
        return max(self.metrics.num_steps, self.timeline.num_steps if self.timeline is not None else 0)

    @property
    def trained_tokens(self) -> int:
        """Completion tokens, by the same rule; that of the two which has more steps has more of them."""
        return max(self.metrics.trained_tokens, self.timeline.trained_tokens if self.timeline is not None else 0)

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
    return run


def _why_not(error: OSError | ValueError, folder: RunFolder) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(str(error.filename)).name} is not there{_CONSEQUENCES.get(Path(str(error.filename)).name, '')}."
    return f"Part of {folder.root} cannot be read: {error}."


_CONSEQUENCES = {
    "summary.json": ": the run has not ended, or it failed or was killed before it could write it",
    "metrics.jsonl": ", so there are no curves",
    "events.jsonl": ", so there are no events and no accuracies",
    "timeline.json": ": the run is of an older Leeway, or it ended before it began",
    "config.toml": ", so the config is not known",
}


def _read_config(folder: RunFolder, run: RunData) -> None:
    run.config = tomllib.loads(folder.config.read_text(encoding="utf-8"))


def _read_metrics(folder: RunFolder, run: RunData) -> None:
    torn: list[int] = []
    for row in _json_lines(folder.metrics, torn):
        # rows of an evaluation have a step too, and no version of the learner
        if isinstance(row.get("step"), int) and isinstance(row.get("version"), int):
            run.metrics.take_in(row)
    if torn:
        run.missing.append(f"{_lines(len(torn))} of metrics.jsonl could not be read and left out.")
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
    run.timeline = read_timeline(folder.timeline)
    if run.timeline is None:
        run.missing.append("timeline.json is empty, so there is no timeline.")


def _read_events(folder: RunFolder, run: RunData) -> None:
    torn: list[int] = []
    events = list(_json_lines(folder.events, torn))
    for event in events:
        _note(run.events, event)
    run.events.num_left_out = max(0, len(events) - FIRST_EVENTS - LAST_EVENTS)
    run.events.shown = events[:FIRST_EVENTS] + events[FIRST_EVENTS + run.events.num_left_out :]
    for event in run.events.shown:
        text = str(event.get("text", ""))
        if len(text) > MAX_EVENT_TEXT:
            event["text"] = f"{text[:MAX_EVENT_TEXT]} ... and {len(text) - MAX_EVENT_TEXT:,} more characters"
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
        events.evaluations.append(Accuracy.of_event(event))


def version_of(accuracy: Accuracy) -> int:
    """Number of the newest version that was evaluated; 0 where it is not known."""
    numbers = [each.rpartition(".")[2] for each in accuracy.versions.split(", ")]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


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
