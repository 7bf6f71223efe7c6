"""How far the data are from the policy, the same for every algorithm, and what to do where they are too far.

    off_policy_metrics   mismatch, chi-square divergence and effective sample size of pi_prox / mu, once per update
    EssRule              below a budget of the effective sample size: lower the learning rate, or drop the update

The effective sample size tells how many of the samples count once each is weighed by pi_prox / mu; where it falls, a
few samples decide the update. Dropping an update waits: the version stands still while the actors catch up with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from algorithms.base import LOG_RATIO_LIMIT, LossInputs
from algorithms.corrections import clamped_exp

Metrics = dict[str, float | None]
EssAction = Literal["scale_lr", "drop"]

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
    """1 / mean((w / mean w)^2), in [0, 1]: the share of samples that count, 1 where all weigh the same.

    0 where all weights are 0; None where there is none.
    """
    if weights.numel() == 0:
        return None
    wide = weights.double()  # squares of e^20 sum up beyond what float32 resolves
    mean_square = float(wide.square().mean())
    return float(wide.mean().square()) / mean_square if mean_square > 0 else 0.0


def off_policy_metrics(
    inputs: LossInputs, lag_T: Tensor, single_version_B: Tensor, weights_T: Tensor | None = None
) -> Metrics:
    """Diagnostics of rho = pi_prox / mu on the batch, before its update.

    Args:
        inputs: the batch; its proximal log-probabilities are the learner's at the start of the draw.
        lag_T: int64, versions between sampling and training of each token.
        single_version_B: bool, every token of the sequence was sampled by one version.
        weights_T: the weights that the loss applied, after corrections; None where it has none.

    Returns:
        `mismatch/k1` mean(log mu - log pi) and `mismatch/k3` mean(rho - 1 - log rho), estimates of KL(mu || pi);
        `mismatch/lag0_abs`, `lag0_k3`, `lag0_tokens`: the same on tokens of lag 0 in single-version sequences, where
        any difference is an implementation gap and not staleness (None where there are none);
        `off_policy/chi2` mean(rho^2) - 1; `off_policy/ess_token`, `ess_sequence` of rho;
        and of the applied weights `*_truncated` and `off_policy/masked_frac`, the share of tokens that weigh 0.
        All but `lag0_tokens`, then 0, are None where a behaviour log-probability is missing (not finite), which some
        losses allow; those of the applied weights are then left out.
    """
    log_rho_T = (inputs.proximal_logprobs_T - inputs.behaviour_logprobs_T).detach()
    if log_rho_T.numel() == 0 or not bool(torch.isfinite(log_rho_T).all()):
        return {**dict.fromkeys(NAMES), "mismatch/lag0_tokens": 0.0}
    log_rho_T = log_rho_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    rho_T = log_rho_T.exp()
    k3_T = rho_T - 1 - log_rho_T
    written_B = inputs.length_B > 0
    rho_B = clamped_exp(inputs.sum_per_sequence(log_rho_T))[written_B]
    same_T = (lag_T == 0) & single_version_B[inputs.sequence_T]
    num_same = int(same_T.sum())
    metrics: Metrics = {
        "mismatch/k1": float(-log_rho_T.mean()),
        "mismatch/k3": float(k3_T.mean()),
        "mismatch/lag0_abs": float(log_rho_T[same_T].abs().mean()) if num_same else None,
        "mismatch/lag0_k3": float(k3_T[same_T].mean()) if num_same else None,
        "mismatch/lag0_tokens": float(num_same),
        "off_policy/chi2": float(rho_T.double().square().mean() - 1),
        "off_policy/ess_token": effective_sample_share(rho_T),
        "off_policy/ess_sequence": effective_sample_share(rho_B),
    }
    if weights_T is not None:
        # a sequence weighs in the gradient as its tokens do on average
        applied_B = inputs.mean_per_sequence(weights_T)[written_B]
        metrics["off_policy/ess_token_truncated"] = effective_sample_share(weights_T)
        metrics["off_policy/ess_sequence_truncated"] = effective_sample_share(applied_B)
        metrics["off_policy/masked_frac"] = float((weights_T == 0).sum()) / weights_T.numel()
    return metrics


@dataclass(frozen=True)
class EssDecision:
    """What becomes of an update."""

    lr_scale: float = 1.0
    """Factor of the learning rate, in [0, 1]."""
    drop: bool = False
    """Take no optimizer step."""


@dataclass(frozen=True)
class EssRule:
    """Compares the effective sample share of an update with a budget."""

    budget: float
    """Share of the samples that must count, in (0, 1]."""
    action: EssAction
    max_drops: int
    """Steps in a row that may drop updates; the next step takes them, at a lower learning rate."""

    def decide(self, ess: float | None, drops_in_a_row: int) -> EssDecision:
        """The decision on an update, from its effective sample share in [0, 1]; None where the data do not tell.

        The learning rate falls with the square root of ess / budget, as it would for a batch that is smaller
        by that factor under Adam.
        """
        if ess is None or ess >= self.budget:
            return EssDecision()
        if self.action == "drop" and drops_in_a_row < self.max_drops:
            return EssDecision(drop=True)
        return EssDecision(lr_scale=float((ess / self.budget) ** 0.5))
