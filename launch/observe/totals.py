"""Aggregated metrics of a run: sums over the steps, counters and rates of actors, and overlap in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from leeway.actors.report import ActorReport

UNKNOWN_POOL = "unknown"
"""Name of the pool for tokens whose actor has never reported to this launcher."""
ACKNOWLEDGED = ("committed", "duplicate")
"""Outcomes of samples that the buffer stores; a duplicate was sent again after its acknowledgement was lost."""

ALL = ("all", "")


class TrainedTotals:
    """Sums over the rows of metrics.jsonl, one per step; recomputed when the learner resumes from an earlier step."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.lag_max = 0
        self.rewards: list[float] = []
        """Mean reward of each step."""
        self.restarts = 0
        """`restarts` of the newest row."""
        self.first_mismatch: float | None = None
        """`mismatch/lag0_abs` of the first row."""
        self._lag_total = 0.0
        self._lags: dict[str, Counter[int]] = {}
        self._is_empty = True

    def add(self, row: Mapping[str, Any]) -> None:
        if self._is_empty:
            self.first_mismatch, self._is_empty = row.get("mismatch/lag0_abs"), False
        self.restarts = int(row.get("restarts") or 0)
        if row.get("reward/mean") is not None:
            self.rewards.append(row["reward/mean"])
        for actor, lags in lags_of(row).items():
            self._lags.setdefault(actor, Counter()).update(lags)
        if row["skipped"]:
            return
        num_tokens = int(row["batch/completion_tokens"])
        self.num_tokens += num_tokens
        self._lag_total += num_tokens * (row["lag/token_mean"] or 0.0)
        self.lag_max = max(self.lag_max, int(row["lag/token_max"]))

    @property
    def lag_mean(self) -> float | None:
        """Mean lag in versions over all tokens that were trained on; None before the first step."""
        return self._lag_total / self.num_tokens if self.num_tokens else None

    def lags(self, pool_of: Mapping[str, str]) -> dict[str, dict[int, int]]:
        """Return the number of tokens trained on by pool and lag, sorted by lag; `pool_of` maps actors to pools."""
        found = by_pool(self._lags, pool_of)
        return {pool: {lag: counts[lag] for lag in sorted(counts)} for pool, counts in found.items()}


def lags_of(row: Mapping[str, Any]) -> dict[str, dict[int, int]]:
    """Return the number of tokens trained on in a step by actor and lag; empty for rows of an older Leeway."""
    by_actor = row.get("lag_by_actor") or {}
    return {actor: {int(lag): num for lag, num in lags.items()} for actor, lags in by_actor.items()}


def by_pool(lags: Mapping[str, Mapping[int, int]], pool_of: Mapping[str, str]) -> dict[str, Counter[int]]:
    """Return the number of tokens trained on by pool and lag."""
    found: dict[str, Counter[int]] = {}
    for actor, counts in lags.items():
        found.setdefault(pool_of.get(actor, UNKNOWN_POOL), Counter()).update(counts)
    return found


class Rate:
    """Events per second over a sliding window, computed from named running totals."""

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._points: list[tuple[float, dict[str, float]]] = []

    def update(self, now_s: float, totals: Mapping[str, float]) -> None:
        self._points.append((now_s, dict(totals)))
        while len(self._points) > 2 and self._points[1][0] < now_s - self._window_s:
            self._points.pop(0)

    def value(self, name: str) -> float:
        """Return the events per second up to the newest update; 0 before the second update."""
        if len(self._points) < 2:
            return 0.0
        (t0, before), (t1, after) = self._points[0], self._points[-1]
        return (after.get(name, 0.0) - before.get(name, 0.0)) / (t1 - t0) if t1 > t0 else 0.0


class CounterDelta:
    """Increments of counters of actors, which start at 0 in each new process."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, ...]] = {}

    def of(self, actor: str, *counts: float) -> tuple[float, ...]:
        """Return the increments since the last call; if a count decreased because of a restart, return the counts."""
        before = self._last.get(actor, (0,) * len(counts))
        self._last[actor] = counts
        new = tuple(now - then for now, then in zip(counts, before, strict=True))
        return counts if min(new) < 0 else new


class PoolEngines(msgspec.Struct, frozen=True, kw_only=True):
    """Engines of a pool: means over the last seconds, None without measurements, and totals of this launch."""

    slots: int = 0
    slots_used: float | None = None
    """Mean fraction of the slots in use."""
    tokens_per_sample: float | None = None
    """Mean number of tokens per ended completion."""
    step_s: float | None = None
    """Mean seconds per engine step; a step adds one token to every running sample."""
    queued_s: float | None = None
    """Mean seconds that a sample waits in its engine before its first step."""
    kv_usage: float = 0.0
    """Fraction of the KV cache in use, in the fullest engine."""
    preempted: int = 0
    """Number of times that a running sample was evicted from the KV cache."""
    tokens_lost: int = 0
    """Number of tokens in samples that were neither stored nor requeued; samples of killed actors are not counted."""
    kv_tokens: int = 0
    """Capacity of one engine's KV cache, in tokens."""
    requeue_at: int = 0
    """Number of tokens at which a sample is requeued to a faster pool; 0 disables requeuing."""
    moments: list[float] = []
    """Measurements of step time by engine load, in the format of `leeway.planning.costs.LeastSquares`."""
    settled_s: float | None = None
    """Mean seconds from a completion to its commit."""

    def metrics(self) -> dict[str, float | None]:
        """Return the metrics of a pool, keyed by the last part of their names in the registry."""
        step_ms, queued_ms = (None if each is None else 1e3 * each for each in (self.step_s, self.queued_s))
        shares = {"slots_used": self.slots_used, "kv_usage": self.kv_usage}
        counts = {"preempted": self.preempted, "tokens_lost": self.tokens_lost}
        return {**shares, "step_ms": step_ms, "queued_ms": queued_ms, **counts}


COUNTED: dict[str, Callable[[ActorReport], float]] = {
    "tokens": lambda report: report.num_tokens,
    "samples": lambda report: report.num_samples,
    "acknowledged": lambda report: sum(report.num_outcomes.get(outcome, 0) for outcome in ACKNOWLEDGED),
    "running_s": lambda report: report.running_s,
    "steps": lambda report: report.engine.moments[1] if report.engine.moments else 0,
    "steps_s": lambda report: report.engine.moments[2] if report.engine.moments else 0,
    "ended": lambda report: report.engine.num_ended,
    "queued_s": lambda report: report.engine.queued_s,
    "preempted": lambda report: report.engine.num_preempted,
    "tokens_lost": lambda report: report.num_tokens_lost,
}


class ActorTotals:
    """Totals and rates of the actors in this launch: over all actors, per pool and per actor."""

    def __init__(self) -> None:
        self.pool_of: dict[str, str] = {}
        """Maps an actor to its pool; also for exited actors, whose tokens may still be used for training."""
        self._deltas = CounterDelta()
        self._totals: dict[tuple[str, str], Counter[str]] = {ALL: Counter()}
        """Maps `ALL`, ("pool", name) or ("actor", name) to the totals by their names in `COUNTED`."""
        self._rates: dict[tuple[str, str], Rate] = {}

    def update(self, now_s: float, reports: Iterable[ActorReport], working: Iterable[str]) -> None:
        """Process a poll: reports of some actors, and the names of all working actors. `now_s` must not decrease."""
        for report in reports:
            self.pool_of[report.name] = report.pool
            new = self._deltas.of(report.name, *(count(report) for count in COUNTED.values()))
            for key in (ALL, ("pool", report.pool), ("actor", report.name)):
                self._totals.setdefault(key, Counter()).update(dict(zip(COUNTED, new, strict=True)))
        alive = set(working)
        for key, totals in self._totals.items():
            if key[0] != "actor" or key[1] in alive:
                self._rates.setdefault(key, Rate()).update(now_s, totals)
            else:
                self._rates.pop(key, None)

    def total(self, what: str, kind: str = ALL[0], name: str = ALL[1]) -> int:
        """Return the total of a pool, of an actor, or of all actors."""
        return int(self._totals.get((kind, name), Counter())[what])

    def per_s(self, what: str, kind: str = ALL[0], name: str = ALL[1]) -> float:
        """Return the rate per second over the last seconds."""
        rate = self._rates.get((kind, name))
        return 0.0 if rate is None else rate.value(what)

    def engines(self, pool: str, reports: Iterable[ActorReport]) -> PoolEngines:
        """Return the state of a pool's engines; `reports` are the newest reports of all working actors."""
        reports = [report for report in reports if report.pool == pool]
        slots = sum(report.num_slots for report in reports)
        moments = [report.engine.moments for report in reports if report.engine.moments]
        settled = sum(sum(report.num_outcomes.values()) for report in reports)

        def ratio(what: str, whole: str) -> float | None:
            wholes = self.per_s(whole, "pool", pool)
            return self.per_s(what, "pool", pool) / wholes if wholes else None

        return PoolEngines(
            slots=slots,
            slots_used=self.per_s("running_s", "pool", pool) / slots if slots else None,
            tokens_per_sample=ratio("tokens", "samples"),
            step_s=ratio("steps_s", "steps"),
            queued_s=ratio("queued_s", "ended"),
            kv_usage=max((report.engine.kv_usage for report in reports), default=0.0),
            preempted=self.total("preempted", "pool", pool),
            tokens_lost=self.total("tokens_lost", "pool", pool),
            kv_tokens=max((report.engine.kv_tokens for report in reports), default=0),
            requeue_at=max((report.requeue_at for report in reports), default=0),
            moments=[sum(each) for each in zip(*moments, strict=True)],
            settled_s=sum(report.settled_s for report in reports) / settled if settled else None,
        )


# --- intervals of time --------------------------------------------------------------------------------

Interval = tuple[float, float]
OPEN_STEPS = 64
"""Number of newest steps to which later reports of actors may still add overlap."""


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as sorted disjoint intervals."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def total(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in merge(intervals))


def shared(left: Sequence[Interval], right: Sequence[Interval]) -> float:
    return max(0.0, total(left) + total(right) - total([*left, *right]))


class OverlapMeter:
    """Fraction of step time in which actors generated. Old steps are kept only as sums, which bounds the memory."""

    def __init__(self) -> None:
        self._steps: list[Interval] = []
        self._busy: list[Interval] = []
        self._settled_s = self._settled_busy_s = 0.0

    def add_step(self, start_s: float, end_s: float) -> None:
        """Add a step of the learner, excluding the wait for its batch."""
        self._steps.append((start_s, end_s))
        if len(self._steps) > 2 * OPEN_STEPS:
            settled, self._steps = self._steps[:-OPEN_STEPS], self._steps[-OPEN_STEPS:]
            self._settled_s += total(settled)
            self._settled_busy_s += shared(settled, self._busy)
            self._busy = [each for each in self._busy if each[1] > self._steps[0][0]]

    def add_busy(self, intervals: Iterable[Interval]) -> None:
        """Add intervals in which an actor had at least one training request running."""
        self._busy = merge([*self._busy, *intervals])

    def fraction(self) -> float | None:
        """Return the fraction of step time in which at least one actor generated; None before the first step."""
        steps_s = self._settled_s + total(self._steps)
        return (self._settled_busy_s + shared(self._steps, self._busy)) / steps_s if steps_s else None
