"""Off-policy diagnostics and the effective sample size, compared with loops."""

import math
from dataclasses import replace

import pytest
import torch

from leeway.algorithms.corrections import (
    SequenceTIS,
    TokenTIS,
    effective_sample_share,
    importance_weights,
    off_policy_metrics,
    policy_metrics,
)
from tests.unit.loss_batches import make_inputs, sums

NUM_TOKENS = 22


def share_by_hand(weights):
    mean = sum(weights) / len(weights)
    return 1 / (sum((w / mean) ** 2 for w in weights) / len(weights))


def diagnose(inputs, weights_T=None):
    lag_T = torch.arange(inputs.logprobs_T.numel()) % 3
    return off_policy_metrics(inputs, (lag_T == 0) & (inputs.sequence_T % 2 == 0), weights_T)


def test_the_diagnostics_follow_their_definitions():
    inputs = make_inputs()
    weights_T = importance_weights(inputs, [TokenTIS(cap=1.2)]).weight_T.clone()
    weights_T[:4] = 0.0  # a mask sets weights to 0
    log_rho = (inputs.proximal_logprobs_T - inputs.behaviour_logprobs_T).tolist()
    rho = [math.exp(x) for x in log_rho]
    k3 = [math.exp(x) - 1 - x for x in log_rho]
    same = [t for t, b in enumerate(inputs.sequence_T.tolist()) if t % 3 == 0 and b % 2 == 0]
    written = [b for b in range(9) if b != 6]  # sequence 6 is empty
    by_sequence = sums(inputs, inputs.proximal_logprobs_T - inputs.behaviour_logprobs_T)
    lengths = inputs.length_B.tolist()
    applied = [total / lengths[b] for b, total in enumerate(sums(inputs, weights_T)) if lengths[b]]
    assert diagnose(inputs, weights_T) == pytest.approx(
        {
            "mismatch/k1": -sum(log_rho) / NUM_TOKENS,
            "mismatch/k3": sum(k3) / NUM_TOKENS,
            "mismatch/lag0_abs": sum(abs(log_rho[t]) for t in same) / len(same),
            "mismatch/lag0_k3": sum(k3[t] for t in same) / len(same),
            "mismatch/lag0_tokens": len(same),
            "off_policy/chi2": sum(w * w for w in rho) / NUM_TOKENS - 1,
            "off_policy/ess_token": share_by_hand(rho),
            "off_policy/ess_sequence": share_by_hand([math.exp(by_sequence[b]) for b in written]),
            "off_policy/ess_token_truncated": share_by_hand(weights_T.tolist()),
            "off_policy/ess_sequence_truncated": share_by_hand(applied),
            "off_policy/masked_frac": 4 / NUM_TOKENS,
        }
    )


def test_the_truncated_sample_size_of_sequences_uses_the_applied_weights():
    inputs = make_inputs()
    totals = sums(inputs, inputs.proximal_logprobs_T - inputs.behaviour_logprobs_T)
    capped = [min(math.exp(total), 1.5) for b, total in enumerate(totals) if b != 6]
    weights_T = importance_weights(inputs, [SequenceTIS(cap=1.5)]).weight_T
    assert diagnose(inputs, weights_T)["off_policy/ess_sequence_truncated"] == pytest.approx(share_by_hand(capped))


def test_a_mismatch_at_lag_0_is_separate_from_staleness():
    inputs = make_inputs(groups=[0, 0, 0], lengths=[2, 2, 2])
    gap_T = torch.tensor([0.01, -0.01, 0.5, 0.5, 0.3, 0.3], dtype=torch.float64)
    inputs = replace(inputs, proximal_logprobs_T=inputs.behaviour_logprobs_T + gap_T)
    metrics = off_policy_metrics(inputs, torch.arange(6) < 2)
    assert metrics["mismatch/lag0_tokens"] == 2
    assert metrics["mismatch/lag0_abs"] == pytest.approx(0.01)
    assert metrics["mismatch/k1"] == pytest.approx(-1.6 / 6)
    assert "off_policy/masked_frac" not in metrics
    none_fresh = off_policy_metrics(inputs, torch.zeros(6, dtype=torch.bool))
    assert none_fresh["mismatch/lag0_abs"] is none_fresh["mismatch/lag0_k3"] is None
    assert none_fresh["mismatch/lag0_tokens"] == 0


def test_equal_policies_have_no_mismatch_and_a_full_effective_sample_size():
    inputs = make_inputs()
    same = replace(inputs, behaviour_logprobs_T=inputs.proximal_logprobs_T)
    metrics = diagnose(same, torch.ones(NUM_TOKENS))
    for name in ("mismatch/k1", "mismatch/k3", "mismatch/lag0_abs", "off_policy/chi2", "off_policy/masked_frac"):
        assert metrics[name] == 0
    for name in metrics:
        if "ess" in name:
            assert metrics[name] == 1


@pytest.mark.parametrize("missing", [math.nan, -math.inf])
def test_metrics_are_none_if_a_behaviour_logprob_is_missing(missing):
    inputs = make_inputs()
    behaviour_T = inputs.behaviour_logprobs_T.clone()
    behaviour_T[5] = missing
    metrics = diagnose(replace(inputs, behaviour_logprobs_T=behaviour_T))
    assert metrics.keys() == diagnose(inputs).keys()
    assert {value for name, value in metrics.items() if name != "mismatch/lag0_tokens"} == {None}
    assert metrics["mismatch/lag0_tokens"] == 0


def test_one_huge_weight_in_float32_counts_as_one_sample_of_many():
    """A float32 sum that contains the square of e^20 would lose the squares of small weights."""
    many = 100_000
    for weights in (torch.ones(many), torch.full((many,), math.exp(20), dtype=torch.float32)):
        assert effective_sample_share(weights) == pytest.approx(1.0, abs=1e-12)
    one = torch.full((many,), math.exp(-20), dtype=torch.float32)
    one[7] = math.exp(20)
    assert effective_sample_share(one) == pytest.approx(1 / many, rel=1e-6)
    inputs = make_inputs(groups=[0], lengths=[3])
    far = replace(inputs, proximal_logprobs_T=torch.zeros(3), behaviour_logprobs_T=torch.full((3,), -50.0))
    metrics = diagnose(far)
    assert metrics["off_policy/chi2"] == pytest.approx(math.exp(40), rel=1e-5)
    assert metrics["off_policy/ess_token"] == pytest.approx(1.0)
    assert metrics["mismatch/k3"] == pytest.approx(math.exp(20) - 21, rel=1e-5)


def test_the_effective_sample_size_is_none_without_weights_and_0_for_weights_of_0():
    assert effective_sample_share(torch.empty(0)) is None
    assert effective_sample_share(torch.zeros(3)) == 0, "if a mask removes all samples, the effective sample size is 0"
    assert effective_sample_share(torch.tensor([0.0, 0.0, 5.0])) == pytest.approx(1 / 3)


def test_entropy_and_kl_follow_their_definitions():
    inputs = make_inputs()
    log_pi, log_mu, log_ref = (
        getattr(inputs, f"{name}_logprobs_T").tolist() for name in ("proximal", "behaviour", "reference")
    )
    rho = [math.exp(p - m) for p, m in zip(log_pi, log_mu, strict=True)]
    log_ratio = [p - r for p, r in zip(log_pi, log_ref, strict=True)]
    assert policy_metrics(inputs) == pytest.approx(
        {
            "policy/nll": -sum(log_pi) / NUM_TOKENS,
            "policy/entropy": -sum(w * p for w, p in zip(rho, log_pi, strict=True)) / sum(rho),
            "policy/kl_reference": sum(w * d for w, d in zip(rho, log_ratio, strict=True)) / sum(rho),
        },
        abs=1e-12,
    )


@pytest.mark.parametrize("shares", [[0.5, 0.25, 0.125, 0.125], [0.125, 0.125, 0.25, 0.5]])
def test_entropy_and_kl_are_those_of_the_full_distribution_for_samples_of_any_policy(shares):
    """Sample each token of a vocabulary of four exactly as often as mu does."""
    log_pi_V, log_ref_V = (
        torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).log_softmax(0)
        for seed in (0, 1)
    )
    tokens = [token for token, share in enumerate(shares) for _ in range(round(8 * share))]
    inputs = make_inputs(groups=[0] * 8, lengths=[1] * 8)
    inputs = replace(
        inputs,
        proximal_logprobs_T=log_pi_V[tokens],
        reference_logprobs_T=log_ref_V[tokens],
        behaviour_logprobs_T=torch.tensor(shares, dtype=torch.float64).log()[tokens],
    )
    metrics = policy_metrics(inputs)
    pi_V = log_pi_V.exp()
    assert metrics["policy/entropy"] == pytest.approx(float(-(pi_V * log_pi_V).sum()), abs=1e-12)
    assert metrics["policy/kl_reference"] == pytest.approx(float((pi_V * (log_pi_V - log_ref_V)).sum()), abs=1e-12)


def test_tokens_without_behaviour_log_probabilities_have_weight_1():
    inputs = make_inputs()
    unknown = replace(inputs, behaviour_logprobs_T=torch.full_like(inputs.behaviour_logprobs_T, math.nan))
    metrics = policy_metrics(unknown)
    assert metrics["policy/entropy"] == pytest.approx(metrics["policy/nll"], abs=1e-12)
    assert math.isnan(policy_metrics(make_inputs(groups=[0, 0], lengths=[0, 0]))["policy/entropy"])
