"""The report page: a self-contained HTML file that answers four questions with numbers, charts and tables."""

from __future__ import annotations

import json
import time
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from leeway.buffer.ledger import COUNTS
from leeway.common.files import private_file
from leeway.launch.observe.learning import verdict
from leeway.launch.observe.metrics import METRICS, POOL_PREFIX
from leeway.launch.observe.view import most_common
from leeway.launch.report.charts import DASH, figures, pools_of, short
from leeway.launch.report.data import TIMES, RunData
from leeway.launch.text import duration, share_of

LONG_WAIT, MUCH_ESS, LITTLE_ESS = 0.2, 0.9, 0.5
"""Thresholds of the answers: fraction of time, and two effective fractions of a batch."""
POOL_COLUMNS = {
    "tokens_per_s": "tokens/s",
    "slots_used": "slots used",
    "step_ms": "ms a token",
    "queued_ms": "ms queued",
    "kv_usage": "cache",
    "preempted": "preempted",
    "tokens_lost": "tokens lost",
    "lag_mean": "lag",
    "mismatch_lag0_abs": "mismatch",
}
"""Maps a metric of a pool to its column in the table of pools."""


def render(run: RunData) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"clock": _clock, "short": short}
    charts = figures(run)
    drawn = [each for each in charts if each.plot is not None]
    plots = json.dumps([each.plot for each in drawn], separators=(",", ":"), allow_nan=False)
    return environment.from_string(_resource("page.html")).render(
        run=run,
        verdict=_learning(run),
        summary=_summary(run),
        resources={name: Markup(_resource(name)) for name in ("uplot.css", "page.css", "uplot.js", "page.js")},
        plots=Markup(plots.replace("<", "\\u003c")),
        drawn=drawn,
        parts=[(name, question, answer(run)) for name, (question, answer) in QUESTIONS.items()],
        tiles=tiles(run),
        charts=charts,
        seconds=[(TIMES[name], 100 * share) for name, share in _shares(run).items() if name in TIMES and share > 0],
        pool_columns=["actors", "precision", *POOL_COLUMNS.values()],
        pools=pool_rows(run),
        ledger=ledger_rows(run),
        reasons=reasons(run),
        made=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    )


def write(run: RunData, path: Path) -> int:
    """Write the page, readable by its owner only; return its size in bytes.

    Raises:
        OSError: the file cannot be written.
    """
    data = render(run).encode(errors="replace")  # a folder name may be invalid Unicode
    with private_file(path) as file:
        file.write(data)
    return len(data)


def _resource(name: str) -> str:
    return resources.files("leeway.launch.report").joinpath(name).read_text(encoding="utf-8")


def _summary(run: RunData) -> str:
    num_steps, task = run.num_steps, run.knob("task.name") or run.knob("task.path") or "a task"
    algorithm = str(run.knob("algorithm.type") or "").replace("_", " ")
    model = Path(str(run.knob("model.path") or "a model")).name.partition("@")[0]
    what = f"{model} on {Path(str(task)).name}" + (f" with {algorithm}" if algorithm else "")
    if run.failed:
        return f"{what}: failed after {num_steps:,} steps. {run.failed}"
    if not num_steps:
        return f"{what}: no step yet."
    trained = f", trained on {run.status.trained_tokens:,} completion tokens" if run.status.trained_tokens else ""
    return f"{what}: {num_steps:,} steps{trained}."


def _clock(seconds: object) -> str:
    if not isinstance(seconds, int | float) or not 0 <= seconds < 2**40:
        return DASH
    return time.strftime("%H:%M:%S", time.gmtime(seconds))


def _percent(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:.0f}%"


# --- the four answers ---------------------------------------------------------------------------------


def _learning(run: RunData) -> str:
    return verdict(run.status, run.metrics.values("reward/mean")).capitalize() + "."


def _health(run: RunData) -> str:
    if run.seen is None:
        return "Unknown: the run has no status."
    status = run.status
    faults = [each for each in (run.failed, run.seen.gone, *status.alerts) if each]
    faults += [f"{status.ledger_gap} samples are unaccounted for, which is a bug"] if status.ledger_gap else []
    if faults:
        return f"No: {'; '.join(faults)}"
    restarts = int(max((y for _, y in run.metrics.of("restarts")), default=0))
    again = f"; the learner was restarted {restarts} times" if restarts else ""
    return f"Yes: no alert is active and every sample is accounted for{again}."


def _waiting(run: RunData) -> str:
    shares = _shares(run)
    if not shares:
        return "Unknown: no step yet."
    learner, actors = shares["wait_for_batch"], shares["wait_for_policy"]
    longest = max(learner, actors)
    answer = "Neither side waits long" if longest < LONG_WAIT else "The learner" if learner == longest else "The actors"
    return f"{answer}: the learner waits {learner:.0%} of the time for batches, an actor {actors:.0%} for weights."


def _lag_hurts(run: RunData) -> str:
    ess, status = run.metrics.mean("off_policy/ess_sequence"), run.status
    lag = f" at a mean lag of {status.lag_mean:.2f} versions" if status.lag_mean is not None else ""
    if ess is None:
        return f"Not measured by this loss{lag}." if run.num_steps else "Unknown: no step yet."
    answer = "Little" if ess >= MUCH_ESS else "Somewhat" if ess >= LITTLE_ESS else "Yes"
    return f"{answer}: {_percent(ess)} of a batch is effective{lag}."


QUESTIONS = {
    "learning": ("Is it learning?", _learning),
    "health": ("Is it healthy?", _health),
    "waiting": ("Which side waits?", _waiting),
    "lag": ("Does lag hurt?", _lag_hurts),
}


# --- numbers and tables -------------------------------------------------------------------------------


class Tile(NamedTuple):
    part: str
    name: str
    value: str
    detail: str = ""
    tone: str = ""
    """CSS class of the value: `good`, `bad` or ''."""


def tiles(run: RunData) -> list[Tile]:
    """Return the headline numbers; an unknown number is a dash."""
    metrics, status, overlap = run.metrics, run.status, run.metrics.of("overlap/frac")
    generated, trained = (short(metrics.mean(f"perf/{what}_tokens_per_s")) for what in ("generated", "trained"))
    took = f" in {duration(status.wall_s)}" if status.wall_s else ""
    end = f"{run.num_steps:,} steps{took}" + (f"; exit status {run.exit_status}" if run.exit_status is not None else "")
    gap = str(status.ledger_gap) if status.step else DASH
    lag_is_over = isinstance(status.max_lag, int) and status.lag_max > status.max_lag
    lags = "no step" if status.lag_mean is None else f"versions; maximum {status.lag_max}, max_lag {status.max_lag}"
    failed, issued = (run.counts.ledger.get(name, 0) for name in ("failed", "issued"))
    why = f": {most_common(run.counts.failed_by_reason, 2)}" if run.counts.failed_by_reason else ""
    of_failed = [Tile("health", "Failed samples", share_of(failed, issued), f"{failed:,} of {issued:,}{why}", "bad")]
    learner, actors = (_percent(_shares(run).get(name)) for name in ("wait_for_batch", "wait_for_policy"))
    return [
        Tile("health", "End", run.ended, end, {"finished": "good", "failed": "bad"}.get(run.ended, "")),
        Tile("health", "Ledger gap", gap, "samples unaccounted for", "bad" if status.ledger_gap else "good"),
        *(of_failed if failed else []),
        Tile("waiting", "Tokens per second", generated, f"generated; {trained} trained"),
        Tile("waiting", "Overlap", _percent(overlap[-1][1] if overlap else None), "of step time with generation"),
        Tile("waiting", "Learner waits", learner, "of its time for a batch"),
        Tile("waiting", "Actors wait", actors, "of the learner's time for weights"),
        Tile("lag", "Effective sample size", _percent(metrics.mean("off_policy/ess_sequence")), "of sequences, mean"),
        Tile("lag", "Lag, mean", short(status.lag_mean), lags, "bad" if lag_is_over else ""),
    ]


def _shares(run: RunData) -> dict[str, float]:
    """Return `TIMES` and the wait of an actor for weights as fractions of the learner's time; empty without a step."""
    seconds = run.metrics.seconds
    total = sum(seconds.values())
    seconds["wait_for_policy"] = run.metrics.total("time/wait_for_policy")
    return {name: each / total for name, each in seconds.items()} if total else {}


def pool_rows(run: RunData) -> list[tuple[str, list[str]]]:
    """Return a table row for every pool, with means over the steps and the last values of counters."""
    rows = []
    for pool in pools_of(run):
        actors = run.metrics.of(f"{POOL_PREFIX}{pool}/actors")
        dtype = run.knob(f"pools.{pool}.dtype") or run.knob("actors.dtype") or DASH
        cells = [short(actors[-1][1] if actors else None), dtype]
        for what in POOL_COLUMNS:
            name = f"{POOL_PREFIX}{pool}/{what}"
            points = run.metrics.of(name)
            is_count = what in ("preempted", "tokens_lost")
            cells.append(short(points[-1][1] if is_count and points else run.metrics.mean(name)))
        rows.append((pool, cells))
    return rows


def ledger_rows(run: RunData) -> list[tuple[str, str, str]]:
    """Return name, count and meaning of every column of the ledger; empty if the ledger is unknown."""
    ledger = run.counts.ledger
    return [(name, f"{ledger.get(name, 0):,}", METRICS[f"buffer/{name}"]) for name in COUNTS if ledger]


def reasons(run: RunData) -> list[tuple[str, int]]:
    """Return the reasons of failures and quarantines with their counts, most frequent first."""
    found = [*run.counts.failed_by_reason.items()]
    found += [(f"quarantined: {reason}", count) for reason, count in run.counts.quarantined_by_reason.items()]
    return sorted(found, key=lambda each: -each[1])
