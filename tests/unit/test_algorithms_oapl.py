"""OAPL against its formula and its optimum, in float64."""

import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from algorithms.oapl import OAPLConfig, optimal_value
from algorithms.registry import loss_for
from tests.unit.loss_batches import (
    ANSWERS,
    evaluate,
    gradient,
    make_inputs,
    mates_of,
    sums,
    tabular_logits,
    tabular_logprobs,
)

BETA, BETA_VALUE = 0.4, 0.9


@pytest.mark.parametrize("beta_value", [BETA, BETA_VALUE])
def test_loss_gradient_and_metrics_follow_the_formula(beta_value):
    inputs = make_inputs()
    config = OAPLConfig(beta=BETA, beta_value=beta_value, corrections=[])
    log_rho = sums(inputs, inputs.logprobs_T - inputs.behaviour_logprobs_T)
    loss, slope_B, deltas, values = 0.0, [], [], []
    for b in range(9):
        mates = mates_of(inputs, b)
        mean = sum(math.exp(float(inputs.rewards_B[j]) / beta_value) for j in mates) / len(mates)
        values.append(beta_value * math.log(mean))
        deltas.append(BETA * log_rho[b] - (float(inputs.rewards_B[b]) - values[-1]))
        loss += deltas[-1] ** 2 / len(mates) / 3
        slope_B.append(2 * BETA * deltas[-1] / len(mates) / 3)
    found_loss, slope_T, _, metrics = evaluate(config, inputs)
    assert found_loss == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(slope_T, torch.tensor(slope_B, dtype=torch.float64)[inputs.sequence_T])
    assert metrics == pytest.approx(
        {
            "oapl/delta_abs": sum(map(abs, deltas)) / 9 / BETA,
            "oapl/value": sum(values) / 9,
            "oapl/kl_behaviour": sum(log_rho) / 9,
        }
    )
    assert loss_for(config)(inputs).weights_T is None


@pytest.mark.parametrize("corrections", [[], ["token_tis"]])
def test_where_a_group_is_all_there_is_its_loss_is_zero_at_its_optimum_and_nowhere_else(corrections):
    """A uniform mu over 27 answers, and a group with each of them once: then V is exact."""
    uniform_T = torch.full((81,), -math.log(3), dtype=torch.float64)
    rewards_B = torch.rand(27, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    inputs = make_inputs(groups=[0] * 27, lengths=[3] * 27, behaviour_logprobs_T=uniform_T, rewards_B=rewards_B)
    config = OAPLConfig(beta=BETA, beta_value=BETA, corrections=corrections)
    optimum_B = (rewards_B / BETA).log_softmax(0)
    logits = tabular_logits(1).requires_grad_()
    for _ in range(500):
        log_pi = tabular_logprobs(logits)
        loss, slope_T = gradient(config, replace(inputs, logprobs_T=log_pi.detach().flatten()))
        (slope,) = torch.autograd.grad((slope_T * log_pi.flatten()).sum(), logits)
        logits.data -= 10 * slope
    assert loss < 1e-12
    assert len(ANSWERS) == len(optimum_B)
    torch.testing.assert_close(tabular_logprobs(logits).sum(1).detach(), optimum_B, rtol=0, atol=1e-5)
    value_B = optimal_value(inputs, BETA)
    torch.testing.assert_close(value_B, BETA * (rewards_B / BETA).logsumexp(0).expand(27) - BETA * math.log(27))


def test_unset_the_value_is_the_mean_of_the_others():
    inputs = make_inputs()
    rewards = inputs.rewards_B.tolist()
    log_rho = sums(inputs, inputs.logprobs_T - inputs.behaviour_logprobs_T)
    loss, values = 0.0, []
    for b in range(9):
        mates = mates_of(inputs, b)
        others = [rewards[j] for j in mates if j != b]
        values.append(sum(others) / len(others) if others else rewards[b])
        loss += (BETA * log_rho[b] - (rewards[b] - values[-1])) ** 2 / len(mates) / 3
    found_loss, _, _, metrics = evaluate(OAPLConfig(beta=BETA), inputs)
    assert found_loss == pytest.approx(loss, abs=1e-12)
    assert metrics["oapl/value"] == pytest.approx(sum(values) / 9)


@pytest.mark.parametrize(
    ("beta_value", "weighed", "rests"),
    [(None, True, True), (3.0, True, True), (None, False, False), (3.0, False, False)],
)
def test_with_weights_pi_over_mu_its_optimum_is_the_same_for_any_value(beta_value, weighed, rests):
    """At pi proportional to mu exp(r / beta): a uniform mu over 27 answers, and a group with each of them once."""
    uniform_T = torch.full((81,), -math.log(3), dtype=torch.float64)
    rewards_B = torch.rand(27, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    # less the mean of the others is K / (K - 1) times less the mean of all, where each answer is there once
    optimum = (rewards_B * (1 if beta_value else 27 / 26) / BETA).softmax(0).view(3, 3, 3)
    levels = optimum.sum((1, 2))[None], optimum.sum(2), optimum.view(9, 3)
    logits = torch.cat(levels).log().requires_grad_()
    log_pi = tabular_logprobs(logits)
    inputs = make_inputs(
        groups=[0] * 27,
        lengths=[3] * 27,
        behaviour_logprobs_T=uniform_T,
        rewards_B=rewards_B,
        logprobs_T=log_pi.detach().flatten(),
    )
    wide = [{"type": "token_tis", "cap": 1e9, "floor": 0.0}] if weighed else []
    _, slope_T = gradient(OAPLConfig(beta=BETA, beta_value=beta_value, corrections=wide), inputs)
    (slope,) = torch.autograd.grad((slope_T * log_pi.flatten()).sum(), logits)
    assert (float(slope.abs().max()) < 1e-12) == rests


def test_large_rewards_and_small_temperatures_stay_finite():
    inputs = make_inputs(rewards_B=torch.tensor([1e6, -1e6, 0, 3, 5, 1e6, 2, 2, 2], dtype=torch.float64))
    assert torch.isfinite(optimal_value(inputs, 1e-3)).all()
    single = replace(inputs, rewards_B=inputs.rewards_B.float())
    assert optimal_value(single, 1e-3).dtype == torch.float32


@pytest.mark.parametrize("beta", [0, -0.1, math.inf, math.nan])
def test_a_beta_that_is_no_temperature_is_refused(beta):
    for key in ("beta", "beta_value"):
        with pytest.raises(ValidationError, match=key):
            OAPLConfig(**{key: beta})


def test_it_needs_the_sampler_and_no_reference():
    needs = OAPLConfig().needs
    assert (needs.groups, needs.reference, needs.behaviour, needs.separable) == (True, False, True, "sequence")
