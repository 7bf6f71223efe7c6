"""Random schedules of actors, learner restarts and service restarts over the real rules and a real store."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.full import pick
from tests.world.buffer import InProcessBuffer, make_trajectory

from leeway.buffer import protocol as p
from leeway.buffer import schema
from leeway.buffer.config import BufferConfig
from leeway.common.run import RunFacts
from leeway.common.staleness import PolicyVersion, StalenessConfig, effective_version

NAMES = ("a", "b")


class ScheduledBuffer(RuleBasedStateMachine):
    """Invariants of every schedule: a closed ledger, the lag bound, single use, and progress."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="buffer-property-"))
        self.buffer = None
        self.patched = pytest.MonkeyPatch()

    @initialize(
        updates_per_step=st.sampled_from([1, 2, 4]),
        spare_lag=st.integers(0, 5),
        group_size=st.integers(1, 3),
        groups_per_step=st.integers(1, 3),
        on_stale=st.sampled_from(["drop", "wait"]),
        refill=st.sampled_from([0.0, 0.5, 2.0]),
        prompt_law=st.sampled_from(["epoch", "epoch", "uniform", "posterior"]),
        data=st.data(),
    )
    def start(self, updates_per_step, spare_lag, group_size, groups_per_step, on_stale, refill, prompt_law, data):
        max_lag = updates_per_step - 1 + spare_lag
        staleness = StalenessConfig(
            max_lag=max_lag, max_actor_lag=data.draw(st.integers(0, min(1, spare_lag))), on_stale=on_stale
        )
        facts = RunFacts(
            run_id="r", seed=1, num_prompts=5, group_size=group_size, groups_per_step=groups_per_step,
            vocab_size=16, max_tokens=16, staleness=staleness, updates_per_step=updates_per_step,
        )  # fmt: skip
        config = BufferConfig(
            capacity_trajectories=4 * (max_lag + 2) * groups_per_step * group_size,
            refill_uninformative=refill,
            prompt_law=prompt_law,
        )
        self.patched.setattr("leeway.buffer.groups.MAX_ATTEMPTS", 1_000_000)
        self.patched.setattr("leeway.planning.prompts.LEAST_TAU", data.draw(st.sampled_from([2.0, 20.0])))
        self.buffer = InProcessBuffer(self.folder, facts, config)
        self.max_lag, self.staleness, self.updates_per_step = max_lag, staleness, updates_per_step
        self.epochs = dict.fromkeys(NAMES, 0)
        self.seqs = dict.fromkeys(NAMES, 0)
        self.leases = {name: [] for name in NAMES}
        self.sent = []
        self.acknowledged = 0
        self.used_at = {}
        self.incarnation = -1
        self.learner_restarted = self.rolled_back = self.skipped = False
        self.checkpoint = (0, 0)
        self.version = 0
        self.drawn = False
        for name in NAMES:
            self.restart_actor(name)
        self.begin()

    # --- actors -----------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES))
    def restart_actor(self, name):
        self.epochs[name] += 1
        assert self.buffer.hello(name, f"session-{self.epochs[name]}").epoch == self.epochs[name]
        self.seqs[name] = 0

    @rule(name=st.sampled_from(NAMES), max_groups=st.integers(1, 4))
    def lease(self, name, max_groups):
        epoch = self.epochs[name]
        leases = self.buffer.lease(name, max_groups, epoch=epoch)
        self.leases[name] += [(lease, epoch) for lease in leases]
        assert len(leases) <= max_groups
        for lease in leases:
            self.check_group_size(lease)

    def check_group_size(self, lease):
        size = self.buffer.facts.group_size
        if lease.attempt == 1:
            assert lease.sample_indices == list(range(size))
        group = self.buffer.store.read(lambda tx: tx.groups.require(lease.group_id))
        assert len(group.sample_states) == size > max(lease.sample_indices)

    @rule(name=st.sampled_from(NAMES), leave_out=st.integers(0, 1), is_newest=st.booleans())
    def work(self, name, leave_out, is_newest):
        """Generate all samples of the actor's new leases, or all but one sample per lease, with any valid version."""
        self.lease(name, 100)
        for lease, epoch in self.leases[name]:
            if epoch != self.epochs[name]:
                continue
            newest = PolicyVersion(*self.buffer.status().newest)
            version = newest if is_newest else newest._replace(version=min(lease.min_version, newest.version))
            rows = []
            for index in lease.sample_indices[leave_out:]:
                fields = {"seq": self.seqs[name], "actor": name, "epoch": epoch, "version": version}
                rows.append(make_trajectory(lease, index, reward=float(self.seqs[name] % 3 == 0), **fields))
                self.seqs[name] += 1
            if rows:
                self.sent += rows
                self.acknowledged += self.buffer.push(rows).count("committed")
        self.leases[name] = self.leases[name][-2:]

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def push(self, name, data):
        """Push a sample of one of the latest leases, sometimes without a reward or malformed."""
        if not self.leases[name]:
            return
        lease, epoch = data.draw(st.sampled_from(self.leases[name][-6:]))
        index = data.draw(st.sampled_from(lease.sample_indices))
        reward = data.draw(st.sampled_from([1.0, 0.5, 1.0, None, float("nan")]))
        row = make_trajectory(lease, index, seq=self.seqs[name], actor=name, epoch=epoch, reward=reward)
        self.seqs[name] += epoch == self.epochs[name]
        self.sent.append(row)
        self.acknowledged += self.buffer.push([row]) == ["committed"]

    @rule(data=st.data())
    def resend(self, data):
        if self.sent:
            row = data.draw(st.sampled_from(self.sent))
            expected = ["duplicate"] if row.epoch == self.epochs[row.actor] else ["fenced"]
            assert self.buffer.push([row]) == expected

    @rule(name=st.sampled_from(NAMES))
    def give_up(self, name):
        if self.leases[name]:
            lease, epoch = self.leases[name][-1]
            message = p.GiveUp(name, epoch, lease.lease_id, lease.attempt, lease.sample_indices[:1], "reward failed")
            self.buffer.ask(message, p.Done)

    @rule(name=st.sampled_from(NAMES), goes_on=st.booleans(), is_newest=st.booleans(), data=st.data())
    def requeue(self, name, goes_on, is_newest, data):
        """Requeue some samples of one of the latest leases, some samples with tokens."""
        if not self.leases[name]:
            return
        lease, epoch = data.draw(st.sampled_from(self.leases[name][-6:]))
        if epoch != self.epochs[name]:
            return
        newest = PolicyVersion(*self.buffer.status().newest)
        version = newest if is_newest else newest._replace(version=min(lease.min_version, newest.version))
        indices = data.draw(st.lists(st.sampled_from(lease.sample_indices), unique=True, min_size=1))
        with_tokens = indices[data.draw(st.integers(0, 1)) :]
        fields = {"version": version, "num_completion_tokens": data.draw(st.integers(1, 3)), "actor": name}
        self.buffer.requeue(lease, indices, with_tokens, goes_on=goes_on, epoch=epoch, **fields)

    @rule(seconds=st.sampled_from([1.0, 30.0, 61.0]))
    def pass_time(self, seconds):
        self.buffer.now_s += seconds
        self.buffer.expire()

    # --- learner ----------------------------------------------------------------------------------

    @rule(num=st.integers(0, 8))
    def score(self, num):
        """Score samples of ready groups."""
        ready = self.buffer.store.read(lambda tx: [g for _, g in tx.groups.all_items() if g.phase == "ready"])
        records = [group.records[i] for group in ready for i in group.usable()][:num]
        scores = [np.zeros(4, np.float32) for _ in records]
        self.buffer.ask(p.WriteScores(), p.Done, schema.encode_scores(records, scores))

    def begin(self):
        self.step, self.version = self.checkpoint
        reply = self.buffer.begin(self.version, self.step, session=f"learner-{self.incarnation}")
        self.incarnation += 1
        assert reply.incarnation == self.incarnation
        self.resumed_at = reply.resumed_at
        self.num_updates = self.num_applied = 0
        self.drawn = False

    @rule()
    def restart_learner(self):
        # Groups of abandoned versions must be used soon after the redone steps. Too many exist, so some are dropped.
        self.rolled_back |= self.checkpoint[1] < self.version + self.num_applied
        # A redone step may take updates that were skipped before. The lag of groups admitted after the step then grows.
        self.rolled_back |= self.skipped
        self.skipped = False
        self.learner_restarted = True
        self.begin()

    @rule()
    def draw(self):
        reply, rows = self.buffer.draw(self.step + 1, self.version, incarnation=self.incarnation)
        if not reply.ready:
            assert not self.drawn, "a redone draw must be ready"
            return
        self.drawn = True
        groups = {}
        for record, row in zip(reply.record_ids, rows, strict=True):
            oldest = effective_version(row.spans[0].version, self.resumed_at)
            assert self.version + self.updates_per_step - 1 - oldest <= self.max_lag
            assert self.used_at.setdefault(record, self.step + 1) == self.step + 1 or self.learner_restarted
            assert row.reward is not None
            groups.setdefault(row.group_id, []).append(row.prompt_id)
        assert list(groups) == reply.group_ids
        assert all(len(prompts) >= min(2, self.buffer.facts.group_size) for prompts in groups.values())
        assert all(len(set(prompts)) == 1 for prompts in groups.values())

    @rule(is_applied=st.booleans(), is_published=st.booleans())
    def update(self, is_applied, is_published):
        """Take one update of an unfinished step."""
        if self.drawn and self.num_updates < self.updates_per_step:
            self.num_updates, self.num_applied = self.num_updates + 1, self.num_applied + is_applied
            if is_published:
                self.publish()

    @rule(num_skipped=st.integers(0, 4), is_published=st.booleans())
    def finish(self, num_skipped, is_published):
        """Finish a step and skip some of its updates."""
        if not self.drawn:
            return
        self.num_applied += max(0, self.updates_per_step - self.num_updates - num_skipped)
        version = self.version + self.num_applied
        for _ in range(2):
            self.buffer.finish(self.step + 1, version, incarnation=self.incarnation, skipped=version == self.version)
        self.skipped |= version == self.version
        self.step, self.version, self.drawn = self.step + 1, version, False
        self.num_updates = self.num_applied = 0
        if is_published:
            self.publish()

    @rule(num_steps=st.integers(1, 4))
    def train(self, num_steps):
        """Train for some steps without faults."""
        for _ in range(num_steps):
            self.publish()
            self.work("a", 0, True)
            self.draw()
            self.finish(0, True)

    @rule()
    def publish(self):
        self.buffer.publish(self.version + self.num_applied, self.incarnation)

    @rule()
    def write_checkpoint(self):
        if not self.drawn:
            self.buffer.ask(p.CheckpointDurable(self.step, self.incarnation), p.Done)
            self.checkpoint = (self.step, self.version)
            self.skipped = False

    # --- service ----------------------------------------------------------------------------------

    @rule()
    def restart_service(self):
        self.buffer.restart()

    @rule(failure=st.sampled_from(["commit", "service"]))
    def lose_next_commit(self, failure):
        """Fail the next commit, as on a full disk or by a kill of the service; the request is then repeated."""
        self.buffer.loses = failure

    @invariant()
    def check_ledger(self):
        if self.buffer is None:
            return
        status = self.buffer.status()
        assert status.ledger["gap"] == 0
        assert self.buffer.faults() == []
        assert status.ledger["committed"] == self.acknowledged
        if self.staleness.on_stale == "wait" and not self.rolled_back:
            assert status.ledger["dropped_stale"] == 0

    def teardown(self):
        try:
            if self.buffer is not None:
                self.progress()
                self.buffer.close()
        finally:
            self.patched.undo()
            shutil.rmtree(self.folder)

    def progress(self):
        """Assert that training can continue after any schedule."""
        self.restart_actor("a")
        self.publish()
        for _ in range(6):
            goal = self.step + 1
            for _ in range(12):
                self.pass_time(61.0)
                self.work("a", 0, True)
                self.draw()
                if self.drawn:
                    break
            assert self.drawn, self.buffer.draw(goal, self.version, incarnation=self.incarnation)[0].waiting_for
            self.finish(0, True)
        self.check_ledger()


TestScheduledBuffer = ScheduledBuffer.TestCase
TestScheduledBuffer.settings = settings(
    max_examples=pick(30, 60),
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
