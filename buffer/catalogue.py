"""Where complete groups are found by prompt, version, reward or length.

One table holds all four indexes: (index, value as an integer that sorts like it, group id). A group is
in it from the moment that it is complete until nothing of it is stored. One that has no value to sort by,
such as a group without any reward, is not in that index.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Literal

from buffer.tables import Group, StoreState
from buffer.transaction import Transaction

Index = Literal["prompt", "version", "reward", "length"]
INDEXES: tuple[Index, ...] = ("prompt", "version", "reward", "length")

_DOUBLE = struct.Struct(">d")
_WORD = struct.Struct(">Q")
_SIGN = 2**63
_MAX = 2**64 - 1


def find(
    tx: Transaction,
    by: Index,
    low: float | None = None,
    high: float | None = None,
    newest_first: bool = False,
) -> Iterator[int]:
    """Ids of the complete groups whose `by` lies in [low, high], in its order; descending where `newest_first`.

    Args:
        tx: the transaction to read in; it must not be changed while they are read.
        by: 'prompt' (its id), 'version' (effective version of the oldest token), 'reward' (mean over the group's
            samples with a reward) or 'length' (mean tokens of its samples).
        low: least value, inclusive; None for no limit.
        high: greatest value, inclusive; None for no limit.
        newest_first: descending order.
    """
    index = INDEXES.index(by)
    least = 0 if low is None else max(0, _sortable(by, low, up=True))
    greatest = _MAX if high is None else _sortable(by, high, up=False)
    if greatest < least:
        return
    first = (index, greatest, _MAX) if newest_first else (index, least, 0)
    for number, value, group_id in tx.catalogue.all_keys(*first, reverse=newest_first):
        if number != index or not least <= value <= greatest:
            return
        yield group_id


def keys(group: Group, state: StoreState) -> list[tuple[int, int, int]]:
    """The group's keys in the table, in the order of `INDEXES`."""
    found = [(0, group.prompt_id, group.group_id)]
    if group.oldest is not None:
        found.append((1, state.effective(group.oldest), group.group_id))
    for number, mean in ((2, group.mean_reward), (3, group.mean_length)):
        if mean is not None:
            found.append((number, sortable_float(mean), group.group_id))
    return found


def add(tx: Transaction, group: Group) -> None:
    """Enter a complete group."""
    for key in keys(group, tx.state):
        tx.catalogue.put(b"", *key)


def remove(tx: Transaction, group: Group) -> None:
    """Take out a group that has nothing stored any more."""
    for key in keys(group, tx.state):
        tx.catalogue.delete(*key)


def resume(tx: Transaction, version: int) -> None:
    """The learner goes back to this version: tokens of later ones count as of this one from now on."""
    index = INDEXES.index("version")
    above = []
    for key in tx.catalogue.all_keys(index, version + 1):
        if key[0] != index:
            break
        above.append(key)
    for key in above:
        tx.catalogue.delete(*key)
        tx.catalogue.put(b"", index, version, key[2])


def sortable_float(number: float) -> int:
    """An unsigned 64-bit integer that sorts as the number does."""
    bits: int = _WORD.unpack(_DOUBLE.pack(number + 0.0))[0]  # + 0.0 makes -0.0 a 0.0
    return bits ^ _MAX if bits & _SIGN else bits | _SIGN


def _sortable(by: Index, number: float, *, up: bool) -> int:
    """The number's place in the index; below 0 where an unsigned index has none so low."""
    if by in ("reward", "length"):
        return sortable_float(number)
    if math.isinf(number):
        return -1 if number < 0 else _MAX
    return min(_MAX, math.ceil(number) if up else math.floor(number))
