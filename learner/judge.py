"""Judge: evaluates the loss of an update, and says whether and how the update is taken."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.diagnostics import EssRule, EssVerdict, off_policy_metrics
from algorithms.inputs import LossInputs, LossOutput
from algorithms.registry import AlgorithmConfig, loss_for
from learner.batch import Leaves, StepBatch
from learner.config import LearnerConfig
from learner.optimizer import Verdict
from learner.updates import Metrics


@dataclass(frozen=True)
class Judgement:
    """What comes of evaluating the loss."""

    gradient: Leaves | None
    """dL / d(leaf) of each token; None where the update is not to be taken."""
    verdict: Verdict
    metrics: Metrics
    weights_T: Tensor | None
    """The importance weights that the loss applied."""


class Judge:
    """Asked on the lead alone, but for `gradient`, which every last stage may ask for."""

    def __init__(self, algorithm: AlgorithmConfig, config: LearnerConfig) -> None:
        """Take the loss and the rule of the effective sample size.

        Args:
            algorithm: its loss is evaluated on the whole of an update's batch.
            config: learner.ess_budget and the keys beside it.
        """
        self._loss = loss_for(algorithm)
        self._ess_of = config.ess_of
        self._rule: EssRule | None = None
        if config.ess_budget is not None:
            self._rule = EssRule(config.ess_budget, config.ess_action, config.ess_max_drops)
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

    def judge(self, batch: StepBatch, leaves: Leaves, old: Leaves, reference_T: Tensor) -> Judgement:
        """Evaluate the loss at the present weights.

        Args:
            batch: of the update.
            leaves: of the present weights, for its tokens.
            old: of the weights at the start of the draw.
            reference_T: log-probabilities of the reference model.
        """
        inputs = batch.loss_inputs(leaves, old, reference_T, batch.version)
        output = self._loss(inputs)
        wanted = [inputs.logprobs_T] if inputs.values_T is None else [inputs.logprobs_T, inputs.values_T]
        gradients = torch.autograd.grad(output.loss, wanted)
        metrics: Metrics = {"loss": output.loss.item(), **output.metrics}
        healthy = all(bool(torch.isfinite(tensor).all()) for tensor in (output.loss, *gradients))
        if not healthy:
            return Judgement(None, Verdict(healthy=False), metrics, output.weights_T)
        ess = self._judge_sample_size(batch, inputs, output)
        gradient = None if ess.drop else Leaves(gradients[0], gradients[1] if len(gradients) == 2 else None)
        return Judgement(gradient, Verdict(drop=ess.drop, lr_scale=ess.lr_scale), metrics, output.weights_T)

    def _judge_sample_size(self, batch: StepBatch, inputs: LossInputs, output: LossOutput) -> EssVerdict:
        if self._rule is None:
            return EssVerdict()
        found = distance(batch, inputs, output.weights_T)
        verdict = self._rule.judge(found[f"off_policy/{self._ess_of}"], self._drops_before)
        self._drops_now = self._drops_now or verdict.drop
        return verdict


def distance(batch: StepBatch, inputs: LossInputs, weights_T: Tensor | None) -> Metrics:
    """How far the data of a batch are from the policy."""
    device = inputs.logprobs_T.device
    lag_T, single_version_B = torch.from_numpy(batch.lag_T), torch.from_numpy(batch.single_version_B)
    found = off_policy_metrics(inputs, lag_T.to(device), single_version_B.to(device), weights_T)
    return {name: value if value is None or math.isfinite(value) else None for name, value in found.items()}
