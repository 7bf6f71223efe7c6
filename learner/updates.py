"""Update: what one optimizer step did; and what a step reports of its updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from learner.batch import StepBatch
from learner.optimizer import UpdateResult

Metrics = dict[str, float | None]


@dataclass(frozen=True)
class Update:
    """One update of a step."""

    batch: StepBatch
    """What it trained, at the version that it found."""
    result: UpdateResult
    metrics: Metrics
    """Of the loss; empty but on the lead."""


def counted(updates: Sequence[Update]) -> list[Update]:
    """The updates that a step's figures are about: those that were taken, or all where none was."""
    return [update for update in updates if update.result.taken] or list(updates)


def mean_metrics(updates: Sequence[Update], *, acts_on_ess: bool) -> Metrics:
    """Means over the updates of a step, weighted by completion tokens; a metric is None where no update has it.

    Args:
        updates: of the step, all of them.
        acts_on_ess: is there a budget of the effective sample size?
    """
    chosen = counted(updates)
    rows = [_row(update, acts_on_ess=acts_on_ess) for update in chosen]
    weights = [max(1, len(update.batch.sequence_T)) for update in chosen]
    means: Metrics = {}
    for name in {name: None for row in rows for name in row}:
        pairs = [(row[name], weight) for row, weight in zip(rows, weights, strict=True)]
        known = [(value, weight) for value, weight in pairs if value is not None]
        means[name] = sum(v * w for v, w in known) / sum(w for _, w in known) if known else None
    means["updates/taken"] = sum(update.result.taken for update in updates)
    means["updates/skipped"] = sum(update.result.sick for update in updates)
    means["ess/dropped"] = sum(_dropped(update) for update in updates) if acts_on_ess else None
    return means


def _row(update: Update, *, acts_on_ess: bool) -> Metrics:
    result = update.result
    row: Metrics = {**update.metrics, "lr": result.learning_rate}
    norms: list[float | None] = [None if _dropped(update) else norm for norm in result.grad_norms]
    row |= dict(zip(("grad_norm", "critic/grad_norm"), norms, strict=False))
    row["ess/lr_scale"] = result.lr_scale if acts_on_ess and result.taken else None
    return row


def _dropped(update: Update) -> bool:
    """Was it dropped, and not sick besides?"""
    return update.result.dropped and not update.result.sick
