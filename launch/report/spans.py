"""timeline.jsonl as lanes: the whole run in bins, and a window of it span by span."""

from __future__ import annotations

import itertools
import statistics
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from launch.observe.totals import Interval, intersect, total
from launch.observe.trace import Line, read
from launch.report.series import Point, Series

NUM_BINS = 560
"""Of the whole run; a bin is two pixels wide."""
STEPS_SHOWN = 10
"""About so many steps are in the window."""
MAX_SPANS = 1500
"""In the window, of one lane."""
MAX_ACTORS = 16
"""That have a lane."""


@dataclass
class ActorFacts:
    """Sums over one actor's spans."""

    pool: str = ""
    num_samples: int = 0
    num_tokens: int = 0
    num_updates: int = 0
    busy_s: float = 0.0
    """In which it generated, of the training time."""
    pause_s: float = 0.0
    """In which it paused for weights, likewise."""
    tokens_in_training: float = 0.0
    """Of `num_tokens`."""


@dataclass
class Bins:
    """A lane of the whole run: which share of each bin it was at work."""

    start_s: float
    width_s: float
    shares: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)

    def add(self, start_s: float, end_s: float, share: float = 1.0) -> None:
        """It was at work for this share of the time from `start_s` to `end_s`."""
        first, last = (min(NUM_BINS - 1, max(0, int(self._place(moment)))) for moment in (start_s, end_s))
        for number in range(first, last + 1):
            left = self.start_s + number * self.width_s
            inside = min(end_s, left + self.width_s) - max(start_s, left)
            self.shares[number] = min(1.0, self.shares[number] + share * max(0.0, inside) / self.width_s)

    def _place(self, moment_s: float) -> float:
        return (moment_s - self.start_s) / self.width_s


@dataclass
class Lanes:
    """What the timeline shows."""

    start_s: float
    """Of the run, wall clock."""
    active_s: float
    """When its processes were started, and the first one did something."""
    end_s: float
    window: tuple[float, float]
    """What is shown span by span."""
    whole: dict[tuple[str, str], Bins]
    """By role and kind."""
    close: dict[tuple[str, str], list[Line]]
    """Spans that reach into the window, by role and kind."""
    queue: Series
    """Groups ready in the buffer, over wall clock."""
    queue_close: list[Point]
    """The same, every sample in the window."""
    actors: dict[str, ActorFacts]
    phases: list[Line]
    """What the launcher did."""
    training: list[Interval]
    """When the run trained, an interval for each command that worked on it."""
    num_steps: int
    """Number of the last step that was finished."""
    trained_tokens: int
    """Of completions; a step that was taken again counts as it was taken last."""

    @cached_property
    def shown_actors(self) -> list[str]:
        """Names of those that have a lane, in order of their numbers."""
        return sorted(self.actors, key=number_of)[:MAX_ACTORS]

    @property
    def busy_share(self) -> float | None:
        """Mean over the actors: share of the training time in which it generated."""
        return self._share(lambda actor: actor.busy_s)

    @property
    def pause_share(self) -> float | None:
        """The same of pauses for weights."""
        return self._share(lambda actor: actor.pause_s)

    @property
    def training_s(self) -> float:
        """Length of `training`."""
        return total(self.training)

    def _share(self, seconds: Callable[[ActorFacts], float]) -> float | None:
        length_s = self.training_s
        if not self.actors or length_s <= 0:
            return None
        return min(1.0, statistics.fmean(seconds(actor) for actor in self.actors.values()) / length_s)


def number_of(name: str) -> tuple[int, str]:
    """Sorts actor-2 before actor-10."""
    tail = name.rpartition("-")[2]
    return int(tail) if tail.isdigit() else -1, name


def read_lanes(path: Path) -> Lanes | None:
    """The timeline of a run, in two passes: memory does not grow with it. None where it has no line.

    Raises:
        OSError: there is no file, or it cannot be read.
    """
    outline = _Outline()
    for line in read(path):
        outline.take_in(line)
    if outline.end_s <= outline.start_s:
        return None
    lanes = outline.lanes()
    for line in read(path):
        if line.what == "queue":
            _take_queue(lanes, line)
        else:
            _take_span(lanes, line)
    return lanes


def _take_queue(lanes: Lanes, line: Line) -> None:
    ready = float(line.ready_groups or 0)
    lanes.queue.add(line.start_s, ready)
    start_s, end_s = lanes.window
    margin_s = end_s - start_s
    if start_s - margin_s <= line.start_s <= end_s + margin_s and len(lanes.queue_close) < MAX_SPANS:
        lanes.queue_close.append((line.start_s, ready))


def _take_span(lanes: Lanes, line: Line) -> None:
    key = line.who, line.what
    if line.what in ("generate", "update"):
        _take_actor(lanes, line)
    if line.who == "actors" or (line.who in lanes.actors and line.who not in lanes.shown_actors):
        return
    bins = lanes.whole.get(key)
    if bins is None:
        bins = lanes.whole[key] = Bins(lanes.active_s, (lanes.end_s - lanes.active_s) / NUM_BINS)
    bins.add(line.start_s, line.end_s, _busy_share(line) if line.who == "learner" else 1.0)
    if line.end_s >= lanes.window[0] and line.start_s <= lanes.window[1]:
        close = lanes.close.setdefault(key, [])
        if len(close) < MAX_SPANS:
            close.append(line)


def _take_actor(lanes: Lanes, line: Line) -> None:
    actor = lanes.actors.get(line.who)
    if actor is None:  # of a live run: it was not there at the first pass
        return
    length_s = line.end_s - line.start_s
    inside = total(intersect([(line.start_s, line.end_s)], lanes.training)) / length_s if length_s > 0 else 0.0
    busy_s = inside * (length_s if line.busy_s is None else line.busy_s)
    if line.what == "update":
        actor.num_updates += line.count
        actor.pause_s += busy_s
    else:
        actor.num_samples += line.num_samples or 0
        actor.num_tokens += line.num_tokens or 0
        actor.tokens_in_training += inside * (line.num_tokens or 0)
        actor.busy_s += busy_s


def _busy_share(line: Line) -> float:
    """Of the time that a line stands for."""
    length_s = line.end_s - line.start_s
    return 1.0 if line.busy_s is None or length_s <= 0 else min(1.0, line.busy_s / length_s)


class _Training:
    """When the run trained: for each command its phase of that name, or its steps where it was killed or lives."""

    def __init__(self) -> None:
        self._of_commands: list[Interval | None] = [None]
        self._is_known = False

    def take_in(self, line: Line) -> None:
        last = self._of_commands[-1]
        if line.what == "step" and not self._is_known:
            self._of_commands[-1] = (line.start_s if last is None else last[0], line.end_s)
        elif line.what == "phase" and line.text == "training":
            self._of_commands[-1], self._is_known = (line.start_s, line.end_s), True
        elif line.what == "phase" and (line.text or "").startswith("starting"):  # the first of every command
            self._of_commands.append(None)
            self._is_known = False

    def intervals(self) -> list[Interval]:
        return [interval for interval in self._of_commands if interval is not None]


class _Steps:
    """Steps and their tokens; one that is taken again takes back those from it on. Memory is that of the lines."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, int, int]] = []  # first step, last step, tokens

    def take_in(self, line: Line) -> None:
        if line.step is None:
            return
        first = line.step - line.count + 1
        while self._lines and self._lines[-1][1] >= first:
            start, end, tokens = self._lines.pop()
            if start < first:  # of a line for several steps a part stays
                self._lines.append((start, first - 1, round(tokens * (first - start) / (end - start + 1))))
        self._lines.append((first, line.step, line.tokens or 0))

    @property
    def num(self) -> int:
        return self._lines[-1][1] if self._lines else 0

    @property
    def tokens(self) -> int:
        return sum(tokens for _, _, tokens in self._lines)


class _Outline:
    """The first pass: when the run was, its actors, and where the window lies."""

    def __init__(self) -> None:
        self.start_s, self.end_s = float("inf"), float("-inf")
        self._active_s = float("inf")
        self._steps = array("d")
        self._actors: dict[str, ActorFacts] = {}
        self._phases: list[Line] = []
        self._training, self._taken = _Training(), _Steps()

    def take_in(self, line: Line) -> None:
        self.start_s, self.end_s = min(self.start_s, line.start_s), max(self.end_s, line.end_s)
        match line.what:
            case "step":
                self._steps.append(line.start_s)
                self._taken.take_in(line)
            case "generate" | "update":
                actor = self._actors.setdefault(line.who, ActorFacts())
                actor.pool = line.pool or actor.pool
            case "phase":
                self._phases.append(line)
        self._training.take_in(line)
        if line.what not in ("phase", "state"):
            self._active_s = min(self._active_s, line.start_s)

    def lanes(self) -> Lanes:
        return Lanes(
            start_s=self.start_s,
            active_s=self._active_s if self._active_s < self.end_s else self.start_s,
            end_s=self.end_s,
            window=self._window(),
            whole={},
            close={},
            queue=Series(),
            queue_close=[],
            actors=self._actors,
            phases=self._phases,
            training=self._training.intervals(),
            num_steps=self._taken.num,
            trained_tokens=self._taken.tokens,
        )

    def _window(self) -> tuple[float, float]:
        """A few steps from the middle of training; the whole run where there are too few."""
        steps = self._steps
        if len(steps) < 2:
            return self.start_s, self.end_s
        if len(steps) < 2 * STEPS_SHOWN:
            return steps[0] - _gap(steps), steps[-1] + 2 * _gap(steps)
        middle = len(steps) // 2
        around = steps[middle : middle + 2 * STEPS_SHOWN]
        return steps[middle], steps[middle] + STEPS_SHOWN * _gap(around)


def _gap(starts: Iterable[float]) -> float:
    ordered = sorted(starts)
    return statistics.median(later - sooner for sooner, later in itertools.pairwise(ordered))
