"""Online DPO compared with a loop over pairs, in float64."""

import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from leeway.algorithms.online_dpo import OnlineDPOConfig
from leeway.algorithms.registry import loss_for
from tests.unit.loss_batches import LENGTHS, PROMPTS, evaluate, gradient, make_inputs, sums

BETA = 0.7


def pairs_by_hand(inputs, keys):
    """Return the best and the worst sequence of every group or prompt whose rewards are not all equal."""
    rewards, pairs = inputs.rewards_B.tolist(), []
    for key in sorted(set(keys)):
        own = [b for b, other in enumerate(keys) if other == key]
        best, worst = max(own, key=lambda b: rewards[b]), min(own, key=lambda b: rewards[b])
        if rewards[best] > rewards[worst]:
            pairs.append((best, worst))
    return pairs


@pytest.mark.parametrize("compare", ["group", "prompt"])
@pytest.mark.parametrize("variant", ["sigmoid", "ipo", "sigmoid_mean", "ipo_mean"])
def test_the_best_sample_is_compared_with_the_worst(variant, compare):
    config = OnlineDPOConfig(beta=BETA, variant=variant, compare=compare, corrections=[])
    inputs = make_inputs()
    counts = [max(1, length) if variant.endswith("_mean") else 1 for length in LENGTHS]
    totals = sums(inputs, inputs.logprobs_T - inputs.reference_logprobs_T)
    log_ratio = [total / count for total, count in zip(totals, counts, strict=True)]
    pairs = pairs_by_hand(inputs, inputs.group_B.tolist() if compare == "group" else PROMPTS)
    assert len(pairs) == (3 if compare == "group" else 2)
    expected, slope_B, margins = 0.0, [0.0] * 9, []
    for best, worst in pairs:
        margin = log_ratio[best] - log_ratio[worst]
        margins.append(margin)
        if variant.startswith("sigmoid"):
            expected += math.log1p(math.exp(-BETA * margin)) / len(pairs)
            slope = -BETA / (1 + math.exp(BETA * margin)) / len(pairs)
        else:
            expected += (margin - 1 / (2 * BETA)) ** 2 / len(pairs)
            slope = 2 * (margin - 1 / (2 * BETA)) / len(pairs)
        slope_B[best] += slope
        slope_B[worst] -= slope
    loss, slope_T, _, metrics = evaluate(config, inputs)
    assert loss == pytest.approx(expected, abs=1e-12)
    slopes = [slope / count for slope, count in zip(slope_B, counts, strict=True)]
    expected_T = torch.tensor(slopes, dtype=torch.float64)[inputs.sequence_T]
    torch.testing.assert_close(slope_T, expected_T, rtol=0, atol=1e-12)
    crossed = sum(inputs.group_B[best] != inputs.group_B[worst] for best, worst in pairs)
    assert metrics == pytest.approx(
        {
            "dpo/tied_frac": 0.0,
            "dpo/margin": BETA * sum(margins) / len(pairs),
            "dpo/accuracy": sum(m > 0 for m in margins) / len(pairs),
            "dpo/cross_frac": float(crossed) / len(pairs),
        }
    )


def test_a_pair_across_two_leases_of_a_prompt_is_counted():
    rewards_B = torch.tensor([0.9, 0.8, 0.1, 0.2], dtype=torch.float64)
    inputs = make_inputs(groups=[0, 0, 1, 1], lengths=[1, 2, 2, 1], prompts=[5, 5, 5, 5], rewards_B=rewards_B)
    inputs = replace(inputs, finished_B=torch.ones(4, dtype=torch.bool))
    _, slope_T, _, metrics = evaluate(OnlineDPOConfig(compare="prompt"), inputs)
    assert metrics["dpo/cross_frac"] == 1
    assert slope_T.sign().tolist() == [-1, 0, 0, 1, 1, 0]
    inside = replace(inputs, rewards_B=torch.tensor([0.9, 0.0, 0.5, 0.5], dtype=torch.float64))
    assert loss_for(OnlineDPOConfig(compare="prompt"))(inside).metrics["dpo/cross_frac"] == 0


def test_tied_groups_are_dropped_and_counted():
    inputs = make_inputs(finished_B=torch.ones(9, dtype=torch.bool))
    rewards_B = inputs.rewards_B.clone()
    rewards_B[inputs.group_B == 1] = 0.5
    tied = replace(inputs, rewards_B=rewards_B)
    loss, slope_T, _, metrics = evaluate(OnlineDPOConfig(), tied)
    assert metrics["dpo/tied_frac"] == pytest.approx(1 / 3)
    # the loss is the mean over the two remaining pairs
    rest = only_groups(inputs, [0, 2])
    assert loss == pytest.approx(gradient(OnlineDPOConfig(), rest)[0], abs=1e-12)
    assert slope_T[inputs.group_B[inputs.sequence_T] == 1].abs().max() == 0
    all_tied = replace(inputs, rewards_B=torch.ones_like(rewards_B))
    loss, slope_T, _, metrics = evaluate(OnlineDPOConfig(corrections=[]), all_tied)
    assert loss == 0
    assert slope_T.abs().max() == 0
    assert metrics == {"dpo/tied_frac": 1.0, "dpo/margin": None, "dpo/accuracy": None, "dpo/cross_frac": None}


def only_groups(inputs, groups):
    """Return the batch with only the given groups."""
    keep_B = torch.isin(inputs.group_B, torch.tensor(groups))
    keep_T = keep_B[inputs.sequence_T]
    new_B, new_G = keep_B.cumsum(0) - 1, {group: i for i, group in enumerate(groups)}
    return replace(
        inputs,
        logprobs_T=inputs.logprobs_T[keep_T],
        behaviour_logprobs_T=inputs.behaviour_logprobs_T[keep_T],
        reference_logprobs_T=inputs.reference_logprobs_T[keep_T],
        values_T=inputs.values_T[keep_T],
        sequence_T=new_B[inputs.sequence_T[keep_T]],
        group_B=torch.tensor([new_G[g] for g in inputs.group_B[keep_B].tolist()]),
        rewards_B=inputs.rewards_B[keep_B],
        finished_B=inputs.finished_B[keep_B],
        num_groups=len(groups),
    )


def test_the_first_sample_is_chosen_among_equal_rewards():
    rewards_B = torch.tensor([0, 1, 1, 0], dtype=torch.float64)
    inputs = make_inputs(groups=[0, 0, 0, 0], lengths=[1, 1, 1, 1], rewards_B=rewards_B)
    inputs = replace(inputs, finished_B=torch.ones(4, dtype=torch.bool))
    assert gradient(OnlineDPOConfig(), inputs)[1].sign().tolist() == [1, -1, 0, 0]


def test_the_ipo_gradient_is_zero_at_a_margin_of_half_over_beta():
    rewards_B = torch.tensor([1.0, 0.0], dtype=torch.float64)
    inputs = make_inputs(groups=[0, 0], lengths=[1, 1], rewards_B=rewards_B)
    step_T = torch.tensor([1 / (2 * BETA), 0.0], dtype=torch.float64)
    at_optimum = replace(inputs, logprobs_T=inputs.reference_logprobs_T + step_T, finished_B=rewards_B >= 0)
    loss, slope_T = gradient(OnlineDPOConfig(beta=BETA, variant="ipo"), at_optimum)
    assert loss == pytest.approx(0, abs=1e-24)
    assert slope_T.abs().max() < 1e-12


@pytest.mark.parametrize("beta", [0, -0.1, math.inf, math.nan])
def test_a_beta_that_is_not_positive_and_finite_is_rejected(beta):
    with pytest.raises(ValidationError, match="beta"):
        OnlineDPOConfig(beta=beta)
