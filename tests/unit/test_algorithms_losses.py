"""Every identity of the losses, in float64, against derivations that do not use their code."""

import math
from dataclasses import replace

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from algorithms.inputs import LossInputs
from algorithms.metrics import off_policy_metrics
from algorithms.off_policy_ppo import OffPolicyPPOConfig
from algorithms.online_dpo import OnlineDPOConfig
from algorithms.registry import ALGORITHMS, AlgorithmConfig, loss_for, needs_reference
from algorithms.trajectory_balance import TrajectoryBalanceConfig

LENGTHS = [3, 1, 4, 2, 5, 2, 1, 3, 2]
GROUPS = [0, 1, 0, 2, 1, 0, 2, 2, 1]


def batch(seed=0, groups=GROUPS, lengths=LENGTHS, **changes) -> LossInputs:
    random = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)

    def logprobs():
        return -torch.rand(num_tokens, generator=random, dtype=torch.float64) - 0.1

    inputs = LossInputs(
        logprobs_T=logprobs(),
        proximal_logprobs_T=logprobs(),
        behaviour_logprobs_T=logprobs(),
        reference_logprobs_T=logprobs(),
        sequence_T=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        group_B=torch.tensor(groups),
        rewards_B=torch.rand(len(lengths), generator=random, dtype=torch.float64),
        finished_B=torch.ones(len(lengths), dtype=torch.bool),
        num_groups=max(groups) + 1,
        step=0,
    )
    return replace(inputs, **changes)


def gradient(config, inputs) -> tuple[float, torch.Tensor]:
    leaf = inputs.logprobs_T.clone().requires_grad_()
    loss = loss_for(config)(replace(inputs, logprobs_T=leaf)).loss
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.item(), grad


def per_sequence(inputs, values) -> list[float]:
    return [float(values[inputs.sequence_T == b].sum()) for b in range(inputs.num_sequences)]


def permuted(inputs, order) -> tuple[LossInputs, torch.Tensor]:
    """The same batch with its sequences in another order, and where each new token was."""
    tokens = torch.cat([torch.nonzero(inputs.sequence_T == b).flatten() for b in order])
    lengths = torch.tensor([int((inputs.sequence_T == b).sum()) for b in order])
    return LossInputs(
        logprobs_T=inputs.logprobs_T[tokens],
        proximal_logprobs_T=inputs.proximal_logprobs_T[tokens],
        behaviour_logprobs_T=inputs.behaviour_logprobs_T[tokens],
        reference_logprobs_T=inputs.reference_logprobs_T[tokens],
        sequence_T=torch.arange(len(order)).repeat_interleave(lengths),
        group_B=inputs.group_B[order],
        rewards_B=inputs.rewards_B[order],
        finished_B=inputs.finished_B[order],
        num_groups=inputs.num_groups,
        step=inputs.step,
    ), tokens


ALL_CONFIGS = [
    TrajectoryBalanceConfig(beta=0.3),
    OnlineDPOConfig(),
    OnlineDPOConfig(variant="ipo"),
    OffPolicyPPOConfig(),
    OffPolicyPPOConfig(baseline="grpo", kl_beta=0.1),
]


@pytest.mark.parametrize("config", ALL_CONFIGS, ids=repr)
def test_the_order_of_sequences_changes_neither_loss_nor_gradient(config):
    inputs = batch()
    order = torch.randperm(inputs.num_sequences, generator=torch.Generator().manual_seed(5))
    shuffled, tokens = permuted(inputs, order)
    loss, grad = gradient(config, inputs)
    shuffled_loss, shuffled_grad = gradient(config, shuffled)
    assert grad.abs().max() > 0
    assert shuffled_loss == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(shuffled_grad, grad[tokens], rtol=0, atol=1e-12)


@pytest.mark.parametrize("config", ALL_CONFIGS, ids=repr)
def test_rewards_may_be_shifted_by_any_constant(config):
    inputs = batch()
    shifted = replace(inputs, rewards_B=inputs.rewards_B + 17.0)
    loss, grad = gradient(config, inputs)
    shifted_loss, shifted_grad = gradient(config, shifted)
    assert shifted_loss == pytest.approx(loss, abs=1e-11)
    torch.testing.assert_close(shifted_grad, grad, rtol=0, atol=1e-11)


@pytest.mark.parametrize("config", ALL_CONFIGS, ids=repr)
def test_groups_of_one_give_no_gradient(config):
    inputs = batch(groups=list(range(len(LENGTHS))))
    _, grad = gradient(config, inputs)
    assert ALGORITHMS[config.type].needs_groups
    torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-14)


def test_trajectory_balance_is_zero_at_the_optimal_policy():
    beta, inputs = 0.3, batch()
    # pi*(y) = pi_ref(y) exp(r / beta) / Z, with any Z per prompt: spread the difference over a sequence's tokens
    z_G = torch.tensor([0.4, -1.3, 2.0], dtype=torch.float64)
    length_B = torch.bincount(inputs.sequence_T).double()
    tilt_B = (inputs.rewards_B / beta - z_G[inputs.group_B]) / length_B
    loss, grad = gradient(
        TrajectoryBalanceConfig(beta=beta),
        replace(inputs, logprobs_T=inputs.reference_logprobs_T + tilt_B[inputs.sequence_T]),
    )
    assert loss == pytest.approx(0, abs=1e-24)
    assert grad.abs().max() < 1e-12


def test_trajectory_balance_gradient_is_reinforce_with_a_group_baseline():
    beta, inputs = 0.3, batch()
    log_ratio = per_sequence(inputs, inputs.logprobs_T - inputs.reference_logprobs_T)
    shaped = [float(r) - beta * ratio for r, ratio in zip(inputs.rewards_B, log_ratio, strict=True)]
    expected_B = []
    for b, group in enumerate(GROUPS):
        mates = [shaped[j] for j, other in enumerate(GROUPS) if other == group]
        mean = sum(mates) / len(mates)
        expected_B.append(-2 / (beta * len(mates)) * (shaped[b] - mean) / inputs.num_groups)
    _, grad = gradient(TrajectoryBalanceConfig(beta=beta), inputs)
    expected = torch.tensor(expected_B, dtype=torch.float64)[inputs.sequence_T]
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)


def test_log_z_never_mixes_prompts():
    inputs = batch()
    moved = replace(inputs, rewards_B=inputs.rewards_B + torch.tensor([5.0, 0, 0])[inputs.group_B])
    first = gradient(TrajectoryBalanceConfig(), inputs)
    second = gradient(TrajectoryBalanceConfig(), moved)
    assert second[0] == pytest.approx(first[0], abs=1e-11)
    torch.testing.assert_close(second[1], first[1], rtol=0, atol=1e-11)


def test_beta_moves_linearly_and_stays_at_its_end():
    config = TrajectoryBalanceConfig(beta=1.0, beta_final=0.2, beta_steps=4)
    assert [round(config.beta_at(step), 9) for step in (0, 1, 2, 4, 9)] == [1.0, 0.8, 0.6, 0.2, 0.2]
    with pytest.raises(ValidationError, match="needs both"):
        TrajectoryBalanceConfig(beta=1.0, beta_steps=4)


@pytest.mark.parametrize("variant", ["sigmoid", "ipo"])
def test_dpo_compares_the_best_with_the_worst_of_each_group(variant):
    config, inputs = OnlineDPOConfig(beta=0.7, variant=variant), batch()
    log_ratio = per_sequence(inputs, inputs.logprobs_T - inputs.reference_logprobs_T)
    expected, expected_grad = 0.0, torch.zeros_like(inputs.logprobs_T)
    for group in range(3):
        mates = [b for b, other in enumerate(GROUPS) if other == group]
        best = max(mates, key=lambda b: float(inputs.rewards_B[b]))
        worst = min(mates, key=lambda b: float(inputs.rewards_B[b]))
        margin = log_ratio[best] - log_ratio[worst]
        if variant == "sigmoid":
            expected += math.log1p(math.exp(-0.7 * margin)) / 3
            slope = -0.7 / (1 + math.exp(0.7 * margin)) / 3
        else:
            expected += (margin - 1 / 1.4) ** 2 / 3
            slope = 2 * (margin - 1 / 1.4) / 3
        expected_grad[inputs.sequence_T == best] = slope
        expected_grad[inputs.sequence_T == worst] = -slope
    loss, grad = gradient(config, inputs)
    assert loss == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-12)


def test_dpo_drops_and_counts_tied_groups():
    inputs = batch()
    rewards = inputs.rewards_B.clone()
    rewards[inputs.group_B == 1] = 0.5
    tied = replace(inputs, rewards_B=rewards)
    _, grad = gradient(OnlineDPOConfig(), tied)
    assert grad[inputs.group_B[inputs.sequence_T] == 1].abs().max() == 0
    assert grad[inputs.group_B[inputs.sequence_T] == 0].abs().max() > 0
    assert loss_for(OnlineDPOConfig())(tied).metrics["dpo/tied_frac"] == pytest.approx(1 / 3)
    all_tied = replace(inputs, rewards_B=torch.ones_like(rewards))
    loss, grad = gradient(OnlineDPOConfig(), all_tied)
    assert loss == 0
    assert grad.abs().max() == 0
    no_pairs = {"dpo/tied_frac": 1.0, "dpo/margin": None, "dpo/accuracy": None}
    assert loss_for(OnlineDPOConfig())(all_tied).metrics == no_pairs


def test_an_answer_cut_off_by_length_is_penalised_before_the_comparison():
    inputs = batch(groups=[0, 0], lengths=[2, 3], rewards_B=torch.tensor([0.9, 0.5], dtype=torch.float64))
    cut_off = replace(inputs, finished_B=torch.tensor([False, True]))
    _, grad = gradient(OnlineDPOConfig(), inputs)
    _, penalised = gradient(OnlineDPOConfig(missing_eos_penalty=1.0), cut_off)
    torch.testing.assert_close(penalised.sign(), -grad.sign())


@pytest.mark.parametrize("baseline", ["rloo", "grpo"])
def test_ppo_follows_its_formula_token_by_token(baseline):
    config, inputs = OffPolicyPPOConfig(baseline=baseline, behaviour_weight_cap=1.3, kl_beta=0.2), batch(seed=3)
    kl = per_sequence(inputs, inputs.proximal_logprobs_T - inputs.reference_logprobs_T)
    rewards = [float(r) - 0.2 * k for r, k in zip(inputs.rewards_B, kl, strict=True)]
    advantages = []
    for b, group in enumerate(GROUPS):
        mates = [j for j, other in enumerate(GROUPS) if other == group]
        if baseline == "rloo":
            advantages.append(rewards[b] - sum(rewards[j] for j in mates if j != b) / (len(mates) - 1))
        else:
            mean = sum(rewards[j] for j in mates) / len(mates)
            std = math.sqrt(sum((rewards[j] - mean) ** 2 for j in mates) / (len(mates) - 1))
            advantages.append((rewards[b] - mean) / (std + 1e-6))
    objective, clipped, slopes = 0.0, 0, []
    for t, b in enumerate(inputs.sequence_T.tolist()):
        weight = min(math.exp(inputs.proximal_logprobs_T[t] - inputs.behaviour_logprobs_T[t]), 1.3)
        ratio = math.exp(inputs.logprobs_T[t] - inputs.proximal_logprobs_T[t])
        free, bounded = ratio * advantages[b], min(max(ratio, 0.8), 1.2) * advantages[b]
        objective += weight * min(free, bounded)
        clipped += bounded < free
        slopes.append(-weight * free / sum(LENGTHS) if free <= bounded else 0.0)
    loss, grad = gradient(config, inputs)
    metrics = loss_for(config)(inputs).metrics
    assert loss == pytest.approx(-objective / sum(LENGTHS), abs=1e-12)
    torch.testing.assert_close(grad, torch.tensor(slopes, dtype=torch.float64), rtol=0, atol=1e-12)
    share = metrics["off_policy/clip_frac_low"] + metrics["off_policy/clip_frac_high"]
    assert clipped > 0
    assert share == pytest.approx(clipped / sum(LENGTHS))


def test_ppo_without_staleness_is_plain_policy_gradient():
    inputs = batch()
    on_policy = replace(inputs, proximal_logprobs_T=inputs.logprobs_T, behaviour_logprobs_T=inputs.logprobs_T)
    config = OffPolicyPPOConfig(baseline="grpo", normalize_std=False)
    _, grad = gradient(config, on_policy)
    centred_B = inputs.rewards_B - inputs.mean_per_group(inputs.rewards_B)
    torch.testing.assert_close(grad, -centred_B[inputs.sequence_T] / sum(LENGTHS), rtol=0, atol=1e-12)


def test_a_reference_is_read_only_by_those_that_declare_it():
    unscored = torch.full((sum(LENGTHS),), math.nan, dtype=torch.float64)
    for config in ALL_CONFIGS:
        loss, _ = gradient(config, batch(reference_logprobs_T=unscored))
        assert math.isnan(loss) == needs_reference(config), config


def test_the_config_union_selects_by_type_and_refuses_unknown_keys():
    adapter = TypeAdapter(AlgorithmConfig)
    for name, algorithm in ALGORITHMS.items():
        assert type(adapter.validate_python({"type": name})) is algorithm.config_class
    with pytest.raises(ValidationError, match="bta"):
        adapter.validate_python({"type": "trajectory_balance", "bta": 1})


def test_diagnostics_separate_staleness_from_implementation_gap():
    inputs = batch(groups=[0, 0, 0], lengths=[2, 2, 2])
    gap = torch.tensor([0.01, -0.01, 0.5, 0.5, 0.3, 0.3], dtype=torch.float64)
    inputs = replace(inputs, proximal_logprobs_T=inputs.behaviour_logprobs_T + gap)
    lag_T = torch.tensor([0, 0, 1, 1, 1, 0])
    single_B = torch.tensor([True, True, False])
    metrics = off_policy_metrics(inputs, lag_T, single_B, weight_cap=1.2)
    assert metrics["mismatch/lag0_tokens"] == 2
    assert metrics["mismatch/lag0_abs"] == pytest.approx(0.01)
    assert metrics["mismatch/k1"] == pytest.approx(-1.6 / 6)
    weights = [math.exp(float(x)) for x in gap]
    mean = sum(weights) / 6
    assert metrics["off_policy/chi2"] == pytest.approx(sum(w * w for w in weights) / 6 - 1)
    assert metrics["off_policy/ess_token"] == pytest.approx(1 / (sum((w / mean) ** 2 for w in weights) / 6))
    assert metrics["off_policy/ess_token"] < metrics["off_policy/ess_token_truncated"] <= 1
    none_fresh = off_policy_metrics(inputs, lag_T + 1, single_B)
    assert none_fresh["mismatch/lag0_abs"] is None
    assert none_fresh["mismatch/lag0_tokens"] == 0
