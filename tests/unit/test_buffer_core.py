"""The buffer's rules, over a real store, under a virtual clock."""

import dataclasses
import json

import numpy as np
import pytest

from buffer import protocol as p
from buffer import schema
from buffer.__main__ import main
from buffer.config import BufferConfig, RunFacts
from buffer.errors import BufferRefused, StoreError
from buffer.store import Store
from tests.in_process_buffer import InProcessBuffer, make_trajectory
from weight_sync.staleness import PolicyVersion, StalenessConfig


def facts(**changes):
    staleness = {key: changes.pop(key) for key in list(changes) if key in StalenessConfig.model_fields}
    defaults = {
        "run_id": "r",
        "seed": 7,
        "num_prompts": 10,
        "group_size": 2,
        "groups_per_step": 2,
        "vocab_size": 64,
        "max_tokens": 16,
    }
    return RunFacts(**{**defaults, **changes}, staleness=StalenessConfig(**staleness))


class Actor:
    """Generates what it is told to, with sequence numbers of its own."""

    def __init__(self, buffer, name="actor-0", session="1"):
        self.buffer, self.name, self.seq = buffer, name, 0
        self.epoch = buffer.hello(name, session).epoch

    def lease(self, max_groups=100):
        return self.buffer.lease(self.name, max_groups, epoch=self.epoch)

    def rows(self, lease, indices=None, **fields):
        rows = []
        for index in lease.sample_indices if indices is None else indices:
            rows.append(make_trajectory(lease, index, seq=self.seq, actor=self.name, epoch=self.epoch, **fields))
            self.seq += 1
        return rows

    def work(self, lease, indices=None, **fields):
        return self.buffer.push(self.rows(lease, indices, **fields))


@pytest.fixture
def make(tmp_path):
    made = []

    def build(config=None, **changes):
        made.append(InProcessBuffer(tmp_path / f"buffer-{len(made)}", facts(**changes), config))
        return made[-1]

    yield build
    for buffer in made:
        assert buffer.faults() == []
        assert buffer.status().ledger["gap"] == 0
        buffer.close()


def test_a_sample_goes_from_lease_to_trained(make):
    buffer = make()
    actor = Actor(buffer)
    buffer.begin()
    for lease in actor.lease(2):
        assert actor.work(lease) == ["committed", "committed"]
    reply, rows = buffer.draw(1, 0)
    assert reply.ready
    assert [row.group_id for row in rows] == [g for g in reply.group_ids for _ in range(2)]
    buffer.finish(1, 1)
    ledger = buffer.status().ledger
    assert (ledger["issued"], ledger["trained"], ledger["uses"]) == (4, 4, 4)


def test_no_lease_is_granted_before_weights_are_published_or_while_draining(make):
    buffer = make()
    actor = Actor(buffer)
    assert actor.lease() == []
    buffer.begin()
    assert len(actor.lease(1)) == 1
    buffer.ask(p.Drain(), p.Done)
    assert actor.lease() == []


def test_prompts_follow_a_permutation_that_a_restart_neither_skips_nor_repeats(make):
    buffer = make(max_lag=50)
    actor = Actor(buffer)
    buffer.begin()
    seen = []
    for _ in range(10):
        seen += [lease.prompt_id for lease in actor.lease(2)]
        buffer.restart()
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]


def test_the_same_lease_request_returns_the_same_leases(make):
    buffer = make()
    Actor(buffer)
    buffer.begin()
    request = p.LeaseRequest("actor-0", 1, 0, 2)
    first = buffer.ask(request, p.LeaseGrant).leases
    buffer.restart()
    assert buffer.ask(request, p.LeaseGrant).leases == first
    assert buffer.status().ledger["issued"] == 4


def test_a_duplicate_is_acknowledged_and_not_stored_also_after_eviction(make):
    buffer = make(BufferConfig(capacity_trajectories=12), max_lag=1, max_actor_lag=0)
    actor = Actor(buffer)
    buffer.begin()
    first = None
    for step in range(1, 6):
        for lease in actor.lease():
            rows = actor.rows(lease)
            first = first or rows
            buffer.push(rows)
        assert buffer.draw(step, step - 1)[0].ready
        buffer.finish(step, step)
        buffer.publish(step)
        buffer.ask(p.CheckpointDurable(step, 0), p.Done)
    assert buffer.status().num_records == 12
    assert buffer.push(first) == ["duplicate", "duplicate"]
    assert buffer.status().ledger["duplicates"] == 2


def test_out_of_order_sequence_numbers_are_remembered(make):
    buffer = make()
    actor = Actor(buffer)
    buffer.begin()
    one, two = actor.rows(actor.lease(1)[0])
    assert [buffer.push([two]), buffer.push([two]), buffer.push([one]), buffer.push([one, two])] == [
        ["committed"], ["duplicate"], ["committed"], ["duplicate", "duplicate"],
    ]  # fmt: skip


def test_the_first_commit_of_an_index_wins_and_later_ones_are_late(make):
    buffer = make()
    actor = Actor(buffer)
    buffer.begin()
    lease = actor.lease(1)[0]
    assert actor.work(lease, [0, 0, 1]) == ["committed", "late", "committed"]
    assert actor.work(lease, [1]) == ["late"]
    assert buffer.status().ledger["late"] == 2


def test_an_expired_lease_is_issued_again_for_its_missing_samples_only(make):
    buffer = make()
    slow, fast = Actor(buffer, "slow"), Actor(buffer, "fast")
    buffer.begin()
    lease = slow.lease(1)[0]
    slow.work(lease, [0])
    buffer.now_s = 40.0
    assert buffer.ask(p.Renew("slow", 1, [lease.lease_id]), p.RenewReply).lost == []
    buffer.now_s = 90.0
    buffer.expire()
    assert fast.lease(1)[0].attempt == 1, "renewed, so still the slow actor's"
    buffer.now_s = 101.0
    buffer.expire()
    again = fast.lease(1)[0]
    assert (again.group_id, again.sample_indices, again.attempt) == (lease.group_id, [1], 2)
    assert slow.work(lease, [1]) == ["late"]
    assert buffer.ask(p.Renew("slow", 1, [lease.lease_id]), p.RenewReply).lost == [lease.lease_id]
    assert fast.work(again) == ["committed"]
    status = buffer.status()
    assert status.failed_by_reason == {"lease expired": 1}
    assert (status.ledger["issued"], status.num_ready_groups) == (5, 1)


def test_deadlines_start_anew_when_the_service_restarts(make):
    buffer = make()
    actor = Actor(buffer)
    buffer.begin()
    actor.lease(1)
    buffer.now_s = 59.0
    buffer.restart()
    buffer.now_s = 61.0
    buffer.expire()
    assert buffer.status().ledger["failed"] == 0
    buffer.now_s = 120.0
    buffer.expire()
    assert buffer.status().ledger["failed"] == 2


def test_after_max_attempts_the_missing_samples_are_given_up(make):
    buffer = make(BufferConfig(max_attempts=2), group_size=3)
    actor = Actor(buffer)
    buffer.begin()
    actor.work(actor.lease(1)[0], [0, 1])
    for attempt in range(2):
        buffer.now_s += 61.0
        buffer.expire()
        if attempt == 0:
            assert actor.lease(1)[0].sample_indices == [2]
    assert buffer.status().num_ready_groups == 1


def test_a_new_process_of_an_actor_fences_the_old_one(make):
    buffer = make()
    old = Actor(buffer, session="old")
    buffer.begin()
    lease = old.lease(1)[0]
    new = Actor(buffer, session="new")
    assert (old.epoch, new.epoch) == (1, 2)
    assert old.work(lease) == ["fenced", "fenced"]
    with pytest.raises(BufferRefused, match="newer process"):
        old.lease()
    again = new.lease(1)[0]
    assert again.group_id == lease.group_id
    assert new.work(again) == ["committed", "committed"]
    assert buffer.status().failed_by_reason == {"fenced": 2}


def test_given_up_samples_leave_a_group_that_is_ready_if_two_have_rewards(make):
    buffer = make(group_size=3)
    actor = Actor(buffer)
    buffer.begin()
    good, poor = actor.lease(2)
    for lease, done in ((good, [0, 1]), (poor, [0])):
        actor.work(lease, done)
        rest = [index for index in range(3) if index not in done]
        give_up = p.GiveUp("actor-0", 1, lease.lease_id, lease.attempt, rest, "reward failed")
        for _ in range(2):
            buffer.ask(give_up, p.Done)
    status = buffer.status()
    assert status.failed_by_reason == {"reward failed": 3}
    assert (status.num_ready_groups, status.ledger["filtered"]) == (1, 1)
    assert actor.lease(1)[0].prompt_id == poor.prompt_id, "a filtered group's prompt is leased again"


def test_a_prompt_that_never_yields_a_group_is_given_up(make):
    buffer = make(BufferConfig(max_attempts=3), num_prompts=2)
    actor = Actor(buffer)
    buffer.begin()
    prompts = []
    for _ in range(4):
        lease = actor.lease(1)[0]
        prompts.append(lease.prompt_id)
        actor.work(lease, reward=None)
    assert prompts[0] == prompts[1] == prompts[2] != prompts[3]
    assert buffer.status().ledger["prompts_given_up"] == 1


def test_a_sample_without_reward_is_not_handed_to_the_learner(make):
    buffer = make(group_size=3, groups_per_step=1)
    actor = Actor(buffer)
    buffer.begin()
    lease = actor.lease(1)[0]
    actor.work(lease, [0, 2])
    actor.work(lease, [1], reward=None)
    _, rows = buffer.draw(1, 0)
    assert [row.sample_index for row in rows] == [0, 2]
    assert buffer.status().ledger["filtered"] == 1


def test_a_bad_row_is_quarantined_its_sample_failed_and_its_neighbours_committed(make):
    buffer = make(group_size=3)
    actor = Actor(buffer)
    buffer.begin()
    rows = actor.rows(actor.lease(1)[0])
    rows[1] = dataclasses.replace(rows[1], reward=float("nan"))
    stray = dataclasses.replace(rows[1], seq=99, group_id=77)
    assert buffer.push([*rows, stray]) == ["committed", "quarantined", "committed", "quarantined"]
    status = buffer.status()
    assert status.quarantined_by_reason == {"reward not finite": 2}
    assert status.failed_by_reason == {"quarantined: reward not finite": 1}
    assert (status.ledger["quarantined_outside"], status.num_ready_groups) == (1, 1)


def test_a_draw_asked_again_returns_the_same_records_also_after_a_restart(make):
    buffer = make(max_lag=1, max_actor_lag=0)
    actor = Actor(buffer)
    buffer.begin()
    for lease in actor.lease():
        actor.work(lease)
    first, rows = buffer.draw(1, 0)
    scores = [np.full(4, -1.5, np.float32) for _ in rows]
    buffer.ask(p.WriteScores(), p.Done, schema.encode_scores(first.record_ids, scores))
    buffer.restart()
    again, same = buffer.draw(1, 0)
    assert again == first
    assert [row.seq for row in same] == [row.seq for row in rows]
    np.testing.assert_array_equal(same[0].reference_logprobs, scores[0])
    assert set(buffer.draw(2, 1)[0].record_ids).isdisjoint(first.record_ids)
    for _ in range(2):
        buffer.finish(1, 1)
    assert buffer.status().ledger["uses"] == 4


def test_a_draw_that_waits_says_what_is_missing_and_who_owes_it(make):
    buffer = make()
    actor = Actor(buffer)
    buffer.begin()
    lease = actor.lease(1)[0]
    actor.work(lease, [1])
    reply, _ = buffer.draw(1, 0)
    assert not reply.ready
    assert "step 1 has 0 of 2 groups" in reply.waiting_for
    assert f"samples [0] from actor-0 (lease {lease.lease_id})" in reply.waiting_for


def test_with_max_lag_0_exactly_one_steps_groups_are_admitted_per_version(make):
    buffer = make(max_lag=0, group_size=2, groups_per_step=2)
    actor = Actor(buffer)
    buffer.begin()
    for version in range(4):
        leases = actor.lease()
        assert len(leases) == 2
        assert all(lease.min_version == version for lease in leases)
        actor.work(leases[0])
        actor.work(leases[1], reward=None)
        replaced = actor.lease()
        assert len(replaced) == 1, "a filtered group is replaced at the same version"
        actor.work(replaced[0])
        assert buffer.draw(version + 1, version)[0].ready
        assert actor.lease() == [], "drawn groups are outstanding until their step is finished"
        buffer.finish(version + 1, version + 1)
        assert actor.lease() == [], "the new version is not published yet"
        buffer.publish(version + 1)


def test_admission_counts_how_far_publication_is_behind(make):
    buffer = make(max_lag=2, max_actor_lag=0)
    actor = Actor(buffer)
    buffer.begin()
    for lease in actor.lease():
        actor.work(lease)
    for step in (1, 2):
        assert buffer.draw(step, step - 1)[0].ready
        buffer.finish(step, step)
    # At version 2 with nothing newer than 0 published and 2 groups ready, a new group would be used at version 3.
    assert actor.lease() == []
    buffer.publish(1)
    assert len(actor.lease()) == 2


def test_a_group_past_the_bound_is_dropped_whole_and_its_prompt_leased_again(make):
    buffer = make(max_lag=1, max_actor_lag=0, groups_per_step=1)
    actor = Actor(buffer)
    buffer.begin()
    slow, quick = actor.lease()
    actor.work(slow, [0])
    for step in (1, 2):
        actor.work(quick)
        assert buffer.draw(step, step - 1)[0].ready
        buffer.finish(step, step)
        buffer.publish(step)
        quick = actor.lease(1)[0]
    actor.work(slow, [1], version=PolicyVersion(0, 2))
    assert not buffer.draw(3, 2)[0].ready
    assert buffer.status().ledger["dropped_stale"] == 2
    assert actor.lease(1)[0].prompt_id == slow.prompt_id


def test_a_group_past_the_bound_is_not_issued_again_but_its_prompt_is(make):
    buffer = make(max_lag=1, max_actor_lag=0, groups_per_step=1)
    actor = Actor(buffer)
    buffer.begin()
    slow, quick = actor.lease()
    actor.work(slow, [0])
    for step in (1, 2):
        actor.work(quick)
        assert buffer.draw(step, step - 1)[0].ready
        buffer.finish(step, step)
        buffer.publish(step)
        quick = actor.lease(1)[0]
    buffer.now_s = 61.0
    buffer.expire()
    anew = [lease for lease in actor.lease() if lease.prompt_id == slow.prompt_id]
    assert [(lease.attempt, lease.sample_indices) for lease in anew] == [(1, [0, 1])]
    assert anew[0].group_id != slow.group_id
    assert buffer.status().ledger["dropped_stale"] == 1


def test_on_stale_wait_holds_the_step_that_would_leave_a_group_behind(make):
    buffer = make(max_lag=1, max_actor_lag=0, groups_per_step=1, on_stale="wait")
    actor = Actor(buffer)
    buffer.begin()
    slow, quick = actor.lease()
    actor.work(quick)
    assert buffer.draw(1, 0)[0].ready, "the slow group can still be used by the next step"
    buffer.finish(1, 1)
    buffer.publish(1)
    newer = actor.lease(1)[0]
    actor.work(newer)
    reply, _ = buffer.draw(2, 1)
    assert not reply.ready
    assert f"waits for older ones (on_stale = 'wait'): group {slow.group_id}" in reply.waiting_for
    actor.work(slow)
    assert buffer.draw(2, 1)[0].group_ids == [slow.group_id]
    buffer.finish(2, 2)
    buffer.publish(2)
    assert actor.lease(1)[0].min_version == 2
    assert buffer.draw(3, 2)[0].group_ids == [newer.group_id], "a group that is in flight but young holds nothing"


def test_on_stale_wait_looks_ahead_when_several_groups_fall_due_together(make):
    buffer = make(max_lag=3, max_actor_lag=0, groups_per_step=1, on_stale="wait")
    actor = Actor(buffer)
    buffer.begin()
    leases = actor.lease()
    assert len(leases) == 4
    slow = leases[2:]
    for step in (1, 2):
        actor.work(leases[step - 1])
        assert buffer.draw(step, step - 1)[0].ready
        buffer.finish(step, step)
        buffer.publish(step)
    # Both slow groups must be used by version 3; a newer one at version 2 would leave no room for one of them.
    actor.work(actor.lease(1)[0])
    assert not buffer.draw(3, 2)[0].ready
    for step, lease in zip((3, 4), slow, strict=True):
        actor.work(lease)
        assert buffer.draw(step, step - 1)[0].group_ids == [lease.group_id]
        buffer.finish(step, step)
    assert buffer.status().ledger["dropped_stale"] == 0


def run_steps(buffer, actor, steps):
    drawn = {}
    for step in steps:
        for lease in actor.lease():
            actor.work(lease)
        reply, _ = buffer.draw(step, step - 1)
        assert reply.ready
        drawn[step] = reply.record_ids
        buffer.finish(step, step)
        buffer.publish(step)
    return drawn


def test_a_restarted_learner_redoes_its_steps_from_the_recorded_draws(make):
    buffer = make(max_lag=2)
    actor = Actor(buffer)
    buffer.begin()
    drawn = run_steps(buffer, actor, range(1, 7))
    reply = buffer.begin(2, 2, session="restarted")
    assert (reply.incarnation, reply.resumed_at) == (1, {0: 0, 1: 2})
    with pytest.raises(BufferRefused, match="replaced"):
        buffer.draw(3, 2)
    for step in (3, 4, 5):
        again, _ = buffer.draw(step, step - 1, incarnation=1)
        assert again.record_ids == drawn[step]
        buffer.finish(step, step, incarnation=1)
        buffer.publish(step, 1)
    ledger = buffer.status().ledger
    assert (ledger["trained"], ledger["uses"], ledger["redone_uses"]) == (24, 36, 12)


def test_a_redone_step_past_the_bound_gets_fresh_groups(make):
    buffer = make(max_lag=0)
    actor = Actor(buffer)
    buffer.begin()
    drawn = run_steps(buffer, actor, range(1, 5))
    buffer.begin(1, 1, session="restarted")
    # Step 2 was sampled at version 1, from which the learner resumed; step 3 at a version that is abandoned.
    assert buffer.draw(2, 1, incarnation=1)[0].record_ids == drawn[2]
    buffer.finish(2, 2, incarnation=1)
    buffer.publish(2, 1)
    for lease in actor.lease():
        actor.work(lease, version=PolicyVersion(1, 2))
    fresh, _ = buffer.draw(3, 2, incarnation=1)
    assert fresh.ready
    assert set(fresh.record_ids).isdisjoint(drawn[3])


def test_a_recorded_step_past_the_bound_is_drawn_anew_and_so_are_those_after_it(make):
    buffer = make(max_lag=2, max_actor_lag=0, groups_per_step=1)
    actor = Actor(buffer)
    buffer.begin()
    slow = None
    recorded = {}
    for step, version, skipped in (
        (1, 0, False),
        (2, 1, False),
        (3, 2, False),
        (4, 3, True),
        (5, 3, False),
        (6, 4, False),
    ):
        if step == 2:
            slow = actor.lease(1)[0]
        if step == 5:
            actor.work(slow)  # tokens of version 1
        else:
            actor.work(actor.lease(1)[0])
        recorded[step] = buffer.draw(step, version)[0].record_ids
        after = version + (not skipped)
        buffer.finish(step, after, skipped=skipped)
        buffer.publish(after)
    buffer.begin(3, 3, session="restarted")
    # This time step 4 is not skipped, so step 5 trains at version 4 and its slow group is 3 versions old.
    for step in (4, 5, 6):
        for lease in actor.lease():
            actor.work(lease)
        again = buffer.draw(step, step - 1, incarnation=1)[0].record_ids
        assert (again == recorded[step]) == (step == 4)
        buffer.finish(step, step, incarnation=1)
        buffer.publish(step, 1)
    assert buffer.status().ledger["redone_uses"] == 0, "step 4 was skipped the first time, so this was its first use"


def test_ready_groups_of_abandoned_versions_count_as_old_as_the_checkpoint(make):
    buffer = make(max_lag=1, max_actor_lag=0, groups_per_step=1)
    actor = Actor(buffer)
    buffer.begin()
    run_steps(buffer, actor, range(1, 4))
    abandoned = actor.lease()
    for lease in abandoned:
        actor.work(lease)
    buffer.begin(1, 1, session="restarted")
    for step in (2, 3):
        assert buffer.draw(step, step - 1, incarnation=1)[0].ready
        buffer.finish(step, step, incarnation=1)
        buffer.publish(step, 1)
    assert not buffer.draw(4, 3, incarnation=1)[0].ready, "sampled at version 3, but of the abandoned line: 1 now"
    assert buffer.status().ledger["dropped_stale"] >= 2 * len(abandoned)


def test_a_step_in_the_checkpoint_is_trained_though_its_report_was_lost(make):
    buffer = make()
    actor = Actor(buffer)
    buffer.begin()
    for lease in actor.lease():
        actor.work(lease)
    assert buffer.draw(1, 0)[0].ready
    buffer.begin(1, 1, session="restarted")
    status = buffer.status()
    assert (status.ledger["trained"], status.num_drawn_groups) == (4, 0)


def test_a_skipped_step_filters_its_samples_and_keeps_the_version(make):
    buffer = make(max_lag=0)
    actor = Actor(buffer)
    buffer.begin()
    for lease in actor.lease():
        actor.work(lease)
    buffer.draw(1, 0)
    with pytest.raises(BufferRefused, match="leads to version 0, not 1"):
        buffer.finish(1, 1, skipped=True)
    buffer.finish(1, 0, skipped=True)
    assert buffer.status().ledger["filtered"] == 4
    assert len(actor.lease()) == 2


def test_requests_that_contradict_the_run_are_refused(make):
    buffer = make()
    Actor(buffer)
    with pytest.raises(BufferRefused, match="no learner has begun"):
        buffer.draw(1, 0)
    buffer.begin()
    with pytest.raises(BufferRefused, match="counted from 1"):
        buffer.draw(0, 0)
    with pytest.raises(BufferRefused, match="cannot train at version 3"):
        buffer.draw(1, 3)
    with pytest.raises(BufferRefused, match="never drawn"):
        buffer.finish(5, 6)
    with pytest.raises(BufferRefused, match="serves run"):
        buffer.ask(p.Hello("other", "actor", "x", "s"), p.Welcome)
    with pytest.raises(BufferRefused, match="Hello first"):
        buffer.lease("stranger", 1)


def test_a_damaged_record_is_noticed_and_its_group_replaced(make, tmp_path):
    buffer = make(groups_per_step=1)
    actor = Actor(buffer)
    buffer.begin()
    damaged, good = actor.lease(2)
    actor.work(damaged)
    actor.work(good)

    def flip(tx):
        key = (1).to_bytes(8, "big")
        stored = bytearray(tx.records._txn.get(key, db=tx.records._db))
        stored[40] ^= 1
        tx.records._txn.put(key, bytes(stored), db=tx.records._db)

    buffer.store.write(flip)
    buffer.draw(1, 0)
    assert buffer.draw(1, 0)[0].group_ids == [good.group_id]
    assert buffer.status().ledger["evicted_unused"] == 2
    assert "checksum" in buffer.faults()[0]
    buffer.store.write(lambda tx: tx.records.put(b"mended", 1))


def test_a_step_of_more_rows_than_one_push_may_have_is_drawn_and_scored(make, monkeypatch):
    monkeypatch.setattr("buffer.core.MAX_PUSHED_ROWS", 10)
    num_rows = 12
    buffer = make(group_size=num_rows, groups_per_step=1)
    actor = Actor(buffer)
    buffer.begin()
    (lease,) = actor.lease(1)
    rows = actor.rows(lease)
    with pytest.raises(BufferRefused, match="12 rows in one message; at most 10"):
        buffer.push(rows)
    assert set(buffer.push(rows[:-2]) + buffer.push(rows[-2:])) == {"committed"}
    reply, drawn = buffer.draw(1, 0)
    assert (reply.ready, len(drawn)) == (True, num_rows)
    scores = schema.encode_scores(reply.record_ids, [np.full(4, -0.25, np.float32)] * num_rows)
    buffer.ask(p.WriteScores(), p.Done, scores)
    assert all(row.reference_logprobs.tolist() == [-0.25] * 4 for row in buffer.draw(1, 0)[1])


def test_a_store_is_verified_from_its_folder_alone_and_not_changed(make, monkeypatch, capsys, tmp_path):
    buffer = make(groups_per_step=1)
    buffer.begin()
    actor = Actor(buffer)
    for lease in actor.lease(2):
        actor.work(lease)

    def verified(folder):
        monkeypatch.setattr("sys.argv", ["python -m buffer", "--folder", str(folder), "--verify"])
        return main(), capsys.readouterr()

    status, said = verified(buffer.folder)
    assert (status, "in use by process" in said.err) == (1, True)
    buffer.store.close()
    data = (buffer.folder / "data.mdb").read_bytes()
    status, said = verified(buffer.folder)
    report = json.loads(said.out)
    assert (status, report["run_id"], report["num_records"], report["faults"]) == (0, "r", 4, [])
    assert (buffer.folder / "data.mdb").read_bytes() == data
    status, said = verified(tmp_path / "nowhere")
    assert (status, "there is no buffer in" in said.err) == (1, True)
    assert not (tmp_path / "nowhere").exists()
    buffer._open()


def test_a_store_is_refused_to_a_second_owner_another_run_and_when_cut_off(tmp_path):
    store = Store(tmp_path, facts())
    with pytest.raises(StoreError, match="in use by process"):
        Store(tmp_path, facts())
    store.close()
    with pytest.raises(StoreError, match="made with run_id = r, this service has other"):
        Store(tmp_path, facts(run_id="other"))
    with pytest.raises(StoreError, match="made with facts"):
        Store(tmp_path, facts(group_size=3))
    data = tmp_path / "data.mdb"
    data.write_bytes(data.read_bytes()[:8192])
    with pytest.raises(StoreError, match="cut off"):
        Store(tmp_path, facts())


def test_a_capacity_below_what_may_be_outstanding_is_refused(tmp_path):
    with pytest.raises(StoreError, match="capacity_trajectories = 4"):
        InProcessBuffer(tmp_path, facts(), BufferConfig(capacity_trajectories=4))
