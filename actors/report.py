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
