"""Repeated draws: after a rollback of the learner, after a skipped step, and by late duplicates."""

import pytest

from leeway.buffer import protocol as p
from leeway.buffer.config import BufferConfig
from leeway.buffer.errors import BufferRefused
from leeway.common.staleness import PolicyVersion
from tests.world.buffer import Actor, generate, run_steps, train


def resumed(buffer, actor, steps, incarnation=1):
    """Repeat the given steps, and generate the groups that are missing."""
    for step in steps:
        for _ in range(2):
            for lease in actor.lease():
                actor.work(lease, version=PolicyVersion(*buffer.status().newest))
            reply, _ = buffer.draw(step, step - 1, incarnation=incarnation)
        assert reply.ready, reply.waiting_for
        buffer.finish(step, step, incarnation=incarnation)
        buffer.publish(step, incarnation)


@pytest.mark.parametrize("sampler", [BufferConfig(), BufferConfig(sampler="uniform", max_uses=2)])
def test_a_learner_may_resume_from_an_older_durable_checkpoint(make, sampler):
    buffer = make(sampler, num_prompts=50, max_lag="unbounded")
    actor = Actor(buffer)
    buffer.begin()
    for step in range(1, 21):
        run_steps(buffer, actor, [step])
        if step in (4, 10):
            buffer.ask(p.CheckpointDurable(step, 0), p.Done)
    buffer.begin(4, 4, session="from the older one")
    # The draws of steps 5 to 10 are no longer recorded. The groups kept for steps 11 to 20 must not close admission.
    resumed(buffer, actor, range(5, 23))


def test_a_draw_of_a_lost_step_releases_the_groups_recorded_for_later_ones(make):
    buffer = make(num_prompts=60, groups_per_step=1, max_lag="unbounded")
    actor = Actor(buffer)
    buffer.begin()
    run_steps(buffer, actor, range(1, 9))
    buffer.ask(p.CheckpointDurable(4, 0), p.Done)
    buffer.begin(2, 2, session="again")
    assert buffer.status().num_drawn_groups == 4
    assert buffer.draw(3, 2, incarnation=1)[0].ready
    assert buffer.status().num_drawn_groups == 1


def test_a_step_drawn_ahead_of_a_missing_one_keeps_its_batch(make):
    buffer = make(groups_per_step=1, max_lag="unbounded")
    actor = Actor(buffer)
    buffer.begin()
    drawn = run_steps(buffer, actor, range(1, 5))
    buffer.ask(p.CheckpointDurable(3, 0), p.Done)
    buffer.begin(2, 2, session="again")
    ahead, _ = buffer.draw(4, 3, incarnation=1)
    assert ahead.record_ids == drawn[4]
    assert buffer.draw(3, 2, incarnation=1)[0].ready
    assert buffer.draw(4, 3, incarnation=1)[0].record_ids == ahead.record_ids
    buffer.finish(3, 3, incarnation=1)
    buffer.finish(4, 4, incarnation=1)


def test_a_step_drawn_ahead_trains_at_its_repeated_version_after_a_skipped_step(make):
    buffer = make(max_lag=4)
    actor = Actor(buffer)
    buffer.begin()
    generate(buffer, actor, 4)
    buffer.draw(1, 0)
    ahead, _ = buffer.draw(2, 1)
    buffer.finish(1, 0, skipped=True)
    again, _ = buffer.draw(2, 0)
    assert again.record_ids == ahead.record_ids
    with pytest.raises(BufferRefused, match="cannot train at version 1"):
        buffer.draw(2, 1)  # a late duplicate of an earlier request
    buffer.finish(2, 1)
    assert buffer.draw(2, 1)[0].record_ids == ahead.record_ids, (
        "a draw of a finished step only repeats the earlier reply"
    )
    assert buffer.store.read(lambda tx: tx.draws.require(2).version) == 0
    trained = buffer.store.read(lambda tx: tx.groups.require(again.group_ids[0]).trained_at)
    assert trained == [(2, 0, 0)]


def test_a_draw_repeated_at_a_version_past_the_bound_gets_other_groups(make):
    buffer = make(max_lag=1, max_actor_lag=0, groups_per_step=1)
    actor = Actor(buffer)
    buffer.begin()
    slow, quick = actor.lease()
    actor.work(slow)
    actor.work(quick)
    old, _ = buffer.draw(3, 0)
    train(buffer, 1)
    generate(buffer, actor, 1, version=PolicyVersion(0, 1))
    train(buffer, 2)
    assert buffer.draw(3, 0)[0].record_ids == old.record_ids
    generate(buffer, actor, 1, version=PolicyVersion(0, 2))
    new, _ = buffer.draw(3, 2)
    assert new.ready
    assert set(new.record_ids).isdisjoint(old.record_ids)
    buffer.finish(3, 3)


def test_a_report_of_a_step_that_is_in_the_checkpoint_changes_nothing(make):
    buffer = make(max_lag=4)
    actor = Actor(buffer)
    buffer.begin()
    run_steps(buffer, actor, range(1, 3))
    buffer.begin(2, 2, session="restarted")
    buffer.finish(2, 2, incarnation=1)
    assert buffer.status().ledger["uses"] == 8
    assert buffer.faults() == []


def test_a_late_duplicate_of_a_draw_of_a_finished_step_is_refused(make):
    buffer = make(max_lag=0)
    actor = Actor(buffer)
    buffer.begin()
    generate(buffer, actor, 2)
    buffer.draw(1, 0)
    buffer.finish(1, 0, skipped=True)
    buffer.ask(p.CheckpointDurable(1, 0), p.Done)
    generate(buffer, actor, 2)
    with pytest.raises(BufferRefused, match="step 1 is over"):
        buffer.draw(1, 0)
    assert buffer.draw(2, 0)[0].ready


@pytest.mark.parametrize(("version", "state"), [(0, "filtered"), (1, "trained")])
def test_the_checkpoint_shows_a_skipped_step_even_if_its_report_is_lost(make, version, state):
    buffer = make()
    actor = Actor(buffer)
    buffer.begin()
    generate(buffer, actor, 2)
    buffer.draw(1, 0)
    buffer.begin(version, 1, session="restarted")
    ledger = buffer.status().ledger
    assert ledger[state] == 4
    assert ledger["uses"] == (4 if state == "trained" else 0)
