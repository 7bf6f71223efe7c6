"""What a loss reads and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +-20 before exp: e^20 is finite in float32, and far beyond any trust region."""


@dataclass(frozen=True)
class LossInputs:
    """One batch as the loss sees it: log-probabilities of completion tokens, flat over the batch.

    Shape suffixes: T completion tokens of the whole batch, B sequences, in groups that share a prompt.
    All log-probabilities are natural, at the sampling temperature, over the full vocabulary.
    """

    logprobs_T: Tensor
    """log pi of each token under the learner: the leaf that is differentiated."""
    proximal_logprobs_T: Tensor
    """log pi_prox: the weights at the start of this draw."""
    behaviour_logprobs_T: Tensor
    """log mu: the policy that sampled the token, whichever version that was."""
    reference_logprobs_T: Tensor
    """log pi_ref of the frozen reference model; NaN throughout where the algorithm declared it needs none."""
    sequence_T: Tensor
    """int64: the sequence (0..B-1) of each token."""
    group_B: Tensor
    """int64: the group (0..num_groups-1) of each sequence."""
    rewards_B: Tensor
    """Reward of each sequence, finite."""
    finished_B: Tensor
    """bool: the sequence ended with an end-of-sequence token (not by length)."""
    num_groups: int
    step: int
    """Optimizer steps taken so far: the position in schedules such as that of beta."""

    @property
    def num_sequences(self) -> int:
        """B."""
        return int(self.group_B.numel())

    def sum_per_sequence(self, values_T: Tensor) -> Tensor:
        """Sum a per-token value over each sequence: T -> B. An empty completion sums to 0."""
        total_B = torch.zeros(self.num_sequences, dtype=values_T.dtype, device=values_T.device)
        return total_B.index_add(0, self.sequence_T, values_T)

    @property
    def group_size_B(self) -> Tensor:
        """How many sequences of the batch share the group of each sequence, in the dtype of the rewards."""
        ones_B = torch.ones_like(self.rewards_B)
        size_G = torch.zeros(self.num_groups, dtype=ones_B.dtype, device=ones_B.device)
        return size_G.index_add(0, self.group_B, ones_B)[self.group_B]

    def mean_per_group(self, values_B: Tensor) -> Tensor:
        """Mean over the sequences of each group, spread back over its sequences: B -> B."""
        total_G = torch.zeros(self.num_groups, dtype=values_B.dtype, device=values_B.device)
        return total_G.index_add(0, self.group_B, values_B)[self.group_B] / self.group_size_B


@dataclass(frozen=True)
class LossOutput:
    """A scalar loss, differentiable in `LossInputs.logprobs_T`, and what to log beside it."""

    loss: Tensor
    metrics: dict[str, float | None] = field(default_factory=dict)
    """None where a metric does not apply to this batch."""
