"""The charts of charts.toml with the values of a run, as JSON that page.js passes to uPlot."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import msgspec

from leeway.launch.observe.metrics import PART_PREFIX, POOL_PREFIX, labelled
from leeway.launch.observe.status import LAG_METRICS, lag_control_effect
from leeway.launch.observe.trace import Event
from leeway.launch.report.data import Point, RunData, thinned
from leeway.launch.text import shortened

DASH = "\N{EN DASH}"
COLORS = ("c1", "c2", "c3", "c4", "c5", "c6")
"""Colours of the curves of a chart; CSS classes of page.css."""
FEW = 12
"""Number of points below which a curve is drawn with markers."""
MAX_NAME = 60
STEPS_SHOWN, MAX_LANES, MAX_SPANS = 10, 16, 20_000
"""Limits of the chart of spans: steps, actors and spans."""
KINDS = ("state", "wait_for_batch", "step", "evaluate", "generate", "update")
"""Kinds of spans, in drawing order."""


class Chart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A chart as defined in charts.toml."""

    part: str
    """Question that the chart answers: "learning", "health", "waiting" or "lag"."""
    title: str
    unit: str
    good: str
    otherwise: str
    alerts: list[str]
    """Kinds of alerts that mark the chart as not in order while they are active."""
    x: str = "step"
    curves: dict[str, str] = {}
    right: dict[str, str] = {}
    """Curves with another unit, on the right axis."""
    of_pools: str = ""
    bound: str = ""
    """Config key whose value is drawn as a horizontal line."""
    floor: float | None = None
    ceiling: float | None = None
    may_be_log: bool = False
    is_wide: bool = False


CHARTS = msgspec.convert(
    tomllib.loads(resources.files("leeway.launch.report").joinpath("charts.toml").read_text("utf-8")), dict[str, Chart]
)


def short(value: float | None) -> str:
    """Format a number with three significant digits, or None as a dash."""
    if value is None:
        return DASH
    size = abs(value)
    if value and size < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    for limit, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


class Curve(NamedTuple):
    """A legend entry: a curve with the numbers shown beside its name."""

    name: str
    color: str
    numbers: str


class Figure(NamedTuple):
    """A chart with its values. `plot` is the input of page.js; `plot` is None if the run has no values."""

    chart: Chart
    plot: dict[str, Any] | None = None
    legend: Sequence[Curve] = ()
    note: str = ""
    words: str = ""
    """Text alternative of the chart, for screen readers."""
    alerts: Sequence[str] = ()
    """Texts of the active alerts of the chart."""


def figures(run: RunData) -> list[Figure]:
    """Return the charts of a run, without comparisons of pools if there is only one pool."""
    found = (SPECIAL[name](run, chart) if name in SPECIAL else _metrics(run, chart) for name, chart in CHARTS.items())
    active = list(zip(run.status.alert_kinds, run.status.alerts, strict=False))
    return [
        figure._replace(alerts=[text for kind, text in active if kind in figure.chart.alerts])
        for figure in found
        if figure is not None
    ]


def lines(run: RunData, chart: Chart, curves: Mapping[str, Sequence[Point]]) -> Figure:
    """Return a line chart; its scale is logarithmic if `may_be_log` is set and values span two orders of magnitude.

    Curves whose names are in `chart.right` use the right axis.
    """
    omitted = [shortened(name, MAX_NAME) for name in [*curves][len(COLORS) :]]
    note = f"Not drawn: {', '.join(omitted)}." if omitted else ""
    drawn = [(name, color, points) for (name, points), color in zip(curves.items(), COLORS, strict=False) if points]
    if not drawn:
        return Figure(chart, note=note)
    bound = run.knob(chart.bound)
    if isinstance(bound, int):
        xs = [x for *_, points in drawn for x, _ in points]
        ends = [(x, float(bound)) for x in dict.fromkeys((min(xs), max(xs)))]
        drawn.append((chart.bound.rpartition(".")[2], "bound", ends))
    values = [y for *_, points in drawn for _, y in points if y > 0]
    is_log = chart.may_be_log and bool(values) and max(values) > 100 * min(values)
    series, legend, words = [], [], []
    for name, color, points in drawn:
        x, y = zip(*points, strict=True)
        first, last, least, greatest = map(short, (y[0], y[-1], min(y), max(y)))
        words.append(f"{name} from {first} to {last}, minimum {least}, maximum {greatest}")
        legend.append(Curve(name, color, last if first == last else f"{first} → {last}"))
        shown = [None if is_log and value <= 0 else float(f"{value:.6g}") for value in y]
        dots = len(y) < FEW and color != "bound"
        scale = "right" if name in chart.right.values() else "y"
        series.append({"name": name, "color": color, "points": [x, shown], "dots": dots, "scale": scale})
    plot = {"kind": "lines", "x": chart.x, "log": is_log, "floor": chart.floor, "ceiling": chart.ceiling}
    described = f"{chart.title} ({chart.unit}) by {chart.x}: {'; '.join(words)}"
    return Figure(chart, {**plot, "series": series}, legend, note, described)


def pools_of(run: RunData) -> list[str]:
    """Return the names of the pools with metrics."""
    return sorted({labelled(name)[2] for name in run.metrics.columns if name.startswith(POOL_PREFIX)})


def _metrics(run: RunData, chart: Chart) -> Figure | None:
    """Return the chart of the metrics in `curves`, or of the metric `of_pools` for two or more pools."""
    curves = chart.curves
    if chart.of_pools:
        curves = {f"{POOL_PREFIX}{pool}/{chart.of_pools}": pool for pool in pools_of(run)}
        if len(curves) < 2:
            return None
    return lines(run, chart, {name: run.metrics.of(metric) for metric, name in (curves | chart.right).items()})


def _lag(run: RunData, chart: Chart) -> Figure | None:
    """Return the chart of lag, allowed lag and drift, with a note on the effect of lag control."""
    figure = _metrics(run, chart)
    lags = {name: [y for _, y in run.metrics.of(name)] for name in LAG_METRICS}
    return figure and figure._replace(note=lag_control_effect(lags, run.knob(chart.bound)))


def _reward(run: RunData, chart: Chart) -> Figure:
    parts = {labelled(name)[2]: run.metrics.of(name) for name in run.metrics.columns if name.startswith(PART_PREFIX)}
    return lines(run, chart, {"sum" if parts else "reward": run.metrics.of("reward/mean"), **parts})


def _accuracy(run: RunData, chart: Chart) -> Figure:
    values = {
        which: [(float(each.policy_version), getattr(each, which)) for each in run.status.evaluations]
        for which in ("greedy", "sampled")
    }
    return lines(run, chart, {name: sorted(p for p in points if p[1] is not None) for name, points in values.items()})


def _queue(run: RunData, chart: Chart) -> Figure:
    return lines(run, chart, {"ready": thinned([(at_s - run.start_s, count) for at_s, count in run.ready])})


def _lags(run: RunData, chart: Chart) -> Figure:
    """Return a bar chart of the percentage of training tokens by lag."""
    lags = sum((Counter(of_pool) for of_pool in run.status.lags.values()), Counter[int]())
    if not lags:
        return Figure(chart)
    percents = [round(100 * lags[lag] / lags.total(), 2) for lag in range(1 + max(lags))]
    most = f"most at {percents.index(max(percents))} ({short(max(percents))}%)"
    series = {"name": "tokens", "color": COLORS[0], "points": [list(range(len(percents))), percents]}
    plot = {"kind": "bars", "x": chart.x, "series": [series]}
    return Figure(chart, plot, [Curve("tokens", COLORS[0], most)], words=f"{chart.title}, in percent: {most}")


def _steps(run: RunData, chart: Chart) -> Figure:
    """Return a few steps as marks in lanes. A mark has a lane, a kind, start and end seconds of the run, and a text."""
    if not run.spans:
        return Figure(chart)
    steps = [each for each in run.spans if each.cat == "step"]
    middle = steps[max(0, (len(steps) - STEPS_SHOWN) // 2) :][:STEPS_SHOWN] or run.spans
    start_s, end_s = middle[0].start_s, max(each.end_s for each in middle)
    roles = sorted({each.who for each in run.spans}, key=lambda name: (len(name), name))
    actors = [name for name in roles if name.startswith("actor-")]
    lanes = ["learner", *actors[:MAX_LANES], *(["evaluation"] if "evaluation" in roles else [])]
    of_lanes = (each for each in run.spans if each.who in lanes and each.cat in KINDS)
    inside = [each for each in of_lanes if each.start_s < end_s and each.end_s > start_s]
    inside.sort(key=lambda each: KINDS.index(each.cat))

    def at(time_s: float) -> float:
        return round(time_s - run.start_s, 4)

    marks = [(lanes.index(each.who), each.cat, at(each.start_s), at(each.end_s), _words(each)) for each in inside]
    plot = {"kind": "lanes", "lanes": lanes, "marks": marks[:MAX_SPANS], "span": [at(start_s), at(end_s)]}
    return Figure(chart, plot, words=chart.title)


def _words(span: Event) -> str:
    args = span.args
    version = f" to version {args['version']}" if span.cat == "update" and "version" in args else ""
    lag = f", lag mean {args['lag_mean']:.2f}, max {args.get('lag_max') or 0:g}" if "lag_mean" in args else ""
    tokens = f", {args['num_tokens']:,} tokens" if args.get("num_tokens") else ""
    return f"{span.who}: {span.name}{version}, {span.end_s - span.start_s:.3f} s{lag}{tokens}"


SPECIAL: Mapping[str, Callable[[RunData, Chart], Figure | None]] = {
    "reward": _reward,
    "accuracy": _accuracy,
    "queue": _queue,
    "steps": _steps,
    "lag": _lag,
    "lags": _lags,
}
"""Maps a chart to the function that builds it, for charts that show more than metrics of steps."""
