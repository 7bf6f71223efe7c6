"""Looks into a store without disturbing its service: groups, their samples, and what was quarantined.

What is read comes in transactions of a fraction of a second, resumed by key, so that a service which
writes meanwhile can reuse its pages. A listing of a live store is therefore no snapshot: each group
is seen as it was when its turn came, and one that is made or evicted meanwhile may be missed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np

from buffer.catalogue import Index, find
from buffer.errors import CorruptRecord, StoreError
from buffer.rows import flat_values
from buffer.schema import join_rows
from buffer.store import Store
from buffer.tables import NO_RECORD, Draw, Group, State
from buffer.transaction import Transaction
from buffer.views import GroupView, Quarantined, Sample, Selection, Totals

DATA = "data.mdb"
READ_S = 0.1
"""How long one transaction reads before it ends and the next one resumes."""
READ_BYTES = 16 * 2**20
"""How much one transaction reads at most, give or take one group."""
FIRST_INDEXED_VERSION = 2
"""Stores of an older schema version have no catalogue: their groups are looked at one by one."""

T = TypeVar("T")
Look = Callable[[Transaction], Callable[[int], tuple[list[T], int]]]
"""Takes a transaction, and returns what takes a group's id and returns what it found and its size in bytes."""


@dataclass
class Inspection:
    """The stores of one buffer folder, open for reading; a context manager."""

    folder: Path
    stores: list[Store]
    damaged: list[str] = field(default_factory=list)
    """What could not be read because it does not match its checksum, one sentence each."""

    @classmethod
    def open(cls, path: Path) -> Inspection:
        """Open the buffer of a run folder, or of a buffer folder.

        Raises:
            StoreError: there is none, or it cannot be read.
        """
        folder = buffer_folder(path)
        stores: list[Store] = []
        try:
            stores.extend(Store(shard, None) for shard in shard_folders(folder))
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
            state, groups, records = store.read(lambda tx: (tx.state, tx.groups.count, tx.records.count))
            version = max(version, state.version)
            num_groups, num_records = num_groups + groups, num_records + records
            _add(ledger, state.ledger.counts())
            _add(reasons, state.ledger.quarantined_by_reason)
        size = sum(store.size_bytes for store in self.stores)
        return Totals(version, num_groups, num_records, size, ledger, reasons)

    def states(self) -> list[State]:
        """The state record of each shard."""
        return [store.read(lambda tx: tx.state) for store in self.stores]

    def groups(
        self,
        wanted: Selection,
        *,
        by: Index | None = None,
        newest_first: bool = False,
        with_samples: bool = False,
    ) -> Iterator[GroupView]:
        """The groups wanted, shard by shard.

        Args:
            wanted: which ones.
            by: complete groups only, in the order of this index; None: all, by their ids.
            newest_first: descending order of `by`.
            with_samples: read the stored samples too.
        """
        for shard, store in enumerate(self.stores):
            reader = _Reader(shard, wanted, with_samples, self.damaged)
            ids = self._narrowed(store, wanted) if by is None else self._in_order(store, reader, by, newest_first)
            for found in walk(store, reader.at, ids):
                view = reader.complete(found)
                if wanted.accepts(view):
                    yield view

    def group(self, group_id: int) -> GroupView | None:
        """One group with its samples, whichever shard has it; None where there is none."""
        for shard, store in enumerate(self.stores):
            reader = _Reader(shard, Selection(), True, self.damaged)
            found = store.read(partial(_one_group, reader=reader, group_id=group_id))
            if found:
                return reader.complete(found[0])
        return None

    def group_of_record(self, record_id: int) -> GroupView | None:
        """The group that a stored record belongs to; None where there is no such record.

        Raises:
            CorruptRecord: it is damaged.
        """
        for store in self.stores:
            record = store.read(lambda tx: tx.records.get(record_id))
            if record is not None:
                return self.group(join_rows([record], [None]).column("group_id")[0].as_py())
        return None

    def quarantined(self) -> Iterator[Quarantined]:
        """What is set aside, oldest first. The service keeps the last few only; `totals` counts all."""
        for shard, store in enumerate(self.stores):
            following: int | None = 0
            while following is not None:
                found, following = store.read(partial(_some_quarantined, first=following))
                for number, value in found:
                    reason, _, data = value.partition(b"\n")
                    yield Quarantined(shard, number, reason.decode("utf-8", "replace"), data)

    def _narrowed(self, store: Store, wanted: Selection) -> list[int] | None:
        """The groups among which those wanted are, where an index knows them; None: look at all."""
        narrow: tuple[Index, ...] = ("prompt", "version")
        by = next((by for by in narrow if wanted.bounds(by) != (None, None)), None)
        if by is None or store.schema_version < FIRST_INDEXED_VERSION:
            return None

        def ids(tx: Transaction) -> list[int]:
            still_open = [group_id for (group_id,) in tx.open_groups.all_keys()]  # not in the catalogue yet
            return sorted({*find(tx, by, *wanted.bounds(by)), *still_open})

        return store.read(ids)

    def _in_order(self, store: Store, reader: _Reader, by: Index, newest_first: bool) -> list[int]:
        low, high = reader.wanted.bounds(by)
        if store.schema_version >= FIRST_INDEXED_VERSION:
            return store.read(lambda tx: list(find(tx, by, low, high, newest_first)))
        keyed = []
        for found in walk(store, reader.at, None):
            view = reader.complete(found)
            value = view.value(by)
            if view.row.phase != "open" and value is not None and reader.wanted.accepts(view):
                keyed.append((value, view.row.group_id))
        return [group_id for _, group_id in sorted(keyed, reverse=newest_first)]


class _Reader:
    """Reads one group within a transaction, and makes sense of it outside."""

    def __init__(self, shard: int, wanted: Selection, with_samples: bool, damaged: list[str]) -> None:
        self.wanted = wanted
        self._shard = shard
        self._with_samples = with_samples
        self._damaged = damaged

    def at(self, tx: Transaction) -> Callable[[int], tuple[list[GroupView], int]]:
        """See `Look`: groups as far as their rows know them, with what else must be read of them."""
        draws = _recorded_draws(tx) if self._with_samples else {}

        def visit(group_id: int) -> tuple[list[GroupView], int]:
            try:
                group = tx.groups.get(group_id)
            except CorruptRecord as error:
                self._damaged.append(f"group {group_id}: {error}")
                return [], 0
            if group is None:
                return [], 0
            view, knows = self._of_row(group, tx.state)
            if knows and not self.wanted.accepts(view):
                return [], 0
            samples = self._samples(tx, group) if self._with_samples or not knows else []
            size = sum(len(sample.record) for sample in samples)
            return [replace(view, draws=draws.get(group_id, ()), samples=samples)], size

        return visit

    def _of_row(self, group: Group, state: State) -> tuple[GroupView, bool]:
        """The group, and whether its row knows its samples' rewards and lengths: rows of version 1 do not."""
        num = len(group.fates)
        knows = len(group.lengths) == num and not any(
            record != NO_RECORD and not length for record, length in zip(group.records, group.lengths, strict=True)
        )
        oldest = None if group.oldest is None else state.effective(group.oldest)
        rewards, lengths = (group.rewards, group.lengths) if knows else ([None] * num, [0] * num)
        return GroupView(self._shard, group, oldest, rewards, lengths), knows

    def complete(self, view: GroupView) -> GroupView:
        """Fill in from the records what an older group's row does not say."""
        if not view.samples or view.known_lengths:
            return view
        batch = join_rows([sample.record for sample in view.samples], [None] * len(view.samples))
        rewards, lengths = list(view.rewards), list(view.lengths)
        _, bounds = flat_values(batch.column("token_ids"))
        for sample, reward, length in zip(
            view.samples, batch.column("reward").to_pylist(), np.diff(bounds), strict=True
        ):
            rewards[sample.sample_index], lengths[sample.sample_index] = reward, int(length)
        samples = view.samples if self._with_samples else ()
        return replace(view, rewards=rewards, lengths=lengths, samples=samples)

    def _samples(self, tx: Transaction, group: Group) -> list[Sample]:
        samples = []
        for index, record_id in enumerate(group.records):
            if record_id == NO_RECORD:
                continue
            try:
                samples.append(Sample(index, record_id, tx.records.require(record_id), tx.scores.get(record_id)))
            except CorruptRecord as error:
                self._damaged.append(f"record {record_id} of group {group.group_id}: {error}")
        return samples


def walk(store: Store, look: Look[T], ids: Sequence[int] | None) -> Iterator[T]:
    """What `look` finds for the groups of these ids, or for all there are (None), in short transactions."""
    position: int | None = 0
    while position is not None:
        found, position = store.read(partial(_some_groups, look=look, ids=ids, position=position))
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


def _one_group(tx: Transaction, reader: _Reader, group_id: int) -> list[GroupView]:
    return reader.at(tx)(group_id)[0]


def _some_quarantined(tx: Transaction, first: int) -> tuple[list[tuple[int, bytes]], int | None]:
    found: list[tuple[int, bytes]] = []
    size = 0
    for (number,), value in tx.quarantine.all_items(first):
        found.append((number, value))
        size += len(value)
        if size >= READ_BYTES:
            return found, number + 1
    return found, None


def buffer_folder(path: Path) -> Path:
    """The buffer's folder, from the folder of its run or its own.

    Raises:
        StoreError: there is no buffer.
    """
    for folder in (path, path / "buffer"):
        if any((shard / DATA).exists() for shard in shard_folders(folder)):
            return folder
    raise StoreError(
        f"there is no buffer in {path}: neither {DATA} nor buffer/{DATA} is there. Give the folder of a run, "
        "as in runs/NAME"
    )


def shard_folders(folder: Path) -> list[Path]:
    """The folders of a buffer's stores: its shards in order, or the folder itself."""
    shards = [shard for shard in folder.glob("shard-*") if re.fullmatch(r"shard-\d+", shard.name)]
    return sorted(shards, key=lambda shard: int(shard.name.rpartition("-")[2])) or [folder]


def new_folders(folder: Path, num_shards: int) -> list[Path]:
    """Where the stores of a buffer are to lie, shard by shard: the folder itself where there is only one.

    Raises:
        StoreError: the folder has a buffer of another number of shards, as far as its entries tell. What they
            do not tell, each store says when it is opened.
    """
    there = [shard for shard in shard_folders(folder) if (shard / DATA).exists()]
    wanted = [folder] if num_shards == 1 else [folder / f"shard-{shard}" for shard in range(num_shards)]
    if any(shard not in wanted for shard in there):
        raise StoreError(
            f"the buffer in {folder} has {len(there)} shards and [buffer] shards = {num_shards}: the number is fixed "
            f"when a buffer is made. Set shards = {len(there)}, or use a new run folder"
        )
    return wanted


def _recorded_draws(tx: Transaction) -> dict[int, list[Draw]]:
    """For every group, the recorded draws that name it, by step. They are few: a durable checkpoint forgets them."""
    found: dict[int, list[Draw]] = {}
    for _, draw in tx.draws.all_items():
        for group_id in dict.fromkeys(draw.group_ids):
            found.setdefault(group_id, []).append(draw)
    return found


def _add(total: dict[str, int], more: dict[str, int]) -> None:
    for name, count in more.items():
        total[name] = total.get(name, 0) + count
