"""Checks a whole store: every checksum, every index, and the ledger against the tables."""

from __future__ import annotations

from typing import Any

from buffer.errors import CorruptRecord
from buffer.ledger import live_gap, recount
from buffer.store import Transaction
from buffer.tables import NO_RECORD


def verify(tx: Transaction) -> dict[str, Any]:
    """A report of what is in the store and of every fault found.

    Returns:
        'ledger' (the counters), 'recount' (the same from the tables), 'num_records', and 'faults':
        one sentence per fault, empty for a store in order.
    """
    faults: list[str] = []
    ledger = tx.state.ledger
    try:
        counted = recount(tx)
        faults += [
            f"the ledger says {name} = {getattr(ledger, name)}, the tables say {count}"
            for name, count in counted.items()
            if getattr(ledger, name) != count
        ]
        if gap := ledger.gap + live_gap(tx):
            faults.append(f"the ledger's identities are violated by {gap} samples")
        faults += _misplaced(tx)
    except CorruptRecord as error:
        counted = {}
        faults.append(str(error))
    for (record,) in list(tx.records.all_keys()):
        try:
            tx.records.require(record)
        except CorruptRecord as error:
            faults.append(str(error))
    return {"ledger": ledger.counts(), "recount": counted, "num_records": tx.records.count, "faults": faults}


def _misplaced(tx: Transaction) -> list[str]:
    """Groups that an index or a record disagrees with."""
    faults = []
    phases = {group_id: "open" for (group_id,) in tx.open_groups.all_keys()}
    phases |= {group_id: "ready" for _, group_id in tx.ready_groups.all_keys()}
    leased = {group_id: lease_id for (lease_id,), group_id in tx.leases.all_items()}
    owned: set[int] = set()
    for (group_id,), group in tx.groups.all_items():
        if group.phase in ("open", "ready") and phases.get(group_id) != group.phase:
            faults.append(f"group {group_id} is {group.phase} but indexed as {phases.get(group_id)}")
        if group.lease_id != leased.get(group_id, 0):
            faults.append(f"group {group_id} holds lease {group.lease_id} but is indexed under {leased.get(group_id)}")
        records = [record for record in group.records if record != NO_RECORD]
        faults += [f"record {r} of group {group_id} is missing or shared" for r in records if not _claim(tx, r, owned)]
    stray = {record for (record,) in tx.records.all_keys()} - owned
    faults += [f"record {record} belongs to no group" for record in sorted(stray)]
    return faults


def _claim(tx: Transaction, record: int, owned: set[int]) -> bool:
    if record in owned or not tx.records.has(record):
        return False
    owned.add(record)
    return True
