"""Properties of every loss and every correction, in float64."""

import math
from dataclasses import replace

import pytest
import torch

from leeway.algorithms.base import BadInputs, check_inputs
from leeway.algorithms.corrections import TokenTIS, WeighedSection
from leeway.algorithms.registry import loss_for
from tests.unit.loss_batches import (
    CONFIGS,
    GROUP_CONFIGS,
    GROUPS,
    LENGTHS,
    evaluate,
    gradient,
    interleaved,
    make_inputs,
    permuted,
)
from tests.world.learner import NoDeviceReads


def every(configs):
    return pytest.mark.parametrize("config", configs.values(), ids=configs.keys())


def assert_same(config, one, other, where=slice(None), atol=1e-12):
    """Check that two batches have equal losses, metrics and gradients.

    `where` holds, for each token of `other`, its index in `one`.
    """
    loss, slope_T, value_slope_T, metrics = evaluate(config, one)
    other_loss, other_slope_T, other_value_slope_T, other_metrics = evaluate(config, other)
    assert slope_T.abs().max() > 0
    assert other_loss == pytest.approx(loss, abs=atol)
    assert other_metrics == pytest.approx(metrics, abs=atol)
    torch.testing.assert_close(other_slope_T, slope_T[where], rtol=0, atol=atol)
    torch.testing.assert_close(other_value_slope_T, value_slope_T[where], rtol=0, atol=atol)


@every(CONFIGS)
def test_a_loss_does_not_depend_on_the_order_of_sequences(config):
    inputs = make_inputs()
    shuffled, tokens = permuted(inputs, torch.randperm(9, generator=torch.Generator().manual_seed(5)))
    assert_same(config, inputs, shuffled, tokens)


@every(CONFIGS)
def test_a_truncated_sample_adds_no_gradient_if_masked_but_stays_in_the_statistics(config):
    inputs = make_inputs()
    cut_T = ~inputs.finished_B[inputs.sequence_T]
    loss, slope_T, value_slope_T, metrics = evaluate(config, inputs)
    assert slope_T[cut_T].abs().max() > 0
    masked = config.model_copy(update={"mask_truncated": True})
    masked_loss, masked_T, masked_value_T, masked_metrics = evaluate(masked, inputs)
    assert (masked_loss, masked_metrics) == (loss, metrics)
    assert not masked_T[cut_T].any()
    assert not masked_value_T[cut_T].any()
    assert torch.equal(masked_T[~cut_T], slope_T[~cut_T])
    assert torch.equal(masked_value_T[~cut_T], value_slope_T[~cut_T])


@every(CONFIGS)
def test_a_loss_does_not_depend_on_the_ids_of_groups_and_prompts(config):
    inputs = make_inputs()
    renamed = replace(inputs, group_B=torch.tensor([2, 0, 1])[inputs.group_B], prompt_B=100 - inputs.prompt_B)
    assert_same(config, inputs, renamed)


@every(CONFIGS)
def test_a_loss_does_not_depend_on_the_interleaving_of_sequences(config):
    inputs = make_inputs()
    mixed, tokens = interleaved(inputs)
    assert not torch.equal(mixed.sequence_T, inputs.sequence_T)
    assert_same(config, inputs, mixed, tokens)


@every(CONFIGS)
def test_a_loss_declares_the_smallest_unit_by_which_its_gradient_is_separable(config):
    inputs = make_inputs()
    unit_B = {
        "sequence": torch.arange(inputs.num_sequences),
        "group": inputs.group_B,
        "prompt": inputs.prompt_B,
        None: torch.zeros(inputs.num_sequences),
    }
    is_coupled = {unit: couples(config, inputs, of_B) for unit, of_B in unit_B.items()}
    separable = config.needs.separable
    assert not is_coupled[separable]
    if config.type != "off_policy_ppo":  # PPO's clipping may hide dependencies
        smallest = next(unit for unit, coupled in is_coupled.items() if not coupled)
        assert separable == smallest, "`needs.separable` must name the smallest unit, which allows training in one pass"


def couples(config, inputs, unit_B):
    """Return whether gradients of a unit (sequence, group, prompt) depend on log-probabilities of other units."""
    for is_first_update in (False, True):
        _, before_T = gradient(config, at_first_update(inputs) if is_first_update else inputs)
        for unit in unit_B.unique():
            own_T = (unit_B == unit)[inputs.sequence_T]
            others = replace(inputs, logprobs_T=torch.where(own_T, inputs.logprobs_T, inputs.logprobs_T * 1.5 - 0.2))
            _, after_T = gradient(config, at_first_update(others) if is_first_update else others)
            if not torch.allclose(before_T[own_T], after_T[own_T], rtol=0, atol=1e-12):
                return True
    return False


def at_first_update(inputs):
    """Return the batch as in the first update of a step, where the proximal policy equals the current policy."""
    return replace(inputs, proximal_logprobs_T=inputs.logprobs_T)


@every(GROUP_CONFIGS)
def test_a_constant_shift_of_rewards_has_no_effect(config):
    inputs = make_inputs()
    loss, slope_T = gradient(config, inputs)
    shifted_loss, shifted_slope_T = gradient(config, replace(inputs, rewards_B=inputs.rewards_B + 17.0))
    assert shifted_loss == pytest.approx(loss, abs=1e-11)
    torch.testing.assert_close(shifted_slope_T, slope_T, rtol=0, atol=1e-11)


@every({name: config for name, config in GROUP_CONFIGS.items() if config.compare == "group"})
def test_the_rewards_of_one_group_do_not_affect_other_groups(config):
    inputs = make_inputs()
    moved = replace(inputs, rewards_B=inputs.rewards_B + torch.tensor([5.0, 0, 0])[inputs.group_B])
    torch.testing.assert_close(gradient(config, moved)[1], gradient(config, inputs)[1], rtol=0, atol=1e-11)


@every(GROUP_CONFIGS)
def test_groups_of_one_have_no_gradient(config):
    alone = list(range(len(LENGTHS)))
    assert config.needs.groups
    inputs = make_inputs(groups=alone)
    if config.type == "oapl":  # OAPL pulls towards the behaviour policy, so both policies are made equal
        inputs = replace(inputs, behaviour_logprobs_T=inputs.logprobs_T)
    assert gradient(config, inputs)[1].abs().max() < 1e-14


@every(CONFIGS)
def test_undeclared_inputs_are_not_read(config):
    inputs = make_inputs()
    unknown_T = torch.full_like(inputs.logprobs_T, math.nan)
    needs = config.needs
    blind = replace(
        inputs,
        behaviour_logprobs_T=inputs.behaviour_logprobs_T if needs.behaviour else unknown_T,
        reference_logprobs_T=inputs.reference_logprobs_T if needs.reference else unknown_T,
        proximal_logprobs_T=inputs.proximal_logprobs_T if needs.proximal else unknown_T,
    )
    loss, slope_T, value_slope_T, _ = evaluate(config, blind)
    assert math.isfinite(loss)
    assert torch.equal(slope_T, gradient(config, inputs)[1])
    assert (value_slope_T.abs().max() > 0) == (needs.critic is not None)
    if needs.critic is None:
        assert torch.equal(gradient(config, inputs)[1], _without_values(config, inputs))


def _without_values(config, inputs):
    leaf_T = inputs.logprobs_T.clone().requires_grad_()
    loss = loss_for(config)(replace(inputs, logprobs_T=leaf_T, values_T=None, old_values_T=None)).loss
    return torch.autograd.grad(loss, leaf_T)[0]


@every(CONFIGS)
def test_declared_inputs_are_read(config):
    inputs = make_inputs()
    unknown_T = torch.full_like(inputs.logprobs_T, math.nan)
    if config.needs.proximal:
        assert math.isnan(gradient(config, replace(inputs, proximal_logprobs_T=unknown_T))[0])
    if config.needs.reference:
        assert math.isnan(gradient(config, replace(inputs, reference_logprobs_T=unknown_T))[0])
    if config.needs.critic:
        with pytest.raises(AssertionError, match="needs a critic"):
            loss_for(config)(replace(inputs, values_T=None, old_values_T=None))


@every(CONFIGS)
@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_rejected_with_its_sequence(config, reward):
    inputs = make_inputs()
    rewards_B = inputs.rewards_B.clone()
    rewards_B[3] = reward
    with pytest.raises(BadInputs, match=rf"sequence 3: its reward is {reward}, but must be finite") as caught:
        check_inputs(replace(inputs, rewards_B=rewards_B), config.needs)
    assert caught.value.sequence == 3


@every(CONFIGS)
@pytest.mark.parametrize("logprob", [math.nan, -math.inf])
def test_a_missing_behaviour_logprob_is_rejected_only_if_the_loss_reads_it(config, logprob):
    inputs = make_inputs()
    behaviour_T = inputs.behaviour_logprobs_T.clone()
    token = int(torch.nonzero(inputs.sequence_T == 4)[-1])
    behaviour_T[token] = logprob
    unknown = replace(inputs, behaviour_logprobs_T=behaviour_T)
    if not config.needs.behaviour:
        check_inputs(unknown, config.needs)
        assert_same(config, inputs, unknown)
        return
    with pytest.raises(BadInputs, match=rf"sequence 4: .*token is {logprob}.*corrections = \[\]") as caught:
        check_inputs(unknown, config.needs)
    assert caught.value.sequence == 4


@every({name: config for name, config in CONFIGS.items() if isinstance(config, WeighedSection)})
def test_weights_multiply_the_gradient_of_each_token_but_not_the_loss(config):
    inputs = make_inputs()
    loss, slope_T = gradient(config.model_copy(update={"corrections": ()}), inputs)
    weighed = config.model_copy(update={"corrections": (TokenTIS(cap=1.3, floor=0.8),)})
    weight_T = (inputs.logprobs_T - inputs.behaviour_logprobs_T).exp().clamp(0.8, 1.3)
    assert {0.8, 1.3} < set(weight_T.tolist())
    weighed_loss, weighed_slope_T = gradient(weighed, inputs)
    assert weighed_loss == loss
    torch.testing.assert_close(weighed_slope_T, weight_T * slope_T, rtol=1e-12, atol=0)
    output = loss_for(weighed)(inputs)
    torch.testing.assert_close(output.weights_T, weight_T, rtol=1e-12, atol=0)
    bounded_T = (weight_T == 0.8) | (weight_T == 1.3)
    assert output.metrics["off_policy/token_tis_frac"] == pytest.approx(float(bounded_T.double().mean()))
    # the weights depend on the current policy, not on the policy at the start of the step
    moved = replace(inputs, proximal_logprobs_T=inputs.proximal_logprobs_T - 1)
    assert torch.equal(loss_for(weighed)(moved).weights_T, output.weights_T)


@every({name: config for name, config in CONFIGS.items() if getattr(config, "compare", "group") == "prompt"})
def test_comparing_prompts_equals_comparing_merged_groups(config):
    inputs = make_inputs()
    # groups 0 and 2 have the same prompt, number 7
    joined = replace(inputs, group_B=torch.tensor([0, 1, 0])[inputs.group_B], num_groups=2)
    by_group = config.model_copy(update={"compare": "group"})
    assert evaluate(config, inputs)[0] == evaluate(by_group, joined)[0]
    assert torch.equal(gradient(config, inputs)[1], gradient(by_group, joined)[1])
    assert not torch.equal(gradient(config, inputs)[1], gradient(by_group, inputs)[1])
    # in a batch without prompt numbers, every group counts as a different prompt
    unknown = replace(inputs, prompt_B=None)
    assert torch.equal(gradient(config, unknown)[1], gradient(by_group, inputs)[1])


@every({name: each for name, each in CONFIGS.items() if each.needs.separable})
def test_the_gradient_of_a_separable_loss_reads_nothing_from_the_device(config):
    """The gradient is computed for every micro-batch, so a read from the device would block the host each time."""
    inputs = make_inputs(prompts=GROUPS, num_prompts=3)
    leaf_T = inputs.logprobs_T.clone().requires_grad_()
    batch = replace(inputs, logprobs_T=leaf_T, values_T=None, old_values_T=None)
    loss = loss_for(config)
    with NoDeviceReads():
        found_T = torch.autograd.grad(loss(batch).loss, leaf_T)[0]
    assert torch.isfinite(found_T).all()
    with pytest.raises(AssertionError, match="waits for the device"), NoDeviceReads():
        check_inputs(batch, config.needs)


@every(CONFIGS)
def test_metrics_are_numbers_without_gradients(config):
    output = loss_for(config)(make_inputs())
    assert output.metrics.keys() == output.measured.keys()
    assert {type(value) for value in output.metrics.values()} <= {float, int, type(None)}
    assert not any(found.requires_grad for found in output.measured.values() if isinstance(found, torch.Tensor))
