"""Surrogates: what is maximised of a token whose advantage is known, and how far the update may go with it.

The **clipped** ones measure an update by u = pi / pi_prox, and the importance weight rho = pi_prox / mu stands beside
them as a factor:

    clip             PPO's: min(u A, clip(u, 1 - e_low, 1 + e_high) A) for each token; the default surrogate
    sequence_clip    the same with one ratio for a sequence, prod of u: the whole completion is one action
    gspo             the same with exp(mean log u)
    cispo            sg[clip(u, low, high)] A log pi: clipping bounds the weight and keeps the gradient

The **whole** ones measure by w = pi / mu, from the policy that sampled to the one that is trained, and need no other
weight:

    vespo            sg[phi(W)] A log pi, phi(W) = e^l W^k e^(-l W), W = prod of w over the sequence: soft on both sides
    dppo             sg[min(w, C)] A log pi, but for tokens whose probability has moved too far the way that A pushes it

References:
    PPO, arXiv 1707.06347; GSPO, arXiv 2507.18071; CISPO (MiniMax-M1), arXiv 2506.13585;
    VESPO, arXiv 2602.10693; DPPO, arXiv 2602.04879.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from algorithms.base import Correction, Interval, LossInputs, clamped_exp

_LEAST = 1e-12
"""Of 1 - p, before its logarithm is taken."""


@dataclass(frozen=True)
class Objective:
    """What is maximised per token, before importance weights, and where a bound changed it."""

    objective_T: Tensor
    low_T: Tensor
    high_T: Tensor
    weight_T: Tensor | None = None
    """The weight pi / mu that a whole surrogate has applied itself."""
    sums_to_sequence: bool = False
    """Is the length divided out already?"""


class TokenClip(Correction):
    """PPO's pessimistic clipping of each token's ratio."""

    type: Literal["clip"] = "clip"
    clip_low: float = Field(default=0.2, gt=0, le=1, description="u is clipped below at 1 - clip_low.")
    clip_high: PositiveFloat = Field(default=0.2, description="u is clipped above at 1 + clip_high.")

    def objective(self, inputs: LossInputs, advantage_T: Tensor) -> Objective:
        ratio_T = clamped_exp(inputs.logprobs_T - inputs.proximal_logprobs_T.detach())
        return _pessimistic(ratio_T, advantage_T, 1 - self.clip_low, 1 + self.clip_high)


class SequenceClip(Correction):
    """PPO's clipping with the completion as one action (proximal RLOO)."""

    type: Literal["sequence_clip"] = "sequence_clip"
    clip_low: float = Field(default=0.2, gt=0, le=1, description="prod u is clipped below at 1 - clip_low.")
    clip_high: PositiveFloat = Field(default=0.2, description="prod u is clipped above at 1 + clip_high.")

    def objective(self, inputs: LossInputs, advantage_T: Tensor) -> Objective:
        """min(u A, clip(u) A) of the sequence, in equal parts on its tokens."""
        log_u_T = inputs.logprobs_T - inputs.proximal_logprobs_T.detach()
        ratio_B = clamped_exp(inputs.sum_per_sequence(log_u_T))
        found = _pessimistic(ratio_B[inputs.sequence_T], advantage_T, 1 - self.clip_low, 1 + self.clip_high)
        length_T = inputs.length_B[inputs.sequence_T].to(advantage_T.dtype)
        return Objective(found.objective_T / length_T, found.low_T, found.high_T, sums_to_sequence=True)


class GSPO(Correction):
    """Clipping of the geometric mean of a sequence's ratios."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0, le=1, description="exp(mean log u) is clipped below at 1 - clip_low.")
    clip_high: PositiveFloat = Field(default=4e-4, description="exp(mean log u) is clipped above at 1 + clip_high.")

    def objective(self, inputs: LossInputs, advantage_T: Tensor) -> Objective:
        log_u_T = inputs.logprobs_T - inputs.proximal_logprobs_T.detach()
        ratio_B = clamped_exp(inputs.mean_per_sequence(log_u_T))
        return _pessimistic(ratio_B[inputs.sequence_T], advantage_T, 1 - self.clip_low, 1 + self.clip_high)


class CISPO(Interval):
    """A clipped weight on the policy gradient, which reaches every token."""

    type: Literal["cispo"] = "cispo"
    low: NonNegativeFloat = Field(default=0.0, description="Least u as a weight.")
    high: PositiveFloat = Field(default=5.0, description="Greatest u as a weight.")

    def objective(self, inputs: LossInputs, advantage_T: Tensor) -> Objective:
        ratio_T = clamped_exp((inputs.logprobs_T - inputs.proximal_logprobs_T).detach())
        weight_T = ratio_T.clamp(self.low, self.high)
        counts_T = advantage_T != 0
        low_T, high_T = (ratio_T < self.low) & counts_T, (ratio_T > self.high) & counts_T
        return Objective(weight_T * advantage_T * inputs.logprobs_T, low_T, high_T)


class VESPO(Correction):
    """A gamma-shaped weight of the whole sequence: 1 at W = 1, and small where W is far from it on either side."""

    type: Literal["vespo"] = "vespo"
    k_positive: PositiveFloat = Field(
        default=2.0, description="k where A >= 0: how fast the weight falls towards W = 0."
    )
    lambda_positive: PositiveFloat = Field(default=3.0, description="l where A >= 0: how fast it falls beyond k / l.")
    k_negative: PositiveFloat = Field(default=3.0, description="k where A < 0.")
    lambda_negative: PositiveFloat = Field(default=2.0, description="l where A < 0.")

    def objective(self, inputs: LossInputs, advantage_T: Tensor) -> Objective:
        log_w_T = (inputs.logprobs_T - inputs.behaviour_logprobs_T).detach()
        log_w_T = inputs.sum_per_sequence(log_w_T)[inputs.sequence_T]
        negative_T = (advantage_T < 0).to(log_w_T.dtype)
        k_T = self.k_positive + (self.k_negative - self.k_positive) * negative_T
        lambda_T = self.lambda_positive + (self.lambda_negative - self.lambda_positive) * negative_T
        weight_T = (k_T * log_w_T - lambda_T * log_w_T.expm1()).exp()
        none_T = torch.zeros_like(advantage_T, dtype=torch.bool)
        return Objective(weight_T * advantage_T * inputs.logprobs_T, none_T, none_T, weight_T)


class DPPO(Correction):
    """A trust region in probability, not in its ratio: rare tokens may move by large factors, common ones may not."""

    type: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = Field(
        default="tv", description="Of (p, 1 - p) of the sampled token, from mu to pi: total variation, or KL(mu || pi)."
    )
    threshold: PositiveFloat = Field(
        default=0.15, description="The greatest divergence at which a token is still pushed on; 0.1 to 0.2 of tv."
    )
    cap: PositiveFloat = Field(default=20.0, description="C, the greatest weight pi / mu.")

    def objective(self, inputs: LossInputs, advantage_T: Tensor) -> Objective:
        """sg[min(w, C)] A log pi, 0 where w is on the side that A pushes to and the divergence above the threshold."""
        logprobs_T, behaviour_T = inputs.logprobs_T.detach(), inputs.behaviour_logprobs_T
        ratio_T = clamped_exp(logprobs_T - behaviour_T)
        is_far_T = self._divergence(logprobs_T, behaviour_T) > self.threshold
        low_T = is_far_T & (ratio_T < 1) & (advantage_T < 0)
        high_T = is_far_T & (ratio_T > 1) & (advantage_T > 0)
        weight_T = torch.where(low_T | high_T, 0.0, ratio_T.clamp_max(self.cap))
        return Objective(weight_T * advantage_T * inputs.logprobs_T, low_T, high_T, weight_T)

    def _divergence(self, logprobs_T: Tensor, behaviour_T: Tensor) -> Tensor:
        pi_T, mu_T = logprobs_T.exp(), behaviour_T.exp()
        if self.divergence == "tv":
            return (pi_T - mu_T).abs()
        others_T = (-logprobs_T.expm1()).clamp_min(_LEAST).log(), (-behaviour_T.expm1()).clamp_min(_LEAST).log()
        return mu_T * (behaviour_T - logprobs_T) + (1 - mu_T) * (others_T[1] - others_T[0])


AnyClipped = SequenceClip | GSPO | CISPO
AnyWhole = VESPO | DPPO
AnySurrogate = AnyClipped | AnyWhole
Surrogate = TokenClip | AnySurrogate
"""`objective` is of each token, and constant in the proximal and behaviour log-probabilities."""


def _pessimistic(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Objective:
    objective = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    return Objective(objective, (ratio < low) & (advantage < 0), (ratio > high) & (advantage > 0))
