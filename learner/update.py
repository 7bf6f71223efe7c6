"""An update: the loss that decides whether and how it is taken, and what it did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.base import LossInputs, LossOutput
from algorithms.diagnostics import EssDecision, EssRule, off_policy_metrics
from algorithms.registry import AlgorithmConfig, loss_for
from learner.batch import Leaves, StepBatch
from learner.config import LearnerConfig
from learner.optimizer import UpdateDecision, UpdateResult

Metrics = dict[str, float | None]

ESS_METRIC = "off_policy/ess_sequence"
"""What is compared with learner.ess_budget: of pi_prox / mu over sequences. It tells how old the data are whatever the
loss does about it; a sequence is what a reward belongs to."""

MAX_DROPS = 2
"""Steps in a row that may drop updates while the actors catch up. The next step takes its updates at a lower rate: a
run whose data stay poor would stand still otherwise."""


@dataclass(frozen=True)
class LossEvaluation:
    """What comes of evaluating the loss."""

    gradient: Leaves | None
    """dL / d(leaf) of each token; None where the update is not to be taken."""
    decision: UpdateDecision
    metrics: Metrics
    weights_T: Tensor | None
    """The importance weights that the loss applied."""


class LossEvaluator:
    """Evaluates the loss of an update, and decides whether and how the update is taken.

    Used on the coordinator alone, but for `gradient`, which every last stage may ask for.
    """

    def __init__(self, algorithm: AlgorithmConfig, config: LearnerConfig) -> None:
        """Take the loss and the rule of the effective sample size."""
        self._loss = loss_for(algorithm)
        self._rule: EssRule | None = None
        if config.ess_budget is not None:
            self._rule = EssRule(config.ess_budget, config.ess_action, MAX_DROPS)
        self._drops_before = 0
        self._drops_now = False

    @property
    def drops_in_a_row(self) -> int:
        """Steps, up to the present one, that dropped updates; a restart takes it from the checkpoint."""
        return self._drops_before + 1 if self._drops_now else 0

    @drops_in_a_row.setter
    def drops_in_a_row(self, num_steps: int) -> None:
        self._drops_before, self._drops_now = max(0, num_steps - 1), num_steps > 0

    def begin_step(self) -> None:
        """A draw begins: what its updates drop is dropped once, for its samples do not become fresher meanwhile."""
        self._drops_before, self._drops_now = self.drops_in_a_row, False

    def gradient(self, inputs: LossInputs) -> Tensor:
        """The gradient dL / d(log-probability) of all T tokens; `inputs.logprobs_T` is a leaf."""
        with torch.enable_grad():
            return torch.autograd.grad(self._loss(inputs).loss, inputs.logprobs_T)[0]

    def evaluate(self, batch: StepBatch, leaves: Leaves, old: Leaves, reference_T: Tensor) -> LossEvaluation:
        """Evaluate the loss on the batch of an update, at the leaves of the present weights.

        `old` are those of the weights at the start of the draw, `reference_T` the reference model's log-probabilities.
        """
        inputs = batch.loss_inputs(leaves, old, reference_T, batch.version)
        output = self._loss(inputs)
        wanted = [inputs.logprobs_T] if inputs.values_T is None else [inputs.logprobs_T, inputs.values_T]
        gradients = torch.autograd.grad(output.loss, wanted)
        metrics: Metrics = {"loss": output.loss.item(), **output.metrics}
        finite = all(bool(torch.isfinite(tensor).all()) for tensor in (output.loss, *gradients))
        if not finite:
            return LossEvaluation(None, UpdateDecision(finite=False), metrics, output.weights_T)
        ess = self._check_sample_size(batch, inputs, output)
        gradient = None if ess.drop else Leaves(gradients[0], gradients[1] if len(gradients) == 2 else None)
        return LossEvaluation(gradient, UpdateDecision(drop=ess.drop, lr_scale=ess.lr_scale), metrics, output.weights_T)

    def _check_sample_size(self, batch: StepBatch, inputs: LossInputs, output: LossOutput) -> EssDecision:
        if self._rule is None:
            return EssDecision()
        found = distance(batch, inputs, output.weights_T)
        decision = self._rule.decide(found[ESS_METRIC], self._drops_before)
        self._drops_now = self._drops_now or decision.drop
        return decision


def distance(batch: StepBatch, inputs: LossInputs, weights_T: Tensor | None) -> Metrics:
    """How far the data of a batch are from the policy."""
    device = inputs.logprobs_T.device
    lag_T, single_version_B = torch.from_numpy(batch.lag_T), torch.from_numpy(batch.single_version_B)
    found = off_policy_metrics(inputs, lag_T.to(device), single_version_B.to(device), weights_T)
    return {name: value if value is None or math.isfinite(value) else None for name, value in found.items()}


@dataclass(frozen=True)
class Update:
    """One update of a step."""

    batch: StepBatch
    """What it trained, at the version that it found."""
    result: UpdateResult
    metrics: Metrics
    """Of the loss; empty but on the coordinator."""


def counted(updates: Sequence[Update]) -> list[Update]:
    """The updates that a step's figures are about: those that were taken, or all where none was."""
    return [update for update in updates if update.result.taken] or list(updates)


def mean_metrics(updates: Sequence[Update], *, acts_on_ess: bool) -> Metrics:
    """Means over the updates of a step, weighted by completion tokens; a metric is None where no update has it."""
    chosen = counted(updates)
    rows = [_row(update, acts_on_ess=acts_on_ess) for update in chosen]
    weights = [max(1, len(update.batch.sequence_T)) for update in chosen]
    means: Metrics = {}
    for name in {name: None for row in rows for name in row}:
        pairs = [(row[name], weight) for row, weight in zip(rows, weights, strict=True)]
        known = [(value, weight) for value, weight in pairs if value is not None]
        means[name] = sum(v * w for v, w in known) / sum(w for _, w in known) if known else None
    means["updates/taken"] = sum(update.result.taken for update in updates)
    means["updates/skipped"] = sum(update.result.non_finite for update in updates)
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
    """Was it dropped, though loss and gradient were finite?"""
    return update.result.dropped and not update.result.non_finite
