"""Decoupled off-policy PPO: the policy that sampled and the centre of the trust region are different things.

Objective:
    J = 1/T * sum_t sg[rho_t] * min(u_t * A_t, clip(u_t, 1 - e_low, 1 + e_high) * A_t),  L = -J + value and KL terms
    rho = pi_prox / mu, u = pi / pi_prox, T = all completion tokens of the batch, before any mask
    With a critic: + value_coef / T * sum_t 1/2 max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2), R = A + V_old.

Estimator:
    A from the rewards of the group (rloo, grpo), the same for every token of a sequence, or by GAE (arXiv 1506.02438,
    equation 16) from the rewards per token and a critic's values.
    KL to the reference, where kl_beta > 0. In the reward: kl_beta * log(pi_prox / pi_ref) is taken from it, of the
    sequence with a group baseline, token by token with a critic; then pi* ~ pi_ref * exp(r / kl_beta) is the optimum.
    In the loss: + kl_beta / T * sum_t sg[rho_t] * k_t, with k2 = 1/2 log(pi / pi_ref)^2, whose gradient is that of
    KL(pi || pi_ref) of each token, or k3 = pi_ref / pi - 1 - log(pi_ref / pi), GRPO's, whose gradient is that of
    the other direction, KL(pi_ref || pi).
    T counts what masks remove: long answers are not favoured by short batches, nor kept samples by dropped ones.

Where the off-policy correction enters:
    rho repairs the expectation over tokens that another policy sampled; it is constant in the gradient, and bounded or
    masked by the corrections. The clip acts on u alone: pi_prox is the policy at the start of the
    draw, so stale data do not eat the trust region. Where a draw is one update, u = 1 and nothing is ever
    clipped: give it several (learner.num_minibatches, learner.num_epochs).
    proximal = "behaviour" is plain PPO on stale data: pi_prox := mu, so rho = 1 and the clip holds pi near mu.

Presets:
    proximal_rloo (Asynchronous RLHF): proximal = "behaviour", baseline = "rloo", corrections = ["sequence_clip"],
    kl_beta = 0.05 in the reward. Keys that are given win. T stays the denominator where the paper divides by the
    number of sequences: the gradient is the paper's times sequences / T.

What we left out:
    An entropy bonus, dual clipping, V-trace (GAE takes the sampled continuations as they are), whitening of
    advantages over the batch, and a bootstrap value for completions that were cut off.

References:
    AReaL, arXiv 2505.24298, equation 5; PPO, arXiv 1707.06347; Asynchronous RLHF, arXiv 2410.18252;
    RLOO, arXiv 2402.14740; GRPO, arXiv 2402.03300; KL estimators: Schulman, Approximating KL Divergence (2020).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator
from torch import Tensor

from algorithms.base import Algorithm, CriticKind, GroupSection, LossInputs, LossOutput, Measured, Needs, share_of
from algorithms.corrections import (
    AnySurrogate,
    AnyWeight,
    Corrections,
    TokenClip,
    TokenTIS,
    check_corrections,
    clamped_exp,
    importance_weights,
    surrogate_of,
)

CLIP = 0.2
"""Where the ratio is clipped, below and above, unless a run says otherwise."""

GroupBaseline = Literal["rloo", "grpo"]

STD_FLOOR = 1e-6
"""Added to the group's standard deviation: with equal rewards the advantage is 0, not 0/0."""

PRESETS: dict[str, dict[str, Any]] = {
    "proximal_rloo": {
        "proximal": "behaviour",
        "baseline": "rloo",
        "corrections": ["sequence_clip"],
        "kl_beta": 0.05,
        "kl_in": "reward",
    },
}


class OffPolicyPPOConfig(GroupSection):
    """Knobs of decoupled PPO."""

    type: Literal["off_policy_ppo"] = "off_policy_ppo"
    preset: Literal["proximal_rloo"] | None = Field(
        default=None, description="A named set of defaults for the keys below; keys that are given win."
    )
    proximal: Literal["draw_start", "behaviour"] = Field(
        default="draw_start",
        description="pi_prox, the centre of the trust region: the policy at the start of the draw (decoupled), or the "
        "one that sampled (plain PPO on stale data).",
    )
    baseline: Literal["rloo", "grpo", "critic"] = Field(default="rloo", description="How rewards become advantages.")
    normalize_std: bool = Field(default=True, description="grpo only: divide by the group's standard deviation.")
    clip_low: float = Field(default=CLIP, gt=0, le=1, description="pi / pi_prox is clipped below at 1 - clip_low.")
    clip_high: PositiveFloat = Field(default=CLIP, description="pi / pi_prox is clipped above at 1 + clip_high.")
    corrections: Corrections = Field(
        default=(TokenTIS(),),
        description="By name, or as tables with their knobs: at most one of 'token_tis', 'sequence_tis'; 'icepop', "
        "'geometric_mask'; at most one of 'sequence_clip', 'gspo', 'cispo' in place of clip_low and clip_high. []: rho "
        "as it is. Unset with proximal = 'behaviour': [].",
    )
    kl_beta: NonNegativeFloat = Field(
        default=0.0, description="Weight of the KL to the reference; 0 needs no reference."
    )
    kl_in: Literal["reward", "loss"] = Field(default="reward", description="Where the KL enters.")
    kl_estimator: Literal["k2", "k3"] = Field(default="k2", description="kl_in = 'loss': which estimator.")
    missing_eos_penalty: NonNegativeFloat = Field(
        default=0.0, description="Taken from the reward of an answer that ended by length."
    )
    critic: CriticKind = Field(
        default="head",
        description="baseline = 'critic': a value head on the policy, or a model of its own that starts as the policy.",
    )
    gamma: float = Field(default=1.0, ge=0, le=1, description="baseline = 'critic': discount of GAE.")
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="baseline = 'critic': lambda of GAE.")
    value_coef: PositiveFloat = Field(default=0.5, description="baseline = 'critic': weight of the value loss.")
    value_clip: NonNegativeFloat = Field(
        default=0.2, description="baseline = 'critic': a value moves by at most so much in a draw; 0: freely."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_the_preset(cls, values: Any) -> Any:  # noqa: ANN401 -- what TOML gave
        if not isinstance(values, dict):
            return values
        preset = values.get("preset")
        filled = {**PRESETS[preset], **values} if isinstance(preset, str) and preset in PRESETS else values
        # pi_prox / mu is 1 there, and has nothing to correct
        return {"corrections": [], **filled} if filled.get("proximal") == "behaviour" else filled

    @model_validator(mode="after")
    def _keys_must_agree(self) -> OffPolicyPPOConfig:
        check_corrections(self.corrections)
        if self.baseline == "critic" and self.compare == "prompt":
            raise ValueError("compare = 'prompt' is about group baselines, and baseline = 'critic' has none: remove it")
        moved = [key for key in ("clip_low", "clip_high") if getattr(self, key) != CLIP]
        for each in self.corrections:
            if isinstance(each, AnyWeight) and self.proximal == "behaviour":
                raise ValueError(
                    f"the correction '{each.type}' acts on pi_prox / mu, which is 1 with proximal = 'behaviour': "
                    "remove it, or use proximal = 'draw_start'"
                )
            if isinstance(each, AnySurrogate) and moved:
                raise ValueError(
                    f"{moved[0]} is not read with the correction '{each.type}': remove it, or write bounds as "
                    f"corrections = [{{type = '{each.type}', ...}}]"
                )
        return self

    @property
    def needs(self) -> Needs:
        """Groups for a group baseline, a critic for the other, a reference for the KL."""
        has_critic = self.baseline == "critic"
        # a KL in the reward enters the baseline of the group
        by_sequence = self.kl_beta == 0 or self.kl_in == "loss"
        return Needs(
            groups=not has_critic,
            prompts=self.compare == "prompt",
            reference=self.kl_beta > 0,
            behaviour=True,
            separable=None if has_critic else "sequence" if by_sequence else self.compare,
            critic=self.critic if has_critic else None,
        )


def off_policy_ppo(config: OffPolicyPPOConfig, inputs: LossInputs) -> LossOutput:
    """Evaluate the loss on a whole batch; see the module's docstring for the formula.

    Returns:
        The loss, the weights it applied, and metrics: `off_policy/clip_frac_low` and `_high` (share of tokens where
        clipping changes the objective), `off_policy/NAME_frac` of each weight correction, `ppo/advantage_abs` (mean
        over tokens), `ppo/kl_reference` where kl_beta > 0 (mean over sequences of log(pi_prox / pi_ref)), and with a
        critic `ppo/value_loss`, `ppo/value_clip_frac` and `ppo/explained_variance` of the returns by the old values.
    """
    if config.proximal == "behaviour":
        inputs = replace(inputs, proximal_logprobs_T=inputs.behaviour_logprobs_T)
    num_tokens = max(1, inputs.logprobs_T.numel())
    weighing = importance_weights(inputs, config.corrections)
    metrics: Measured = dict(weighing.metrics)
    advantage_T = _advantages(config, inputs, metrics)
    default = TokenClip(clip_low=config.clip_low, clip_high=config.clip_high)
    surrogate = surrogate_of(config.corrections, default)
    found = surrogate.objective(inputs, inputs.proximal_logprobs_T.detach(), advantage_T)
    loss = -(weighing.weight_T * found.objective_T).sum() / num_tokens
    metrics["off_policy/clip_frac_low"] = share_of(found.low_T & weighing.kept_T, num_tokens)
    metrics["off_policy/clip_frac_high"] = share_of(found.high_T & weighing.kept_T, num_tokens)
    metrics["ppo/advantage_abs"] = advantage_T.abs().sum().double() / num_tokens
    if config.kl_beta > 0 and config.kl_in == "loss":
        loss = loss + config.kl_beta * (weighing.weight_T * _kl_terms(config, inputs)).sum() / num_tokens
    if config.baseline == "critic":
        loss = loss + config.value_coef * _value_loss(config, inputs, advantage_T, metrics)
    return LossOutput(loss, metrics, weighing.weight_T if config.proximal == "draw_start" else None)


def _advantages(config: OffPolicyPPOConfig, inputs: LossInputs, metrics: Measured) -> Tensor:
    """Advantage of each token, constant: T."""
    rewards_B = inputs.penalised_rewards_B(config.missing_eos_penalty)
    penalty_T = torch.zeros_like(inputs.proximal_logprobs_T)
    if config.kl_beta > 0:
        log_ratio_T = (inputs.proximal_logprobs_T - inputs.reference_logprobs_T).detach()
        metrics["ppo/kl_reference"] = inputs.sum_per_sequence(log_ratio_T).mean()
        if config.kl_in == "reward":
            penalty_T = config.kl_beta * log_ratio_T
    if config.baseline == "critic":
        assert inputs.old_values_T is not None, "the config needs a critic, and the batch has no values"
        rewards_T = rewards_per_token(inputs, rewards_B, penalty_T)
        return gae(inputs, rewards_T, inputs.old_values_T.detach(), config.gamma, config.gae_lambda)
    shaped_B = rewards_B - inputs.sum_per_sequence(penalty_T)
    advantage_B = group_advantages(
        config.compared(inputs), shaped_B, config.baseline, normalize_std=config.normalize_std
    )
    return advantage_B[inputs.sequence_T]


def _kl_terms(config: OffPolicyPPOConfig, inputs: LossInputs) -> Tensor:
    """The estimator of KL(pi || pi_ref) at each token, differentiable: T."""
    log_ratio_T = inputs.logprobs_T - inputs.reference_logprobs_T
    if config.kl_estimator == "k2":
        return log_ratio_T.square() / 2
    return clamped_exp(-log_ratio_T) - 1 + log_ratio_T


def _value_loss(config: OffPolicyPPOConfig, inputs: LossInputs, advantage_T: Tensor, metrics: Measured) -> Tensor:
    """Half the squared error of the values, clipped around the old ones; mean over tokens."""
    assert inputs.values_T is not None, "the config needs a critic, and the batch has no values"
    assert inputs.old_values_T is not None, "the config needs a critic, and the batch has no old values"
    old_T = inputs.old_values_T.detach()
    returns_T = advantage_T + old_T
    num_tokens = max(1, returns_T.numel())
    error_T = (inputs.values_T - returns_T).square()
    if config.value_clip > 0:
        clipped_T = inputs.values_T.clamp(old_T - config.value_clip, old_T + config.value_clip)
        clipped_error_T = (clipped_T - returns_T).square()
        metrics["ppo/value_clip_frac"] = share_of(clipped_error_T > error_T, num_tokens)
        error_T = torch.maximum(error_T, clipped_error_T)
    loss = error_T.sum() / num_tokens / 2
    metrics["ppo/value_loss"] = loss.detach()
    metrics["ppo/explained_variance"] = _explained_variance(returns_T, old_T)
    return loss


def _explained_variance(returns_T: Tensor, old_T: Tensor) -> float | None:
    """Share of the variance of the returns that the old values foretold; None where the returns do not differ."""
    if returns_T.numel() == 0:
        return None
    # equal returns differ by rounding, which is no variance to explain
    largest = float(torch.maximum(returns_T.abs(), old_T.abs()).max())
    rounding = 100 * torch.finfo(returns_T.dtype).eps * largest
    spread = float(returns_T.double().var(correction=0))
    if spread <= rounding**2:
        return None
    return 1 - float((returns_T - old_T).double().var(correction=0)) / spread


def group_advantages(
    inputs: LossInputs, rewards_B: Tensor, baseline: GroupBaseline, *, normalize_std: bool = True
) -> Tensor:
    """Advantage of each sequence from the rewards of its group: B -> B. A group of one has advantage 0.

    rloo: r_j minus the mean of the other K-1.
    grpo: r_j minus the mean of all K, divided by their standard deviation (of K-1) where `normalize_std`.
    """
    centred_B = rewards_B - inputs.mean_per_group(rewards_B)
    size_B = inputs.group_size_B
    if baseline == "rloo":
        # r_j - mean of the others = K / (K - 1) * (r_j - mean of all)
        return centred_B * size_B / (size_B - 1).clamp_min(1)
    if not normalize_std:
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


ALGORITHM = Algorithm(OffPolicyPPOConfig, off_policy_ppo)
