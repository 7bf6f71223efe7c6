"""TrainStep: an optimizer step in two passes, exact for every loss built from token log-probabilities.

    pass 1   forward only: log-probabilities of the whole batch, which are the proximal policy's
    loss     on the last stage: evaluate the algorithm once on the whole batch, g = dL / dlogp
    pass 2   the training schedule with the scalar sum(sg[g] * log pi) per micro-batch
    update   AdamW on every stage, or on none where loss or gradient are not finite

A group-level loss cannot be cut into micro-batches and a pipeline can run nothing else; with the
coefficients in between neither knows of the other. All ranks call `run` with the same batch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from algorithms.metrics import off_policy_metrics
from algorithms.registry import AlgorithmConfig, loss_for, weight_cap
from learner.batch import StepBatch
from learner.model import DeviceBatch
from learner.optimizer import StageOptimizer
from learner.packing import pack
from learner.pipeline import Pipeline

Metrics = dict[str, float | None]


@dataclass(frozen=True)
class StepResult:
    """What a step did. On other ranks than the last the loss, the metrics of it and the scores are missing."""

    skipped: bool
    metrics: Metrics
    new_scores: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)
    """Reference log-probabilities computed in this step, by index of the trajectory in the batch."""


class TrainStep:
    """Runs optimizer steps on one rank of the pipeline."""

    def __init__(
        self, pipeline: Pipeline, reference: Pipeline | None, optimizer: StageOptimizer, algorithm: AlgorithmConfig
    ) -> None:
        """Wire the parts of a step.

        Args:
            pipeline: over the policy's stage.
            reference: over the frozen reference's stage; None where the algorithm needs no reference.
            optimizer: of the policy's stage.
            algorithm: its loss, of the whole batch, is evaluated on the last rank only.
        """
        self._pipeline = pipeline
        self._reference = reference
        self._optimizer = optimizer
        self._loss = loss_for(algorithm)
        self._weight_cap = weight_cap(algorithm)

    def run(self, batch: StepBatch, step: int, version: int, token_budget: int) -> StepResult:
        """Take one step.

        Args:
            batch: the same on all ranks.
            step: 0-based number of the step, for the learning-rate schedule.
            version: optimizer steps taken so far.
            token_budget: tokens of a micro-batch.
        """
        clock = _Clock()
        module = self._pipeline.module
        on_device = DeviceBatch(batch.packed, module.device)
        reference_T, new_scores = self._score_reference(batch, on_device, token_budget)
        clock.lap("time/reference")
        logprobs_ML = self._pipeline.forward_only(on_device)
        clock.lap("time/forward")
        metrics: Metrics = {}
        coefficients_ML: Tensor | None = None
        healthy = True
        if logprobs_ML is not None:
            assert reference_T is not None
            output_T = torch.from_numpy(batch.packed.output_T).to(module.device)
            inputs = batch.loss_inputs(logprobs_ML.flatten()[output_T], reference_T, version)
            output = self._loss(inputs)
            (gradient_T,) = torch.autograd.grad(output.loss, inputs.logprobs_T)
            healthy = bool(torch.isfinite(output.loss)) and bool(torch.isfinite(gradient_T).all())
            # a sick loss still runs pass 2, with zeros: the other stages wait in it, and the update tells them
            coefficients_ML = torch.zeros_like(logprobs_ML)
            if healthy:
                coefficients_ML.view(-1)[output_T] = gradient_T
            lag_T = torch.from_numpy(batch.lag_T).to(module.device)
            single_B = torch.from_numpy(batch.single_version_B).to(module.device)
            distance = off_policy_metrics(inputs, lag_T, single_B, self._weight_cap)
            metrics = {"loss": output.loss.item(), **output.metrics, **distance}
        clock.lap("time/loss")
        self._pipeline.train(on_device, coefficients_ML)
        clock.lap("time/backward")
        update = self._optimizer.update(step, healthy=healthy)
        clock.lap("time/optimizer")
        metrics |= {"grad_norm": update.grad_norm, "lr": update.learning_rate, **clock.laps_s}
        return StepResult(update.skipped, metrics, new_scores)

    def _score_reference(
        self, batch: StepBatch, on_device: DeviceBatch, token_budget: int
    ) -> tuple[Tensor | None, dict[int, npt.NDArray[np.float32]]]:
        """Reference log-probabilities of all T tokens on the last rank, and those computed anew by trajectory."""
        module = self._pipeline.module
        lead = module.share.is_last
        bounds_T = batch.bounds_T()
        known = np.full(int(bounds_T[-1]), np.nan, np.float64)
        for i, trajectory in enumerate(batch.trajectories):
            if trajectory.reference_logprobs is not None:
                known[bounds_T[i] : bounds_T[i + 1]] = trajectory.reference_logprobs
        reference_T = torch.from_numpy(known).to(module.device, torch.promote_types(module.dtype, torch.float32))
        unscored = batch.unscored()
        if self._reference is None or not unscored:
            return (reference_T if lead else None), {}
        subset = on_device
        if len(unscored) < len(batch.trajectories):
            rows = [batch.trajectories[i] for i in unscored]
            packed = pack([row.token_ids for row in rows], [row.prompt_length for row in rows], token_budget)
            subset = DeviceBatch(packed, module.device)
        logprobs_ML = self._reference.forward_only(subset)
        # rotary tables depend on the model: the policy computes its own
        subset.rotations.clear()
        if logprobs_ML is None:
            return None, {}
        scores = logprobs_ML.flatten()[torch.from_numpy(subset.packed.output_T).to(module.device)]
        where = torch.from_numpy(np.flatnonzero(np.isin(batch.sequence_T, unscored))).to(module.device)
        reference_T[where] = scores.to(reference_T.dtype)
        values = reference_T.to("cpu", torch.float32).numpy()
        return reference_T, {i: values[bounds_T[i] : bounds_T[i + 1]].copy() for i in unscored}


class _Clock:
    """Seconds between laps."""

    def __init__(self) -> None:
        self.laps_s: dict[str, float] = {}
        self._last_s = time.perf_counter()

    def lap(self, name: str) -> None:
        now_s = time.perf_counter()
        self.laps_s[name] = now_s - self._last_s
        self._last_s = now_s
