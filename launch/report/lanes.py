"""The timeline as inline SVG: the whole run as an overview, and a window of it span by span."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from launch.observe.trace import Line
from launch.report.spans import NUM_BINS, Lanes
from launch.report.svg import axis, inner_axis, short

LEFT, RIGHT, TOP = 76, 12, 8
WIDTH = LEFT + 2 * NUM_BINS + RIGHT
LANE, QUEUE = 22, 40
"""Heights."""
LEVELS = 6
"""Of opacity in the overview: how much of a bin was busy."""


def overview(lanes: Lanes) -> Markup:
    """The whole run."""
    drawing = _Drawing(lanes, lanes.active_s, lanes.end_s)
    drawing.phases(lanes.phases)
    learner = (("wait_for_batch", "wait"), ("step", "step"))
    drawing.lane("learner", [drawing.bins("learner", kind, style) for kind, style in learner])
    for name in lanes.shown_actors:
        kinds = (("state", "wait"), ("generate", "generate"), ("update", "update"))
        drawing.lane(name, [drawing.bins(name, kind, style) for kind, style in kinds])
    if ("evaluation", "evaluate") in lanes.whole:
        drawing.lane("evaluation", [drawing.bins("evaluation", "evaluate", "evaluate")])
    drawing.queue(lanes.queue.points)
    start, end = (drawing.x(moment) for moment in lanes.window)
    drawing.parts.append(
        Markup('<rect class="window" x="{}" y="{}" width="{}" height="{}"/>').format(
            round(start, 1), TOP - 4, round(max(2.0, end - start), 1), drawing.y - TOP + 4
        )
    )
    return drawing.finish("Timeline of the whole run")


def window(lanes: Lanes) -> Markup:
    """A few steps of it."""
    start_s, end_s = lanes.window
    drawing = _Drawing(lanes, start_s, end_s)
    close = lanes.close
    steps = [drawing.span(line, "wait") for line in close.get(("learner", "wait_for_batch"), [])]
    steps += [drawing.span(line, "step", label=_step_name(line)) for line in close.get(("learner", "step"), [])]
    drawing.lane("learner", steps)
    for name in lanes.shown_actors:
        spans = [drawing.span(line, "wait") for line in close.get((name, "state"), [])]
        spans += [drawing.span(line, "generate") for line in close.get((name, "generate"), [])]
        spans += [drawing.span(line, "update") for line in close.get((name, "update"), [])]
        drawing.lane(name, spans)
    if ("evaluation", "evaluate") in close:
        drawing.lane("evaluation", [drawing.span(line, "evaluate") for line in close["evaluation", "evaluate"]])
    drawing.queue(lanes.queue_close)
    return drawing.finish("Timeline of a few steps")


def _step_name(line: Line) -> str:
    return "" if line.step is None else str(line.step)


class _Drawing:
    """Puts lanes under each other."""

    def __init__(self, lanes: Lanes, start_s: float, end_s: float) -> None:
        self._lanes = lanes
        self._start_s, self._end_s = start_s, max(end_s, start_s + 1e-6)
        self.y = float(TOP)
        self.parts: list[Markup] = []

    def x(self, moment_s: float) -> float:
        share = (moment_s - self._start_s) / (self._end_s - self._start_s)
        return LEFT + min(1.0, max(0.0, share)) * 2 * NUM_BINS

    def lane(self, name: str, marks: Sequence[Markup]) -> None:
        """One lane, below those before; marks are drawn at the top and moved to it."""
        self.parts.append(
            Markup(
                '<text class="axis lanename" x="{}" y="{}" text-anchor="end">{}</text>'
                '<rect class="lane" x="{}" y="{}" width="{}" height="{}"/><g transform="translate(0 {})">{}</g>'
            ).format(
                LEFT - 8,
                self.y + LANE / 2 + 1,
                name,
                LEFT,
                self.y,
                2 * NUM_BINS,
                LANE - 5,
                self.y,
                Markup("").join(marks),
            )
        )
        self.y += LANE

    def phases(self, phases: Sequence[Line]) -> None:
        """What the run did, as words over the lanes."""
        marks = []
        for line in phases:
            left, right = self.x(line.start_s), self.x(line.end_s)
            text = (line.text or "").partition(" (")[0]
            if right - left < 1:
                continue
            marks.append(
                Markup('<line class="tick" x1="{0}" x2="{0}" y1="0" y2="{1}"/>').format(round(left, 1), LANE - 5)
            )
            if right - left > 6 * len(text) + 8:
                name = '<text class="axis" x="{}" y="{}">{}</text>'
                marks.append(Markup(name).format(round(left + 5, 1), LANE / 2 + 1, text))
        if marks:
            self.lane("run", marks)

    def bins(self, who: str, what: str, style: str) -> Markup:
        """The bins of a lane, those of equal share in one mark."""
        bins = self._lanes.whole.get((who, what))
        if bins is None:
            return Markup("")
        levels = [0 if share <= 0 else max(1, round(share * LEVELS)) for share in bins.shares]
        marks, start = [], 0
        for number in range(1, NUM_BINS + 1):
            if number < NUM_BINS and levels[number] == levels[start]:
                continue
            if levels[start]:
                # a pause is short: it shows in full, on the lower edge
                top, level = (LANE - 9, LEVELS) if what == "update" else (0, levels[start])
                marks.append(
                    Markup('<rect class="mark {} o{}" x="{}" y="{}" width="{}" height="{}"/>').format(
                        style, level, LEFT + 2 * start, top, 2 * (number - start), LANE - 5 - top
                    )
                )
            start = number
        return Markup("").join(marks)

    def span(self, line: Line, style: str, label: str = "") -> Markup:
        """One span."""
        left, right = self.x(line.start_s), self.x(line.end_s)
        if right <= LEFT or left >= LEFT + 2 * NUM_BINS:
            return Markup("")
        width = max(1.5, right - left)
        mark = Markup('<rect class="mark {}" x="{}" width="{}" height="{}"><title>{}</title></rect>').format(
            style, round(left, 1), round(width, 1), LANE - 5, self._words(line)
        )
        if label and width > 7 * len(label) + 4:
            mark += Markup('<text class="onmark" x="{}" y="{}" text-anchor="middle">{}</text>').format(
                round(left + width / 2, 1), LANE / 2 + 1.5, label
            )
        return mark

    def queue(self, points: Sequence[tuple[float, float]]) -> None:
        """How many groups wait in the buffer, as an area."""
        shown = [point for point in points if self._start_s <= point[0] <= self._end_s]
        before = [high for moment_s, high in points if moment_s < self._start_s]
        shown = [(self._start_s, high) for high in before[-1:]] + shown
        if not shown:
            return
        scale = axis(0.0, max(1.0, max(high for _, high in shown)), self.y + QUEUE, self.y + 4, 1)
        path = f"M{self.x(shown[0][0]):.1f},{self.y + QUEUE:.1f}"
        for (moment_s, high), follower in zip(shown, [*shown[1:], (self._end_s, 0.0)], strict=True):
            level = f"{scale.place(high):.1f}"
            path += f"L{self.x(moment_s):.1f},{level}L{self.x(follower[0]):.1f},{level}"
        path += f"L{self.x(self._end_s):.1f},{self.y + QUEUE:.1f}Z"
        self.parts.append(
            Markup(
                '<text class="axis lanename" x="{}" y="{}" text-anchor="end">buffer</text>'
                '<text class="axis" x="{}" y="{}" text-anchor="end">{} groups</text>'
                '<path class="mark queue" d="{}"><title>Groups that are ready, up to {}</title></path>'
                '<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>'
            ).format(
                LEFT - 8,
                self.y + QUEUE / 2,
                LEFT - 8,
                self.y + QUEUE / 2 + 13,
                short(scale.high),
                path,
                short(max(high for _, high in shown)),
                LEFT,
                LEFT + 2 * NUM_BINS,
                self.y + QUEUE,
                self.y + QUEUE,
            )
        )
        self.y += QUEUE + 4

    def finish(self, title: str) -> Markup:
        """The drawing, with its axis of time."""
        origin_s = self._lanes.start_s
        scale = inner_axis(self._start_s - origin_s, self._end_s - origin_s, LEFT, LEFT + 2 * NUM_BINS, 10)
        for value in scale.ticks:
            at = round(scale.place(value), 1)
            self.parts.append(
                Markup(
                    '<line class="tick" x1="{}" x2="{}" y1="{}" y2="{}"/>'
                    '<text class="axis" x="{}" y="{}" text-anchor="middle">{}</text>'
                ).format(at, at, self.y, self.y + 4, at, self.y + 16, f"{value:g} s")
            )
        height = self.y + 22
        names = ", ".join(["learner", *self._lanes.shown_actors])
        words = f"{title}, seconds since the run began: {names}, and groups ready in the buffer"
        return Markup('<svg class="chart wide" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
            WIDTH, height, words, Markup("").join(self.parts)
        )

    def _words(self, line: Line) -> str:
        origin_s = self._lanes.start_s
        what = line.state or {"wait_for_batch": "waits for a batch", "update": "weight update"}.get(
            line.what, line.what
        )
        number = f" {line.step}" if line.step is not None else ""
        version = f" to version {line.version}" if line.what == "update" and line.version is not None else ""
        many = f", {line.count} together" if line.count > 1 else ""
        lag = f", lag {line.lag_mean:.2f} mean, {line.lag_max or 0:g} greatest" if line.lag_mean is not None else ""
        tokens = f", {line.num_tokens:,} tokens" if line.num_tokens else ""
        took = f"{line.end_s - line.start_s:.3f} s from {line.start_s - origin_s:.2f} s on"
        return f"{line.who}: {what}{number}{version}, {took}{lag}{tokens}{many}"
