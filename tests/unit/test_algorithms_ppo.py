"""Off-policy PPO compared with its formulas written out token by token, in float64."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from leeway.algorithms.off_policy_ppo import OffPolicyPPOConfig
from leeway.algorithms.registry import loss_for
from tests.unit import ppo_by_hand
from tests.unit.loss_batches import (
    CONFIGS,
    LENGTHS,
    PROXIMAL_RLOO,
    evaluate,
    gradient,
    make_inputs,
    mates_of,
    sums,
    tabular_logits,
    tabular_logprobs,
)

PPO_CONFIGS = {name: config for name, config in CONFIGS.items() if config.type == "off_policy_ppo"}
NUM_TOKENS = sum(LENGTHS)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("config", PPO_CONFIGS.values(), ids=PPO_CONFIGS.keys())
def test_loss_gradients_weights_and_fractions_follow_the_formula(config, seed):
    inputs = make_inputs(seed)
    hand = ppo_by_hand.ppo(config, inputs)
    loss, slope_T, value_slope_T, metrics = evaluate(config, inputs)
    assert loss == pytest.approx(hand.loss, abs=1e-12)
    torch.testing.assert_close(slope_T, torch.tensor(hand.slope_T, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(value_slope_T, torch.tensor(hand.value_slope_T, dtype=torch.float64), rtol=0, atol=1e-12)
    weights_T = loss_for(config)(inputs).weights_T
    # with proximal = "behaviour", pi_prox / mu is 1, so there are no weights
    assert (weights_T is None) == (config.proximal == "behaviour")
    if weights_T is not None:
        torch.testing.assert_close(weights_T, torch.tensor(hand.weight_T, dtype=torch.float64), rtol=0, atol=1e-12)
    names = {"low": "off_policy/clip_frac_low", "high": "off_policy/clip_frac_high", "value": "ppo/value_clip_frac"}
    for kind, count in hand.counts.items():
        assert metrics[names.get(kind, f"off_policy/{kind}_frac")] == pytest.approx(count / NUM_TOKENS), kind


def test_the_batches_of_the_formula_test_reach_every_branch():
    """Check that clipping, truncation and masks occur in the batches, so that the formula test covers them."""
    for name, config in PPO_CONFIGS.items():
        totals = {}
        for seed in range(3):
            for kind, count in ppo_by_hand.ppo(config, make_inputs(seed)).counts.items():
                totals[kind] = totals.get(kind, 0) + count
        unreached = {kind for kind, count in totals.items() if count == 0}
        assert not unreached, name
        assert all(count < 3 * NUM_TOKENS for count in totals.values()), name


@pytest.mark.parametrize("baseline", ["rloo", "dr_grpo"])
def test_fresh_data_give_the_plain_policy_gradient(baseline):
    inputs = make_inputs()
    fresh = replace(inputs, proximal_logprobs_T=inputs.logprobs_T, behaviour_logprobs_T=inputs.logprobs_T)
    expected_B = []
    for b, reward in enumerate(inputs.rewards_B.tolist()):
        own = [float(inputs.rewards_B[j]) for j in mates_of(inputs, b)]
        mean = sum(own) / len(own)
        expected_B.append(reward - mean if baseline == "dr_grpo" else reward - (sum(own) - reward) / (len(own) - 1))
    expected_T = -torch.tensor(expected_B, dtype=torch.float64)[inputs.sequence_T] / NUM_TOKENS
    config = OffPolicyPPOConfig(baseline=baseline)
    _, slope_T, _, metrics = evaluate(config, fresh)
    torch.testing.assert_close(slope_T, expected_T, rtol=0, atol=1e-12)
    assert metrics["off_policy/clip_frac_low"] == metrics["off_policy/clip_frac_high"] == 0


def test_a_step_of_one_update_is_never_clipped():
    """u = pi / pi_prox is 1 in the first update; only later updates of a step can reach the clip."""
    inputs = make_inputs()
    first = replace(inputs, proximal_logprobs_T=inputs.logprobs_T)
    for config in PPO_CONFIGS.values():
        if config.proximal == "draw_start":
            metrics = loss_for(config)(first).metrics
            assert metrics["off_policy/clip_frac_low"] == metrics["off_policy/clip_frac_high"] == 0
    # if the trust region is around the behaviour policy, stale data are clipped in the first update
    metrics = loss_for(OffPolicyPPOConfig(proximal="behaviour"))(first).metrics
    assert metrics["off_policy/clip_frac_low"] + metrics["off_policy/clip_frac_high"] > 0.2


def test_stale_data_do_not_move_the_trust_region():
    inputs = make_inputs()
    older = replace(inputs, behaviour_logprobs_T=inputs.behaviour_logprobs_T - 0.7)
    config = OffPolicyPPOConfig()
    for name in ("off_policy/clip_frac_low", "off_policy/clip_frac_high"):
        assert loss_for(config)(older).metrics[name] == loss_for(config)(inputs).metrics[name]
    torch.testing.assert_close(gradient(config, older)[1], math.exp(0.7) * gradient(config, inputs)[1])


def test_masked_tokens_still_count_in_the_denominator():
    inputs = make_inputs(behaviour_logprobs_T=make_inputs().proximal_logprobs_T)
    far_T = inputs.behaviour_logprobs_T - 3.0 * (inputs.sequence_T == 2)
    stale = replace(inputs, behaviour_logprobs_T=far_T)
    masked = OffPolicyPPOConfig(corrections=["icepop"])
    _, slope_T, _, metrics = evaluate(masked, stale)
    _, full_T = gradient(masked, inputs)
    assert metrics["off_policy/icepop_frac"] == LENGTHS[2] / NUM_TOKENS
    assert slope_T[inputs.sequence_T == 2].abs().max() == 0
    assert torch.equal(slope_T[inputs.sequence_T != 2], full_T[inputs.sequence_T != 2])


def test_a_masked_token_is_not_counted_as_clipped():
    inputs = make_inputs()
    far = replace(inputs, behaviour_logprobs_T=inputs.proximal_logprobs_T - 3.0)
    metrics = loss_for(OffPolicyPPOConfig(corrections=["icepop"]))(far).metrics
    assert metrics["off_policy/icepop_frac"] == 1
    assert metrics["off_policy/clip_frac_low"] == metrics["off_policy/clip_frac_high"] == 0


@pytest.mark.parametrize(("kl_in", "per_token"), [("reward", False), ("reward", True), ("loss", False)])
def test_the_kl_pulls_towards_the_reference(kl_in, per_token):
    inputs = make_inputs(rewards_B=torch.ones(9, dtype=torch.float64), values_T=torch.zeros(22).double())
    inputs = replace(inputs, old_values_T=inputs.values_T, finished_B=torch.ones(9, dtype=torch.bool))
    fresh = replace(inputs, proximal_logprobs_T=inputs.logprobs_T, behaviour_logprobs_T=inputs.logprobs_T)
    keys = {"baseline": "value_head", "gae_lambda": 0.0} if per_token else {}
    config = OffPolicyPPOConfig(**keys, kl_beta=0.4, kl_in=kl_in)
    slope_T = gradient(config, fresh)[1]
    log_ratio_T = fresh.logprobs_T - fresh.reference_logprobs_T
    if kl_in == "loss":
        expected_T = 0.4 * log_ratio_T / NUM_TOKENS
    elif per_token:  # each token is penalised for its own ratio; the reward of 1 is at the last token
        last_T = torch.tensor([t in {tokens[-1] for tokens in tokens_by_sequence(fresh)} for t in range(22)])
        expected_T = (0.4 * log_ratio_T - last_T.double()) / NUM_TOKENS
    else:  # each sequence is penalised for its sum, relative to the mean of the other sequences
        shaped = [1 - 0.4 * kl for kl in sums(fresh, log_ratio_T)]
        advantages = ppo_by_hand.group_advantages(fresh, shaped, config)
        expected_T = -torch.tensor(advantages, dtype=torch.float64)[fresh.sequence_T] / NUM_TOKENS
    torch.testing.assert_close(slope_T, expected_T, rtol=0, atol=1e-12)


def tokens_by_sequence(inputs):
    return [tokens for tokens in ppo_by_hand.tokens_of(inputs) if tokens]


def kl_slopes(kl_in, log_mu_V, log_pi_V, log_ref_V, logits_V):
    """Return the expected gradient of the KL term with respect to the logits, for one-token answers sampled from mu."""
    size = log_pi_V.numel()
    answers = make_inputs(
        groups=[0] * size,
        lengths=[1] * size,
        logprobs_T=log_pi_V.detach(),
        proximal_logprobs_T=log_pi_V.detach(),
        behaviour_logprobs_T=log_mu_V,
        reference_logprobs_T=log_ref_V,
        rewards_B=torch.ones(size, dtype=torch.float64),  # equal rewards: only the KL term has a gradient
        finished_B=torch.ones(size, dtype=torch.bool),
    )
    config = OffPolicyPPOConfig(kl_beta=1.0, kl_in=kl_in, corrections=[])
    slope_T = gradient(config, answers)[1] * size  # times the number of tokens: the loss is a mean over tokens
    return torch.autograd.grad((log_mu_V.exp() * slope_T * log_pi_V).sum(), logits_V, retain_graph=True)[0]


@pytest.mark.parametrize("stale", [False, True])
def test_the_entropy_bonus_has_the_gradient_of_the_exact_entropy(stale):
    random = torch.Generator().manual_seed(5)
    logits_V = torch.randn(5, generator=random, dtype=torch.float64, requires_grad=True)
    log_pi_V = logits_V.log_softmax(0)
    log_mu_V = torch.randn(5, generator=random, dtype=torch.float64).log_softmax(0) if stale else log_pi_V.detach()
    entropy = -(log_pi_V.exp() * log_pi_V).sum()
    (expected_V,) = torch.autograd.grad(-entropy, logits_V, retain_graph=True)
    config = OffPolicyPPOConfig(entropy_coef=1.0, corrections=[])
    answers = every_answer(log_mu_V, log_pi_V.detach())
    slope_T = gradient(config, answers)[1] * 5  # times the number of tokens: the loss is a mean over tokens
    (found_V,) = torch.autograd.grad((log_mu_V.exp() * slope_T * log_pi_V).sum(), logits_V, retain_graph=True)
    torch.testing.assert_close(found_V, expected_V, rtol=0, atol=1e-12)


def every_answer(log_mu_V, log_pi_V):
    """Return a batch of one-token answers with zero advantages, one for each token of the vocabulary."""
    size = log_pi_V.numel()
    return make_inputs(
        groups=[0] * size,
        lengths=[1] * size,
        logprobs_T=log_pi_V,
        proximal_logprobs_T=log_pi_V,
        behaviour_logprobs_T=log_mu_V,
        rewards_B=torch.ones(size, dtype=torch.float64),
        finished_B=torch.ones(size, dtype=torch.bool),
    )


def test_the_batch_baseline_compares_a_sample_with_all_others_of_the_update():
    inputs = make_inputs(groups=list(range(9)))  # each group has one sample
    fresh = replace(inputs, proximal_logprobs_T=inputs.logprobs_T, behaviour_logprobs_T=inputs.logprobs_T)
    rewards = inputs.rewards_B.tolist()
    advantages = [r - (sum(rewards) - r) / 8 for r in rewards]
    slope_T = gradient(OffPolicyPPOConfig(baseline="batch"), fresh)[1]
    expected_T = -torch.tensor(advantages, dtype=torch.float64)[inputs.sequence_T] / NUM_TOKENS
    torch.testing.assert_close(slope_T, expected_T, rtol=0, atol=1e-12)
    assert not OffPolicyPPOConfig(baseline="batch").needs.groups


def test_the_interpolated_proximal_policy_is_pi_at_lag_0_and_mu_at_lag_1():
    inputs = make_inputs()
    config = OffPolicyPPOConfig(proximal="interpolated", corrections=[])
    fresh = replace(inputs, lag_T=torch.zeros_like(inputs.lag_T))
    _, slope_T, _, metrics = evaluate(config, fresh)
    assert metrics["off_policy/clip_frac_low"] == metrics["off_policy/clip_frac_high"] == 0
    at_pi = replace(inputs, proximal_logprobs_T=inputs.logprobs_T)
    torch.testing.assert_close(slope_T, gradient(OffPolicyPPOConfig(corrections=[]), at_pi)[1], rtol=0, atol=1e-12)
    one_old = replace(inputs, lag_T=torch.ones_like(inputs.lag_T))
    naive_T = gradient(OffPolicyPPOConfig(proximal="behaviour"), inputs)[1]
    torch.testing.assert_close(gradient(config, one_old)[1], naive_T, rtol=0, atol=1e-12)
    assert not config.needs.proximal


def test_mean_over_sets_the_weights_of_tokens():
    inputs = make_inputs(lengths=[3, 1, 4, 2, 5, 2, 1, 3, 2])
    fresh = replace(inputs, proximal_logprobs_T=inputs.logprobs_T, behaviour_logprobs_T=inputs.logprobs_T)
    per_token_T = gradient(OffPolicyPPOConfig(), fresh)[1] * inputs.logprobs_T.numel()
    of_sequences_T = gradient(OffPolicyPPOConfig(mean_over="sequences"), fresh)[1]
    length_T = inputs.length_B[inputs.sequence_T]
    torch.testing.assert_close(of_sequences_T, per_token_T / 9 / length_T, rtol=0, atol=1e-12)
    sums_T = gradient(OffPolicyPPOConfig(mean_over=16), fresh)[1]
    torch.testing.assert_close(sums_T, per_token_T / 9 / 16, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stale", [False, True])
def test_k2_has_the_gradient_of_the_exact_kl_and_k3_that_of_the_reverse_kl(stale):
    random = torch.Generator().manual_seed(4)
    logits_V = torch.randn(5, generator=random, dtype=torch.float64, requires_grad=True)
    log_ref_V, other_V = torch.randn(2, 5, generator=random, dtype=torch.float64).log_softmax(-1)
    log_pi_V = logits_V.log_softmax(0)
    log_mu_V = other_V if stale else log_pi_V.detach()
    forward = (log_pi_V.exp() * (log_pi_V - log_ref_V)).sum()
    reverse = (log_ref_V.exp() * (log_ref_V - log_pi_V)).sum()
    (forward_V,) = torch.autograd.grad(forward, logits_V, retain_graph=True)
    (reverse_V,) = torch.autograd.grad(reverse, logits_V, retain_graph=True)
    k2_V, k3_V = (kl_slopes(each, log_mu_V, log_pi_V, log_ref_V, logits_V) for each in ("loss", "loss_k3"))
    torch.testing.assert_close(k2_V, forward_V, rtol=0, atol=1e-12)
    torch.testing.assert_close(k3_V, reverse_V, rtol=0, atol=1e-12)
    assert (k3_V - forward_V).abs().max() > 0.01


def test_k3_does_not_lower_a_token_that_is_far_below_the_reference():
    inputs = make_inputs()
    far = replace(inputs, reference_logprobs_T=inputs.logprobs_T.detach() + 25, rewards_B=0 * inputs.rewards_B)
    config = OffPolicyPPOConfig(kl_beta=0.1, kl_in="loss_k3", proximal="behaviour")
    assert (gradient(config, far)[1] <= 0).all()


def test_proximal_rloo_follows_the_formula_of_its_paper():
    """The paper "Asynchronous RLHF" maximises min(w A, clip(w, 0.8, 1.2) A) with w = pi(y) / mu(y).

    A is the RLOO advantage of the reward r - beta log(mu / ref)(y).
    """
    config, inputs = OffPolicyPPOConfig(**PROXIMAL_RLOO), make_inputs(seed=2)
    kl = sums(inputs, inputs.behaviour_logprobs_T - inputs.reference_logprobs_T)
    shaped = [float(r) - 0.05 * k for r, k in zip(inputs.rewards_B, kl, strict=True)]
    log_w = sums(inputs, inputs.logprobs_T - inputs.behaviour_logprobs_T)
    loss, slope_B, num_clipped = 0.0, [], 0
    for b in range(9):
        others = [shaped[j] for j in mates_of(inputs, b) if j != b]
        advantage, w = shaped[b] - sum(others) / len(others), math.exp(log_w[b])
        free, clipped = w * advantage, min(max(w, 0.8), 1.2) * advantage
        num_clipped += clipped < free
        slope_B.append(-free if free <= clipped else 0.0)
        if LENGTHS[b]:  # the loss has no term for an empty completion
            loss -= min(free, clipped)
    assert 0 < num_clipped < 9
    # this loss is divided by the number of tokens; the loss of the paper is divided by the number of sequences
    output_loss, slope_T = gradient(config, inputs)
    assert output_loss * NUM_TOKENS == pytest.approx(loss, abs=1e-12)
    expected_T = torch.tensor(slope_B, dtype=torch.float64)[inputs.sequence_T] / NUM_TOKENS
    torch.testing.assert_close(slope_T, expected_T, rtol=0, atol=1e-12)
    paper_loss, slope_T = gradient(OffPolicyPPOConfig(**PROXIMAL_RLOO, mean_over="sequences"), inputs)
    assert paper_loss * 9 == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(slope_T, expected_T * NUM_TOKENS / 9, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mean_over", ["tokens", "sequences"])
def test_sequences_as_single_actions_have_equal_weight_at_any_length(mean_over):
    inputs = make_inputs(groups=[0, 0], lengths=[1, 10], rewards_B=torch.tensor([1.0, 0.0]))
    fresh = replace(inputs, logprobs_T=inputs.behaviour_logprobs_T)
    config = OffPolicyPPOConfig(proximal="behaviour", corrections=["sequence_clip"], mean_over=mean_over)
    loss, slope_T = gradient(config, fresh)
    assert loss == pytest.approx(0.0, abs=1e-12), "the terms cancel: both ratios are 1, and the advantages are 1 and -1"
    torch.testing.assert_close(slope_T[0].expand(10), -slope_T[1:], rtol=0, atol=1e-12)


def test_an_unclipped_value_is_not_counted_as_clipped():
    """old + (V - old) differs from V in the last digit, which must not count as clipping."""
    inputs = make_inputs(groups=[0] * 40, lengths=[5] * 40)
    near = replace(inputs, values_T=inputs.values_T * 0.1, old_values_T=inputs.old_values_T * 0.19)
    moved_T = near.old_values_T + (near.values_T - near.old_values_T)
    assert not torch.equal(moved_T, near.values_T)
    metrics = evaluate(OffPolicyPPOConfig(baseline="value_head"), near)[3]
    assert metrics["ppo/value_clip_frac"] == 0


def test_explained_variance_compares_the_old_values_with_the_returns():
    config = OffPolicyPPOConfig(baseline="value_head", gae_lambda=1.0)  # the return of each token is the reward
    inputs = make_inputs(finished_B=torch.ones(9, dtype=torch.bool))
    returns_T = inputs.rewards_B[inputs.sequence_T]
    explained = {}
    for name, old_T in {"all": returns_T + 3, "none": 0 * returns_T, "half": returns_T / 2}.items():
        explained[name] = evaluate(config, replace(inputs, old_values_T=old_T))[3]["ppo/explained_variance"]
    assert explained == pytest.approx({"all": 1.0, "none": 0.0, "half": 0.75})
    for dtype in (torch.float32, torch.float64):  # the returns are equal except for rounding
        level = replace(inputs, rewards_B=torch.full((9,), 0.3, dtype=dtype), old_values_T=inputs.values_T.to(dtype))
        names = ("logprobs_T", "proximal_logprobs_T", "behaviour_logprobs_T", "reference_logprobs_T", "values_T")
        level = replace(level, **{name: getattr(level, name).to(dtype) for name in names})
        assert evaluate(config, level)[3]["ppo/explained_variance"] is None


def test_the_logged_advantage_is_the_mean_over_tokens():
    inputs = make_inputs()
    hand = ppo_by_hand.advantages(inputs, inputs.proximal_logprobs_T, OffPolicyPPOConfig())
    metric = loss_for(OffPolicyPPOConfig())(inputs).metrics["ppo/advantage_abs"]
    assert metric == pytest.approx(sum(map(abs, hand)) / NUM_TOKENS)


def test_a_saved_config_reads_back_as_the_same_config():
    around_behaviour = OffPolicyPPOConfig(proximal="behaviour")
    assert around_behaviour.corrections == (), "pi_prox / mu is 1, so there is nothing to correct"
    recipes = [OffPolicyPPOConfig(**PROXIMAL_RLOO), OffPolicyPPOConfig(baseline="dr_grpo", mean_over=8.0)]
    for config in (around_behaviour, *recipes):
        assert OffPolicyPPOConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"corrections": ["token_tis", "sequence_tis"]}, "'token_tis' and 'sequence_tis' both replace the importance"),
        ({"corrections": ["gspo", "cispo"]}, "'gspo' and 'cispo' both replace the clipped ratio"),
        ({"corrections": ["icepop", {"type": "icepop", "high": 3.0}]}, "contains 'icepop' twice"),
        ({"corrections": ["token_tis"], "proximal": "behaviour"}, "'token_tis' acts on pi_prox / mu, which is 1"),
        ({"corrections": ["gspo"], "clip_low": 0.1}, "clip_low has no effect with the correction 'gspo'"),
        ({"kl_in": "loss"}, "kl_in has no effect without kl_beta above 0: remove kl_in"),
        ({"gae_lambda": 0.9}, "gae_lambda has no effect without baseline = 'value_head' or 'critic'"),
        ({"mean_over": 0.0}, "mean_over"),
        ({"mean_over": "sequence"}, "mean_over"),
        ({"baseline": "batch", "compare": "prompt"}, "but baseline = 'batch'"),
        ({"baseline": "no/such/file.py:mine"}, "no file .*no/such/file.py"),
        ({**PROXIMAL_RLOO, "clip_high": 0.1}, "clip_high has no effect with the correction 'sequence_clip'"),
        ({"corrections": [{"type": "icepop", "low": 5.0, "high": 0.5}]}, "icepop: low = 5.0 must be less than high"),
        ({"corrections": ["token_tsi"]}, "'token_tis', 'sequence_tis', 'icepop', 'geometric_mask', 'sequence_clip'"),
        ({"corrections": [{"type": "token_tis", "cap": math.inf}]}, "cap"),
        ({"kl_beta": -0.1}, "kl_beta"),
        ({"kl_beta": math.nan}, "kl_beta"),
        ({"gae_lambda": 1.1, "baseline": "value_head"}, "gae_lambda"),
    ],
)
def test_contradictory_keys_are_rejected_by_name(keys, message):
    with pytest.raises(ValidationError, match=message):
        OffPolicyPPOConfig(**keys)


def test_the_needs_of_a_config_follow_from_its_keys():
    needs = OffPolicyPPOConfig(baseline="critic", kl_beta=0.1).needs
    assert (needs.groups, needs.reference, needs.behaviour, needs.critic) == (False, True, True, "model")
    needs = OffPolicyPPOConfig().needs
    assert (needs.groups, needs.reference, needs.behaviour, needs.critic) == (True, False, True, None)


def tabular_policy(seed):
    """Return log pi(token | prefix) of every answer, and its logits."""
    logits = tabular_logits(seed).requires_grad_()
    return tabular_logprobs(logits), logits


def expected_slope(corrections, log_pi, logits, log_mu, rewards):
    """Return the expected gradient for a group of two answers sampled from mu.

    One batch contains all 729 groups.
    """
    pairs = torch.tensor(list(itertools.product(range(27), repeat=2)))
    both = pairs.flatten()
    inputs = make_inputs(
        groups=[group for group in range(729) for _ in range(2)],
        lengths=[3] * 1458,
        logprobs_T=log_pi[both].detach().flatten(),
        proximal_logprobs_T=log_pi[both].detach().flatten(),
        behaviour_logprobs_T=log_mu[both].flatten(),
        rewards_B=rewards[both],
        finished_B=torch.ones(1458, dtype=torch.bool),
    )
    # all groups have six tokens, so the loss of a batch is the mean over groups
    slopes = gradient(OffPolicyPPOConfig(corrections=corrections), inputs)[1].view(1458, 3) * 729
    probability = log_mu[pairs].sum((1, 2)).exp().repeat_interleave(2)
    total = torch.zeros(27, 3, dtype=torch.float64).index_add(0, both, probability[:, None] * slopes)
    return torch.autograd.grad((total * log_pi).sum(), logits, retain_graph=True)[0]


def test_sequence_weights_make_the_expectation_exact_and_token_weights_do_not():
    log_pi, logits = tabular_policy(0)
    log_mu = tabular_policy(1)[0].detach()
    rewards = torch.randn(27, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (ascent,) = torch.autograd.grad((log_pi.sum(1).exp() * rewards).sum(), logits, retain_graph=True)
    expected = -ascent / 3  # divided by 3: the loss is a mean over tokens, and an answer has three tokens
    on_policy = expected_slope([], log_pi, logits, log_pi.detach(), rewards)
    torch.testing.assert_close(on_policy, expected, rtol=0, atol=1e-12)
    raw = [{"type": "sequence_tis", "cap": 1e12}]
    torch.testing.assert_close(expected_slope(raw, log_pi, logits, log_mu, rewards), expected, rtol=0, atol=1e-12)
    by_token = expected_slope([], log_pi, logits, log_mu, rewards)
    assert (by_token - expected).abs().max() > 0.01
