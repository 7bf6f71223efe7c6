"""Line charts and bars as inline SVG: no library, no script. Colours are the page's, by class.

A chart is drawn for a card about 360 px wide, so that its text has the size of the page's small text. What page.js
needs to show values under the pointer stands in `data-` attributes; the chart is whole without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

Point = tuple[float, float]

DASH = "\N{EN DASH}"
"""In place of a figure that is not known."""
WIDTH, HEIGHT = 372, 196
LEFT, RIGHT, TOP, BOTTOM = 44, WIDTH - 10, 10, HEIGHT - 30
"""Edges of the plot within the chart."""
LOG_DECADES = 2.0
"""Values above 0 that span more are drawn on a logarithmic axis, where the chart allows one."""
FEW = 12
"""A curve of fewer points marks each."""
LEAST_FOR_LINE = 3
"""Points that a line joins from here on: two are no trend."""
LETTER, LINE_HEIGHT, CLEAR = 6.2, 11.0, 3.0
"""Pixels: about the width of a letter of a chart, the height of its line, and what is kept free around a label."""
EMPTY = Markup('<p class="empty">No values in this run.</p>')


def tag(name: str, *inner: str, cls: str = "", **attributes: object) -> Markup:
    """An element; text is escaped, numbers are rounded to a tenth of a pixel, and `_` in a name is `-`."""
    written = f' class="{escape(cls)}"' if cls else ""
    for key, value in attributes.items():
        text = f"{round(value, 1):g}" if isinstance(value, float) else str(value)
        written += f' {key.replace("_", "-")}="{escape(text)}"'
    return Markup(f"<{name}{written}>{Markup('').join(inner)}</{name}>")


class Figure(NamedTuple):
    """A drawing with its heading."""

    title: str
    unit: str
    drawing: Markup
    legend: Sequence[tuple[str, str]] = ()
    note: str = ""
    hint: str = ""
    """What a good one looks like, and what to do where it does not."""


class Curve(NamedTuple):
    """One line of a chart."""

    name: str
    points: Sequence[Point]
    style: str
    """Class of the page: a1, a2 (the run: main, second) or b1, b2 (the run that it is compared with)."""
    dots: bool = False
    """Mark every point, however many there are: each was measured by itself."""


class Bars(NamedTuple):
    """Bars of one colour in a histogram."""

    name: str
    shares: Sequence[float]
    style: str


def short(value: float) -> str:
    """A figure for an axis or a table: three digits, thousands as k."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 999_500:
        return f"{value / 1e6:.3g}M"
    if size >= 10_000:
        return f"{value / 1e3:.3g}k"
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 0.01:
        return f"{value:.3g}"
    return (f"{value:.2g}" if size >= 1e-4 else f"{value:.1e}".replace(".0e", "e")).replace("e-0", "e-")


# --- axes ---------------------------------------------------------------------------------------------


class Axis(NamedTuple):
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False
    ticks: Sequence[float] = ()

    def place(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.is_log:
            low, high, at = math.log10(low), math.log10(high), math.log10(max(value, low))
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def __str__(self) -> str:
        kind = "log" if self.is_log else "linear"
        return f"{self.low:.6g} {self.high:.6g} {self.start:g} {self.end:g} {kind}"


def axis(
    low: float, high: float, start: float, end: float, num: int = 4, *, is_log: bool = False, is_tight: bool = False
) -> Axis:
    """An axis with about `num` ticks at round values, or at powers of ten; it ends at a tick, or tightly at the data.

    `start` and `end` are the pixels of the least and of the greatest value.
    """
    if is_log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        last = max(last, first + 1)
        stride = max(1, math.ceil((last - first) / num))
        return Axis(10.0**first, 10.0**last, start, end, True, [10.0**e for e in range(first, last + 1, stride)])
    if high <= low:
        margin = abs(low) * 0.1 or 1.0
        low, high = (low, low + 1) if is_tight else (low - margin, high + margin)
    rough = (high - low) / num
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= rough * (1 - 1e-9))
    if is_tight:
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    else:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        low, high = first * step, last * step
    return Axis(low, high, start, end, False, [i * step for i in range(first, last + 1)])


# --- charts -------------------------------------------------------------------------------------------


def line_chart(
    title: str,
    unit: str,
    curves: Sequence[Curve],
    *,
    x_name: str = "step",
    bound: tuple[str, float] | None = None,
    floor: float = math.inf,
    ceiling: float = math.inf,
    may_be_log: bool = False,
    note: str = "",
) -> Figure:
    """Curves over each other, the first on top; a sentence in their place where there is nothing to draw.

    `bound` names a level that is not to be passed; its name stands where no curve runs. The axis of y reaches down to
    `floor` at least, and ends at `ceiling` where no value but for rounding passes it.
    """
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return Figure(title, unit, EMPTY, note=note)
    xs, ys = ([point[i] for curve in curves for point in curve.points] for i in (0, 1))
    low, high = min(*ys, floor), max(*ys, bound[1] if bound else -math.inf)
    high = ceiling if high <= ceiling * (1 + 1e-3) < math.inf else high
    is_log = may_be_log and low > 0 and math.log10(high / low) > LOG_DECADES
    x = axis(min(xs), max(xs), LEFT, RIGHT, 5, is_tight=True)
    y = axis(low, high, BOTTOM, TOP, is_log=is_log)
    label = None
    if bound is not None and (label := _free_place(*bound, curves, x, y)) is None:
        # room above the bound, which nothing passes; where a bug lets something, the name stands over it
        y = axis(low, high + 2 * (LINE_HEIGHT + CLEAR) / (BOTTOM - TOP) * (high - low), BOTTOM, TOP, is_log=is_log)
        label = _free_place(*bound, curves, x, y) or (RIGHT, y.place(bound[1]) - CLEAR)
    parts = _grid(x, y, x_name)
    words = []  # for readers who do not see the chart
    for each in curves:
        _, values = zip(*each.points, strict=True)
        first, last, least, greatest = map(short, (values[0], values[-1], min(values), max(values)))
        words.append(f"{each.name} from {first} to {last}, least {least}, greatest {greatest}")
    for curve in reversed(curves):
        parts += _curve(curve, x, y)
    if bound is not None and label is not None:
        at = y.place(bound[1])
        words.append(f"{bound[0]} {short(bound[1])}")
        parts.append(tag("line", cls="bound", x1=LEFT, x2=RIGHT, y1=at, y2=at))
        parts.append(tag("text", bound[0], cls="axis boundname", x=label[0], y=label[1], text_anchor="end"))
    parts.append(tag("line", cls="cursor", x1=0, x2=0, y1=TOP, y2=BOTTOM))
    legend = [(curve.style, curve.name) for curve in curves] if len(curves) > 1 else ()
    described = f"{title} ({unit}) by {x_name}: {'; '.join(words)}"
    drawing = _chart(parts, described, tabindex=0, data_x=x, data_y=y, data_xname=x_name)
    return Figure(title, unit, drawing, legend, note)


def _chart(parts: Sequence[Markup], words: str, cls: str = "chart", **more: object) -> Markup:
    box = f"0 0 {WIDTH} {HEIGHT}"
    return tag("svg", *parts, cls=cls, viewBox=box, role="img", aria_label=words, **more)


def _grid(x: Axis, y: Axis, x_name: str) -> list[Markup]:
    parts = []
    for value in y.ticks:
        at = y.place(value)
        text = f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e") if y.is_log else short(value)
        parts.append(tag("line", cls="grid", x1=LEFT, x2=RIGHT, y1=at, y2=at))
        parts.append(tag("text", text, cls="axis", x=LEFT - 6, y=at + 3.5, text_anchor="end"))
    for value in x.ticks:
        at = x.place(value)
        parts.append(_below(short(value), at, "end" if at > RIGHT - 8 and value != x.ticks[0] else "middle"))
    parts.append(tag("text", x_name, cls="axis", x=RIGHT, y=HEIGHT - 3, text_anchor="end"))
    return parts


def _below(text: str, at: float, anchor: str = "middle") -> Markup:
    return tag("text", text, cls="axis", x=at, y=BOTTOM + 14, text_anchor=anchor)


def _free_place(name: str, level: float, curves: Sequence[Curve], x: Axis, y: Axis) -> Point | None:
    """Where the name of a level may end, on its base line: above or below the level, as far to the right as it is free.

    None where a curve runs through every such place.
    """
    width, at = len(name) * LETTER, y.place(level)
    for right in range(RIGHT, round(LEFT + width), -8):
        for base in (at - CLEAR - 1, at + LINE_HEIGHT):
            box = (right - width - CLEAR, base - LINE_HEIGHT + 1, right + CLEAR, base + CLEAR)
            if box[1] >= TOP - CLEAR and box[3] <= BOTTOM and not any(_meets(curve, box, x, y) for curve in curves):
                return float(right), base
    return None


def _meets(curve: Curve, box: tuple[float, float, float, float], x: Axis, y: Axis) -> bool:
    """Does a curve run through a box (left, top, right, bottom)?"""
    left, top, right, bottom = box
    places = [(x.place(px), y.place(py)) for px, py in curve.points]
    for (x0, y0), (x1, y1) in zip(places, places[1:] or places, strict=False):
        if x1 < left or x0 > right:
            continue
        slope = (y1 - y0) / (x1 - x0) if x1 > x0 else 0.0
        ends = [y0 + slope * (min(max(left, x0), x1) - x0), y1 - slope * (x1 - max(min(right, x1), x0))]
        if min(ends) <= bottom and max(ends) >= top:
            return True
    return False


def _curve(curve: Curve, x: Axis, y: Axis) -> list[Markup]:
    places = [(x.place(px), y.place(py)) for px, py in curve.points]
    points = " ".join(f"{round(px, 1):g},{round(py, 1):g}" for px, py in places)
    shape = "line" if len(places) >= LEAST_FOR_LINE else "unjoined"  # which page.js reads the values from
    line = tag("polyline", cls=f"{shape} {curve.style}", data_name=curve.name, points=points)
    if not curve.dots and len(places) >= FEW:
        return [line]
    radius = 2.6 if shape == "line" else 4.0
    return [line, *(tag("circle", cls=f"dot {curve.style}", cx=px, cy=py, r=radius) for px, py in places)]


def bar_chart(
    title: str, unit: str, labels: Sequence[str], sets: Sequence[Bars], x_name: str, note: str = ""
) -> Figure:
    """Shares as upright bars in percent, those of several sets side by side; each set has a share for every label."""
    if not labels or not sets:
        return Figure(title, unit, EMPTY, note=note)
    y = axis(0.0, 100 * (max(max(each.shares) for each in sets) or 1.0), BOTTOM, TOP)
    room = (RIGHT - LEFT) / len(labels)
    width = min(26.0, room * 0.8 / len(sets))
    parts = _grid(Axis(0, 1, LEFT, RIGHT), y, x_name)
    every = max(1, math.ceil(len(labels) * max(map(len, labels)) * 6.5 / (RIGHT - LEFT)))
    for number, label in enumerate(labels):
        middle = LEFT + (number + 0.5) * room
        for place, each in enumerate(sets):
            percent = each.shares[number] * 100
            left, top = middle + (place - len(sets) / 2) * width, y.place(percent)
            size = {"x": left, "y": top, "width": max(width - 1, 1.0), "height": BOTTOM - top}
            name = tag("title", f"{each.name}, {label}: {short(percent)}%")
            parts.append(tag("rect", name, cls=f"bar {each.style}", **size))
        if number % every == 0:
            parts.append(_below(label, middle))
    words = []
    for each in sets:
        most = max(each.shares)
        words.append(f"{each.name}: most at {labels[each.shares.index(most)]} ({short(100 * most)}%)")
    legend = [(each.style, each.name) for each in sets] if len(sets) > 1 else ()
    return Figure(title, unit, _chart(parts, f"{title}, in percent: {'; '.join(words)}", "chart bars"), legend, note)


def share_bar(title: str, unit: str, parts: Sequence[tuple[str, float]]) -> Figure:
    """One horizontal bar cut into named shares, with a legend of its own."""
    total = sum(value for _, value in parts)
    if total <= 0:
        return Figure(title, unit, EMPTY)
    pieces, names, left = [], [], 0.0
    for number, (name, value) in enumerate(parts):
        share = 100 * value / total
        size = {"x": f"{left:.2f}", "y": 0, "width": f"{max(share - 0.2, 0.05):.2f}", "height": 14}
        pieces.append(tag("rect", tag("title", f"{name}: {short(share)}%"), cls=f"mark c{number}", **size))
        names.append(tag("li", tag("i", cls=f"swatch c{number}"), f"{name} ", tag("b", f"{short(share)}%")))
        left += share
    words = f"{title}: {', '.join(f'{name} {short(100 * value / total)}%' for name, value in parts)}"
    box = {"viewBox": "0 0 100 14", "preserveAspectRatio": "none", "role": "img", "aria_label": words}
    return Figure(title, unit, tag("svg", *pieces, cls="chart share", **box) + tag("ul", *names, cls="legend wrap"))
