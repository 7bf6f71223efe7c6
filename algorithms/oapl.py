"""OAPL: regression of the log ratio to the policy that sampled on the advantage.

Objective:
    delta_j = beta * log(pi / mu)(y_j|x) - (r_j - V(x))
    L       = mean over prompts and j of delta_j^2
    V(x)    = the mean reward of the prompt's other samples; or, with a `beta_value` as in the paper,
              beta_value * log( 1/K * sum_j exp(r_j / beta_value) )
    On data of one policy mu the gradient vanishes where pi(y|x) is proportional to mu(y|x) * exp(r / beta): the policy
    that maximises the reward less beta times the KL to mu. With weights pi / mu that holds for any V, as a baseline
    does in REINFORCE; without it needs V = beta * log Z, which is beta_value = beta and a large K.

Estimator:
    grad L = 2 * beta / K * sum_j delta_j * sum_t w_t * grad log pi_t per prompt, with the weights w of `corrections`.
    Prompts weigh the same, also where samples failed and their groups are smaller.

Where the off-policy correction enters:
    The anchor is the policy that sampled, whichever version that was: data of any age define their own target.
    `corrections` weigh the gradient, which matters under delay; and so does V: the log of a mean of exponentials
    lies near the greatest reward, so nearly every sample would be pushed down, stale ones too.

What we left out:
    The reference: nothing pulls towards it, and the optimum of a whole run is the best completion, not a tilted policy.

References:
    OAPL, arXiv 2602.19362; its estimate of V: A*-PO, arXiv 2505.20686; the mean of the others: RLOO, arXiv 2402.14740.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from algorithms.base import BASIC, Algorithm, LossInputs, LossOutput, Needs, group_advantages
from algorithms.corrections import WeighedGroupSection, weigh_gradient


class OAPLConfig(WeighedGroupSection):
    """Knobs of OAPL."""

    type: Literal["oapl"] = "oapl"
    beta: PositiveFloat = Field(
        default=0.1, description="Strength of the pull towards the policy that sampled.", json_schema_extra=BASIC
    )
    beta_value: PositiveFloat | None = Field(
        default=None,
        description="Temperature of V, the log-mean-exp of a group's rewards. "
        "Unset: V is the mean reward of the group's other samples, which needs corrections; the paper's is beta.",
    )

    @property
    def needs(self) -> Needs:
        return Needs(groups=True, prompts=self.compare == "prompt", behaviour=True, separable="sequence")


def oapl(config: OAPLConfig, inputs: LossInputs) -> LossOutput:
    """Evaluate the loss on a whole batch; see the module's docstring for the formula.

    Returns:
        The loss, and metrics `oapl/delta_abs` (mean |delta| / beta, in nats), `oapl/value` (mean of V over samples) and
        `oapl/kl_behaviour` (mean over samples of log pi - log mu, in nats a sequence).
    """
    inputs, weights_T, shares = weigh_gradient(config.compared(inputs), config.corrections)
    log_rho_B = inputs.sum_per_sequence(inputs.logprobs_T - inputs.behaviour_logprobs_T)
    advantage_B = advantages(config, inputs)
    delta_B = config.beta * log_rho_B - advantage_B
    loss = (delta_B.square() / inputs.group_size_B).sum() / inputs.num_groups
    return LossOutput(
        loss,
        {
            "oapl/delta_abs": delta_B.detach().abs().mean().double() / config.beta,
            "oapl/value": (inputs.rewards_B - advantage_B).mean(),
            "oapl/kl_behaviour": log_rho_B.detach().mean(),
            **shares,
        },
        weights_T,
    )


def advantages(config: OAPLConfig, inputs: LossInputs) -> Tensor:
    if config.beta_value is None:
        return group_advantages(inputs, inputs.rewards_B, "rloo")
    return inputs.rewards_B - optimal_value(inputs, config.beta_value)


def optimal_value(inputs: LossInputs, beta: float) -> Tensor:
    """Return V of each group, spread over its sequences: B. Of equal rewards it is exactly that reward."""
    rewards_B = inputs.rewards_B.double()
    top_G = torch.full((inputs.num_groups,), -math.inf, dtype=torch.float64, device=rewards_B.device)
    top_B = top_G.scatter_reduce(0, inputs.group_B, rewards_B, reduce="amax")[inputs.group_B]
    above_B = beta * inputs.mean_per_group(((rewards_B - top_B) / beta).exp()).log()
    return (top_B + above_B).to(inputs.rewards_B.dtype)


ALGORITHM = Algorithm(OAPLConfig, oapl)
