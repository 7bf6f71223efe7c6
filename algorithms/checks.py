"""Refuses a batch that no loss can be right on, and says which sample of it is wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.inputs import LossInputs
from algorithms.section import Needs


class BadInputs(ValueError):
    """A value in the batch that no loss can use; `sequence` says where."""

    def __init__(self, text: str, sequence: int) -> None:
        """Args:
        text: what is wrong, and what to try.
        sequence: its index in the batch.
        """
        super().__init__(text)
        self.sequence = sequence


def check_inputs(inputs: LossInputs, needs: Needs) -> None:
    """Check what came from outside: rewards, and behaviour log-probabilities where they are read.

    The learner's own log-probabilities are not checked: where they are not finite, the gradient tells.

    Raises:
        BadInputs: names the first sequence at fault.
    """
    reward = _first_not_finite(inputs.rewards_B)
    if reward is not None:
        raise BadInputs(
            f"the reward of sequence {reward} (group {int(inputs.group_B[reward])}) is "
            f"{float(inputs.rewards_B[reward])}: a reward must be finite. Let the reward function return None for what "
            "it cannot judge",
            reward,
        )
    if not needs.behaviour:
        return
    token = _first_not_finite(inputs.behaviour_logprobs_T)
    if token is not None:
        sequence = int(inputs.sequence_T[token])
        raise BadInputs(
            f"the behaviour log-probability of a token of sequence {sequence} (group {int(inputs.group_B[sequence])}) "
            f"is {float(inputs.behaviour_logprobs_T[token])}, and this loss weighs by it: sample with "
            "log-probabilities, or choose a loss that reads none (trajectory_balance, online_dpo)",
            sequence,
        )


def _first_not_finite(values: Tensor) -> int | None:
    wrong = torch.nonzero(~torch.isfinite(values))
    return int(wrong[0]) if wrong.numel() else None
