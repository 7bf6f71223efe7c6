"""OAPL against its formula and its optimum, in float64."""

import math

import pytest
import torch
from pydantic import ValidationError

from leeway.algorithms.oapl import OAPLConfig
from leeway.algorithms.registry import loss_for
from tests.unit.loss_batches import (
    evaluate,
    gradient,
    make_inputs,
    mates_of,
    sums,
    tabular_logprobs,
)

BETA = 0.4


@pytest.mark.parametrize("corrections", [[], ["token_tis"]])
def test_loss_gradient_and_metrics_follow_the_formula(corrections):
    inputs = make_inputs()
    config = OAPLConfig(beta=BETA, corrections=corrections)
    rewards = inputs.rewards_B.tolist()
    log_rho = sums(inputs, inputs.logprobs_T - inputs.behaviour_logprobs_T)
    loss, slope_B, deltas, values = 0.0, [], [], []
    for b in range(9):
        mates = mates_of(inputs, b)
        others = [rewards[j] for j in mates if j != b]
        values.append(sum(others) / len(others) if others else rewards[b])
        deltas.append(BETA * log_rho[b] - (rewards[b] - values[-1]))
        loss += deltas[-1] ** 2 / len(mates) / 3
        slope_B.append(2 * BETA * deltas[-1] / len(mates) / 3)
    found_loss, slope_T, _, metrics = evaluate(config, inputs)
    assert found_loss == pytest.approx(loss, abs=1e-12)
    assert metrics["oapl/delta_abs"] == pytest.approx(sum(map(abs, deltas)) / 9 / BETA)
    assert metrics["oapl/value"] == pytest.approx(sum(values) / 9)
    assert metrics["oapl/kl_behaviour"] == pytest.approx(sum(log_rho) / 9)
    weights_T = loss_for(config)(inputs).weights_T
    assert (weights_T is None) == (not corrections)
    weighed_T = torch.tensor(slope_B, dtype=torch.float64)[inputs.sequence_T] * (1 if weights_T is None else weights_T)
    torch.testing.assert_close(slope_T, weighed_T)


@pytest.mark.parametrize("weighed", [True, False])
def test_with_weights_pi_over_mu_the_gradient_is_zero_at_the_optimum(weighed):
    """The optimal policy is proportional to mu exp(r / beta).

    mu is uniform over 27 answers, and the group contains each answer once.
    """
    uniform_T = torch.full((81,), -math.log(3), dtype=torch.float64)
    rewards_B = torch.rand(27, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    # if each answer occurs once: r - mean(other rewards) = K / (K - 1) * (r - mean(all rewards))
    optimum = (rewards_B * 27 / 26 / BETA).softmax(0).view(3, 3, 3)
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
    _, slope_T = gradient(OAPLConfig(beta=BETA, corrections=wide), inputs)
    (slope,) = torch.autograd.grad((slope_T * log_pi.flatten()).sum(), logits)
    assert (float(slope.abs().max()) < 1e-12) == weighed


@pytest.mark.parametrize("beta", [0, -0.1, math.inf, math.nan])
def test_a_beta_that_is_not_positive_and_finite_is_rejected(beta):
    with pytest.raises(ValidationError, match="beta"):
        OAPLConfig(beta=beta)


def test_oapl_needs_behaviour_logprobs_and_no_reference():
    needs = OAPLConfig().needs
    assert (needs.groups, needs.reference, needs.behaviour, needs.separable) == (True, False, True, "sequence")
