"""Losses, gradients and metrics are finite for every batch."""

import math
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.loss_batches import CONFIGS, GROUP_CONFIGS, interleaved

from leeway.algorithms.base import LossInputs
from leeway.algorithms.corrections import off_policy_metrics
from leeway.algorithms.off_policy_ppo import OffPolicyPPOConfig
from leeway.algorithms.registry import loss_for

DTYPES = st.sampled_from([torch.float32, torch.float64])
# two values are equal, nearly equal, or differ by up to 10^4, so that exp of the difference overflows
LOGPROBS = st.sampled_from([0.0, -1e-7, -0.5, -1.0, -19.0, -21.0, -95.0, -1e4]) | st.floats(-5.0, 0.0)
VALUES = st.sampled_from([0.0, 1.0, -1e6]) | st.floats(-2.0, 2.0)
REWARDS = {
    torch.float32: st.sampled_from([0.0, 1.0, -1.0, 1e-30, 1e9, -1e9]) | st.floats(-1.0, 1.0, width=32),
    torch.float64: st.sampled_from([0.0, 1.0, -1.0, 1e-300, 1e100, -1e100]) | st.floats(-1.0, 1.0),
}


@st.composite
def batches(draw, dtypes=DTYPES) -> LossInputs:
    """Draw sequences in groups of any size, with empty completions and extreme rewards, in any precision and order."""
    dtype = draw(dtypes)
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=7))
    num_sequences, num_tokens = len(lengths), sum(lengths)
    group_B = draw(st.lists(st.integers(0, 3), min_size=num_sequences, max_size=num_sequences))
    numbers = {group: number for number, group in enumerate(sorted(set(group_B)))}
    equal = draw(st.booleans())
    reward = draw(REWARDS[dtype])

    def floats(values, count):
        return torch.tensor(draw(st.lists(values, min_size=count, max_size=count)), dtype=dtype)

    inputs = LossInputs(
        logprobs_T=floats(LOGPROBS, num_tokens),
        proximal_logprobs_T=floats(LOGPROBS, num_tokens),
        behaviour_logprobs_T=floats(LOGPROBS, num_tokens),
        reference_logprobs_T=floats(LOGPROBS, num_tokens),
        sequence_T=torch.arange(num_sequences).repeat_interleave(torch.tensor(lengths)),
        group_B=torch.tensor([numbers[group] for group in group_B]),
        rewards_B=torch.full((num_sequences,), reward, dtype=dtype) if equal else floats(REWARDS[dtype], num_sequences),
        finished_B=torch.tensor(draw(st.lists(st.booleans(), min_size=num_sequences, max_size=num_sequences))),
        num_groups=len(numbers),
        prompt_B=torch.tensor([group // 2 for group in group_B]),
        values_T=floats(VALUES, num_tokens),
        old_values_T=floats(VALUES, num_tokens),
        lag_T=torch.tensor(
            draw(st.lists(st.integers(0, 9), min_size=num_tokens, max_size=num_tokens)), dtype=torch.int64
        ),
        progress=draw(st.floats(0, 1)),
    )
    return interleaved(inputs, draw(st.integers(0, 9)))[0] if draw(st.booleans()) else inputs


@settings(max_examples=40)
@given(batches())
def test_losses_gradients_and_metrics_are_finite(inputs):
    fresh_T = inputs.finished_B[inputs.sequence_T]
    for name, config in CONFIGS.items():
        leaves = [inputs.logprobs_T.clone().requires_grad_(), inputs.values_T.clone().requires_grad_()]
        output = loss_for(config)(replace(inputs, logprobs_T=leaves[0], values_T=leaves[1]))
        slopes = torch.autograd.grad(output.loss, leaves, allow_unused=True, materialize_grads=True)
        assert math.isfinite(output.loss.item()), name
        assert all(torch.isfinite(slope).all() for slope in slopes), name
        metrics = output.metrics | off_policy_metrics(inputs, fresh_T, output.weights_T)
        for key, value in metrics.items():
            assert value is None or math.isfinite(value), (name, key)
            assert value is None or not key.endswith("_frac") or 0 <= value <= 1, (name, key)
            if "ess_" in key and value is not None:
                assert 0 <= value <= 1 + 1e-9, (name, key)


@settings(max_examples=40)
@given(batches(st.just(torch.float32)))
def test_equal_float32_rewards_give_exactly_zero_gradients(inputs):
    """Neither the rounding of a mean nor the floor of a standard deviation may favour a sample."""
    level = replace(
        inputs,
        rewards_B=inputs.rewards_B[:1].expand(inputs.num_sequences),
        finished_B=torch.ones_like(inputs.finished_B),
    )
    for config in (*GROUP_CONFIGS.values(), OffPolicyPPOConfig(baseline="grpo")):
        if config.type != "trajectory_balance" and getattr(config, "kl_beta", 0) == 0:
            leaf_T = level.logprobs_T.clone().requires_grad_()
            batch = replace(level, logprobs_T=leaf_T)
            if config.type == "oapl":  # removes the pull towards the behaviour policy
                batch = replace(batch, behaviour_logprobs_T=level.logprobs_T)
            loss = loss_for(config)(batch).loss
            assert torch.autograd.grad(loss, leaf_T)[0].abs().sum() == 0, config
