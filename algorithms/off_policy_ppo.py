"""Decoupled off-policy PPO: the centre of the trust region is separate from the behaviour policy.

Objective:
    J = mean_t sg[rho_t] * min(u_t * A_t, clip(u_t, 1 - e_low, 1 + e_high) * A_t),  L = -J + the terms below
    rho = pi_prox / mu, u = pi / pi_prox. A surrogate among the corrections replaces min(...).
    mean_over selects the mean: over all T completion tokens of the batch, before any mask ("tokens"); over the tokens
    of each sequence, then over sequences ("sequences", as in the GRPO and GSPO recipes); or, if mean_over is a number,
    the sum over all tokens divided by the number of sequences and by mean_over (Dr. GRPO: no length is favoured).
    With critic values: + 1/2 / T * sum_t 1/2 max((V - R)^2, (clip(V, V_old +- 0.2) - R)^2), R = A + V_old.

Estimator:
    A comes from the rewards of the group (rloo, grpo, dr_grpo), from the rewards of the batch (batch: reward minus the
    mean of the other rewards, for groups of one), or from a user's function. All tokens of a sequence then have one A.
    With a critic, A comes from GAE over per-token rewards and critic values.
    KL to the reference, if kl_beta > 0. In the reward: kl_beta * log(pi_prox / pi_ref) is subtracted, per sequence with
    a group baseline, per token with a critic; the optimum is then pi* ~ pi_ref * exp(r / kl_beta).
    In the loss: + kl_beta * mean_t sg[rho_t] * k_t. "loss" uses k2 = 1/2 log(pi / pi_ref)^2 with the gradient of
    KL(pi || pi_ref) per token. "loss_k3" uses k3 = pi_ref / pi - 1 - log(pi_ref / pi), as in GRPO, with the gradient of
    the reverse divergence, KL(pi_ref || pi).
    Entropy: + entropy_coef * mean_t sg[rho_t] * 1/2 (log pi)^2. The expected gradient of this term is the gradient of
    the token distribution's negative entropy, which is the KL to the uniform distribution plus a constant (see k2).
    T and the number of sequences include masked tokens and samples, so that short batches do not favour long answers,
    and dropped samples do not increase the weight of other samples.

Where the off-policy correction enters:
    rho corrects the expectation over tokens sampled by another policy. rho is constant in the gradient; corrections
    bound or mask it. The clip acts only on u: pi_prox is the policy at the start of the step, so stale data do
    not consume the trust region. If a step is a single update, u = 1 and nothing is clipped: use several updates
    (learner.num_minibatches, learner.num_epochs).
    proximal = "behaviour" is plain PPO on stale data: pi_prox := mu, so rho = 1 and the clip keeps pi near mu.
    proximal = "interpolated" sets pi_prox := mu^(1/d) * pi^(1 - 1/d) for a token that is d updates old, and pi if
    d = 0. The interpolation needs no pass over the batch before the updates (A-3PO): u = (pi / mu)^(1/d).

Recipes:
    Proximal RLOO (Asynchronous RLHF): proximal = "behaviour", corrections = ["sequence_clip"], kl_beta = 0.05, other
    keys at their defaults. The denominator is T, but the paper divides by the number of sequences. The gradient is
    the paper's gradient times sequences / T; with mean_over = "sequences", it equals the paper's gradient.
    Dr. GRPO: baseline = "dr_grpo", mean_over = actors.max_new_tokens.

What we left out:
    The exact entropy over the vocabulary, V-trace (GAE uses the sampled continuations unchanged), whitening of
    advantages over the batch, and a bootstrap value for truncated completions.

References:
    AReaL, arXiv 2505.24298, equation 5; PPO, arXiv 1707.06347; Asynchronous RLHF, arXiv 2410.18252;
    Dr. GRPO, arXiv 2503.20783; A-3PO, arXiv 2512.06547; KL estimators: Schulman, Approximating KL Divergence (2020);
    GAE, arXiv 1506.02438, equation 16; baselines: `leeway.algorithms.base.group_advantages`; surrogates:
    `leeway.algorithms.corrections`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, cast, get_args

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator
from torch import Tensor

from leeway.algorithms.base import (
    BASIC,
    LOG_RATIO_LIMIT,
    Algorithm,
    CriticKind,
    GroupBaseline,
    GroupSection,
    LossInputs,
    LossOutput,
    Measured,
    Needs,
    group_advantages,
    share_of,
)
from leeway.algorithms.corrections import (
    AnyCorrection,
    AnySurrogate,
    AnyWeight,
    Clip,
    Listed,
    SequenceClip,
    TokenTIS,
    check_corrections,
    importance_weights,
)
from leeway.common.user_input import Reference, UserFileError, load_object, user_code_errors

CLIP = 0.2

VALUE_COEF = 0.5
"""Weight of the value loss relative to the policy loss. The Adam optimizer of a critic model cancels this factor."""
VALUE_CLIP = 0.2
"""Maximum change of a value in one step, in units of reward."""

CRITICS: dict[str, CriticKind] = {"value_head": "head", "critic": "model"}
"""Maps each learned baseline to the source of the critic values."""

UserBaseline = Callable[[LossInputs, Tensor], Tensor]
"""A user's baseline: (batch, rewards after a KL penalty [B]) -> advantage of each sequence [B]."""


class OffPolicyPPOConfig(GroupSection):
    """Settings of decoupled PPO."""

    type: Literal["off_policy_ppo"] = "off_policy_ppo"
    proximal: Literal["draw_start", "behaviour", "interpolated"] = Field(
        default="draw_start",
        description="Centre of the trust region, pi_prox: policy at the start of the step, behaviour policy (plain "
        "PPO), or between behaviour and current policy by token age.",
    )
    baseline: Literal["rloo", "grpo", "dr_grpo", "batch", "value_head", "critic"] | Reference = Field(
        default="rloo",
        description="Advantages: 'rloo', 'grpo' or 'dr_grpo' within a group; 'batch' within the update, for groups of "
        "one; GAE with 'value_head' or 'critic'; or your FILE.py:FUNCTION.",
        json_schema_extra=BASIC,
    )
    clip_low: float = Field(default=CLIP, gt=0, le=1, description="Lower clip of pi / pi_prox: 1 - clip_low.")
    clip_high: PositiveFloat = Field(default=CLIP, description="Upper clip of pi / pi_prox: 1 + clip_high.")
    corrections: Listed[AnyCorrection] = Field(
        default=(TokenTIS(),),
        description="As in other losses; also at most one of 'sequence_clip', 'gspo', 'cispo' instead of clip_low and "
        "clip_high. []: uncorrected rho, the default with proximal = 'behaviour'.",
        json_schema_extra=BASIC,
    )
    mean_over: Literal["tokens", "sequences"] | PositiveFloat = Field(
        default="tokens",
        description="Equal weights for 'tokens' or 'sequences'; a number divides the sum of each sequence (Dr. GRPO: "
        "actors.max_new_tokens).",
    )
    kl_beta: NonNegativeFloat = Field(
        default=0.0, description="Weight of the KL to the reference; 0 needs no reference."
    )
    kl_in: Literal["reward", "loss", "loss_k3"] = Field(
        default="reward",
        description="Where the KL enters: 'reward', or the loss with estimator k2 ('loss') or k3 ('loss_k3').",
    )
    entropy_coef: NonNegativeFloat = Field(default=0.0, description="Weight of the entropy bonus.")
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="lambda of GAE.")

    @model_validator(mode="before")
    @classmethod
    def _default_to_no_corrections(cls, values: Any) -> Any:  # noqa: ANN401 -- from TOML
        if isinstance(values, dict) and values.get("proximal") == "behaviour":  # because pi_prox / mu is 1
            return {"corrections": [], **values}
        return values

    @model_validator(mode="after")
    def _keys_must_agree(self) -> OffPolicyPPOConfig:
        check_corrections(self.corrections)
        self._check_surrogate()
        self._check_unused_keys()
        if self.compare == "prompt" and not self.has_group_baseline:
            raise ValueError(
                f"compare = 'prompt' needs a group baseline, but baseline = '{self.baseline}': remove compare"
            )
        if self.is_users_baseline and not callable(load_object(self.baseline)):
            raise ValueError(f"baseline = '{self.baseline}' must be a function (inputs, rewards_B) -> advantage_B")
        return self

    def _check_surrogate(self) -> None:
        changed = [key for key in ("clip_low", "clip_high") if getattr(self, key) != CLIP]
        for each in self.corrections:
            if isinstance(each, AnySurrogate) and changed:
                raise ValueError(
                    f"{changed[0]} has no effect with the correction '{each.type}': remove {changed[0]}, or write the "
                    f"bounds into the entry of the correction: corrections = [{{type = '{each.type}', ...}}]"
                )
            if isinstance(each, AnyWeight) and self.proximal == "behaviour":
                raise ValueError(
                    f"the correction '{each.type}' acts on pi_prox / mu, which is 1 with proximal = 'behaviour': "
                    "remove the correction, or use proximal = 'draw_start'"
                )

    def _check_unused_keys(self) -> None:
        """Raise ValueError for keys that have no effect."""
        needed = {}
        if self.baseline not in CRITICS:
            needed["gae_lambda"] = "baseline = 'value_head' or 'critic'"
        if not self.kl_beta:
            needed["kl_in"] = "kl_beta above 0"
        for key, what in needed.items():
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} has no effect without {what}: remove {key}, or set {what}")

    @property
    def has_group_baseline(self) -> bool:
        return self.baseline in get_args(GroupBaseline)

    @property
    def is_users_baseline(self) -> bool:
        return ":" in self.baseline

    @property
    def needs(self) -> Needs:
        critic = CRITICS.get(self.baseline)
        compared = self.compare if self.has_group_baseline else None
        # a user's baseline may read the whole batch
        is_whole = critic is not None or self.is_users_baseline
        return Needs(
            groups=self.has_group_baseline,
            prompts=self.compare == "prompt",
            reference=self.kl_beta > 0,
            behaviour=True,
            proximal=self.proximal == "draw_start",
            separable=None if is_whole else compared if self.shapes_reward else "sequence",
            critic=critic,
        )

    @property
    def shapes_reward(self) -> bool:
        """Whether the KL is part of the reward, and thus of the baseline."""
        return self.kl_beta > 0 and self.kl_in == "reward"


def off_policy_ppo(config: OffPolicyPPOConfig, inputs: LossInputs) -> LossOutput:
    """Evaluate the loss on a whole batch; see the module's docstring for the formula.

    Returns:
        The loss, the weights it applied, and metrics: `off_policy/clip_frac_low` and `_high` (fraction of tokens for
        which clipping changes the objective), `off_policy/NAME_frac` of each weight correction, `ppo/advantage_abs`
        (mean over tokens), and with a critic `ppo/value_loss`, `ppo/value_clip_frac` and `ppo/explained_variance` of
        the returns by the old values.
    """
    if config.proximal == "behaviour":
        inputs = replace(inputs, proximal_logprobs_T=inputs.behaviour_logprobs_T)
    elif config.proximal == "interpolated":
        inputs = replace(inputs, proximal_logprobs_T=_interpolated(inputs))
    num_tokens = max(1, inputs.logprobs_T.numel())
    share_T = _shares(config, inputs)
    weighing = importance_weights(inputs, config.corrections)
    metrics: Measured = dict(weighing.metrics)
    advantage_T = _advantages(config, inputs)
    clip = Clip(clip_low=config.clip_low, clip_high=config.clip_high)
    surrogate = next((each for each in config.corrections if isinstance(each, AnySurrogate)), clip)
    objective_T, low_T, high_T = surrogate.objective(inputs, advantage_T)
    if config.mean_over == "sequences" and isinstance(surrogate, SequenceClip):
        # both share_T and SequenceClip divide by the length: undo one of the divisions
        objective_T = objective_T * inputs.length_B[inputs.sequence_T]
    loss = -(share_T * weighing.weight_T * objective_T).sum()
    metrics["off_policy/clip_frac_low"] = share_of(low_T & weighing.kept_T, num_tokens)
    metrics["off_policy/clip_frac_high"] = share_of(high_T & weighing.kept_T, num_tokens)
    metrics["ppo/advantage_abs"] = advantage_T.abs().sum().double() / num_tokens
    if config.kl_beta > 0 and config.kl_in != "reward":
        loss = loss + config.kl_beta * (share_T * weighing.weight_T * _kl_terms(config, inputs)).sum()
    if config.entropy_coef > 0:
        loss = loss + config.entropy_coef * (share_T * weighing.weight_T * inputs.logprobs_T.square() / 2).sum()
    if config.baseline in CRITICS:
        loss = loss + VALUE_COEF * _value_loss(inputs, advantage_T, metrics)
    return LossOutput(loss, metrics, None if config.proximal == "behaviour" else weighing.weight_T)


def _interpolated(inputs: LossInputs) -> Tensor:
    """Return the constant log-probabilities of pi_prox, interpolated between mu and pi by token age: T."""
    assert inputs.lag_T is not None, "the config needs the age of each token, but the batch has none"
    lag_T = inputs.lag_T.to(inputs.logprobs_T.dtype)
    of_mu_T = torch.where(lag_T > 0, 1 / lag_T.clamp_min(1), 0.0)
    logprobs_T = inputs.logprobs_T.detach()
    return logprobs_T + of_mu_T * (inputs.behaviour_logprobs_T - logprobs_T)


def _shares(config: OffPolicyPPOConfig, inputs: LossInputs) -> Tensor:
    """Return the weight of each token in a mean: T."""
    one_T = torch.ones_like(inputs.behaviour_logprobs_T)
    if config.mean_over == "tokens":
        return one_T / max(1, one_T.numel())
    num_sequences = max(1, inputs.num_sequences)
    if config.mean_over == "sequences":
        return one_T / (num_sequences * inputs.length_B[inputs.sequence_T])
    return one_T / (num_sequences * config.mean_over)


def _advantages(config: OffPolicyPPOConfig, inputs: LossInputs) -> Tensor:
    penalty_T = torch.zeros_like(inputs.behaviour_logprobs_T)
    if config.shapes_reward:
        penalty_T = config.kl_beta * (inputs.proximal_logprobs_T - inputs.reference_logprobs_T).detach()
    if config.baseline in CRITICS:
        assert inputs.old_values_T is not None, "the config needs a critic, but the batch has no values"
        rewards_T = rewards_per_token(inputs, inputs.rewards_B, penalty_T)
        return gae(inputs, rewards_T, inputs.old_values_T.detach(), config.gae_lambda)
    shaped_B = inputs.rewards_B - inputs.sum_per_sequence(penalty_T)
    return _sequence_advantages(config, inputs, shaped_B)[inputs.sequence_T]


def _sequence_advantages(config: OffPolicyPPOConfig, inputs: LossInputs, rewards_B: Tensor) -> Tensor:
    if config.is_users_baseline:
        setting = f"algorithm.baseline = '{config.baseline}'"
        with user_code_errors(setting):
            found_B = torch.as_tensor(cast("UserBaseline", load_object(config.baseline))(inputs, rewards_B)).detach()
        if found_B.shape != rewards_B.shape:
            raise UserFileError(
                f"{setting} returned shape {list(found_B.shape)}, expected {list(rewards_B.shape)}: "
                "return one advantage for each sequence"
            )
        return found_B.to(rewards_B)
    if config.baseline == "batch":
        together = replace(inputs, group_B=torch.zeros_like(inputs.group_B), num_groups=1)
        return group_advantages(together, rewards_B, "rloo")
    baseline = cast("GroupBaseline", config.baseline)
    return group_advantages(config.compared(inputs), rewards_B, baseline)


def rewards_per_token(inputs: LossInputs, rewards_B: Tensor, penalty_T: Tensor) -> Tensor:
    """Return per-token rewards: the sequence's reward on its last token, minus a penalty on every token: B, T -> T."""
    last_T = _positions(inputs) == inputs.length_B[inputs.sequence_T] - 1
    return -penalty_T + torch.where(last_T, rewards_B[inputs.sequence_T], 0.0)


def gae(inputs: LossInputs, rewards_T: Tensor, values_T: Tensor, lam: float) -> Tensor:
    """Return generalized advantage estimates A_t = sum_l lam^l * (r_{t+l} + V_{t+l+1} - V_{t+l}): T -> T.

    Rewards are not discounted: a discount would favour short answers. The state after the last token has value 0, even
    if the completion was truncated by length. Values are of the state before each token, and constant in the gradient.
    `lam` is in [0, 1]: 1 gives the return minus the value, 0 the one-step error.
    """
    if rewards_T.numel() == 0:
        return torch.zeros_like(rewards_T)
    position_T = _positions(inputs)
    width = int(position_T.max()) + 2  # one column more than the longest sequence: 0, the value after its last token
    grid = torch.zeros(2, inputs.num_sequences, width, dtype=values_T.dtype, device=values_T.device)
    grid[:, inputs.sequence_T, position_T] = torch.stack([rewards_T, values_T])
    rewards_BL, values_BL = grid
    error_BL = rewards_BL[:, :-1] + values_BL[:, 1:] - values_BL[:, :-1]
    advantage_B = torch.zeros_like(error_BL[:, 0])
    columns = []
    for t in range(width - 2, -1, -1):
        advantage_B = error_BL[:, t] + lam * advantage_B
        columns.append(advantage_B)
    return torch.stack(columns[::-1], dim=1)[inputs.sequence_T, position_T]


def _positions(inputs: LossInputs) -> Tensor:
    """Return the position of each token in its sequence: T."""
    length_B = inputs.length_B
    order_T = torch.argsort(inputs.sequence_T, stable=True)
    start_B = torch.cumsum(length_B, 0) - length_B
    position_T = torch.arange(order_T.numel(), device=order_T.device) - start_B[inputs.sequence_T[order_T]]
    return torch.empty_like(position_T).index_copy(0, order_T, position_T)


def _kl_terms(config: OffPolicyPPOConfig, inputs: LossInputs) -> Tensor:
    """Return the differentiable estimator of KL(pi || pi_ref) at each token: T."""
    log_ratio_T = inputs.logprobs_T - inputs.reference_logprobs_T
    if config.kl_in == "loss":
        return log_ratio_T.square() / 2
    log_ratio_T = log_ratio_T.clamp_min(-LOG_RATIO_LIMIT)  # in both terms, or the linear term would push pi away
    return (-log_ratio_T).exp() - 1 + log_ratio_T


def _value_loss(inputs: LossInputs, advantage_T: Tensor, metrics: Measured) -> Tensor:
    """Return half the mean squared error of the values, clipped around the old values."""
    assert inputs.values_T is not None, "the config needs a critic, but the batch has no values"
    assert inputs.old_values_T is not None, "the config needs a critic, but the batch has no old values"
    old_T = inputs.old_values_T.detach()
    returns_T = advantage_T + old_T
    num_tokens = max(1, returns_T.numel())
    error_T = (inputs.values_T - returns_T).square()
    clipped_T = inputs.values_T.clamp(old_T - VALUE_CLIP, old_T + VALUE_CLIP)
    clipped_error_T = (clipped_T - returns_T).square()
    metrics["ppo/value_clip_frac"] = share_of(clipped_error_T > error_T, num_tokens)
    error_T = torch.maximum(error_T, clipped_error_T)
    loss = error_T.sum() / num_tokens / 2
    metrics["ppo/value_loss"] = loss.detach()
    metrics["ppo/explained_variance"] = _explained_variance(returns_T, old_T)
    return loss


def _explained_variance(returns_T: Tensor, old_T: Tensor) -> float | None:
    """Return the fraction of the variance of the returns explained by the old values; None if returns are equal."""
    if returns_T.numel() == 0:
        return None
    # equal returns may differ by rounding errors, which do not count as variance
    largest = float(torch.maximum(returns_T.abs(), old_T.abs()).max())
    rounding = 100 * torch.finfo(returns_T.dtype).eps * largest
    spread = float(returns_T.double().var(correction=0))
    if spread <= rounding**2:
        return None
    return 1 - float((returns_T - old_T).double().var(correction=0)) / spread


ALGORITHM = Algorithm(OffPolicyPPOConfig, off_policy_ppo)
