"""The store: damage, size, verification, and ownership."""

import errno
import json
import os
import subprocess
import sys

import lmdb
import msgspec
import numpy as np
import pytest

from leeway.buffer import pages, schema
from leeway.buffer import protocol as p
from leeway.buffer.config import BufferConfig
from leeway.buffer.errors import BufferRefused, StoreError
from leeway.buffer.offline.inspect import check_store
from leeway.buffer.rows import SCHEMA_VERSION
from leeway.buffer.store import Store, own
from leeway.buffer.tables import Identity
from leeway.buffer.transaction import Table
from tests.world.buffer import Actor, InProcessBuffer, facts
from tests.world.buffer_process import command


def test_a_damaged_record_is_detected_and_its_group_replaced(make, tmp_path):
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

    kept = buffer.store.read(lambda tx: tx.records.require(1))
    buffer.store.write(flip)
    buffer.draw(1, 0)
    assert buffer.draw(1, 0)[0].group_ids == [good.group_id]
    assert buffer.status().ledger["evicted_unused"] == 2
    assert "checksum" in buffer.faults()[0]
    buffer.store.write(lambda tx: tx.records.put(kept, 1))


def test_a_step_with_more_rows_than_a_push_may_have_is_drawn_and_scored(make, monkeypatch):
    monkeypatch.setattr("leeway.buffer.ingest.MAX_PUSHED_ROWS", 10)
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


def verified(folder):
    """Return exit status, report and errors of a process that verifies a store."""
    done = subprocess.run(command(folder, "--verify"), capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


@pytest.mark.process
def test_a_store_is_verified_by_another_process_while_it_is_written_and_afterwards(make, tmp_path):
    buffer = make(groups_per_step=1)
    buffer.begin()
    actor = Actor(buffer)
    for lease in actor.lease(2):
        actor.work(lease)
    for is_closed in (False, True):
        if is_closed:
            buffer.store.close()
        data = (buffer.folder / "data.mdb").read_bytes()
        status, report, _ = verified(buffer.folder)
        assert (status, report["run_id"], report["num_records"], report["faults"]) == (0, "r", 4, [])
        assert (buffer.folder / "data.mdb").read_bytes() == data
    status, _, error = verified(tmp_path / "nowhere")
    assert (status, "no buffer found in" in error) == (1, True)
    assert not (tmp_path / "nowhere").exists()
    buffer._open()


@pytest.mark.process
@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_a_store_of_another_schema_version_is_rejected_by_writers_and_readers(tmp_path, version):
    Store(tmp_path, facts()).close()
    with lmdb.open(str(tmp_path), max_dbs=64, map_size=2**26) as env:
        meta = env.open_db(b"meta", create=False)
        with env.begin(write=True, buffers=True) as txn:
            table = Table("meta", txn, meta, caches=False)
            table.put(msgspec.msgpack.encode(Identity("r", version, '{"what": "other facts"}')), "identity")
            table.put(b"a state of another form", "state")
            txn.drop(env.open_db(b"scores", txn, create=False))  # another version may have other tables
    reason = f"{tmp_path} has schema version {version}, .* version {SCHEMA_VERSION}: use .* that wrote it, or a new run"
    for reader in (None, facts()):
        with pytest.raises(StoreError, match=reason):
            Store(tmp_path, reader)
    status, _, error = verified(tmp_path)
    assert (status, error.count("\n")) == (1, 1)


def test_tables_and_fields_of_an_earlier_version_are_ignored(make):
    buffer = make(groups_per_step=1)
    buffer.begin()
    actor = Actor(buffer)
    actor.work(actor.lease(1)[0])
    drawn, _ = buffer.draw(1, 0)
    buffer.close()
    with lmdb.open(str(buffer.folder), max_dbs=64, map_size=2**26) as env:
        earlier, draws = env.open_db(b"quarantine"), env.open_db(b"draws", create=False)
        with env.begin(write=True, buffers=True) as txn:
            Table("quarantine", txn, earlier, caches=False).put(b"x" * 50_000, 1)
            row = msgspec.msgpack.decode(Table("draws", txn, draws, caches=False).view(1)) | {"lengths": [7, 7]}
            Table("records", txn, draws, caches=False).put(msgspec.msgpack.encode(row), 1)
    store = Store(buffer.folder, None)
    assert check_store(store)["faults"] == []
    store.close()
    buffer._open()
    assert buffer.draw(1, 0)[0] == drawn
    assert buffer.faults() == []


def test_a_page_check_overtaken_by_a_starting_service_reports_no_damage(tmp_path, monkeypatch):
    Store(tmp_path, facts()).close()
    locks = []

    def overtaken(data, *, deep=False):
        locks.append(own(data.parent))
        raise StoreError("page 3 is used twice")

    monkeypatch.setattr(pages, "check", overtaken)
    store = Store(tmp_path, None)
    os.close(locks.pop())
    report = check_store(store)
    assert (report["faults"], report["has_checked_pages"]) == ([], False)
    os.close(locks.pop())
    store.close()


@pytest.mark.process
def test_a_store_that_outgrows_the_map_of_a_reader_can_be_opened(tmp_path, monkeypatch):
    Store(tmp_path, facts()).close()
    grow = (
        "import lmdb, sys; env = lmdb.open(sys.argv[1], map_size=2**24, max_dbs=64)\n"
        "with env.begin(write=True) as txn: txn.put(b'k' * 8, bytes(2**22), db=env.open_db(b'scores', txn))"
    )
    table = Store._table

    def after_growth(store, name):
        if name == "window":
            subprocess.run([sys.executable, "-c", grow, str(tmp_path)], check=True, timeout=60)
        return table(store, name)

    monkeypatch.setattr(Store, "_table", after_growth)
    store = Store(tmp_path, None, first_map_size=2**16)
    assert store.size_bytes > 2**22
    assert store.read(lambda tx: tx.scores.count) == 1
    store.close()


def test_a_store_rejects_a_second_owner_another_run_and_a_truncated_file(tmp_path):
    store = Store(tmp_path, facts())
    with pytest.raises(StoreError, match="in use by process"):
        Store(tmp_path, facts())
    store.close()
    with pytest.raises(StoreError, match="belongs to run 'r', but this service is for run 'other'"):
        Store(tmp_path, facts(run_id="other"))
    with pytest.raises(StoreError, match=r"was created with group_size = 2 \(this service has 3\)"):
        Store(tmp_path, facts(group_size=3))
    data = tmp_path / "data.mdb"
    data.write_bytes(data.read_bytes()[:8192])
    with pytest.raises(StoreError, match=r"truncated|missing"):
        Store(tmp_path, facts())


def test_a_capacity_below_the_possible_outstanding_samples_is_rejected(tmp_path):
    with pytest.raises(StoreError, match="capacity_trajectories = 4"):
        InProcessBuffer(tmp_path, facts(), BufferConfig(capacity_trajectories=4))


@pytest.mark.parametrize(
    ("message", "probe", "is_full"),
    [
        ("No space left on device", None, True),
        ("Disk quota exceeded", None, True),
        ("Input/output error", None, False),
        ("Input/output error", errno.EDQUOT, True),
        ("Input/output error", errno.EIO, False),
    ],
)
def test_an_exceeded_quota_counts_as_a_full_disk(make, monkeypatch, message, probe, is_full):
    store = make().store

    def allocate(*_):
        if probe is not None:
            raise OSError(probe, "no")

    monkeypatch.setattr("os.posix_fallocate", allocate)
    assert store._is_full(lmdb.Error(f"mdb_txn_commit: {message}")) == is_full
