"""What is computed from a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from training_runs.run import FinishedRun, MeasurementFailed, Row

Figures = Mapping[str, float | None]
"""Of one run, by name; None where a run has none."""
ENDS = 0.2
"""The gain of reward is between the means of the first and of the last so many of the steps."""


def figures_of(run: FinishedRun) -> dict[str, float | None]:
    """Of one run.

    Returns:
        Rates per second of wall time from the first step to the last: `samples_per_s` and `trained_tokens_per_s`
        trained, `generated_tokens_per_s` generated. `reward_per_min`: gain of the mean reward, over the minutes between
        the steps that it is taken from. `accuracy`: greedy, held-out, after the last
        step. Lags in versions. `learner_idle_frac`: share of the time that it waited for a batch;
        `actor_idle_frac`: that an actor had no training request running, mean over actors. `dropped_stale`: share of
        the committed samples.

    Raises:
        MeasurementFailed: it is too short.
    """
    rows = run.rows
    if len(rows) < 5:
        raise MeasurementFailed(f"{run.folder.name} has {len(rows)} steps that took an update; at least 5 are needed")
    window = float(rows[0]["finished_s"]), float(rows[-1]["finished_s"])
    seconds, counted = window[1] - window[0], rows[1:]
    actors = run.generated(window).values()
    ledger = run.summary["ledger"]
    return {
        "samples_per_s": sum(row["batch/trajectories"] for row in counted) / seconds,
        "trained_tokens_per_s": sum(row["batch/completion_tokens"] for row in counted) / seconds,
        "generated_tokens_per_s": sum(actor.num_tokens for actor in actors) / seconds,
        "reward_per_min": reward_per_min(rows),
        "accuracy": run.summary["accuracy_after"],
        "lag_mean": _weighted(counted, "lag/token_mean"),
        "lag_p95": _weighted(counted, "lag/token_p95"),
        "lag_max": float(max(row["lag/token_max"] for row in rows)),
        "learner_idle_frac": sum(row["time/wait_for_batch"] for row in counted) / seconds,
        "actor_idle_frac": 1 - fmean(actor.busy_s for actor in actors) / seconds if actors else None,
        "dropped_stale": ledger["dropped_stale"] / ledger["committed"],
        "step_s": fmean(row["time/step"] for row in counted),
        "seconds": seconds,
        "num_steps": float(len(rows)),
    }


def reward_per_min(rows: Sequence[Row]) -> float:
    """Gain of the mean reward per minute of wall time, from the first ENDS of the steps to the last."""
    num = max(1, round(ENDS * len(rows)))
    first, last = rows[:num], rows[-num:]
    gain = fmean(row["reward/mean"] for row in last) - fmean(row["reward/mean"] for row in first)
    seconds = fmean(row["finished_s"] for row in last) - fmean(row["finished_s"] for row in first)
    return float(60 * gain / seconds)


def over_seeds(found: Sequence[Figures]) -> dict[str, float | None]:
    """Means over the seeds of a run; of `lag_max` the greatest."""
    together: dict[str, float | None] = {}
    for name in found[0]:
        known = [value for each in found if (value := each[name]) is not None]
        together[name] = (max(known) if name == "lag_max" else fmean(known)) if known else None
    return together


def _weighted(rows: Sequence[Row], key: str) -> float:
    """Mean over steps, weighted by their tokens."""
    tokens = sum(row["batch/completion_tokens"] for row in rows)
    return float(sum(row[key] * row["batch/completion_tokens"] for row in rows) / tokens)
