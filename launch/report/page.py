"""The page: one HTML file that needs nothing else, with its headline figures, tables and charts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from buffer.ledger import COUNTS
from common.files import private_file
from launch.observe.metrics import METRICS, POOL_PREFIX
from launch.observe.status import RunStatus
from launch.observe.view import commonest
from launch.report import charts
from launch.report.data import RunData
from launch.report.svg import DASH, short
from launch.report.timeline import ActorSums, overview, window
from launch.text import duration, printable, share_of
from planning.prediction import Prediction

IDENTITY_KEYS = ("run.name", "run.dir")
"""Of the config: differ between any two runs and say nothing."""
MAX_REASONS, MAX_REASON = 40, 300
"""Why samples failed: how many on the page, and characters of each."""
WARM_UP = 3
"""Steps that do not count: nobody predicts a start."""
OUTSIDE = ("duplicates", "late", "fenced", "quarantined_outside")


# --- the page -----------------------------------------------------------------------------------------


def render(runs: Sequence[RunData]) -> str:
    """The page as text: of one run, or of two to compare."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"clock": _clock, "number": _three_digits, "printable": printable}
    return environment.from_string(_resource("page.html")).render(
        runs=runs,
        verdicts=[_verdict(run) for run in runs],
        css=Markup(_resource("page.css")),
        js=Markup(_resource("page.js")),
        tiles=[tiles(run) for run in runs],
        curves=charts.curves(runs),
        hints={title: " ".join(guide) for title, guide in charts.GUIDES.items()},
        timelines=[(run, window(run.timeline), overview(run.timeline)) for run in runs if run.timeline],
        distributions=charts.distributions(runs),
        samples=[(run, run.buffer.trajectories) for run in runs if run.buffer is not None],
        pool_columns=POOL_COLUMNS,
        pools=[(run, pool_rows(run)) for run in runs],
        ledger=ledger_rows(runs),
        reasons=[(run, reasons(run)) for run in runs],
        differences=differences(runs),
        foretold=[(run, found) for run in runs if (found := foretold(run)) is not None],
        sections=[(run, list(sections(run))) for run in runs],
        made=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    )


def write(runs: Sequence[RunData], path: Path) -> int:
    """Write the page; it appears whole, and only its owner can read it. Returns its size in bytes.

    Raises:
        OSError: it cannot be written.
    """
    data = render(runs).encode(errors="replace")  # a name of a folder may be no text
    with private_file(path) as file:
        file.write(data)
    return len(data)


def _resource(name: str) -> str:
    return resources.files("launch.report").joinpath(name).read_text(encoding="utf-8")


def _verdict(run: RunData) -> str:
    num_steps, task = run.num_steps, run.knob("task.name") or run.knob("task.path") or "a task"
    algorithm = str(run.knob("algorithm.type") or "").replace("_", " ")
    model = Path(str(run.knob("model.path") or run.knob("model.hub") or "a model")).name
    what = f"{model} on {Path(str(task)).name}" + (f" with {algorithm}" if algorithm else "")
    if run.events.failed:
        return f"{what}: failed after {num_steps:,} steps. {run.events.failed}"
    if not num_steps:
        return f"{what}: no step yet."
    trained = f", {run.seen.status.trained_tokens:,} completion tokens trained" if run.seen is not None else ""
    return f"{what}: {num_steps:,} steps{trained}."


def _clock(seconds: object) -> str:
    if not isinstance(seconds, int | float) or not 0 <= seconds < 2**40:
        return DASH
    return time.strftime("%H:%M:%S", time.gmtime(seconds))


def _three_digits(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else DASH


# --- figures and tables -------------------------------------------------------------------------------


class Tile(NamedTuple):
    """A headline figure."""

    name: str
    value: str
    detail: str = ""
    tone: str = ""
    """`good` or `bad` where it can be either."""


def tiles(run: RunData) -> list[Tile]:
    """The headline figures of a run; a dash where one is not known."""
    metrics, timeline = run.metrics, run.timeline
    status = run.seen.status if run.seen is not None else None
    generated, trained = (metrics.mean(f"perf/{what}_tokens_per_s") for what in ("generated", "trained"))
    busy, pauses = (timeline.share("busy_s"), timeline.share("pause_s")) if timeline is not None else (None, None)
    took = f" in {duration(status.wall_s)}" if status is not None and status.wall_s else ""
    exit_status = f"; exit status {run.exit_status}" if run.exit_status is not None else ""
    return [
        _accuracy(run, "greedy"),
        _accuracy(run, "sampled"),
        _reward(run),
        Tile("Tokens per second", _number(generated), f"generated; {_number(trained)} trained"),
        _lag(status),
        Tile("Overlap", _percent(status.overlap_frac if status else None), "of step time, actors generated"),
        Tile("Learner waits", _percent(_waiting(metrics.seconds)), "of its time, for a batch"),
        Tile("Actors generate", _percent(busy), f"of the training time; {_percent(pauses)} paused for weights"),
        _gap(status),
        *_failed(run),
        Tile(
            "End",
            run.ended,
            f"{run.num_steps:,} steps{took}{exit_status}",
            {"finished": "good", "failed": "bad"}.get(run.ended, ""),
        ),
    ]


def _accuracy(run: RunData, which: str) -> Tile:
    name, evaluations = f"Accuracy, {which}", run.events.evaluations
    before, *others = [getattr(each, which) for each in evaluations] or [None]
    after = others[-1] if others else None
    if before is None:
        return Tile(name, DASH, "not evaluated")
    if after is None:
        return Tile(name, f"{before:.3f}", "before training; not evaluated since")
    held_out = f"{evaluations[-1].num_problems:,} held-out problems"
    return Tile(name, f"{before:.3f} → {after:.3f}", f"{after - before:+.3f} on {held_out}")


def _reward(run: RunData) -> Tile:
    series = run.metrics.series.get("reward/mean")
    means = series.mean_at_ends(0.1) if series is not None else None
    if means is None:
        return Tile("Reward", DASH, "no step")
    return Tile("Reward", f"{means[0]:.3f} → {means[1]:.3f}", "mean of the first and the last tenth of steps")


def _lag(status: RunStatus | None) -> Tile:
    if status is None or status.lag_mean is None:
        return Tile("Lag", DASH, "no step")
    bound = status.max_lag if isinstance(status.max_lag, int) else None
    is_over = bound is not None and status.lag_max > bound
    detail = f"versions; greatest {status.lag_max}" + (f" of {bound} allowed" if bound is not None else "")
    return Tile("Lag, mean", f"{status.lag_mean:.2f}", detail, "bad" if is_over else "")


def _failed(run: RunData) -> list[Tile]:
    if not run.num_failed:
        return []
    issued = (run.ledger or {}).get("issued", 0)
    why = f": {commonest(run.failed_by_reason, 2)}" if run.failed_by_reason else ""
    return [Tile("Failed samples", share_of(run.num_failed, issued), f"{run.num_failed:,} of {issued:,}{why}", "bad")]


def _gap(status: RunStatus | None) -> Tile:
    if status is None or not status.step:
        return Tile("Ledger gap", DASH, "no step")
    return Tile("Ledger gap", str(status.ledger_gap), "samples unaccounted for", "bad" if status.ledger_gap else "good")


def _waiting(seconds: Mapping[str, float]) -> float | None:
    total = sum(seconds.values())
    return seconds["wait_for_batch"] / total if total else None


class PoolRow(NamedTuple):
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


class Row(NamedTuple):
    """A figure that was predicted."""

    name: str
    predicted: str
    measured: str
    off: str
    """How far the measurement is from it, in per cent."""


class Foretold(NamedTuple):
    """What a plan said that the run would do, beside what it did, and what explains the most of it."""

    rows: list[Row]
    verdict: str


def foretold(run: RunData) -> Foretold | None:
    """None where the run had no plan."""
    said = run.prediction
    if said is None:
        return None
    found = measured(run)
    rows = [
        _row("samples trained per second", said.samples_per_s, found.get("samples_per_s")),
        _row("seconds of a step", said.step_s, found.get("step_s")),
        _row("milliseconds of a token in an engine", 1e3 * said.token_s, found.get("token_ms")),
        _row("learner busy, share of time", said.learner_busy, found.get("learner_busy")),
        _row("slots used, share", said.slots_used, found.get("slots_used")),
        _row("samples dropped as stale, share", said.drop_share, found.get("drop_share")),
        _row("age of a group at its step, versions", said.lag_mean, found.get("lag_mean")),
    ]
    return Foretold(rows, _explained(said, found))


def measured(run: RunData) -> dict[str, float]:
    """The same figures of the run, after its first steps."""
    series = run.metrics.series
    samples, started, finished, restarts = (
        dict(series.get(name, ())) for name in ("batch/trajectories", "started_s", "finished_s", "restarts")
    )
    steps = [step for step in sorted(finished) if step > WARM_UP and step in started and step in samples]
    found: dict[str, float] = {}
    # a restart of the learner, and the night before a resume, are nobody's pace
    pairs = [(one, two) for one, two in pairwise(steps) if restarts.get(one) == restarts.get(two)]
    if pairs:
        seconds = sum(finished[two] - finished[one] for one, two in pairs)
        # a row stands for the steps that tracking.log_every left out before it
        found["samples_per_s"] = sum(samples[two] * (two - one) for one, two in pairs) / seconds
        found["learner_busy"] = sum((finished[two] - started[two]) * (two - one) for one, two in pairs) / seconds
        found["step_s"] = fmean(finished[two] - started[two] for _, two in pairs)
    pools = [name for name in series if name.startswith(POOL_PREFIX)]
    for what, key in (("step_ms", "token_ms"), ("slots_used", "slots_used")):
        means = [mean for name in pools if name.endswith(f"/{what}") and (mean := run.metrics.mean(name)) is not None]
        if means:
            found[key] = sum(means) / len(means)
    if (age := run.metrics.mean("buffer/age_at_use")) is not None:
        found["lag_mean"] = age
    ledger = run.ledger or {}
    if ledger.get("committed"):
        found["drop_share"] = ledger.get("dropped_stale", 0) / ledger["committed"]
    return found


def _row(name: str, predicted: float, value: float | None) -> Row:
    if value is None:
        return Row(name, short(predicted), DASH, DASH)
    off = f"{100 * (value / predicted - 1):+.0f}%" if predicted else DASH
    return Row(name, short(predicted), short(value), off)


def _explained(said: Prediction, found: dict[str, float]) -> str:
    """Where the prediction was wrong, in a sentence."""
    rate = found.get("samples_per_s")
    if rate is None:
        return "The run has not taken enough steps to be compared."
    off = rate / said.samples_per_s - 1 if said.samples_per_s else 0.0
    text = f"The run trained {rate:.1f} samples per second, {said.samples_per_s:.1f} were predicted ({100 * off:+.0f}%)"
    costs = {
        "a step of the learner": (said.step_s, found.get("step_s")),
        "a token of the engines": (said.token_s, found["token_ms"] / 1e3 if "token_ms" in found else None),
    }
    wrong = {what: value / told - 1 for what, (told, value) in costs.items() if value is not None and told}
    if not wrong:
        return f"{text}."
    what, most = max(wrong.items(), key=lambda each: abs(each[1]))
    if abs(most) < 0.05:
        return f"{text}; steps and tokens cost what the profile says."
    longer = "longer" if most > 0 else "less long"
    return f"{text}; {what} took {100 * abs(most):.0f}% {longer} than the profile says."


def ledger_rows(runs: Sequence[RunData]) -> list[tuple[str, str, list[str]]]:
    """Name, meaning, and the count of each run."""
    ledgers = [run.ledger for run in runs]
    if all(ledger is None for ledger in ledgers):
        return []
    meanings = {name: METRICS[f"buffer/{name}"] for name in COUNTS}
    meanings |= dict.fromkeys(OUTSIDE, "Outside the ledger.")
    return [
        (name, text, [DASH if not ledger or name not in ledger else f"{ledger[name]:,}" for ledger in ledgers])
        for name, text in meanings.items()
    ]


def reasons(run: RunData) -> list[tuple[str, int]]:
    """Why samples failed, and why rows and messages were quarantined, the most frequent first."""
    buffer = run.seen.status.buffer if run.seen is not None else None
    if buffer is None:
        return []
    found = [(reason, count) for reason, count in buffer.failed_by_reason.items()]
    found += [(f"set aside: {reason}", count) for reason, count in buffer.quarantined_by_reason.items()]
    return sorted(((reason[:MAX_REASON], count) for reason, count in found), key=lambda each: -each[1])[:MAX_REASONS]


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


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The keys of a config with their values, as text."""
    for key, value in config.items():
        if isinstance(value, Mapping) and (not prefix or prefix.startswith("pools.")):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, ensure_ascii=False, default=str)


def sections(run: RunData) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for section, values in run.config.items():
        if isinstance(values, Mapping) and values:
            yield section, list(flat(values, f"{section}." if section == "pools" else ""))


def _percent(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:.0f}%"


def _number(value: float | None) -> str:
    return DASH if value is None else short(value)
