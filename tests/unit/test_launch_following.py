"""Pools that follow: they grow where generation is the slower side, by what it lacks, and noise moves nothing."""

import itertools

import pytest

from benchmarks.autoscale_parts.simulation import ScalingSimulation
from benchmarks.lib.lengths import lognormal
from planning.autoscale import (
    ABOVE,
    BELOW,
    PATIENCE_TO_GROW,
    PATIENCE_TO_SHRINK,
    SETTLES,
    Following,
    PoolState,
    StepFacts,
)
from planning.costs import TokenTime
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
    """Lengths with which so many actors generate a step in this time."""
    return seconds / gen_s(count, 1.0)


def test_it_grows_by_what_generation_lacks_once_it_is_sure():
    following, state = Following(), [pool(2)]
    looks = [following.look(state, facts(tokens_for(2, 2.1))) for _ in range(PATIENCE_TO_GROW + 4)]
    advice = next(each for each in looks if each is not None)
    assert looks.index(advice) >= PATIENCE_TO_GROW - 1
    assert (advice.pool, advice.count) == ("fast", 5)
    assert "3 more actors in pool 'fast' would raise the rate by 110%" in advice.text


def test_it_shrinks_where_one_less_is_enough_for_long():
    following, state = Following(), [pool(4)]
    looks = [following.look(state, facts(tokens_for(3, 0.8))) for _ in range(PATIENCE_TO_SHRINK + 5)]
    found = [each for each in looks if each is not None]
    assert [each.count for each in found] == [3]
    assert looks.index(found[0]) >= PATIENCE_TO_SHRINK - 1


def test_no_actor_is_too_many_for_a_learner_that_waits_for_each_batch():
    following, state = Following(), [pool(4)]
    waiting = facts(tokens_for(3, 0.8), waited=0.4)
    assert not any(following.look(state, waiting) for _ in range(3 * PATIENCE_TO_SHRINK))


def test_lengths_that_grow_step_by_step_are_followed_within_three_steps():
    following = Following()
    times = [0.9 + 0.018 * step for step in range(40)]
    asked = next(step for step, seconds in enumerate(times) if seconds > 1.0)
    looks = [following.look([pool(4)], facts(tokens_for(4, seconds))) for seconds in times]
    advice = next(each for each in looks if each is not None)
    assert asked <= looks.index(advice) <= asked + 3
    assert advice.count == 5


def test_lengths_that_fall_at_once_leave_something_to_reckon_with():
    following = Following()
    for tokens in (1000.0, 1000.0, 1.0, 1.0, 1.0):
        following.look([pool(4)], facts(tokens))
        assert following._tokens > 0.0


@pytest.mark.parametrize("off", [-BELOW / 2, 0.0, ABOVE / 2])
def test_within_the_band_nothing_happens(off):
    following, state = Following(), [pool(4)]
    assert not any(following.look(state, facts(tokens_for(4, 1.0 + off))) for _ in range(60))


def test_after_a_change_it_looks_away_until_the_actors_are_there_and_work():
    following = Following()
    slow = facts(tokens_for(2, 2.1))
    while following.look([pool(2)], slow) is None:
        pass
    coming = PoolState("fast", 2, 5, SLOTS, LAW, 16)
    assert not any(following.look([coming], slow) for _ in range(30))
    assert not any(following.look([pool(5)], slow) for _ in range(SETTLES))


def test_where_no_actor_helps_it_says_what_would():
    following = Following()
    empty = [following.look([pool(2)], facts(tokens_for(2, 2.1), slots_used=0.5)) for _ in range(8)]
    advice = next(each for each in empty if each is not None)
    assert (advice.pool, advice.count) == ("", 0)
    assert "weight_sync.max_lag would raise the rate, more actors would hardly" in advice.text
    following = Following()
    full = [following.look([pool(2, most=2)], facts(tokens_for(2, 2.1))) for _ in range(8)]
    assert "no pool may grow" in next(each for each in full if each is not None).text


def test_the_fastest_pool_grows_and_the_slowest_shrinks():
    slow = TokenTime(4 * LAW.base, 4 * LAW.per_sample)
    state = [pool(2), pool(2, "slow", slow)]
    following = Following()
    long = facts(4 * tokens_for(2, 1.0))
    assert next(filter(None, (following.look(state, long) for _ in range(9)))).pool == "fast"
    following = Following()
    short = facts(tokens_for(2, 0.5))
    assert next(filter(None, (following.look(state, short) for _ in range(40)))).pool == "slow"


def test_the_last_actor_of_a_pool_stays_and_another_pool_shrinks():
    slow = TokenTime(4 * LAW.base, 4 * LAW.per_sample)
    short = facts(tokens_for(4, 0.3))
    following, state = Following(), [pool(3), pool(1, "slow", slow)]
    advice = next(filter(None, (following.look(state, short) for _ in range(40))))
    assert (advice.kind, advice.pool, advice.count) == ("shrink", "fast", 2)
    following, state = Following(), [pool(1), pool(1, "slow", slow)]
    assert not any(following.look(state, short) for _ in range(40))


def followed(seed, *, doubles=True):
    """A simulated run whose lengths double between the steps 20 and 60; who worked at each step, and the end."""
    lengths = lognormal(230, 0.6, 2000, 0.5)
    start = world(engines=3, slots=SLOTS, lengths=lengths, step_s=GROUPS / G, max_lag=8, groups=GROUPS)
    following, counts, rates = Following(), [], []
    before, wanted = [0, 0.0, 0.0], [3]

    def after_step(step):
        simulation.stretch = 1.0 + (min(1.0, max(0.0, (step - 20) / 40)) if doubles else 0.0)
        found, there = simulation.so_far(), simulation.count()
        samples, tokens = found.num_generated - before[0], found.num_tokens - before[1]
        waited = max(0.0, 1.0 - GROUPS / G / (simulation.now_s - before[2]))
        before[:] = [found.num_generated, found.num_tokens, simulation.now_s]
        state = PoolState("a", there, wanted[0], SLOTS, start.pools[0].law, 16)
        advice = following.look([state], StepFacts(tokens / max(1, samples), 10.0, GROUPS / G, 1.0, GROUPS * K, waited))
        if advice is not None and advice.pool:
            wanted[0] = advice.count
            simulation.scale(advice.count, start_s=2.0)
        counts.append(there)
        rates.append(simulation.now_s)

    simulation = ScalingSimulation(start, seed, after_step)
    simulation.run(160)
    return counts, 60 * (GROUPS / G) / (rates[-1] - rates[-61])


@pytest.mark.parametrize("seed", range(4))
def test_while_lengths_double_it_keeps_up_with_at_most_one_step_back(seed):
    counts, rate = followed(seed)
    changes = [after - before for before, after in itertools.pairwise(counts) if after != before]
    assert counts[-1] > counts[0]
    assert sum((one > 0) != (two > 0) for one, two in itertools.pairwise(changes)) <= 1
    assert rate >= 0.95, "the learner hardly waits"


def test_lengths_that_stay_change_nothing_twice():
    counts, _ = followed(9, doubles=False)
    assert len({count for count in counts[40:]}) == 1
