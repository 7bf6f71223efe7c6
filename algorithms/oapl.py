"""OAPL: regression of log(pi / mu), the log ratio to the behaviour policy, on the advantage.

Objective:
    delta_j = beta * log(pi / mu)(y_j|x) - (r_j - V(x))
    L       = mean over prompts and j of delta_j^2
    V(x)    = the mean reward of the prompt's other samples
    On data of one policy mu, the gradient is zero at pi(y|x) proportional to mu(y|x) * exp(r / beta), the policy that
    maximizes the reward minus beta times the KL to mu. With weights pi / mu, this result holds for any V, as for a
    baseline in REINFORCE. Without weights, this result requires V = beta * log Z.

Estimator:
    grad L = 2 * beta / K * sum_j delta_j * sum_t w_t * grad log pi_t per prompt, with the weights w of `corrections`.
    Prompts have equal weight, even if samples failed and their groups are smaller.

Where the off-policy correction enters:
    The anchor is the policy version that sampled the completion, so data of any age define their own target.
    `corrections` weight the gradient, which matters for stale samples.

What we left out:
    A reference policy. Without a pull to a reference, the optimum of a run is the best completion, not a tilted policy.
    The paper's V, a log-mean-exp of the group's rewards, which is biased and close to the maximum reward. With this V,
    the loss would lower the probability of nearly every sample, even of stale samples.

References:
    OAPL, arXiv 2602.19362; V, the mean of the other rewards: RLOO, arXiv 2402.14740.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from leeway.algorithms.base import BASIC, Algorithm, GroupSection, LossInputs, LossOutput, Needs, group_advantages
from leeway.algorithms.corrections import WeighedSection, weigh_gradient


class OAPLConfig(WeighedSection, GroupSection):
    """Settings of OAPL."""

    type: Literal["oapl"] = "oapl"
    beta: PositiveFloat = Field(
        default=0.1, description="Strength of the pull towards the behaviour policy.", json_schema_extra=BASIC
    )

    @property
    def needs(self) -> Needs:
        return Needs(groups=True, prompts=self.compare == "prompt", behaviour=True, separable="sequence")


def oapl(config: OAPLConfig, inputs: LossInputs) -> LossOutput:
    """Evaluate the loss on a whole batch; see the module's docstring for the formula.

    Returns:
        The loss, and metrics `oapl/delta_abs` (mean |delta| / beta, in nats), `oapl/value` (mean of V over samples) and
        `oapl/kl_behaviour` (mean over samples of log pi - log mu, in nats per sequence).
    """
    inputs, weights_T, shares = weigh_gradient(config.compared(inputs), config.corrections)
    log_rho_B = inputs.sum_per_sequence(inputs.logprobs_T - inputs.behaviour_logprobs_T)
    advantage_B = group_advantages(inputs, inputs.rewards_B, "rloo")
    delta_B = config.beta * log_rho_B - advantage_B
    loss = (delta_B.square() / inputs.group_size_B).sum() / inputs.num_groups
    metrics = {
        "oapl/delta_abs": delta_B.detach().abs().mean().double() / config.beta,
        "oapl/value": (inputs.rewards_B - advantage_B).mean(),
        "oapl/kl_behaviour": log_rho_B.detach().mean(),
        **shares,
    }
    return LossOutput(loss, metrics, weights_T)


ALGORITHM = Algorithm(OAPLConfig, oapl)
