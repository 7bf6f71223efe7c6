"""Reports of an actor to the launcher: counts, busy intervals, what it waits for, and evaluation results."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from leeway.actors.config import KvCache
from leeway.actors.rewards import FailingReward
from leeway.common.process import wall_time
from leeway.common.staleness import PolicyVersion

_MAX_INTERVALS = 4096
"""Maximum number of intervals that an actor keeps between two reports; older intervals are dropped."""


def actor_name(number: int) -> str:
    """Return the name of an actor in reports, leases and trajectories."""
    return f"actor-{number}"


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One update of the engine's weights. Generation is paused from start to end."""

    start_s: float
    end_s: float
    load_s: float
    """Seconds that loading the weights took within the pause."""
    version: tuple[int, int]

    @property
    def pause_s(self) -> float:
        return self.end_s - self.start_s


# --- engine statistics ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Counts since the engine's start; `kv_usage` is the peak fraction of the cache in use since the last report."""

    num_preempted: int = 0
    num_ended: int = 0
    queued_s: float = 0.0
    """Sum of the seconds that ended requests were queued in the engine before their first step."""
    kv_usage: float = 0.0
    moments: tuple[float, ...] = ()
    """Sums for a fit of step times by `leeway.planning.costs.LeastSquares`, without steps after a pause."""
    kv_tokens: int = 0
    """Capacity of the cache in tokens; 0 if unknown."""


class EngineStep(NamedTuple):
    """Facts of one step of an engine."""

    num_tokens: int
    """Sampled tokens: one per running sample."""
    num_prompt_tokens: int
    """Computed prompt tokens."""
    num_preempted: int
    num_running: int | None
    """Running requests; None if unknown."""
    kv_usage: float
    """Fraction of the cache in use."""
    queued_s: Sequence[float]
    """For each request that ended: seconds in the queue before the first step of the request."""
    seconds: float
    """Duration of the step; 0.0 unless a sample also ran in the previous step, with equal weights."""


class EngineStats:
    """Statistics of one engine. `record` is called once per step; each request runs within `request`."""

    def __init__(self) -> None:
        self._moments: npt.NDArray[np.float64] = np.zeros(3 + 4 + 4 * 4)
        """Sums for a fit of step times by `leeway.planning.costs.LeastSquares`; `record` defines the fit's terms."""
        self.num_steps = 0
        """Number of steps, including unmeasured ones; each step adds a token to every running sample."""
        self._running = 0
        self._prompt_tokens = 0
        self._first_steps = 0
        """Sum over the running requests of the step at which each began."""
        self._kv_usage = 0.0
        self._num_preempted = self._num_ended = 0
        self._num_in_step = 0
        self._num_interrupted = 0
        """Number of coming preemptions that a weight update causes; these preemptions are not counted."""
        self._queued_s = 0.0
        self.cache: KvCache | None = None

    @contextlib.contextmanager
    def request(self, num_prompt_tokens: int) -> Iterator[None]:
        """Count a request as running for the duration of the block."""
        began = self.num_steps
        self._running += 1
        self._prompt_tokens += num_prompt_tokens
        self._first_steps += began
        try:
            yield
        finally:
            self._running -= 1
            self._prompt_tokens -= num_prompt_tokens
            self._first_steps -= began

    def interrupt(self, recomputes: bool) -> None:
        """Record a weight update. With `recomputes`, the preemptions that the update causes are not counted."""
        self._num_interrupted = self._num_in_step if recomputes else 0

    def record(self, step: EngineStep) -> None:
        """Count one step of the engine."""
        self._kv_usage = max(self._kv_usage, step.kv_usage)
        self._num_in_step = self._num_in_step if step.num_running is None else step.num_running
        if not step.num_tokens:
            return
        self.num_steps += 1
        expected = min(self._num_interrupted, step.num_preempted)
        self._num_interrupted -= expected
        self._num_preempted += step.num_preempted - expected
        self._num_ended += len(step.queued_s)
        self._queued_s += sum(max(0.0, each) for each in step.queued_s)
        if step.seconds <= 0.0:
            return
        contexts = self._prompt_tokens + self._running * self.num_steps - self._first_steps
        terms = np.array([1.0, step.num_tokens, contexts, step.num_prompt_tokens])
        moments = [step.seconds**2, 1.0, step.seconds, *(step.seconds * terms), *np.outer(terms, terms).ravel()]
        self._moments += moments

    @property
    def step_s(self) -> float:
        """Return the mean duration of an engine step in seconds; 0 before the first measured step."""
        return float(self._moments[2] / self._moments[1]) if self._moments[1] else 0.0

    def report(self) -> EngineReport:
        """Return the counts, and reset the peak cache usage."""
        kv_usage, self._kv_usage = self._kv_usage, 0.0
        return EngineReport(
            num_preempted=self._num_preempted,
            num_ended=self._num_ended,
            queued_s=self._queued_s,
            kv_usage=kv_usage,
            moments=tuple(self._moments.tolist()) if self._moments[1] else (),
            kv_tokens=0 if self.cache is None else self.cache.num_blocks * self.cache.block_tokens,
        )


# --- reports --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ActorReport:
    """Report of one actor, in plain values. Counts cover the time since the start, lists since the last report."""

    name: str
    pool: str
    version: tuple[int, int]
    task_fingerprint: str
    """Must be equal for all actors, so that a prompt id refers to the same prompt in every actor."""
    num_samples: int
    num_tokens: int
    num_outcomes: dict[str, int]
    """Pushed trajectories by outcome: committed, duplicate, late, quarantined."""
    failing: list[FailingReward]
    """Reward functions that failed on their last sample after all retries."""
    num_tokens_lost: int
    """Tokens of samples that were lost with their lease or could not be requeued; the samples are generated again."""
    settled_s: float
    """Sum over samples of the seconds from the last token to the buffer's acknowledgement."""
    num_running: int
    num_slots: int
    """Maximum of `num_running`: the configured number, or fewer if the cache is likely to hold fewer samples."""
    running_s: float
    """Sum of the seconds that training requests spent in the engine; divide by wall time for their mean number."""
    busy_intervals: list[tuple[float, float]]
    """Intervals (start, end) with at least one running training request, in seconds since the epoch."""
    refused: str
    """The last rejected version and the reason; empty once the engine serves the newest version."""
    updates: list[WeightUpdate]
    requeue_at: int
    """Number of tokens at which a sample is requeued to a faster pool; 0 disables this."""
    waiting: str
    """Reason why the actor does not run more samples, or a group does not complete; empty if there is none."""
    waiting_s: float
    """Seconds that the actor has waited for the reason in `waiting`; 0.0 if unknown."""
    engine: EngineReport
    rewards: dict[float | None, int] = field(default_factory=dict)
    """Rewards of the newest answers in training and evaluation, with their counts."""
    num_cut: int = 0
    """Number of these answers that reached the length limit."""
    answers: list[str] = field(default_factory=list)
    """The last of these answers, with prompt and reward."""


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """Request to evaluate every `num_shards`-th of the first `num_problems` held-out problems, starting at `shard`."""

    num_problems: int
    shard: int = 0
    num_shards: int = 1
    min_version: PolicyVersion | None = None
    """Wait for this version or a newer one; None uses the version that the engine serves."""


@dataclass(frozen=True, slots=True)
class EvalCounts:
    """Counts of answers, with one answer per problem. The sum of two shards adds each field."""

    num_correct: int = 0
    num_scored: int = 0
    num_failed: int = 0
    """Number of answers without a score: generation or a reward function failed, or no reward function applied."""

    def __add__(self, other: EvalCounts) -> EvalCounts:
        return EvalCounts(
            self.num_correct + other.num_correct,
            self.num_scored + other.num_scored,
            self.num_failed + other.num_failed,
        )

    @property
    def accuracy(self) -> float | None:
        """Return the fraction of scored answers that are correct; None if no answer was scored."""
        return self.num_correct / self.num_scored if self.num_scored else None


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Evaluation result of one actor for its shard."""

    version: PolicyVersion
    num_problems: int
    greedy: EvalCounts
    sampled: EvalCounts


@dataclass(slots=True)
class Counts:
    """Counts for reports and for the drain result."""

    num_samples: int = 0
    num_tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    num_requeued: int = 0
    num_tokens_lost: int = 0
    settled_s: float = 0.0


class BusyClock:
    """Records the merged intervals with at least one running request, and the number of running requests."""

    def __init__(self, wall: Callable[[], float] = wall_time) -> None:
        self.num_running = 0
        self._wall = wall
        self._since_s = 0.0
        self._running_s = 0.0
        self._changed_s = 0.0
        self._closed: deque[tuple[float, float]] = deque(maxlen=_MAX_INTERVALS)

    def enter(self) -> None:
        now_s = self._count()
        if self.num_running == 0:
            self._since_s = now_s
        self.num_running += 1

    def leave(self) -> None:
        assert self.num_running > 0, "a request ended that never started"
        now_s = self._count()
        self.num_running -= 1
        if self.num_running == 0:
            self._closed.append((self._since_s, now_s))

    def running_s(self) -> float:
        """Return the sum of the seconds that all requests have run."""
        self._count()
        return self._running_s

    def _count(self) -> float:
        now_s = self._wall()
        self._running_s += self.num_running * max(0.0, now_s - self._changed_s)
        self._changed_s = now_s
        return now_s

    def take(self) -> list[tuple[float, float]]:
        """Return the intervals since the last call; an open interval is split at the present time."""
        if self.num_running:
            now = self._wall()
            self._closed.append((self._since_s, now))
            self._since_s = now
        intervals = list(self._closed)
        self._closed.clear()
        return intervals
