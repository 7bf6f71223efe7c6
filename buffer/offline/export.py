"""Writes a store as a Parquet file: one row per stored trajectory, with what became of it.

The columns are those of `buffer.schema.SCHEMA`, then `STATE` below. Rows come in the order of their
groups, in row groups of some megabytes, so that memory stays bounded however large the store is.
The file appears under its name once it is whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from buffer.errors import StoreError
from buffer.offline.inspect import GroupView, Inspection, Sample, Selection, joined
from buffer.rows import list_bounds
from buffer.schema import SCHEMA
from buffer.tables import StoreState
from common.files import sync
from common.staleness import PolicyVersion, effective_version

STATE = pa.schema(
    [
        pa.field("shard", pa.int32(), nullable=False),
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
"""What the store knows of a trajectory beside itself; docs/buffer.md says what each means."""

ROW_GROUP_BYTES = 16 * 2**20
ROW_GROUP_ROWS = 65536


class ParquetExport(NamedTuple):
    """What was written."""

    num_groups: int
    num_rows: int
    size_bytes: int
    damaged: list[str]
    """What was left out because it does not match its checksum, one sentence each."""


def export(inspection: Inspection, wanted: Selection, path: Path) -> ParquetExport:
    """Write the stored trajectories of the groups wanted as a Parquet file; one of that name is replaced.

    Raises:
        StoreError: the file cannot be written, or the store cannot be read.
    """
    if not path.name or path.is_dir():
        raise StoreError(f"{path} is a folder: give the export the name of a file, as in samples.parquet")
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # another process may write to the same name
    states = inspection.states()
    first = inspection.stores[0]
    metadata = {**(SCHEMA.metadata or {}), b"run_id": first.facts.run_id, b"facts": first.facts.model_dump_json()}
    schema = pa.schema([*SCHEMA, *STATE], metadata=metadata)
    num_groups = num_rows = 0
    try:
        with pq.ParquetWriter(partial, schema, compression="zstd") as writer:
            for groups in batches_of(inspection.groups(wanted, with_samples=True)):
                table = _table(groups, states, schema)
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
    """Groups with stored samples, as many at a time as make a row group."""
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


def _table(groups: Sequence[GroupView], states: Mapping[int, StoreState], schema: pa.Schema) -> pa.Table:
    rows = [(group, sample) for group in groups for sample in group.samples]
    batch = joined([sample for _, sample in rows])
    columns = {name: batch.column(i) for i, name in enumerate(batch.schema.names)}
    columns |= _state_columns(rows, columns["spans"], states)
    arrays = [pa.array(columns[field.name], field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _state_columns(
    rows: Sequence[tuple[GroupView, Sample]], spans: pa.Array, states: Mapping[int, StoreState]
) -> dict[str, Any]:
    of_samples = [group.row.sample_states[sample.sample_index] for group, sample in rows]
    groups = [group.row for group, _ in rows]
    uses = [row.trained_at[-1] if state == "trained" else None for row, state in zip(groups, of_samples, strict=True)]

    @cache
    def started(shard: int, last: float) -> dict[int, int]:
        """From which version each incarnation started; later ones than the one that trained do not change a lag."""
        return {number: version for number, version in states[shard].resumed_at.items() if number <= last}

    lasts = [inf if use is None else use.incarnation for use in uses]
    starts = [started(group.shard, last) for (group, _), last in zip(rows, lasts, strict=True)]
    oldest, newest = version_bounds(spans, starts)
    return {
        "shard": [group.shard for group, _ in rows],
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
