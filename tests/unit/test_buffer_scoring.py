"""Who scores what with the reference model: samples of ready groups, oldest first, each by one at a time."""

import numpy as np
import pytest

from buffer import protocol as p
from buffer import schema
from buffer.config import BufferConfig
from buffer.errors import BufferRefused
from buffer.steps import HELD_S
from tests.trajectories import decode
from tests.unit.test_buffer_damaged import flip, put_back
from tests.world.buffer import Actor, generate, train

TOKENS = 7
"""Of a sample: 3 of the prompt and 4 of the completion."""


def take(buffer, max_tokens=10_000):
    """Records that are handed out, and to which group each belongs."""
    reply, body = buffer.answer(p.TakeUnscored(max_tokens))
    rows = decode(body) if body else []
    return dict(zip(reply.record_ids, [row.group_id for row in rows], strict=True))


def write(buffer, records, value=-1.5):
    scores = [np.full(4, value, np.float32) for _ in records]
    buffer.ask(p.WriteScores(), p.Done, schema.encode_scores(list(records), scores))


@pytest.fixture
def buffer(make):
    made = make(max_lag=5, max_actor_lag=0)
    made.begin()
    return made


def test_whole_groups_are_handed_out_oldest_first_as_far_as_the_tokens_reach_but_at_least_one(buffer):
    generate(buffer, Actor(buffer), 5)
    assert list(take(buffer, 4 * TOKENS).values()) == [1, 1, 2, 2]
    assert list(take(buffer, 1).values()) == [3, 3]
    assert list(take(buffer).values()) == [4, 4, 5, 5]
    assert take(buffer) == {}


def test_what_was_handed_out_is_handed_out_again_when_its_scores_do_not_come(buffer):
    generate(buffer, Actor(buffer), 2)
    first = take(buffer)
    buffer.now_s += HELD_S - 1
    assert take(buffer) == {}
    buffer.now_s += 2
    assert take(buffer) == first


def test_what_is_scored_is_never_handed_out_again_and_is_drawn_with_its_scores(buffer):
    generate(buffer, Actor(buffer), 2)
    records = take(buffer)
    write(buffer, records)
    buffer.now_s += HELD_S + 1
    assert take(buffer) == {}
    buffer.restart()
    assert take(buffer) == {}
    reply, rows = buffer.draw(1, 0)
    assert reply.record_ids == list(records)
    assert [row.reference_logprobs.tolist() for row in rows] == [[-1.5] * 4] * 4


def test_a_group_of_which_a_sample_is_scored_gives_the_others(buffer):
    generate(buffer, Actor(buffer), 1)
    first, second = take(buffer)
    write(buffer, [second])
    buffer.now_s += HELD_S + 1
    assert list(take(buffer)) == [first]


def test_neither_groups_with_samples_to_come_nor_drawn_ones_are_handed_out(buffer):
    actor = Actor(buffer)
    generate(buffer, actor, 2)
    half_done = actor.lease(1)[0]
    actor.work(half_done, [0])
    assert buffer.draw(1, 0)[0].ready
    assert take(buffer) == {}


def test_scores_of_a_drawn_group_are_stored_and_those_of_records_that_are_gone_are_passed_over(make):
    buffer = make(BufferConfig(capacity_trajectories=12), max_lag=1, max_actor_lag=1)
    actor = Actor(buffer)
    buffer.begin()
    generate(buffer, actor, 2)
    early = take(buffer)
    for step in range(1, 9):
        train(buffer, step)
        buffer.ask(p.CheckpointDurable(step, 0), p.Done)
        generate(buffer, actor, 2)
    assert buffer.store.read(lambda tx: all(tx.find_block(record) is None for record in early)), "none was evicted"
    write(buffer, early)
    assert buffer.store.read(lambda tx: tx.scores.count) == 0


@pytest.mark.parametrize("record", [-1, 99])
def test_scores_of_a_record_that_never_was_are_refused(buffer, record):
    generate(buffer, Actor(buffer), 1)
    with pytest.raises(BufferRefused, match=f"record {record} is not in the buffer: there was never one"):
        write(buffer, [record])


def test_a_group_that_is_damaged_leaves_and_keeps_nobody_elses_samples_back(buffer):
    damaged, *sound = generate(buffer, Actor(buffer), 4)
    record = buffer.store.read(lambda tx: tx.groups.require(damaged).records[0])
    kept = flip(buffer, "records", record, at=40)
    assert [*dict.fromkeys(take(buffer).values())] == sound
    assert buffer.store.read(lambda tx: tx.groups.require(damaged).phase) == "closed"
    assert buffer.status().ledger["gap"] == 0
    put_back(buffer, kept)


def test_samples_that_no_step_takes_are_not_handed_out(make):
    buffer = make(max_lag=5, max_actor_lag=0, token_budget=TOKENS)
    actor = Actor(buffer)
    buffer.begin()
    generate(buffer, actor, 1, tokens=4)
    generate(buffer, actor, 1, tokens=8)
    assert set(take(buffer).values()) == {1}


def test_what_is_handed_out_in_a_turn_that_is_not_committed_is_handed_out_in_the_next(buffer):
    generate(buffer, Actor(buffer), 2)
    buffer.loses = "commit"
    assert list(take(buffer).values()) == [1, 1, 2, 2]
