"""Checks a whole store, or rewrites it without its free pages.

verify    every checksum, the tables against each other, and the ledger against the tables
compact   of a run that is over. The old file stays in place until the new one is on disk and holds the same rows, byte
          for byte; then one rename puts the new one there. Killed at any point, the folder holds one whole store
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from buffer.errors import CorruptRecord, StoreError
from buffer.ledger import COMMITTED_STATES, COUNTS
from buffer.offline.inspect import look_at
from buffer.rows import group_of, records_in
from buffer.store import DATA, Store, own
from buffer.tables import NO_RECORD, DrawRecord
from buffer.transaction import TABLES, Transaction
from common.files import sync

MAX_NAMED = 4
_LOCK = "lock.mdb"
_NEW = "compacting"
"""Name of the folder, within the store's, where the new file grows."""


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
        if ledger.gap:
            faults.append(f"the ledger's identities are violated by {ledger.gap} samples")
        faults += [*_lease_faults(tx), *_partial_faults(tx), *_window_faults(tx), *_seen_faults(tx), *_draw_faults(tx)]
        faults += _unclaimed(tx)
    except CorruptRecord as error:
        # A damaged row is named already; what lacks a row that another table names is not.
        if str(error) not in faults:
            faults.append(str(error))
    return {"ledger": ledger.counts(), "recount": counted, "num_records": tx.state.num_records, "faults": faults}


def check_store(store: Store) -> dict[str, Any]:
    """The report of `verify`, with the faults in the structure of the file among its 'faults'.

    Returns:
        See `verify`, and 'has_checked_pages': False where a service writes the file now, so that its structure
        could not be looked at.
    """
    structure = store.structure_faults()
    report = look_at(store, verify)
    report["faults"] += structure or []
    report["has_checked_pages"] = structure is not None
    return report


def recount(tx: Transaction) -> dict[str, int]:
    """The two lines of the ledger, counted from the tables: every group, and what left them."""
    found: Counter[str] = Counter(tx.state.retired)
    for (group_id,) in tx.groups.all_keys():
        group = tx.groups.require(group_id)
        found.update(group.tallies())
        found["in_flight"] += len(group.in_flight())
    found["committed"] = sum(found[state] for state in COMMITTED_STATES)
    return {name: found[name] for name in COUNTS}


def _unclaimed(tx: Transaction) -> list[str]:
    """Records without a group, and groups that name records which are not there or are another's."""
    faults: list[str] = []
    owned: set[int] = set()
    stored: set[int] = set()
    for (first,), block in tx.records.all_items():
        inside = list(records_in(block))
        if inside != sorted(inside) or inside[0] != first or not stored.isdisjoint(inside):
            faults.append(f"the block at record {first} holds {inside[:MAX_NAMED]}, which are not its own")
        stored.update(inside)
    for (group_id,), group in tx.groups.all_items():
        for record in group.records:
            if record == NO_RECORD:
                continue
            if record in owned or record not in stored:
                faults.append(f"record {record} of group {group_id} is missing or shared")
            owned.add(record)
    if tx.state.num_records != len(stored):
        faults.append(f"the state says {tx.state.num_records} records are stored, there are {len(stored)}")
    faults += [f"record {record} belongs to no group" for record in sorted(stored - owned)]
    faults += [f"scores of record {r} are stored without it" for (r,) in tx.scores.all_keys() if r not in stored]
    return faults


def _lease_faults(tx: Transaction) -> Iterator[str]:
    """A lease is of one group, which waits for samples; no later lease has its number."""
    groups: dict[int, int] = {}
    for (group_id,), group in tx.groups.all_items():
        if not group.lease_id:
            continue
        if group.phase != "open" or group.lease_id in groups:
            yield f"lease {group.lease_id} of group {group_id} is closed, or that of group {groups.get(group.lease_id)}"
        groups[group.lease_id] = group_id


def _partial_faults(tx: Transaction) -> Iterator[str]:
    """What is stored of samples that are not complete, and what their groups say of it."""
    named: set[tuple[int, ...]] = set()
    for (group_id,), group in tx.groups.all_items():
        named |= {(group_id, index) for index in group.partials}
        if stray := {*group.partials, *group.resting} - {*group.missing()}:
            yield f"group {group_id} has tokens of samples {sorted(stray)[:MAX_NAMED]}, which are not missing"
    stored = {key: group_of(block) for key, block in tx.partials.all_items()}
    for key in sorted(named ^ {key for key, group_id in stored.items() if key[0] == group_id}):
        yield f"the first tokens of sample {key[-1]} of group {key[0]} are not there, or nobody names them"


def _window_faults(tx: Transaction) -> Iterator[str]:
    """A prompt that waits was taken from the data's order."""
    for (order,), waiting in tx.window.all_items():
        if waiting.order != order or order >= tx.state.cursor:
            yield (
                f"prompt {waiting.prompt_id} waits as number {waiting.order} of the data's order, under key {order}; "
                f"{tx.state.cursor} were taken"
            )


def _seen_faults(tx: Transaction) -> Iterator[str]:
    """Sequence numbers that arrived out of order: an actor's row must count those of its name."""
    found, names = tx.seen.count_texts(), tx.actors.count_texts()
    for name in sorted(names | found):
        counted = tx.actors.require(name).num_seen_above if name in names else 0
        if counted != found[name]:
            yield f"'{name}' counts {counted} sequence numbers that came out of order, there are {found[name]}"


def _draw_faults(tx: Transaction) -> Iterator[str]:
    """Draws and groups must agree on who holds whom."""
    held: Counter[int] = Counter()
    pending: Counter[int] = Counter()
    for (step,), draw in tx.draws.all_items():
        held.update(set(draw.group_ids))
        yield from _sample_faults(tx, draw)
        if step in tx.state.pending_draws:
            pending.update(set(draw.group_ids))
            if tx.state.pending_draws[step] != len(set(draw.group_ids)):
                yield f"step {step} holds {len(set(draw.group_ids))} groups, the state says otherwise"
    for (group_id,), group in tx.groups.all_items():
        if (group.held, group.pending) != (held[group_id], pending[group_id]):
            yield (
                f"group {group_id} counts {group.held} recorded and {group.pending} unfinished draws, "
                f"there are {held[group_id]} and {pending[group_id]}"
            )
        if (group.phase == "drawn") != (pending[group_id] > 0):
            yield f"group {group_id} is {group.phase}, and {pending[group_id]} unfinished draws name it"


def _sample_faults(tx: Transaction, draw: DrawRecord) -> Iterator[str]:
    """A draw must name samples of its groups, with their lengths."""
    lengths: dict[int, int] = {}
    for group in (tx.groups.require(group_id) for group_id in set(draw.group_ids)):
        lengths.update(zip(group.records, group.lengths, strict=True))
    stray = [record for record in draw.record_ids if record == NO_RECORD or record not in lengths]
    if stray:
        yield f"step {draw.step} names {len(stray)} records that its groups do not have, such as {stray[:MAX_NAMED]}"
    elif draw.lengths != [lengths[record] for record in draw.record_ids]:
        yield f"step {draw.step} has other lengths than the groups say for its records"


class Compacted(NamedTuple):
    """Size of a store's file before and after."""

    folder: Path
    before_bytes: int
    after_bytes: int


def compact(folder: Path) -> Compacted:
    """Compact the store of a buffer folder.

    Raises:
        StoreError: its service runs, it cannot be read, or there is no room for a second copy. The old
            file is then still there.
    """
    Store(folder, None).close()  # it can be read, and was not cut off
    lock = own(folder)
    try:
        return _compact(folder)
    finally:
        os.close(lock)


def _compact(folder: Path) -> Compacted:
    data, new = folder / DATA, folder / _NEW
    before = data.stat().st_size
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        with lmdb.open(str(folder), readonly=True, lock=False, max_dbs=len(TABLES), map_size=before) as env:
            _copy(env, new)
            _check_same(env, new)
        sync(new / DATA)
        after = (new / DATA).stat().st_size
        (new / DATA).replace(data)
        # Its reader table is of the old file: a process that opens the new one makes a table of its own.
        (folder / _LOCK).unlink(missing_ok=True)
        sync(folder)
    except (OSError, lmdb.Error) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(
            f"the buffer in {folder} could not be compacted ({error}); it is as it was. The copy needs as much free "
            "space as the store has live data"
        ) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return Compacted(folder, before, after)


def _copy(env: lmdb.Environment, folder: Path) -> None:
    env.copy(str(folder), compact=True)


def _check_same(old: lmdb.Environment, new: Path) -> None:
    """Compare every row of every table.

    Raises:
        StoreError: the copy differs.
    """
    size = (new / DATA).stat().st_size
    with lmdb.open(str(new), readonly=True, lock=False, max_dbs=len(TABLES), map_size=size) as copy:
        with old.begin() as tx:
            names = [bytes(name) for name in tx.cursor().iternext(keys=True, values=False)]
        tables = [(name, old.open_db(name, create=False), copy.open_db(name, create=False)) for name in names]
        with old.begin(buffers=True) as theirs, copy.begin(buffers=True) as ours:
            for name, before, after in tables:
                rows = zip(theirs.cursor(db=before), ours.cursor(db=after), strict=False)
                same = theirs.stat(before)["entries"] == ours.stat(after)["entries"]
                if not same or any(row != copied for row, copied in rows):
                    raise StoreError(
                        f"the compacted copy in {new} differs from the buffer in table '{name.decode()}'; it was "
                        "removed, and the buffer is as it was. Check the disk, then try again"
                    )
