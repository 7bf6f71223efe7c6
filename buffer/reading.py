"""Reads groups of a store in short transactions, and says where what is damaged lies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from buffer.errors import CorruptRecord
from buffer.store import RESTORE, Store
from buffer.tables import NO_RECORD, Group
from buffer.transaction import Transaction
from buffer.views import GroupView, Sample, Selection

READ_S = 0.1
"""How long one transaction reads before it ends and the next one resumes."""
READ_BYTES = 16 * 2**20
"""How much one transaction reads at most, give or take one group."""

T = TypeVar("T")
Look = Callable[[Transaction], Callable[[int], tuple[list[T], int]]]
"""Takes a transaction, and returns what takes a group's id and returns what it found and its size in bytes."""


class Reader:
    """Reads one group within a transaction."""

    def __init__(self, store: Store, wanted: Selection, with_samples: bool, damaged: list[str]) -> None:
        """Args:
        store: of one shard.
        wanted: which groups.
        with_samples: read the stored samples too.
        damaged: takes a sentence for whatever does not match its checksum.
        """
        self.store = store
        self.wanted = wanted
        self._with_samples = with_samples
        self._damaged = damaged

    def at(self, tx: Transaction) -> Callable[[int], tuple[list[GroupView], int]]:
        """See `Look`."""

        def visit(group_id: int) -> tuple[list[GroupView], int]:
            try:
                group = tx.groups.get(group_id)
            except CorruptRecord as error:
                self._damaged.append(sentence(f"group {group_id}", error, self.store.folder))
                return [], 0
            if group is None:
                return [], 0
            oldest = None if group.oldest is None else tx.state.effective(group.oldest)
            view = GroupView(self.store.facts.shard, group, oldest)
            if not self.wanted.accepts(view):
                return [], 0
            samples = self._samples(tx, group) if self._with_samples else []
            return [replace(view, samples=samples)], sum(len(sample.record) for sample in samples)

        return visit

    def _samples(self, tx: Transaction, group: Group) -> list[Sample]:
        samples = []
        for index, record_id in enumerate(group.records):
            if record_id == NO_RECORD:
                continue
            try:
                samples.append(Sample(index, record_id, tx.records.require(record_id), tx.scores.get(record_id)))
            except CorruptRecord as error:
                what = f"record {record_id} of group {group.group_id}"
                self._damaged.append(sentence(what, error, self.store.folder))
        return samples


def look_at(store: Store, look: Callable[[Transaction], T]) -> T:
    """`Store.read`, whose errors then say where the damage is and what helps.

    Raises:
        CorruptRecord: what it looks at is damaged.
    """
    with naming(store.folder):
        return store.read(look)


def walk(store: Store, look: Look[T], ids: Sequence[int] | None) -> Iterator[T]:
    """What `look` finds for the groups of these ids, or for all there are (None), in short transactions."""
    position: int | None = 0
    while position is not None:
        found, position = look_at(store, partial(_some_groups, look=look, ids=ids, position=position))
        yield from found


def _some_groups(
    tx: Transaction, look: Look[T], ids: Sequence[int] | None, position: int
) -> tuple[list[T], int | None]:
    """What one transaction reads, and where the next one goes on: an id, or a place in `ids`; None: at the end."""
    deadline = time.monotonic() + READ_S
    found: list[T] = []
    size = 0
    visit = look(tx)
    places = (
        ((group_id, group_id + 1) for (group_id,) in tx.groups.all_keys(position))
        if ids is None
        else ((ids[place], place + 1) for place in range(position, len(ids)))
    )
    for group_id, following in places:
        more, num_bytes = visit(group_id)
        found += more
        size += num_bytes
        if size >= READ_BYTES or time.monotonic() >= deadline:
            return found, following
    return found, None


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Errors of damage say where it is, and what to do."""
    try:
        yield
    except CorruptRecord as error:
        if str(folder) in str(error):
            raise
        raise CorruptRecord(
            f"the buffer in {folder} is damaged: {error}. {RESTORE.capitalize()}; `leeway buffer verify {folder}` "
            "names all that is damaged"
        ) from error


def sentence(what: str, error: CorruptRecord, folder: Path) -> str:
    """What is damaged, and where."""
    return f"{what}: {error} (in {folder})"
