"""A sum tree in the store: draws items in proportion to their weights, at a cost that grows with log(items).

The leaves hold the log-weights of FANOUT neighbouring ids each; a slot of an inner node holds the
logarithm of the sum over one child. Log-weights, because a softmax of rewards or an age sampler spans more
than a float64 holds. Ids only grow, so the tree gains a level now and then, and nodes that become
empty are deleted.

Nodes are kept decoded for the length of a transaction and written once at its end. A changed slot of an
inner node is always computed anew from its child, so no rounding error builds up.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from buffer.transaction import Table, Transaction

FANOUT = 128
"""Slots of a node; one of 1 KiB fits into a page of the store with others."""
LOG_WEIGHT_LIMIT = 1e12
"""Log-weights are clamped to this, so that their differences stay finite."""

_EMPTY = -np.inf

Node = npt.NDArray[np.float64]


class SumTree:
    """The weights of one transaction."""

    def __init__(self, table: Table[bytes]) -> None:
        """Read nodes of this table as they are needed; `write` writes what changed."""
        self._table = table
        self._nodes: dict[tuple[int, int], Node] = {}
        self._unwritten: set[tuple[int, int]] = set()
        self._outdated: set[int] = set()
        """Leaves whose sums are not in their parents yet."""
        top = next(table.all_keys(reverse=True), None)
        self._num_levels = 0 if top is None else top[0] + 1

    @classmethod
    def of(cls, tx: Transaction) -> SumTree:
        """The tree of this transaction, which writes it before it ends."""
        for hook in tx.before_flush:
            if isinstance(owner := getattr(hook, "__self__", None), cls):
                return owner
        tree = cls(tx.weights)
        tx.before_flush.append(tree.write)
        return tree

    def set(self, item: int, log_weight: float) -> None:
        """Give an item a weight."""
        self._put(item, min(max(log_weight, -LOG_WEIGHT_LIMIT), LOG_WEIGHT_LIMIT))

    def discard(self, item: int) -> None:
        """Take an item out; nothing happens where it is not in."""
        if self.get(item) is not None:
            self._put(item, _EMPTY)

    def get(self, item: int) -> float | None:
        """An item's log-weight; None where it is not in."""
        node, slot = divmod(item, FANOUT)
        value = float(self._node(0, node)[slot])
        return None if value == _EMPTY else value

    def clear(self) -> None:
        """Take every item out."""
        for key in list(self._table.all_keys()):
            self._table.delete(*key)
        self._nodes.clear()
        self._unwritten.clear()
        self._outdated.clear()
        self._num_levels = 0

    def items(self) -> Iterator[tuple[int, float]]:
        """All items and their log-weights, ascending. Reads everything: for checks only."""
        self.write()
        for level, node in list(self._table.all_keys()):
            if level == 0:
                leaf = self._node(0, node)
                yield from ((node * FANOUT + int(slot), float(leaf[slot])) for slot in np.flatnonzero(leaf > _EMPTY))

    def faults(self) -> list[str]:
        """Inner nodes that do not say what their children say."""
        self.write()
        keys = list(self._table.all_keys())
        found = [f"the sum tree's node {key} is empty" for key in keys if not (self._node(*key) > _EMPTY).any()]
        for level, node in keys:
            if level + 1 < self._num_levels:
                above = self._node(level + 1, node // FANOUT)[node % FANOUT]
                if not np.isclose(above, _log_sum(self._node(level, node)), rtol=1e-12, atol=1e-9):
                    found.append(f"the sum tree's node {(level, node)} sums to another value than its parent says")
            if level:
                children = np.flatnonzero(self._node(level, node) > _EMPTY)
                missing = [c for c in children if not self._table.has(level - 1, node * FANOUT + int(c))]
                found += [f"the sum tree's node {(level, node)} has no child {c}" for c in missing]
        return found

    def picker(self) -> Picker:
        """Start to draw items."""
        self._refresh()
        return Picker(self)

    def write(self) -> None:
        """Write the changed nodes; a hook of the transaction's end."""
        self._refresh()
        for key in sorted(self._unwritten):
            node = self._nodes[key]
            if (node > _EMPTY).any():
                self._table.put(node.tobytes(), *key)
            else:
                self._table.delete(*key)
        self._unwritten.clear()

    def _put(self, item: int, log_weight: float) -> None:
        node, slot = divmod(item, FANOUT)
        self._node(0, node)[slot] = log_weight
        self._unwritten.add((0, node))
        self._outdated.add(node)

    def _node(self, level: int, node: int) -> Node:
        found = self._nodes.get((level, node))
        if found is None:
            stored = self._table.get(level, node)
            found = np.full(FANOUT, _EMPTY) if stored is None else np.frombuffer(stored, np.float64).copy()
            self._nodes[level, node] = found
        return found

    def _refresh(self) -> None:
        """Bring the sums of changed leaves up to the top, which grows where an id is too large for it."""
        outdated, self._outdated = self._outdated, set()
        grown = max((_num_levels(leaf) for leaf in outdated), default=0)
        if self._num_levels and grown > self._num_levels:
            # The present top becomes the first child of the new one.
            outdated_top = self._num_levels - 1
            for level in range(outdated_top, grown - 1):
                self._pull(level, 0)
        self._num_levels = max(self._num_levels, grown)
        for level in range(self._num_levels - 1):
            for node in outdated:
                self._pull(level, node)
            outdated = {node // FANOUT for node in outdated}

    def _pull(self, level: int, node: int) -> None:
        """Compute a node's sum into its parent."""
        parent, slot = divmod(node, FANOUT)
        self._node(level + 1, parent)[slot] = _log_sum(self._node(level, node))
        self._unwritten.add((level + 1, parent))


class Picker:
    """Draws items of a tree without changing it; what is taken out is out for this picker alone."""

    def __init__(self, tree: SumTree) -> None:
        self._tree = tree
        self._changed: dict[tuple[int, int], Node] = {}

    def pick(self, random: np.random.Generator) -> int | None:
        """An item with a chance in proportion to its weight; None where none is left."""
        node = 0
        for level in range(self._tree._num_levels - 1, -1, -1):
            weights = self._node(level, node)
            top = weights.max()
            if top == _EMPTY:
                return None
            sums = np.exp(weights - top).cumsum()
            slot = int(np.searchsorted(sums, random.random() * sums[-1], side="right"))
            if slot == FANOUT:  # the product was rounded up to the sum
                slot = int(weights.argmax())
            node = node * FANOUT + slot
        return node if self._tree._num_levels else None

    def take_out(self, item: int) -> None:
        """Never draw this item again."""
        node, slot = divmod(item, FANOUT)
        value = _EMPTY
        for level in range(self._tree._num_levels):
            key = (level, node)
            if key not in self._changed:
                self._changed[key] = self._tree._node(level, node).copy()
            self._changed[key][slot] = value
            value = _log_sum(self._changed[key])
            node, slot = divmod(node, FANOUT)

    def _node(self, level: int, node: int) -> Node:
        changed = self._changed.get((level, node))
        return self._tree._node(level, node) if changed is None else changed


def _num_levels(leaf: int) -> int:
    """How many levels a tree needs that has this leaf."""
    levels = 1
    while leaf:
        leaf //= FANOUT
        levels += 1
    return levels


def _log_sum(values: Node) -> float:
    """log(sum(exp(values)))."""
    top = values.max()
    return float(_EMPTY if top == _EMPTY else top + np.log(np.exp(values - top).sum()))
