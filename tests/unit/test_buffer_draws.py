"""Draws, staleness and learner restarts, driven without sockets under a virtual clock."""

import numpy as np
import pytest

from leeway.buffer import protocol as p
from leeway.buffer import schema
from leeway.buffer.errors import BufferRefused
from leeway.common.staleness import PolicyVersion
from tests.world.buffer import Actor, run_steps


def test_a_repeated_draw_returns_the_same_records_even_after_a_restart(make):
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


def test_a_waiting_draw_reports_missing_samples_and_their_actors(make):
    buffer = make()
    actor = Actor(buffer)
    buffer.begin()
    lease = actor.lease(1)[0]
    actor.work(lease, [1])
    reply, _ = buffer.draw(1, 0)
    assert not reply.ready
    assert "step 1 has 0 of 2 groups" in reply.waiting_for
    assert f"samples [0] from actor-0 (lease {lease.lease_id})" in reply.waiting_for


def test_max_lag_0_admits_exactly_the_groups_of_one_step_per_version(make):
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


def test_admission_counts_the_lag_of_publication(make):
    buffer = make(max_lag=2, max_actor_lag=0)
    actor = Actor(buffer)
    buffer.begin()
    for lease in actor.lease():
        actor.work(lease)
    for step in (1, 2):
        assert buffer.draw(step, step - 1)[0].ready
        buffer.finish(step, step)
    # The learner is at version 2, only version 0 is published, and 2 groups are ready.
    # A new group would therefore be used at version 3.
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
    assert f"waits for older groups (on_stale = 'wait'): group {slow.group_id}" in reply.waiting_for
    actor.work(slow)
    assert buffer.draw(2, 1)[0].group_ids == [slow.group_id]
    buffer.finish(2, 2)
    buffer.publish(2)
    assert actor.lease(1)[0].min_version == 2
    assert buffer.draw(3, 2)[0].group_ids == [newer.group_id], (
        "the step does not wait for a group in flight that a later step can use"
    )


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
    # Both slow groups must be used by version 3. A newer group used at version 2 would make one of them too old.
    actor.work(actor.lease(1)[0])
    assert not buffer.draw(3, 2)[0].ready
    for step, lease in zip((3, 4), slow, strict=True):
        actor.work(lease)
        assert buffer.draw(step, step - 1)[0].group_ids == [lease.group_id]
        buffer.finish(step, step)
    assert buffer.status().ledger["dropped_stale"] == 0


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
    # The samples of step 2 have version 1, from which the learner resumed.
    # The samples of step 3 have a version that is abandoned.
    assert buffer.draw(2, 1, incarnation=1)[0].record_ids == drawn[2]
    buffer.finish(2, 2, incarnation=1)
    buffer.publish(2, 1)
    for lease in actor.lease():
        actor.work(lease, version=PolicyVersion(1, 2))
    fresh, _ = buffer.draw(3, 2, incarnation=1)
    assert fresh.ready
    assert set(fresh.record_ids).isdisjoint(drawn[3])


def test_a_recorded_step_past_the_bound_and_all_later_steps_are_drawn_again(make):
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
            actor.work(slow)  # the tokens of the slow group have version 1
        else:
            actor.work(actor.lease(1)[0])
        recorded[step] = buffer.draw(step, version)[0].record_ids
        after = version + (not skipped)
        buffer.finish(step, after, skipped=skipped)
        buffer.publish(after)
    buffer.begin(3, 3, session="restarted")
    # After the restart, step 4 is not skipped, so step 5 trains at version 4 and its slow group is 3 versions old.
    for step in (4, 5, 6):
        for lease in actor.lease():
            actor.work(lease)
        again = buffer.draw(step, step - 1, incarnation=1)[0].record_ids
        assert (again == recorded[step]) == (step == 4)
        buffer.finish(step, step, incarnation=1)
        buffer.publish(step, 1)
    assert buffer.status().ledger["redone_uses"] == 0, (
        "step 4 was skipped before the restart, so its groups were used for the first time"
    )


def test_ready_groups_of_abandoned_versions_have_the_age_of_the_checkpoint(make):
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
    assert not buffer.draw(4, 3, incarnation=1)[0].ready, "tokens of the abandoned version 3 now count as version 1"
    assert buffer.status().ledger["dropped_stale"] >= 2 * len(abandoned)


def test_a_step_in_the_checkpoint_counts_as_trained_even_if_its_report_is_lost(make):
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
    with pytest.raises(BufferRefused, match="Hello first"):
        buffer.lease("stranger", 1)
