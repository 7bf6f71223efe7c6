"""Line charts and bars as inline SVG: no library, no script. Colours are the page's, by class.

A chart is drawn for a card about 360 px wide, so that its text has the size of the page's small text. What page.js
needs to show values under the pointer stands in `data-` attributes; the chart is whole without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from launch.report.series import Point

DASH = "\N{EN DASH}"
"""In place of a figure that is not known."""
WIDTH, HEIGHT = 372, 196
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 30
LOG_DECADES = 2.0
"""Values above 0 that span more are drawn on a logarithmic axis, where the chart allows one."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    name: str
    points: Sequence[Point]
    style: str
    """Class of the page: a1, a2 (the run: main, second) or b1, b2 (the run that it is compared with)."""
    dots: bool = False
    """Mark every point: there are few."""


@dataclass(frozen=True)
class Bound:
    """A level that is not to be passed."""

    name: str
    value: float


@dataclass(frozen=True)
class Chart:
    """What a chart shows."""

    title: str
    unit: str
    """Of y."""
    curves: Sequence[Curve]
    x_name: str = "step"
    bound: Bound | None = None
    floor: float | None = None
    """The axis reaches down to it at least."""
    ceiling: float | None = None
    may_be_log: bool = False
    note: str = ""


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


def line_chart(chart: Chart) -> Markup:
    """The chart; a sentence in its place where there is nothing to draw."""
    curves = [curve for curve in chart.curves if curve.points]
    if not curves:
        return Markup('<p class="empty">No values in this run.</p>')
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    x = inner_axis(min(xs), max(xs), LEFT, WIDTH - RIGHT, 5)
    y = _y_axis(chart, ys)
    parts = [_grid(x, y), *_bound(chart.bound, y)]
    parts += [_curve(curve, x, y) for curve in reversed(curves)]  # the first on top
    parts.append(
        Markup('<text class="axis" x="{}" y="{}" text-anchor="end">{}</text>').format(
            WIDTH - RIGHT, HEIGHT - 3, chart.x_name
        )
    )
    parts.append(Markup('<line class="cursor" x1="0" x2="0" y1="{}" y2="{}"/>').format(TOP, HEIGHT - BOTTOM))
    return Markup(
        '<svg class="chart" viewBox="0 0 {} {}" role="img" tabindex="0" aria-label="{}" '
        'data-x="{} {} {} {}" data-y="{} {} {} {} {}" data-xname="{}">{}</svg>'
    ).format(
        WIDTH,
        HEIGHT,
        _summary(chart, curves),
        *(_number(v) for v in (x.low, x.high, x.start, x.end)),
        *(_number(v) for v in (y.low, y.high, y.start, y.end)),
        "log" if y.is_log else "linear",
        chart.x_name,
        Markup("").join(parts),
    )


def _y_axis(chart: Chart, ys: Sequence[float]) -> Axis:
    low, high = min(ys), max(ys)
    if chart.bound is not None:
        high = max(high, chart.bound.value)
    if chart.floor is not None:
        low = min(low, chart.floor)
    if chart.ceiling is not None and high <= chart.ceiling * (1 + 1e-3):  # but for rounding, it is not passed
        high = chart.ceiling
    is_log = chart.may_be_log and low > 0 and math.log10(high / low) > LOG_DECADES
    return axis(low, high, HEIGHT - BOTTOM, TOP, 4, is_log=is_log)


def _grid(x: Axis, y: Axis) -> Markup:
    parts = []
    for value in y.ticks:
        at = round(y.place(value), 1)
        parts.append(Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(LEFT, WIDTH - RIGHT, at, at))
        parts.append(
            Markup('<text class="axis" x="{}" y="{}" text-anchor="end">{}</text>').format(
                LEFT - 6, at + 3.5, _power(value) if y.is_log else short(value)
            )
        )
    for value in x.ticks:
        at = round(x.place(value), 1)
        if at > WIDTH - RIGHT - 24 and value != x.ticks[0]:  # the name of the axis stands there
            anchor = "end" if at > WIDTH - RIGHT - 8 else "middle"
        else:
            anchor = "middle"
        parts.append(
            Markup('<text class="axis" x="{}" y="{}" text-anchor="{}">{}</text>').format(
                at, HEIGHT - BOTTOM + 14, anchor, short(value)
            )
        )
    return Markup("").join(parts)


def _power(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")


def _bound(bound: Bound | None, y: Axis) -> list[Markup]:
    if bound is None:
        return []
    at = round(y.place(bound.value), 1)
    return [
        Markup('<line class="bound" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(LEFT, WIDTH - RIGHT, at, at),
        Markup('<text class="axis boundname" x="{}" y="{}" text-anchor="end">{}</text>').format(
            WIDTH - RIGHT, at + 12, bound.name
        ),
    ]


def _curve(curve: Curve, x: Axis, y: Axis) -> Markup:
    def pixels(points: Sequence[Point]) -> list[tuple[float, float]]:
        return [(round(x.place(px), 1), round(y.place(py if not y.is_log else max(py, y.low)), 1)) for px, py in points]

    places = pixels(curve.points)
    line = Markup('<polyline class="line {}" data-name="{}" points="{}"/>').format(
        curve.style, curve.name, " ".join(f"{px:g},{py:g}" for px, py in places)
    )
    if not curve.dots and len(places) > 1:
        return line
    dots = Markup("").join(
        Markup('<circle class="dot {}" cx="{}" cy="{}" r="2.6"/>').format(curve.style, px, py) for px, py in places
    )
    return line + dots


def _summary(chart: Chart, curves: Sequence[Curve]) -> str:
    """For whoever does not see the chart."""
    parts = []
    for curve in curves:
        ys = [value for _, value in curve.points]
        parts.append(
            f"{curve.name} from {short(ys[0])} to {short(ys[-1])}, least {short(min(ys))}, greatest {short(max(ys))}"
        )
    bound = f"; {chart.bound.name} {short(chart.bound.value)}" if chart.bound is not None else ""
    return f"{chart.title} ({chart.unit}) by {chart.x_name}: {'; '.join(parts)}{bound}"


def _number(value: float) -> str:
    return f"{value:.6g}"


@dataclass(frozen=True)
class BarSet:
    """Bars of one colour in a histogram."""

    name: str
    shares: Sequence[float]
    style: str


def bar_chart(title: str, labels: Sequence[str], sets: Sequence[BarSet], x_name: str) -> Markup:
    """Shares as upright bars, those of several sets side by side.

    Args:
        title: for whoever does not see it.
        labels: of the groups of bars.
        sets: each with a share for every label.
        x_name: with its unit.
    """
    if not labels or not sets:
        return Markup('<p class="empty">No values in this run.</p>')
    highest = max(max(each.shares, default=0.0) for each in sets) or 1.0
    y = axis(0.0, highest * 100, HEIGHT - BOTTOM, TOP)
    room = (WIDTH - LEFT - RIGHT) / len(labels)
    width = min(26.0, room * 0.8 / len(sets))
    parts = [_grid(Axis(0, 1, LEFT, WIDTH - RIGHT), y)]
    every = max(1, math.ceil(len(labels) * max(map(len, labels)) * 6.5 / (WIDTH - LEFT - RIGHT)))
    for number, label in enumerate(labels):
        middle = LEFT + (number + 0.5) * room
        for place, each in enumerate(sets):
            top = y.place(each.shares[number] * 100)
            left = middle + (place - len(sets) / 2) * width
            parts.append(
                Markup(
                    '<rect class="bar {}" x="{}" y="{}" width="{}" height="{}"><title>{} {}: {}%</title></rect>'
                ).format(
                    each.style,
                    round(left, 1),
                    round(top, 1),
                    round(max(width - 1, 1), 1),
                    round(HEIGHT - BOTTOM - top, 1),
                    f"{each.name},",
                    label,
                    short(each.shares[number] * 100),
                )
            )
        if number % every == 0:
            parts.append(
                Markup('<text class="axis" x="{}" y="{}" text-anchor="middle">{}</text>').format(
                    round(middle, 1), HEIGHT - BOTTOM + 14, label
                )
            )
    parts.append(
        Markup('<text class="axis" x="{}" y="{}" text-anchor="end">{}</text>').format(WIDTH - RIGHT, HEIGHT - 3, x_name)
    )
    return Markup('<svg class="chart bars" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, HEIGHT, _bars_in_words(title, labels, sets), Markup("").join(parts)
    )


def _bars_in_words(title: str, labels: Sequence[str], sets: Sequence[BarSet]) -> str:
    def most(each: BarSet) -> str:
        top = max(range(len(labels)), key=lambda number: each.shares[number])
        return f"{each.name}: most at {labels[top]} ({short(each.shares[top] * 100)}%)"

    return f"{title}, in percent: {'; '.join(most(each) for each in sets)}"


def share_bar(title: str, parts: Sequence[tuple[str, float]]) -> Markup:
    """One horizontal bar cut into named shares, with a legend of its own."""
    total = sum(value for _, value in parts)
    if total <= 0:
        return Markup('<p class="empty">No values in this run.</p>')
    pieces, names = [], []
    left = 0.0
    for number, (name, value) in enumerate(parts):
        share = 100 * value / total
        pieces.append(
            Markup('<rect class="mark c{}" x="{}" y="0" width="{}" height="14"><title>{}: {}%</title></rect>').format(
                number, round(left, 2), round(max(share - 0.2, 0.05), 2), name, short(share)
            )
        )
        names.append(Markup('<li><i class="swatch c{}"></i>{} <b>{}%</b></li>').format(number, name, short(share)))
        left += share
    words = ", ".join(f"{name} {short(100 * value / total)}%" for name, value in parts)
    return Markup(
        '<svg class="chart share" viewBox="0 0 100 14" preserveAspectRatio="none" role="img" aria-label="{}: {}">{}'
        '</svg><ul class="legend wrap">{}</ul>'
    ).format(title, words, Markup("").join(pieces), Markup("").join(names))
