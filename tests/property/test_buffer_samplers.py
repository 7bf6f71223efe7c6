"""Random schedules of replay under every sampler, and weighted draws that empty the index."""

import math
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.full import pick
from tests.world.buffer import InProcessBuffer, make_trajectory, weights_of

from leeway.buffer import protocol as p
from leeway.buffer.config import BufferConfig
from leeway.common.run import RunFacts
from leeway.common.staleness import PolicyVersion, StalenessConfig

SAMPLERS = ("fifo", "uniform", "reward_softmax", "prioritised", "on_policy_share")
GROUPS_PER_STEP = 2


@st.composite
def configs(draw):
    """Draw any valid settings."""
    sampler = draw(st.sampled_from(SAMPLERS))
    replay_sampler = draw(st.sampled_from(sorted(set(SAMPLERS) - {"on_policy_share"})))
    in_order = (replay_sampler if sampler == "on_policy_share" else sampler) == "fifo"
    max_uses = draw(st.sampled_from([1, 2, 3] if in_order else [1, 2, 3, "unlimited"]))
    return BufferConfig(
        sampler=sampler,
        replay_sampler=replay_sampler,
        on_policy_share=draw(st.sampled_from([0.0, 0.5, 1.0])),
        max_uses=max_uses,
        capacity_trajectories=draw(st.sampled_from([24, 1000])),
    )


class Replay(RuleBasedStateMachine):
    """Invariants of every schedule under every sampler."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="buffer-samplers-"))
        self.buffer = None
        self.patched = pytest.MonkeyPatch()
        self.patched.setattr("leeway.buffer.groups.MAX_ATTEMPTS", 1_000_000)

    @initialize(
        updates_per_step=st.sampled_from([1, 2, 4]),
        max_lag=st.sampled_from([1, 3, "unbounded"]),
        group_size=st.integers(1, 2),
        config=configs(),
    )
    def start(self, updates_per_step, max_lag, group_size, config):
        max_lag = max_lag if max_lag == "unbounded" else max_lag * updates_per_step + updates_per_step - 1
        facts = RunFacts(
            run_id="r", seed=1, num_prompts=5, group_size=group_size, groups_per_step=GROUPS_PER_STEP,
            vocab_size=64, max_tokens=64, staleness=StalenessConfig(max_lag=max_lag, max_actor_lag=0),
            updates_per_step=updates_per_step,
        )  # fmt: skip
        self.buffer = InProcessBuffer(self.folder, facts, config)
        self.updates_per_step = updates_per_step
        self.bound = math.inf if max_lag == "unbounded" else max_lag
        self.buffer.hello("actor-0")
        self.seq = self.acknowledged = 0
        self.incarnation = -1
        self.checkpoint = (0, 0)
        self.recorded = {}
        self.begin()

    # --- actors -----------------------------------------------------------------------------------

    @rule(num=st.integers(1, 6), data=st.data())
    def generate(self, num, data):
        """Generate whole groups, some without a reward or with a sample missing."""
        for lease in self.buffer.lease("actor-0", num):
            for index in lease.sample_indices:
                if data.draw(st.integers(0, 9)) == 0:
                    continue
                row = make_trajectory(
                    lease,
                    index,
                    seq=self.seq,
                    version=PolicyVersion(*self.buffer.status().newest),
                    reward=data.draw(st.sampled_from([0.0, 0.5, 1.0, 1.0, None])),
                    num_completion_tokens=data.draw(st.sampled_from([1, 2, 4, 9, 30, 60])),
                )
                self.seq += 1
                self.acknowledged += self.buffer.push([row]) == ["committed"]

    @rule()
    def expire(self):
        self.buffer.now_s += 61.0
        self.buffer.expire()

    # --- learner ----------------------------------------------------------------------------------

    def begin(self):
        self.step, self.version = self.checkpoint
        self.incarnation += 1
        self.buffer.begin(self.version, self.step, session=f"learner-{self.incarnation}")
        self.drawn = []
        for step in sorted(self.recorded):
            if not self.is_within_bound(step, self.version + (step - self.step - 1) * self.updates_per_step):
                self.forget_from(step)
                break

    def is_within_bound(self, step, version):
        """Return whether all groups recorded for this step may be used for training at this version."""
        last, groups = version + self.updates_per_step - 1, self.recorded[step].group_ids
        return self.buffer.store.read(
            lambda tx: all(last - tx.groups.require(each).oldest_effective(tx.state) <= self.bound for each in groups)
        )

    def forget_from(self, first):
        """Forget the recorded draws from this step on."""
        self.recorded = {step: reply for step, reply in self.recorded.items() if step < first}

    @rule()
    def restart_learner(self):
        self.begin()

    @rule()
    def draw(self):
        step, version = self.step + len(self.drawn) + 1, self.version + len(self.drawn) * self.updates_per_step
        if len(self.drawn) == 2:
            return
        before = self.pending()
        is_redone = step in self.recorded and self.is_within_bound(step, version)
        if not is_redone:
            self.forget_from(step)
        reply, _ = self.buffer.draw(step, version, incarnation=self.incarnation)
        if is_redone:
            assert reply.record_ids == self.recorded[step].record_ids
        if not reply.ready:
            return
        assert self.buffer.draw(step, version, incarnation=self.incarnation)[0].record_ids == reply.record_ids
        if step not in before:
            assert set(reply.group_ids).isdisjoint(group for groups in before.values() for group in groups)
        self.recorded[step] = reply
        self.drawn.append(step)
        assert len(reply.group_ids) == GROUPS_PER_STEP
        if step not in before:
            assert len(set(reply.group_ids)) == GROUPS_PER_STEP
        groups = self.buffer.store.read(lambda tx: [tx.groups.require(group) for group in reply.group_ids])
        state = self.buffer.store.read(lambda tx: tx.state)
        last = version + self.updates_per_step - 1
        assert all(last - group.oldest_effective(state) <= self.bound for group in groups)
        records = [record for group in groups for record in group.records if record in reply.record_ids]
        assert records == reply.record_ids, "a draw has whole groups, with samples in order"
        if step not in before:
            assert all(set(np.array(group.records)[group.usable()]) <= set(records) for group in groups)

    def pending(self):
        return self.buffer.store.read(
            lambda tx: {step: tx.draws.require(step).group_ids for step in tx.state.pending_draws}
        )

    @rule(num_skipped=st.sampled_from([0, 0, 0, 1, 2, 4]))
    def finish(self, num_skipped):
        """Finish a step and skip some of its last updates; steps drawn ahead then start at a lower version."""
        if not self.drawn:
            return
        version = self.version + max(0, self.updates_per_step - num_skipped)
        for _ in range(2):
            self.buffer.finish(self.drawn[0], version, incarnation=self.incarnation, skipped=version == self.version)
        self.step, self.version = self.drawn.pop(0), version
        self.buffer.publish(self.version, self.incarnation)
        for step in self.drawn:
            again, _ = self.buffer.draw(step, version, incarnation=self.incarnation)
            assert again.record_ids == self.recorded[step].record_ids

    @rule(num_steps=st.integers(1, 5), restarts=st.sampled_from([False, False, True]), data=st.data())
    def train(self, num_steps, restarts, data):
        """Train for some steps without faults; then a new learner may redo the steps after the checkpoint."""
        for _ in range(num_steps):
            self.generate(4, data)
            self.draw()
            self.finish(0)
        if restarts:
            self.begin()
            self.draw()

    @rule()
    def write_checkpoint(self):
        if not any(step <= self.step for step in self.pending()):
            self.buffer.ask(p.CheckpointDurable(self.step, self.incarnation), p.Done)
            self.checkpoint = (self.step, self.version)
            self.recorded = {step: reply for step, reply in self.recorded.items() if step > self.step}

    # --- service ----------------------------------------------------------------------------------

    @rule()
    def restart_service(self):
        self.buffer.restart()

    @rule(config=configs())
    def change_sampler(self, config):
        self.buffer.config = config.model_copy(
            update={"capacity_trajectories": self.buffer.config.capacity_trajectories}
        )
        self.buffer.restart()
        self.buffer.status()

    @invariant()
    def check_consistency(self):
        if self.buffer is None:
            return
        assert self.buffer.faults() == []
        status = self.buffer.status()
        assert status.ledger["gap"] == 0
        assert status.ledger["committed"] == self.acknowledged
        self.buffer.store.read(self.check_ready_groups)

    def check_ready_groups(self, tx):
        ready = [tx.groups.require(group_id) for _, group_id in self.buffer.core.groups.index.ready]
        assert all(group.phase == "ready" and group.usable() for group in ready)

    def teardown(self):
        if self.buffer is not None:
            self.buffer.close()
        shutil.rmtree(self.folder)
        self.patched.undo()


TestReplay = Replay.TestCase
TestReplay.settings = settings(
    max_examples=pick(20, 40),
    stateful_step_count=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


@given(weights=st.dictionaries(st.integers(0, 2**40), st.floats(-1e6, 1e6), max_size=60))
def test_a_weighted_draw_returns_every_item_once_and_heavy_items_early(weights):
    left = dict(weights)
    for item in weights_of(weights).choose(100, np.random.default_rng(0)):
        assert left.pop(item) >= max(left.values(), default=-math.inf) - 800
    assert not left
