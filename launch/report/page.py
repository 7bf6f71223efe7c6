"""The page: one HTML file that needs nothing else. It answers four questions, each with figures, charts and tables."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from buffer.ledger import COUNTS
from common.files import private_file
from launch.observe.metrics import METRICS, POOL_PREFIX
from launch.observe.view import commonest
from launch.report.charts import DASH, Figure, figures, pools_of, short
from launch.report.data import TIMES, RunData
from launch.report.timeline import ActorSums
from launch.text import duration, printable, share_of

QUESTIONS = {
    "learning": "Is it learning?",
    "health": "Is it healthy?",
    "waiting": "Who waits for what?",
    "lag": "Does the lag hurt?",
}
MAX_REASONS, MAX_REASON = 40, 300
"""Reasons why samples failed on the page, and characters of each."""
WARM_UP = 3
"""Steps that are not compared with a plan."""
OUTSIDE = ("duplicates", "late", "fenced", "quarantined_outside")
LONG_WAIT, MUCH_ESS, LITTLE_ESS, FEW_STEPS = 0.2, 0.9, 0.5, 10
"""Thresholds of the answers: share of the learner's time, effective share of a batch, and steps."""


# --- the page -----------------------------------------------------------------------------------------


def render(run: RunData) -> str:
    """Return the page as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"clock": _clock, "number": _three_digits, "printable": printable}
    charts = figures(run)
    drawn = [each for each in charts if each.plot is not None]
    plots = json.dumps([each.plot for each in drawn], separators=(",", ":"), allow_nan=False)
    pages = {name: Markup(_resource(name)) for name in ("uplot.css", "page.css", "uplot.js", "page.js")}
    return environment.from_string(_resource("page.html")).render(
        run=run,
        verdict=_verdict(run),
        resources=pages,
        plots=Markup(plots.replace("<", "\\u003c")),
        drawn=drawn,
        parts=[Question.of(run, name, charts) for name in QUESTIONS],
        seconds=_seconds(run),
        pool_columns=POOL_COLUMNS,
        pools=pool_rows(run),
        ledger=ledger_rows(run),
        reasons=reasons(run),
        plan=plan_rows(run),
        sections=list(sections(run)),
        made=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    )


def write(run: RunData, path: Path) -> int:
    """Write the page for its owner alone; return its size in bytes.

    Raises:
        OSError: it cannot be written.
    """
    data = render(run).encode(errors="replace")  # a name of a folder may be no text
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
    trained = f", {run.status.trained_tokens:,} completion tokens trained" if run.status is not None else ""
    return f"{what}: {num_steps:,} steps{trained}."


def _clock(seconds: object) -> str:
    if not isinstance(seconds, int | float) or not 0 <= seconds < 2**40:
        return DASH
    return time.strftime("%H:%M:%S", time.gmtime(seconds))


def _three_digits(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else DASH


def _percent(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:.0f}%"


def _number(value: float | None) -> str:
    return DASH if value is None else short(value)


# --- the four answers ---------------------------------------------------------------------------------


def _learning(run: RunData) -> str:
    series = run.metrics.series.get("reward/mean")
    if series is None or run.num_steps < FEW_STEPS:
        return "Not known yet: the run has taken too few steps."
    first, last = series.ends()
    gain = fmean(last) - fmean(first)
    noise = 2 * sqrt(pvariance(first) / len(first) + pvariance(last) / len(last))
    if abs(gain) <= noise:
        return f"Not visibly: the mean reward changed by {gain:+.3f}, which is within its noise of {noise:.3f}."
    return f"{'Yes' if gain > 0 else 'No'}: the mean reward changed by {gain:+.3f}."


def _health(run: RunData) -> str:
    status = run.status
    if status is None:
        return "Not known: the run has no status."
    wrong = [run.events.failed] if run.events.failed else []
    wrong += status.tripped
    wrong += [f"{status.ledger_gap} samples are unaccounted for, which is a bug"] if status.ledger_gap else []
    if wrong:
        return f"No: {'; '.join(wrong)}"
    restarts = int(max((y for _, y in run.metrics.of("restarts")), default=0))
    again = f"; the learner was restarted {restarts} times" if restarts else ""
    return f"Yes: no alert is active and every sample is accounted for{again}."


def _waiting(run: RunData) -> str:
    waiting, timeline = _waiting_share(run), run.timeline
    busy = timeline.share("busy_s") if timeline is not None else None
    if waiting is None:
        return "Not known yet: no step was taken."
    actors = f", and the actors generate {_percent(busy)} of the training time" if busy is not None else ""
    if waiting > LONG_WAIT:
        return f"The learner waits for batches {_percent(waiting)} of its time{actors}: add actors."
    if busy is not None and busy < 1 - LONG_WAIT:
        waits = f"and the learner waits {_percent(waiting)} of its time"
        return f"The actors wait: they generate {_percent(busy)} of the training time, {waits}."
    return f"Neither side waits long: the learner waits {_percent(waiting)} of its time{actors}."


def _lag_hurts(run: RunData) -> str:
    ess, status = run.metrics.mean("off_policy/ess_sequence"), run.status
    lag = f" at a mean lag of {status.lag_mean:.2f} versions" if status and status.lag_mean is not None else ""
    if ess is None:
        return f"Not measured by this loss{lag}." if run.num_steps else "Not known yet: no step was taken."
    said = "Little" if ess >= MUCH_ESS else "Somewhat" if ess >= LITTLE_ESS else "Yes"
    return f"{said}: {_percent(ess)} of a batch is effective{lag}."


# --- figures and tables -------------------------------------------------------------------------------


class Question(NamedTuple):
    """A question with its answer, and the figures and charts that it rests on."""

    name: str
    question: str
    answer: str
    tiles: Sequence[Tile]
    figures: Sequence[Figure]

    @classmethod
    def of(cls, run: RunData, name: str, charts: Sequence[Figure]) -> Question:
        answer = {"learning": _learning, "health": _health, "waiting": _waiting, "lag": _lag_hurts}[name](run)
        in_part = [tile for tile in tiles(run) if tile.part == name]
        return cls(name, QUESTIONS[name], answer, in_part, [each for each in charts if each.chart.part == name])


class Tile(NamedTuple):
    """A headline figure."""

    part: str
    name: str
    value: str
    detail: str = ""
    tone: str = ""
    """`good` or `bad` if it is one of them."""


def tiles(run: RunData) -> list[Tile]:
    """Return the headline figures; a dash stands for one that is not known."""
    metrics, timeline, status = run.metrics, run.timeline, run.status
    generated, trained = (metrics.mean(f"perf/{what}_tokens_per_s") for what in ("generated", "trained"))
    busy, pauses = (timeline.share("busy_s"), timeline.share("pause_s")) if timeline is not None else (None, None)
    took = f" in {duration(status.wall_s)}" if status is not None and status.wall_s else ""
    end = f"{run.num_steps:,} steps{took}" + (f"; exit status {run.exit_status}" if run.exit_status is not None else "")
    tone = {"finished": "good", "failed": "bad"}.get(run.ended, "")
    found = [
        _reward(run),
        _accuracy(run, "greedy"),
        _accuracy(run, "sampled"),
        Tile("health", "End", run.ended, end, tone),
        Tile("health", "Ledger gap", DASH, "no step"),
        Tile("waiting", "Tokens per second", _number(generated), f"generated; {_number(trained)} trained"),
        Tile("waiting", "Overlap", _percent(status.overlap_frac if status else None), "of step time, actors generated"),
        Tile("waiting", "Learner waits", _percent(_waiting_share(run)), "of its time, for a batch"),
        Tile("waiting", "Actors generate", _percent(busy), f"of the training time; {_percent(pauses)} paused"),
        Tile("lag", "Effective sample size", _percent(metrics.mean("off_policy/ess_sequence")), "of sequences, mean"),
    ]
    if status is not None and status.step:
        gap = status.ledger_gap
        found[4] = Tile("health", "Ledger gap", str(gap), "samples unaccounted for", "bad" if gap else "good")
    if run.num_failed:
        issued = (run.ledger or {}).get("issued", 0)
        why = f": {commonest(run.failed_by_reason, 2)}" if run.failed_by_reason else ""
        detail = f"{run.num_failed:,} of {issued:,}{why}"
        found.append(Tile("health", "Failed samples", share_of(run.num_failed, issued), detail, "bad"))
    if status is None or status.lag_mean is None:
        return [*found, Tile("lag", "Lag", DASH, "no step")]
    bound = status.max_lag if isinstance(status.max_lag, int) else None
    detail = f"versions; greatest {status.lag_max}" + (f" of {bound} allowed" if bound is not None else "")
    tone = "bad" if bound is not None and status.lag_max > bound else ""
    return [*found, Tile("lag", "Lag, mean", f"{status.lag_mean:.2f}", detail, tone)]


def _accuracy(run: RunData, which: str) -> Tile:
    name, evaluations = f"Accuracy, {which}", run.events.evaluations
    before, *others = [getattr(each, which) for each in evaluations] or [None]
    after = others[-1] if others else None
    if before is None:
        return Tile("learning", name, DASH, "not evaluated")
    if after is None:
        return Tile("learning", name, f"{before:.3f}", "before training; not evaluated since")
    held_out = f"{evaluations[-1].num_problems:,} held-out problems"
    return Tile("learning", name, f"{before:.3f} → {after:.3f}", f"{after - before:+.3f} on {held_out}")


def _reward(run: RunData) -> Tile:
    series = run.metrics.series.get("reward/mean")
    if series is None:
        return Tile("learning", "Reward", DASH, "no step")
    first, last = map(fmean, series.ends())
    detail = "mean of the first and the last tenth of steps"
    return Tile("learning", "Reward", f"{first:.3f} → {last:.3f}", detail)


def _waiting_share(run: RunData) -> float | None:
    seconds = run.metrics.seconds
    total = sum(seconds.values())
    return seconds["wait_for_batch"] / total if total else None


def _seconds(run: RunData) -> list[tuple[str, float]]:
    """Return what the learner's time was spent on, in percent."""
    seconds = run.metrics.seconds
    total = sum(seconds.values())
    return [(TIMES[name], 100 * each / total) for name, each in seconds.items() if each > 0]


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


class PoolRow(NamedTuple):
    """A row of the table of pools: a pool, or one of its actors."""

    name: str
    is_pool: bool
    cells: Sequence[str]


def pool_rows(run: RunData) -> list[PoolRow]:
    """Return every pool of actors, and its actors below it."""
    if run.timeline is None or not run.timeline.actors:
        return []
    by_pool: dict[str, dict[str, ActorSums]] = {}
    for name, actor in run.timeline.actors.items():
        by_pool.setdefault(actor.pool or "actors", {})[name] = actor
    length_s, rows = run.timeline.training_s, []
    for pool in sorted({*by_pool, *pools_of(run.metrics)}):
        actors = by_pool.get(pool, {})
        means = [run.metrics.mean(f"{POOL_PREFIX}{pool}/{what}") for what in ("lag_mean", "mismatch_lag0_abs")]
        dtype = run.knob(f"pools.{pool}.dtype") or run.knob("actors.dtype") or DASH
        facts = _facts(list(actors.values()), length_s)
        rows.append(PoolRow(pool, True, [str(len(actors)), dtype, *facts, *map(_number, means)]))
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


PREDICTED = {
    "samples_per_s": ("samples trained per second", 1.0),
    "step_s": ("seconds of a step", 1.0),
    "token_s": ("milliseconds of a token in an engine", 1e3),
    "learner_busy": ("learner busy, share of time", 1.0),
    "slots_used": ("slots used, share", 1.0),
    "drop_share": ("samples dropped as stale, share", 1.0),
    "lag_mean": ("age of a group at its step, versions", 1.0),
}
"""Figures of prediction.json -> what they are, and the factor of the unit that they are shown in."""


def plan_rows(run: RunData) -> list[tuple[str, str, str, str]]:
    """Return what a plan predicted, what was measured, and how far that is off; empty if the run had no plan."""
    found, rows = measured(run), []
    for key, (name, factor) in PREDICTED.items():
        predicted, value = run.prediction.get(key), found.get(key)
        if not isinstance(predicted, int | float):
            continue
        off = f"{100 * (value / predicted - 1):+.0f}%" if value is not None and predicted else DASH
        rows.append((name, short(factor * predicted), DASH if value is None else short(factor * value), off))
    return rows


def measured(run: RunData) -> dict[str, float]:
    """Return the figures of a plan as the run had them after its first steps."""
    series = run.metrics.series
    samples, started, finished, restarts = (
        dict(series.get(name, ())) for name in ("batch/trajectories", "started_s", "finished_s", "restarts")
    )
    steps = [step for step in sorted(finished) if step > WARM_UP and step in started and step in samples]
    found: dict[str, float] = {}
    # the time between two commands, or before a restarted learner goes on, is not the pace of steps
    pairs = [(one, two) for one, two in pairwise(steps) if restarts.get(one) == restarts.get(two)]
    seconds = sum(finished[two] - finished[one] for one, two in pairs)
    if seconds > 0:
        # a row stands for the steps that tracking.log_every left out before it
        found["samples_per_s"] = sum(samples[two] * (two - one) for one, two in pairs) / seconds
        found["learner_busy"] = sum((finished[two] - started[two]) * (two - one) for one, two in pairs) / seconds
        found["step_s"] = fmean(finished[two] - started[two] for _, two in pairs)
    pools = pools_of(run.metrics)
    for what, key, factor in (("step_ms", "token_s", 1e-3), ("slots_used", "slots_used", 1.0)):
        means = [mean for pool in pools if (mean := run.metrics.mean(f"{POOL_PREFIX}{pool}/{what}")) is not None]
        if means:
            found[key] = factor * fmean(means)
    if (age := run.metrics.mean("buffer/age_at_use")) is not None:
        found["lag_mean"] = age
    ledger = run.ledger or {}
    if ledger.get("committed"):
        found["drop_share"] = ledger.get("dropped_stale", 0) / ledger["committed"]
    return found


def ledger_rows(run: RunData) -> list[tuple[str, str, str]]:
    """Return name, count and meaning of every column of the ledger; empty if it is not known."""
    if run.ledger is None:
        return []
    meanings = {name: METRICS[f"buffer/{name}"] for name in COUNTS} | dict.fromkeys(OUTSIDE, "Outside the ledger.")
    return [(name, f"{run.ledger[name]:,}" if name in run.ledger else DASH, text) for name, text in meanings.items()]


def reasons(run: RunData) -> list[tuple[str, int]]:
    """Return why samples failed, and why rows and messages were quarantined, the most frequent first."""
    buffer = run.status.buffer if run.status is not None else None
    if buffer is None:
        return []
    found = [*buffer.failed_by_reason.items()]
    found += [(f"quarantined: {reason}", count) for reason, count in buffer.quarantined_by_reason.items()]
    return sorted(((reason[:MAX_REASON], count) for reason, count in found), key=lambda each: -each[1])[:MAX_REASONS]


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys of a config with their values, as text."""
    for key, value in config.items():
        if isinstance(value, Mapping) and (not prefix or prefix.startswith("pools.")):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, ensure_ascii=False, default=str)


def sections(run: RunData) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for section, values in run.config.items():
        if isinstance(values, Mapping) and values:
            yield section, list(flat(values, f"{section}." if section == "pools" else ""))
