"""Scores of the reference model are stored with the records and drawn with the records."""

import numpy as np
import pytest

from leeway.buffer import protocol as p
from leeway.buffer import schema
from leeway.buffer.config import BufferConfig
from leeway.buffer.errors import BufferRefused
from tests.world.buffer import Actor, generate, train


def records(buffer):
    """Return the records of all ready groups."""
    return buffer.store.read(
        lambda tx: [group.records[i] for _, group in tx.groups.all_items() for i in group.usable()]
    )


def write(buffer, records, value=-1.5):
    scores = [np.full(4, value, np.float32) for _ in records]
    buffer.ask(p.WriteScores(), p.Done, schema.encode_scores(list(records), scores))


@pytest.fixture
def buffer(make):
    buffer = make(max_lag=5, max_actor_lag=0)
    buffer.begin()
    return buffer


def test_scored_samples_are_drawn_with_their_scores_even_after_a_restart(buffer):
    generate(buffer, Actor(buffer), 2)
    write(buffer, records(buffer))
    buffer.restart()
    _, rows = buffer.draw(1, 0)
    assert [row.reference_logprobs.tolist() for row in rows] == [[-1.5] * 4] * 4


def test_scores_of_evicted_records_are_ignored(make):
    buffer = make(BufferConfig(capacity_trajectories=12), max_lag=1, max_actor_lag=1)
    actor = Actor(buffer)
    buffer.begin()
    generate(buffer, actor, 2)
    early = records(buffer)
    for step in range(1, 9):
        train(buffer, step)
        buffer.ask(p.CheckpointDurable(step, 0), p.Done)
        generate(buffer, actor, 2)
    assert buffer.store.read(lambda tx: all(tx.find_block(record) is None for record in early)), (
        "the early records must be evicted before this write"
    )
    write(buffer, early)
    assert buffer.store.read(lambda tx: tx.scores.count) == 0


@pytest.mark.parametrize("record", [-1, 99])
def test_scores_of_a_record_that_never_existed_are_refused(buffer, record):
    generate(buffer, Actor(buffer), 1)
    with pytest.raises(BufferRefused, match=f"record {record} never existed in this buffer"):
        write(buffer, [record])
