"""The trace of a run as lanes: the whole run in bins, and a few steps span by span."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from launch.observe.totals import Interval
from launch.observe.trace import Event, read

NUM_BINS, LEVELS = 400, 8
"""Of the whole run, and how many shares of a bin are told apart."""
STEPS_SHOWN, MAX_SPANS, MAX_LANES = 10, 1500, 16
KINDS = {"phase": 0, "state": 1, "wait_for_batch": 1, "step": 1, "evaluate": 1, "generate": 1, "update": 1}
"""Kinds of spans in the order in which they are drawn; 0 is drawn in the overview alone."""


class Timeline:
    """The spans of a trace, in memory: a trace is bounded."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.spans: dict[tuple[str, str], list[Event]] = {}
        """By role and kind, in order of time."""
        self.ready: list[tuple[float, float]] = []
        """Groups ready in the buffer, over wall clock."""
        self.start_s, self.end_s = math.inf, -math.inf
        for event in events:
            if event.ph not in ("X", "C"):
                continue
            self.start_s, self.end_s = min(self.start_s, event.start_s), max(self.end_s, event.end_s)
            if event.ph == "X":
                self.spans.setdefault((event.who, event.cat), []).append(event)
            elif event.name == "groups ready":
                self.ready.append((event.start_s, float(event.args.get("ready", 0))))
        for spans in self.spans.values():
            spans.sort(key=lambda span: span.ts)

    def of(self, who: str, kind: str) -> list[Event]:
        return self.spans.get((who, kind), [])

    @property
    def lanes(self) -> list[str]:
        """Roles that have a lane."""
        actors = sorted({who for who, _ in self.spans if who.startswith("actor-")}, key=lambda name: (len(name), name))
        return ["learner", *actors[:MAX_LANES], *(["evaluation"] if self.of("evaluation", "evaluate") else [])]

    @property
    def window(self) -> Interval:
        """A few steps from the middle of training; the whole run if there are few."""
        steps = [span.start_s for span in self.of("learner", "step")]
        if len(steps) < 2:
            return self.start_s, self.end_s
        first = max(0, (len(steps) - STEPS_SHOWN) // 2)
        last = min(len(steps) - 1, first + STEPS_SHOWN)
        return steps[first], steps[last] if last > first + 1 else self.of("learner", "step")[-1].end_s


def read_timeline(path: Path) -> Timeline | None:
    """Return the timeline of a run; None if the trace has no span.

    Raises:
        OSError: the file is missing or unreadable.
    """
    found = Timeline(read(path))
    return found if found.end_s > found.start_s else None


# --- for page.js --------------------------------------------------------------------------------------

Mark = tuple[int, str, float, float, float, str]
"""Lane, kind, start and end in seconds since the run began, how full its colour is, and words."""


def lanes_of_steps(timeline: Timeline) -> dict[str, Any]:
    """Return a few steps span by span."""
    start_s, end_s = timeline.window
    marks: list[Mark] = []
    for lane, who in enumerate(timeline.lanes):
        for kind in KINDS:
            spans = [each for each in timeline.of(who, kind) if each.end_s > start_s and each.start_s < end_s]
            marks += [_mark(timeline, lane, each) for each in spans[:MAX_SPANS]]
    return _plot(timeline, timeline.lanes, marks, start_s, end_s)


def lanes_of_run(timeline: Timeline) -> dict[str, Any]:
    """Return the phases of the run, and how busy each role was in each bin of it."""
    phases = [_mark(timeline, 0, each) for each in timeline.of("launch", "phase")]
    binned = [
        mark
        for lane, who in enumerate(timeline.lanes, 1)
        for kind in KINDS
        for mark in _bins(timeline, lane, timeline.of(who, kind))
    ]
    return _plot(timeline, ["run", *timeline.lanes], [*phases, *binned], timeline.start_s, timeline.end_s)


def _plot(timeline: Timeline, lanes: list[str], marks: list[Mark], start_s: float, end_s: float) -> dict[str, Any]:
    span = [round(each - timeline.start_s, 3) for each in (start_s, end_s)]
    return {"kind": "lanes", "lanes": lanes, "marks": marks, "span": span}


def _mark(timeline: Timeline, lane: int, span: Event) -> Mark:
    args, took_s = span.args, span.end_s - span.start_s
    version = f" to version {args['version']}" if span.cat == "update" and "version" in args else ""
    lag = f", lag {args['lag_mean']:.2f} mean, {args.get('lag_max') or 0:g} greatest" if "lag_mean" in args else ""
    tokens = f", {args['num_tokens']:,} tokens" if args.get("num_tokens") else ""
    words = span.name if span.cat == "phase" else f"{span.who}: {span.name}{version}, {took_s:.3f} s{lag}{tokens}"
    start_s, end_s = (round(each - timeline.start_s, 4) for each in (span.start_s, span.end_s))
    return lane, span.cat, start_s, end_s, 1.0, words


def _bins(timeline: Timeline, lane: int, spans: list[Event]) -> Iterator[Mark]:
    """Yield the spans of a kind as bins of the run; neighbours that are as full become one."""
    width_s = (timeline.end_s - timeline.start_s) / NUM_BINS
    shares = [0.0] * NUM_BINS
    for span in spans:
        left, right = ((each - timeline.start_s) / width_s for each in (span.start_s, span.end_s))
        for place in range(int(left), min(NUM_BINS, math.ceil(right))):
            shares[place] += min(right, place + 1) - max(left, place)
    first = 0
    for level, group in itertools.groupby(math.ceil(min(1.0, share) * LEVELS) / LEVELS for share in shares):
        last = first + len(list(group))
        if level:
            level = 1.0 if spans[0].cat == "update" else level  # a pause is too short to show otherwise
            words = f"{spans[0].who}: {spans[0].cat.replace('_', ' ')}, {level:.0%} of the time"
            yield lane, spans[0].cat, round(first * width_s, 3), round(last * width_s, 3), level, words
        first = last
