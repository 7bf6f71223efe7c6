"""Curves: metrics.jsonl, thinned so that a run of any length fits on a page and every spike stays."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import msgspec

from launch.observe.metrics import POOL_PREFIX

Point = tuple[float, float]

MAX_BUCKETS = 300
"""Of one curve; each shows its least and its greatest value."""

CURVES = (
    *("reward/mean", "loss", "grad_norm", "lr", "length/trained_mean", "length/fidelity_ks"),
    *("lag/token_mean", "lag/token_p95", "lag/token_max", "lag/in_flight", "lag/in_queue", "lag/publish"),
    *("mismatch/lag0_abs", "mismatch/k3", "off_policy/ess_token", "off_policy/ess_sequence"),
    *("perf/generated_tokens_per_s", "perf/trained_tokens_per_s", "actors/running_samples", "buffer/ledger_gap"),
    *("time/wait_for_batch", "time/step", "time/weight_pause", "time/wait_for_policy"),
)
TIMES = ("wait_for_batch", "reference", "forward", "loss", "backward", "optimizer", "publish")
"""What a step's time is spent on."""


class _Bucket(NamedTuple):
    """Neighbouring points."""

    num: int
    total: float
    low: Point
    high: Point

    def with_(self, other: _Bucket) -> _Bucket:
        """Both, in one."""
        low, high = min(self.low, other.low, key=_height), max(self.high, other.high, key=_height)
        return _Bucket(self.num + other.num, self.total + other.total, low, high)


class Series:
    """One curve, with x growing. Memory is bounded: where it has too many buckets, neighbours become one."""

    def __init__(self, max_buckets: int = MAX_BUCKETS) -> None:
        self.num_points = 0
        self.total = 0.0
        self._max_buckets = max_buckets
        self._width = 1
        self._buckets: list[_Bucket] = []

    def add(self, x: float, y: float) -> None:
        """One more point."""
        self.num_points += 1
        self.total += y
        new = _Bucket(1, y, (x, y), (x, y))
        if self._buckets and self._buckets[-1].num < self._width:
            self._buckets[-1] = self._buckets[-1].with_(new)
            return
        self._buckets.append(new)
        if len(self._buckets) > self._max_buckets:
            self._width *= 2
            pairs = zip(self._buckets[::2], self._buckets[1::2], strict=False)
            rest = self._buckets[-1:] if len(self._buckets) % 2 else []
            self._buckets = [first.with_(second) for first, second in pairs] + rest

    def go_back(self, x: float) -> None:
        """Forget what is not before x, as far as the buckets tell it apart."""
        while self._buckets and max(self._buckets[-1].low[0], self._buckets[-1].high[0]) >= x:
            bucket = self._buckets.pop()
            self.num_points -= bucket.num
            self.total -= bucket.total

    @property
    def points(self) -> list[Point]:
        """At most two for each bucket, in order of x."""
        return [point for bucket in self._buckets for point in sorted({bucket.low, bucket.high})]

    @property
    def mean(self) -> float | None:
        """Of all points that were added."""
        return self.total / self.num_points if self.num_points else None

    def mean_at_ends(self, share: float) -> tuple[float, float] | None:
        """Means of the first and of the last points, this share of all of them; None where there is no point."""
        num = max(1, int(share * self.num_points))
        return (_mean_of(self._buckets, num), _mean_of(self._buckets[::-1], num)) if self._buckets else None

    @property
    def last(self) -> float | None:
        """The newest value, or the greater of the newest bucket."""
        return self.points[-1][1] if self._buckets else None


def _height(point: Point) -> float:
    return point[1]


def _mean_of(buckets: Sequence[_Bucket], num: int) -> float:
    """Of the first `num` points; of a bucket that is only partly among them its mean stands for each."""
    left, total = num, 0.0
    for bucket in buckets:
        taken = min(left, bucket.num)
        total += bucket.total * taken / bucket.num
        left -= taken
    return total / (num - left)


class Spent:
    """Tokens and seconds of every step; of one that is taken again only the last time counts. 80 bytes a step."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._tokens = array("q")
        self._seconds = {name: array("d") for name in (*TIMES, "other")}

    def add(self, step: int, tokens: int, seconds: Mapping[str, float]) -> None:
        """A step, which takes back those from it on."""
        columns: list[array[Any]] = [self._steps, self._tokens, *self._seconds.values()]
        while self._steps and self._steps[-1] >= step:
            for column in columns:
                column.pop()
        self._steps.append(step)
        self._tokens.append(tokens)
        for name, column in self._seconds.items():
            column.append(seconds.get(name, 0.0))

    @property
    def tokens(self) -> int:
        """Of all steps."""
        return sum(self._tokens)

    @property
    def seconds(self) -> dict[str, float]:
        """By what they were spent on."""
        return {name: math.fsum(column) for name, column in self._seconds.items()}


@dataclass
class Metrics:
    """What metrics.jsonl says."""

    series: dict[str, Series] = field(default_factory=dict)
    """By metric, over steps."""
    last: dict[str, Any] = field(default_factory=dict)
    """The newest row of a step."""
    num_steps: int = 0
    version: int = 0
    spent: Spent = field(default_factory=Spent)
    """Of the steps whose rows are there; seconds on each of `TIMES`, and as `other`."""
    num_torn: int = 0
    """Lines that could not be read."""

    def take_in(self, row: dict[str, Any]) -> None:
        """One row of a step; a step that is taken again counts as it was taken last."""
        step = row["step"]
        if step <= self.num_steps:
            for series in self.series.values():
                series.go_back(step)
        self.num_steps, self.version, self.last = step, row.get("version", self.version), row
        names = [name for name in row if name.startswith(POOL_PREFIX)]
        for name in (*CURVES, *names):
            value = row.get(name)
            if _is_finite(value):
                self.series.setdefault(name, Series()).add(step, value)
        seconds = {name: value for name in TIMES if _is_finite(value := row.get(f"time/{name}"))}
        whole = row.get("time/step")
        if _is_finite(whole):
            known = math.fsum(value for name, value in seconds.items() if name != "wait_for_batch")
            seconds["other"] = max(0.0, whole - known)
        tokens = row.get("batch/completion_tokens")
        self.spent.add(step, int(tokens) if _is_finite(tokens) and not row.get("skipped") else 0, seconds)

    def of(self, name: str) -> list[Point]:
        """A curve; empty where the run has none."""
        return self.series[name].points if name in self.series else []

    def mean(self, name: str) -> float | None:
        """Over all steps; None where there is none."""
        return self.series[name].mean if name in self.series else None


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_json_lines(path: Path, torn: list[int]) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; the numbers of lines that cannot be read go to `torn`.

    Raises:
        OSError: there is no file, or it cannot be read.
    """
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield decode(line)
            except msgspec.MsgspecError:
                torn.append(number)


def read_metrics(path: Path) -> Metrics:
    """The curves of a run.

    Raises:
        OSError: there is no file, or it cannot be read.
    """
    metrics = Metrics()
    torn: list[int] = []
    for row in read_json_lines(path, torn):
        # rows of an evaluation have a step too, and no version of the learner
        if isinstance(row.get("step"), int) and isinstance(row.get("version"), int):
            metrics.take_in(row)
    metrics.num_torn = len(torn)
    return metrics


def bounds(values: Iterable[float]) -> tuple[float, float] | None:
    """Least and greatest; None of nothing."""
    known = list(values)
    return (min(known), max(known)) if known else None
