"""What a step reports: the metrics by name, from the batch and the step's result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from learner.batch import StepBatch
from learner.packing import IntArray
from learner.step import StepResult
from learner.updates import Metrics, counted

Report = dict[str, float | int | bool | None]

LEDGER_METRICS = {
    "buffer/issued": "issued",
    "buffer/in_flight": "in_flight",
    "buffer/committed": "committed",
    "buffer/failed": "failed",
    "buffer/waiting": "waiting",
    "buffer/trained": "trained",
    "buffer/dropped_stale": "dropped_stale",
    "buffer/filtered": "filtered",
    "buffer/filtered_too_long": "filtered_too_long",
    "buffer/evicted_unused": "evicted_unused",
    "buffer/quarantined": "quarantined",
    "buffer/duplicate": "duplicates",
    "buffer/late": "late",
    "buffer/ledger_gap": "gap",
}
"""Metric -> its name in the buffer's ledger."""


@dataclass(frozen=True)
class StepTimes:
    """When a step happened."""

    asked_s: float
    """Wall time at which its batch was asked for, seconds since the Unix epoch."""
    started_s: float
    """Wall time at which the batch was there."""
    finished_s: float
    """Wall time at which the update was done."""


def lag_metrics(updates: Sequence[StepBatch], start: StepBatch, newest_published: int, started_s: float) -> Metrics:
    """The lags of design and metric reference, over the tokens and trajectories that were trained.

    Args:
        updates: what each update trained, at its own version; a sample counts once for each.
        start: the draw, at the version that the step began with.
        newest_published: the newest version that could be pulled then.
        started_s: wall time of the step.
    """
    lag_T = np.concatenate([batch.lag_T for batch in updates])
    first_B, last_B = (np.concatenate(ends) for ends in zip(*map(_ends, updates), strict=True))
    waited_s = [started_s - trajectory.finished_s for trajectory in start.trajectories]
    return {
        "lag/token_mean": float(lag_T.mean()),
        "lag/token_p50": float(np.percentile(lag_T, 50)),
        "lag/token_p95": float(np.percentile(lag_T, 95)),
        "lag/token_max": float(lag_T.max()),
        "lag/in_flight": float((first_B - last_B).mean()),
        "lag/in_queue": float(last_B.mean()),
        "lag/publish": float(start.version - newest_published),
        "lag/wall_s": float(np.mean(waited_s)),
        "lag/abandoned": float(start.abandoned_T.sum()),
    }


def _ends(batch: StepBatch) -> tuple[IntArray, IntArray]:
    """Lag of the first and of the last token of each sequence that has any."""
    bounds_T = batch.bounds_T()
    written = bounds_T[1:] > bounds_T[:-1]
    return batch.lag_T[bounds_T[:-1][written]], batch.lag_T[bounds_T[1:][written] - 1]


def step_report(
    batch: StepBatch,
    result: StepResult,
    step: int,
    newest_published: int,
    times: StepTimes,
    ledger: Mapping[str, int],
    fidelity_ks: float,
) -> Report:
    """Everything to log of one step.

    Args:
        batch: the draw.
        result: what the step did.
        step: its number, counted from 1.
        newest_published: the newest version that could be pulled when the step began.
        times: of the step.
        ledger: the buffer's counts as the batch was drawn.
        fidelity_ks: how far the lengths trained so far were from those generated.
    """
    rewards = [trajectory.reward for trajectory in batch.trajectories if trajectory.reward is not None]
    lengths = [trajectory.num_completion_tokens for trajectory in batch.trajectories]
    duration_s = times.finished_s - times.started_s
    return {
        "step": step,
        "version": result.version,
        "skipped": result.skipped,
        "started_s": times.started_s,
        "finished_s": times.finished_s,
        "reward/mean": float(np.mean(rewards)),
        "reward/std": float(np.std(rewards)),
        "length/trained_mean": float(np.mean(lengths)),
        "length/fidelity_ks": fidelity_ks,
        "batch/trajectories": len(batch.trajectories),
        "batch/groups": batch.num_groups,
        "batch/tokens": batch.packed.num_tokens,
        "batch/completion_tokens": int(sum(lengths)),
        "batch/micro_batches": batch.packed.num_micro_batches // batch.rule.num_replicas,
        "batch/empty_micro_batches": batch.packed.num_empty,
        "batch/pack_efficiency": batch.packed.efficiency,
        "batch/cost_balance": batch.packed.cost_balance(batch.rule.num_replicas),
        "time/wait_for_batch": times.started_s - times.asked_s,
        "time/step": duration_s,
        "perf/learner_tokens_per_s": batch.packed.num_tokens / max(duration_s, 1e-9),
        **lag_metrics([update.batch for update in counted(result.updates)], batch, newest_published, times.started_s),
        **{metric: ledger[name] for metric, name in LEDGER_METRICS.items()},
        **result.metrics,
    }
