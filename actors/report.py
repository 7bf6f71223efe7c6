"""Reports of an actor to the launcher: counts, busy intervals, what it waits for, and evaluation results."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from leeway.actors.engine_output import EngineReport
from leeway.actors.rewards import FailingReward
from leeway.common.process import wall_time
from leeway.common.staleness import PolicyVersion

_MAX_INTERVALS = 4096
"""Maximum number of intervals between reports; the oldest are dropped beyond it."""


def actor_name(number: int) -> str:
    """Return the name of an actor in reports, leases and trajectories."""
    return f"actor-{number}"


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One update of the engine's weights. Generation is paused from start to end."""

    start_s: float
    end_s: float
    load_s: float
    """Seconds of the pause that the reload took."""
    version: tuple[int, int]

    @property
    def pause_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class ActorReport:
    """Report of one actor, in plain values. Counts are since the actor's start, lists since the last report."""

    name: str
    pool: str
    version: tuple[int, int]
    task_fingerprint: str
    """Must be equal for all actors; otherwise their prompt ids refer to different prompts."""
    num_samples: int
    num_tokens: int
    num_outcomes: dict[str, int]
    """Pushed trajectories by outcome: committed, duplicate, late, quarantined."""
    failing: list[FailingReward]
    """Reward functions that failed on their last sample after all retries."""
    num_tokens_lost: int
    """Tokens of samples that were lost with their lease or could not be requeued; they are generated again."""
    settled_s: float
    """Sum over samples of the seconds from the last token to the buffer's acknowledgement."""
    num_running: int
    num_slots: int
    """Maximum of `num_running`: as configured, or the number of samples that the cache is likely to hold if lower."""
    running_s: float
    """Sum of the seconds of training requests in the engine; divided by wall time, it is their mean number."""
    busy_intervals: list[tuple[float, float]]
    """Wall-clock (start, end), seconds since the epoch, while a training request was running."""
    refused: str
    """The last rejected version and the reason; empty once the engine serves the newest version."""
    updates: list[WeightUpdate]
    requeue_at: int
    """Tokens at which samples are requeued to a faster pool; 0: never."""
    waiting: str
    """Reason why the actor does not run more samples, or a group does not complete; empty if there is none."""
    waiting_s: float
    """Seconds of that wait; 0.0 if unknown."""
    engine: EngineReport


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
    """Counts of answers, one per problem. Shards are added field by field."""

    num_correct: int = 0
    num_scored: int = 0
    num_failed: int = 0
    """Answers neither correct nor wrong: generation or a reward function failed, or no function applied."""

    def __add__(self, other: EvalCounts) -> EvalCounts:
        return EvalCounts(
            self.num_correct + other.num_correct,
            self.num_scored + other.num_scored,
            self.num_failed + other.num_failed,
        )

    @property
    def accuracy(self) -> float | None:
        """Return the fraction of scored answers that are correct; None if none was scored."""
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
        """Return the sum of the seconds of all requests so far."""
        self._count()
        return self._running_s

    def _count(self) -> float:
        now_s = self._wall()
        self._running_s += self.num_running * max(0.0, now_s - self._changed_s)
        self._changed_s = now_s
        return now_s

    def take(self) -> list[tuple[float, float]]:
        """Return the intervals since the last call; an open interval is split at this time."""
        if self.num_running:
            now = self._wall()
            self._closed.append((self._since_s, now))
            self._since_s = now
        intervals = list(self._closed)
        self._closed.clear()
        return intervals
