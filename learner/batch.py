"""StepBatch: the trajectories of a draw as the flat arrays that a step computes with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from algorithms.inputs import LossInputs
from buffer.trajectory import Trajectory
from learner.packing import IntArray, PackedBatch, pack
from weight_sync.staleness import effective_version


def trainable(trajectories: Sequence[Trajectory]) -> list[int]:
    """Indices of the trajectories that have a reward; the others were counted as filtered."""
    return [i for i, trajectory in enumerate(trajectories) if trajectory.reward is not None]


@dataclass(frozen=True)
class StepBatch:
    """One step's data. T runs over the completion tokens of the B sequences, in order."""

    trajectories: tuple[Trajectory, ...]
    packed: PackedBatch
    sequence_T: IntArray
    group_B: IntArray
    num_groups: int
    lag_T: IntArray
    """Versions between the sampling of each token and this step."""
    single_version_B: npt.NDArray[np.bool_]
    num_abandoned: int
    """Tokens of versions that a learner restart abandoned; their lag counts from the checkpoint it resumed from."""

    @classmethod
    def build(
        cls,
        trajectories: Sequence[Trajectory],
        version: int,
        resumed_at: Mapping[int, int],
        token_budget: int,
        min_micro_batches: int = 1,
    ) -> StepBatch:
        """Flatten and pack.

        Args:
            trajectories: all with a reward.
            version: the learner's, at which these tokens are trained.
            resumed_at: for every incarnation, the version that it started from.
            token_budget: tokens of a micro-batch.
            min_micro_batches: what the pipeline's schedule needs.

        Raises:
            ValueError: a sequence does not fit the budget, or there is none.
        """
        packed = pack(
            [trajectory.token_ids for trajectory in trajectories],
            [trajectory.prompt_length for trajectory in trajectories],
            token_budget,
            min_micro_batches,
        )
        lengths = np.array([trajectory.num_completion_tokens for trajectory in trajectories], np.int64)
        group_B = _group_numbers(trajectories)
        counted_T = np.concatenate([_per_token(trajectory, resumed_at) for trajectory in trajectories])
        sampled_T = np.concatenate([_per_token(trajectory, {}) for trajectory in trajectories])
        return cls(
            trajectories=tuple(trajectories),
            packed=packed,
            sequence_T=np.repeat(np.arange(len(trajectories)), lengths),
            group_B=group_B.astype(np.int64),
            num_groups=int(group_B.max()) + 1,
            lag_T=version - counted_T,
            single_version_B=np.array([len({span.version for span in t.spans}) == 1 for t in trajectories]),
            num_abandoned=int((counted_T < sampled_T).sum()),
        )

    def unscored(self) -> list[int]:
        """Indices of sequences that the reference model has not scored yet."""
        return [i for i, trajectory in enumerate(self.trajectories) if trajectory.reference_logprobs is None]

    def bounds_T(self) -> IntArray:
        """Where each sequence's completion starts in T, and where the last ends (B + 1 values)."""
        return np.searchsorted(self.sequence_T, np.arange(len(self.trajectories) + 1)).astype(np.int64)

    def loss_inputs(self, proximal_T: Tensor, reference_T: Tensor, step: int) -> LossInputs:
        """What the loss reads, with the proximal log-probabilities as the leaf to differentiate.

        Args:
            proximal_T: log-probabilities of pass 1.
            reference_T: log-probabilities of the reference model.
            step: optimizer steps taken so far.
        """
        device, dtype = proximal_T.device, proximal_T.dtype

        def floats(values: npt.NDArray[np.floating] | list[float]) -> Tensor:
            return torch.tensor(np.asarray(values), dtype=dtype, device=device)

        rows = self.trajectories
        return LossInputs(
            logprobs_T=proximal_T.detach().clone().requires_grad_(),
            proximal_logprobs_T=proximal_T.detach(),
            behaviour_logprobs_T=floats(np.concatenate([row.logprobs for row in rows])),
            reference_logprobs_T=reference_T,
            sequence_T=torch.from_numpy(self.sequence_T).to(device),
            group_B=torch.from_numpy(self.group_B).to(device),
            rewards_B=floats([row.reward if row.reward is not None else np.nan for row in rows]),
            finished_B=torch.tensor([row.finish_reason == "stop" for row in rows], device=device),
            num_groups=self.num_groups,
            step=step,
        )


def _per_token(trajectory: Trajectory, resumed_at: Mapping[int, int]) -> IntArray:
    """The version that each completion token counts with."""
    versions = [effective_version(span.version, resumed_at) for span in trajectory.spans]
    return np.repeat(np.array(versions, np.int64), [span.end - span.start for span in trajectory.spans])


def _group_numbers(trajectories: Sequence[Trajectory]) -> IntArray:
    """The group of each sequence, numbered from 0; a group that a draw with replacement names twice counts as two."""
    seen: Counter[tuple[int, int]] = Counter()
    keys = []
    for trajectory in trajectories:
        sample = (trajectory.group_id, trajectory.sample_index)
        keys.append((trajectory.group_id, seen[sample]))
        seen[sample] += 1
    return np.unique(np.array(keys), axis=0, return_inverse=True)[1].reshape(-1)
