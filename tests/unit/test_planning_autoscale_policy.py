"""The scaling policy: pools grow by the shortfall if generation is slower than training; noise changes nothing."""

import itertools

import pytest
from benchmarks.autoscale_parts.simulation import ScalingSimulation
from benchmarks.lib.lengths import lognormal

from leeway.planning.autoscale import (
    ABOVE,
    BELOW,
    PATIENCE_TO_GROW,
    PATIENCE_TO_SHRINK,
    SETTLE_STEPS,
    PoolState,
    ScalingPolicy,
    StepFacts,
)
from leeway.planning.costs import TokenTime
from tests.unit.test_planning_simulator import G, K, world

LAW = TokenTime(4e-3, 6e-5)
SLOTS = 16
GROUPS = 32


def pool(count, name="fast", law=LAW, most=16):
    return PoolState(name, count, count, SLOTS, law, most)


def facts(tokens, train_s=1.0, slots_used=1.0, samples=G * K, waited=0.0):
    return StepFacts(tokens, 10.0, train_s, slots_used, samples, waited)


def gen_s(count, tokens):
    return G * K * tokens * LAW.seconds(SLOTS, 0) / (SLOTS * count)


def tokens_for(count, seconds):
    """Return the completion length at which `count` actors generate a step in `seconds`."""
    return seconds / gen_s(count, 1.0)


def test_a_pool_grows_by_the_shortfall_after_enough_steps():
    policy, state = ScalingPolicy(), [pool(2)]
    observed = [policy.observe(state, facts(tokens_for(2, 2.1))) for _ in range(PATIENCE_TO_GROW + 4)]
    advice = next(each for each in observed if each is not None)
    assert observed.index(advice) >= PATIENCE_TO_GROW - 1
    assert (advice.pool, advice.count) == ("fast", 5)
    assert "3 more actors in pool 'fast' would raise the rate by 110%" in advice.text


def test_a_pool_shrinks_after_one_fewer_actor_would_have_sufficed_for_many_steps():
    policy, state = ScalingPolicy(), [pool(4)]
    observed = [policy.observe(state, facts(tokens_for(3, 0.8))) for _ in range(PATIENCE_TO_SHRINK + 5)]
    found = [each for each in observed if each is not None]
    assert [each.count for each in found] == [3]
    assert observed.index(found[0]) >= PATIENCE_TO_SHRINK - 1


def test_a_pool_does_not_shrink_while_the_learner_waits_for_batches():
    policy, state = ScalingPolicy(), [pool(4)]
    waiting = facts(tokens_for(3, 0.8), waited=0.4)
    assert not any(policy.observe(state, waiting) for _ in range(3 * PATIENCE_TO_SHRINK))


def test_gradual_growth_of_lengths_is_followed_within_three_steps():
    policy = ScalingPolicy()
    times = [0.9 + 0.018 * step for step in range(40)]
    needed = next(step for step, seconds in enumerate(times) if seconds > 1.0)
    observed = [policy.observe([pool(4)], facts(tokens_for(4, seconds))) for seconds in times]
    advice = next(each for each in observed if each is not None)
    assert needed <= observed.index(advice) <= needed + 3
    assert advice.count == 5


def test_the_mean_length_stays_positive_after_a_sudden_drop():
    policy = ScalingPolicy()
    for tokens in (1000.0, 1000.0, 1.0, 1.0, 1.0):
        policy.observe([pool(4)], facts(tokens))
        assert policy._tokens > 0.0


@pytest.mark.parametrize("off", [-BELOW / 2, 0.0, ABOVE / 2])
def test_deviations_within_the_band_give_no_advice(off):
    policy, state = ScalingPolicy(), [pool(4)]
    assert not any(policy.observe(state, facts(tokens_for(4, 1.0 + off))) for _ in range(60))


def test_no_advice_is_given_until_new_actors_work_and_settle():
    policy = ScalingPolicy()
    slow = facts(tokens_for(2, 2.1))
    while policy.observe([pool(2)], slow) is None:
        pass
    coming = PoolState("fast", 2, 5, SLOTS, LAW, 16)
    assert not any(policy.observe([coming], slow) for _ in range(30))
    assert not any(policy.observe([pool(5)], slow) for _ in range(SETTLE_STEPS))


def test_the_advice_names_another_remedy_if_actors_do_not_help():
    policy = ScalingPolicy()
    empty = [policy.observe([pool(2)], facts(tokens_for(2, 2.1), slots_used=0.5)) for _ in range(8)]
    advice = next(each for each in empty if each is not None)
    assert (advice.pool, advice.count) == ("", 0)
    assert "increase weight_sync.max_lag; more actors would barely raise the rate" in advice.text
    policy = ScalingPolicy()
    full = [policy.observe([pool(2, most=2)], facts(tokens_for(2, 2.1))) for _ in range(8)]
    assert "no pool can grow" in next(each for each in full if each is not None).text


def test_the_fastest_pool_grows_and_the_slowest_shrinks():
    slow = TokenTime(4 * LAW.base, 4 * LAW.per_sample)
    state = [pool(2), pool(2, "slow", slow)]
    policy = ScalingPolicy()
    long = facts(4 * tokens_for(2, 1.0))
    assert next(filter(None, (policy.observe(state, long) for _ in range(9)))).pool == "fast"
    policy = ScalingPolicy()
    short = facts(tokens_for(2, 0.5))
    assert next(filter(None, (policy.observe(state, short) for _ in range(40)))).pool == "slow"


def test_the_last_actor_of_a_pool_stays_and_another_pool_shrinks():
    slow = TokenTime(4 * LAW.base, 4 * LAW.per_sample)
    short = facts(tokens_for(4, 0.3))
    policy, state = ScalingPolicy(), [pool(3), pool(1, "slow", slow)]
    advice = next(filter(None, (policy.observe(state, short) for _ in range(40))))
    assert (advice.kind, advice.pool, advice.count) == ("shrink", "fast", 2)
    policy, state = ScalingPolicy(), [pool(1), pool(1, "slow", slow)]
    assert not any(policy.observe(state, short) for _ in range(40))


def autoscaled_run(seed, *, doubles=True):
    """Simulate a run whose lengths double from step 20 to 60; return actors per step and relative final throughput."""
    lengths = lognormal(230, 0.6, 2000, 0.5)
    start = world(engines=3, slots=SLOTS, lengths=lengths, step_s=GROUPS / G, max_lag=8, groups=GROUPS)
    policy, counts, rates = ScalingPolicy(), [], []
    before, desired = [0, 0.0, 0.0], [3]

    def after_step(step):
        simulation.stretch = 1.0 + (min(1.0, max(0.0, (step - 20) / 40)) if doubles else 0.0)
        found, count = simulation.so_far(), simulation.count()
        samples, tokens = found.num_generated - before[0], found.num_tokens - before[1]
        waited = max(0.0, 1.0 - GROUPS / G / (simulation.now_s - before[2]))
        before[:] = [found.num_generated, found.num_tokens, simulation.now_s]
        state = PoolState("a", count, desired[0], SLOTS, start.pools[0].law, 16)
        seen = StepFacts(tokens / max(1, samples), 10.0, GROUPS / G, 1.0, GROUPS * K, waited)
        advice = policy.observe([state], seen)
        if advice is not None and advice.pool:
            desired[0] = advice.count
            simulation.scale(advice.count, start_s=2.0)
        counts.append(count)
        rates.append(simulation.now_s)

    simulation = ScalingSimulation(start, seed, after_step)
    simulation.run(160)
    return counts, 60 * (GROUPS / G) / (rates[-1] - rates[-61])


@pytest.mark.parametrize("seed", range(4))
def test_a_pool_keeps_up_while_lengths_double_with_at_most_one_reversal(seed):
    counts, rate = autoscaled_run(seed)
    changes = [after - before for before, after in itertools.pairwise(counts) if after != before]
    assert counts[-1] > counts[0]
    assert sum((one > 0) != (two > 0) for one, two in itertools.pairwise(changes)) <= 1
    assert rate >= 0.95, "the learner hardly waits"


def test_constant_lengths_give_a_constant_pool():
    counts, _ = autoscaled_run(9, doubles=False)
    assert len({count for count in counts[40:]}) == 1
