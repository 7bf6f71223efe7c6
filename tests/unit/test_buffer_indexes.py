"""Faults that `verify` finds in other tables than the ledger, and the cost of requests with many open leases."""

import pytest

from leeway.buffer import protocol as p
from leeway.buffer.transaction import Table
from tests.world.buffer import Actor, InProcessBuffer, facts


@pytest.fixture
def busy(tmp_path):
    """Create a buffer with open leases, an out-of-order row, and a recorded draw."""
    buffer = InProcessBuffer(tmp_path, facts())
    actor = Actor(buffer)
    buffer.begin()
    leases = actor.lease(4)
    for lease in leases[:2]:
        actor.work(lease)
    buffer.push(actor.rows(leases[2])[1:])
    assert buffer.draw(1, 0)[0].ready
    assert buffer.faults() == []
    yield buffer
    buffer.close()


def change(table, field, make_other, *key):
    """Return a function that replaces a field of a row in a transaction."""

    def apply(tx):
        row = getattr(tx, table).require(*key)
        setattr(row, field, make_other(getattr(row, field)))
        getattr(tx, table).put(row, *key)

    return apply


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (change("groups", "lease_id", lambda _: 4, 3), "lease 4 of group 4 is closed, or also in group 3"),
        (change("groups", "lease_id", lambda _: 9, 1), "lease 9 of group 1 is closed"),
        (change("groups", "held", lambda held: held + 1, 1), "group 1 counts 2 recorded and 1 unfinished draws"),
        (lambda tx: tx.draws.delete(1), "group 1 counts 1 recorded and 1 unfinished draws, but 0 and"),
        (lambda tx: tx.records.delete(1), "record 1 of group 1 is missing"),
        (change("actors", "num_seen_above", lambda count: count + 5, "actor-0"), "'actor-0' counts 6 sequence numbers"),
        (lambda tx: tx.seen.delete_texts("actor-0"), "'actor-0' counts 1 sequence numbers"),
        (lambda tx: tx.seen.put(b"", "stranger", 1, 7), "'stranger' counts 0 sequence numbers"),
        (change("draws", "record_ids", lambda ids: [9991, *ids[1:]], 1), "step 1 references 1 records that its groups"),
        (change("draws", "record_ids", lambda ids: [-1, *ids[1:]], 1), "step 1 references 1 records that its groups"),
        (change("draws", "record_ids", lambda ids: [*ids[:-1], 5], 1), "such as [5]"),
    ],
)
def test_verify_reports_inconsistent_rows(busy, damage, fault):
    busy.store.write(damage)
    assert any(fault in found for found in busy.faults()), busy.faults()


def test_lost_leases_are_reissued_in_linear_time(make, monkeypatch):
    """Count the keys that a transaction reads: a scan of all leases for each lease would read 512^2 / 2 keys."""
    buffer = make(groups_per_step=128, max_lag="unbounded", num_prompts=1000)
    first = Actor(buffer, session="1")
    buffer.begin()
    assert len(first.lease(1000)) == 512
    restarted = Actor(buffer, session="2")
    num_read = 0
    scan = Table._scan

    def counted(table, *start, **how):
        nonlocal num_read
        for each in scan(table, *start, **how):
            num_read += 1
            yield each

    monkeypatch.setattr(Table, "_scan", counted)
    leases = buffer.ask(p.LeaseRequest(restarted.name, restarted.epoch, 1, 1000), p.LeaseGrant).leases
    assert [lease.attempt for lease in leases] == [2] * 512
    assert num_read < 10 * 512
