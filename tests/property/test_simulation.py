"""Whole runs in one process under virtual time: thousands of seeds, each of which keeps every invariant.

Actors stop, are killed, join late, continue after their replacement, and receive weights late, repeatedly or never.
Messages are lost, sent again and reordered. The learner is killed, resumes from a checkpoint, and skips updates and
publications. The buffer service restarts. The invariants are in `tests.simulation.witness`.
"""

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.full import pick
from tests.simulation.core import Environment
from tests.simulation.knobs import NO_FAULTS, Knobs, choose_faults, choose_knobs
from tests.simulation.mutations import MUTATIONS
from tests.simulation.seeds import SimulationFailed, Totals, simulate, simulate_with

from leeway.buffer.groups import Groups
from leeway.common.staleness import StalenessConfig, StalenessContract

NUM_POLICY_SEEDS = pick(3_000, 100_000)
NUM_SYSTEM_SEEDS = pick(80, 1_000)


@pytest.fixture(scope="module")
def environment():
    env = Environment()
    yield env
    env.close()


@pytest.mark.timeout(900)
def test_no_random_schedule_trains_a_token_beyond_the_bound():
    totals = Totals.of(range(NUM_POLICY_SEEDS))
    assert totals.num_updates > 2 * totals.num_seeds
    assert totals.num_at_bound > totals.num_seeds / 10, "the bound was hardly ever reached: the schedules are too easy"
    assert totals.num_dropped > totals.num_seeds / 1000


@pytest.mark.timeout(900)
def test_the_real_buffer_keeps_every_invariant_in_thousands_of_schedules(environment):
    totals = Totals.of(range(NUM_SYSTEM_SEEDS), environment)
    assert totals.num_updates > 2 * totals.num_seeds


def _refill_settings(seed, refill):
    """Return settings with which a run sets groups of equal rewards aside, and fault rates."""
    chance = Random(seed)
    knobs = choose_knobs(chance)._replace(group_size=chance.choice((2, 2, 3)), refill=refill)
    return knobs, choose_faults(chance)


@settings(max_examples=pick(25, 600), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1), refill=st.sampled_from([0.3, 1.0, 2.5]))
def test_no_step_has_a_group_of_equal_rewards_below_the_refill_limit(environment, seed, refill):
    knobs, faults = _refill_settings(seed, refill)
    simulate_with(seed, knobs, faults, environment)


def test_refilling_sets_groups_aside_and_a_buffer_without_it_is_detected(environment, monkeypatch):
    def run(seed):
        knobs, faults = _refill_settings(seed, 1.0)
        return simulate_with(seed, knobs, faults, environment)

    assert sum(run(seed).num_set_aside for seed in range(20)) > 20
    monkeypatch.setattr(Groups, "set_aside_uninformative", lambda self, tx: None)
    with pytest.raises(SimulationFailed) as failed:
        _ = [run(seed) for seed in range(10)]
    assert failed.value.invariant == "informative"


@pytest.mark.parametrize("name", MUTATIONS)
def test_an_invariant_breaks_without_this_check(name):
    mutation = MUTATIONS[name]
    failed = mutation.first_failure()
    assert failed.invariant == mutation.breaks
    mutation.run(failed.seed)  # the same schedule passes with the check


ALSO_IN_BUFFER = ["admission ignores the capacity", "any request may start", "only the first update of a step counts"]


@pytest.mark.parametrize("name", ALSO_IN_BUFFER)
def test_the_real_buffer_also_breaks_without_this_check(name, environment):
    assert MUTATIONS[name].first_failure(environment).invariant == MUTATIONS[name].breaks


@pytest.mark.parametrize("depth", ["policy", "system"])
def test_equal_seeds_give_identical_runs(depth, environment):
    env = environment if depth == "system" else None
    for seed in range(20):
        first, again = simulate(seed, env, trace=True), simulate(seed, env, trace=True)
        assert first.trace
        assert (first.trace_hash, first.trace) == (again.trace_hash, again.trace)
    assert simulate(1, env, trace=True).trace_hash != simulate(2, env, trace=True).trace_hash


def test_a_failing_seed_reports_the_command_that_reproduces_it():
    failed = MUTATIONS["an engine applies any version"].first_failure()
    assert f"--seed {failed.seed} --trace" in str(failed)
    assert "learner 0 draw(1, 0, 0, " in str(failed), "the trace must be part of the message"


def _force_contract(knobs, monkeypatch):
    """Install a contract with invalid settings, which its constructor would refuse."""
    contract = StalenessContract.__new__(StalenessContract)
    contract.config = StalenessConfig.model_construct(**{name: getattr(knobs, name) for name in (
        "max_lag", "max_actor_lag", "publish_every", "on_stale")})  # fmt: skip
    contract.groups_per_step, contract.updates_per_step = knobs.groups_per_step, knobs.updates_per_step
    contract.actor_lag = knobs.max_actor_lag
    monkeypatch.setattr(Knobs, "contract", property(lambda self: contract))


@pytest.mark.parametrize(
    ("max_lag", "actor_lag", "publish_every", "updates"),
    [(0, 0, 2, 1), (1, 0, 3, 1), (0, 1, 1, 1), (2, 1, 3, 1), (0, 0, 1, 2), (3, 1, 2, 3), (2, 0, 1, 4)],
)
@pytest.mark.parametrize("on_stale", ["drop", "wait"])
def test_settings_that_hang_are_refused_and_one_more_version_suffices(
    max_lag, actor_lag, publish_every, updates, on_stale, monkeypatch
):
    def knobs(max_lag):
        return Knobs(max_lag, actor_lag, publish_every, updates, 2, 1, on_stale, 2, actor_lag)

    with pytest.raises(ValueError, match="max_lag"):
        _ = knobs(max_lag).contract
    with monkeypatch.context() as forced:
        _force_contract(knobs(max_lag), forced)
        with pytest.raises(SimulationFailed) as failed:
            simulate_with(1, knobs(max_lag), NO_FAULTS)
    assert failed.value.invariant == "progress"
    for seed in range(20):
        simulate_with(seed, knobs(max_lag + 1), NO_FAULTS)


def test_seeds_cover_all_kinds_of_settings():
    chosen = [choose_knobs(Random(seed)) for seed in range(500)]
    for name in ("publish_every", "updates_per_step", "groups_per_step", "on_stale", "max_actor_lag"):
        assert len({getattr(knobs, name) for knobs in chosen}) >= 2
    rooms = {knobs.contract.capacity() // knobs.groups_per_step for knobs in chosen}
    assert {1, 2, 3} <= rooms
