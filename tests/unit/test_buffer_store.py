"""The store: damage, size, verification, and who may open it."""

import json

import numpy as np
import pytest

from buffer import protocol as p
from buffer import schema
from buffer.__main__ import main
from buffer.config import BufferConfig
from buffer.errors import BufferRefused, StoreError
from buffer.store import Store
from tests.in_process_buffer import InProcessBuffer
from tests.unit.buffer_rules import Actor, facts


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
