"""The page: one HTML file that needs nothing else, with its headline figures, tables and charts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from common.files import private_file
from launch.observe.metrics import METRICS, POOL_PREFIX
from launch.report import charts
from launch.report.data import RunData, Series, flat
from launch.report.svg import DASH, short
from launch.report.timeline import ActorSums, overview, window

IDENTITY_KEYS = ("run.name", "run.dir")
"""Of the config: differ between any two runs and say nothing."""
LEDGER = ("issued", "in_flight", "committed", "failed", "waiting", "drawn", "trained", "dropped_stale", "filtered")
DRAWN = "In a step that is not finished."
MAX_REASONS, MAX_REASON = 40, 300
"""Why samples failed: how many on the page, and characters of each."""
OUTSIDE = ("duplicates", "late", "fenced", "quarantined_outside")


# --- the page -----------------------------------------------------------------------------------------


def render(runs: Sequence[RunData], *, now_s: float | None = None) -> str:
    """The page as text.

    Args:
        runs: one, or two to compare.
        now_s: wall clock; for tests.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"clock": _clock, "number": _three_digits}
    return environment.from_string(_resource("page.html")).render(
        runs=runs,
        verdicts=[_verdict(run) for run in runs],
        css=Markup(_resource("page.css")),
        js=Markup(_resource("page.js")),
        tiles=[tiles(run) for run in runs],
        curves=[*charts.curves(runs), charts.queue(runs)],
        timelines=[(run, window(run.timeline), overview(run.timeline)) for run in runs if run.timeline],
        distributions=charts.distributions(runs),
        samples=[(run, run.buffer.trajectories) for run in runs if run.buffer is not None],
        pool_columns=POOL_COLUMNS,
        pools=[(run, pool_rows(run)) for run in runs],
        ledger=ledger_rows(runs),
        reasons=[(run, reasons(run)) for run in runs],
        differences=differences(runs),
        sections=[(run, list(sections(run))) for run in runs],
        made=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time.time() if now_s is None else now_s)),
    )


def write(runs: Sequence[RunData], path: Path) -> int:
    """Write the page; it appears whole, and only its owner can read it. Returns its size in bytes.

    Raises:
        OSError: it cannot be written.
    """
    data = render(runs).encode()
    with private_file(path) as file:
        file.write(data)
    return len(data)


def _resource(name: str) -> str:
    return resources.files("launch.report").joinpath(name).read_text(encoding="utf-8")


def _verdict(run: RunData) -> str:
    """One sentence for the whole run."""
    num_steps, task = run.num_steps, run.knob("task.name") or run.knob("task.path") or "a task"
    algorithm = str(run.knob("algorithm.type") or "").replace("_", " ")
    model = Path(str(run.knob("model.path") or run.knob("model.hub") or "a model")).name
    what = f"{model} on {Path(str(task)).name}" + (f" with {algorithm}" if algorithm else "")
    if run.events.failed:
        return f"{what}: failed after {num_steps:,} steps. {run.events.failed}"
    if not num_steps:
        return f"{what}: no step yet."
    return f"{what}: {num_steps:,} steps, {run.trained_tokens:,} completion tokens trained."


def _clock(seconds: object) -> str:
    """Wall clock, UTC."""
    if not isinstance(seconds, int | float) or not 0 <= seconds < 2**40:
        return DASH
    return time.strftime("%H:%M:%S", time.gmtime(seconds))


def _three_digits(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else DASH


# --- figures and tables -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """A headline figure."""

    name: str
    value: str
    detail: str = ""
    tone: str = ""
    """`good` or `bad` where it can be either."""


def tiles(run: RunData) -> list[Tile]:
    """The headline figures of a run; a dash where one is not known."""
    summary = run.summary or {}
    metrics = run.metrics
    return [
        _accuracy(run, "greedy", "accuracy_before", "accuracy_after"),
        _accuracy(run, "sampled", "accuracy_before_sampled", "accuracy_after_sampled"),
        _reward(metrics.series.get("reward/mean")),
        Tile(
            "Tokens per second",
            _number(metrics.mean("perf/generated_tokens_per_s")),
            f"generated; {_number(metrics.mean('perf/trained_tokens_per_s'))} trained",
        ),
        _lag(run, summary),
        Tile("Overlap", _percent(_overlap(run)), "of step time, actors generated"),
        Tile("Learner waits", _percent(_waiting(run)), "of its time, for a batch"),
        _actors(run),
        _gap(run),
        _end(run, summary),
    ]


def _accuracy(run: RunData, which: str, before_key: str, after_key: str) -> Tile:
    summary, evaluations = run.summary or {}, run.events.evaluations
    before, after = summary.get(before_key), summary.get(after_key)
    values = [each.greedy if which == "greedy" else each.sampled for each in evaluations]
    if before is None and values:
        before = values[0]
    if after is None and len(values) > 1:
        after = values[-1]
    name = f"Accuracy, {which}"
    if before is None:
        return Tile(name, DASH, "not evaluated")
    if after is None:
        return Tile(name, f"{before:.3f}", "before training; not evaluated since")
    num = summary.get("num_heldout") or evaluations[0].num_problems
    return Tile(name, f"{before:.3f} → {after:.3f}", f"{after - before:+.3f} on {num:,} held-out problems")


def _reward(series: Series | None) -> Tile:
    means = series.mean_at_ends(0.1) if series is not None else None
    if means is None:
        return Tile("Reward", DASH, "no step")
    first, last = means
    return Tile("Reward", f"{first:.3f} → {last:.3f}", "mean of the first and the last tenth of steps")


def _lag(run: RunData, summary: Mapping[str, object]) -> Tile:
    mean, highest, bound = summary.get("lag_mean"), summary.get("lag_max"), run.knob("weight_sync.max_lag")
    if not isinstance(mean, int | float):
        mean = run.metrics.mean("lag/token_mean")
    if not isinstance(highest, int | float):
        points = run.metrics.of("lag/token_max")
        highest = max((y for _, y in points), default=None)
    if mean is None or highest is None:
        return Tile("Lag", DASH, "no step")
    is_over = isinstance(bound, int) and highest > bound
    of_bound = f" of {bound} allowed" if isinstance(bound, int) else ""
    return Tile("Lag, mean", f"{mean:.2f}", f"versions; greatest {highest:g}{of_bound}", "bad" if is_over else "")


def _overlap(run: RunData) -> float | None:
    share = (run.summary or {}).get("overlap_frac", run.metrics.last.get("overlap/frac"))
    return float(share) if isinstance(share, int | float) else None


def _waiting(run: RunData) -> float | None:
    seconds = run.metrics.seconds
    total = sum(seconds.values())
    return seconds.get("wait_for_batch", 0.0) / total if total else None


def _actors(run: RunData) -> Tile:
    timeline = run.timeline
    if timeline is None or timeline.busy_share is None:
        return Tile("Actors generate", DASH, "no timeline")
    pauses = f"; {_percent(timeline.pause_share)} paused for weights" if timeline.pause_share is not None else ""
    return Tile("Actors generate", _percent(timeline.busy_share), f"of the training time{pauses}")


def _gap(run: RunData) -> Tile:
    gap = (run.summary or {}).get("ledger_gap")
    if gap is None:
        points = run.metrics.of("buffer/ledger_gap")
        gap = max((abs(y) for _, y in points), default=None)
    if gap is None:
        return Tile("Ledger gap", DASH, "no step")
    return Tile("Ledger gap", f"{gap:g}", "samples unaccounted for", "good" if not gap else "bad")


def _end(run: RunData, summary: Mapping[str, object]) -> Tile:
    wall_s, steps = summary.get("wall_s"), run.num_steps
    took = f" in {duration(wall_s)}" if isinstance(wall_s, int | float) else ""
    tone = {"finished": "good", "failed": "bad"}.get(run.ended, "")
    status = f"; exit status {run.exit_status}" if run.exit_status is not None else ""
    return Tile("End", run.ended, f"{steps:,} steps{took}{status}", tone)


def duration(seconds: float) -> str:
    """For people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


@dataclass(frozen=True)
class PoolRow:
    """Of a pool, or of one of its actors."""

    name: str
    is_pool: bool
    cells: Sequence[str]


POOL_COLUMNS = (
    ("actors", ""),
    ("precision", ""),
    ("samples", ""),
    ("tokens", ""),
    ("tokens/s", ""),
    ("generating", "%"),
    ("updates", ""),
    ("pause", "ms, mean"),
    ("lag", "mean"),
    ("mismatch", "lag 0"),
)


def pool_rows(run: RunData) -> list[PoolRow]:
    """Every pool of actors, and its actors below it."""
    if run.timeline is None or not run.timeline.actors:
        return []
    by_pool: dict[str, dict[str, ActorSums]] = {}
    for name, actor in run.timeline.actors.items():
        by_pool.setdefault(actor.pool or "actors", {})[name] = actor
    length_s = run.timeline.training_s
    rows = []
    for pool in sorted({*by_pool, *charts.pools_of(run.metrics)}):
        actors = by_pool.get(pool, {})
        known = [f"{POOL_PREFIX}{pool}/{what}" for what in ("lag_mean", "mismatch_lag0_abs")]
        means = [run.metrics.mean(name) for name in known]
        dtype = run.knob(f"pools.{pool}.dtype") or run.knob("actors.dtype") or DASH
        facts = _facts(list(actors.values()), length_s)
        rows.append(PoolRow(pool, True, [str(len(actors)), dtype, *facts, *(_number(mean) for mean in means)]))
        rows += [PoolRow(name, False, ["", "", *_facts([actor], length_s), "", ""]) for name, actor in actors.items()]
    return rows


def _facts(actors: Sequence[ActorSums], length_s: float) -> list[str]:
    tokens, updates = sum(a.num_tokens for a in actors), sum(a.num_updates for a in actors)
    busy_s, pause_s = sum(a.busy_s for a in actors), sum(a.pause_s for a in actors)
    in_training = sum(a.tokens_in_training for a in actors)
    share = min(1.0, busy_s / length_s / len(actors)) if length_s > 0 and actors else None
    return [
        f"{sum(a.num_samples for a in actors):,}",
        f"{tokens:,}",
        f"{in_training / length_s:,.0f}" if length_s > 0 else DASH,
        f"{100 * share:.0f}" if share is not None else DASH,
        f"{updates:,}",
        f"{1000 * pause_s / updates:.0f}" if updates else DASH,
    ]


def ledger_rows(runs: Sequence[RunData]) -> list[tuple[str, str, list[str]]]:
    """Name, meaning, and the count of each run."""
    ledgers = [run.ledger for run in runs]
    if all(ledger is None for ledger in ledgers):
        return []

    def counts(name: str) -> list[str]:
        return [DASH if ledger is None or name not in ledger else f"{ledger[name]:,}" for ledger in ledgers]

    inside = [(name, METRICS.get(f"buffer/{name}", DRAWN), counts(name)) for name in (*LEDGER, "evicted_unused")]
    return inside + [(name, "Outside the ledger.", counts(name)) for name in OUTSIDE]


def reasons(run: RunData) -> list[tuple[str, int]]:
    """Why samples failed or were quarantined, the most frequent first."""
    summary = run.summary or {}
    found: list[tuple[str, int]] = []
    for key, prefix in (("failed_by_reason", ""), ("quarantined_by_reason", "quarantined: ")):
        by_reason = summary.get(key)
        if isinstance(by_reason, Mapping):
            found += [(f"{prefix}{reason}"[:MAX_REASON], count) for reason, count in by_reason.items()]
    return sorted(found, key=lambda each: -each[1])[:MAX_REASONS]


def differences(runs: Sequence[RunData]) -> list[tuple[str, str, str]]:
    """Keys of the config whose values differ, with both values."""
    if len(runs) < 2:
        return []
    first, second = (dict(flat(run.config)) for run in runs)
    keys = [*first, *(key for key in second if key not in first)]
    return [
        (key, first.get(key, "unset"), second.get(key, "unset"))
        for key in keys
        if first.get(key) != second.get(key) and key not in IDENTITY_KEYS
    ]


def sections(run: RunData) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The config, section by section."""
    for section, values in run.config.items():
        if isinstance(values, Mapping) and values:
            yield section, list(flat(values, f"{section}." if section == "pools" else ""))


def _percent(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:.0f}%"


def _number(value: float | None) -> str:
    return DASH if value is None else short(value)
