"""Checks a whole store: every checksum, every index, and the ledger against the tables."""

from __future__ import annotations

from typing import Any

from buffer.errors import CorruptRecord
from buffer.index_checks import misplaced
from buffer.ledger import live_gap, recount
from buffer.tables import NO_RECORD
from buffer.transaction import Transaction


def verify(tx: Transaction) -> dict[str, Any]:
    """A report of what is in the store and of every fault found.

    Returns:
        'ledger' (the counters), 'recount' (the same from the tables), 'num_records', and 'faults':
        one sentence per fault, empty for a store in order.
    """
    faults = list(tx.damaged())
    ledger = tx.state.ledger
    counted: dict[str, int] = {}
    try:
        counted = recount(tx)
        faults += [
            f"the ledger says {name} = {getattr(ledger, name)}, the tables say {count}"
            for name, count in counted.items()
            if getattr(ledger, name) != count
        ]
        if gap := ledger.gap + live_gap(tx):
            faults.append(f"the ledger's identities are violated by {gap} samples")
        faults += misplaced(tx)
        faults += _unclaimed(tx)
    except CorruptRecord as error:
        # A damaged row is named already; what lacks a row that another table names is not.
        if str(error) not in faults:
            faults.append(str(error))
    return {"ledger": ledger.counts(), "recount": counted, "num_records": tx.records.count, "faults": faults}


def _unclaimed(tx: Transaction) -> list[str]:
    """Records without a group, and groups that name records which are not there or are another's."""
    faults = []
    owned: set[int] = set()
    stored = {record for (record,) in tx.records.all_keys()}
    for (group_id,), group in tx.groups.all_items():
        for record in group.records:
            if record == NO_RECORD:
                continue
            if record in owned or record not in stored:
                faults.append(f"record {record} of group {group_id} is missing or shared")
            owned.add(record)
    faults += [f"record {record} belongs to no group" for record in sorted(stored - owned)]
    faults += [f"scores of record {r} are stored without it" for (r,) in tx.scores.all_keys() if r not in stored]
    return faults
