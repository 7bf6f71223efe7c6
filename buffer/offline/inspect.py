"""Read a store beside its service.

Inspection  groups and their samples. Transactions last a fraction of a second and resume by key, so that a live service
            can reuse its pages; each group is seen as it was when its turn came
export      a Parquet file of a row per stored trajectory: the columns of `schema.SCHEMA`, then `STATE`. Rows come in
            the order of their groups, in row groups of some megabytes, so that memory stays bounded
verify      every checksum, the tables against each other, and the ledger against the tables
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from buffer import rows
from buffer.errors import CorruptRecord, StoreError
from buffer.ledger import COMMITTED_STATES, COUNTS
from buffer.rows import group_of, list_bounds, records_in
from buffer.schema import SCHEMA, join_rows
from buffer.store import RESTORE, Store, buffer_folder
from buffer.tables import NO_RECORD, DrawRecord, Group, StoreState, Tries
from buffer.transaction import Transaction
from common.files import sync
from common.staleness import PolicyVersion, effective_version

T = TypeVar("T")

MAX_NAMED = 4
READ_S = 0.1
READ_BYTES = 16 * 2**20
"""Bounds of one transaction's reads, up to one group more."""
STATE = pa.schema(
    [
        pa.field("record_id", pa.int64(), nullable=False),
        pa.field("state", pa.string(), nullable=False),
        pa.field("uses", pa.int64(), nullable=False),
        pa.field("group_phase", pa.string(), nullable=False),
        pa.field("group_oldest_version", pa.int64()),
        pa.field("oldest_version", pa.int64(), nullable=False),
        pa.field("newest_version", pa.int64(), nullable=False),
        pa.field("trained_step", pa.int64()),
        pa.field("trained_version", pa.int64()),
        pa.field("lag", pa.int64()),
    ]
)
"""What the store knows of a trajectory; see docs/buffer.md."""

ROW_GROUP_BYTES = 16 * 2**20
ROW_GROUP_ROWS = 65536


class Sample(NamedTuple):
    sample_index: int
    record_id: int
    record: bytes
    """A block of it alone; `joined` reads it."""
    scores: bytes | None
    """float32 reference log-probabilities."""


@dataclass(frozen=True)
class GroupView:
    """A group as it was when it was read."""

    row: Group
    oldest_version: int | None
    """Effective version of its oldest committed token."""
    tries: Tries | None = None
    """What is known of its prompt's success."""
    samples: Sequence[Sample] = ()

    @property
    def lengths(self) -> list[int]:
        return [length for length in self.row.lengths if length]


@dataclass
class Inspection:
    """The store of a buffer folder, open for reading."""

    store: Store
    damaged: list[str] = field(default_factory=list)
    """One sentence for each value that does not match its checksum; may repeat."""

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Inspection]:
        """Open the buffer of a run folder, or of a buffer folder; StoreError if there is none, or it is damaged."""
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

    def state(self) -> StoreState:
        return look_at(self.store, lambda tx: tx.state)

    def num_groups(self) -> int:
        return look_at(self.store, lambda tx: tx.groups.count)

    def groups(
        self, *, prompt_id: int | None = None, phase: str | None = None, with_samples: bool = False
    ) -> Iterator[GroupView]:
        """Yield the groups by their ids: those of a prompt, those in a phase, and their stored samples if asked for."""
        position: int | None = 0
        while position is not None:
            found, position = look_at(self.store, partial(self._some, first=position, with_samples=with_samples))
            yield from (
                each for each in found if prompt_id in (None, each.row.prompt_id) and phase in (None, each.row.phase)
            )

    def group(self, group_id: int) -> GroupView | None:
        return look_at(self.store, lambda tx: self._view(tx, group_id, with_samples=True))

    # --- parts ------------------------------------------------------------------------------------

    def _some(self, tx: Transaction, first: int, with_samples: bool) -> tuple[list[GroupView], int | None]:
        """Return what one transaction reads, and the id where the next one resumes; None: at the end."""
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
        if group is None:
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
                blocks |= dict.fromkeys(records_in(found[0]), found[0])
            scores = self._whole(f"the scores of {what}", partial(tx.scores.get, record_id))
            samples.append(Sample(index, record_id, rows.only(blocks[record_id], record_id), scores))
        return samples

    def _whole(self, what: str, read: Callable[[], T | None]) -> T | None:
        """Return what is read; None if it is damaged, which is noted."""
        try:
            return read()
        except CorruptRecord as error:
            self.damaged.append(f"{what}: {error} (in {self.store.folder})")
            return None


def look_at(store: Store, look: Callable[[Transaction], T]) -> T:
    """As `Store.read`; its CorruptRecord says where the damage is and what helps."""
    with _naming(store.folder):
        return store.read(look)


def joined(samples: Sequence[Sample]) -> pa.RecordBatch:
    scores = [None if each.scores is None else np.frombuffer(each.scores, np.float32) for each in samples]
    return join_rows([each.record for each in samples], [each.record_id for each in samples], scores)


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Have errors of damage say where it is, and what to do."""
    try:
        yield
    except CorruptRecord as error:
        if str(folder) in str(error):
            raise
        raise CorruptRecord(
            f"the buffer in {folder} is damaged: {error}. {RESTORE.capitalize()}; `leeway buffer verify {folder}` "
            "names all that is damaged"
        ) from error


# --- export -----------------------------------------------------------------------------------------------


class ParquetExport(NamedTuple):
    """What an export wrote."""

    num_groups: int
    num_rows: int
    size_bytes: int
    damaged: list[str]
    """A sentence for each value that was left out because it does not match its checksum."""


def export(inspection: Inspection, path: Path) -> ParquetExport:
    """Write the stored trajectories as a Parquet file, in the place of one of that name; StoreError if it fails."""
    if not path.name or path.is_dir():
        raise StoreError(f"{path} is a folder: give the export the name of a file, as in samples.parquet")
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # another process may write to the same name
    state, facts = inspection.state(), inspection.store.facts
    metadata = {**(SCHEMA.metadata or {}), b"run_id": facts.run_id, b"facts": facts.model_dump_json()}
    schema = pa.schema([*SCHEMA, *STATE], metadata=metadata)
    num_groups = num_rows = 0
    try:
        with pq.ParquetWriter(partial, schema, compression="zstd") as writer:
            for groups in batches_of(inspection.groups(with_samples=True)):
                table = _table(groups, state, schema)
                writer.write_table(table)
                num_groups += len(groups)
                num_rows += table.num_rows
        sync(partial)
        partial.replace(path)
        sync(path.parent)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{path} cannot be written ({error}). Check the folder, its rights and free space") from error
    finally:
        with suppress(OSError):  # it is not there, or nothing can be done about it that the error does not say
            partial.unlink()
    return ParquetExport(num_groups, num_rows, path.stat().st_size, list(dict.fromkeys(inspection.damaged)))


def version_bounds(spans: pa.Array, starts: Sequence[dict[int, int]]) -> tuple[list[int], list[int]]:
    """Versions that the first and the last token of each row count with, by the `starts` of the incarnations for it."""
    values, bounds = spans.flatten(), list_bounds(spans)
    incarnations = values.field("incarnation").to_numpy()
    versions = values.field("version").to_numpy()

    def counted(places: npt.NDArray[np.int64]) -> list[int]:
        pairs = zip(incarnations[places].tolist(), versions[places].tolist(), starts, strict=True)
        return [effective_version(PolicyVersion(number, version), start) for number, version, start in pairs]

    return counted(bounds[:-1]), counted(bounds[1:] - 1)


def batches_of(groups: Iterator[GroupView]) -> Iterator[list[GroupView]]:
    batch: list[GroupView] = []
    size = num_rows = 0
    for group in groups:
        if not group.samples:
            continue
        batch.append(group)
        size += sum(len(sample.record) for sample in group.samples)
        num_rows += len(group.samples)
        if size >= ROW_GROUP_BYTES or num_rows >= ROW_GROUP_ROWS:
            yield batch
            batch, size, num_rows = [], 0, 0
    if batch:
        yield batch


def _table(groups: Sequence[GroupView], state: StoreState, schema: pa.Schema) -> pa.Table:
    rows = [(group, sample) for group in groups for sample in group.samples]
    batch = joined([sample for _, sample in rows])
    columns = {name: batch.column(i) for i, name in enumerate(batch.schema.names)}
    columns |= _state_columns(rows, columns["spans"], state)
    arrays = [pa.array(columns[field.name], field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _state_columns(rows: Sequence[tuple[GroupView, Sample]], spans: pa.Array, state: StoreState) -> dict[str, Any]:
    of_samples = [group.row.sample_states[sample.sample_index] for group, sample in rows]
    groups = [group.row for group, _ in rows]
    uses = [row.trained_at[-1] if state == "trained" else None for row, state in zip(groups, of_samples, strict=True)]

    @cache
    def started(last: float) -> dict[int, int]:
        """From which version each incarnation started; later ones than the one that trained do not change a lag."""
        return {number: version for number, version in state.resumed_at.items() if number <= last}

    starts = [started(inf if use is None else use.incarnation) for use in uses]
    oldest, newest = version_bounds(spans, starts)
    return {
        "record_id": [sample.record_id for _, sample in rows],
        "state": of_samples,
        "uses": [row.uses if state == "trained" else 0 for row, state in zip(groups, of_samples, strict=True)],
        "group_phase": [row.phase for row in groups],
        "group_oldest_version": [group.oldest_version for group, _ in rows],
        "oldest_version": oldest,
        "newest_version": newest,
        "trained_step": [None if use is None else use.step for use in uses],
        "trained_version": [None if use is None else use.version for use in uses],
        "lag": [None if use is None else use.version - first for use, first in zip(uses, oldest, strict=True)],
    }


# --- verify -----------------------------------------------------------------------------------------------


def verify(tx: Transaction) -> dict[str, Any]:
    """Report what is in the store and every fault found.

    Returns:
        'ledger' (the counters), 'recount' (the same from the tables), 'num_records', and 'faults': a sentence for each.
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
        if ledger.gap:
            faults.append(f"the ledger's identities are violated by {ledger.gap} samples")
        faults += [*_lease_faults(tx), *_partial_faults(tx), *_window_faults(tx), *_seen_faults(tx), *_draw_faults(tx)]
        faults += _unclaimed(tx)
    except CorruptRecord as error:
        # A damaged row is named already; what lacks a row that another table names is not.
        if str(error) not in faults:
            faults.append(str(error))
    return {"ledger": ledger.counts(), "recount": counted, "num_records": tx.state.num_records, "faults": faults}


def check_store(store: Store) -> dict[str, Any]:
    """Return the report of `verify`, with the faults in the structure of the file.

    'has_checked_pages' is False if a service writes the file, so that its structure could not be checked.
    """
    structure = store.structure_faults()
    report = look_at(store, verify)
    report["faults"] += structure or []
    report["has_checked_pages"] = structure is not None
    return report


def recount(tx: Transaction) -> dict[str, int]:
    """Count the two lines of the ledger from the tables: every group, and what left them."""
    found: Counter[str] = Counter(tx.state.retired)
    for (group_id,) in tx.groups.all_keys():
        group = tx.groups.require(group_id)
        found.update(group.tallies())
        found["in_flight"] += len(group.in_flight())
    found["committed"] = sum(found[state] for state in COMMITTED_STATES)
    return {name: found[name] for name in COUNTS}


def _unclaimed(tx: Transaction) -> list[str]:
    faults: list[str] = []
    owned: set[int] = set()
    stored: set[int] = set()
    for (first,), block in tx.records.all_items():
        inside = list(records_in(block))
        if inside != sorted(inside) or inside[0] != first or not stored.isdisjoint(inside):
            faults.append(f"the block at record {first} holds {inside[:MAX_NAMED]}, which are not its own")
        stored.update(inside)
    for (group_id,), group in tx.groups.all_items():
        for record in group.records:
            if record == NO_RECORD:
                continue
            if record in owned or record not in stored:
                faults.append(f"record {record} of group {group_id} is missing or shared")
            owned.add(record)
    if tx.state.num_records != len(stored):
        faults.append(f"the state says {tx.state.num_records} records are stored, there are {len(stored)}")
    faults += [f"record {record} belongs to no group" for record in sorted(stored - owned)]
    faults += [f"scores of record {r} are stored without it" for (r,) in tx.scores.all_keys() if r not in stored]
    return faults


def _lease_faults(tx: Transaction) -> Iterator[str]:
    """Yield leases that are closed, or of two groups."""
    groups: dict[int, int] = {}
    for (group_id,), group in tx.groups.all_items():
        if not group.lease_id:
            continue
        if group.phase != "open" or group.lease_id in groups:
            yield f"lease {group.lease_id} of group {group_id} is closed, or that of group {groups.get(group.lease_id)}"
        groups[group.lease_id] = group_id


def _partial_faults(tx: Transaction) -> Iterator[str]:
    named: set[tuple[int, ...]] = set()
    for (group_id,), group in tx.groups.all_items():
        named |= {(group_id, index) for index in group.partials}
        if stray := {*group.partials, *group.resting} - {*group.missing()}:
            yield f"group {group_id} has tokens of samples {sorted(stray)[:MAX_NAMED]}, which are not missing"
    stored = {key: group_of(block) for key, block in tx.partials.all_items()}
    for key in sorted(named ^ {key for key, group_id in stored.items() if key[0] == group_id}):
        yield f"the first tokens of sample {key[-1]} of group {key[0]} are missing, or no group names them"


def _window_faults(tx: Transaction) -> Iterator[str]:
    for (order,), waiting in tx.window.all_items():
        if waiting.order != order or order >= tx.state.cursor:
            yield (
                f"prompt {waiting.prompt_id} waits as number {waiting.order} of the data's order, under key {order}; "
                f"{tx.state.cursor} were taken"
            )


def _seen_faults(tx: Transaction) -> Iterator[str]:
    """Yield actors whose row does not count their sequence numbers that arrived out of order."""
    found, names = tx.seen.count_texts(), tx.actors.count_texts()
    for name in sorted(names | found):
        counted = tx.actors.require(name).num_seen_above if name in names else 0
        if counted != found[name]:
            yield f"'{name}' counts {counted} sequence numbers that came out of order, there are {found[name]}"


def _draw_faults(tx: Transaction) -> Iterator[str]:
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
    held = {record for group_id in set(draw.group_ids) for record in tx.groups.require(group_id).records}
    stray = [record for record in draw.record_ids if record == NO_RECORD or record not in held]
    if stray:
        yield f"step {draw.step} names {len(stray)} records that its groups do not have, such as {stray[:MAX_NAMED]}"
