"""benchmarks/off_policy.py: exact quantities of its small task, whose completions can all be enumerated."""

import copy
import itertools
import math
from collections import deque
from dataclasses import replace

import pytest
import torch
from benchmarks import off_policy
from benchmarks.off_policy_world import page, training, world
from torch.nn import functional as F

ROWS = {row.name: row for row in training.ROWS}
GROUP_SIZE = training.GROUP_SIZE


@pytest.fixture(scope="module")
def small_world():
    return world.World.made_from(seed=7)


def draw_from(behaviour_PC, small_world):
    prompts_G, sequences_GK = training.sample(behaviour_PC, torch.Generator().manual_seed(0))
    with torch.no_grad():
        reference_PC, values_PN = small_world.reference()
    rewards_PS = small_world.rewards_PS
    return training.Draw(rewards_PS, prompts_G, sequences_GK, behaviour_PC, 2 * reference_PC, reference_PC, values_PN)


def uniform():
    return torch.full((world.NUM_PROMPTS, world.NUM_CHOICES), -math.log(world.NUM_TOKENS))


def test_every_completion_is_a_path_of_its_prefixes():
    completions = list(itertools.product(range(world.NUM_TOKENS), repeat=world.LENGTH))
    prefixes = [prefix for t in range(world.LENGTH) for prefix in itertools.product(range(world.NUM_TOKENS), repeat=t)]
    assert world.TOKENS_SL.tolist() == [list(completion) for completion in completions]
    assert len(prefixes) == world.NUM_NODES
    for completion, nodes in zip(completions, world.NODES_SL.tolist(), strict=True):
        assert [prefixes[node] for node in nodes] == [completion[:t] for t in range(world.LENGTH)]
    for number, prefix in enumerate(prefixes):
        above = world.ANCESTORS_NL[number][world.IS_ANCESTOR_NL[number]].tolist()
        assert [prefixes[node] for node in above] == [prefix[: len(prefix) - up] for up in range(len(prefix) + 1)]
        assert world.DEPTH_N[number] == len(prefix)
        assert not prefix or world.LAST_TOKEN_N[number] == prefix[-1]


def test_the_policy_is_a_causal_transformer_over_prompt_and_completion(small_world):
    policy = copy.deepcopy(small_world.reference).double()
    torch.nn.init.normal_(policy.value_head.weight)
    choices_PC, values_PN = policy()
    for prompt, number in [(0, 0), (1, 27), (0, 333), (1, 1023)]:
        tokens_L = world.TOKENS_SL[number]
        input_L = torch.cat([torch.tensor([world.NUM_TOKENS + prompt]), tokens_L[:-1]])
        hidden = (policy.embed(input_L) + policy.place.weight).unsqueeze(0)
        for block in policy.blocks:
            query, key, value = block.query_key_value(block.attention_norm(hidden)).chunk(3, dim=-1)
            heads = [each.view(1, world.LENGTH, 2, 16).transpose(1, 2) for each in (query, key, value)]
            attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
            hidden = hidden + block.mix(attended)
            hidden = hidden + block.narrow(F.gelu(block.widen(block.feed_norm(hidden))))
        hidden = policy.norm(hidden)[0]
        logprobs_L = torch.log_softmax(policy.head(hidden), -1)[torch.arange(world.LENGTH), tokens_L]
        torch.testing.assert_close(choices_PC[prompt, world.CHOICES_SL[number]], logprobs_L)
        torch.testing.assert_close(values_PN[prompt, world.NODES_SL[number]], policy.value_head(hidden)[:, 0])


def test_the_probabilities_of_all_completions_sum_to_one(small_world):
    for logprobs_PS in (world.sequence_logprobs(small_world.reference), small_world.optimum_logprobs_PS):
        assert logprobs_PS.shape == (world.NUM_PROMPTS, world.NUM_SEQUENCES)
        torch.testing.assert_close(logprobs_PS.exp().sum(1), torch.ones(world.NUM_PROMPTS, dtype=torch.float64))


def test_beta_times_the_kl_equals_the_gap_to_the_optimal_objective(small_world):
    reference_PS = world.sequence_logprobs(small_world.reference)
    rewards_PS = small_world.rewards_PS.double()

    def regularised(logprobs_PS):
        gain_PS = rewards_PS - world.BETA * (logprobs_PS - reference_PS)
        return float((logprobs_PS.exp() * gain_PS).sum(1).mean())

    assert small_world.kl(small_world.optimum_logprobs_PS) == pytest.approx(0, abs=1e-12)
    best = regularised(small_world.optimum_logprobs_PS)
    for logprobs_PS in (reference_PS, torch.log_softmax(3 * reference_PS, dim=1)):
        assert world.BETA * small_world.kl(logprobs_PS) == pytest.approx(best - regularised(logprobs_PS), rel=1e-6)


def test_a_seed_reproduces_the_world_without_the_global_generator_of_torch(small_world):
    before = torch.random.get_rng_state()
    again = world.World.made_from(seed=7)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(again.rewards_PS, small_world.rewards_PS)
    assert torch.equal(again.optimum_logprobs_PS, small_world.optimum_logprobs_PS)
    assert not torch.equal(world.World.made_from(seed=8).rewards_PS, small_world.rewards_PS)


def test_token_probabilities_of_the_optimum_multiply_to_those_of_completions(small_world):
    choices_PC = small_world.optimum_PC()
    each_PN = choices_PC.exp().unflatten(1, (world.NUM_NODES, world.NUM_TOKENS)).sum(-1)
    torch.testing.assert_close(each_PN, torch.ones_like(each_PN))
    torch.testing.assert_close(world.of_sequences(choices_PC), small_world.optimum_logprobs_PS, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("lag", "began", "expected"), [("0", 40, 2), ("4", 40, 6), ("16", 8, 10), ("first", 40, 42), ("uniform", 40, 43)]
)
def test_the_age_of_a_sample_is_its_lag_at_the_draw_plus_later_updates(lag, began, expected):
    assert training.age(lag, began, began + 2) == expected


@pytest.mark.parametrize(("lag", "version"), [("0", 20), ("1", 19), ("4", 16), ("16", 4)])
def test_the_behaviour_policy_is_lag_updates_old(lag, version):
    past = deque((torch.tensor(float(number)) for number in range(20)), maxlen=training.MAX_LAG)
    assert float(training.behaviour(lag, torch.tensor(20.0), past)) == version


def test_the_first_policy_samples_until_an_old_enough_policy_exists():
    assert float(training.behaviour("16", torch.tensor(2.0), deque([torch.tensor(0.0), torch.tensor(1.0)]))) == 0
    assert float(training.behaviour("16", torch.tensor(0.0), deque())) == 0


def test_uniform_behaviour_ignores_the_policy():
    torch.testing.assert_close(
        training.behaviour("uniform", torch.randn(2, 8), deque()).exp(), torch.full((2, 8), 0.25)
    )


def test_samples_come_from_the_behaviour_policy(small_world):
    choices_PC, _ = small_world.reference()
    random = torch.Generator().manual_seed(0)
    counts_PS = torch.zeros(world.NUM_PROMPTS, world.NUM_SEQUENCES, dtype=torch.float64)
    for _ in range(200):
        prompts_G, sequences_GK = training.sample(choices_PC.detach(), random)
        flat = prompts_G[:, None] * world.NUM_SEQUENCES + sequences_GK
        counts_PS += torch.bincount(flat.flatten(), minlength=counts_PS.numel()).view_as(counts_PS)
    share_PS = world.sequence_logprobs(small_world.reference).exp()
    expected_PS = share_PS * counts_PS.sum(1, keepdim=True)
    # Pearson's statistic with S - 1 degrees of freedom has mean S - 1 and standard deviation sqrt(2 (S - 1))
    statistic_P = ((counts_PS - expected_PS).square() / expected_PS).sum(1)
    freedom = world.NUM_SEQUENCES - 1
    assert bool(((statistic_P - freedom).abs() < 5 * math.sqrt(2 * freedom)).all())


def test_loss_inputs_have_the_tokens_of_their_samples(small_world):
    draw = draw_from(uniform(), small_world)
    choices_PC, values_PN = small_world.reference()
    groups = torch.tensor([90, 3])
    inputs = training.loss_inputs(draw, groups, 3 * choices_PC, values_PN + 1, lag=5)
    assert set(inputs.lag_T.tolist()) == {5}
    prompt_B = draw.prompts_G[groups].repeat_interleave(GROUP_SIZE)
    sequence_B = draw.sequences_GK[groups].flatten()
    reference_B = world.sequence_logprobs(small_world.reference)[prompt_B, sequence_B].float()
    length = world.LENGTH * math.log(world.NUM_TOKENS)
    torch.testing.assert_close(inputs.sum_per_sequence(inputs.logprobs_T), 3 * reference_B)
    torch.testing.assert_close(inputs.sum_per_sequence(inputs.proximal_logprobs_T), 2 * reference_B)
    torch.testing.assert_close(inputs.sum_per_sequence(inputs.reference_logprobs_T), reference_B)
    torch.testing.assert_close(
        inputs.sum_per_sequence(inputs.behaviour_logprobs_T), torch.full_like(reference_B, -length)
    )
    assert torch.equal(inputs.rewards_B, small_world.rewards_PS[prompt_B, sequence_B])
    assert torch.equal(inputs.prompt_B, prompt_B)
    assert inputs.group_B.tolist() == [0] * GROUP_SIZE + [1] * GROUP_SIZE
    assert bool((inputs.values_T == 1).all())
    assert bool((inputs.old_values_T == 0).all())


@pytest.mark.parametrize("name", list(ROWS))
def test_every_row_trains_on_every_kind_of_data(name, small_world):
    reference_PS = world.sequence_logprobs(small_world.reference)
    for lag in ("0", "first", "uniform"):
        outcome = training.train(small_world, ROWS[name], lag, seed=0, num_draws=2)
        assert outcome.kl is not None
        assert outcome.kl != small_world.kl(reference_PS)
        assert math.isfinite(outcome.reward)


def test_trajectory_balance_converges_on_uniform_data_and_naive_ppo_does_not(small_world):
    start = small_world.kl(world.sequence_logprobs(small_world.reference))
    balanced = training.train(small_world, ROWS["trajectory_balance"], "uniform", seed=0, num_draws=20)
    naive = training.train(small_world, ROWS["off_policy_ppo+naive"], "uniform", seed=0, num_draws=20)
    assert balanced.kl < 0.1 * start
    assert naive.kl > 0.3 * start


def test_a_run_that_becomes_non_finite_has_no_metrics(small_world):
    row = replace(ROWS["trajectory_balance"], learning_rate=1e30)
    outcome = training.train(small_world, row, "0", seed=0, num_draws=2)
    assert outcome == training.Outcome(None, None)
    assert page.means([training.Outcome(0.5, 1.0), outcome]) == {"kl": None, "reward": None}
    assert page.means([training.Outcome(0.5, 1.0), training.Outcome(0.7, 2.0)]) == {"kl": 0.6, "reward": 1.5}


def test_rows_of_later_calls_are_merged_with_stored_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(off_policy, "KEPT", tmp_path / "off_policy.json")
    monkeypatch.setattr(off_policy, "RESULTS", tmp_path)
    outcomes = {lag: [training.Outcome(0.5, 1.0)] * len(off_policy.SEEDS) for lag in training.LAGS}
    *most, last = ROWS
    off_policy.Kept.read().add(dict.fromkeys(most, outcomes), 600.0)
    off_policy.Kept.read().write_page()
    assert not (tmp_path / "off_policy.md").exists(), "the page must not be written while a row is missing"
    better = {lag: [training.Outcome(None, None)] * len(off_policy.SEEDS) for lag in training.LAGS}
    off_policy.Kept.read().add({last: outcomes, most[0]: better}, 60.0)
    kept = off_policy.Kept.read()
    assert list(kept.outcomes) == list(ROWS)
    assert kept.outcomes[most[0]] == better
    assert kept.minutes == 11
    kept.write_page()
    assert "in 11 minutes" in (tmp_path / "off_policy.md").read_text()
