"""TrainStep: trains on one batch in one or more updates, with exact gradients of any loss of the model outputs.

    scores   reference log-probabilities; log-probabilities of the proximal policy and old values, by a forward-only
             pass over the whole batch, if the loss reads them
    then one update, which creates a policy version, for every minibatch of every epoch:
    pass 1   forward only: log-probabilities and critic values of the minibatch under the current weights
    loss     on the coordinator: evaluate the algorithm once on the whole minibatch, g = dL / d(leaf)
    pass 2   the training schedule with the scalar sum(sg[g] * leaf) per micro-batch
    update   gradients summed over replicas; AdamW on all stages, or on none if loss or gradient are not finite

A group-level loss cannot be split into micro-batches, but a pipeline runs only micro-batches; the coefficients g
decouple loss and pipeline. Minibatches hold whole groups. If a batch is one minibatch, its first update uses the pass
of `scores`, if any, as pass 1. A separable loss needs no pass 1: if a micro-batch holds whole units, its own
log-probabilities determine its coefficients. All ranks call `run` with the same batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from leeway.algorithms.base import LossInputs
from leeway.algorithms.corrections import Metrics, off_policy_metrics, policy_metrics
from leeway.algorithms.registry import AlgorithmConfig, loss_for
from leeway.learner.batch import Lag0ByActor, Leaves, StepBatch, lag0_by_actor
from leeway.learner.config import LearnerConfig
from leeway.learner.lag_control import LagControl, drift_per_token, masked, older_lag, root_length
from leeway.learner.model import DeviceBatch
from leeway.learner.networks import Gradient, Networks, Reference, Scores
from leeway.learner.optimizer import UpdateResult
from leeway.learner.packing import MOST_EVALUATED, IntArray

BetweenUpdates = Callable[[int], object]

CONTROL_METRICS = ("lag/allowed", "brake/lr_scale", "brake/masked_frac")
"""Metrics that are null if lag is not controlled."""


@dataclass(frozen=True)
class StepResult:
    """Result of a step. The loss and its metrics exist only on the coordinator."""

    version: int
    """Policy version after the step."""
    updates: tuple[Update, ...]
    metrics: Metrics
    new_scores: Scores = field(default_factory=dict)
    lag0_by_actor: Lag0ByActor = field(default_factory=dict)
    """Difference between the log-probabilities of each actor and the learner at lag 0."""

    @property
    def skipped(self) -> bool:
        return not any(update.result.taken for update in self.updates)

    @property
    def counted(self) -> list[Update]:
        """The updates that the metrics of the step cover."""
        return counted(self.updates)


class TrainStep:
    """The training step on one rank."""

    def __init__(
        self,
        networks: Networks,
        reference: Reference,
        algorithm: AlgorithmConfig,
        config: LearnerConfig,
        seed: int = 0,
        *,
        control: LagControl | None = None,
        one_pass: bool = True,
    ) -> None:
        """Create a step; `seed`, the same on all ranks, determines the order of minibatches.

        `control` masks gradients on ranks that evaluate losses, and scales the learning rate on the coordinator.
        `one_pass=False` makes separable losses take two passes, for comparison.
        """
        self._networks = networks
        self._reference = reference
        self._config = config
        self._seed = seed
        self._keeps_prompts_whole = algorithm.needs.prompts
        has_critic = algorithm.needs.critic is not None
        self._reads_start = algorithm.needs.proximal or has_critic
        self._separable = algorithm.needs.separable if one_pass and not has_critic else None
        self._loss = loss_for(algorithm)
        self._control = control

    def run(self, batch: StepBatch, step: int, between_updates: BetweenUpdates | None = None) -> StepResult:
        """Run step `step` (from 0) on a batch, which must be the same on all ranks and have the step's initial version.

        The batch must pass `report.check_samples`. `between_updates` is called with the version before every update
        except the first.
        """
        clock = _Clock(self._networks.policy.device)
        on_device = self._networks.on_device(batch.packed)
        reference_T, new_scores = self._reference.score(batch, on_device)
        clock.lap("time/reference")
        old: Leaves | None = None
        # a single one-pass update computes the outputs of the initial weights in that pass
        if self._reads_start and not (self._takes_one_pass(batch) and self._config.updates_per_step == 1):
            old = self._networks.forward_only(on_device)
            clock.lap("time/forward")
        policy, num_tokens = self._networks.policy, len(batch.sequence_T)
        wide = torch.promote_types(policy.dtype, torch.float32)
        unweighted_T = torch.full((num_tokens,), torch.nan, dtype=wide, device=policy.device)
        state = _StepState(batch, on_device, self._networks, reference_T, old, unweighted_T)
        updates: list[Update] = []
        version = batch.version
        unit_B = batch.prompt_B if self._keeps_prompts_whole else batch.group_B
        parts = minibatches(unit_B, self._config.num_minibatches, self._config.num_epochs, (self._seed, step))
        for number, sequences in enumerate(parts):
            if updates and between_updates is not None:
                between_updates(version)
                clock.lap("time/publish")
            # counts skipped updates, as the learning rate does, so that schedules end with the run
            update = step * self._config.updates_per_step + number
            part = state.part(sequences, version, update)
            if self._takes_one_pass(part.batch):
                evaluation = self._train_at_once(part, clock)
            else:
                evaluation = self._train_twice(part, clock, is_first=not updates)
            lr_scale = None if evaluation is None else evaluation.lr_scale
            result = self._networks.update(update, lr_scale)
            clock.lap("time/optimizer")
            updates.append(Update(part.batch, result, {} if evaluation is None else evaluation.metrics))
            version += updates[-1].result.taken
        distances, by_actor = state.distances()
        clock.lap("time/loss")
        return StepResult(
            version, tuple(updates), {**mean_metrics(updates), **distances, **clock.laps_s}, new_scores, by_actor
        )

    def _takes_one_pass(self, batch: StepBatch) -> bool:
        """Return whether one pass is exact and cheaper; each micro-batch then evaluates the loss of the whole batch."""
        if self._separable is None or (self._separable != "sequence" and batch.packed.unit != self._separable):
            return False
        micro_batches = batch.packed.num_micro_batches // batch.rule.num_replicas
        return micro_batches * len(batch.sequence_T) <= MOST_EVALUATED

    def _train_twice(self, part: _Part, clock: _Clock, *, is_first: bool) -> LossEvaluation | None:
        """Run passes 1 and 2; the scores replace pass 1 in the first update of an undivided batch."""
        if self._reads_start and is_first and part.is_whole:
            leaves = part.old
        else:
            leaves = self._networks.forward_only(part.on_device)
            clock.lap("time/forward")
            part.set_leaves(leaves)
        evaluation = self._evaluate(part, leaves)
        clock.lap("time/loss")
        self._networks.train(part.on_device, None if evaluation is None else evaluation.gradient)
        clock.lap("time/backward")
        return evaluation

    def _train_at_once(self, part: _Part, clock: _Clock) -> LossEvaluation | None:
        """Run pass 2 only; each micro-batch uses the gradient of the loss at its own log-probabilities."""
        logprobs_T = self._networks.train_in_one_pass(part.on_device, self._gradient_by_micro_batch(part))
        clock.lap("time/backward")
        leaves = None if logprobs_T is None else Leaves(logprobs_T)
        part.set_leaves(leaves)
        evaluation = self._evaluate(part, leaves)
        clock.lap("time/loss")
        return evaluation

    def _gradient_by_micro_batch(self, part: _Part) -> Gradient | None:
        """Return the map from log-probabilities of given tokens to their loss gradient; None on earlier stages."""
        if part.reference_T is None:
            return None
        # placeholder values for tokens of other micro-batches have no effect: they belong to other units of the loss
        blank = Leaves(torch.zeros_like(part.reference_T))
        progress = self._config.progress(part.update)
        constant = part.batch.loss_inputs(blank, part.old or blank, part.reference_T, progress)

        def gradient(where: Tensor, logprobs: Tensor) -> Tensor:
            logprobs_T = blank.logprobs_T.index_copy(0, where, logprobs)
            inputs = replace(constant, logprobs_T=logprobs_T.clone().requires_grad_())
            if part.old is None:
                inputs = replace(inputs, proximal_logprobs_T=logprobs_T)
            with torch.enable_grad():  # runs per micro-batch, so it must not wait for the device
                gradient_T = torch.autograd.grad(self._loss(inputs).loss, inputs.logprobs_T)[0]
                return (gradient_T if self._control is None else masked(gradient_T, inputs))[where]

        return gradient

    def _evaluate(self, part: _Part, leaves: Leaves | None) -> LossEvaluation | None:
        if not self._networks.mesh.place.is_coordinator:
            return None
        assert leaves is not None, "the coordinator runs the last stage"
        assert part.old is not None, "the coordinator runs the last stage"
        assert part.reference_T is not None, "the coordinator runs the last stage"
        inputs = part.batch.loss_inputs(leaves, part.old, part.reference_T, self._config.progress(part.update))
        output = self._loss(inputs)
        if output.weights_T is not None:
            part.state.applied_T[part.where_T] = output.weights_T
        variables = [inputs.logprobs_T] if inputs.values_T is None else [inputs.logprobs_T, inputs.values_T]
        gradient_T, *value_gradients = torch.autograd.grad(output.loss, variables)
        drift = drift_per_token(inputs)
        metrics: Metrics = {**dict.fromkeys(CONTROL_METRICS), **output.metrics, "loss": output.loss.item()}
        metrics["lag/drift"] = drift
        if not all(bool(torch.isfinite(tensor).all()) for tensor in (output.loss, gradient_T, *value_gradients)):
            return LossEvaluation(None, math.nan, metrics)
        if self._control is None:
            return LossEvaluation(Leaves(gradient_T, *value_gradients), 1.0, metrics)
        masked_T = masked(gradient_T, inputs)
        rate = self._networks.next_rate(part.update)
        lr_scale = self._control.observe(drift, older_lag(part.batch.lag_T), rate, root_length(inputs))
        num_masked, num_tokens = int((masked_T != gradient_T).sum()), max(1, gradient_T.numel())
        metrics |= zip(CONTROL_METRICS, (self._control.allowed, lr_scale, num_masked / num_tokens), strict=True)
        return LossEvaluation(Leaves(masked_T, *value_gradients), lr_scale, metrics)


@dataclass
class _Part:
    state: _StepState
    batch: StepBatch
    on_device: DeviceBatch
    where_T: Tensor
    """Indices of the part's tokens among the tokens of the whole batch."""
    reference_T: Tensor | None
    old: Leaves | None
    """Log-probabilities and critic values at the start of the step; or at the start of this update, if the loss does
    not read them."""
    update: int
    """Number of the update, 0-based over all steps."""

    @property
    def is_whole(self) -> bool:
        return self.batch.rows.num_rows == self.state.batch.rows.num_rows

    def set_leaves(self, leaves: Leaves | None) -> None:
        """Use the leaves of this update's pass as `old` if no pass was run at the start of the step."""
        if self.old is None:
            self.old = leaves
            self.state.first = self.state.first or self


@dataclass
class _StepState:
    """State shared by the updates of a step; leaves and reference exist only on the last stages."""

    batch: StepBatch
    on_device: DeviceBatch
    networks: Networks
    reference_T: Tensor | None
    old: Leaves | None
    applied_T: Tensor
    """Importance weights applied by the loss; NaN if none."""
    first: _Part | None = None
    """The first part whose pass ran, with the policy of the start of the step."""

    def part(self, sequences: IntArray, version: int, update: int = 0) -> _Part:
        """Return the part with these sequences, to train on at `version`."""
        where_T = torch.from_numpy(self.batch.tokens_of(sequences)).to(self.applied_T.device)
        old = None if self.old is None else self.old.of(where_T)
        reference_T = None if self.reference_T is None else self.reference_T[where_T]
        if len(sequences) == self.batch.rows.num_rows:
            batch, on_device = replace(self.batch, version=version), self.on_device
        else:
            batch = self.batch.part(sequences, version)
            on_device = self.networks.on_device(batch.packed)
        return _Part(self, batch, on_device, where_T, reference_T, old, update)

    def distances(self) -> tuple[Metrics, Lag0ByActor]:
        """Return, on the coordinator, metrics of the policy at the start of the step, and the lag-0 mismatch by actor.

        Without a pass at the start, the results cover only the part that the first update trained on.
        """
        if not self.networks.mesh.place.is_coordinator:
            return {}, {}
        start = self.first or self.part(np.arange(self.batch.rows.num_rows), self.batch.version)
        assert start.old is not None, "the coordinator runs the last stage"
        assert start.reference_T is not None, "the coordinator runs the last stage"
        inputs = start.batch.loss_inputs(start.old, start.old, start.reference_T)
        applied_T = self.applied_T[start.where_T]
        applied = bool(torch.isfinite(applied_T).all()) and applied_T.numel() > 0
        found = distance(start.batch, inputs, applied_T if applied else None)
        return found, lag0_by_actor(start.batch, start.old.logprobs_T)


class _Clock:
    """Timer of the phases of a step, in seconds."""

    def __init__(self, device: torch.device) -> None:
        self.laps_s: dict[str, float] = {}
        self._device = device
        self._last_s = time.perf_counter()

    def lap(self, name: str) -> None:
        if self._device.type == "cuda":
            # kernels are asynchronous: without this, their time would count for the phase that synchronizes first
            torch.cuda.synchronize(self._device)
        now_s = time.perf_counter()
        self.laps_s[name] = self.laps_s.get(name, 0.0) + now_s - self._last_s
        self._last_s = now_s


def minibatches(unit_B: IntArray, num_minibatches: int, num_epochs: int, seed: tuple[int, ...]) -> list[IntArray]:
    """Split a batch into minibatches of whole units (groups or prompts), differently in every epoch.

    Units are visited in random order, and each goes to the minibatch with the fewest sequences. The same seed
    gives the same split on every rank and after a restart. Returns the ascending sequence indices of each update.
    """
    units, unit_of_B, sizes = np.unique(unit_B, return_inverse=True, return_counts=True)
    num_parts = min(num_minibatches, len(units))
    updates: list[IntArray] = []
    for epoch in range(num_epochs):
        random = np.random.default_rng([*seed, epoch])
        part_of = np.zeros(len(units), np.int64)
        filled = np.zeros(num_parts, np.int64)
        for unit in random.permutation(len(units)):
            part_of[unit] = filled.argmin()
            filled[part_of[unit]] += sizes[unit]
        updates += [np.flatnonzero(part_of[unit_of_B] == part) for part in range(num_parts)]
    return updates


@dataclass(frozen=True)
class LossEvaluation:
    """Result of evaluating the loss of an update on its batch, at the leaves of the current weights."""

    gradient: Leaves | None
    """dL / d(leaf) of each token; None if not finite."""
    lr_scale: float
    """Factor of the learning rate; NaN skips the update."""
    metrics: Metrics


def distance(batch: StepBatch, inputs: LossInputs, weights_T: Tensor | None) -> Metrics:
    found = off_policy_metrics(inputs, torch.from_numpy(batch.fresh_T).to(inputs.logprobs_T.device), weights_T)
    found |= policy_metrics(inputs)
    return {name: value if value is None or math.isfinite(value) else None for name, value in found.items()}


@dataclass(frozen=True)
class Update:
    batch: StepBatch
    """The batch that the update trains on, at the version before the update."""
    result: UpdateResult
    metrics: Metrics
    """Metrics of the loss; empty except on the coordinator."""


def counted(updates: Sequence[Update]) -> list[Update]:
    """Return the updates that the metrics of a step cover: the applied updates, or all updates if none was applied."""
    return [update for update in updates if update.result.taken] or list(updates)


def mean_metrics(updates: Sequence[Update]) -> Metrics:
    """Return means over the updates of a step, weighted by completion tokens; None if no update has the metric."""
    chosen = counted(updates)
    rows = [_row(update) for update in chosen]
    weights = [max(1, len(update.batch.sequence_T)) for update in chosen]
    means: Metrics = {}
    for name in {name: None for row in rows for name in row}:
        pairs = [(row[name], weight) for row, weight in zip(rows, weights, strict=True)]
        present = [(value, weight) for value, weight in pairs if value is not None]
        means[name] = sum(v * w for v, w in present) / sum(w for _, w in present) if present else None
    means["updates/taken"] = sum(update.result.taken for update in updates)
    means["updates/skipped"] = sum(not update.result.taken for update in updates)
    return means


def _row(update: Update) -> Metrics:
    result = update.result
    row: Metrics = {**update.metrics, "lr": result.learning_rate}
    row |= dict(zip(("grad_norm", "critic/grad_norm"), result.grad_norms, strict=False))
    return row
