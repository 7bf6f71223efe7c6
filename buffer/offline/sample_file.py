"""Samples out of a file: JSON Lines or Parquet, one row per sample, as a record batch of the buffer's schema.

A file is either what `buffer.offline.export` has written, whose columns are taken as they are, or has the fields of
`FileRow`. It is read as a whole, for the rows of a group may lie anywhere in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from buffer.errors import StoreError
from buffer.schema import SCHEMA, to_batch
from buffer.trajectory import Trajectory, VersionSpan
from common.names import did_you_mean
from common.staleness import PolicyVersion

SUFFIXES = (".jsonl", ".parquet")
MAX_NAMED = 20
"""Of the rows that are wrong, so many are named; the others are counted."""
FROM_FILE = "file"
"""The actor of samples of which nobody knows who made them."""

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class FileRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One sample as a file has it that Leeway did not write."""

    prompt_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    completion_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    reward: float | None = None
    logprobs: list[float] | None = None
    """log mu of each completion token under the policy that sampled it; None where that is not known."""
    group: int | str | None = None
    """Rows that have the same are one group; None: all rows of the same prompt without one are."""
    finished: bool = True
    """It ended by itself, with an end-of-sequence token, and was not cut."""
    columns: dict[str, Any] = {}
    """Whatever else is to be kept of it."""


class BadRows(StoreError):
    """Rows of a file, or samples of a run, that cannot be trained on; names each with its reason."""

    def __init__(self, path: Path, num_rows: int, reasons: Mapping[str, str]) -> None:
        """`reasons` are by the name of the row, as 'row 3'."""
        named = "; ".join(f"{name}: {why}" for name, why in list(reasons.items())[:MAX_NAMED])
        others = f"; and {len(reasons) - MAX_NAMED} others" if len(reasons) > MAX_NAMED else ""
        super().__init__(
            f"{path}: {len(reasons)} of {num_rows} samples cannot be trained on, so none is taken: {named}{others}"
        )


class FileSamples(NamedTuple):
    """All samples of a file."""

    batch: pa.RecordBatch
    """Of `schema.SCHEMA`; the samples of a group follow one another. An unknown log-probability is NaN."""
    rows: npt.NDArray[np.int64]
    """Where each stands in the file: the number of its line, or of its row, from 1."""
    is_recorded: bool
    """A run of Leeway made them, and the file is its export."""


def read_samples(path: Path) -> FileSamples:
    """Read a file.

    Raises:
        StoreError: it cannot be read, or has other columns.
        BadRows: rows have no sample.
    """
    try:
        if path.suffix == ".jsonl":
            return _of_rows(path, _json_rows(path))
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{path} cannot be read as {path.suffix[1:]} ({error}): check the file") from error
    if set(SCHEMA.names) <= set(table.column_names):
        return _of_export(path, table)
    return _of_rows(path, _table_rows(table))


def _json_rows(path: Path) -> Iterator[tuple[int, FileRow | str]]:
    decoder = msgspec.json.Decoder(FileRow)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield number, decoder.decode(line)
                except (msgspec.DecodeError, RecursionError) as error:
                    yield number, _reason(error)


def _table_rows(table: pa.Table) -> Iterator[tuple[int, FileRow | str]]:
    number = 0
    for batch in table.to_batches():
        for row in batch.to_pylist():
            number += 1
            try:
                yield (
                    number,
                    msgspec.convert({name: value for name, value in row.items() if value is not None}, FileRow),
                )
            except msgspec.ValidationError as error:
                yield number, _reason(error)


def _reason(error: Exception) -> str:
    """What is wrong with a row, with the field that was perhaps meant."""
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
    if bad := _nulls(table):
        raise BadRows(path, table.num_rows, bad)
    try:
        chosen = table.select(SCHEMA.names).cast(SCHEMA)
        order = np.lexsort((chosen["sample_index"].to_numpy(), chosen["group_id"].to_numpy()))
        batch = pa.concat_batches(chosen.take(order).to_batches()) if len(order) else to_batch([], "")
    except (pa.ArrowException, ValueError) as error:
        raise StoreError(
            f"{path} has the names of an export's columns, and not their types, or is larger than 2**31 tokens "
            f"({error}): export the run again, or a part of it"
        ) from error
    return FileSamples(batch, order.astype(np.int64) + 1, is_recorded=True)


def _nulls(table: pa.Table) -> dict[str, str]:
    """Rows that lack a value which none may lack."""
    bad: dict[str, str] = {}
    for field in SCHEMA:
        if not field.nullable and table[field.name].null_count:
            is_null: Sequence[bool] = table[field.name].is_null().to_pylist()
            bad |= {f"row {i + 1}": f"{field.name} is null" for i, null in enumerate(is_null) if null}
    return bad
