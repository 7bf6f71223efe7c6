"""Steps of several updates: a draw trains at as many versions, and each rule looks at the last of them."""

import pytest

from buffer.config import BufferConfig
from buffer.core import BufferCore
from buffer.errors import BufferRefused, StoreError
from buffer.store import Store
from common.staleness import PolicyVersion
from tests.world.buffer import Actor, facts, generate


def started(make, **changes):
    buffer = make(**{"updates_per_step": 2, "max_actor_lag": 0, "groups_per_step": 1, "num_prompts": 50, **changes})
    actor = Actor(buffer)
    buffer.begin()
    return buffer, actor


def take(buffer, step, version, after, incarnation=0):
    """One step that begins at `version`; its record ids."""
    reply, _ = buffer.draw(step, version, incarnation=incarnation)
    assert reply.ready, reply.waiting_for
    buffer.finish(step, after, incarnation=incarnation, skipped=after == version)
    buffer.publish(after, incarnation)
    return reply.record_ids


def test_a_step_leads_to_one_more_version_for_each_update_that_was_applied(make):
    buffer, actor = started(make, updates_per_step=4, max_lag=15)
    generate(buffer, actor, 4)
    for step, (version, after) in enumerate([(0, 4), (4, 5), (5, 5), (5, 8)], start=1):
        take(buffer, step, version, after)
    ledger = buffer.status().ledger
    assert (buffer.status().version, ledger["trained"], ledger["filtered"]) == (8, 6, 2)


@pytest.mark.parametrize(
    ("after", "skipped", "sentence"),
    [
        (5, False, "leads to a version from 1 to 4, not 5"),
        (0, False, "leads to a version from 1 to 4, not 0"),
        (1, True, "skipping it leads to version 0, not 1"),
    ],
)
def test_a_version_that_the_updates_of_a_step_cannot_lead_to_is_refused(make, after, skipped, sentence):
    buffer, actor = started(make, updates_per_step=4, max_lag=7)
    generate(buffer, actor, 1)
    buffer.draw(1, 0)
    with pytest.raises(BufferRefused, match=sentence):
        buffer.finish(1, after, skipped=skipped)
    assert buffer.status().version == 0


def test_the_age_bound_is_that_of_the_last_update(make):
    for max_lag, is_used in ((5, True), (4, False)):
        buffer, actor = started(make, max_lag=max_lag)
        slow, quick = actor.lease(2)
        actor.work(quick)
        take(buffer, 1, 0, 2)
        generate(buffer, actor, 1, version=PolicyVersion(0, 2))
        take(buffer, 2, 2, 4)
        actor.work(slow)
        # At version 4 the step's last update trains at 5, and the slow group's tokens are of version 0.
        reply, _ = buffer.draw(3, 4)
        assert (reply.ready, buffer.status().ledger["dropped_stale"]) == (is_used, 0 if is_used else 2)


def test_the_least_bound_admits_exactly_one_steps_groups_and_none_before_its_last_version_is_published(make):
    buffer, actor = started(make, updates_per_step=3, max_lag=2, groups_per_step=2)
    for step in range(1, 5):
        version = 3 * (step - 1)
        leases = actor.lease()
        assert [lease.min_version for lease in leases] == [version] * 2
        for lease in leases:
            actor.work(lease)
        assert buffer.draw(step, version)[0].ready
        buffer.publish(version + 2)
        assert actor.lease() == [], "drawn groups are outstanding until their step is over"
        buffer.finish(step, version + 3)
        assert actor.lease() == [], "the last update's version is not published yet"
        buffer.publish(version + 3)


def test_admission_counts_the_versions_of_the_steps_before(make):
    buffer, actor = started(make, max_lag=5)
    assert len(generate(buffer, actor, 3)) == 3, "after two steps the last update of its own trains at version 5"
    assert actor.lease() == []
    buffer.draw(1, 0)
    buffer.finish(1, 2)
    # With nothing newer than 0 published a new group would train up to version 7, after two steps from 2 on.
    assert actor.lease() == []
    buffer.publish(1)
    assert actor.lease() == []
    buffer.publish(2)
    assert len(actor.lease()) == 1


def test_on_stale_wait_counts_the_versions_of_the_steps_between(make):
    buffer, actor = started(make, max_lag=6, on_stale="wait")
    first, *slow = actor.lease()
    actor.work(first)
    assert len(slow) == 2
    take(buffer, 1, 0, 2)
    generate(buffer, actor, 1, version=PolicyVersion(0, 2))
    # Both slow groups must be used by steps that begin at 2 and 4: the last update of the one after trains at 7.
    reply, _ = buffer.draw(2, 2)
    assert not reply.ready
    assert f"group {slow[0].group_id}" in reply.waiting_for
    for step, lease in zip((2, 3), slow, strict=True):
        actor.work(lease)
        assert buffer.draw(step, 2 * step - 2)[0].group_ids == [lease.group_id]
        buffer.finish(step, 2 * step)
    assert buffer.status().ledger["dropped_stale"] == 0


def test_a_draw_may_be_as_far_ahead_as_all_updates_of_the_drawn_steps_lead(make):
    buffer, actor = started(make, max_lag=9)
    generate(buffer, actor, 3)
    buffer.draw(1, 0)
    with pytest.raises(BufferRefused, match="cannot train at version 3"):
        buffer.draw(2, 3)
    ahead, _ = buffer.draw(2, 2)
    buffer.finish(1, 1)
    again, _ = buffer.draw(2, 1)
    assert again.record_ids == ahead.record_ids
    buffer.finish(2, 3)


def test_samples_of_a_version_published_within_a_step_are_welcome_and_later_ones_are_not(make):
    buffer, actor = started(make, updates_per_step=4, max_lag=11)
    drawn, early, made_up = actor.lease()
    actor.work(drawn)
    assert buffer.draw(1, 0)[0].ready
    # The service has not heard of any of these; a learner in this step can have published four.
    assert actor.work(early, version=PolicyVersion(0, 4)) == ["committed"] * 2
    assert actor.work(made_up, version=PolicyVersion(0, 5)) == ["quarantined"] * 2


def test_a_restarted_learner_redoes_the_steps_that_the_bound_has_room_for(make):
    buffer, actor = started(make, max_lag=5)
    recorded = {}
    for step in range(1, 6):
        generate(buffer, actor, 1, version=PolicyVersion(0, 2 * step - 2))
        recorded[step] = take(buffer, step, 2 * step - 2, 2 * step)
    buffer.begin(3, 2, session="restarted")  # of step 2 only one update was applied
    # The tokens of later versions count as of 3 now, those of step 3 as of 3 too: they may train up to version 8.
    for step, version in ((3, 3), (4, 5), (5, 7)):
        reply, _ = buffer.draw(step, version, incarnation=1)
        if step < 5:
            assert reply.record_ids == recorded[step]
            buffer.finish(step, version + 2, incarnation=1)
            buffer.publish(version + 2, 1)
    assert reply.record_ids == recorded[5]
    assert buffer.status().ledger["redone_uses"] == 4


def test_recorded_steps_without_room_for_their_last_update_are_released(make):
    buffer, actor = started(make, max_lag=3)
    for step in range(1, 5):
        generate(buffer, actor, 1, version=PolicyVersion(0, 2 * step - 2))
        take(buffer, step, 2 * step - 2, 2 * step)
    buffer.begin(0, 0, session="restarted")
    # Everything counts as of version 0, so only the steps that begin at 0 and 2 are kept.
    assert sorted(buffer.store.read(lambda tx: dict(tx.state.pending_draws))) == [1, 2]


@pytest.mark.parametrize(
    ("version", "state", "trained_at"), [(0, "filtered", None), (1, "trained", 0), (4, "trained", 3)]
)
def test_the_checkpoint_tells_how_many_updates_a_step_had_though_its_report_was_lost(make, version, state, trained_at):
    buffer, actor = started(make, updates_per_step=4, max_lag=7)
    (group,) = generate(buffer, actor, 1)
    buffer.draw(1, 0)
    buffer.begin(version, 1, session="restarted")
    assert buffer.status().ledger[state] == 2
    known = buffer.store.read(lambda tx: tx.groups.require(group).trained_at)
    assert known == ([] if trained_at is None else [(1, trained_at, 1)])


def test_the_version_that_a_group_was_trained_at_is_that_of_the_last_applied_update(make):
    buffer, actor = started(make, updates_per_step=4, max_lag=15)
    groups = generate(buffer, actor, 2)
    take(buffer, 1, 0, 3)
    take(buffer, 2, 3, 7)
    at = [buffer.store.read(lambda tx, group=group: tx.groups.require(group).trained_at) for group in groups]
    assert at == [[(1, 2, 0)], [(2, 6, 0)]]


def test_knobs_that_no_group_could_keep_are_refused_before_the_service_starts():
    with pytest.raises(StoreError, match=r"max_lag = 2 can never be met with 4 updates per step"):
        BufferCore(BufferConfig(), facts(max_lag=2, updates_per_step=4), lambda: 0.0)


def test_a_store_made_with_one_update_per_step_goes_on_with_no_other_number(tmp_path):
    Store(tmp_path, facts()).close()
    with pytest.raises(StoreError, match="was made with updates_per_step = 1 where this service has 4"):
        Store(tmp_path, facts(updates_per_step=4, max_lag=8))
