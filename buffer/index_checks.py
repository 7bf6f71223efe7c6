"""Checks every index of groups against the groups' rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

from buffer import catalogue
from buffer.config import BufferConfig
from buffer.eligible import EligibleIndex
from buffer.eviction import EvictionOrder
from buffer.lengths import bucket_of
from buffer.sum_tree import SumTree
from buffer.tables import NO_RECORD, Draw, Group
from buffer.transaction import Table, Transaction

MAX_NAMED = 4
"""How many keys a fault names."""

Key = tuple[int, ...]


def misplaced(tx: Transaction) -> list[str]:
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
            if self._index.law.weight is not None:
                self.weights[group_id] = self._index.law.weight.log_weight(group, oldest)
            if self._index.law.needs_strata:
                self.strata.add((bucket_of(group.mean_completion), oldest, group_id))
        # A group that is drawn may keep its place until eviction comes upon it.
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
        yield f"the sum tree has another weight than the law gives for {len(off)} groups, such as {off[:MAX_NAMED]}"
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


def _sample_faults(tx: Transaction, draw: Draw) -> Iterator[str]:
    """A draw must name samples of its groups, with their lengths."""
    lengths: dict[int, int] = {}
    for group in (tx.groups.require(group_id) for group_id in set(draw.group_ids)):
        lengths.update(zip(group.records, group.lengths, strict=True))
    stray = [record for record in draw.record_ids if record == NO_RECORD or record not in lengths]
    if stray:
        yield f"step {draw.step} names {len(stray)} records that its groups do not have, such as {stray[:MAX_NAMED]}"
    elif draw.lengths != [lengths[record] for record in draw.record_ids]:
        yield f"step {draw.step} has other lengths than the groups say for its records"
