"""Reference: log-probabilities of the frozen reference model, computed once for every sample."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.batch import StepBatch, pack_rows
from learner.model import DeviceBatch
from learner.networks import Networks, gather_tokens
from learner.pipeline import Pipeline

Scores = dict[int, npt.NDArray[np.float32]]
"""Log-probabilities of a completion's tokens, by index of the trajectory in the batch."""


class Reference:
    """Scores what no earlier step has scored."""

    def __init__(self, pipeline: Pipeline | None, networks: Networks) -> None:
        """Look after the reference.

        Args:
            pipeline: over this rank's chunks of the frozen reference; None where the algorithm needs no reference.
            networks: what is trained, for its mesh, device and precision.
        """
        self._pipeline = pipeline
        self._networks = networks

    def score(self, batch: StepBatch, on_device: DeviceBatch) -> tuple[Tensor | None, Scores]:
        """Reference log-probabilities, and those computed anew. All ranks call it together.

        Args:
            batch: of the step, the same on all ranks.
            on_device: this replica's share of it.

        Returns:
            [T], to float32 in any precision, and the new ones on the last stages, NaN where there is no reference;
            None and nothing on the others.
        """
        unscored = batch.unscored()
        new_T: Tensor | None = None
        if self._pipeline is not None and len(unscored):
            subset = on_device
            if len(unscored) < len(batch.trajectories):
                packed = pack_rows([batch.trajectories[i] for i in unscored], batch.rule)
                subset = self._networks.on_device(packed)
            found = gather_tokens(self._pipeline.forward_only(subset), subset.packed, self._networks.mesh)
            new_T = None if found is None else found[0]
        if not self._networks.mesh.place.is_last:
            return None, {}
        reference_T = self._stored(batch)
        if new_T is None:
            return reference_T, {}
        where_T = torch.from_numpy(batch.tokens_of(unscored)).to(reference_T.device)
        # as they are stored, so that a step that is taken again reads the same numbers also in float64
        new_T = new_T.to(torch.float32)
        reference_T[where_T] = new_T.to(reference_T.dtype)
        ends = np.cumsum(np.diff(batch.bounds_T())[unscored])
        values = np.split(new_T.cpu().numpy(), ends[:-1])
        return reference_T, dict(zip(unscored.tolist(), values, strict=True))

    def _stored(self, batch: StepBatch) -> Tensor:
        """What earlier steps have scored, NaN elsewhere: [T]."""
        policy = self._networks.policy
        known = [
            np.full(row.num_completion_tokens, np.nan) if row.reference_logprobs is None else row.reference_logprobs
            for row in batch.trajectories
        ]
        return torch.from_numpy(np.concatenate(known)).to(
            policy.device, torch.promote_types(policy.dtype, torch.float32)
        )
