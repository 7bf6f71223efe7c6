"""Stored data that is damaged later: no request ends the service, and no step waits forever for damaged data."""

import numpy as np
import pytest

from leeway.buffer import protocol as p
from leeway.buffer import schema
from leeway.buffer.config import BufferConfig
from leeway.buffer.errors import BufferRefused, StoreError
from leeway.buffer.rows import records_in
from leeway.buffer.service import BufferService
from leeway.buffer.store import Store
from leeway.buffer.tables import PromptPosterior
from leeway.buffer.transaction import _pack
from tests.world.buffer import Actor, generate, key_of_block, train


def flip(buffer, table, key, at=20):
    """Flip a bit of a stored value and return the original value."""

    def change(tx):
        where, place = getattr(tx, table), key_of_block(tx, key) if table == "records" else key
        parts = place if isinstance(place, tuple) else (place,)
        packed = _pack(parts)
        kept = where.require(*parts)
        stored = bytearray(where._txn.get(packed, db=where._db))
        stored[at] ^= 1
        where._txn.put(packed, bytes(stored), db=where._db)
        return kept

    return buffer.store.write(change)


def put_back(buffer, kept):
    buffer.store.write(lambda tx: tx.records.put(kept, min(records_in(kept))))


def scored(buffer, reply, value=-1.5):
    scores = [np.full(4, value, np.float32) for _ in reply.record_ids]
    return buffer.ask(p.WriteScores(), p.Done, schema.encode_scores(reply.record_ids, scores))


def test_a_damaged_recorded_draw_is_replaced_for_the_next_learner(make):
    buffer = make(groups_per_step=1)
    actor = Actor(buffer)
    buffer.begin()
    damaged, good, next_one = generate(buffer, actor, 3)
    first, _ = buffer.draw(1, 0)
    assert first.group_ids == [damaged]
    assert buffer.draw(2, 1)[0].group_ids == [good]
    kept = flip(buffer, "records", first.record_ids[0], at=40)
    with pytest.raises(BufferRefused, match="Restart the learner"):
        buffer.draw(1, 0)
    buffer.begin(session="restarted")
    again, _ = buffer.draw(1, 0, incarnation=1)
    assert again.group_ids == [good], "groups recorded for later steps are ready again"
    assert buffer.draw(1, 0, incarnation=1)[0] == again
    assert buffer.draw(2, 1, incarnation=1)[0].group_ids == [next_one]
    assert buffer.status().ledger["evicted_unused"] == 2
    put_back(buffer, kept)


def test_a_damaged_trained_step_is_redone_with_other_groups(make):
    buffer = make(groups_per_step=1)
    actor = Actor(buffer)
    buffer.begin()
    generate(buffer, actor, 2)
    first = train(buffer, 1)
    kept = flip(buffer, "records", first.record_ids[1], at=40)
    buffer.begin(session="restarted")
    again = train(buffer, 1, incarnation=1)
    assert set(again.record_ids).isdisjoint(first.record_ids)
    ledger = buffer.status().ledger
    assert (ledger["trained"], ledger["uses"], ledger["redone_uses"]) == (4, 4, 0)
    put_back(buffer, kept)


@pytest.mark.parametrize("table", ["groups", "window", "returned_prompts", "draws", "actors"])
def test_the_service_rejects_a_store_with_a_damaged_row_that_requests_need(make, table):
    buffer = make(BufferConfig(prompt_law="posterior"), groups_per_step=1, num_prompts=40)
    actor = Actor(buffer)
    buffer.begin()
    generate(buffer, actor, 1)
    assert buffer.draw(1, 0)[0].ready
    actor.work(actor.lease(1)[0], reward=None)  # the prompt can be leased again
    key = actor.name
    if table != "actors":
        ((key,), *_) = buffer.store.read(lambda tx: list(getattr(tx, table).all_keys()))
    kept = flip(buffer, table, key, at=10)
    buffer.store.close()
    with pytest.raises(StoreError, match=f"{buffer.folder} cannot be served: .*'{table}'.* checksum.* Restore it"):
        BufferService(buffer.config, buffer.facts, buffer.folder)
    buffer.store = Store(buffer.folder, buffer.facts)
    buffer.store.write(lambda tx: getattr(tx, table).put(kept, key))


@pytest.mark.parametrize("table", ["tries", "lengths"])
def test_damaged_statistics_of_a_prompt_are_deleted(make, caplog, table):
    buffer = make(BufferConfig(prompt_law="posterior"), groups_per_step=1)
    actor = Actor(buffer)
    buffer.begin()
    generate(buffer, actor, 2)
    (damaged, good) = buffer.store.read(lambda tx: [prompt for (prompt,) in tx.tries.all_keys()])
    buffer.store.write(lambda tx: [tx.lengths.put(PromptPosterior(1.0, 1.0, 0), prompt) for prompt in (damaged, good)])
    flip(buffer, table, damaged, at=10)
    buffer.store.close()
    BufferService(buffer.config, buffer.facts, buffer.folder).close()
    assert f"deleted the statistics of prompt {damaged}: the store's table '{table}'" in caplog.text
    buffer.restart()
    assert buffer.status().num_ready_groups == 2
    assert buffer.store.read(lambda tx: list(getattr(tx, table).all_keys())) == [(good,)]


def test_damaged_scores_are_deleted_and_written_again(make):
    buffer = make(BufferConfig(sampler="uniform", max_uses=2), groups_per_step=1, max_lag="unbounded")
    actor = Actor(buffer)
    buffer.begin()
    generate(buffer, actor, 1)
    first = train(buffer, 1)
    scored(buffer, first)
    flip(buffer, "scores", first.record_ids[0], at=10)
    again, rows = buffer.draw(2, 1)
    assert again.record_ids == first.record_ids
    assert rows[0].reference_logprobs is None
    np.testing.assert_array_equal(rows[1].reference_logprobs, np.full(4, -1.5, np.float32))
    scored(buffer, again, -2.5)
    np.testing.assert_array_equal(buffer.draw(2, 1)[1][0].reference_logprobs, np.full(4, -2.5, np.float32))


def test_damaged_scores_of_a_recorded_draw_do_not_change_its_records(make):
    buffer = make(groups_per_step=1)
    actor = Actor(buffer)
    buffer.begin()
    generate(buffer, actor, 2)
    first = train(buffer, 1)
    scored(buffer, first)
    flip(buffer, "scores", first.record_ids[1], at=10)
    buffer.begin(session="restarted")
    again, rows = buffer.draw(1, 0, incarnation=1)
    assert again.record_ids == first.record_ids
    assert [row.reference_logprobs is None for row in rows] == [False, True]


def test_scores_of_a_damaged_record_are_skipped_and_the_others_are_stored(make):
    buffer = make(groups_per_step=1)
    actor = Actor(buffer)
    buffer.begin()
    generate(buffer, actor, 1)
    drawn, _ = buffer.draw(1, 0)
    kept = flip(buffer, "records", drawn.record_ids[0], at=40)
    assert scored(buffer, drawn) == p.Done()
    assert buffer.store.read(lambda tx: list(tx.scores.all_keys())) == [(drawn.record_ids[1],)]
    put_back(buffer, kept)


def test_damaged_tokens_of_a_requeued_sample_are_removed_and_the_sample_restarts(make):
    buffer = make()
    Actor(buffer)
    buffer.begin()
    [lease] = buffer.lease("actor-0", 1)
    buffer.requeue(lease, [0, 1], [0, 1])
    flip(buffer, "partials", (lease.group_id, 1), at=40)
    [again], [row] = buffer.grant("actor-0", 1)
    assert (again.sample_indices, again.prefixes, row.sample_index) == ([0, 1], [0], 0)
