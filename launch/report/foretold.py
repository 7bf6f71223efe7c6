"""What a plan said that the run would do, beside what it did."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from launch.observe.metrics import POOL_PREFIX
from launch.report.data import RunData
from launch.report.svg import DASH, short
from planning.prediction import Prediction

WARM_UP = 3
"""Steps that do not count: nobody predicts a start."""


class Row(NamedTuple):
    """A figure that was predicted."""

    name: str
    predicted: str
    measured: str
    off: str
    """How far the measurement is from it, in per cent."""


class Foretold(NamedTuple):
    """All of them, and the one that explains most."""

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
    return Foretold(rows, _verdict(said, found))


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


def _verdict(said: Prediction, found: dict[str, float]) -> str:
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
