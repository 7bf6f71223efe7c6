"""Line charts and bars as inline SVG: no library, no script. Colours are the page's, by class.

A chart is drawn for a card about 360 px wide, so that its text has the size of the page's small text. What page.js
needs to show values under the pointer stands in `data-` attributes; the chart is whole without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from markupsafe import Markup, escape

Point = tuple[float, float]

DASH = "\N{EN DASH}"
"""In place of a figure that is not known."""
WIDTH, HEIGHT = 372, 196
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 30
LOG_DECADES = 2.0
"""Values above 0 that span more are drawn on a logarithmic axis, where the chart allows one."""
EMPTY = Markup('<p class="empty">No values in this run.</p>')


def tag(name: str, *inner: str, cls: str = "", **attributes: object) -> Markup:
    """An element; text is escaped, numbers are rounded to a tenth of a pixel, and `_` in a name is `-`."""
    written = f' class="{escape(cls)}"' if cls else ""
    for key, value in attributes.items():
        text = f"{round(value, 1):g}" if isinstance(value, float) else str(value)
        written += f' {key.replace("_", "-")}="{escape(text)}"'
    return Markup(f"<{name}{written}>{Markup('').join(inner)}</{name}>")


class Curve(NamedTuple):
    """One line of a chart."""

    name: str
    points: Sequence[Point]
    style: str
    """Class of the page: a1, a2 (the run: main, second) or b1, b2 (the run that it is compared with)."""
    dots: bool = False
    """Mark every point: there are few."""


@dataclass(frozen=True)
class Chart:
    """What a chart shows."""

    title: str
    unit: str
    """Of y."""
    curves: Sequence[Curve]
    x_name: str = "step"
    bound: tuple[str, float] | None = None
    """Name and value of a level that is not to be passed."""
    floor: float | None = None
    """The axis reaches down to it at least."""
    ceiling: float | None = None
    may_be_log: bool = False
    note: str = ""


class Bars(NamedTuple):
    """Bars of one colour in a histogram."""

    name: str
    shares: Sequence[float]
    style: str


# --- axes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """From values to pixels."""

    low: float
    high: float
    start: float
    """Pixel of `low`."""
    end: float
    is_log: bool = False
    ticks: Sequence[float] = field(default_factory=tuple)

    def place(self, value: float) -> float:
        """The pixel."""
        low, high = self._of(self.low), self._of(self.high)
        share = (self._of(value) - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def _of(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.is_log else value


def axis(low: float, high: float, start: float, end: float, num: int = 4, *, is_log: bool = False) -> Axis:
    """An axis that ends at round values.

    Args:
        low: least value.
        high: greatest value.
        start: pixel of the least.
        end: pixel of the greatest.
        num: about how many ticks.
        is_log: powers of ten.
    """
    if is_log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        last = max(last, first + 1)
        stride = max(1, math.ceil((last - first) / num))
        return Axis(10.0**first, 10.0**last, start, end, True, [10.0**e for e in range(first, last + 1, stride)])
    if high <= low:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    step = _round_step((high - low) / num)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(first * step, last * step, start, end, False, [i * step for i in range(first, last + 1)])


def inner_axis(low: float, high: float, start: float, end: float, num: int) -> Axis:
    """An axis that begins and ends with the data, with ticks at round values between."""
    if high <= low:
        high = low + 1
    step = _round_step((high - low) / num)
    ticks = [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return Axis(low, high, start, end, False, ticks)


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= rough * (1 - 1e-9))


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
    return (
        f"{value:.2g}".replace("e-0", "e-") if size >= 1e-4 else f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    )


# --- charts -------------------------------------------------------------------------------------------


def line_chart(chart: Chart) -> Markup:
    """The chart; a sentence in its place where there is nothing to draw."""
    curves = [curve for curve in chart.curves if curve.points]
    if not curves:
        return EMPTY
    xs = [x for curve in curves for x, _ in curve.points]
    x = inner_axis(min(xs), max(xs), LEFT, WIDTH - RIGHT, 5)
    y = _y_axis(chart, [y for curve in curves for _, y in curve.points])
    parts = _grid(x, y, chart.x_name)
    if chart.bound is not None:
        name, at = chart.bound[0], y.place(chart.bound[1])
        parts.append(tag("line", cls="bound", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at))
        parts.append(tag("text", name, cls="axis boundname", x=WIDTH - RIGHT, y=at + 12, text_anchor="end"))
    for curve in reversed(curves):  # the first on top
        parts += _curve(curve, x, y)
    parts.append(tag("line", cls="cursor", x1=0, x2=0, y1=TOP, y2=HEIGHT - BOTTOM))
    scales = [f"{each.low:.6g} {each.high:.6g} {each.start:g} {each.end:g}" for each in (x, y)]
    return tag(
        "svg",
        *parts,
        cls="chart",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        tabindex=0,
        aria_label=_in_words(chart, curves),
        data_x=scales[0],
        data_y=f"{scales[1]} {'log' if y.is_log else 'linear'}",
        data_xname=chart.x_name,
    )


def _y_axis(chart: Chart, ys: Sequence[float]) -> Axis:
    low, high = min(ys), max(ys)
    if chart.bound is not None:
        high = max(high, chart.bound[1])
    if chart.floor is not None:
        low = min(low, chart.floor)
    if chart.ceiling is not None and high <= chart.ceiling * (1 + 1e-3):  # but for rounding, it is not passed
        high = chart.ceiling
    is_log = chart.may_be_log and low > 0 and math.log10(high / low) > LOG_DECADES
    return axis(low, high, HEIGHT - BOTTOM, TOP, 4, is_log=is_log)


def _grid(x: Axis, y: Axis, x_name: str) -> list[Markup]:
    parts = []
    for value in y.ticks:
        at = y.place(value)
        text = f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e") if y.is_log else short(value)
        parts.append(tag("line", cls="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at))
        parts.append(tag("text", text, cls="axis", x=LEFT - 6, y=at + 3.5, text_anchor="end"))
    for value in x.ticks:
        at = x.place(value)
        anchor = "end" if at > WIDTH - RIGHT - 8 and value != x.ticks[0] else "middle"
        parts.append(_below(short(value), at, anchor))
    parts.append(tag("text", x_name, cls="axis", x=WIDTH - RIGHT, y=HEIGHT - 3, text_anchor="end"))
    return parts


def _below(text: str, at: float, anchor: str = "middle") -> Markup:
    return tag("text", text, cls="axis", x=at, y=HEIGHT - BOTTOM + 14, text_anchor=anchor)


def _curve(curve: Curve, x: Axis, y: Axis) -> list[Markup]:
    places = [(x.place(px), y.place(max(py, y.low) if y.is_log else py)) for px, py in curve.points]
    points = " ".join(f"{round(px, 1):g},{round(py, 1):g}" for px, py in places)
    line = tag("polyline", cls=f"line {curve.style}", data_name=curve.name, points=points)
    if not curve.dots and len(places) > 1:
        return [line]
    return [line, *(tag("circle", cls=f"dot {curve.style}", cx=px, cy=py, r=2.6) for px, py in places)]


def _in_words(chart: Chart, curves: Sequence[Curve]) -> str:
    """For readers who do not see the chart."""
    parts = []
    for curve in curves:
        ys = [value for _, value in curve.points]
        parts.append(
            f"{curve.name} from {short(ys[0])} to {short(ys[-1])}, least {short(min(ys))}, greatest {short(max(ys))}"
        )
    bound = f"; {chart.bound[0]} {short(chart.bound[1])}" if chart.bound is not None else ""
    return f"{chart.title} ({chart.unit}) by {chart.x_name}: {'; '.join(parts)}{bound}"


def bar_chart(title: str, labels: Sequence[str], sets: Sequence[Bars], x_name: str) -> Markup:
    """Shares as upright bars, those of several sets side by side.

    Args:
        title: for readers who do not see it.
        labels: of the groups of bars.
        sets: each with a share for every label.
        x_name: with its unit.
    """
    if not labels or not sets:
        return EMPTY
    highest = max(max(each.shares, default=0.0) for each in sets) or 1.0
    y = axis(0.0, highest * 100, HEIGHT - BOTTOM, TOP)
    room = (WIDTH - LEFT - RIGHT) / len(labels)
    width = min(26.0, room * 0.8 / len(sets))
    parts = _grid(Axis(0, 1, LEFT, WIDTH - RIGHT), y, x_name)
    every = max(1, math.ceil(len(labels) * max(map(len, labels)) * 6.5 / (WIDTH - LEFT - RIGHT)))
    for number, label in enumerate(labels):
        middle = LEFT + (number + 0.5) * room
        for place, each in enumerate(sets):
            percent = each.shares[number] * 100
            left, top = middle + (place - len(sets) / 2) * width, y.place(percent)
            size = {"x": left, "y": top, "width": max(width - 1, 1.0), "height": HEIGHT - BOTTOM - top}
            name = tag("title", f"{each.name}, {label}: {short(percent)}%")
            parts.append(tag("rect", name, cls=f"bar {each.style}", **size))
        if number % every == 0:
            parts.append(_below(label, middle))
    most = [max(range(len(labels)), key=lambda number: each.shares[number]) for each in sets]
    words = "; ".join(
        f"{each.name}: most at {labels[top]} ({short(each.shares[top] * 100)}%)"
        for each, top in zip(sets, most, strict=True)
    )
    words, box = f"{title}, in percent: {words}", f"0 0 {WIDTH} {HEIGHT}"
    return tag("svg", *parts, cls="chart bars", viewBox=box, role="img", aria_label=words)


def share_bar(title: str, parts: Sequence[tuple[str, float]]) -> Markup:
    """One horizontal bar cut into named shares, with a legend of its own."""
    total = sum(value for _, value in parts)
    if total <= 0:
        return EMPTY
    pieces, names, left = [], [], 0.0
    for number, (name, value) in enumerate(parts):
        share = 100 * value / total
        words, width = f"{name}: {short(share)}%", f"{max(share - 0.2, 0.05):.2f}"
        pieces.append(
            tag("rect", tag("title", words), cls=f"mark c{number}", x=f"{left:.2f}", y=0, width=width, height=14)
        )
        names.append(tag("li", tag("i", cls=f"swatch c{number}"), f"{name} ", tag("b", f"{short(share)}%")))
        left += share
    words = ", ".join(f"{name} {short(100 * value / total)}%" for name, value in parts)
    box = {"viewBox": "0 0 100 14", "preserveAspectRatio": "none", "role": "img", "aria_label": f"{title}: {words}"}
    return tag("svg", *pieces, cls="chart share", **box) + tag("ul", *names, cls="legend wrap")
