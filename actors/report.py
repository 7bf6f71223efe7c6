"""What an actor reports to the launcher: counts, when it was busy, what it waits for, and results of evaluations."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from actors.engine_output import EngineReport
from actors.rewards import FailingReward
from common.process import wall_time
from common.staleness import PolicyVersion

_MAX_INTERVALS = 4096
"""If nothing takes them, the oldest are dropped beyond this number."""


def actor_name(number: int) -> str:
    """Return the name of an actor in reports, leases and trajectories."""
    return f"actor-{number}"


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One update of the engine's weights. Generation paused from start to end."""

    start_s: float
    end_s: float
    load_s: float
    """Of the pause, what the reload took."""
    version: tuple[int, int]

    @property
    def pause_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class ActorReport:
    """Plain values only. Counts are since the start of the actor, lists since the last report."""

    name: str
    pool: str
    version: tuple[int, int]
    task_fingerprint: str
    """Equal for all actors, or they disagree about what a prompt id means."""
    num_samples: int
    num_tokens: int
    num_outcomes: dict[str, int]
    """Pushed trajectories by outcome: committed, duplicate, late, quarantined."""
    failing: list[FailingReward]
    """Reward functions that gave up on their last sample."""
    num_tokens_lost: int
    """Of samples that were lost with their lease or could not be handed on: they are generated again."""
    settled_s: float
    """Sum of the seconds from a sample's last token to the buffer's answer."""
    num_running: int
    num_slots: int
    """Greatest `num_running`: as many as the cache is likely to hold, if that is fewer than configured."""
    running_s: float
    """Sum of the seconds of training requests in the engine: over wall time, their mean number."""
    busy_intervals: list[tuple[float, float]]
    """Wall-clock (start, end), seconds since the epoch, while a training request was running."""
    refused: str
    """The version refused last and why; empty once the engine serves the newest."""
    updates: list[WeightUpdate]
    hand_on_at: int
    """Tokens at which its samples continue in a faster pool; 0: none does."""
    waiting: str
    """What keeps the actor from running more, or a group from being whole; empty if nothing does."""
    waiting_s: float
    """0.0 if unknown."""
    engine: EngineReport


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """Evaluate every `num_shards`-th of the first `num_problems` held-out problems, from `shard` on."""

    num_problems: int
    shard: int = 0
    num_shards: int = 1
    min_version: PolicyVersion | None = None
    """Wait for this version or a newer one; None takes what the engine serves."""


@dataclass(frozen=True, slots=True)
class EvalCounts:
    """One answer per problem. Shards add up, field by field."""

    num_correct: int = 0
    num_scored: int = 0
    num_failed: int = 0
    """Generation or a reward function failed, or none applied: neither right nor wrong."""

    def __add__(self, other: EvalCounts) -> EvalCounts:
        return EvalCounts(
            self.num_correct + other.num_correct,
            self.num_scored + other.num_scored,
            self.num_failed + other.num_failed,
        )

    @property
    def accuracy(self) -> float | None:
        """Share of correct among scored answers; None if none was scored."""
        return self.num_correct / self.num_scored if self.num_scored else None


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Result of one actor for its shard."""

    version: PolicyVersion
    num_problems: int
    greedy: EvalCounts
    sampled: EvalCounts


@dataclass(slots=True)
class Counts:
    """The counts behind a report and a goodbye."""

    num_samples: int = 0
    num_tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    num_handed_on: int = 0
    num_tokens_lost: int = 0
    settled_s: float = 0.0


class BusyClock:
    """Merged intervals during which at least one request was running, and how many there were."""

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
        """Return the intervals since the last call; an open one is cut here."""
        if self.num_running:
            now = self._wall()
            self._closed.append((self._since_s, now))
            self._since_s = now
        intervals = list(self._closed)
        self._closed.clear()
        return intervals
