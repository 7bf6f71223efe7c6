"""Random schedules of an actor, learner restarts and shards that come and go, over the real rules and real stores."""

import itertools
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from buffer import protocol as p
from buffer.config import BufferConfig
from buffer.sharding.client import ShardedClient
from buffer.sharding.division import admission_shares, apportion, divide_step, owned_prompts
from common.run import RunFacts
from common.staleness import PolicyVersion, StalenessConfig, effective_version
from tests.full import pick
from tests.trajectories import decode
from tests.world.buffer import make_trajectory
from tests.world.shards import InProcessShard, Shard

PATIENCE_S = 0.05
LONG_S = 20.0


class ScheduledShards(RuleBasedStateMachine):
    """What every schedule must keep: closed ledgers, the age bound, single use, equal redoing, and progress."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="buffer-shards-"))
        self.shards = []

    @initialize(
        num_shards=st.integers(2, 3),
        updates_per_step=st.sampled_from([1, 2, 4]),
        spare_lag=st.integers(0, 5),
        group_size=st.integers(1, 2),
        spare=st.integers(0, 2),
        on_stale=st.sampled_from(["drop", "drop", "wait"]),
    )
    def start(self, num_shards, updates_per_step, spare_lag, group_size, spare, on_stale):
        groups_per_step = num_shards + spare
        max_lag = updates_per_step - 1 + spare_lag
        staleness = StalenessConfig(max_lag=max_lag, max_actor_lag=min(1, spare_lag), on_stale=on_stale)
        config = BufferConfig(capacity_trajectories=1000, max_attempts=1_000_000)
        for shard in range(num_shards):
            facts = RunFacts(
                run_id="r", seed=1, num_prompts=12, group_size=group_size, groups_per_step=groups_per_step,
                vocab_size=16, max_tokens=16, staleness=staleness, shard=shard, num_shards=num_shards,
                updates_per_step=updates_per_step,
            )  # fmt: skip
            self.shards.append(Shard(self.folder / f"shard-{shard}", facts, config))
        self.facts, self.config, self.max_lag, self.staleness = facts, config, max_lag, staleness
        self.sessions = itertools.count()
        self.acknowledged = 0
        self.pushed = []
        self.leased = []
        self.drawn = {}
        self.finished = set()
        self.checkpoint = (0, 0)
        self.learner_restarted = False
        self.actor = self.client("actor", "actor-0")
        self.actor.connect()
        self.learner = None
        self.begin()

    def client(self, role, name):
        session = str(next(self.sessions))
        clients = [InProcessShard(shard, role=role, name=name, session=session) for shard in self.shards]
        return ShardedClient(clients, self.config, patience_s=PATIENCE_S)

    # --- shards -----------------------------------------------------------------------------------

    @rule(shard=st.integers(0, 2))
    def cut_off(self, shard):
        """One at most: with all of them gone everything rightly waits."""
        if all(each.is_up and each.goes_down_at is None for each in self.shards):
            self.shards[shard % len(self.shards)].cut_off()

    @rule(shard=st.integers(0, 2), kind=st.sampled_from([p.DrawRequest, p.PlanRequest, p.StepFinished, p.Push]))
    def cut_off_at(self, shard, kind):
        """Between two messages of one conversation."""
        if all(each.is_up and each.goes_down_at is None for each in self.shards):
            self.shards[shard % len(self.shards)].goes_down_at = kind

    @rule()
    def come_back(self):
        for shard in self.shards:
            shard.restart()

    @rule(seconds=st.sampled_from([1.0, 61.0]))
    def pass_time(self, seconds):
        for shard in self.shards:
            if shard.is_up:
                shard.buffer.now_s += seconds
                shard.buffer.expire()

    # --- the actor --------------------------------------------------------------------------------

    @rule(max_groups=st.integers(1, 5))
    def lease(self, max_groups):
        """Leases that stay open for a while."""
        leases = self.actor.lease(max_groups).result(LONG_S).leases
        assert all(lease.lease_id % len(self.shards) == lease.group_id % len(self.shards) for lease in leases)
        self.leased += leases

    @rule(max_groups=st.integers(1, 30), is_newest=st.booleans())
    def work(self, max_groups, is_newest=True):
        """Leases are generated and pushed, by any version that they allow; some answers come later, or never."""
        self.lease(max_groups)
        leases, self.leased = self.leased, []
        for lease in leases:
            newest = PolicyVersion(*self.published)
            low = min(lease.min_version, newest.version)
            version = newest if is_newest else newest._replace(version=low)
            for index in lease.sample_indices:
                self.pushed.append(self.actor.push(make_trajectory(lease, index, seq=0, version=version)))
        self.count_answers()

    def count_answers(self):
        answered = [future for future in self.pushed if future.done()]
        self.pushed = [future for future in self.pushed if not future.done()]
        outcomes = [future.result().outcome for future in answered]
        assert "quarantined" not in outcomes
        self.acknowledged += outcomes.count("committed")

    # --- the learner ------------------------------------------------------------------------------

    def begin(self):
        for shard in self.shards:
            if not shard.is_up:
                shard.restart()  # a learner begins when all shards answer
            shard.goes_down_at = None
        if self.learner is not None:
            self.learner.close(0.0)
        self.learner = self.client("learner", "learner")
        self.learner.connect()
        self.step, self.version = self.checkpoint
        reply = self.learner.begin_incarnation(self.version, self.step).result(LONG_S)
        for shard in self.shards:
            assert shard.buffer.status().ledger["gap"] == 0
        self.incarnation, self.resumed_at = reply.incarnation, reply.resumed_at
        self.batch = None
        self.publish()

    @rule()
    def restart_learner(self):
        self.learner_restarted = True
        before = self.incarnation
        self.begin()
        assert self.incarnation == before + 1

    @rule()
    def restart_learner_that_had_begun_in_one_shard_only(self):
        """Numbers of incarnations must agree all the same."""
        self.learner_restarted = True
        shard = self.shards[self.step % len(self.shards)]
        if shard.is_up:
            shard.buffer.ask(
                p.BeginIncarnation(f"dead-{next(self.sessions)}", *reversed(self.checkpoint)), p.IncarnationReply
            )
            self.begin()

    @rule(wait_s=st.sampled_from([0.0, 0.1]))
    def draw(self, wait_s=0.1):
        step = self.step + 1
        batch = self.learner.draw(step, self.version, self.incarnation, self.facts.groups_per_step, wait_s)
        batch = batch.result(LONG_S)
        if not batch.ready:
            assert batch.waiting_for
            return
        assert self.batch is None or self.batch == batch.record_ids, "the same step gave other records"
        assert len(set(batch.group_ids)) == self.facts.groups_per_step
        assert [group % len(self.shards) for group in batch.group_ids] == sorted(
            group % len(self.shards) for group in batch.group_ids
        )
        assert batch.ledger["gap"] == 0
        for record, row in zip(batch.record_ids, decode(batch.body), strict=True):
            oldest = effective_version(row.spans[0].version, self.resumed_at)
            assert self.version + self.facts.updates_per_step - 1 - oldest <= self.max_lag
            assert self.drawn.setdefault(record, step) == step or self.learner_restarted
        self.batch = batch.record_ids

    @rule(num_skipped=st.integers(0, 4), is_published=st.booleans())
    def finish(self, num_skipped, is_published):
        if self.batch is None:
            return
        num_applied = max(0, self.facts.updates_per_step - num_skipped)
        self.step, self.version = self.step + 1, self.version + num_applied
        self.learner.step_finished(self.step, self.version, skipped=num_applied == 0).result(LONG_S)
        self.finished |= set(self.batch) if num_applied else set()
        self.batch = None
        if is_published:
            self.publish()

    @rule()
    def publish(self):
        self.published = (self.incarnation, self.version)
        self.learner.published(self.incarnation, self.version).result(LONG_S)

    @rule(num_steps=st.integers(1, 3))
    def train(self, num_steps):
        """Undisturbed steps; what is leased already stays open."""
        held, self.leased = self.leased, []
        for _ in range(num_steps):
            self.publish()
            self.work(100)
            self.draw()
            self.finish(0, True)
        self.leased = held

    @rule()
    def write_checkpoint(self):
        self.learner.checkpoint_durable(self.step).result(LONG_S)
        self.checkpoint = (self.step, self.version)

    # --- what must hold ---------------------------------------------------------------------------

    @invariant()
    def every_store_is_in_order(self):
        for shard in self.shards:
            assert shard.buffer.status().ledger["gap"] == 0
            assert shard.buffer.faults() == []

    def teardown(self):
        if self.shards:
            self.progress()
            self.actor.close(0.0)
            self.learner.close(0.0)
            for shard in self.shards:
                shard.buffer.close()
        shutil.rmtree(self.folder)

    def progress(self):
        """From wherever the schedule ended, willing shards, actor and learner get on, and the sums are right."""
        self.come_back()
        self.publish()
        for _ in range(4):
            for _ in range(12):
                self.pass_time(61.0)
                self.work(100)
                self.draw()
                if self.batch is not None:
                    break
            assert self.batch is not None, (
                self.learner.draw(self.step + 1, self.version, self.incarnation, self.facts.groups_per_step, 0.0)
                .result(LONG_S)
                .waiting_for
            )
            self.finish(0, True)
        self.count_answers()
        status = self.learner.status().result(LONG_S)
        assert status.silent_shards == []
        assert status.ledger["gap"] == 0
        assert status.ledger["committed"] == self.acknowledged
        assert status.ledger["trained"] == len(self.finished)
        if self.staleness.on_stale == "wait" and not self.learner_restarted:
            assert status.ledger["dropped_stale"] == 0


TestScheduledShards = ScheduledShards.TestCase
TestScheduledShards.settings = settings(
    max_examples=pick(15, 30),
    stateful_step_count=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


@pytest.fixture
def schedule():
    """`schedule(**settings)`: the machine above, to be driven by hand."""
    machine = ScheduledShards()

    def start(**settings):
        machine.start(
            **{"num_shards": 2, "updates_per_step": 1, "group_size": 1, "spare": 0, "on_stale": "drop", **settings}
        )
        return machine

    yield start
    machine.teardown()


def test_a_shard_takes_samples_of_versions_that_it_missed_while_it_was_down(schedule):
    run = schedule(spare_lag=3)
    run.lease(2)
    run.cut_off(1)
    run.train(2)
    assert run.step == 2
    run.work(1)
    run.come_back()
    run.count_answers()
    assert run.pushed == []


@pytest.mark.parametrize("updates_per_step", [1, 2, 4])
def test_under_wait_no_step_leaves_an_open_group_of_any_shard_behind(schedule, updates_per_step):
    run = schedule(spare_lag=2 * updates_per_step, updates_per_step=updates_per_step, on_stale="wait")
    run.lease(1)
    run.train(6)
    assert 0 < run.step < 6
    run.work(1)
    run.train(6)
    assert run.step >= 6


supplies = st.dictionaries(
    st.integers(0, 5),
    st.builds(
        lambda due, more, capacity: p.PlanReply(len(due) + more, capacity, {at: due.count(at) for at in due}, {}),
        st.lists(st.integers(0, 4), max_size=8),
        st.integers(0, 5),
        st.integers(1, 10),
    ),
    min_size=1,
)


@given(supplies, st.integers(1, 12), st.booleans())
def test_a_divided_step_is_whole_and_asks_nobody_for_more_than_it_has(supplies, num_groups, in_order):
    plan = divide_step(num_groups, supplies, in_order=in_order)
    limits = {shard: min(supply.num_eligible, supply.capacity) for shard, supply in supplies.items()}
    assert sum(plan.values()) == (num_groups if sum(limits.values()) >= num_groups else 0)
    assert all(0 < num <= limits[shard] for shard, num in plan.items())


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8).filter(any), st.integers(0, 200))
def test_shares_add_up_and_grow_with_weight(weights, total):
    shares = apportion(total, weights)
    assert sum(shares) == total
    for (weight, share), (other, less) in itertools.combinations(zip(weights, shares, strict=True), 2):
        assert share >= less if weight > other else share <= less if weight < other else abs(share - less) <= 1


@given(st.integers(1, 8), st.integers(1, 300), st.integers(8, 64))
def test_prompts_and_slots_are_divided_without_rest(num_shards, num_prompts, capacity):
    shares = admission_shares(num_prompts, num_shards, capacity)
    facts = RunFacts(
        run_id="r", seed=1, num_prompts=num_prompts, group_size=1, groups_per_step=1, vocab_size=2, max_tokens=1,
        staleness=StalenessConfig(), num_shards=num_shards,
    )  # fmt: skip
    owned = [len(owned_prompts(facts.model_copy(update={"shard": shard}))) for shard in range(num_shards)]
    assert (sum(shares), sum(owned)) == (capacity, num_prompts)
    assert [share > 0 for share in shares] == [num > 0 for num in owned]


def test_prompts_cannot_be_divided_among_more_shards_than_slots():
    with pytest.raises(ValueError, match="use fewer shards"):
        admission_shares(1000, 8, 7)
