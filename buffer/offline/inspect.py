"""Looks into a store without disturbing its service: groups, their samples, and what was quarantined.

What is read comes in transactions of a fraction of a second, resumed by key, so that a service which
writes meanwhile can reuse its pages. A listing of a live store is therefore no snapshot: each group
is seen as it was when its turn came, and one that is made or evicted meanwhile may be missed.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from buffer import rows
from buffer.errors import CorruptRecord
from buffer.nonsense import SetAside
from buffer.rows import SCHEMA_VERSION
from buffer.schema import all_rows, join_rows
from buffer.store import RESTORE, Store, buffer_folder
from buffer.tables import NO_RECORD, Group, StoreState, Tries
from buffer.transaction import Transaction

T = TypeVar("T")

READ_S = 0.1
"""How long one transaction reads before it ends and the next one resumes."""
READ_BYTES = 16 * 2**20
"""How much one transaction reads at most, give or take one group."""


class Sample(NamedTuple):
    """One stored sample of a group."""

    sample_index: int
    record_id: int
    record: bytes
    """A block of it alone; `joined` reads it."""
    scores: bytes | None
    """float32 reference log-probabilities, where the learner wrote them back."""


@dataclass(frozen=True)
class GroupView:
    """A group as it was when it was read."""

    row: Group
    oldest_version: int | None
    """Effective version of its oldest committed token; None where nothing is committed."""
    tries: Tries | None = None
    """What is known of its prompt's success, where that is learned."""
    samples: Sequence[Sample] = ()

    @property
    def lengths(self) -> list[int]:
        return [length for length in self.row.lengths if length]


class Quarantined(NamedTuple):
    """What failed validation and was set aside."""

    number: int
    entry: SetAside


class Totals(NamedTuple):
    """Figures of the whole store."""

    version: int
    """Optimizer steps that the learner has taken."""
    num_groups: int
    num_records: int
    size_bytes: int
    ledger: dict[str, int]
    quarantined_by_reason: dict[str, int]


@dataclass
class Inspection:
    """The store of a buffer folder, open for reading."""

    store: Store
    damaged: list[str] = field(default_factory=list)
    """What could not be read because it does not match its checksum, one sentence each; some may be there twice."""

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Inspection]:
        """The buffer of a run folder, or of a buffer folder, open while it is looked at.

        Raises:
            StoreError: there is none, or it cannot be read.
        """
        folder = buffer_folder(path)
        with _naming(folder):
            store = Store(folder, None)
        try:
            yield cls(store)
        finally:
            store.close()

    @property
    def folder(self) -> Path:
        return self.store.folder

    def totals(self) -> Totals:
        state, num_groups = look_at(self.store, lambda tx: (tx.state, tx.groups.count))
        ledger = state.ledger
        size, reasons = self.store.size_bytes, dict(ledger.quarantined_by_reason)
        return Totals(state.version, num_groups, state.num_records, size, ledger.counts(), reasons)

    def state(self) -> StoreState:
        return look_at(self.store, lambda tx: tx.state)

    def groups(
        self, *, prompt_id: int | None = None, phase: str | None = None, with_samples: bool = False
    ) -> Iterator[GroupView]:
        """Yield the groups by their ids.

        Args:
            prompt_id: only those of this prompt.
            phase: only those in this phase.
            with_samples: read the stored samples too.
        """

        def is_wanted(group: Group) -> bool:
            return prompt_id in (None, group.prompt_id) and phase in (None, group.phase)

        return _Reader(self.store, self.damaged, is_wanted).all(with_samples=with_samples)

    def group(self, group_id: int) -> GroupView | None:
        """One group with its samples; None where there is none."""
        return _Reader(self.store, self.damaged).one(group_id)

    def group_of_record(self, record_id: int) -> GroupView | None:
        """The group that a stored record belongs to; None where there is no such record.

        Raises:
            CorruptRecord: it is damaged.
        """
        group_id = look_at(self.store, lambda tx: _group_of(tx, record_id))
        return None if group_id is None else self.group(group_id)

    def quarantined(self) -> Iterator[Quarantined]:
        """What is set aside, oldest first. The service keeps the last few only; `totals` counts all."""
        for (number,) in look_at(self.store, lambda tx: list(tx.quarantine.all_keys())):
            try:
                entry = self.quarantined_at(number)
            except CorruptRecord as error:
                self.damaged.append(f"quarantined {number}: {error}")
                continue
            if entry is not None:  # else it has made room meanwhile
                yield entry

    def quarantined_at(self, number: int) -> Quarantined | None:
        """What was set aside under this number; None where it is not there.

        Raises:
            CorruptRecord: it is damaged.
        """
        value = look_at(self.store, lambda tx: tx.quarantine.get(number))
        return None if value is None else Quarantined(number, SetAside.of(value))


def look_at(store: Store, look: Callable[[Transaction], T]) -> T:
    """`Store.read`, whose errors then say where the damage is and what helps.

    Raises:
        CorruptRecord: what it looks at is damaged.
    """
    with _naming(store.folder):
        return store.read(look)


def read_row(data: bytes) -> dict[str, Any] | None:
    """The row that was set aside; None where the bytes are no whole row, such as the beginning of a message.

    Its values may be whatever they like.
    """
    if (int.from_bytes(data[:4], "little"), int.from_bytes(data[4:8], "little")) != (SCHEMA_VERSION, 1):
        return None
    try:
        batch = all_rows([data])
        batch.validate()  # the bounds of its arrays, before anyone asks what they hold
        batch.validate(full=True)
        found: list[dict[str, Any]] = batch.to_pylist()
    except (pa.ArrowException, struct.error, ValueError, IndexError, TypeError, OverflowError, MemoryError):
        return None
    return found[0]


class _Reader:
    """Reads groups of one store, in short transactions."""

    def __init__(self, store: Store, damaged: list[str], is_wanted: Callable[[Group], bool] = lambda _: True) -> None:
        self._store = store
        self._is_wanted = is_wanted
        self._damaged = damaged
        """Takes a sentence for each value that does not match its checksum."""

    def all(self, *, with_samples: bool) -> Iterator[GroupView]:
        position: int | None = 0
        while position is not None:
            found, position = look_at(self._store, partial(self._some, first=position, with_samples=with_samples))
            yield from found

    def one(self, group_id: int) -> GroupView | None:
        """The group of this id with its samples, if it is there and wanted."""
        return look_at(self._store, lambda tx: self._view(tx, group_id, with_samples=True))

    def _some(self, tx: Transaction, first: int, with_samples: bool) -> tuple[list[GroupView], int | None]:
        """What one transaction reads, and the id where the next one goes on; None: at the end."""
        deadline = time.monotonic() + READ_S
        found: list[GroupView] = []
        size = 0
        for (group_id,) in tx.groups.all_keys(first):
            if (view := self._view(tx, group_id, with_samples)) is not None:
                found.append(view)
                size += sum(len(sample.record) for sample in view.samples)
            if size >= READ_BYTES or time.monotonic() >= deadline:
                return found, group_id + 1
        return found, None

    def _view(self, tx: Transaction, group_id: int, with_samples: bool) -> GroupView | None:
        group = self._whole(f"group {group_id}", lambda: tx.groups.get(group_id))
        if group is None or not self._is_wanted(group):
            return None
        prompt_id, oldest = group.prompt_id, None if group.oldest is None else tx.state.effective(group.oldest)
        tries = self._whole(f"the success of prompt {prompt_id}", lambda: tx.tries.get(prompt_id))
        return GroupView(group, oldest, tries, self._samples(tx, group) if with_samples else ())

    def _samples(self, tx: Transaction, group: Group) -> list[Sample]:
        samples = []
        blocks: dict[int, memoryview] = {}
        for index, record_id in enumerate(group.records):
            if record_id == NO_RECORD:
                continue
            what = f"record {record_id} of group {group.group_id}"
            if record_id not in blocks:
                found = self._whole(what, partial(tx.blocks_of, [record_id]))
                if found is None:
                    continue
                blocks |= dict.fromkeys(rows.records_in(found[0]), found[0])
            scores = self._whole(f"the scores of {what}", partial(tx.scores.get, record_id))
            samples.append(Sample(index, record_id, rows.only(blocks[record_id], record_id), scores))
        return samples

    def _whole(self, what: str, read: Callable[[], T | None]) -> T | None:
        """What is read; None where it is damaged, which is named."""
        try:
            return read()
        except CorruptRecord as error:
            self._damaged.append(f"{what}: {error} (in {self._store.folder})")
            return None


def joined(samples: Sequence[Sample]) -> pa.RecordBatch:
    """The columns of some samples, with the scores that were written back."""
    scores = [None if each.scores is None else np.frombuffer(each.scores, np.float32) for each in samples]
    return join_rows([each.record for each in samples], [each.record_id for each in samples], scores)


def _group_of(tx: Transaction, record_id: int) -> int | None:
    holder = tx.find_block(record_id)
    return None if holder is None else rows.group_of(holder[0])


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
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
