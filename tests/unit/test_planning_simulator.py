"""A simulated run agrees with closed forms (generation, training, Little's law) and keeps its policies' guarantees."""

from dataclasses import replace

import pytest
from benchmarks.lib.lengths import constant, lognormal

from leeway.actors.config import ActorsConfig
from leeway.buffer.config import BufferConfig
from leeway.common.staleness import StalenessConfig, StalenessContract
from leeway.planning.costs import TokenTime
from leeway.planning.simulator import Simulation
from leeway.planning.world import Costs, EnginePool, World

LAW = TokenTime(4e-3, 6e-5)
K, G = 8, 4
FREE = Costs()


def world(
    *, slots=16, engines=1, length=100, lengths=None, step_s=1e-9, max_lag=4, law=LAW, costs=FREE, sampler=None,
    pools=None, kv_tokens=float("inf"), groups=G, score_token_s=0.0, **staleness,
):  # fmt: skip
    config = ActorsConfig(group_size=K, max_running_samples=slots, max_new_tokens=4096)
    return World(
        pools or (EnginePool("a", engines, law, config, kv_tokens),),
        StalenessContract(StalenessConfig(max_lag=max_lag, **staleness), groups),
        BufferConfig(**(sampler or {})),
        lengths or constant(length),
        lambda tokens: step_s,
        num_prompts=1000,
        prompt_tokens=10,
        costs=costs,
        score_token_s=score_token_s,
    )


def test_full_engines_reach_the_throughput_of_the_cost_model():
    found = Simulation(world(engines=3, max_lag="unbounded")).run(200, warm_up=50)
    assert found.samples_per_s == pytest.approx(3 * 16 / (100 * LAW.seconds(16, 0)), rel=1e-9)
    assert found.slots_used == pytest.approx(1.0, rel=1e-9)
    assert found.binds == "generation"


def test_a_slow_learner_limits_throughput():
    found = Simulation(world(engines=4, step_s=10.0)).run(60, warm_up=20)
    assert found.samples_per_s == pytest.approx(G * K / 10.0, rel=1e-9)
    assert found.learner_busy == pytest.approx(1.0, rel=1e-9)
    assert found.binds == "training"


def test_a_learner_that_is_always_busy_is_the_bottleneck():
    found = Simulation(world(engines=4, step_s=10.0, costs=Costs(between_steps_s=2.0))).run(60, warm_up=20)
    assert found.learner_busy == pytest.approx(10.0 / 12.0, rel=1e-9)
    assert found.binds == "training"


@pytest.mark.parametrize("max_lag", [1, 2, 5])
def test_admission_obeys_littles_law(max_lag):
    """The outstanding groups use the whole capacity of the contract: throughput = capacity * K / residence."""
    made = world(engines=20, step_s=3.0, max_lag=max_lag)
    found = Simulation(made).run(80, warm_up=30)
    residence_s = found.residence_s / sum(found.lags.values())
    assert found.samples_per_s == pytest.approx(made.contract.capacity() * K / residence_s, rel=1e-9)


def test_synchronous_training_alternates_with_generation():
    """With max_lag = 0, the groups of a step are generated after the previous step's weights are served."""
    costs = Costs(publish_s=0.5, fetch_s=0.25, pause_s=0.125)
    found = Simulation(world(slots=G * K, step_s=3.0, max_lag=0, costs=costs)).run(40, warm_up=10)
    # samples are leased when the weights are published, and start when the engine serves these weights
    turn_s = 3.0 + 0.5 + 0.25 + 0.125 + 100 * LAW.seconds(G * K, 0)
    assert found.seconds / found.num_steps == pytest.approx(turn_s, rel=1e-9)
    assert set(found.lags) == {0}
    assert found.binds in ("staleness", "weights")


STEP_TOKENS = G * K * (10 + 100)


def test_a_step_scores_each_sample_once():
    found = Simulation(world(engines=4, step_s=10.0, score_token_s=1e-3)).run(60, warm_up=20)
    assert found.seconds / found.num_steps == pytest.approx(10.0 + 1e-3 * STEP_TOKENS, rel=1e-9)
    assert found.learner_busy == pytest.approx(1.0, rel=1e-9)


def test_groups_that_do_not_divide_the_slots_leave_no_slot_empty():
    found = Simulation(world(slots=2 * K - 1, max_lag="unbounded")).run(300, warm_up=100)
    assert found.slots_used == pytest.approx(1.0, rel=1e-9)


LONG_TAIL = lognormal(100, 1.0, 2000, 0.65)


@pytest.mark.parametrize("on_stale", ["drop", "wait"])
@pytest.mark.parametrize("max_lag", [0, 1, 4])
def test_no_group_is_used_past_the_bound_or_dropped_if_the_step_waits(max_lag, on_stale):
    made = world(engines=4, lengths=LONG_TAIL, step_s=0.3, max_lag=max_lag, on_stale=on_stale)
    found = Simulation(made, seed=max_lag).run(150)
    assert max(found.lags) <= max_lag
    assert found.num_steps == 150
    if on_stale == "wait":
        assert found.num_dropped == 0


class AdmissionWatcher(Simulation):
    """Checks after each drop of groups that no engine waits while admission is open."""

    num_checks = 0

    def _draw(self):
        before = self._found.num_dropped
        super()._draw()
        if self._found.num_dropped > before and not self._is_closed():
            self.num_checks += 1
            assert not [each for each in self._engines if each.closed_since_s is not None and not each.is_requesting]


def test_engines_use_the_room_of_dropped_groups_before_the_next_step():
    watched = AdmissionWatcher(world(engines=8, lengths=LONG_TAIL, step_s=0.3, max_lag=1, groups=16), seed=1)
    watched.run(100)
    assert watched.num_checks > 10


def test_runs_repeat_with_their_seed():
    first, again, other = (Simulation(world(engines=3, lengths=LONG_TAIL), seed).run(60) for seed in (1, 1, 2))
    assert first == again
    assert first.seconds != other.seconds


def test_replay_uses_each_group_up_to_max_uses():
    often = {"sampler": "uniform", "max_uses": 3}
    found = Simulation(world(lengths=LONG_TAIL, sampler=often, max_lag="unbounded")).run(200, warm_up=50)
    assert found.num_trained == 150 * G * K
    assert found.num_generated < found.num_trained / 2


def test_replay_generates_only_replacements_of_exhausted_groups():
    often = {"sampler": "uniform", "max_uses": 3, "replay_steps": 2.0}
    many = world(engines=8, lengths=LONG_TAIL, sampler=often, max_lag="unbounded")
    found = Simulation(many).run(200, warm_up=50)
    assert found.num_generated == pytest.approx(150 * G * K / 3, rel=0.1)


def test_prompts_of_used_groups_that_are_dropped_as_stale_are_not_reissued():
    simulation = Simulation(world(lengths=LONG_TAIL, sampler={"sampler": "uniform", "max_uses": 4}, max_lag=4))
    dropped, returned = [], []
    drop_stale, give_back = simulation._buffer.drop_stale, simulation._prompts.give_back

    def record_drop(version):
        found = list(drop_stale(version))
        dropped.extend(found)
        return found

    def record_return(prompt):
        returned.append(prompt)
        give_back(prompt)

    simulation._buffer.drop_stale, simulation._prompts.give_back = record_drop, record_return
    simulation.run(150)
    assert any(group.uses for group in dropped)
    assert returned == [group.prompt for group in dropped if not group.uses]


def test_groups_of_the_current_step_do_not_block_generation():
    often = {"sampler": "uniform", "max_uses": 2, "replay_steps": 1.0}
    found = Simulation(world(engines=8, step_s=10.0, sampler=often, max_lag="unbounded")).run(60, warm_up=20)
    assert found.learner_busy == pytest.approx(1.0, abs=0.01)


def test_a_faster_pool_generates_more_and_prices_add_up():
    config = ActorsConfig(group_size=K, max_running_samples=16, max_new_tokens=4096)
    pools = (
        EnginePool("slow", 2, LAW, config, price=1.0),
        EnginePool("fast", 1, TokenTime(2e-3, 3e-5), config, price=4.0),
    )
    found = Simulation(world(pools=pools, max_lag="unbounded")).run(300, warm_up=100)
    assert found.samples_per_s == pytest.approx(4 * 16 / (100 * LAW.seconds(16, 0)), rel=0.01)
    assert found.price == 6.0
    assert found.price_per_1000 == pytest.approx(6.0 / 3600 * 1000 / found.samples_per_s)


class CacheWatcher(Simulation):
    """Records the cache usage of an engine at each advance, because contexts only grow between two advances."""

    def _advance(self, engine):
        super()._advance(engine)
        self.record(engine.clock.kv_tokens)


def test_a_small_cache_makes_samples_wait():
    simulation, peaks = CacheWatcher(world(kv_tokens=5 * 112, max_lag="unbounded")), []
    simulation.record = peaks.append
    found = simulation.run(60, warm_up=20)
    assert 4 / 16 <= found.slots_used <= 5 / 16, "five samples fit, and some space is kept free"
    assert 4 * 110 <= max(peaks) <= 5 * 110 * (1 + 1e-9)
    assert found.binds == "generation"


def test_a_run_stops_at_its_time_limit():
    assert Simulation(world(step_s=1e6)).run(10, limit_s=100.0).num_steps == 0


# --- dispatch -------------------------------------------------------------------------------------


def simulated(dispatch, unlike, max_lag=2, on_stale="wait", num_prompts=256):
    """Simulate eight engines, two of them twice as fast if `unlike`. Prompts explain 65 % of the spread of lengths."""
    law, config = TokenTime(0.04, 0.001), ActorsConfig(group_size=8, max_running_samples=16, max_new_tokens=2000)
    pools = [EnginePool("slow", 6, law, config), EnginePool("fast", 2, TokenTime(0.02, 0.0005), config)]
    world = World(
        tuple(pools) if unlike else (replace(pools[0], count=8),),
        StalenessContract(StalenessConfig(max_lag=max_lag, on_stale=on_stale), 16),
        BufferConfig(dispatch=dispatch),
        lognormal(200, 0.9, 2000, 0.65),
        lambda _: 0.5,
        num_prompts=num_prompts,
    )
    return Simulation(world).run(96, 48)


@pytest.mark.parametrize("max_lag", [0, 2])
def test_long_samples_on_fast_engines_raise_throughput_if_steps_wait(max_lag):
    ahead, in_order = (simulated(each, True, max_lag).samples_per_s for each in ("by_deadline", "in_order"))
    assert ahead > 1.3 * in_order


def test_overlong_samples_move_to_fast_engines_if_lengths_are_unknown(monkeypatch):
    """Prompts do not repeat, and no token is generated twice."""
    ahead, in_order = (simulated(each, True, num_prompts=1_000_000) for each in ("by_deadline", "in_order"))
    assert ahead.samples_per_s > 1.25 * in_order.samples_per_s
    assert 0.02 < ahead.num_requeued / ahead.num_generated < 0.15
    assert ahead.num_tokens / ahead.num_generated == pytest.approx(
        in_order.num_tokens / in_order.num_generated, rel=0.05
    )
    monkeypatch.setattr("leeway.planning.dispatch.REQUEUE_SHARE", 1e9)
    staying = simulated("by_deadline", True, num_prompts=1_000_000)
    assert (staying.num_requeued, in_order.num_requeued) == (0, 0)
    assert staying.samples_per_s < 1.1 * in_order.samples_per_s


@pytest.mark.parametrize(("explained", "of_the_bound", "of_in_order"), [(0.65, 0.75, 1.12), (1.0, 0.95, 1.15)])
def test_longest_first_comes_near_the_work_bound_if_samples_exceed_slots(explained, of_the_bound, of_in_order):
    """A synchronous step takes at least the time of its tokens over all slots, and the time of its longest sample."""
    law, config = TokenTime(0.04, 0.001), ActorsConfig(group_size=8, max_running_samples=8, max_new_tokens=2000)

    def shares(dispatch):
        contract = StalenessContract(StalenessConfig(max_lag=0, on_stale="drop"), 16)
        lengths = lognormal(200, 0.9, 2000, explained)
        simulation, bounds_s = (
            Simulation(World((EnginePool("a", 4, law, config),), contract, BufferConfig(dispatch=dispatch), lengths,
                             lambda _: 1e-6, num_prompts=128)),
            [],
        )  # fmt: skip
        finish_step = simulation._on_step

        def on_step(what):
            made = [length for group in what[0] for length in group.lengths]
            bounds_s.append(max(sum(made) * law.seconds(8, 0) / 32, max(made) * law.seconds(1, 0)))
            finish_step(what)

        simulation._on_step = on_step
        found = simulation.run(60, 24)
        return sum(bounds_s[24:]) / found.seconds, found.samples_per_s

    (share, rate), (_, before) = shares("longest_first"), shares("in_order")
    assert share > of_the_bound
    assert rate > of_in_order * before


def test_equal_engines_get_prompts_in_order():
    assert simulated("by_deadline", False) == simulated("in_order", False)


def test_long_samples_on_fast_engines_raise_throughput_if_stale_groups_are_dropped():
    ahead, in_order = (simulated(each, True, on_stale="drop").samples_per_s for each in ("by_deadline", "in_order"))
    assert ahead > in_order
