"""Decoupled off-policy PPO with a group baseline: behaviour policy and trust region are different things.

Objective:
    J = 1/T * sum_t sg[min((pi_prox / mu)_t, C)] * min(u_t * A_t, clip(u_t, 1 - e_low, 1 + e_high) * A_t)
    u = pi / pi_prox, T = all completion tokens of the batch, A_t = A of the sequence, L = -J

Estimator:
    A_j from the rewards of the group, after subtracting kl_beta * log(pi_prox / pi_ref)(y_j) where kl_beta > 0:
    rloo: r_j minus the mean of the other K-1.
    grpo: r_j minus the mean of all K, divided by their standard deviation where `normalize_std`.
    The denominator is the batch's token count, before any clipping: long answers are not favoured by short batches.

Where the off-policy correction enters:
    pi_prox / mu per token, constant in the gradient, truncated at `behaviour_weight_cap`: it repairs the expectation,
    whoever sampled the token. The clip acts on pi / pi_prox alone, so stale data do not eat the trust region.

What we left out:
    A critic with GAE, an entropy bonus, dual clipping, and filters on the weight (IcePop, geometric masks).

References:
    AReaL, arXiv 2505.24298, equation 5; RLOO, arXiv 2402.14740; GRPO, arXiv 2402.03300.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from algorithms.inputs import LOG_RATIO_LIMIT, LossInputs, LossOutput

STD_FLOOR = 1e-6
"""Added to the group's standard deviation: with equal rewards the advantage is 0, not 0/0."""


class OffPolicyPPOConfig(BaseModel):
    """Knobs of decoupled PPO."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["off_policy_ppo"] = "off_policy_ppo"
    baseline: Literal["rloo", "grpo"] = Field(default="rloo", description="How rewards become advantages.")
    normalize_std: bool = Field(default=True, description="grpo only: divide by the group's standard deviation.")
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="pi / pi_prox is clipped below at 1 - clip_low.")
    clip_high: PositiveFloat = Field(default=0.2, description="pi / pi_prox is clipped above at 1 + clip_high.")
    behaviour_weight_cap: PositiveFloat | None = Field(
        default=5.0, description="pi_prox / mu is truncated here; unset: not truncated."
    )
    kl_beta: NonNegativeFloat = Field(
        default=0.0, description="Weight of log(pi_prox / pi_ref) taken from the reward; 0 needs no reference."
    )


def group_advantages(config: OffPolicyPPOConfig, inputs: LossInputs, rewards_B: Tensor) -> Tensor:
    """Advantage of each sequence from the rewards of its group: B -> B. A group of one has advantage 0."""
    centred_B = rewards_B - inputs.mean_per_group(rewards_B)
    size_B = inputs.group_size_B
    if config.baseline == "rloo":
        # r_j - mean of the others = K / (K - 1) * (r_j - mean of all)
        return centred_B * size_B / (size_B - 1).clamp_min(1)
    if not config.normalize_std:
        return centred_B
    variance_B = inputs.mean_per_group(centred_B.square()) * size_B / (size_B - 1).clamp_min(1)
    return centred_B / (variance_B.sqrt() + STD_FLOOR)


def off_policy_ppo(config: OffPolicyPPOConfig, inputs: LossInputs) -> LossOutput:
    """Evaluate the loss on a whole batch; see the module's docstring for the formula.

    Returns:
        The loss, and metrics `off_policy/clip_frac_low` and `_high` (share of tokens where clipping changes the
        objective), `off_policy/truncated_frac` (share of tokens at the cap), `ppo/advantage_abs`, and
        `ppo/kl_reference` (mean over sequences of log(pi_prox / pi_ref), where kl_beta > 0).
    """
    metrics: dict[str, float | None] = {}
    rewards_B = inputs.rewards_B
    if config.kl_beta > 0:
        kl_B = inputs.sum_per_sequence(inputs.proximal_logprobs_T - inputs.reference_logprobs_T).detach()
        rewards_B = rewards_B - config.kl_beta * kl_B
        metrics["ppo/kl_reference"] = float(kl_B.mean())
    advantage_B = group_advantages(config, inputs, rewards_B)
    advantage_T = advantage_B[inputs.sequence_T]

    log_weight_T = (inputs.proximal_logprobs_T - inputs.behaviour_logprobs_T).detach()
    raw_weight_T = log_weight_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    weight_T = raw_weight_T.clamp(max=config.behaviour_weight_cap)
    log_ratio_T = inputs.logprobs_T - inputs.proximal_logprobs_T.detach()
    ratio_T = log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    clipped_T = ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective_T = torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
    num_tokens = max(1, inputs.logprobs_T.numel())
    loss = -(weight_T * objective_T).sum() / num_tokens

    low_T = (ratio_T < 1 - config.clip_low) & (advantage_T < 0)
    high_T = (ratio_T > 1 + config.clip_high) & (advantage_T > 0)
    metrics["off_policy/clip_frac_low"] = float(low_T.sum()) / num_tokens
    metrics["off_policy/clip_frac_high"] = float(high_T.sum()) / num_tokens
    metrics["off_policy/truncated_frac"] = float((weight_T < raw_weight_T).sum()) / num_tokens
    metrics["ppo/advantage_abs"] = float(advantage_B.abs().mean())
    return LossOutput(loss, metrics)
