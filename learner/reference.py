"""Reference: log-probabilities of the frozen reference model, computed once for every sample."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.batch import StepBatch
from learner.model import DeviceBatch, StageModule
from learner.packing import pack
from learner.pipeline import Pipeline

Scores = dict[int, npt.NDArray[np.float32]]
"""Log-probabilities of a completion's tokens, by index of the trajectory in the batch."""


class Reference:
    """Scores what no earlier step has scored."""

    def __init__(self, pipeline: Pipeline | None, policy: StageModule) -> None:
        """Look after the reference.

        Args:
            pipeline: over the frozen reference's stage; None where the algorithm needs no reference.
            policy: this rank's stage of what is trained, for device and precision.
        """
        self._pipeline = pipeline
        self._policy = policy

    def score(self, batch: StepBatch, on_device: DeviceBatch) -> tuple[Tensor | None, Scores]:
        """Reference log-probabilities of all T tokens, and those computed anew. None and nothing but on the last rank.

        Args:
            batch: of the step, the same on all ranks.
            on_device: the same, packed.
        """
        policy = self._policy
        bounds_T = batch.bounds_T()
        known = np.full(int(bounds_T[-1]), np.nan, np.float64)
        for i, trajectory in enumerate(batch.trajectories):
            if trajectory.reference_logprobs is not None:
                known[bounds_T[i] : bounds_T[i + 1]] = trajectory.reference_logprobs
        reference_T = torch.from_numpy(known).to(policy.device, torch.promote_types(policy.dtype, torch.float32))
        unscored = batch.unscored()
        if self._pipeline is None or not unscored:
            return (reference_T if policy.share.is_last else None), {}
        subset = on_device
        if len(unscored) < len(batch.trajectories):
            rows = [batch.trajectories[i] for i in unscored]
            packed = pack([row.token_ids for row in rows], [row.prompt_length for row in rows], batch.token_budget)
            subset = DeviceBatch(packed, policy.device)
        logprobs_ML = self._pipeline.forward_only(subset)
        if logprobs_ML is None:
            return None, {}
        scores = logprobs_ML.flatten()[torch.from_numpy(subset.packed.output_T).to(policy.device)]
        where = torch.from_numpy(np.flatnonzero(np.isin(batch.sequence_T, unscored))).to(policy.device)
        reference_T[where] = scores.to(reference_T.dtype)
        values = reference_T.to("cpu", torch.float32).numpy()
        return reference_T, {i: values[bounds_T[i] : bounds_T[i + 1]].copy() for i in unscored}
