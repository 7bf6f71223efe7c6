"""A simulated run reaches each of the three throughput bounds if nothing else limits it; no run exceeds a bound."""

import itertools
from dataclasses import replace

import pytest
from benchmarks.lib.lengths import constant, lognormal

from leeway.common.staleness import StalenessContract
from leeway.planning.search import bounds_of, figures_of
from leeway.planning.simulator import Simulation
from leeway.planning.world import Costs
from tests.unit.test_planning_simulator import LAW, LONG_TAIL, G, K, world


def test_full_engines_reach_the_generation_bound():
    made = world(engines=3, max_lag="unbounded")
    bounds = bounds_of(made, 1e-9)
    assert bounds.generation == pytest.approx(3 * 16 / (100 * LAW.seconds(16, 0)), rel=1e-9)
    assert bounds.rate == bounds.generation
    long_tail = world(engines=3, lengths=LONG_TAIL, max_lag="unbounded")
    found = Simulation(long_tail, seed=1).run(2000, warm_up=500)
    assert found.samples_per_s == pytest.approx(bounds_of(long_tail, 1e-9).rate, rel=0.03)


def test_a_slow_learner_reaches_the_training_bound():
    bounds = bounds_of(world(engines=4, step_s=10.0, costs=Costs(between_steps_s=2.0)), 10.0)
    assert bounds.rate == bounds.training == pytest.approx(G * K / 12.0)


def test_reference_scoring_counts_in_the_training_bound():
    made = world(engines=4, step_s=10.0, score_token_s=1e-3)
    bound = G * K / (10.0 + 1e-3 * G * K * (10 + 100))
    assert bounds_of(made, 10.0).rate == pytest.approx(bound, rel=1e-3)
    assert Simulation(made).run(60, warm_up=20).samples_per_s <= bound * (1 + 1e-9)


def test_a_reused_sample_is_scored_once():
    made = world(engines=4, step_s=10.0, score_token_s=1e-3, max_lag="unbounded")
    reused = replace(made, buffer=made.buffer.model_copy(update={"sampler": "uniform", "max_uses": 4}))
    step_s = 10.0 + 1e-3 * G * K * (10 + 100) / 4
    assert bounds_of(reused, 10.0).training == pytest.approx(G * K / step_s)


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_admission_reaches_the_staleness_bound_if_engines_have_room(max_lag):
    law_of_one_sample = type(LAW)(4e-3)  # a token takes the same time at any batch size
    costs = Costs(publish_s=0.2, fetch_s=0.1, pause_s=0.05, between_steps_s=0.1)
    made = world(engines=20, slots=64, law=law_of_one_sample, step_s=0.05, max_lag=max_lag, costs=costs)
    found, bounds = Simulation(made).run(200, warm_up=100), bounds_of(made, 0.05)
    assert bounds.rate == bounds.staleness
    assert found.samples_per_s <= bounds.rate * (1 + 1e-9)
    assert found.samples_per_s >= 0.5 * bounds.rate, "groups wait for others of their step, and for publication"
    if max_lag == 0:
        assert found.samples_per_s == pytest.approx(bounds.rate, rel=1e-9)


@pytest.mark.parametrize(("explained", "max_lag"), [(0.0, 4), (0.8, 1), (0.8, 8)])
def test_the_staleness_bound_includes_the_cost_of_drops(explained, max_lag):
    """A bound from only the mean of the longest lengths would be 1.3, 2.8 and 2.9 times the simulated throughput."""
    made = world(
        engines=20, slots=64, law=type(LAW)(4e-3), step_s=0.05, max_lag=max_lag,
        lengths=lognormal(100, 0.9, 2000, explained),
    )  # fmt: skip
    found, bounds = Simulation(made).run(1500, warm_up=700), bounds_of(made, 0.05)
    assert bounds.rate == bounds.staleness
    assert found.drop_share > 0.05
    assert 0.75 * bounds.rate < found.samples_per_s < 1.15 * bounds.rate


def test_the_longest_sample_of_a_step_sets_the_bound_if_steps_wait():
    made = world(
        engines=20, slots=64, law=type(LAW)(4e-3), step_s=0.05, max_lag=4, on_stale="wait",
        lengths=lognormal(100, 0.9, 2000),
    )  # fmt: skip
    found, bounds = Simulation(made).run(1500, warm_up=700), bounds_of(made, 0.05)
    assert bounds.rate == bounds.staleness
    assert 0.6 * bounds.rate < found.samples_per_s < bounds.rate


def test_no_simulated_run_exceeds_a_bound():
    for slots, engines, step_s, max_lag in itertools.product((8, 24), (1, 4), (0.05, 1.0), (0, 2, 8)):
        made = world(engines=engines, slots=slots, lengths=LONG_TAIL, step_s=step_s, max_lag=max_lag)
        found = Simulation(made, seed=7).run(150, warm_up=50)
        assert found.samples_per_s <= 1.08 * bounds_of(made, step_s).rate, "means of 100 steps are noisy"


@pytest.mark.parametrize(("max_lag", "uses"), [("unbounded", 3), (16, 3), (4, 2)])
def test_with_replay_a_bound_counts_each_use_of_a_sample(max_lag, uses):
    replay = {"sampler": "uniform", "max_uses": uses}
    made = world(engines=2, lengths=LONG_TAIL, step_s=0.05, max_lag=max_lag, sampler=replay)
    bounds, found = bounds_of(made, 0.05), Simulation(made, seed=7).run(300, warm_up=100)
    once = bounds_of(world(engines=2, lengths=LONG_TAIL, step_s=0.05, max_lag="unbounded"), 0.05)
    assert bounds.generation == pytest.approx(uses * once.generation)
    assert found.samples_per_s <= 1.08 * bounds.rate
    assert max_lag == 4 or found.samples_per_s > 1.5 * once.generation


def test_with_an_unbounded_lag_and_single_use_four_steps_may_be_outstanding():
    law_of_one_sample = type(LAW)(4e-3)
    made = world(engines=20, slots=64, law=law_of_one_sample, step_s=0.05, max_lag="unbounded")
    found, bounds = Simulation(made).run(200, warm_up=100), bounds_of(made, 0.05)
    assert bounds.rate == bounds.staleness
    assert bounds.rate == pytest.approx(made.contract.capacity() * K / (100 * 4e-3 + 0.05), rel=0.01)
    assert 0.5 * bounds.rate < found.samples_per_s <= bounds.rate * (1 + 1e-9)


def test_versions_published_faster_than_applied_do_not_limit_throughput():
    made = world(engines=8, step_s=1.0, max_lag=64, costs=Costs(publish_s=0.2, fetch_s=0.2, pause_s=0.02))
    many = replace(made, contract=StalenessContract(made.contract.config, G, 16))
    found = Simulation(many).run(200, warm_up=50)
    assert found.samples_per_s == pytest.approx(bounds_of(many, 1.0).rate) == G * K, "engines skip old versions"


def test_length_statistics_of_groups_match_the_distribution():
    alike = figures_of(constant(50), 8)
    assert (alike.mean, alike.at_a_moment, alike.longest_of(1)) == (50, 25, 50)
    tail = figures_of(lognormal(100, 1.0, 100_000), 8)
    assert tail.mean == pytest.approx(100 * 2.718281828**0.5, rel=0.05)
    assert tail.longest_of(1) > 3 * tail.mean
    alike = figures_of(lognormal(100, 1.0, 100_000, explained=1.0), 8)
    assert alike.longest_of(1) == pytest.approx(alike.mean, rel=0.02)
