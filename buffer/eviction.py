"""Which groups are evicted first, and when.

Only complete groups that no recorded draw needs have a place in the order: closed ones first, and under
replay then those that could be drawn again. Within either class the knob `eviction` ranks them.
"""

from __future__ import annotations

from collections.abc import Callable

from buffer.catalogue import sortable_float
from buffer.config import BufferConfig
from buffer.tables import NO_RECORD, Group
from buffer.transaction import Transaction

CLOSED, ELIGIBLE = 0, 1
_NO_PLACE = -1
_VERSIONS = 2**40
"""More versions than an incarnation has."""
_BYTES_PER_TOKEN = 8
"""A token id and a log-probability."""
_BYTES_PER_RECORD = 512
"""Roughly what a record, its keys and its share of the group's row take beside the tokens."""


class EvictionOrder:
    """Keeps the order in which groups would go.

    A group that is drawn keeps its place until eviction comes upon it, so that a draw need not touch the
    order: most are back before that.
    """

    def __init__(self, config: BufferConfig) -> None:
        self._by_reward = config.eviction == "lowest_reward"
        self._replays = config.replays

    def place(self, tx: Transaction, group: Group) -> None:
        """Give the group the place that it now has; its row must be written after that."""
        wanted = self.class_of(group)
        if wanted == group.rank_class or (wanted == _NO_PLACE and _is_stored(group)):
            return
        self.remove(tx, group)
        if wanted != _NO_PLACE:
            tx.eviction_order.put(b"", wanted, self.rank(group), group.group_id)
        group.rank_class = wanted

    def remove(self, tx: Transaction, group: Group) -> None:
        """Take the group out of the order; its row must be written after that."""
        if group.rank_class != _NO_PLACE:
            tx.eviction_order.delete(group.rank_class, self.rank(group), group.group_id)
            group.rank_class = _NO_PLACE

    def class_of(self, group: Group) -> int:
        """CLOSED, ELIGIBLE, or -1 for a group that must stay, or of which nothing is stored."""
        if group.held or group.phase in ("open", "drawn") or not _is_stored(group):
            return _NO_PLACE
        if group.phase == "closed":
            return CLOSED
        return ELIGIBLE if self._replays else _NO_PLACE

    def rank(self, group: Group) -> int:
        """Its place within the class; fixed once the group is complete."""
        if self._by_reward:
            reward = group.mean_reward
            return 0 if reward is None else sortable_float(reward)
        incarnation, version = group.oldest or (0, 0)
        return incarnation * _VERSIONS + version


class Eviction:
    """Keeps the store within its capacity."""

    def __init__(self, config: BufferConfig, order: EvictionOrder, num_kept: int) -> None:
        """Args:
        config: the capacities.
        order: who goes first.
        num_kept: eligible groups that are never evicted, so that the learner does not run dry.
        """
        self._max_records = config.capacity_trajectories
        self._max_bytes = config.capacity_gib * 2**30
        self._order = order
        self._num_kept = num_kept

    def run(self, tx: Transaction, evict: Callable[[Transaction, Group], None]) -> None:
        """Evict while the store is above a capacity and there is a group that may go."""
        excess = tx.records.count - self._max_records
        excess_bytes = tx.live_bytes - self._max_bytes if self._max_bytes else 0.0
        while excess > 0 or excess_bytes > 0:
            first = next(tx.eviction_order.all_keys(), None)
            if first is None or (first[0] == ELIGIBLE and tx.ready_groups.count <= self._num_kept):
                return
            group = tx.groups.require(first[2])
            if self._order.class_of(group) != first[0]:
                self._order.remove(tx, group)
                tx.groups.put(group, group.group_id)
                continue
            # Pages are given back one by one, so what a group frees is estimated; the next run corrects it.
            excess_bytes -= _BYTES_PER_TOKEN * sum(group.lengths)
            num = sum(record != NO_RECORD for record in group.records)
            excess, excess_bytes = excess - num, excess_bytes - _BYTES_PER_RECORD * num
            evict(tx, group)


def _is_stored(group: Group) -> bool:
    return any(record != NO_RECORD for record in group.records)
