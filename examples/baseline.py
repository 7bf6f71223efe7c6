"""A custom baseline for PPO: `algorithm.type = "off_policy_ppo"`, `algorithm.baseline = "baseline.py:median"`."""

import torch
from torch import Tensor

from leeway.algorithms.base import LossInputs


def median(inputs: LossInputs, rewards_B: Tensor) -> Tensor:
    """Return each sequence's advantage: its reward minus the median of its group, which is robust to an outlier."""
    advantage_B = torch.empty_like(rewards_B)
    for group in range(inputs.num_groups):
        of_group = inputs.group_B == group
        advantage_B[of_group] = rewards_B[of_group] - rewards_B[of_group].median()
    return advantage_B
