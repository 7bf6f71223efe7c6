"""On-policy distillation against the exact KL to the teacher, in float64."""

from dataclasses import replace

import pytest
import torch

from leeway.algorithms.distillation import DistillationConfig
from tests.unit.loss_batches import ANSWERS, evaluate, gradient, make_inputs, tabular_logits, tabular_logprobs

NO_BOUND = [{"type": "token_tis", "cap": 1e12, "floor": 0.0}]


def test_loss_gradient_and_metrics_follow_the_formula(monkeypatch):
    monkeypatch.setattr("leeway.algorithms.distillation.FAR", 0.3)
    inputs = make_inputs()
    config = DistillationConfig(corrections=[])
    loss, slope_T, _, metrics = evaluate(config, inputs)
    expected, slopes, num_far = 0.0, [], 0
    log_ratio = (inputs.logprobs_T - inputs.reference_logprobs_T).tolist()
    for d in log_ratio:
        is_far = abs(d) > 0.3
        num_far += is_far
        expected += 0.3 * (abs(d) - 0.15) if is_far else d * d / 2
        slopes.append((0.3 if d > 0 else -0.3) if is_far else d)
    num_tokens = len(log_ratio)
    assert 0 < num_far < num_tokens
    assert loss == pytest.approx(expected / num_tokens, abs=1e-12)
    torch.testing.assert_close(slope_T.tolist(), [slope / num_tokens for slope in slopes], rtol=0, atol=1e-12)
    assert metrics == pytest.approx({"distillation/far_frac": num_far / num_tokens})


@pytest.mark.parametrize("stale", [False, True])
def test_the_expected_gradient_is_that_of_the_exact_kl_to_the_teacher_at_every_state(stale):
    """Enumerate all 27 answers of a tabular policy, weighted by their sampling probability."""
    logits = tabular_logits(0).requires_grad_()
    log_pi, teacher = tabular_logprobs(logits), tabular_logits(1).log_softmax(1)
    log_mu_states = tabular_logits(2).log_softmax(1) if stale else logits.detach().log_softmax(1)
    log_mu = tabular_logprobs(tabular_logits(2)) if stale else log_pi.detach()
    inputs = make_inputs(
        groups=[0] * len(ANSWERS),
        lengths=[3] * len(ANSWERS),
        logprobs_T=log_pi.detach().flatten(),
        behaviour_logprobs_T=log_mu.flatten(),
        reference_logprobs_T=tabular_logprobs(tabular_logits(1)).flatten(),
    )
    slope = gradient(DistillationConfig(corrections=NO_BOUND), inputs)[1].view(27, 3) * 81
    probability = log_mu.sum(1).exp()
    (found,) = torch.autograd.grad((probability[:, None] * slope * log_pi).sum(), logits, retain_graph=True)
    # the probability that a sample from mu reaches each state
    reached = torch.ones(13, dtype=torch.float64)
    for prefix in range(1, 13):
        before, token = (0, prefix - 1) if prefix < 4 else (1 + (prefix - 4) // 3, (prefix - 4) % 3)
        reached[prefix] = reached[before] * log_mu_states[before, token].exp()
    choices = logits.log_softmax(1)
    kl = (choices.exp() * (choices - teacher)).sum(1)
    (expected,) = torch.autograd.grad((reached * kl).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_the_gradient_is_zero_at_the_teacher_and_rewards_are_not_read():
    inputs = make_inputs()
    at_teacher = replace(inputs, logprobs_T=inputs.reference_logprobs_T)
    assert gradient(DistillationConfig(), at_teacher)[1].abs().max() == 0
    rewarded = replace(inputs, rewards_B=inputs.rewards_B * 7 - 3)
    assert torch.equal(gradient(DistillationConfig(), inputs)[1], gradient(DistillationConfig(), rewarded)[1])
