"""How far the data are from the policy: computed once per step, the same for every algorithm."""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.inputs import LOG_RATIO_LIMIT, LossInputs


def effective_sample_share(weights: Tensor) -> float:
    """1 / mean((w / mean w)^2), in (0, 1]: the share of samples that count, 1 where all weigh the same."""
    return float(weights.mean().square() / weights.square().mean())


def off_policy_metrics(
    inputs: LossInputs, lag_T: Tensor, single_version_B: Tensor, weight_cap: float | None = None
) -> dict[str, float | None]:
    """Diagnostics of rho = pi_prox / mu on the batch, before its update.

    Args:
        inputs: the batch; its proximal log-probabilities are the learner's at the start of the step.
        lag_T: int64, versions between sampling and training of each token.
        single_version_B: bool, every token of the sequence was sampled by one version.
        weight_cap: where set, also the effective sample shares of weights truncated there.

    Returns:
        `mismatch/k1` mean(log mu - log pi) and `mismatch/k3` mean(rho - 1 - log rho), estimates of KL(mu || pi);
        `mismatch/lag0_abs`, `lag0_k3`, `lag0_tokens`: the same on tokens of lag 0 in single-version sequences, where
        any difference is an implementation gap and not staleness (None where there are none);
        `off_policy/chi2` mean(rho^2) - 1; `off_policy/ess_token`, `ess_sequence`, and `*_truncated`.
    """
    log_rho_T = (inputs.proximal_logprobs_T - inputs.behaviour_logprobs_T).detach()
    clamped_T = log_rho_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if log_rho_T.numel() == 0:
        return {"mismatch/lag0_abs": None, "mismatch/lag0_k3": None, "mismatch/lag0_tokens": 0.0}
    rho_T = clamped_T.exp()
    k3_T = rho_T - 1 - clamped_T
    rho_B = inputs.sum_per_sequence(log_rho_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    same_T = (lag_T == 0) & single_version_B[inputs.sequence_T]
    num_same = int(same_T.sum())
    metrics: dict[str, float | None] = {
        "mismatch/k1": float(-log_rho_T.mean()),
        "mismatch/k3": float(k3_T.mean()),
        "mismatch/lag0_abs": float(log_rho_T[same_T].abs().mean()) if num_same else None,
        "mismatch/lag0_k3": float(k3_T[same_T].mean()) if num_same else None,
        "mismatch/lag0_tokens": float(num_same),
        "off_policy/chi2": float(rho_T.square().mean() - 1),
        "off_policy/ess_token": effective_sample_share(rho_T),
        "off_policy/ess_sequence": effective_sample_share(rho_B),
    }
    if weight_cap is not None:
        metrics["off_policy/ess_token_truncated"] = effective_sample_share(torch.clamp(rho_T, max=weight_cap))
        metrics["off_policy/ess_sequence_truncated"] = effective_sample_share(torch.clamp(rho_B, max=weight_cap))
    return metrics
