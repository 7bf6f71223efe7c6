"""What an actor tells the launcher: counts, when it was busy, and what it waits for."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from actors.engine_output import EngineReport
from actors.rewards import FailingReward
from common.process import wall_time

_MAX_INTERVALS = 4096
"""If nobody takes them, the oldest are forgotten beyond this number."""


def actor_name(number: int) -> str:
    """What the actor of this number is called in reports, leases and trajectories."""
    return f"actor-{number}"


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One update of the engine's weights. Generation paused from start to end."""

    start_s: float
    end_s: float
    load_s: float
    """How much of the pause was the reload."""
    version: tuple[int, int]
    """(incarnation, version) that was put under the running requests."""

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
    """Reward functions whose last sample, of training or an evaluation, was given up."""
    num_tokens_lost: int
    """Tokens thrown away with samples whose lease was lost or that could not be handed on: they are made again."""
    settled_s: float
    """Seconds that pushed ones took from their last token until the buffer had answered, added up."""
    num_running: int
    num_slots: int
    """How many there may be at once: as many as its cache is likely to hold, if that is fewer than configured."""
    running_s: float
    """Seconds that training requests have spent in the engine, added up: over wall time, their mean number."""
    busy_intervals: list[tuple[float, float]]
    """Wall-clock (start, end) in seconds since the epoch, during which a training request was running."""
    refused: str
    """The version refused last and why; empty once the engine serves the newest."""
    updates: list[WeightUpdate]
    hand_on_at: int
    """Tokens with which its samples go on in a faster pool; 0: none does."""
    waiting: str
    """What keeps the actor from running more, or a group from being whole; empty while nothing does."""
    waiting_s: float
    """How long already; 0.0 where that is not known."""
    engine: EngineReport


@dataclass(slots=True)
class Counts:
    """The counts behind a report and a goodbye."""

    num_samples: int = 0
    num_tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    num_handed_on: int = 0
    """Samples left to another actor, with what there was of them."""
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
        """When `num_running` was last counted into `_running_s`."""
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
        """Seconds of all requests so far, added up; never less than at the last call."""
        self._count()
        return self._running_s

    def _count(self) -> float:
        now_s = self._wall()
        self._running_s += self.num_running * max(0.0, now_s - self._changed_s)
        self._changed_s = now_s
        return now_s

    def take(self) -> list[tuple[float, float]]:
        """The intervals since the last call; one that is still open is cut here."""
        if self.num_running:
            now = self._wall()
            self._closed.append((self._since_s, now))
            self._since_s = now
        intervals = list(self._closed)
        self._closed.clear()
        return intervals
