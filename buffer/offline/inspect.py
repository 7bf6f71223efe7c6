"""Looks into a store without disturbing its service: groups, their samples, and what was quarantined.

What is read comes in transactions of a fraction of a second, resumed by key, so that a service which
writes meanwhile can reuse its pages. A listing of a live store is therefore no snapshot: each group
is seen as it was when its turn came, and one that is made or evicted meanwhile may be missed.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from buffer import rows
from buffer.catalogue import Index, find
from buffer.errors import CorruptRecord, StoreError
from buffer.schema import SCHEMA, join_rows
from buffer.store import RESTORE, Store, buffer_folder, shard_folders
from buffer.tables import NO_RECORD, Group, StoreState
from buffer.trajectory import SCHEMA_VERSION
from buffer.transaction import Transaction

T = TypeVar("T")

READ_S = 0.1
"""How long one transaction reads before it ends and the next one resumes."""
READ_BYTES = 16 * 2**20
"""How much one transaction reads at most, give or take one group."""


@dataclass(frozen=True)
class Selection:
    """Which groups are wanted; None sets no limit. All limits are inclusive."""

    prompt_id: int | None = None
    since_version: int | None = None
    """Effective version of the group's oldest token."""
    until_version: int | None = None
    min_reward: float | None = None
    """Mean over the group's samples that have a reward."""
    max_length: int | None = None
    """Tokens of the group's longest sample, prompt included."""
    phase: str | None = None

    def accepts(self, group: GroupView) -> bool:
        """Is the group wanted?"""
        return (
            (self.prompt_id is None or group.row.prompt_id == self.prompt_id)
            and (self.phase is None or group.row.phase == self.phase)
            and _within(group.oldest_version, self.since_version, self.until_version)
            and _within(group.row.mean_reward, self.min_reward, None)
            and _within(max(group.lengths, default=None), None, self.max_length)
        )

    def bounds(self, by: Index) -> tuple[float | None, float | None]:
        """What the selection says of an index: least and greatest value."""
        match by:
            case "prompt":
                return self.prompt_id, self.prompt_id
            case "version":
                return self.since_version, self.until_version
            case "reward":
                return self.min_reward, None
            case "length":
                return None, self.max_length  # no mean is above the greatest


class Sample(NamedTuple):
    """One stored sample of a group."""

    sample_index: int
    record_id: int
    record: bytes
    """As it is on disk; `buffer.schema.join_rows` reads it."""
    scores: bytes | None
    """float32 reference log-probabilities, where the learner wrote them back."""


@dataclass(frozen=True)
class GroupView:
    """A group as it was when it was read."""

    shard: int
    row: Group
    oldest_version: int | None
    """Effective version of its oldest committed token; None where nothing is committed."""
    samples: Sequence[Sample] = ()
    """Those stored and asked for."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of the committed samples."""
        return [length for length in self.row.lengths if length]

    def value(self, by: Index) -> float | None:
        """What the catalogue sorts the group by."""
        match by:
            case "prompt":
                return self.row.prompt_id
            case "version":
                return self.oldest_version
            case "reward":
                return self.row.mean_reward
            case "length":
                return self.row.mean_length


class Quarantined(NamedTuple):
    """What failed validation and was set aside."""

    shard: int
    number: int
    reason: str
    data: bytes
    """Its first bytes: of one row as a record, or of a message that no row could be read from."""


class Totals(NamedTuple):
    """Figures of the whole folder, all shards together."""

    version: int
    """Optimizer steps that the learner has taken."""
    num_groups: int
    num_records: int
    size_bytes: int
    ledger: dict[str, int]
    quarantined_by_reason: dict[str, int]


@dataclass
class Inspection:
    """The stores of one buffer folder, open for reading; a context manager."""

    folder: Path
    stores: list[Store]
    damaged: list[str] = field(default_factory=list)
    """What could not be read because it does not match its checksum, one sentence each; some may be there twice."""

    @classmethod
    def open(cls, path: Path) -> Inspection:
        """Open the buffer of a run folder, or of a buffer folder.

        Raises:
            StoreError: there is none, it cannot be read, or one of its shards is missing.
        """
        folder = buffer_folder(path)
        stores: list[Store] = []
        try:
            for shard in shard_folders(folder):
                with _naming(shard):
                    stores.append(Store(shard, None))
            _refuse_gaps(folder, stores)
        except BaseException:
            for store in stores:
                store.close()
            raise
        return cls(folder, stores)

    def __enter__(self) -> Inspection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the stores."""
        for store in self.stores:
            store.close()

    def totals(self) -> Totals:
        """Figures of the whole folder."""
        ledger: dict[str, int] = {}
        reasons: dict[str, int] = {}
        version = num_groups = num_records = 0
        for store in self.stores:
            state, groups, records = look_at(store, lambda tx: (tx.state, tx.groups.count, tx.records.count))
            version = max(version, state.version)
            num_groups, num_records = num_groups + groups, num_records + records
            _add(ledger, state.ledger.counts())
            _add(reasons, state.ledger.quarantined_by_reason)
        size = sum(store.size_bytes for store in self.stores)
        return Totals(version, num_groups, num_records, size, ledger, reasons)

    def states(self) -> dict[int, StoreState]:
        """The state record of each shard."""
        return {store.facts.shard: look_at(store, lambda tx: tx.state) for store in self.stores}

    def groups(
        self,
        wanted: Selection,
        *,
        by: Index | None = None,
        newest_first: bool = False,
        with_samples: bool = False,
    ) -> Iterator[GroupView]:
        """The groups wanted: shard by shard, or where they are in the order of an index, all shards together.

        Args:
            wanted: which ones.
            by: complete groups only, in the order of this index; None: all, by their ids.
            newest_first: descending order of `by`.
            with_samples: read the stored samples too.
        """
        readers = [_Reader(store, wanted, with_samples, self.damaged) for store in self.stores]
        if by is None:
            return chain.from_iterable(reader.by_id() for reader in readers)

        def place(group: GroupView) -> tuple[float, int]:
            value = group.value(by)
            return -inf if value is None else value, group.row.group_id

        return heapq.merge(*[reader.in_order(by, newest_first) for reader in readers], key=place, reverse=newest_first)

    def group(self, group_id: int) -> GroupView | None:
        """One group with its samples, whichever shard has it; None where there is none."""
        for store in self.stores:
            found = _Reader(store, Selection(), True, self.damaged).one(group_id)
            if found is not None:
                return found
        return None

    def group_of_record(self, record_id: int) -> GroupView | None:
        """The group that a stored record belongs to; None where there is no such record.

        Raises:
            CorruptRecord: it is damaged.
        """
        for store in self.stores:
            record = look_at(store, lambda tx: tx.records.get(record_id))
            if record is not None:
                return self.group(join_rows([record], [None]).column("group_id")[0].as_py())
        return None

    def quarantined(self) -> Iterator[Quarantined]:
        """What is set aside, oldest first. The service keeps the last few only; `totals` counts all."""
        for store in self.stores:
            following: int | None = 0
            while following is not None:
                some = partial(_some_quarantined, first=following, damaged=self.damaged, folder=store.folder)
                found, following = look_at(store, some)
                for number, value in found:
                    yield _quarantined(store, number, value)

    def quarantined_at(self, shard: int, number: int) -> Quarantined | None:
        """What a shard set aside under this number; None where it is not there.

        Raises:
            CorruptRecord: it is damaged.
        """
        for store in self.stores:
            if store.facts.shard == shard:
                value = look_at(store, lambda tx: tx.quarantine.get(number))
                return None if value is None else _quarantined(store, number, value)
        return None


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

    Args:
        data: of a `Quarantined`.
    """
    if int.from_bytes(data[:4], "little") != SCHEMA_VERSION:
        return None
    try:
        columns = rows.decode([data])
        batch = pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)
        batch.validate()  # the bounds of its arrays, before anyone asks what they hold
        batch.validate(full=True)
        found: list[dict[str, Any]] = batch.to_pylist()
    except (pa.ArrowException, ValueError, IndexError, TypeError, OverflowError, MemoryError):
        return None
    return found[0]


class _Reader:
    """Reads groups of one store, in short transactions."""

    def __init__(self, store: Store, wanted: Selection, with_samples: bool, damaged: list[str]) -> None:
        self._store = store
        self._wanted = wanted
        self._with_samples = with_samples
        self._damaged = damaged
        """Takes a sentence for each value that does not match its checksum."""

    def in_order(self, by: Index, newest_first: bool) -> Iterator[GroupView]:
        """The complete groups wanted, in the order of an index."""
        low, high = self._wanted.bounds(by)
        return self._walk(look_at(self._store, lambda tx: list(find(tx, by, low, high, newest_first))))

    def by_id(self) -> Iterator[GroupView]:
        """The groups wanted, by their ids. Where an index can narrow them down, only those are looked at."""
        narrow: tuple[Index, ...] = ("prompt", "version")
        by = next((by for by in narrow if self._wanted.bounds(by) != (None, None)), None)
        if by is None:
            return self._walk(None)

        def ids(tx: Transaction) -> list[int]:
            still_open = [group_id for (group_id,) in tx.open_groups.all_keys()]  # not in the catalogue yet
            return sorted({*find(tx, by, *self._wanted.bounds(by)), *still_open})

        return self._walk(look_at(self._store, ids))

    def one(self, group_id: int) -> GroupView | None:
        """The group of this id, if it is there and wanted."""
        return look_at(self._store, lambda tx: self._view(tx, group_id))

    def _walk(self, ids: Sequence[int] | None) -> Iterator[GroupView]:
        """The wanted ones among the groups of these ids, or among all (None)."""
        position: int | None = 0
        while position is not None:
            found, position = look_at(self._store, partial(self._some, ids=ids, position=position))
            yield from found

    def _some(self, tx: Transaction, ids: Sequence[int] | None, position: int) -> tuple[list[GroupView], int | None]:
        """What one transaction reads, and where the next one goes on: an id, or a place in `ids`; None: at the end."""
        deadline = time.monotonic() + READ_S
        found: list[GroupView] = []
        size = 0
        places = (
            ((group_id, group_id + 1) for (group_id,) in tx.groups.all_keys(position))
            if ids is None
            else ((ids[place], place + 1) for place in range(position, len(ids)))
        )
        for group_id, following in places:
            if (view := self._view(tx, group_id)) is not None:
                found.append(view)
                size += sum(len(sample.record) for sample in view.samples)
            if size >= READ_BYTES or time.monotonic() >= deadline:
                return found, following
        return found, None

    def _view(self, tx: Transaction, group_id: int) -> GroupView | None:
        try:
            group = tx.groups.get(group_id)
        except CorruptRecord as error:
            self._damaged.append(_sentence(f"group {group_id}", error, self._store.folder))
            return None
        if group is None:
            return None
        oldest = None if group.oldest is None else tx.state.effective(group.oldest)
        view = GroupView(self._store.facts.shard, group, oldest)
        if not self._wanted.accepts(view):
            return None
        return replace(view, samples=self._samples(tx, group)) if self._with_samples else view

    def _samples(self, tx: Transaction, group: Group) -> list[Sample]:
        samples = []
        for index, record_id in enumerate(group.records):
            if record_id == NO_RECORD:
                continue
            try:
                samples.append(Sample(index, record_id, tx.records.require(record_id), tx.scores.get(record_id)))
            except CorruptRecord as error:
                what = f"record {record_id} of group {group.group_id}"
                self._damaged.append(_sentence(what, error, self._store.folder))
        return samples


def _some_quarantined(
    tx: Transaction, first: int, damaged: list[str], folder: Path
) -> tuple[list[tuple[int, bytes]], int | None]:
    found: list[tuple[int, bytes]] = []
    size = 0
    for (number,) in tx.quarantine.all_keys(first):
        try:
            value = tx.quarantine.require(number)
        except CorruptRecord as error:
            damaged.append(_sentence(f"quarantined {number}", error, folder))
            continue
        found.append((number, value))
        size += len(value)
        if size >= READ_BYTES:
            return found, number + 1
    return found, None


def _quarantined(store: Store, number: int, value: bytes) -> Quarantined:
    reason, _, data = value.partition(b"\n")
    return Quarantined(store.facts.shard, number, reason.decode("utf-8", "replace"), data)


def _refuse_gaps(folder: Path, stores: Sequence[Store]) -> None:
    """A listing without one of the shards would look whole. A shard's own folder may be looked at alone."""
    first = stores[0]
    missing = set(range(first.facts.num_shards)) - {store.facts.shard for store in stores}
    if first.folder != folder and missing:
        raise StoreError(
            f"the buffer in {folder} has {first.facts.num_shards} shards, and shard-{min(missing)} is missing: restore "
            f"it from a copy. Those that are there can be looked at one by one, as {first.folder}"
        )


def _add(total: dict[str, int], more: dict[str, int]) -> None:
    for name, count in more.items():
        total[name] = total.get(name, 0) + count


def _within(value: float | None, low: float | None, high: float | None) -> bool:
    if value is None:
        return low is None and high is None
    return (low is None or value >= low) and (high is None or value <= high)


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


def _sentence(what: str, error: CorruptRecord, folder: Path) -> str:
    """What is damaged, and where."""
    return f"{what}: {error} (in {folder})"
