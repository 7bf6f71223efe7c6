"""Off-policy corrections for data sampled by another policy, and metrics of the distance to that policy.

There are two kinds of corrections, which can be combined. A **weight** changes the importance weight
rho = pi_prox / mu that multiplies the objective of a token: a truncation bounds rho, a mask sets rho to 0. A
**surrogate** replaces min(u A, clip(u, 1 - e_low, 1 + e_high) A), the per-token objective of PPO (`Clip`), where
u = pi / pi_prox measures the size of the update.

    token_tis        min(rho, C) for each token, bounded below by a floor
    sequence_tis     min(prod of rho over the sequence, C), one weight for all tokens of the sequence
    icepop           rho if low <= rho <= high, else 0
    geometric_mask   drops a sequence unless low <= exp(mean log rho) <= high

    sequence_clip    PPO clipping with one ratio per sequence, prod of u: the whole completion is one action
    gspo             PPO clipping with one ratio per sequence, exp(mean log u)
    cispo            sg[clip(u, low, high)] A log pi: clipping bounds the weight and keeps the gradient

Any importance-weighted loss can use corrections: `importance_weights` returns the weights, `surrogate.objective` the
surrogate. A loss that is not a sum over tokens weights its gradient instead (`weigh_gradient`): the contribution of
each token is multiplied by its weight, and the value of the loss is unchanged. All log ratios are clamped to +-20
before exp, and no gradient flows through a weight.

`off_policy_metrics` computes mismatch, chi-square divergence and effective sample size (ESS) of rho, once per step.
`policy_metrics` computes the entropy and the KL to the reference.
ESS is the fraction of samples that count after weighting by rho. If ESS is low, a few samples dominate the update.

References:
    Truncated importance sampling: Ionides 2008; IcePop, arXiv 2510.18855; PPO, arXiv 1707.06347;
    GSPO, arXiv 2507.18071; CISPO (MiniMax-M1), arXiv 2506.13585.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

import torch
from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, model_validator
from torch import Tensor

from leeway.algorithms.base import (
    BASIC,
    LOG_RATIO_LIMIT,
    AlgorithmSection,
    Correction,
    Interval,
    LossInputs,
    Measured,
    clamped_exp,
    share_of,
)

# --- weights ----------------------------------------------------------------------------------------


class Weighing(NamedTuple):
    """Weight of each token, whether masks keep it, and the fraction of tokens that each correction changes."""

    weight_T: Tensor
    kept_T: Tensor
    metrics: Measured


class TokenTIS(Correction):
    """Truncated weight of each token."""

    type: Literal["token_tis"] = "token_tis"
    cap: PositiveFloat = Field(default=5.0, description="Maximum weight; typically 1.5 to 5.")
    floor: NonNegativeFloat = Field(default=0.1, description="Minimum weight; if above 0, all tokens keep a gradient.")

    @model_validator(mode="after")
    def _must_not_be_empty(self) -> Self:
        if self.floor >= self.cap:
            raise ValueError(f"{self.type}: floor = {self.floor} must be less than cap = {self.cap}")
        return self

    def truncated(self, inputs: LossInputs, log_rho_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight of each token, and whether a bound changed it."""
        rho_T = log_rho_T.exp()
        return rho_T.clamp(self.floor, self.cap), (rho_T > self.cap) | (rho_T < self.floor)


class SequenceTIS(Correction):
    """Truncated weight of each sequence, applied to all tokens of the sequence."""

    type: Literal["sequence_tis"] = "sequence_tis"
    cap: PositiveFloat = Field(default=2.0, description="Maximum weight; typically 2 to 10.")

    def truncated(self, inputs: LossInputs, log_rho_T: Tensor) -> tuple[Tensor, Tensor]:
        rho_T = clamped_exp(inputs.sum_per_sequence(log_rho_T))[inputs.sequence_T]
        return rho_T.clamp_max(self.cap), rho_T > self.cap


class IcePop(Interval):
    """Mask of single tokens on which pi_prox and mu disagree."""

    type: Literal["icepop"] = "icepop"
    low: NonNegativeFloat = Field(default=0.5, description="Minimum rho to keep.")
    high: PositiveFloat = Field(default=5.0, description="Maximum rho to keep.")

    def kept(self, inputs: LossInputs, log_rho_T: Tensor) -> Tensor:
        rho_T = log_rho_T.exp()
        return (rho_T >= self.low) & (rho_T <= self.high)


class GeometricMask(Interval):
    """Mask of whole sequences on which pi_prox and mu disagree."""

    type: Literal["geometric_mask"] = "geometric_mask"
    low: NonNegativeFloat = Field(default=0.5, description="Minimum exp(mean log rho) of a sequence to keep.")
    high: PositiveFloat = Field(default=2.0, description="Maximum exp(mean log rho) of a sequence to keep.")

    def kept(self, inputs: LossInputs, log_rho_T: Tensor) -> Tensor:
        mean_B = inputs.mean_per_sequence(log_rho_T).exp()
        return ((mean_B >= self.low) & (mean_B <= self.high))[inputs.sequence_T]


# --- surrogates -------------------------------------------------------------------------------------


class Objective(NamedTuple):
    """Per-token objective to maximize, before importance weights, and the tokens whose objective a bound changed."""

    objective_T: Tensor
    low_T: Tensor
    high_T: Tensor


class Clip(Correction):
    """PPO's pessimistic clipping of the ratio of each token; the default surrogate."""

    clip_low: float = Field(default=0.2, gt=0, le=1, description="Lower clip of the ratio: 1 - clip_low.")
    clip_high: PositiveFloat = Field(default=0.2, description="Upper clip of the ratio: 1 + clip_high.")

    def objective(self, inputs: LossInputs, advantage_T: Tensor) -> Objective:
        ratio_T = self._ratio(inputs, inputs.logprobs_T - inputs.proximal_logprobs_T.detach())
        low, high = 1 - self.clip_low, 1 + self.clip_high
        objective_T = torch.minimum(ratio_T * advantage_T, ratio_T.clamp(low, high) * advantage_T)
        return Objective(objective_T, (ratio_T < low) & (advantage_T < 0), (ratio_T > high) & (advantage_T > 0))

    def _ratio(self, inputs: LossInputs, log_u_T: Tensor) -> Tensor:
        return clamped_exp(log_u_T)


class SequenceClip(Clip):
    """PPO clipping with the completion as one action (proximal RLOO); the tokens share its objective equally."""

    type: Literal["sequence_clip"] = "sequence_clip"

    def objective(self, inputs: LossInputs, advantage_T: Tensor) -> Objective:
        found = super().objective(inputs, advantage_T)
        return found._replace(objective_T=found.objective_T / inputs.length_B[inputs.sequence_T])

    def _ratio(self, inputs: LossInputs, log_u_T: Tensor) -> Tensor:
        return clamped_exp(inputs.sum_per_sequence(log_u_T))[inputs.sequence_T]


class GSPO(Clip):
    """Clipping of the geometric mean of a sequence's ratios."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0, le=1, description="Lower clip of exp(mean log u): 1 - clip_low.")
    clip_high: PositiveFloat = Field(default=4e-4, description="Upper clip of exp(mean log u): 1 + clip_high.")

    def _ratio(self, inputs: LossInputs, log_u_T: Tensor) -> Tensor:
        return clamped_exp(inputs.mean_per_sequence(log_u_T))[inputs.sequence_T]


class CISPO(Interval):
    """Clipped weight on the policy gradient; every token keeps a gradient."""

    type: Literal["cispo"] = "cispo"
    low: NonNegativeFloat = Field(default=0.0, description="Minimum of u as a weight.")
    high: PositiveFloat = Field(default=5.0, description="Maximum of u as a weight.")

    def objective(self, inputs: LossInputs, advantage_T: Tensor) -> Objective:
        ratio_T = clamped_exp((inputs.logprobs_T - inputs.proximal_logprobs_T).detach())
        weight_T = ratio_T.clamp(self.low, self.high)
        counts_T = advantage_T != 0
        low_T, high_T = (ratio_T < self.low) & counts_T, (ratio_T > self.high) & counts_T
        return Objective(weight_T * advantage_T * inputs.logprobs_T, low_T, high_T)


# --- lists of corrections ---------------------------------------------------------------------------

AnyWeight = TokenTIS | SequenceTIS | IcePop | GeometricMask
AnySurrogate = SequenceClip | GSPO | CISPO
AnyCorrection = AnyWeight | AnySurrogate
Kind = TypeVar("Kind")


def _from_name(value: Any) -> Any:  # noqa: ANN401 -- from TOML
    return {"type": value} if isinstance(value, str) else value


def _from_single(value: Any) -> Any:  # noqa: ANN401 -- from TOML
    return [value] if isinstance(value, str | dict) else value


Listed = Annotated[
    tuple[Annotated[Kind, Field(discriminator="type"), BeforeValidator(_from_name)], ...], BeforeValidator(_from_single)
]
"""Corrections as written in a config: ["token_tis", {type = "icepop", high = 3.0}], or one entry without a list."""


def check_corrections(corrections: Sequence[AnyCorrection]) -> None:
    """Raise ValueError if two corrections of a list conflict."""
    names = [each.type for each in corrections]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ValueError(f"corrections contains '{doubled[0]}' twice: remove one")
    truncations = [each.type for each in corrections if isinstance(each, TokenTIS | SequenceTIS)]
    surrogates = [each.type for each in corrections if isinstance(each, AnySurrogate)]
    for group, what in ((truncations, "the importance weight"), (surrogates, "the clipped ratio")):
        if len(group) > 1:
            raise ValueError(f"corrections '{group[0]}' and '{group[1]}' both replace {what}: keep one of them")


def importance_weights(inputs: LossInputs, corrections: Sequence[AnyCorrection]) -> Weighing:
    """Return the weight of each token, rho = pi_prox / mu after the weight corrections, which may have any order.

    Without weight corrections, the weight is rho itself (log rho clamped to +-20).
    """
    log_rho_T = (inputs.proximal_logprobs_T - inputs.behaviour_logprobs_T).detach()
    log_rho_T = log_rho_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    weight_T, kept_T = log_rho_T.exp(), torch.ones_like(log_rho_T, dtype=torch.bool)
    metrics: Measured = {}
    for each in corrections:
        if isinstance(each, TokenTIS | SequenceTIS):
            weight_T, changed_T = each.truncated(inputs, log_rho_T)
        elif isinstance(each, IcePop | GeometricMask):
            changed_T = ~each.kept(inputs, log_rho_T)
            kept_T = kept_T & ~changed_T
        else:
            continue
        metrics[f"off_policy/{each.type}_frac"] = share_of(changed_T, max(1, changed_T.numel()))
    return Weighing(torch.where(kept_T, weight_T, 0.0), kept_T, metrics)


class WeighedSection(AlgorithmSection):
    """Section of a loss whose gradient is weighted per token."""

    corrections: Listed[AnyWeight] = Field(
        default=(TokenTIS(),),
        description="Importance weights pi / mu of the gradient, as names or tables: at most one of 'token_tis', "
        "'sequence_tis', and any of 'icepop', 'geometric_mask'. []: none.",
        json_schema_extra=BASIC,
    )

    @model_validator(mode="after")
    def _corrections_must_agree(self) -> Self:
        check_corrections(self.corrections)
        return self


def weigh_gradient(inputs: LossInputs, corrections: Sequence[AnyWeight]) -> tuple[LossInputs, Tensor | None, Measured]:
    """Return the batch with log-probabilities that multiply the gradient of each token by its weight.

    The weight is rho = pi / mu of the current policy, after the corrections. The weight follows the policy over several
    updates, as a clipped ratio does in PPO. Also returns the weights and their metrics. Without corrections, the
    weights are None and the metrics are empty.
    """
    if not corrections:
        return inputs, None, {}
    logprobs_T = inputs.logprobs_T.detach()
    weighing = importance_weights(replace(inputs, proximal_logprobs_T=logprobs_T), corrections)
    # the difference has value 0 and gradient 1
    weighed_T = logprobs_T + weighing.weight_T * (inputs.logprobs_T - logprobs_T)
    return replace(inputs, logprobs_T=weighed_T), weighing.weight_T, weighing.metrics


# --- off-policy metrics ----------------------------------------------------------------------------

Metrics = dict[str, float | None]
NAMES = (
    "mismatch/k1",
    "mismatch/k3",
    "mismatch/lag0_abs",
    "mismatch/lag0_k3",
    "off_policy/chi2",
    "off_policy/ess_token",
    "off_policy/ess_sequence",
)


def effective_sample_share(weights: Tensor) -> float | None:
    """Return 1 / mean((w / mean w)^2), the fraction of samples that count: 1 if all weights are equal.

    Return 0 if all weights are 0, and None if there are no weights.
    """
    if weights.numel() == 0:
        return None
    wide = weights.double()  # sums of squares of e^20 exceed the precision of float32
    mean_square = float(wide.square().mean())
    return float(wide.mean().square()) / mean_square if mean_square > 0 else 0.0


def off_policy_metrics(inputs: LossInputs, fresh_T: Tensor, weights_T: Tensor | None = None) -> Metrics:
    """Return diagnostics of rho = pi_prox / mu on a batch, before its update.

    Args:
        inputs: the batch; its proximal log-probabilities come from the learner's weights at the start of the step.
        fresh_T: bool, tokens of sequences that were sampled entirely by the learner's weights at that time.
        weights_T: the weights that the loss applied, after corrections; None if the loss has no weights.

    Returns:
        `mismatch/k1` mean(log mu - log pi) and `mismatch/k3` mean(rho - 1 - log rho), estimates of KL(mu || pi);
        `mismatch/lag0_abs`, `lag0_k3`, `lag0_tokens`: |log rho|, k3 and count of fresh tokens, for which rho != 1 is
        an implementation gap (None without fresh tokens); `off_policy/chi2` mean(rho^2) - 1; `off_policy/ess_token`,
        `ess_sequence` of rho; for the applied weights `*_truncated` and `off_policy/masked_frac`, the fraction of
        tokens with weight 0. If a behaviour log-probability is not finite, all metrics except `lag0_tokens` are
        None, and the metrics of the applied weights are omitted.
    """
    log_rho_T = (inputs.proximal_logprobs_T - inputs.behaviour_logprobs_T).detach()
    if log_rho_T.numel() == 0 or not bool(torch.isfinite(log_rho_T).all()):
        return {**dict.fromkeys(NAMES), "mismatch/lag0_tokens": 0.0}
    log_rho_T = log_rho_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    rho_T = log_rho_T.exp()
    k3_T = rho_T - 1 - log_rho_T
    written_B = inputs.length_B > 0
    rho_B = clamped_exp(inputs.sum_per_sequence(log_rho_T))[written_B]
    num_fresh = int(fresh_T.sum())
    metrics: Metrics = {
        "mismatch/k1": float(-log_rho_T.mean()),
        "mismatch/k3": float(k3_T.mean()),
        "mismatch/lag0_abs": float(log_rho_T[fresh_T].abs().mean()) if num_fresh else None,
        "mismatch/lag0_k3": float(k3_T[fresh_T].mean()) if num_fresh else None,
        "mismatch/lag0_tokens": float(num_fresh),
        "off_policy/chi2": float(rho_T.double().square().mean() - 1),
        "off_policy/ess_token": effective_sample_share(rho_T),
        "off_policy/ess_sequence": effective_sample_share(rho_B),
    }
    if weights_T is not None:
        # the weight of a sequence in the gradient is the mean weight of its tokens
        applied_B = inputs.mean_per_sequence(weights_T)[written_B]
        metrics["off_policy/ess_token_truncated"] = effective_sample_share(weights_T)
        metrics["off_policy/ess_sequence_truncated"] = effective_sample_share(applied_B)
        metrics["off_policy/masked_frac"] = float((weights_T == 0).sum()) / weights_T.numel()
    return metrics


def policy_metrics(inputs: LossInputs) -> Metrics:
    """Return the entropy of the policy at the start of the step and its KL to the reference, in nats per token.

    `policy/nll` is mean(-log pi) over the sampled tokens. `policy/entropy`, the mean of -log pi, and
    `policy/kl_reference`, the mean of log pi - log pi_ref, are weighted by rho = pi / mu over its mean, so that they
    estimate the entropy of pi and KL(pi || pi_ref) also from stale tokens. rho is 1 for a token without log mu. NaN
    without tokens or without a reference.
    """
    logprobs_T = inputs.proximal_logprobs_T.detach()
    log_rho_T = (logprobs_T - inputs.behaviour_logprobs_T).nan_to_num(0.0, 0.0, 0.0)
    rho_T = clamped_exp(log_rho_T)
    weight_T = rho_T / rho_T.mean()
    return {
        "policy/nll": float(-logprobs_T.mean()),
        "policy/entropy": float(-(weight_T * logprobs_T).mean()),
        "policy/kl_reference": float((weight_T * (logprobs_T - inputs.reference_logprobs_T)).mean()),
    }
