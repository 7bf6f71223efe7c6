"""Trajectory balance with a VarGrad estimate of log Z (TBA): off-policy by construction.

Objective:
    log Z(x) = 1/K * sum_j [ log pi_ref(y_j|x) - log pi(y_j|x) + r_j / beta ]
    delta_j  = sg[log Z(x)] + log pi(y_j|x) - log pi_ref(y_j|x) - r_j / beta
    L        = mean over prompts and j of delta_j^2
    Its minimum is pi*(y|x) proportional to pi_ref(y|x) * exp(r / beta), whatever data it is taken on.

Estimator:
    With R_j = r_j - beta * log(pi / pi_ref)(y_j), grad L = -2 / (beta * K) * sum_j (R_j - mean R) * grad log pi(y_j|x)
    per prompt: REINFORCE with a group baseline and a KL penalty inside the reward. The scale is 1 / beta.
    Prompts weigh the same, also where samples failed and their groups are smaller.

Where the off-policy correction enters:
    Nowhere: the balance condition holds sample by sample, so any data of full support will do. Neither
    behaviour nor proximal log-probabilities are read.

What we left out:
    A learned log Z, and sub-trajectory (per-token) balance.

References:
    Trajectory Balance with Asynchrony, arXiv 2503.18929, equations 4-6.
    VarGrad: arXiv 2010.10436.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from algorithms.inputs import LossInputs, LossOutput
from algorithms.section import Algorithm, GroupSection, Needs


class TrajectoryBalanceConfig(GroupSection):
    """Knobs of trajectory balance."""

    type: Literal["trajectory_balance"] = "trajectory_balance"
    beta: PositiveFloat = Field(default=0.1, description="Temperature of the target pi_ref * exp(r / beta).")
    beta_final: PositiveFloat | None = Field(default=None, description="Where beta ends; unset: beta stays constant.")
    beta_steps: NonNegativeInt = Field(
        default=0, description="Optimizer steps (updates) of the linear way from beta to beta_final."
    )

    @model_validator(mode="after")
    def _a_schedule_needs_both_ends(self) -> TrajectoryBalanceConfig:
        if (self.beta_final is None) != (self.beta_steps == 0):
            raise ValueError(
                f"beta_final = {self.beta_final} and beta_steps = {self.beta_steps}: a schedule of beta needs both "
                "(beta_steps > 0). Set both, or neither for a constant beta"
            )
        return self

    @property
    def needs(self) -> Needs:
        """A prompt's samples for log Z, and the reference that the target is tilted from."""
        return Needs(groups=True, prompts=self.compare == "prompt", reference=True)

    def beta_at(self, step: int) -> float:
        """Beta after `step` optimizer steps."""
        if self.beta_final is None:
            return self.beta
        share = min(1.0, step / self.beta_steps)
        return self.beta + (self.beta_final - self.beta) * share


def trajectory_balance(config: TrajectoryBalanceConfig, inputs: LossInputs) -> LossOutput:
    """Evaluate the loss on a whole batch; see the module's docstring for the formula.

    Returns:
        The loss, and metrics `tb/beta`, `tb/delta_abs` (mean |delta|), `tb/log_z` (mean over samples) and
        `tb/kl_reference` (mean over samples of log pi - log pi_ref, in nats a sequence).
    """
    inputs = config.compared(inputs)
    beta = config.beta_at(inputs.step)
    log_ratio_B = inputs.sum_per_sequence(inputs.logprobs_T - inputs.reference_logprobs_T)
    scaled_reward_B = inputs.rewards_B / beta
    log_z_B = inputs.mean_per_group(scaled_reward_B - log_ratio_B.detach())
    delta_B = log_z_B + log_ratio_B - scaled_reward_B
    # every sample of a group carries its group's mean, so dividing by the group's size weighs prompts alike
    loss = (delta_B.square() / inputs.group_size_B).sum() / inputs.num_groups
    return LossOutput(
        loss,
        {
            "tb/beta": beta,
            "tb/delta_abs": float(delta_B.detach().abs().mean()),
            "tb/log_z": float(log_z_B.mean()),
            "tb/kl_reference": float(log_ratio_B.detach().mean()),
        },
    )


ALGORITHM = Algorithm(TrajectoryBalanceConfig, trajectory_balance)
