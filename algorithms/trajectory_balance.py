"""Trajectory balance with a VarGrad estimate of log Z (TBA): the optimum does not depend on the age of the data.

Objective:
    log Z(x) = 1/K * sum_j [ log pi_ref(y_j|x) - log pi(y_j|x) + r_j / beta ]
    delta_j  = sg[log Z(x)] + log pi(y_j|x) - log pi_ref(y_j|x) - r_j / beta
    L        = mean over prompts and j of delta_j^2
    The minimum of L is pi*(y|x) proportional to pi_ref(y|x) * exp(r / beta) for data from any policy.

Estimator:
    With R_j = r_j - beta * log(pi / pi_ref)(y_j), token t of completion j has the gradient
    -2 / (beta * K) * w_t * (R_j - mean R) * grad log pi_t per prompt: REINFORCE with a group baseline and a KL penalty
    in the reward. The scale is 1 / beta. Prompts have equal weight, even if samples failed and their groups are
    smaller. The reported loss is L itself, without w.

Where the off-policy correction enters:
    The correction is w_t = pi / mu of the token, bounded by `corrections` (default: token_tis). The optimum does not
    depend on w: with any positive weights of tokens or sequences, pi* is the only stationary point on data of one
    policy with full support (proof in docs/algorithms/trajectory_balance.md). Convergence needs w: without weights,
    stale samples keep lowering the probability of answers that the policy no longer produces, and the policy collapses.

What we left out:
    A learned log Z, and sub-trajectory (per-token) balance.

References:
    Trajectory Balance with Asynchrony, arXiv 2503.18929, equations 4-6 (without w).
    VarGrad: arXiv 2010.10436.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from leeway.algorithms.base import BASIC, Algorithm, GroupSection, LossInputs, LossOutput, Needs
from leeway.algorithms.corrections import WeighedSection, weigh_gradient


class TrajectoryBalanceConfig(WeighedSection, GroupSection):
    """Settings of trajectory balance."""

    type: Literal["trajectory_balance"] = "trajectory_balance"
    beta: PositiveFloat = Field(
        default=0.1, description="Temperature of the target pi_ref * exp(r / beta).", json_schema_extra=BASIC
    )
    beta_final: PositiveFloat | None = Field(
        default=None, description="Final beta, reached linearly over learner.num_steps; unset: constant."
    )

    @property
    def needs(self) -> Needs:
        return Needs(
            groups=True,
            prompts=self.compare == "prompt",
            reference=True,
            behaviour=bool(self.corrections),
            separable=self.compare,
        )


def trajectory_balance(config: TrajectoryBalanceConfig, inputs: LossInputs) -> LossOutput:
    """Evaluate the loss on a whole batch; see the module's docstring for the formula.

    Returns:
        The loss, and metrics `tb/beta`, `tb/delta_abs` (mean |delta|) and `tb/log_z` (mean over samples).
    """
    inputs, weights_T, shares = weigh_gradient(config.compared(inputs), config.corrections)
    beta_final = config.beta if config.beta_final is None else config.beta_final
    beta = config.beta + (beta_final - config.beta) * inputs.progress
    log_ratio_B = inputs.sum_per_sequence(inputs.logprobs_T - inputs.reference_logprobs_T)
    # delta - log Z, in nats
    distance_B = log_ratio_B - inputs.rewards_B / beta
    log_z_B = -inputs.mean_per_group(distance_B.detach())
    delta_B = log_z_B + distance_B
    # divide by the group size, so that all prompts have equal weight
    loss = (delta_B.square() / inputs.group_size_B).sum() / inputs.num_groups
    metrics = {
        "tb/beta": beta,
        "tb/delta_abs": delta_B.detach().abs().mean(),
        "tb/log_z": log_z_B.mean(),
        **shares,
    }
    return LossOutput(loss, metrics, weights_T)


ALGORITHM = Algorithm(TrajectoryBalanceConfig, trajectory_balance)
