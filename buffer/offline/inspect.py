"""Read-only access to a store, during or after its run.

Inspection  groups and their samples. Transactions last a fraction of a second and resume by key, so that a running
            service can reuse pages; each group is read in its state at that moment
export      writes a Parquet file with one row per stored trajectory: the columns of `schema.SCHEMA`, then `STATE` and
            `TEXT`, in the order of the groups, in row groups of a few megabytes, so that memory stays bounded
verify      checks every checksum, the tables against each other, and the ledger against the tables
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from leeway.buffer import rows
from leeway.buffer.errors import CorruptRecord, StoreError
from leeway.buffer.ledger import COMMITTED_STATES, COUNTS
from leeway.buffer.rows import group_of, list_bounds, records_in
from leeway.buffer.schema import SCHEMA, join_rows
from leeway.buffer.store import RESTORE, Store, buffer_folder
from leeway.buffer.tables import NO_RECORD, DrawRecord, Group, StoreState, Tries
from leeway.buffer.transaction import Transaction
from leeway.common.files import replace_durably
from leeway.common.staleness import PolicyVersion, effective_version

T = TypeVar("T")

MAX_NAMED = 4
READ_S = 0.1
READ_BYTES = 16 * 2**20
"""Limits of the reads of one transaction, exceeded by at most one group."""
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
"""Columns of a trajectory's state in the store; see docs/buffer.md."""
TEXT = pa.schema([pa.field("prompt", pa.string()), pa.field("completion", pa.string())])
"""Columns of a trajectory's text, with special tokens; null without a tokenizer."""
Decode = Callable[[Sequence[int]], str | None]
NUM_NEWEST = 1024
"""Number of newest groups among which `newest_trained` looks for the newest step."""

ROW_GROUP_BYTES = 16 * 2**20
ROW_GROUP_ROWS = 65536


class Sample(NamedTuple):
    sample_index: int
    record_id: int
    record: bytes
    """A block with only this record; `joined` decodes it."""
    scores: bytes | None
    """float32 reference log-probabilities."""


@dataclass(frozen=True)
class GroupView:
    """A group in its state when it was read."""

    row: Group
    oldest_version: int | None
    """Effective version of the group's oldest committed token."""
    tries: Tries | None = None
    """Success counts of the group's prompt."""
    samples: Sequence[Sample] = ()

    @property
    def lengths(self) -> list[int]:
        return [length for length in self.row.lengths if length]


@dataclass
class Inspection:
    """The store of a buffer folder, opened read-only."""

    store: Store
    damaged: list[str] = field(default_factory=list)
    """One message for each value that does not match its checksum; may contain duplicates."""

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Inspection]:
        """Open the buffer of a run folder or buffer folder; raise StoreError if there is none or it is damaged."""
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
        return read_store(self.store, lambda tx: tx.state)

    def num_groups(self) -> int:
        return read_store(self.store, lambda tx: tx.groups.count)

    def groups(
        self, *, prompt_id: int | None = None, phase: str | None = None, with_samples: bool = False, first: int = 0
    ) -> Iterator[GroupView]:
        """Yield the groups from id `first` on, filtered by prompt and phase, with their stored samples if requested."""
        position: int | None = first
        while position is not None:
            found, position = read_store(self.store, partial(self._some, first=position, with_samples=with_samples))
            yield from (
                each for each in found if prompt_id in (None, each.row.prompt_id) and phase in (None, each.row.phase)
            )

    def group(self, group_id: int) -> GroupView | None:
        return read_store(self.store, lambda tx: self._view(tx, group_id, with_samples=True))

    # --- parts ------------------------------------------------------------------------------------

    def _some(self, tx: Transaction, first: int, with_samples: bool) -> tuple[list[GroupView], int | None]:
        """Return the groups read by one transaction, and the id at which the next one resumes (None at the end)."""
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
        tries = self._whole(f"the success counts of prompt {prompt_id}", lambda: tx.tries.get(prompt_id))
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
        """Return the value of `read()`; if it is damaged, record that in `damaged` and return None."""
        try:
            return read()
        except CorruptRecord as error:
            self.damaged.append(f"{what}: {error} (in {self.store.folder})")
            return None


def read_store(store: Store, query: Callable[[Transaction], T]) -> T:
    """Run `Store.read`; the message of a CorruptRecord has the folder and the fix."""
    with _naming(store.folder):
        return store.read(query)


def joined(samples: Sequence[Sample]) -> pa.RecordBatch:
    scores = [None if each.scores is None else np.frombuffer(each.scores, np.float32) for each in samples]
    return join_rows([each.record for each in samples], [each.record_id for each in samples], scores)


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Add the folder and the fix to the message of a CorruptRecord."""
    try:
        yield
    except CorruptRecord as error:
        if str(folder) in str(error):
            raise
        raise CorruptRecord(
            f"the buffer in {folder} is damaged: {error}. {RESTORE.capitalize()}; `leeway buffer verify {folder}` "
            "lists all damage"
        ) from error


# --- export -----------------------------------------------------------------------------------------------


class ParquetExport(NamedTuple):
    """Result of an export."""

    num_groups: int
    num_rows: int
    size_bytes: int
    damaged: list[str]
    """A message for each value that was skipped because it does not match its checksum."""


def export(inspection: Inspection, path: Path, decode: Decode = lambda token_ids: None) -> ParquetExport:
    """Write the stored trajectories to a Parquet file, replacing an existing file; raise StoreError on failure."""
    if not path.name or path.is_dir():
        raise StoreError(f"{path} is a folder: pass the name of a file for the export, such as samples.parquet")
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # another process may export to the same name
    state, facts = inspection.state(), inspection.store.facts
    metadata = {**(SCHEMA.metadata or {}), b"run_id": facts.run_id, b"facts": facts.model_dump_json()}
    schema = pa.schema([*SCHEMA, *STATE, *TEXT], metadata=metadata)
    num_groups = num_rows = 0
    try:
        with pq.ParquetWriter(partial, schema, compression="zstd") as writer:
            for groups in batches_of(inspection.groups(with_samples=True)):
                table = _table(groups, state, schema, decode)
                writer.write_table(table)
                num_groups += len(groups)
                num_rows += table.num_rows
        replace_durably(partial, path)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{path} cannot be written ({error}). Check the folder, permissions and free space") from error
    finally:
        with suppress(OSError):  # the file may be missing or undeletable; the first error is the one to report
            partial.unlink()
    return ParquetExport(num_groups, num_rows, path.stat().st_size, list(dict.fromkeys(inspection.damaged)))


def samples(inspection: Inspection, columns: Sequence[str] | None, decode: Decode) -> pa.Table:
    """Return the stored trajectories as a table of these or all columns; raise StoreError if a column is unknown."""
    schema, state = pa.schema([*SCHEMA, *STATE, *TEXT]), inspection.state()
    names = schema.names if columns is None else list(columns)
    if unknown := sorted({*names} - {*schema.names}):
        raise StoreError(f"samples have no such column: {', '.join(unknown)}; docs/buffer.md lists the columns")
    schema = pa.schema([schema.field(name) for name in names])
    tables = (_table(each, state, schema, decode) for each in batches_of(inspection.groups(with_samples=True)))
    return pa.concat_tables([schema.empty_table(), *tables])


def newest_trained(inspection: Inspection, limit: int, decode: Decode) -> list[dict[str, Any]]:
    """Return one sample of each of up to `limit` groups of the newest step, with text, reward, lag and step."""
    state, fields = inspection.state(), pa.schema([*SCHEMA, *STATE, *TEXT])
    groups = inspection.groups(first=max(0, state.next_group - NUM_NEWEST))
    step_of = {each.row.group_id: each.row.trained_at[-1].step for each in groups if each.row.trained_at}
    newest = [group_id for group_id, step in step_of.items() if step == max(step_of.values())][:limit]
    views = []
    for view in filter(None, map(inspection.group, newest)):
        trained = [each for each in view.samples if view.row.sample_states[each.sample_index] == "trained"]
        views += [replace(view, samples=trained[:1])] * bool(trained)
    schema = pa.schema([fields.field(name) for name in (*TEXT.names, "reward", "lag", "trained_step")])
    return _table(views, state, schema, decode).to_pylist() if views else []


def version_bounds(spans: pa.Array, starts: Sequence[dict[int, int]]) -> tuple[list[int], list[int]]:
    """Return the effective versions of the first and last token of each row; `starts` has the `resumed_at` per row."""
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
    for group in filter(lambda each: each.samples, groups):
        batch.append(group)
        size += sum(len(sample.record) for sample in group.samples)
        num_rows += len(group.samples)
        if size >= ROW_GROUP_BYTES or num_rows >= ROW_GROUP_ROWS:
            yield batch
            batch, size, num_rows = [], 0, 0
    if batch:
        yield batch


def _table(groups: Sequence[GroupView], state: StoreState, schema: pa.Schema, decode: Decode) -> pa.Table:
    rows = [(group, sample) for group in groups for sample in group.samples]
    batch = joined([sample for _, sample in rows])
    columns = {name: batch.column(i) for i, name in enumerate(batch.schema.names)}
    columns |= _state_columns(rows, columns["spans"], state)
    if {*schema.names} & {*TEXT.names}:
        lengths = batch.column("prompt_length").to_pylist()
        tokens = list(zip(batch.column("token_ids").to_pylist(), lengths, strict=True))
        columns["prompt"] = [decode(token_ids[:length]) for token_ids, length in tokens]
        columns["completion"] = [decode(token_ids[length:]) for token_ids, length in tokens]
    arrays = [pa.array(columns[field.name], field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _state_columns(rows: Sequence[tuple[GroupView, Sample]], spans: pa.Array, state: StoreState) -> dict[str, Any]:
    of_samples = [group.row.sample_states[sample.sample_index] for group, sample in rows]
    groups = [group.row for group, _ in rows]
    uses = [row.trained_at[-1] if state == "trained" else None for row, state in zip(groups, of_samples, strict=True)]

    @cache
    def started(last: float) -> dict[int, int]:
        """Return the start versions of incarnations up to `last`; later starts do not affect a sample's lag."""
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
    """Check the contents of the store and report every fault.

    Returns:
        'ledger' (counters), 'recount' (counts from the tables), 'num_records', and 'faults', with one message each.
    """
    faults = list(tx.damaged())
    ledger = tx.state.ledger
    counted: dict[str, int] = {}
    try:
        counted = recount(tx)
        faults += [
            f"the ledger has {name} = {getattr(ledger, name)}, but the tables have {count}"
            for name, count in counted.items()
            if getattr(ledger, name) != count
        ]
        if ledger.gap:
            faults.append(f"the ledger's identities are violated by {ledger.gap} samples")
        faults += [*_lease_faults(tx), *_partial_faults(tx), *_window_faults(tx), *_seen_faults(tx), *_draw_faults(tx)]
        faults += _unclaimed(tx)
    except CorruptRecord as error:
        # A damaged row is reported already; a missing row that another table references is not.
        if str(error) not in faults:
            faults.append(str(error))
    return {"ledger": ledger.counts(), "recount": counted, "num_records": tx.state.num_records, "faults": faults}


def check_store(store: Store) -> dict[str, Any]:
    """Return the report of `verify`, with the structural faults of the file.

    'has_checked_pages' is False if a service is writing the file, which prevents checking its structure.
    """
    structure = store.structure_faults()
    report = read_store(store, verify)
    report["faults"] += structure or []
    report["has_checked_pages"] = structure is not None
    return report


def recount(tx: Transaction) -> dict[str, int]:
    """Return the counts of both ledger identities, from all groups and the retired counts."""
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
            faults.append(f"the block at record {first} has records {inside[:MAX_NAMED]} of other blocks")
        stored.update(inside)
    for (group_id,), group in tx.groups.all_items():
        for record in group.records:
            if record == NO_RECORD:
                continue
            if record in owned or record not in stored:
                faults.append(f"record {record} of group {group_id} is missing or shared")
            owned.add(record)
    if tx.state.num_records != len(stored):
        faults.append(f"the state counts {tx.state.num_records} records, but {len(stored)} are stored")
    faults += [f"record {record} belongs to no group" for record in sorted(stored - owned)]
    faults += [f"record {r} has scores but is missing" for (r,) in tx.scores.all_keys() if r not in stored]
    return faults


def _lease_faults(tx: Transaction) -> Iterator[str]:
    """Yield leases of groups that are not open, or that belong to two groups."""
    groups: dict[int, int] = {}
    for (group_id,), group in tx.groups.all_items():
        if not group.lease_id:
            continue
        if group.phase != "open" or group.lease_id in groups:
            yield f"lease {group.lease_id} of group {group_id} is closed, or also in group {groups.get(group.lease_id)}"
        groups[group.lease_id] = group_id


def _partial_faults(tx: Transaction) -> Iterator[str]:
    named: set[tuple[int, ...]] = set()
    for (group_id,), group in tx.groups.all_items():
        named |= {(group_id, index) for index in group.partials}
        if stray := {*group.partials, *group.resting} - {*group.missing()}:
            yield f"group {group_id} has tokens of samples {sorted(stray)[:MAX_NAMED]}, which are not missing"
    stored = {key: group_of(block) for key, block in tx.partials.all_items()}
    for key in sorted(named ^ {key for key, group_id in stored.items() if key[0] == group_id}):
        yield f"the partial rollout of sample {key[-1]} of group {key[0]} is missing, or no group references it"


def _window_faults(tx: Transaction) -> Iterator[str]:
    for (order,), waiting in tx.window.all_items():
        if waiting.order != order or order >= tx.state.cursor:
            yield (
                f"prompt {waiting.prompt_id} has position {waiting.order} in the prompt order, but is stored under key "
                f"{order}; {tx.state.cursor} prompts were chosen"
            )


def _seen_faults(tx: Transaction) -> Iterator[str]:
    """Yield actors whose row has a wrong count of sequence numbers that arrived out of order."""
    found, names = tx.seen.count_texts(), tx.actors.count_texts()
    for name in sorted(names | found):
        counted = tx.actors.require(name).num_seen_above if name in names else 0
        if counted != found[name]:
            yield f"'{name}' counts {counted} sequence numbers received out of order, but {found[name]} are stored"


def _draw_faults(tx: Transaction) -> Iterator[str]:
    held: Counter[int] = Counter()
    pending: Counter[int] = Counter()
    for (step,), draw in tx.draws.all_items():
        held.update(set(draw.group_ids))
        yield from _sample_faults(tx, draw)
        if step in tx.state.pending_draws:
            pending.update(set(draw.group_ids))
            if tx.state.pending_draws[step] != len(set(draw.group_ids)):
                yield f"step {step} holds {len(set(draw.group_ids))} groups, but the state counts a different number"
    for (group_id,), group in tx.groups.all_items():
        if (group.held, group.pending) != (held[group_id], pending[group_id]):
            yield (
                f"group {group_id} counts {group.held} recorded and {group.pending} unfinished draws, "
                f"but {held[group_id]} and {pending[group_id]} are stored"
            )
        if (group.phase == "drawn") != (pending[group_id] > 0):
            yield f"group {group_id} is {group.phase}, but {pending[group_id]} unfinished draws reference it"


def _sample_faults(tx: Transaction, draw: DrawRecord) -> Iterator[str]:
    held = {record for group_id in set(draw.group_ids) for record in tx.groups.require(group_id).records}
    stray = [record for record in draw.record_ids if record == NO_RECORD or record not in held]
    if stray:
        yield f"step {draw.step} references {len(stray)} records that its groups lack, such as {stray[:MAX_NAMED]}"
