"""Advantages: by how much a sequence, or one of its tokens, did better than was to be expected.

group_advantages     from the rewards of a group: RLOO, GRPO, Dr. GRPO, MaxRL
gae                  token by token from a critic's values, of `rewards_per_token`

References:
    RLOO, arXiv 2402.14740; GRPO, arXiv 2402.03300; Dr. GRPO, arXiv
    2503.20783; MaxRL, arXiv 2602.02710; GAE, arXiv 1506.02438, equation 16.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from algorithms.base import LossInputs

GroupBaseline = Literal["rloo", "grpo", "dr_grpo", "maxrl"]

STD_FLOOR = 1e-6
"""Added to the group's standard deviation: with equal rewards the advantage is 0, not 0/0."""


def group_advantages(inputs: LossInputs, rewards_B: Tensor, baseline: GroupBaseline) -> Tensor:
    """Advantage of each sequence from the rewards of its group: B -> B. A group of one has advantage 0.

    rloo: r_j minus the mean of the other K-1.
    grpo: r_j minus the mean of all K, divided by their standard deviation (of K-1).
    dr_grpo: r_j minus the mean of all K.
    maxrl: r_j minus the mean of all K, divided by that mean; 0 where the mean is 0. With rewards of 0 and 1 its
        gradient is on average that of sum over k < K of pass@k / k, the first terms of the log-likelihood of success.
    """
    centred_B = rewards_B - inputs.mean_per_group(rewards_B)
    size_B = inputs.group_size_B
    if baseline == "rloo":
        # r_j - mean of the others = K / (K - 1) * (r_j - mean of all)
        return centred_B * size_B / (size_B - 1).clamp_min(1)
    if baseline == "maxrl":
        mean_B = rewards_B - centred_B
        return torch.where(mean_B > 0, centred_B / mean_B, 0.0)
    if baseline == "dr_grpo":
        return centred_B
    variance_B = inputs.mean_per_group(centred_B.square()) * size_B / (size_B - 1).clamp_min(1)
    return centred_B / (variance_B.sqrt() + STD_FLOOR)


def rewards_per_token(inputs: LossInputs, rewards_B: Tensor, penalty_T: Tensor) -> Tensor:
    """A sequence's reward on its last token, less a penalty on each: B, T -> T."""
    rewards_T = -penalty_T
    if rewards_T.numel() == 0:
        return rewards_T
    _, position_T = _positions(inputs)
    last_T = position_T == inputs.length_B[inputs.sequence_T] - 1
    return rewards_T + torch.where(last_T, rewards_B[inputs.sequence_T], 0.0)


def gae(inputs: LossInputs, rewards_T: Tensor, values_T: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimates: A_t = sum_l (gamma * lam)^l * (r_{t+l} + gamma * V_{t+l+1} - V_{t+l}): T -> T.

    The state after the last token has the value 0, also where the completion was cut off by length: the
    task's reward is all that there is. Values, of the state before each token, are constant in the gradient. `lam`, in
    [0, 1]: 1 is the return less the value, 0 the one-step error.
    """
    if rewards_T.numel() == 0:
        return torch.zeros_like(rewards_T)
    width, position_T = _positions(inputs)
    # one column more than the longest sequence: the value after the last token, which is 0
    grid = torch.zeros(2, inputs.num_sequences, width, dtype=values_T.dtype, device=values_T.device)
    grid[:, inputs.sequence_T, position_T] = torch.stack([rewards_T, values_T])
    rewards_BL, values_BL = grid
    error_BL = rewards_BL[:, :-1] + gamma * values_BL[:, 1:] - values_BL[:, :-1]
    advantage_B = torch.zeros_like(error_BL[:, 0])
    columns = []
    for t in range(width - 2, -1, -1):
        advantage_B = error_BL[:, t] + gamma * lam * advantage_B
        columns.append(advantage_B)
    return torch.stack(columns[::-1], dim=1)[inputs.sequence_T, position_T]


def _positions(inputs: LossInputs) -> tuple[int, Tensor]:
    """One more than the longest sequence, and the place of each token in its own: T. Needs at least one token."""
    length_B = inputs.length_B
    order_T = torch.argsort(inputs.sequence_T, stable=True)
    start_B = torch.cumsum(length_B, 0) - length_B
    place_T = torch.arange(order_T.numel(), device=order_T.device) - start_B[inputs.sequence_T[order_T]]
    return int(length_B.max()) + 1, torch.empty_like(place_T).index_copy(0, order_T, place_T)
