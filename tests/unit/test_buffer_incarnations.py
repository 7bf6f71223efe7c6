"""Effects of a restarted learner (a new incarnation) on leases, versions and draining."""

from leeway.buffer import protocol as p
from leeway.buffer.ingest import known_versions
from leeway.common.staleness import PolicyVersion
from tests.world.buffer import Actor, generate, run_steps, train

ONE_BY_ONE = {"max_lag": 2, "max_actor_lag": 0, "groups_per_step": 1, "num_prompts": 50}


def test_on_stale_wait_waits_for_a_group_in_flight_of_an_abandoned_version(make):
    buffer = make(**ONE_BY_ONE, on_stale="wait")
    slow, quick = Actor(buffer, "slow"), Actor(buffer, "quick")
    buffer.begin()
    for step in range(1, 7):
        generate(buffer, quick, 1, version=PolicyVersion(0, step - 1))
        train(buffer, step)
    lease = slow.lease(1)[0]
    assert lease.min_version == 6
    buffer.begin(5, 5, session="restarted")
    for step in range(6, 8):
        generate(buffer, quick, 1, version=PolicyVersion(*buffer.status().newest))
        train(buffer, step, incarnation=1)
    # Tokens of version 6 count as version 5 now, so step 8 is the last step that can use the group.
    generate(buffer, quick, 1, version=PolicyVersion(1, 7))
    reply, _ = buffer.draw(8, 7, incarnation=1)
    assert not reply.ready
    assert f"waits for older groups (on_stale = 'wait'): group {lease.group_id}" in reply.waiting_for
    slow.work(lease, version=PolicyVersion(0, 6))
    assert train(buffer, 8, incarnation=1).group_ids == [lease.group_id]
    assert buffer.status().ledger["dropped_stale"] == 0
    assert buffer.faults() == []


def test_a_lease_older_than_the_checkpoint_keeps_its_age(make):
    buffer = make(**ONE_BY_ONE)
    actor = Actor(buffer)
    buffer.begin()
    lease = actor.lease(1)[0]
    run_steps(buffer, actor, range(1, 3))
    buffer.begin(2, 2, session="restarted")
    assert buffer.store.read(lambda tx: tx.groups.require(lease.group_id).min_version) == 0


def test_a_new_learner_ends_the_draining_of_the_previous_one(make):
    buffer = make()
    actor = Actor(buffer)
    buffer.begin()
    buffer.ask(p.Drain(), p.Done)
    buffer.restart()
    buffer.begin()
    assert actor.lease() == [], "draining continues, because the same learner repeats its request"
    assert buffer.status().draining
    buffer.begin(0, 0, session="resumed run")
    assert not buffer.status().draining
    assert actor.lease()


def test_a_version_that_an_earlier_incarnation_never_published_is_quarantined(make):
    buffer = make(max_lag=4)
    actor = Actor(buffer)
    buffer.begin()
    leases = actor.lease(4)
    run_steps(buffer, actor, range(1, 3))
    buffer.begin(1, 1, session="restarted")
    buffer.restart()
    buffer.begin(1, 1, session="restarted again")
    assert actor.work(leases.pop(), [0], version=PolicyVersion(0, 2)) == ["committed"]
    for version in (PolicyVersion(0, 3), PolicyVersion(1, 3), PolicyVersion(2, 3)):
        assert actor.work(leases.pop(), [0], version=version) == ["quarantined"]
    assert buffer.status().quarantined_by_reason == {"version that was never published": 3}


def test_versions_of_drawn_steps_are_accepted_even_if_the_learner_was_replaced(make):
    buffer = make()
    actor = Actor(buffer)
    buffer.begin()
    last, *leases = actor.lease()
    for lease in leases:
        actor.work(lease)
    for step in (1, 2):
        assert buffer.draw(step, step - 1)[0].ready
    buffer.begin(0, 0, session="restarted")
    assert actor.work(last, version=PolicyVersion(0, 2)) == ["committed", "committed"]


def test_the_known_versions_are_those_that_each_incarnation_may_have_published(make):
    buffer = make()
    buffer.begin()
    buffer.publish(2)
    for session in ("restarted", "again"):
        buffer.begin(1, 1, session=session)
    assert buffer.store.read(lambda tx: known_versions(tx.state)) == {0: 2, 1: 1, 2: 1}
