"""Looks into a store without disturbing its service: groups, their samples, and what was quarantined.

What is read comes in transactions of a fraction of a second, resumed by key, so that a service which
writes meanwhile can reuse its pages. A listing of a live store is therefore no snapshot: each group
is seen as it was when its turn came, and one that is made or evicted meanwhile may be missed.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any

from buffer.catalogue import Index, find
from buffer.errors import CorruptRecord, StoreError
from buffer.reading import READ_BYTES, Reader, look_at, naming, sentence, walk
from buffer.schema import join_rows
from buffer.store import DATA, Store, is_served
from buffer.tables import State
from buffer.transaction import Transaction
from buffer.verify import verify
from buffer.views import GroupView, Quarantined, Selection, Totals


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
                with naming(shard):
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

    def states(self) -> dict[int, State]:
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
        readers = [Reader(store, wanted, with_samples, self.damaged) for store in self.stores]
        of_shards = [self._groups_of(reader, by, newest_first) for reader in readers]
        if by is None:
            return chain.from_iterable(of_shards)

        def place(group: GroupView) -> tuple[float, int]:
            value = group.value(by)
            return -inf if value is None else value, group.row.group_id

        return heapq.merge(*of_shards, key=place, reverse=newest_first)

    def _groups_of(self, reader: Reader, by: Index | None, newest_first: bool) -> Iterator[GroupView]:
        """Those of one shard."""
        ids = self._narrowed(reader) if by is None else self._in_order(reader, by, newest_first)
        return walk(reader.store, reader.at, ids)

    def group(self, group_id: int) -> GroupView | None:
        """One group with its samples, whichever shard has it; None where there is none."""
        for store in self.stores:
            reader = Reader(store, Selection(), True, self.damaged)
            found = look_at(store, partial(_one_group, reader=reader, group_id=group_id))
            if found:
                return found[0]
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

    def _narrowed(self, reader: Reader) -> list[int] | None:
        """The groups among which those wanted are, where an index knows them; None: look at all."""
        store, wanted = reader.store, reader.wanted
        narrow: tuple[Index, ...] = ("prompt", "version")
        by = next((by for by in narrow if wanted.bounds(by) != (None, None)), None)
        if by is None:
            return None

        def ids(tx: Transaction) -> list[int]:
            still_open = [group_id for (group_id,) in tx.open_groups.all_keys()]  # not in the catalogue yet
            return sorted({*find(tx, by, *wanted.bounds(by)), *still_open})

        return look_at(store, ids)

    def _in_order(self, reader: Reader, by: Index, newest_first: bool) -> list[int]:
        low, high = reader.wanted.bounds(by)
        return look_at(reader.store, lambda tx: list(find(tx, by, low, high, newest_first)))


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


def _one_group(tx: Transaction, reader: Reader, group_id: int) -> list[GroupView]:
    return reader.at(tx)(group_id)[0]


def _some_quarantined(
    tx: Transaction, first: int, damaged: list[str], folder: Path
) -> tuple[list[tuple[int, bytes]], int | None]:
    found: list[tuple[int, bytes]] = []
    size = 0
    for (number,) in tx.quarantine.all_keys(first):
        try:
            value = tx.quarantine.require(number)
        except CorruptRecord as error:
            damaged.append(sentence(f"quarantined {number}", error, folder))
            continue
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
