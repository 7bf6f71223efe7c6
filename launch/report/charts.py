"""Charts: those of charts.toml with the values of a run, as JSON that page.js hands to uPlot."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import msgspec

from launch.observe.metrics import PART_PREFIX, POOL_PREFIX, labelled
from launch.observe.view import commonest
from launch.report.data import Metrics, Point, RunData, thinned
from launch.report.samples import length_label
from launch.report.timeline import lanes_of_run, lanes_of_steps
from launch.text import shortened

DASH = "\N{EN DASH}"
COLORS = ("c1", "c2", "c3", "c4", "c5", "c6")
"""Colours of the curves of a chart, as page.css names them."""
FEW, LEAST_FOR_LINE = 12, 3
"""Curves of fewer points than the first have marks; those of fewer than the second have marks and no line."""
MAX_NAME = 60
FAILED = {
    "failed": "all",
    "failed_reward": "reward",
    "failed_generation": "generation",
    "failed_quarantined": "quarantined",
    "failed_lease": "lease lost",
}
"""Counts of the ledger -> names of the curves of failed samples."""


class Chart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A chart as charts.toml describes it."""

    part: str
    """The question that it answers: "learning", "health", "waiting" or "lag"."""
    title: str
    unit: str
    good: str
    otherwise: str
    x: str = "step"
    curves: dict[str, str] = {}
    of_pools: str = ""
    bound: str = ""
    """Key of the config whose value is drawn as a line."""
    floor: float | None = None
    ceiling: float | None = None
    may_be_log: bool = False
    is_wide: bool = False


CHARTS = msgspec.convert(
    tomllib.loads(resources.files("launch.report").joinpath("charts.toml").read_text("utf-8")), dict[str, Chart]
)


class Curve(NamedTuple):
    """A curve, or the bars of one set."""

    name: str
    points: Sequence[Point]
    color: str
    numbers: str = ""
    """What the legend shows of it."""


class Figure(NamedTuple):
    """A chart with its values: `plot` is for page.js, None if the run has no values for it."""

    chart: Chart
    plot: dict[str, Any] | None = None
    legend: Sequence[Curve] = ()
    note: str = ""
    words: str = ""
    """The chart in words, for readers who do not see it."""


def short(value: float) -> str:
    """Return a figure with three digits."""
    size = abs(value)
    if value and size < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    for limit, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


def figures(run: RunData) -> list[Figure]:
    """Return the charts of a run; charts of failed samples and of pools are left out if there are none."""
    found = []
    for name, chart in CHARTS.items():
        if name in SPECIAL:
            figure = SPECIAL[name](run, chart)
        elif chart.of_pools:
            figure = _pools(run, chart)
        else:
            metrics = zip(COLORS, chart.curves.items(), strict=False)
            figure = lines(
                chart, [Curve(name, run.metrics.of(metric), color) for color, (metric, name) in metrics], run
            )
        found += [figure] if figure is not None else []
    return found


def lines(chart: Chart, curves: Sequence[Curve], run: RunData, note: str = "") -> Figure:
    """Return a line chart, a logarithmic one if its values span two orders of magnitude and the chart may be."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return Figure(chart, note=note)
    bound = run.knob(chart.bound)
    if isinstance(bound, int):
        xs = [x for curve in curves for x, _ in curve.points]
        ends = dict.fromkeys((min(xs), max(xs)))
        curves.append(Curve(chart.bound.rpartition(".")[2], [(x, float(bound)) for x in ends], "bound"))
    values = [y for curve in curves for _, y in curve.points if y > 0]
    is_log = chart.may_be_log and bool(values) and max(values) > 100 * min(values)
    series, legend, words = [], [], []
    for curve in curves:
        x, y = zip(*curve.points, strict=True)
        first, last, least, greatest = map(short, (y[0], y[-1], min(y), max(y)))
        words.append(f"{curve.name} from {first} to {last}, least {least}, greatest {greatest}")
        legend.append(curve._replace(numbers=last if first == last else f"{first} → {last}"))
        is_bound = curve.color == "bound"
        shape = {"join": is_bound or len(y) >= LEAST_FOR_LINE, "dots": len(y) < FEW and not is_bound}
        shown = [None if is_log and value <= 0 else float(f"{value:.6g}") for value in y]
        series.append({"name": curve.name, "color": curve.color, "points": [x, shown], **shape})
    plot = {"kind": "lines", "x": chart.x, "log": is_log, "floor": chart.floor, "ceiling": chart.ceiling}
    described = f"{chart.title} ({chart.unit}) by {chart.x}: {'; '.join(words)}"
    return Figure(chart, {**plot, "series": series}, legend, note, described)


def bars(chart: Chart, labels: Sequence[str], sets: Mapping[str, Sequence[float]], note: str = "") -> Figure:
    """Return bars in percent; each set has a share for every label."""
    if not labels:
        return Figure(chart, note=note)
    series, legend = [], []
    for color, (name, shares) in zip(COLORS, sets.items(), strict=False):
        percents = [round(100 * share, 2) for share in shares]
        most = max(range(len(labels)), key=percents.__getitem__)
        series.append({"name": name, "color": color, "points": [list(range(len(labels))), percents]})
        legend.append(Curve(name, (), color, f"most at {labels[most]} ({short(percents[most])}%)"))
    words = f"{chart.title}, in percent: {'; '.join(f'{each.name} {each.numbers}' for each in legend)}"
    return Figure(chart, {"kind": "bars", "x": chart.x, "labels": labels, "series": series}, legend, note, words)


def pools_of(metrics: Metrics) -> list[str]:
    """Return the names of the pools that have metrics."""
    return sorted({labelled(name)[2] for name in metrics.series if name.startswith(POOL_PREFIX)})


def _not_drawn(names: Sequence[str]) -> str:
    return f"Not drawn: {', '.join(shortened(name, MAX_NAME) for name in names)}." if names else ""


def _pools(run: RunData, chart: Chart) -> Figure | None:
    pools = pools_of(run.metrics)
    if len(pools) < 2:
        return None
    named = zip(COLORS, pools, strict=False)
    found = [Curve(name, run.metrics.of(f"{POOL_PREFIX}{name}/{chart.of_pools}"), color) for color, name in named]
    return lines(chart, found, run, _not_drawn(pools[len(COLORS) :]))


def _reward(run: RunData, chart: Chart) -> Figure:
    parts = [name for name in run.metrics.series if name.startswith(PART_PREFIX)]
    names = {"reward/mean": "sum" if parts else "reward", **{part: labelled(part)[2] for part in parts}}
    named = zip(COLORS, names.items(), strict=False)
    found = [Curve(name, run.metrics.of(metric), color) for color, (metric, name) in named]
    return lines(chart, found, run, _not_drawn([labelled(part)[2] for part in parts[len(COLORS) - 1 :]]))


def _accuracy(run: RunData, chart: Chart) -> Figure:
    found = []
    for color, which in zip(COLORS, ("greedy", "sampled"), strict=False):
        values = [(float(each.policy_version), getattr(each, which)) for each in run.events.evaluations]
        found.append(Curve(which, sorted((x, y) for x, y in values if y is not None), color))
    return lines(chart, found, run)


def _failed(run: RunData, chart: Chart) -> Figure | None:
    if not run.num_failed:
        return None
    found = []
    for color, (kind, name) in zip(COLORS, FAILED.items(), strict=False):
        points = run.metrics.percent(f"buffer/{kind}", "buffer/issued")
        if kind == "failed" or any(y for _, y in points):
            found.append(Curve(name, points, color))
    why = commonest(run.failed_by_reason)
    return lines(chart, found, run, f"{why}." if why else "")


def _queue(run: RunData, chart: Chart) -> Figure:
    timeline = run.timeline
    points = [] if timeline is None else [(at_s - timeline.start_s, count) for at_s, count in timeline.ready]
    return lines(chart, [Curve("ready", thinned(points), COLORS[0])], run)


def _lags(run: RunData, chart: Chart) -> Figure:
    lags = sum((Counter(of_pool) for of_pool in run.status.lags.values()), Counter()) if run.status else Counter[int]()
    labels = [str(lag) for lag in range(1 + max(lags, default=-1))]
    tokens = {"tokens": [lags[lag] / lags.total() for lag in range(len(labels))]}
    return bars(chart, labels, tokens, "Of all tokens that the last command of the run trained." if labels else "")


def _lengths(run: RunData, chart: Chart) -> Figure:
    buffer = run.buffer
    if buffer is None or not any(buffer.generated):
        return Figure(chart)
    used = [i for i, shares in enumerate(zip(buffer.generated, buffer.trained, strict=True)) if any(shares)]
    # a bucket that holds no whole number is no length
    buckets = [i for i in range(used[0], used[-1] + 1) if i in used or not length_label(i).startswith("0")]
    both = {"trained": buffer.trained, "generated": buffer.generated}
    note = f"Distance {buffer.ks:.3f} (Kolmogorov-Smirnov); the last few thousand completions."
    sets = {name: [shares[i] for i in buckets] for name, shares in both.items()}
    return bars(chart, [length_label(i) for i in buckets], sets, note)


def _steps(run: RunData, chart: Chart) -> Figure:
    return Figure(chart) if run.timeline is None else Figure(chart, lanes_of_steps(run.timeline), words=chart.title)


def _run(run: RunData, chart: Chart) -> Figure:
    return Figure(chart) if run.timeline is None else Figure(chart, lanes_of_run(run.timeline), words=chart.title)


SPECIAL: Mapping[str, Callable[[RunData, Chart], Figure | None]] = {
    "reward": _reward,
    "accuracy": _accuracy,
    "failed": _failed,
    "queue": _queue,
    "steps": _steps,
    "run": _run,
    "lags": _lags,
    "lengths": _lengths,
}
"""Charts whose values are not metrics of the steps alone."""
