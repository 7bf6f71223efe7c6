"""Steps of several updates: a draw trains at several versions, and every staleness rule applies to the last version."""

import pytest

from leeway.buffer.config import BufferConfig
from leeway.buffer.core import BufferCore
from leeway.buffer.errors import BufferRefused, StoreError
from leeway.buffer.store import Store
from leeway.common.staleness import PolicyVersion
from tests.world.buffer import Actor, facts, generate


def started(make, **changes):
    buffer = make(**{"updates_per_step": 2, "max_actor_lag": 0, "groups_per_step": 1, "num_prompts": 50, **changes})
    actor = Actor(buffer)
    buffer.begin()
    return buffer, actor


def take(buffer, step, version, after, incarnation=0):
    """Draw and finish one step that begins at `version`; return its record ids."""
    reply, _ = buffer.draw(step, version, incarnation=incarnation)
    assert reply.ready, reply.waiting_for
    buffer.finish(step, after, incarnation=incarnation, skipped=after == version)
    buffer.publish(after, incarnation)
    return reply.record_ids


def test_a_step_adds_one_version_for_each_applied_update(make):
    buffer, actor = started(make, updates_per_step=4, max_lag=15)
    generate(buffer, actor, 4)
    for step, (version, after) in enumerate([(0, 4), (4, 5), (5, 5), (5, 8)], start=1):
        take(buffer, step, version, after)
    ledger = buffer.status().ledger
    assert (buffer.status().version, ledger["trained"], ledger["filtered"]) == (8, 6, 2)


@pytest.mark.parametrize(
    ("after", "skipped", "message"),
    [
        (5, False, "leads to a version from 1 to 4, not 5"),
        (0, False, "leads to a version from 1 to 4, not 0"),
        (1, True, "skipping it leads to version 0, not 1"),
    ],
)
def test_a_version_that_the_updates_of_a_step_cannot_reach_is_refused(make, after, skipped, message):
    buffer, actor = started(make, updates_per_step=4, max_lag=7)
    generate(buffer, actor, 1)
    buffer.draw(1, 0)
    with pytest.raises(BufferRefused, match=message):
        buffer.finish(1, after, skipped=skipped)
    assert buffer.status().version == 0


def test_the_age_bound_applies_to_the_last_update(make):
    for max_lag, is_used in ((5, True), (4, False)):
        buffer, actor = started(make, max_lag=max_lag)
        slow, quick = actor.lease(2)
        actor.work(quick)
        take(buffer, 1, 0, 2)
        generate(buffer, actor, 1, version=PolicyVersion(0, 2))
        take(buffer, 2, 2, 4)
        actor.work(slow)
        # A step at version 4 has its last update at 5, and the tokens of the slow group have version 0.
        reply, _ = buffer.draw(3, 4)
        assert (reply.ready, buffer.status().ledger["dropped_stale"]) == (is_used, 0 if is_used else 2)


def test_the_smallest_bound_admits_one_step_of_groups_per_published_step(make):
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
        assert actor.lease() == [], "the version of the last update is not published yet"
        buffer.publish(version + 3)


def test_admission_counts_the_versions_of_previous_steps(make):
    buffer, actor = started(make, max_lag=5)
    assert len(generate(buffer, actor, 3)) == 3, (
        "after two steps, the last update of the third step trains at version 5"
    )
    assert actor.lease() == []
    buffer.draw(1, 0)
    buffer.finish(1, 2)
    # Only version 0 is published. A new group would wait two more steps, and its last update would train at version 7.
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
    # The slow groups must be used by the steps that begin at versions 2 and 4.
    # The last update of the step after these two steps trains at version 7, which exceeds max_lag.
    reply, _ = buffer.draw(2, 2)
    assert not reply.ready
    assert f"group {slow[0].group_id}" in reply.waiting_for
    for step, lease in zip((2, 3), slow, strict=True):
        actor.work(lease)
        assert buffer.draw(step, 2 * step - 2)[0].group_ids == [lease.group_id]
        buffer.finish(step, 2 * step)
    assert buffer.status().ledger["dropped_stale"] == 0


def test_a_draw_may_be_ahead_by_all_updates_of_the_drawn_steps(make):
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


def test_only_samples_of_versions_within_the_current_step_are_accepted(make):
    buffer, actor = started(make, updates_per_step=4, max_lag=11)
    drawn, early, made_up = actor.lease()
    actor.work(drawn)
    assert buffer.draw(1, 0)[0].ready
    # The learner announced no version after 0 to the service, but may have published up to version 4 in this step.
    assert actor.work(early, version=PolicyVersion(0, 4)) == ["committed"] * 2
    assert actor.work(made_up, version=PolicyVersion(0, 5)) == ["quarantined"] * 2


def test_a_restarted_learner_redoes_the_steps_within_the_bound(make):
    buffer, actor = started(make, max_lag=5)
    recorded = {}
    for step in range(1, 6):
        generate(buffer, actor, 1, version=PolicyVersion(0, 2 * step - 2))
        recorded[step] = take(buffer, step, 2 * step - 2, 2 * step)
    buffer.begin(3, 2, session="restarted")  # resumed after one of the two updates of step 2
    # Tokens of versions after 3 now count as version 3, so updates up to version 8 may use these tokens.
    for step, version in ((3, 3), (4, 5), (5, 7)):
        reply, _ = buffer.draw(step, version, incarnation=1)
        if step < 5:
            assert reply.record_ids == recorded[step]
            buffer.finish(step, version + 2, incarnation=1)
            buffer.publish(version + 2, 1)
    assert reply.record_ids == recorded[5]
    assert buffer.status().ledger["redone_uses"] == 4


def test_recorded_steps_whose_last_update_exceeds_the_bound_are_released(make):
    buffer, actor = started(make, max_lag=3)
    for step in range(1, 5):
        generate(buffer, actor, 1, version=PolicyVersion(0, 2 * step - 2))
        take(buffer, step, 2 * step - 2, 2 * step)
    buffer.begin(0, 0, session="restarted")
    # All tokens now count as version 0, so only the draws of the steps that begin at versions 0 and 2 are kept.
    assert sorted(buffer.store.read(lambda tx: dict(tx.state.pending_draws))) == [1, 2]


@pytest.mark.parametrize(
    ("version", "state", "trained_at"), [(0, "filtered", None), (1, "trained", 0), (4, "trained", 3)]
)
def test_the_checkpoint_shows_the_updates_of_a_step_even_if_its_report_is_lost(make, version, state, trained_at):
    buffer, actor = started(make, updates_per_step=4, max_lag=7)
    (group,) = generate(buffer, actor, 1)
    buffer.draw(1, 0)
    buffer.begin(version, 1, session="restarted")
    assert buffer.status().ledger[state] == 2
    known = buffer.store.read(lambda tx: tx.groups.require(group).trained_at)
    assert known == ([] if trained_at is None else [(1, trained_at, 1)])


def test_the_trained_version_of_a_group_is_that_of_the_last_applied_update(make):
    buffer, actor = started(make, updates_per_step=4, max_lag=15)
    groups = generate(buffer, actor, 2)
    take(buffer, 1, 0, 3)
    take(buffer, 2, 3, 7)
    at = [buffer.store.read(lambda tx, group=group: tx.groups.require(group).trained_at) for group in groups]
    assert at == [[(1, 2, 0)], [(2, 6, 0)]]


def test_an_unreachable_age_bound_is_rejected_before_the_service_starts():
    with pytest.raises(StoreError, match=r"max_lag = 2 can never be met with 4 updates per step"):
        BufferCore(BufferConfig(), facts(max_lag=2, updates_per_step=4), lambda: 0.0)


def test_a_store_cannot_change_its_number_of_updates_per_step(tmp_path):
    Store(tmp_path, facts()).close()
    with pytest.raises(StoreError, match=r"was created with updates_per_step = 1 \(this service has 4\)"):
        Store(tmp_path, facts(updates_per_step=4, max_lag=8))
