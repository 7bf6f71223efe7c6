"""Which charts the page has, and of which figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from launch.observe.metrics import POOL_PREFIX
from launch.report.data import Metrics, RunData, thinned, version_of
from launch.report.samples import length_label
from launch.report.svg import Bars, Chart, Curve, Point, bar_chart, line_chart, share_bar

STYLES = (("a1", "a2", "a3"), ("b1", "b2", "b3"))
"""Classes of the curves of a run, and of the run that it is compared with."""
POOL_STYLES = ("a1", "b1", "a2", "b2", "a3", "b3")
"""Of the pools of one run."""
SPENT = {
    "wait_for_batch": "waiting for a batch",
    "reference": "reference model",
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "optimizer": "optimizer",
    "publish": "copying weights",
    "other": "other",
}


@dataclass(frozen=True)
class Figure:
    """A drawing with its heading."""

    title: str
    unit: str
    drawing: Markup
    legend: Sequence[tuple[str, str]] = ()
    """Class and name of each curve."""
    note: str = ""


CURVES: tuple[tuple[str, str, dict[str, str], dict[str, Any]], ...] = (
    ("Reward", "mean of the step", {"reward/mean": "reward"}, {}),
    ("Loss", "of the step's batch", {"loss": "loss"}, {}),
    ("Lag of trained tokens", "policy versions", {"lag/token_mean": "mean", "lag/token_max": "greatest"}, {"floor": 0}),
    (
        "Throughput",
        "completion tokens per second",
        {"perf/generated_tokens_per_s": "generated", "perf/trained_tokens_per_s": "trained"},
        {"floor": 0},
    ),
    (
        "Effective sample size",
        "share of the batch",
        {"off_policy/ess_token": "tokens", "off_policy/ess_sequence": "sequences"},
        {"ceiling": 1},
    ),
    (
        "Mismatch of the behaviour policy",
        "log-probabilities",
        {"mismatch/lag0_abs": "same version", "mismatch/k3": "all tokens (k3)"},
        {"may_be_log": True},
    ),
    (
        "Who waits for whom",
        "seconds per step",
        {
            "time/wait_for_batch": "learner for a batch",
            "time/wait_for_policy": "actors for weights",
            "time/weight_pause": "pause of an update",
        },
        {"floor": 0},
    ),
    ("Gradient norm", "before clipping", {"grad_norm": "norm"}, {"floor": 0}),
    ("Completion length", "mean, tokens", {"length/trained_mean": "trained"}, {}),
)
"""Title, unit of y, metric -> name of its curve, and what else a `Chart` takes."""


def curves(runs: Sequence[RunData]) -> list[Figure]:
    """How the run went, step by step.

    Args:
        runs: one, or two to compare.
    """
    charts = [_chart(runs, *each) for each in CURVES]
    charts.insert(1, _accuracy(runs))
    return [_figure(chart) for chart in [*charts, *_pool_charts(runs)]]


def _chart(
    runs: Sequence[RunData], title: str, unit: str, wanted: Mapping[str, str], options: Mapping[str, Any]
) -> Chart:
    found = []
    for place, run in enumerate(runs):
        for style, (metric, name) in zip(STYLES[place], wanted.items(), strict=False):
            points = run.metrics.of(metric)
            if points:
                found.append(Curve(_named(name, run, runs), points, style, dots=len(points) < 12))
    bound = _bound(runs) if "lag/token_max" in wanted and found else None
    return Chart(title, unit, found, bound=bound, **options)


def _bound(runs: Sequence[RunData]) -> tuple[str, float] | None:
    """max_lag, where it is the same for all."""
    limits = [run.knob("weight_sync.max_lag") for run in runs]
    return ("max_lag", limits[0]) if isinstance(limits[0], int) and len(set(map(str, limits))) == 1 else None


def _named(name: str, run: RunData, runs: Sequence[RunData]) -> str:
    return name if len(runs) == 1 else f"{run.name}: {name}"


def _accuracy(runs: Sequence[RunData]) -> Chart:
    found = []
    for place, run in enumerate(runs):
        evaluations = sorted(run.events.evaluations, key=version_of)
        greedy = [(float(version_of(each)), each.greedy) for each in evaluations if each.greedy is not None]
        sampled = [(float(version_of(each)), each.sampled) for each in evaluations if each.sampled is not None]
        for style, name, points in zip(STYLES[place], ("greedy", "sampled"), (greedy, sampled), strict=False):
            if points:
                found.append(Curve(_named(name, run, runs), points, style, dots=True))
    return Chart("Held-out accuracy", "share of problems", found, x_name="policy version")


def _pool_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Lag and mismatch of each pool, where a run has several."""
    if len(runs) > 1 or len(pools_of(runs[0].metrics)) < 2:
        return []
    metrics = runs[0].metrics
    pools = pools_of(metrics)
    left_out = pools[len(POOL_STYLES) :]
    note = f"Not drawn: {', '.join(left_out)}." if left_out else ""
    charts = []
    for what, title, unit in (
        ("lag_mean", "Lag by pool", "policy versions, mean"),
        ("mismatch_lag0_abs", "Mismatch by pool", "log-probabilities, same version"),
        ("tokens_per_s", "Generated by pool", "completion tokens per second"),
    ):
        found = [
            Curve(name, metrics.of(f"{POOL_PREFIX}{name}/{what}"), style)
            for name, style in zip(pools, POOL_STYLES, strict=False)
        ]
        is_log = what.startswith("mismatch")  # an axis that reaches down to 0 cannot be logarithmic
        charts.append(Chart(title, unit, found, floor=None if is_log else 0, may_be_log=is_log, note=note))
    return charts


def pools_of(metrics: Metrics) -> list[str]:
    """Names of the pools that have metrics."""
    inner = (name.removeprefix(POOL_PREFIX) for name in metrics.series if name.startswith(POOL_PREFIX))
    return sorted({name.rpartition("/")[0] for name in inner})


def _figure(chart: Chart) -> Figure:
    legend = [(curve.style, curve.name) for curve in chart.curves if curve.points]
    return Figure(chart.title, chart.unit, line_chart(chart), legend if len(legend) > 1 else (), chart.note)


def queue(runs: Sequence[RunData]) -> Figure:
    """Groups ready in the buffer over the time of the run."""
    found = []
    for place, run in enumerate(runs):
        if run.timeline is not None and run.timeline.ready:
            start_s = run.timeline.start_s
            points: list[Point] = [(moment_s - start_s, ready) for moment_s, ready in run.timeline.ready]
            found.append(Curve(_named("ready", run, runs), thinned(points), STYLES[place][0]))
    return _figure(Chart("Queue", "groups ready in the buffer", found, x_name="seconds since the run began", floor=0))


def distributions(runs: Sequence[RunData]) -> list[Figure]:
    """Lags and lengths."""
    figures = [_lags(runs)]
    for run in runs:
        of_run = f" of {run.name}" if len(runs) > 1 else ""
        figures += [_lengths(run, of_run), _spent(run, of_run)]
    return figures


def _lags(runs: Sequence[RunData]) -> Figure:
    known = [(place, run, run.buffer.lags) for place, run in enumerate(runs) if run.buffer is not None]
    known = [(place, run, lags) for place, run, lags in known if lags]
    highest = max((max(lags) for _, _, lags in known), default=0)
    sets = [
        Bars(_named("tokens", run, runs), [lags[lag] / lags.total() for lag in range(highest + 1)], STYLES[place][0])
        for place, run, lags in known
    ]
    labels = [str(lag) for lag in range(highest + 1)] if known else []
    title = "Lag of trained tokens"
    num = sum(run.buffer.num_lag_samples for _, run, _ in known if run.buffer is not None)
    legend = [(each.style, each.name) for each in sets] if len(sets) > 1 else ()
    note = f"{num:,} trajectories, evenly spread over what the buffer still holds." if num else ""
    return Figure(title, "percent of tokens", bar_chart(title, labels, sets, "policy versions"), legend, note)


def _lengths(run: RunData, of_run: str) -> Figure:
    title = f"Completion length{of_run}"
    buffer = run.buffer
    if buffer is None or not any(buffer.generated):
        return Figure(title, "percent of completions", bar_chart(title, [], [], ""))
    used = [i for i, shares in enumerate(zip(buffer.generated, buffer.trained, strict=True)) if any(shares)]
    # a bucket that holds no whole number is no length
    buckets = [i for i in range(used[0], used[-1] + 1) if i in used or not length_label(i).startswith("0")]
    sets = [
        Bars("generated", [buffer.generated[i] for i in buckets], "a2"),
        Bars("trained", [buffer.trained[i] for i in buckets], "a1"),
    ]
    labels = [length_label(i) for i in buckets]
    note = f"Distance {buffer.fidelity_ks:.3f} (Kolmogorov-Smirnov); the last few thousand completions."
    legend = [(each.style, each.name) for each in sets]
    return Figure(title, "percent of completions", bar_chart(title, labels, sets, "tokens"), legend, note)


def _spent(run: RunData, of_run: str) -> Figure:
    seconds = run.metrics.seconds
    parts = [(name, seconds[key]) for key, name in SPENT.items() if seconds.get(key, 0.0) > 0]
    title = f"Where the learner's time goes{of_run}"
    return Figure(title, "percent of its time", share_bar(title, parts))
