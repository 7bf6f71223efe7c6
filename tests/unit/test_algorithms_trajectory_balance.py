"""Identities of trajectory balance, in float64."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from leeway.algorithms.registry import loss_for
from leeway.algorithms.trajectory_balance import TrajectoryBalanceConfig
from tests.unit.loss_batches import (
    ANSWERS,
    gradient,
    make_inputs,
    mates_of,
    sums,
    tabular_logits,
    tabular_logprobs,
)

BETA = 0.3
CONFIG = TrajectoryBalanceConfig(beta=BETA, corrections=[])
"""The loss of the paper, without importance weights and without an anchor."""
WEIGHTS = {
    "none": [],
    "truncated by token": [{"type": "token_tis", "cap": 1.5}],
    "bounded by token": [{"type": "token_tis", "cap": 1.5, "floor": 0.5}],
    "raw by token": [{"type": "token_tis", "cap": 1e9}],
    "truncated by sequence": [{"type": "sequence_tis", "cap": 1.5}],
}
"""Corrections whose weights are all positive."""


def test_the_loss_is_zero_at_the_optimal_policy():
    # no completion is empty: an empty completion has probability 1 under every policy, so no policy is optimal
    inputs = make_inputs(lengths=[3, 1, 4, 2, 5, 2, 1, 3, 2])
    # pi*(y) = pi_ref(y) exp(r / beta) / Z with any Z per prompt; r / beta - log Z is spread over the tokens
    log_z_G = torch.tensor([0.4, -1.3, 2.0], dtype=torch.float64)
    tilt_B = (inputs.rewards_B / BETA - log_z_G[inputs.group_B]) / inputs.length_B
    at_optimum = replace(inputs, logprobs_T=inputs.reference_logprobs_T + tilt_B[inputs.sequence_T])
    loss, slope_T = gradient(CONFIG, at_optimum)
    assert loss == pytest.approx(0, abs=1e-24)
    assert slope_T.abs().max() < 1e-12
    for corrections in WEIGHTS.values():
        weighed = TrajectoryBalanceConfig(beta=BETA, corrections=corrections)
        assert gradient(weighed, at_optimum)[1].abs().max() < 1e-12
    metrics = loss_for(CONFIG)(at_optimum).metrics
    assert metrics["tb/delta_abs"] == pytest.approx(0, abs=1e-12)
    assert metrics["tb/log_z"] == pytest.approx(float(log_z_G.mean()))  # the groups have equal sizes


def test_loss_and_metrics_follow_the_formula():
    inputs = make_inputs()
    log_ratio = sums(inputs, inputs.logprobs_T - inputs.reference_logprobs_T)
    scaled = [float(r) / BETA for r in inputs.rewards_B]
    loss, deltas, log_zs = 0.0, [], []
    for b in range(9):
        mates = mates_of(inputs, b)
        log_z = sum(scaled[j] - log_ratio[j] for j in mates) / len(mates)
        deltas.append(log_z + log_ratio[b] - scaled[b])
        log_zs.append(log_z)
        loss += deltas[-1] ** 2 / len(mates) / 3
    output = loss_for(CONFIG)(inputs)
    assert output.loss.item() == pytest.approx(loss, abs=1e-12)
    assert output.weights_T is None
    assert output.metrics == pytest.approx(
        {
            "tb/beta": BETA,
            "tb/delta_abs": sum(map(abs, deltas)) / 9,
            "tb/log_z": sum(log_zs) / 9,
        }
    )


@pytest.mark.parametrize("groups", [[0, 1, 0, 2, 1, 0, 2, 2, 1], [0, 0, 0, 0, 0, 1, 1, 2, 2]])
def test_the_gradient_is_reinforce_with_a_group_baseline(groups):
    inputs = make_inputs(groups=groups)
    log_ratio = sums(inputs, inputs.logprobs_T - inputs.reference_logprobs_T)
    shaped = [float(r) - BETA * ratio for r, ratio in zip(inputs.rewards_B, log_ratio, strict=True)]
    expected_B = []
    for b in range(9):
        mates = mates_of(inputs, b)
        mean = sum(shaped[j] for j in mates) / len(mates)
        expected_B.append(-2 / (BETA * len(mates)) * (shaped[b] - mean) / 3)
    expected_T = torch.tensor(expected_B, dtype=torch.float64)[inputs.sequence_T]
    torch.testing.assert_close(gradient(CONFIG, inputs)[1], expected_T, rtol=0, atol=1e-12)


def test_the_on_policy_expected_gradient_is_that_of_the_kl_to_the_optimal_policy():
    """Check E grad L = 2 (K - 1) / K * grad KL(pi || pi*) by enumerating all groups of K = 2 out of 4 answers."""
    random = torch.Generator().manual_seed(1)
    logits_V = torch.randn(4, generator=random, dtype=torch.float64, requires_grad=True)
    reference_V, rewards_V = torch.randn(2, 4, generator=random, dtype=torch.float64)
    log_pi_V, log_ref_V = logits_V.log_softmax(0), reference_V.log_softmax(0)
    log_optimal_V = (log_ref_V + rewards_V / BETA).log_softmax(0)
    (kl_slope_V,) = torch.autograd.grad(
        (log_pi_V.exp() * (log_pi_V - log_optimal_V)).sum(), logits_V, retain_graph=True
    )
    expected_V = torch.zeros_like(kl_slope_V)
    for pair in itertools.product(range(4), repeat=2):
        answers = torch.tensor(pair)
        inputs = make_inputs(
            groups=[0, 0],
            lengths=[1, 1],
            logprobs_T=log_pi_V[answers].detach(),
            reference_logprobs_T=log_ref_V[answers],
            rewards_B=rewards_V[answers],
        )
        surrogate = (gradient(CONFIG, inputs)[1] * log_pi_V[answers]).sum()
        (slope_V,) = torch.autograd.grad(surrogate, logits_V, retain_graph=True)
        expected_V += log_pi_V[answers].sum().exp().detach() * slope_V
    torch.testing.assert_close(expected_V, kl_slope_V, rtol=0, atol=1e-12)


def expected_slope(config, logits, log_mu, log_ref, rewards):
    """Return the expected gradient with respect to the logits over groups of two answers sampled from mu."""
    log_pi = tabular_logprobs(logits.requires_grad_())
    num_answers = len(ANSWERS)
    pairs = torch.tensor(list(itertools.product(range(num_answers), repeat=2)))
    both = pairs.flatten()
    inputs = make_inputs(
        groups=torch.arange(len(pairs)).repeat_interleave(2).tolist(),
        lengths=[3] * len(both),
        logprobs_T=log_pi[both].detach().flatten(),
        behaviour_logprobs_T=log_mu[both].flatten(),
        reference_logprobs_T=log_ref[both].flatten(),
        rewards_B=rewards[both],
    )
    slopes = gradient(config, inputs)[1].view(-1, 3) * len(pairs)  # times the number of groups: the loss is a mean
    probability = log_mu[pairs].sum((1, 2)).exp().repeat_interleave(2)
    total = torch.zeros_like(log_pi).index_add(0, both, probability[:, None] * slopes)
    return torch.autograd.grad((total * log_pi).sum(), logits)[0]


def descend(config, log_mu, log_ref, rewards, num_updates=500):
    """Run Adam from other initial logits; return the final log-probabilities and the largest gradient entry."""
    logits = tabular_logits(3)
    adam = torch.optim.Adam([logits], betas=(0.9, 0.99))
    for number in range(num_updates):
        logits.grad = expected_slope(config, logits.detach_(), log_mu, log_ref, rewards)
        adam.param_groups[0]["lr"] = 0.1 * (1 + math.cos(math.pi * number / num_updates)) / 2
        adam.step()
    left = expected_slope(config, logits.detach_(), log_mu, log_ref, rewards)
    return tabular_logprobs(logits).sum(1).detach(), float(left.abs().max())


@pytest.mark.parametrize("corrections", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_positive_weights_keep_the_optimum_as_the_only_stationary_point(corrections):
    log_mu, log_ref = tabular_logprobs(tabular_logits(1)), tabular_logprobs(tabular_logits(2))
    rewards = torch.rand(27, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    config = TrajectoryBalanceConfig(beta=0.5, corrections=corrections)
    found, left = descend(config, log_mu, log_ref, rewards)
    assert left < 1e-9
    optimum = (log_ref.sum(1) + rewards / 0.5).log_softmax(0)
    torch.testing.assert_close(found, optimum, rtol=0, atol=1e-7)


def test_a_mask_has_other_stationary_points():
    """A weight of 0 hides an answer, so no term of the loss determines its probability."""
    log_mu, log_ref = tabular_logprobs(tabular_logits(1)), tabular_logprobs(tabular_logits(2))
    rewards = torch.rand(27, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    config = TrajectoryBalanceConfig(beta=0.5, corrections=[{"type": "icepop", "low": 0.7, "high": 1.3}])
    found, _ = descend(config, log_mu, log_ref, rewards)
    optimum = (log_ref.sum(1) + rewards / 0.5).log_softmax(0)
    assert (found - optimum).abs().max() > 0.5


@pytest.mark.parametrize(("progress", "beta"), [(0.0, 1.0), (0.25, 0.875), (1.0, 0.5)])
def test_beta_changes_linearly_over_the_run(progress, beta):
    config = TrajectoryBalanceConfig(beta=1.0, beta_final=0.5)
    inputs = make_inputs(progress=progress)
    assert gradient(config, inputs)[0] == gradient(TrajectoryBalanceConfig(beta=beta), inputs)[0]
    assert loss_for(config)(inputs).metrics["tb/beta"] == beta


@pytest.mark.parametrize("beta", [0, -0.1, math.inf, math.nan])
def test_a_beta_that_is_not_positive_and_finite_is_rejected(beta):
    for key in ({"beta": beta}, {"beta_final": beta}):
        with pytest.raises(ValidationError, match=next(iter(key))):
            TrajectoryBalanceConfig(**key)
