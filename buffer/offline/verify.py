"""Checks a whole store: every checksum, every index, and the ledger against the tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from buffer import catalogue
from buffer.config import BufferConfig
from buffer.eligible import EligibleIndex
from buffer.errors import CorruptRecord
from buffer.groups import EvictionOrder, live_gap
from buffer.ledger import COMMITTED_STATES
from buffer.lengths import bucket_of
from buffer.offline.inspect import look_at
from buffer.store import Store, is_served
from buffer.sum_tree import SumTree
from buffer.tables import NO_RECORD, DrawRecord, Group
from buffer.transaction import Table, Transaction

MAX_NAMED = 4
"""How many keys a fault names."""

Key = tuple[int, ...]


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
        faults += _misplaced(tx)
        faults += _unclaimed(tx)
    except CorruptRecord as error:
        # A damaged row is named already; what lacks a row that another table names is not.
        if str(error) not in faults:
            faults.append(str(error))
    return {"ledger": ledger.counts(), "recount": counted, "num_records": tx.records.count, "faults": faults}


def check_store(store: Store) -> dict[str, Any]:
    """The report of `verify`, with the faults in the structure of the file among its 'faults'.

    Returns:
        See `verify`, and 'has_checked_pages': False where a service writes the file now, so that its structure
        could not be looked at.
    """
    structure = store.structure_faults()
    report = look_at(store, verify)
    report["faults"] += structure
    report["has_checked_pages"] = not is_served(store.folder)
    return report


def recount(tx: Transaction) -> dict[str, int]:
    """The two lines of the ledger, counted from the tables: every group, and what left them."""
    found: Counter[str] = Counter(tx.state.retired)
    for (group_id,) in tx.groups.all_keys():
        group = tx.groups.require(group_id)
        found["issued"] += group.issued
        found["failed"] += group.failed
        if group.lease_id:
            found["in_flight"] += group.sample_states.count("missing")
        found.update(state for state in group.sample_states if state in COMMITTED_STATES)
    found["committed"] = sum(found[state] for state in COMMITTED_STATES)
    return {name: found[name] for name in ("issued", "in_flight", "committed", "failed", *COMMITTED_STATES)}


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


def _misplaced(tx: Transaction) -> list[str]:
    """One sentence per index that disagrees with the groups, and per group that disagrees with the draws."""
    settings = tx.state.indexed_for
    config = BufferConfig.model_validate_json(settings) if settings else BufferConfig()
    wanted = _Wanted(EligibleIndex(config), EvictionOrder(config))
    for _, group in tx.groups.all_items():
        wanted.add(tx, group)
    faults = [
        *_differences("ready_groups", tx.ready_groups, wanted.ready),
        *_differences("open_groups", tx.open_groups, wanted.open),
        *_differences("unleased_groups", tx.unleased_groups, wanted.unleased),
        *_differences("leases", tx.leases, wanted.leases.keys()),
        *_lease_faults(tx, wanted.leases),
        *_seen_faults(tx),
        *_differences("strata", tx.strata, wanted.strata),
        *_differences("eviction_order", tx.eviction_order, wanted.eviction),
        *_differences("catalogue", tx.catalogue, wanted.catalogue),
        *_weight_faults(tx, wanted.weights),
        *_draw_faults(tx),
    ]
    if tx.state.num_reusable != wanted.num_reusable:
        faults.append(f"{wanted.num_reusable} ready groups were used before, the state says {tx.state.num_reusable}")
    counted = Counter(bucket for bucket, _, _ in wanted.strata)
    if tx.state.strata != dict(counted):
        faults.append(f"the strata hold {dict(counted)} groups, the state says {tx.state.strata}")
    return faults


class _Wanted:
    """What every index should hold, gathered group by group."""

    def __init__(self, index: EligibleIndex, order: EvictionOrder) -> None:
        self._index = index
        self._order = order
        self.open: set[Key] = set()
        self.unleased: set[Key] = set()
        self.leases: dict[Key, int] = {}
        self.ready: set[Key] = set()
        self.strata: set[Key] = set()
        self.eviction: set[Key] = set()
        self.catalogue: set[Key] = set()
        self.weights: dict[int, float] = {}
        self.num_reusable = 0

    def add(self, tx: Transaction, group: Group) -> None:
        """Enter a group."""
        group_id, oldest = group.group_id, group.oldest_effective(tx.state)
        if group.lease_id:
            self.leases[(group.lease_id,)] = group_id
        if group.phase == "open":
            self.open.add((group_id,))
            if not group.lease_id:
                self.unleased.add((group_id,))
        elif any(record != NO_RECORD for record in group.records):
            self.catalogue.update(catalogue.keys(group, tx.state))
        if group.phase == "ready":
            self.ready.add((oldest, group_id))
            self.num_reusable += bool(group.uses)
            if self._index.sampler.weight is not None:
                self.weights[group_id] = self._index.sampler.weight.log_weight(group, oldest)
            if self._index.sampler.needs_strata:
                self.strata.add((bucket_of(group.mean_completion), oldest, group_id))
        # A group that is drawn may keep its place until eviction reaches it.
        place = self._order.class_of(group)
        place = group.rank_class if place < 0 else place
        if place >= 0:
            self.eviction.add((place, self._order.rank(group), group_id))


def _differences(name: str, table: Table[bytes] | Table[int], wanted: AbstractSet[Key]) -> Iterator[str]:
    found = set(table.all_keys())
    if lacking := sorted(wanted - found):
        yield f"the index '{name}' lacks {len(lacking)} of {len(wanted)} keys, such as {lacking[:MAX_NAMED]}"
    if stray := sorted(found - wanted):
        yield f"the index '{name}' has {len(stray)} keys that no group explains, such as {stray[:MAX_NAMED]}"


def _lease_faults(tx: Transaction, wanted: Mapping[Key, int]) -> Iterator[str]:
    """A lease must lead to the group that it is of."""
    for key, group_id in tx.leases.all_items():
        if wanted.get(key, group_id) != group_id:
            yield f"lease {key[0]} leads to group {group_id}, but group {wanted[key]} is the one that it is open for"


def _seen_faults(tx: Transaction) -> Iterator[str]:
    """Sequence numbers that arrived out of order: an actor's row must count those of its name."""
    found, names = tx.seen.count_texts(), tx.actors.count_texts()
    for name in sorted(names | found):
        counted = tx.actors.require(name).num_seen_above if name in names else 0
        if counted != found[name]:
            yield f"'{name}' counts {counted} sequence numbers that came out of order, there are {found[name]}"


def _weight_faults(tx: Transaction, wanted: dict[int, float]) -> Iterator[str]:
    tree = SumTree.of(tx)
    found = dict(tree.items())
    if wrong := sorted(wanted.keys() ^ found.keys()):
        yield f"the sum tree differs from the ready groups in {len(wrong)} groups, such as {wrong[:MAX_NAMED]}"
    off = [item for item in wanted.keys() & found.keys() if not math.isclose(wanted[item], found[item], abs_tol=1e-9)]
    if off:
        yield f"the sum tree has another weight than the sampler gives for {len(off)} groups, such as {off[:MAX_NAMED]}"
    yield from tree.faults()


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
