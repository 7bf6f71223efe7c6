"""Files of samples: a store as a Parquet file (`export`), and a file as a record batch of the buffer's schema
(`read_samples`).

An export has one row per stored trajectory: the columns of `buffer.schema.SCHEMA`, then `STATE`. Rows come in the order
of their groups, in row groups of some megabytes, so that memory stays bounded.

A file that is read is an export, or JSON Lines with a `FileRow` per line. It is read as a whole, for the rows of a
group may lie anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from math import inf
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from buffer.errors import StoreError
from buffer.offline.inspect import GroupView, Inspection, Sample, joined
from buffer.rows import list_bounds
from buffer.schema import SCHEMA, Trajectory, VersionSpan, refuse_nulls, to_batch
from buffer.tables import StoreState
from common.files import sync
from common.staleness import PolicyVersion, effective_version
from common.user_input import did_you_mean

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
SUFFIXES = (".jsonl", ".parquet")
MAX_NAMED = 20
"""Wrong rows that are named; the others are counted."""
FROM_FILE = "file"

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class ParquetExport(NamedTuple):
    """What was written."""

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


class FileRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One sample of a JSON Lines file."""

    prompt_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    completion_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    reward: float | None = None
    logprobs: list[float] | None = None
    """log mu of each completion token under the policy that sampled it."""
    group: int | str | None = None
    """Rows of one value are one group; so are rows of one prompt without a value."""
    finished: bool = True
    """It ended with an end-of-sequence token, and was not cut."""
    columns: dict[str, Any] = {}
    """Anything else to keep."""


class BadRows(StoreError):
    """Rows of a file, or samples of a run, that cannot be trained on; names each with its reason."""

    def __init__(self, path: Path, num_rows: int, reasons: Mapping[str, str]) -> None:
        named = "; ".join(f"{name}: {why}" for name, why in list(reasons.items())[:MAX_NAMED])
        others = f"; and {len(reasons) - MAX_NAMED} others" if len(reasons) > MAX_NAMED else ""
        super().__init__(
            f"{path}: {len(reasons)} of {num_rows} samples cannot be trained on, so none is taken: {named}{others}"
        )


class FileSamples(NamedTuple):
    """All samples of a file."""

    batch: pa.RecordBatch
    """Of `schema.SCHEMA`, by groups. An unknown log-probability is NaN."""
    rows: npt.NDArray[np.int64]
    """The line or row of each in the file, from 1."""
    is_recorded: bool
    """The file is an export of a run."""


def read_samples(path: Path) -> FileSamples:
    """Read a file; StoreError if it cannot be read, or has other columns, BadRows if rows have no sample."""
    try:
        if path.suffix == ".jsonl":
            return _of_rows(path, _json_rows(path))
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{path} cannot be read as {path.suffix[1:]} ({error}): check the file") from error
    return _of_export(path, table)


def _json_rows(path: Path) -> Iterator[tuple[int, FileRow | str]]:
    decoder = msgspec.json.Decoder(FileRow)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield number, decoder.decode(line)
                except (msgspec.DecodeError, RecursionError) as error:
                    yield number, _reason(error)


def _reason(error: Exception) -> str:
    text = str(error)
    field = text.split("`")[1] if "unknown field" in text else ""
    return text + (did_you_mean(field, FileRow.__struct_fields__) if field else "")


def _of_rows(path: Path, rows: Iterator[tuple[int, FileRow | str]]) -> FileSamples:
    """Number prompts and groups by their first appearance, and put the samples of each group together."""
    prompts: dict[tuple[int, ...], int] = {}
    groups: dict[object, tuple[int, int]] = {}
    sizes: dict[int, int] = {}
    found: list[tuple[int, Trajectory]] = []
    bad: dict[str, str] = {}
    written_s, num_rows = path.stat().st_mtime, 0
    for number, row in rows:
        num_rows += 1
        why = row if isinstance(row, str) else _fault(row)
        if isinstance(row, str) or why:
            bad[f"row {number}"] = why
            continue
        prompt_id = prompts.setdefault(tuple(row.prompt_ids), len(prompts))
        # a group that is named, and one of a prompt, never have the same key
        key = ("prompt", prompt_id) if row.group is None else (type(row.group), row.group)
        group_id, of_prompt = groups.setdefault(key, (len(groups) + 1, prompt_id))
        if of_prompt != prompt_id:
            bad[f"row {number}"] = f"group {row.group!r} has another prompt in an earlier row"
            continue
        sizes[group_id] = sizes.get(group_id, 0) + 1
        found.append((number, _trajectory(row, group_id, sizes[group_id] - 1, prompt_id, number, written_s)))
    if bad:
        raise BadRows(path, num_rows, bad)
    found.sort(key=lambda each: (each[1].group_id, each[1].sample_index))
    batch = to_batch([trajectory for _, trajectory in found], run_id=path.name)
    return FileSamples(batch, np.array([number for number, _ in found], np.int64), is_recorded=False)


def _fault(row: FileRow) -> str:
    if row.logprobs is not None and len(row.logprobs) != len(row.completion_ids):
        return f"{len(row.logprobs)} logprobs for {len(row.completion_ids)} completion_ids"
    return ""


def _trajectory(row: FileRow, group_id: int, index: int, prompt_id: int, number: int, written_s: float) -> Trajectory:
    """Of a version that nobody knows: it counts as older than any of the run that trains on it."""
    num_tokens = len(row.completion_ids)
    unknown = np.full(num_tokens, np.nan, np.float32)
    return Trajectory(
        lease_id=group_id,
        attempt=1,
        group_id=group_id,
        sample_index=index,
        prompt_id=prompt_id,
        token_ids=np.array([*row.prompt_ids, *row.completion_ids], np.int32),
        prompt_length=len(row.prompt_ids),
        logprobs=unknown if row.logprobs is None else np.array(row.logprobs, np.float32),
        spans=(VersionSpan(PolicyVersion(0, 0), 0, num_tokens),),
        reward=row.reward,
        finish_reason="stop" if row.finished else "length",
        columns=row.columns,
        actor=FROM_FILE,
        seq=number,
        started_s=written_s,
        finished_s=written_s,
    )


def _of_export(path: Path, table: pa.Table) -> FileSamples:
    """The columns of the schema as they are; what the store knew beside them is left out."""
    if missing := sorted(set(SCHEMA.names) - set(table.column_names)):
        raise StoreError(
            f"{path} lacks the columns {', '.join(missing)} of an export: give what leeway buffer export wrote, or a "
            ".jsonl file of your own samples"
        )
    try:
        chosen = table.select(SCHEMA.names).cast(SCHEMA)
        order = np.lexsort((chosen["sample_index"].to_numpy(), chosen["group_id"].to_numpy()))
        batch = pa.concat_batches(chosen.take(order).to_batches()) if len(order) else to_batch([], "")
        refuse_nulls(batch)
    except (pa.ArrowException, ValueError) as error:
        raise StoreError(
            f"{path} has the names of an export's columns, and not their types, or is larger than 2**31 tokens "
            f"({error}): export the run again, or a part of it"
        ) from error
    return FileSamples(batch, order.astype(np.int64) + 1, is_recorded=True)
