"""The trace of a run as lanes: the whole run as an overview, and a few steps of it span by span."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from markupsafe import Markup

from launch.observe.totals import Interval, shared, total
from launch.observe.trace import Event, read
from launch.report.svg import Point, axis, short, tag

NUM_BINS = 560
"""Of the whole run; a bin is two pixels wide."""
STEPS_SHOWN = 10
MAX_SPANS = 1500
MAX_ACTORS = 16
LEFT, RIGHT, TOP = 76, 76 + 2 * NUM_BINS, 8
LANE, MARK, QUEUE = 22, 17, 40
"""Heights: of a lane, of what is drawn on it, and of the queue."""
LEVELS = 6
"""Of opacity in the overview: how much of a bin was busy."""
STYLES = {"wait_for_batch": "wait", "state": "wait"}
"""Class of the page of a kind of span that is not called as it is."""


@dataclass
class ActorSums:
    """Over one actor's spans."""

    pool: str = ""
    num_samples: int = 0
    num_tokens: int = 0
    num_updates: int = 0
    busy_s: float = 0.0
    """In which it generated, of the training time."""
    pause_s: float = 0.0
    """In which it paused for weights, likewise."""
    tokens_in_training: float = 0.0


class Timeline:
    """What the trace of a run says. It is all in memory: a trace is bounded."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.spans: dict[tuple[str, str], list[Event]] = {}
        """By role and kind, in order of time."""
        self.ready: list[Point] = []
        """Groups ready in the buffer, over wall clock."""
        self.start_s, self.end_s = float("inf"), float("-inf")
        """Of the run, wall clock."""
        self._active_s = float("inf")
        for event in events:
            if event.ph not in ("X", "C"):
                continue
            self.start_s, self.end_s = min(self.start_s, event.start_s), max(self.end_s, event.end_s)
            if event.cat not in ("phase", "state"):
                self._active_s = min(self._active_s, event.start_s)
            if event.ph == "X":
                self.spans.setdefault((event.who, event.cat), []).append(event)
            elif event.name == "groups ready":
                self.ready.append((event.start_s, float(event.args.get("ready", 0))))
        for spans in self.spans.values():
            spans.sort(key=lambda span: span.ts)

    def of(self, who: str, kind: str) -> list[Event]:
        """Spans of a role; empty where it has none."""
        return self.spans.get((who, kind), [])

    @property
    def active_s(self) -> float:
        """When its processes were started, and the first one did something."""
        return self._active_s if self._active_s < self.end_s else self.start_s

    @cached_property
    def actors(self) -> dict[str, ActorSums]:
        """By name, in order of their numbers."""
        names = {who for who, kind in self.spans if kind in ("generate", "update")}
        return {name: self._sums(name) for name in sorted(names, key=_number_of)}

    @property
    def shown_actors(self) -> list[str]:
        """Names of those that have a lane."""
        return list(self.actors)[:MAX_ACTORS]

    @cached_property
    def training(self) -> list[Interval]:
        """When the run trained: for each command its phase of that name, or its steps where it was killed or lives."""
        phases = self.of("launch", "phase")
        starts = [phase.start_s for phase in phases if phase.name.startswith("starting")]  # the first of every command
        trained = []
        for start_s, end_s in itertools.pairwise([float("-inf"), *starts, float("inf")]):
            spans = [each for each in phases if each.name == "training" and start_s <= each.start_s < end_s]
            spans = spans or [each for each in self.of("learner", "step") if start_s <= each.start_s < end_s]
            if spans:
                trained.append((spans[0].start_s, spans[-1].end_s))
        return trained

    @property
    def training_s(self) -> float:
        return total(self.training)

    def share(self, what: Literal["busy_s", "pause_s"]) -> float | None:
        """Mean over the actors: share of the training time in which it generated, or paused for weights."""
        if not self.actors or self.training_s <= 0:
            return None
        return min(1.0, statistics.fmean(getattr(actor, what) for actor in self.actors.values()) / self.training_s)

    @cached_property
    def window(self) -> Interval:
        """A few steps from the middle of training; the whole run where there are too few."""
        steps = [span.start_s for span in self.of("learner", "step")]
        if len(steps) < 2:
            return self.start_s, self.end_s
        if len(steps) < 2 * STEPS_SHOWN:
            return steps[0] - _gap(steps), steps[-1] + 2 * _gap(steps)
        middle = len(steps) // 2
        return steps[middle], steps[middle] + STEPS_SHOWN * _gap(steps[middle : middle + 2 * STEPS_SHOWN])

    def _sums(self, name: str) -> ActorSums:
        sums = ActorSums()
        for span in (*self.of(name, "generate"), *self.of(name, "update")):
            length_s = span.end_s - span.start_s
            inside = shared([(span.start_s, span.end_s)], self.training) / length_s if length_s > 0 else 0.0
            busy_s = inside * span.args.get("busy_s", length_s)
            sums.pool = span.args.get("pool", sums.pool)
            if span.cat == "update":
                sums.num_updates += span.count
                sums.pause_s += busy_s
            else:
                tokens = int(span.args.get("num_tokens", 0))
                sums.num_samples += int(span.args.get("num_samples", 0))
                sums.num_tokens += tokens
                sums.tokens_in_training += inside * tokens
                sums.busy_s += busy_s
        return sums


def read_timeline(path: Path) -> Timeline | None:
    """The timeline of a run; None where it has no line.

    Raises:
        OSError: there is no file, or it cannot be read.
    """
    found = Timeline(read(path))
    return found if found.end_s > found.start_s else None


def _number_of(name: str) -> tuple[int, str]:
    tail = name.rpartition("-")[2]
    return int(tail) if tail.isdigit() else -1, name


def _gap(starts: Iterable[float]) -> float:
    return statistics.median(later - sooner for sooner, later in itertools.pairwise(sorted(starts)))


# --- drawn --------------------------------------------------------------------------------------------


def overview(timeline: Timeline) -> Markup:
    """The whole run: the fuller the colour of a bin, the busier it was."""
    drawing = _Drawing(timeline, timeline.active_s, timeline.end_s)
    drawing.phases()
    drawing.lanes(drawing.bins)
    start, end = (drawing.x(moment_s) for moment_s in timeline.window)
    frame = {"x": start, "y": TOP - 4, "width": max(2.0, end - start), "height": drawing.y - TOP + 4}
    drawing.parts.append(tag("rect", cls="window", **frame))
    return drawing.finish("Timeline of the whole run")


def window(timeline: Timeline) -> Markup:
    """A few steps of it, span by span."""
    drawing = _Drawing(timeline, *timeline.window)
    drawing.lanes(drawing.close)
    return drawing.finish("Timeline of a few steps")


class _Drawing:
    """Puts lanes under each other."""

    def __init__(self, timeline: Timeline, start_s: float, end_s: float) -> None:
        self._timeline = timeline
        origin_s = timeline.start_s
        self._time = axis(start_s - origin_s, max(end_s, start_s + 1e-6) - origin_s, LEFT, RIGHT, 10, is_tight=True)
        self.y = float(TOP)
        self.parts: list[Markup] = []

    def x(self, moment_s: float) -> float:
        return min(float(RIGHT), max(float(LEFT), self._time.place(moment_s - self._timeline.start_s)))

    def lanes(self, draw: Callable[[str, str], Sequence[Markup]]) -> None:
        """The learner, the actors that have room, the evaluations, and the queue."""
        self._lane("learner", [*draw("learner", "wait_for_batch"), *draw("learner", "step")])
        for name in self._timeline.shown_actors:
            self._lane(name, [mark for kind in ("state", "generate", "update") for mark in draw(name, kind)])
        if marks := draw("evaluation", "evaluate"):
            self._lane("evaluation", marks)
        self._queue()

    def _lane(self, name: str, marks: Sequence[Markup]) -> None:
        """One lane, below those before; marks are drawn at the top and moved to it."""
        self._label(name, self.y + LANE / 2 + 1, "axis lanename")
        self.parts += [
            tag("rect", cls="lane", x=LEFT, y=self.y, width=RIGHT - LEFT, height=MARK),
            tag("g", *marks, transform=f"translate(0 {self.y:g})"),
        ]
        self.y += LANE

    def _label(self, text: str, y: float, cls: str) -> None:
        self.parts.append(tag("text", text, cls=cls, x=LEFT - 8, y=y, text_anchor="end"))

    def phases(self) -> None:
        """What the run did, as words over the lanes."""
        marks = []
        for phase in self._timeline.of("launch", "phase"):
            left, right = self.x(phase.start_s), self.x(phase.end_s)
            text = phase.name.partition(" (")[0]
            if right - left >= 1:
                marks.append(tag("line", cls="tick", x1=left, x2=left, y1=0, y2=MARK))
            if right - left > 6 * len(text) + 8:
                marks.append(tag("text", text, cls="axis", x=left + 5, y=LANE / 2 + 1))
        if marks:
            self._lane("run", marks)

    def bins(self, who: str, kind: str) -> list[Markup]:
        """How busy each bin was, those of equal share in one mark."""
        levels = [0 if share <= 0 else max(1, round(share * LEVELS)) for share in self._shares(who, kind)]
        marks, x = [], LEFT
        for level, group in itertools.groupby(levels):
            width = 2 * len(list(group))
            if level:
                # a pause is short: it shows in full, on the lower edge
                top, shown = (MARK - 4, LEVELS) if kind == "update" else (0, level)
                style = f"mark {STYLES.get(kind, kind)} o{shown}"
                marks.append(tag("rect", cls=style, x=x, y=top, width=width, height=MARK - top))
            x += width
        return marks

    def _shares(self, who: str, kind: str) -> list[float]:
        """Which share of each bin a role was at work."""
        shares = [0.0] * NUM_BINS
        for span in self._timeline.of(who, kind):
            length_s = span.end_s - span.start_s
            busy = min(1.0, span.args.get("busy_s", length_s) / length_s) if who == "learner" and length_s > 0 else 1.0
            left, right = ((self.x(moment_s) - LEFT) / 2 for moment_s in (span.start_s, span.end_s))
            for place in range(int(left), min(NUM_BINS, math.ceil(right))):
                inside = min(right, place + 1) - max(left, place)
                shares[place] = min(1.0, shares[place] + busy * inside)
        return shares

    def close(self, who: str, kind: str) -> list[Markup]:
        """The spans that reach into the window."""
        marks: list[Markup] = []
        for span in self._timeline.of(who, kind):
            left, right = self.x(span.start_s), self.x(span.end_s)
            if right <= LEFT or left >= RIGHT or len(marks) >= MAX_SPANS:
                continue
            width = max(1.5, right - left)
            words = tag("title", self._words(span))
            marks.append(tag("rect", words, cls=f"mark {STYLES.get(kind, kind)}", x=left, width=width, height=MARK))
            label = str(span.args.get("step", "")) if kind == "step" else ""
            if label and width > 7 * len(label) + 4:
                middle = left + width / 2
                marks.append(tag("text", label, cls="onmark", x=middle, y=LANE / 2 + 1.5, text_anchor="middle"))
        return marks

    def _queue(self) -> None:
        """How many groups wait in the buffer, as an area; of a long run the most of each pixel."""
        highs: dict[int, float] = {}
        for moment_s, ready in self._timeline.ready:
            x = round(self.x(moment_s))
            # what was before the window is where it begins, and the last of it counts
            highs[x] = ready if x == LEFT else max(ready, highs.get(x, 0.0))
        highs.pop(RIGHT, None)
        if not highs:
            return
        most, base = max(highs.values()), self.y + QUEUE
        scale = axis(0.0, max(1.0, most), base, self.y + 4, 1)
        path = f"M{next(iter(highs)):g},{base:g}"
        for (x, ready), follower in zip(highs.items(), [*list(highs)[1:], RIGHT], strict=True):
            path += f"L{x:g},{scale.place(ready):.1f}L{follower:g},{scale.place(ready):.1f}"
        words = tag("title", f"Groups that are ready, up to {short(most)}")
        self._label("buffer", self.y + QUEUE / 2, "axis lanename")
        self._label(f"{short(scale.high)} groups", self.y + QUEUE / 2 + 13, "axis")
        self.parts += [
            tag("path", words, cls="mark queue", d=f"{path}L{RIGHT:g},{base:g}Z"),
            tag("line", cls="grid", x1=LEFT, x2=RIGHT, y1=base, y2=base),
        ]
        self.y += QUEUE + 4

    def finish(self, title: str) -> Markup:
        """The drawing, with its axis of time."""
        for value in self._time.ticks:
            at = self._time.place(value)
            self.parts.append(tag("line", cls="tick", x1=at, x2=at, y1=self.y, y2=self.y + 4))
            self.parts.append(tag("text", f"{value:g} s", cls="axis", x=at, y=self.y + 16, text_anchor="middle"))
        names = ", ".join(["learner", *self._timeline.shown_actors])
        words = f"{title}, seconds since the run began: {names}, and groups ready in the buffer"
        box = f"0 0 {RIGHT + 12} {self.y + 22:g}"
        return tag("svg", *self.parts, cls="chart wide", viewBox=box, role="img", aria_label=words)

    def _words(self, span: Event) -> str:
        args = span.args
        what = f"waits for a batch {args.get('step', '')}".rstrip() if span.cat == "wait_for_batch" else span.name
        version = f" to version {args['version']}" if span.cat == "update" and "version" in args else ""
        many = f", {span.count} together" if span.count > 1 else ""
        lag = f", lag {args['lag_mean']:.2f} mean, {args.get('lag_max') or 0:g} greatest" if "lag_mean" in args else ""
        tokens = f", {args['num_tokens']:,} tokens" if args.get("num_tokens") else ""
        took = f"{span.end_s - span.start_s:.3f} s from {span.start_s - self._timeline.start_s:.2f} s on"
        return f"{span.who}: {what}{version}, {took}{lag}{tokens}{many}"
