"""Group baselines and generalised advantage estimates against their definitions."""

import math
from dataclasses import replace

import pytest
import torch

from leeway.algorithms.base import group_advantages
from leeway.algorithms.off_policy_ppo import gae, rewards_per_token
from tests.unit.loss_batches import interleaved, make_inputs, mates_of, tokens_of


def per_sequence_rows(inputs, *values_T):
    """Yield, for every non-empty sequence, its token indices and one list of values for each tensor."""
    for tokens in filter(None, tokens_of(inputs)):
        yield tokens, *([float(values[t]) for t in tokens] for values in values_T)


@pytest.fixture(params=["in blocks", "interleaved"])
def inputs(request):
    inputs = make_inputs()
    return interleaved(inputs)[0] if request.param == "interleaved" else inputs


@pytest.mark.parametrize("lam", [0.95, 0.8, 1.0, 0.0])
def test_gae_follows_its_recursion_backwards_through_every_sequence(inputs, lam):
    rewards_T = inputs.reference_logprobs_T
    found_T = gae(inputs, rewards_T, inputs.values_T, lam)

    def recursive(rewards, values):
        if not rewards:
            return []
        rest = recursive(rewards[1:], values[1:])
        error = rewards[0] + (values[1] if rest else 0.0) - values[0]
        return [error + lam * (rest[0] if rest else 0.0), *rest]

    for tokens, rewards, values in per_sequence_rows(inputs, rewards_T, inputs.values_T):
        torch.testing.assert_close(found_T[tokens].tolist(), recursive(rewards, values), rtol=0, atol=1e-12)


def test_gae_is_return_minus_value_at_lambda_1_and_the_one_step_error_at_lambda_0(inputs):
    rewards_T = inputs.reference_logprobs_T
    returns_less_values = gae(inputs, rewards_T, inputs.values_T, 1.0)
    one_step = gae(inputs, rewards_T, inputs.values_T, 0.0)
    for tokens, rewards, values in per_sequence_rows(inputs, rewards_T, inputs.values_T):
        for i, t in enumerate(tokens):
            assert float(returns_less_values[t]) == pytest.approx(sum(rewards[i:]) - values[i], abs=1e-12)
            following = values[i + 1] if i + 1 < len(values) else 0.0
            assert float(one_step[t]) == pytest.approx(rewards[i] + following - values[i], abs=1e-12)


def test_a_perfect_critic_gives_zero_advantages(inputs):
    rewards_T = rewards_per_token(inputs, inputs.rewards_B, torch.zeros_like(inputs.values_T))
    returns_T = inputs.rewards_B[inputs.sequence_T]
    for lam in (0.0, 0.6, 1.0):
        assert gae(inputs, rewards_T, returns_T, lam).abs().max() < 1e-12


def test_gae_does_not_mix_sequences(inputs):
    whole_T = gae(inputs, inputs.reference_logprobs_T, inputs.values_T, 0.8)
    for b, tokens in enumerate(tokens_of(inputs)):
        if tokens:
            alone = make_inputs(groups=[0], lengths=[len(tokens)])
            own_T = gae(alone, inputs.reference_logprobs_T[tokens], inputs.values_T[tokens], 0.8)
            assert torch.equal(own_T, whole_T[tokens]), b


def test_the_reward_is_at_the_last_token_and_penalties_at_every_token(inputs):
    found_T = rewards_per_token(inputs, inputs.rewards_B, 0.1 * inputs.values_T)
    expected = [-0.1 * value for value in inputs.values_T.tolist()]
    for b, tokens in enumerate(tokens_of(inputs)):
        if tokens:
            expected[tokens[-1]] += float(inputs.rewards_B[b])
    torch.testing.assert_close(found_T.tolist(), expected, rtol=0, atol=1e-12)


def test_a_batch_of_empty_completions_has_no_advantages():
    inputs = make_inputs(groups=[0, 0], lengths=[0, 0])
    nothing_T = inputs.values_T
    assert rewards_per_token(inputs, inputs.rewards_B, nothing_T).shape == (0,)
    assert gae(inputs, nothing_T, nothing_T, 0.8).shape == (0,)


@pytest.mark.parametrize("groups", [[0, 1, 0, 2, 1, 0, 2, 2, 1], [0, 0, 0, 0, 0, 1, 1, 2, 3]])
def test_group_baselines_follow_their_definitions(groups):
    inputs = make_inputs(groups=groups)
    rewards = inputs.rewards_B.tolist()
    for b, reward in enumerate(rewards):
        own = [rewards[j] for j in mates_of(inputs, b)]
        others = [rewards[j] for j in mates_of(inputs, b) if j != b]
        mean = sum(own) / len(own)
        std = math.sqrt(sum((r - mean) ** 2 for r in own) / len(others)) if others else 0.0
        expected = {
            "rloo": reward - sum(others) / len(others) if others else 0.0,
            "grpo": (reward - mean) / (std + 1e-6),
            "dr_grpo": reward - mean,
        }
        for baseline, value in expected.items():
            found_B = group_advantages(inputs, inputs.rewards_B, baseline)
            assert float(found_B[b]) == pytest.approx(value, abs=1e-12), baseline


@pytest.mark.parametrize("reward", [0.1, 0.9, 10.3, 1e6])
@pytest.mark.parametrize("size", [1, 3, 7, 20])
def test_equal_float32_rewards_give_exactly_zero_advantages(reward, size):
    """A float32 mean can have a rounding error, which division by the standard deviation would amplify."""
    rewards_B = torch.full((size,), reward, dtype=torch.float32)
    inputs = replace(make_inputs(groups=[0] * size, lengths=[1] * size), rewards_B=rewards_B)
    for baseline in ("rloo", "grpo"):
        found_B = group_advantages(inputs, rewards_B, baseline)
        assert found_B.dtype == torch.float32
        assert found_B.abs().max() == 0
