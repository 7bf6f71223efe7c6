"""A run resumed with a lower length limit: longer stored samples are filtered and counted as too long."""

import contextlib

import pytest

from leeway.buffer.client import BufferClient
from leeway.buffer.config import BufferConfig
from leeway.buffer.service import BufferService
from tests.trajectories import decode
from tests.world.buffer import Actor, facts, make_trajectory, train
from tests.world.serving import serving

PROMPT = 3
"""Number of tokens of every prompt that `make_trajectory` makes."""


def filled(buffer, *groups, session="1"):
    """Finish groups whose samples have the given numbers of tokens; return the group ids."""
    actor = Actor(buffer, session=session)
    done = []
    for lengths in groups:
        (lease,) = actor.lease(1)
        for index, length in enumerate(lengths):
            actor.work(lease, [index], num_completion_tokens=length - PROMPT)
        done.append(lease.group_id)
    return done


def restart(buffer, max_tokens):
    """Restart the service with a limit of `max_tokens` per sample."""
    buffer.facts = buffer.facts.model_copy(update={"max_tokens": max_tokens})
    buffer.restart()


def test_a_group_continues_without_its_long_samples_if_enough_are_left(make):
    buffer = make(group_size=3, groups_per_step=1)
    buffer.begin()
    (group,) = filled(buffer, [16, 10, 9])
    restart(buffer, 10)
    reply, rows = buffer.draw(1, 0)
    assert reply.group_ids == [group]
    assert [len(row.token_ids) for row in rows] == [10, 9]
    ledger = buffer.status().ledger
    assert [ledger[name] for name in ("drawn", "filtered", "filtered_too_long")] == [2, 1, 1]
    buffer.finish(1, 1)
    assert buffer.status().ledger["trained"] == 2


def test_samples_above_the_limit_are_drawn_if_they_fit_the_token_budget(make):
    buffer = make(groups_per_step=1)
    buffer.begin()
    (group,) = filled(buffer, [16, 14])
    buffer.facts = buffer.facts.model_copy(update={"token_budget": 16})
    restart(buffer, 10)
    assert buffer.draw(1, 0)[0].group_ids == [group]
    assert buffer.status().ledger["filtered_too_long"] == 0


def test_a_group_with_one_short_sample_is_filtered_and_its_prompt_leased_again(make):
    buffer = make(groups_per_step=1)
    buffer.begin()
    long, short = filled(buffer, [16, 9], [9, 9])
    # the draw returns the older group, which is the long group
    (prompt,) = {row.prompt_id for row in buffer.draw(1, 0)[1]}
    buffer.begin(session="with a smaller budget")
    restart(buffer, 10)
    reply, rows = buffer.draw(1, 0, incarnation=1)
    assert (reply.group_ids, [len(row.token_ids) for row in rows]) == ([short], [9, 9])
    ledger = buffer.status().ledger
    assert [ledger[name] for name in ("drawn", "filtered", "filtered_too_long")] == [2, 2, 2]
    assert buffer.lease("actor-0", 1)[0].prompt_id == prompt
    assert long < short


def test_nothing_is_filtered_with_an_equal_or_higher_limit(make):
    buffer = make(groups_per_step=1)
    buffer.begin()
    (group,) = filled(buffer, [16, 16])
    restart(buffer, 32)
    assert buffer.draw(1, 0)[0].group_ids == [group]
    assert buffer.status().ledger["filtered_too_long"] == 0


def test_a_trained_long_group_stays_trained_and_is_not_used_again(make):
    config = BufferConfig(sampler="uniform", max_uses="unlimited")
    buffer = make(config, group_size=3, groups_per_step=1, max_lag="unbounded")
    buffer.begin()
    filled(buffer, [16, 9, 9])
    train(buffer, 1)
    restart(buffer, 10)
    (short,) = filled(buffer, [9, 9, 9], session="2")
    for step in (2, 3, 4):
        assert train(buffer, step).group_ids == [short]
    ledger = buffer.status().ledger
    assert [ledger[name] for name in ("trained", "filtered", "filtered_too_long")] == [6, 0, 0]


def test_a_recorded_step_with_a_long_sample_is_drawn_again_for_the_next_learner(make):
    buffer = make(group_size=3, groups_per_step=1, max_lag="unbounded")
    buffer.begin()
    (group,) = filled(buffer, [16, 10, 9])
    assert len(train(buffer, 1).record_ids) == 3
    restart(buffer, 10)
    buffer.begin(session="resumed before step 1")
    (fresh,) = filled(buffer, [8, 8, 8], session="2")
    reply, rows = buffer.draw(1, 0, incarnation=1)
    assert reply.group_ids == [fresh] != [group]
    assert all(len(row.token_ids) <= 10 for row in rows)


@pytest.fixture
def serve(tmp_path):
    """Return `serve(max_tokens)`, which starts a service with this limit and returns a learner and an actor client."""
    running = []

    def stop():
        clients, stack = running.pop()
        for client in clients:
            client.close(1.0)
        stack.close()

    def start(max_tokens):
        if running:
            stop()
        config = BufferConfig()
        service = BufferService(config, facts(groups_per_step=1, max_tokens=max_tokens), tmp_path / "buffer")
        stack = contextlib.ExitStack()
        address = stack.enter_context(serving(service))
        clients = [BufferClient(address, run_id="r", role=name, name=name) for name in ("learner", "actor")]
        running.append((clients, stack))
        for client in clients:
            client.connect()
        return clients

    yield start
    stop()


def test_a_service_with_a_lower_limit_serves_only_samples_within_it(serve):
    learner, actor = serve(16)
    incarnation = learner.begin_incarnation(0, 0).result(60).incarnation
    learner.published(incarnation, 0).result(60)
    long, short = actor.lease(2).result(60).leases
    rows = [(long, 0, 13), (long, 1, 13), (short, 0, 5), (short, 1, 5)]
    pushed = [actor.push(make_trajectory(lease, i, seq=0, num_completion_tokens=n)) for lease, i, n in rows]
    assert {future.result(60).outcome for future in pushed} == {"committed"}

    learner, actor = serve(10)
    incarnation = learner.begin_incarnation(0, 0).result(60).incarnation
    learner.published(incarnation, 0).result(60)
    draw = learner.draw(1, 0, incarnation, 1, wait_s=5.0).result(60)
    assert draw.group_ids == [short.group_id]
    assert [len(row.token_ids) for row in decode(draw.body)] == [8, 8]
    assert draw.ledger["filtered_too_long"] == draw.ledger["filtered"] == 2
    assert draw.ledger["gap"] == 0
