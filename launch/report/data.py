"""`RunData`, the input of the report on one run, with its curves (`Metrics`) and some samples (`BufferData`)."""

from __future__ import annotations

import math
import random
import time
import tomllib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from leeway.buffer.errors import BufferError
from leeway.common.staleness import PolicyVersion
from leeway.launch.observe import trace
from leeway.launch.observe.status import BufferStatus, RunStatus, StatusError, StatusView, view_run
from leeway.launch.run_folder import RunFolder, read_json_lines
from leeway.launch.text import TextOf, number, printable

if TYPE_CHECKING:
    from leeway.buffer.offline.inspect import Inspection

Point = tuple[float, float]
MAX_EVENTS = 300
BUFFER_LIMIT_S = 12.0
"""Time limit for reading the buffer, which may hold millions of groups."""
MAX_EVENT_TEXT, MAX_TEXT = 1200, 4000
"""Maximum number of characters of an event on the page, and of a prompt or a completion."""
MAX_BUCKETS = 300
"""Maximum number of buckets per curve; a bucket is drawn as its minimum and its maximum."""
TIMES = {
    "wait_for_batch": "waiting for a batch",
    "reference": "reference model",
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "optimizer": "optimizer",
    "publish": "copying weights",
    "other": "other",
}
"""`time/` metrics of a step -> labels of the learner's time; "other" is the rest of `time/step`."""
NO_BUFFER = BufferStatus(
    ready_groups=0,
    drawn_groups=0,
    groups_per_step=0,
    ledger={},
    failed_by_reason={},
    fidelity_ks=0.0,
    is_draining=False,
)
UNKNOWN = RunStatus(run="", run_id="", folder="", pid=0, host="", started_s=0.0, num_steps=0, max_lag="unknown")
"""Placeholder for a missing status."""


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return the minimum and maximum of each of MAX_BUCKETS buckets of consecutive points, which preserves spikes."""
    width = max(1, math.ceil(len(points) / MAX_BUCKETS))
    if width <= 2:
        return list(points)
    found: list[Point] = []
    for start in range(0, len(points), width):
        bucket = points[start : start + width]
        found += sorted({min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])})
    return found


@dataclass
class Metrics:
    """Rows of the steps, stored in columns with 8 bytes per value; a missing value is NaN."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    columns: dict[str, array[float]] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        return int(self.steps[-1]) if self.steps else 0

    def ingest(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                column = self.columns.setdefault(name, array("d"))
                column.extend([math.nan] * (len(self.steps) - len(column)))
                column.append(value)
        self.steps.append(row["step"])

    def points(self, name: str) -> list[Point]:
        """Return every (step, value) of a metric."""
        pairs = zip(self.steps, self.columns.get(name, ()), strict=False)  # columns may be shorter than `steps`
        return [(step, value) for step, value in pairs if not math.isnan(value)]

    def of(self, name: str) -> list[Point]:
        """Return the thinned curve of a metric; empty if the run has no values."""
        return thinned(self.points(name))

    def values(self, name: str) -> list[float]:
        return [value for _, value in self.points(name)]

    def mean(self, name: str) -> float | None:
        """Return the mean over all steps; None if there are no values."""
        values = self.values(name)
        return math.fsum(values) / len(values) if values else None

    def total(self, name: str) -> float:
        return math.fsum(self.values(name))

    @property
    def seconds(self) -> dict[str, float]:
        """Return the learner's seconds for each key of `TIMES`."""
        seconds = {name: self.total(f"time/{name}") for name in TIMES}
        in_steps = math.fsum(seconds.values()) - seconds["wait_for_batch"]
        return {**seconds, "other": max(0.0, self.total("time/step") - in_steps)}


class ShownSample(NamedTuple):
    """A sample of the buffer as text."""

    kind: str
    reward: float
    prompt: str | None
    """Prompt and completion are None if the run has no tokenizer."""
    completion: str | None
    facts: Sequence[str]


@dataclass
class BufferData:
    """Samples and damage found in the buffer of a run."""

    num_groups: int
    num_read: int = 0
    """Groups read within the time limit."""
    samples: list[ShownSample] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def read_buffer(root: Path, limit_s: float, clock: Callable[[], float] = time.monotonic) -> BufferData:
    """Read the buffer for up to `limit_s`; return the samples with the best and worst reward, and a random one.

    Raises:
        BufferError: the buffer is missing or unreadable.
        OSError: a file of the buffer cannot be read.
    """
    from leeway.buffer.offline.inspect import Inspection

    deadline, pick, num_rated = clock() + limit_s, random.Random(0), 0
    best, worst, other = (-math.inf, 0, 0), (math.inf, 0, 0), (0.0, 0, 0)  # reward, group, sample
    with Inspection.open(root) as inspection:
        data = BufferData(inspection.num_groups())
        for group in inspection.groups():
            data.num_read += 1
            row = group.row
            of_samples = enumerate(zip(row.rewards, row.records, row.completion_lengths, strict=True))
            rated = [
                (reward, row.group_id, index)
                for index, (reward, record, length) in of_samples
                if reward is not None and record >= 0 and length
            ]
            if rated:  # among samples with equal rewards, take the newest
                num_rated += 1
                best, worst = max(best, *rated), min(worst, *rated, key=lambda each: (each[0], -each[1]))
                other = pick.choice(rated) if pick.random() * num_rated < 1 else other
            if clock() > deadline:
                break
        if num_rated:
            decode = TextOf(inspection.folder)
            kinds = {best: "best reward", worst: "worst reward", other: "random"}
            data.samples = [
                shown
                for (_, group_id, index), kind in kinds.items()
                if (shown := _shown(inspection, group_id, index, kind, decode)) is not None
            ]
        data.damaged = list(dict.fromkeys(inspection.damaged))
    return data


def _shown(inspection: Inspection, group_id: int, index: int, kind: str, decode: TextOf) -> ShownSample | None:
    """Return a sample; None if its group was evicted meanwhile, or is damaged."""
    from leeway.buffer.offline.inspect import joined

    group = inspection.group(group_id)
    stored = [each for each in group.samples if each.sample_index == index] if group is not None else []
    if group is None or not stored:
        return None
    (row,) = joined(stored).to_pylist()
    state, uses = group.row.sample_states[index], group.row.trained_at
    versions = [str(PolicyVersion(each["incarnation"], each["version"])) for each in row["spans"]]
    facts = [
        f"{row['actor']}, version {' to '.join(dict.fromkeys((versions[0], versions[-1])))}",
        f"{len(row['logprobs'])} tokens, {row['finish_reason']}",
        f"{state}, record {stored[0].record_id}, group {group_id}, prompt {row['prompt_id']}",
    ]
    if state == "trained" and uses and group.oldest_version is not None:
        facts.append(f"lag {uses[-1].version - group.oldest_version} at step {uses[-1].step}")
    if len(row["reward_parts"]) > 1:
        facts.append(", ".join(f"{part['name']} {number(part['value'])}" for part in row["reward_parts"]))
    tokens, num_prompt = row["token_ids"], row["prompt_length"]
    prompt, completion = (_text(decode(each)) for each in (tokens[:num_prompt], tokens[num_prompt:]))
    return ShownSample(kind, row["reward"], prompt, completion, list(map(printable, facts)))


def _text(text: str | None) -> str | None:
    """Return a text with non-printable characters escaped, except line breaks."""
    if text is None:
        return None
    shown = "\n".join(printable(line.replace("\t", "    ")) for line in text[:MAX_TEXT].split("\n"))
    return shown + (f"\n... and {len(text) - MAX_TEXT} more characters" if len(text) > MAX_TEXT else "")


@dataclass
class RunData:
    name: str
    root: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    config_text: str = ""
    metrics: Metrics = field(default_factory=Metrics)
    events: list[dict[str, Any]] = field(default_factory=list)
    """The newest events, the oldest of them first."""
    num_older: int = 0
    """Number of omitted older events."""
    failed: str = ""
    """Reason of the failure; empty if the run did not fail."""
    seen: StatusView | None = None
    status: RunStatus = UNKNOWN
    spans: list[trace.Event] = field(default_factory=list)
    """Spans of the trace, sorted by start."""
    ready: list[Point] = field(default_factory=list)
    """Pairs of a wall time and the number of groups ready in the buffer."""
    start_s: float = 0.0
    """Wall time of the start of the first span."""
    buffer: BufferData | None = None
    missing: list[str] = field(default_factory=list)
    """One sentence per missing or unreadable part."""

    @property
    def exit_status(self) -> int | None:
        """Exit status of the last launch; None while the launch runs, or if the launch was killed."""
        ended = self.status.ended if self.seen is not None and not self.seen.resuming else None
        return ended.exit_status if ended is not None else None

    @property
    def ended(self) -> str:
        """State or outcome of the run in one or two words."""
        if self.seen is not None and not self.seen.gone:
            return "running" if self.seen.is_active else self.seen.outcome
        return "failed" if self.failed else "no end recorded"

    @property
    def num_steps(self) -> int:
        """Number of the last step; metrics.jsonl may lack the row of this step."""
        return max(self.metrics.num_steps, self.status.step)

    @property
    def counts(self) -> BufferStatus:
        """Counts of samples from the status; empty without a status."""
        return self.status.buffer or NO_BUFFER

    def knob(self, dotted: str) -> Any:  # noqa: ANN401 -- any TOML value
        """Return a value of the config; None if it is unset or unknown."""
        value: Any = self.config
        for key in dotted.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


# --- read ---------------------------------------------------------------------------------------------


def collect(folder: RunFolder) -> RunData:
    """Read the folder of a run, during or after the run.

    Missing, incomplete or damaged parts raise no error; `missing` lists them.
    """
    run = RunData(folder.name, folder.root)
    for read in (_read_config, _read_metrics, _read_events, _read_status, _read_timeline, _read_buffer):
        try:
            read(folder, run)
        except FileNotFoundError as error:
            run.missing.append(f"{Path(str(error.filename)).name} is missing.")
        except StatusError as error:
            run.missing.append(f"The status of the run is unknown: {error}.")
        except BufferError as error:
            run.missing.append(f"The buffer cannot be read, so there are no samples: {error}.")
        except (OSError, ValueError) as error:
            run.missing.append(f"Part of {folder.root} cannot be read: {error}.")
    return run


def _json_lines(path: Path, run: RunData) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines; add the number of unreadable lines to `missing`."""
    num_bad = 0
    for found in read_json_lines(path):
        if found is None:
            num_bad += 1
        else:
            yield found
    if num_bad:
        run.missing.append(f"Skipped {num_bad} unreadable line{'s' * (num_bad > 1)} of {path.name}.")


def _read_config(folder: RunFolder, run: RunData) -> None:
    text = folder.config.read_text(encoding="utf-8")
    run.config, run.config_text = tomllib.loads(text), "\n".join(map(printable, text.splitlines()))


def _read_metrics(folder: RunFolder, run: RunData) -> None:
    of_actors = {}
    if folder.actors.exists():  # runs of an older Leeway have all columns in metrics.jsonl
        of_actors = {row.get("step"): row for row in _json_lines(folder.actors, run)}
    for row in _json_lines(folder.metrics, run):
        # rows of evaluations have a step too, but no version
        if isinstance(row.get("step"), int) and isinstance(row.get("version"), int):
            run.metrics.ingest(row | of_actors.get(row["step"], {}))
    if not run.metrics.num_steps:
        run.missing.append("metrics.jsonl has no step yet, so there are no curves.")


def _read_events(folder: RunFolder, run: RunData) -> None:
    events = list(_json_lines(folder.events, run))
    for event in events:
        kind = event.get("kind")
        if kind in ("failed", "resumed"):  # a resume supersedes the failure
            run.failed = str(event.get("text", "")) if kind == "failed" else ""
    run.events, run.num_older = events[-MAX_EVENTS:], len(events[:-MAX_EVENTS])
    for event in run.events:
        text = str(event.get("text", ""))
        if len(text) > MAX_EVENT_TEXT:
            event["text"] = f"{text[:MAX_EVENT_TEXT]} ... and {len(text) - MAX_EVENT_TEXT:,} more characters"


def _read_status(folder: RunFolder, run: RunData) -> None:
    run.seen = view_run(folder)
    run.status = run.seen.status


def _read_timeline(folder: RunFolder, run: RunData) -> None:
    for event in trace.read(folder.timeline):
        if event.ph == "X":
            run.spans.append(event)
        elif event.name == "groups ready":
            run.ready.append((event.start_s, float(event.args.get("ready", 0))))
    run.spans.sort(key=lambda span: span.ts)
    if run.spans:
        run.start_s = run.spans[0].start_s
    else:
        run.missing.append("timeline.json is empty, so there is no timeline.")


def _read_buffer(folder: RunFolder, run: RunData) -> None:
    buffer = run.buffer = read_buffer(folder.root, BUFFER_LIMIT_S)
    if 0 < buffer.num_read < buffer.num_groups:
        run.missing.append(
            f"Only the first {buffer.num_read:,} of {buffer.num_groups:,} groups in the buffer were read within "
            f"{BUFFER_LIMIT_S:g} s."
        )
    if buffer.damaged:
        run.missing.append(f"{buffer.damaged[0]}. `leeway buffer verify {run.root}` lists all damage.")
