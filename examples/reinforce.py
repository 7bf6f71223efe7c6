"""REINFORCE with a leave-one-out baseline: a minimal algorithm.

Objective:
    J = E[r(y)] over y ~ pi

Estimator:
    L = -1/B * sum_j A_j * log pi(y_j|x), A_j = reward_scale * (r_j - mean of the other rewards of the group)

Where the off-policy correction enters:
    There is no correction, so the loss is valid only for fresh samples: set weight_sync.max_lag = 0.

What we left out:
    Importance weights, a trust region, and a KL to the reference. off_policy_ppo has them.

References:
    Williams 1992, Simple statistical gradient-following algorithms; Back to Basics, arXiv 2402.14740.
"""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from leeway.algorithms.base import Algorithm, GroupSection, LossInputs, LossOutput, Needs, group_advantages


class ReinforceConfig(GroupSection):
    """Config keys of REINFORCE."""

    reward_scale: PositiveFloat = Field(default=1.0, description="Factor of the rewards.")

    @property
    def needs(self) -> Needs:
        """Require groups: the baseline uses other samples of the same prompt."""
        return Needs(groups=True)


def reinforce(config: ReinforceConfig, inputs: LossInputs) -> LossOutput:
    """Compute the loss of a whole batch; see the module docstring for the formula.

    Returns:
        The loss, and `reinforce/advantage_abs` (mean |A| over samples).
    """
    inputs = config.compared(inputs)
    advantage_B = config.reward_scale * group_advantages(inputs, inputs.rewards_B, "rloo")
    logprob_B = inputs.sum_per_sequence(inputs.logprobs_T)
    loss = -(advantage_B * logprob_B).sum() / inputs.num_sequences
    return LossOutput(loss, {"reinforce/advantage_abs": advantage_B.abs().mean()})


ALGORITHM = Algorithm(ReinforceConfig, reinforce)
