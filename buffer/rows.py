"""The record on disk: one trajectory as a fixed header and its flat values.

    header | spans | reward parts | token_ids | logprobs | reference_logprobs | names | texts

Every section begins at a multiple of the size of its numbers, so that NumPy reads it in place, without a
copy. The header says how long each section is. An Arrow message per record would carry 2.4 kB of
metadata and cost 25 microseconds; this layout is derived from `buffer.schema.SCHEMA`, column by
column, and `decode` gives those columns back.

The first four bytes are the schema version.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from buffer.trajectory import SCHEMA_VERSION

INTEGERS = ("lease_id", "attempt", "group_id", "sample_index", "prompt_id", "prompt_length", "epoch", "seq")
WALL_TIMES = ("started_s", "finished_s")
TEXTS = ("run_id", "actor", "finish_reason", "columns")
SPAN = pa.struct(
    [
        pa.field("incarnation", pa.int32(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("end", pa.int32(), nullable=False),
    ]
)
PART = pa.struct([pa.field("name", pa.string(), nullable=False), pa.field("value", pa.float64())])

_SECTIONS: tuple[tuple[str, int], ...] = (
    ("spans", 32),
    ("part_values", 8),
    ("token_ids", 4),
    ("logprobs", 4),
    ("reference_logprobs", 4),
    ("part_name_sizes", 4),
    ("part_names", 1),
    *((name, 1) for name in TEXTS),
)
"""Name of each section and the bytes of one of its items."""

HEADER = np.dtype(
    [
        ("schema_version", "<u4"),
        ("flags", "<u4"),
        *((name, "<i8") for name in INTEGERS),
        *((name, "<f8") for name in WALL_TIMES),
        ("reward", "<f8"),
        *((f"num_{name}", "<u4") for name, _ in _SECTIONS),
        ("reserved", "<u4"),
    ]
)
"""The reward is NaN where there is none; a stored reward is finite."""
assert HEADER.itemsize % 8 == 0
_HAS_REFERENCE = 1
_ITEM_SIZES = np.array([size for _, size in _SECTIONS], np.int64)


def flat_values(column: pa.Array) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """A list column as its flat values and the bounds of each row in them (num_rows + 1)."""
    if column.null_count:
        # A null row may hide values, which `flatten` leaves out.
        lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        return column.flatten().to_numpy(zero_copy_only=False), bounds_of(lengths).astype(np.int64)
    return column.flatten().to_numpy(zero_copy_only=False), list_bounds(column)


def list_bounds(column: pa.Array) -> npt.NDArray[np.int64]:
    """Where each row of a list column without nulls begins in its flat values, counted from 0 (num_rows + 1)."""
    offsets = column.offsets.to_numpy()
    return offsets.astype(np.int64) - offsets[0]


def encode(batch: pa.RecordBatch) -> list[bytes]:
    """The rows of a validated record batch of `SCHEMA` as records."""
    column = {name: batch.column(i) for i, name in enumerate(batch.schema.names)}
    flat, bounds = _sections(column)
    headers = np.zeros(batch.num_rows, HEADER)
    headers["schema_version"] = SCHEMA_VERSION
    for name in (*INTEGERS, *WALL_TIMES):
        headers[name] = column[name].to_numpy()
    headers["reward"] = column["reward"].to_numpy(zero_copy_only=False)
    headers["flags"] = np.where(column["reference_logprobs"].is_valid().to_numpy(zero_copy_only=False), 1, 0)
    for (name, _), bound in zip(_SECTIONS, bounds, strict=True):
        headers[f"num_{name}"] = np.diff(bound)
    head = headers.tobytes()
    size = HEADER.itemsize
    byte_bounds = [(bound * item).tolist() for bound, item in zip(bounds, _ITEM_SIZES.tolist(), strict=True)]
    pieces = [[head[i * size : (i + 1) * size] for i in range(batch.num_rows)]]
    pieces += [
        [data[start:end] for start, end in itertools.pairwise(bound)]
        for data, bound in zip(flat, byte_bounds, strict=True)
    ]
    return [b"".join(row) for row in zip(*pieces, strict=True)]


def decode(records: Sequence[bytes | memoryview]) -> dict[str, pa.Array]:
    """Records as the columns of `SCHEMA`; what is read is copied once."""
    size = HEADER.itemsize
    headers = np.frombuffer(b"".join([record[:size] for record in records]), HEADER)
    counts = np.stack([headers[f"num_{name}"] for name, _ in _SECTIONS]).astype(np.int64)
    ends = size + np.cumsum(counts * _ITEM_SIZES[:, None], axis=0)
    starts = ends - counts * _ITEM_SIZES[:, None]
    data = {
        name: b"".join([record[start:end] for record, start, end in zip(records, *where, strict=True)])
        for (name, _), *where in zip(_SECTIONS, starts.tolist(), ends.tolist(), strict=True)
    }
    number = {name: counts[i] for i, (name, _) in enumerate(_SECTIONS)}
    has_reference = (headers["flags"] & _HAS_REFERENCE).astype(bool)
    reward = headers["reward"]
    return {
        **{name: pa.array(np.ascontiguousarray(headers[name])) for name in (*INTEGERS, *WALL_TIMES)},
        **{name: text_array(data[name], number[name]) for name in TEXTS},
        "reward": pa.array(np.ascontiguousarray(reward), mask=np.isnan(reward)),
        "token_ids": list_array(number["token_ids"], pa.array(np.frombuffer(data["token_ids"], np.int32))),
        "logprobs": list_array(number["logprobs"], pa.array(np.frombuffer(data["logprobs"], np.float32))),
        "spans": list_array(number["spans"], span_structs(np.frombuffer(data["spans"], np.int64).reshape(-1, 4))),
        "reward_parts": list_array(number["part_values"], _part_structs(data)),
        "reference_logprobs": list_array(
            number["reference_logprobs"],
            pa.array(np.frombuffer(data["reference_logprobs"], np.float32)),
            missing=~has_reference,
        ),
    }


def num_completion_tokens(record: bytes | memoryview) -> int:
    """Length of the completion in a record."""
    return int(np.frombuffer(record, HEADER, 1)["num_logprobs"][0])


def list_array(
    counts: npt.NDArray[Any] | Sequence[int], values: pa.Array, *, missing: npt.NDArray[np.bool_] | None = None
) -> pa.Array:
    """A list column of rows of these lengths; `missing` rows are null."""
    offsets = pa.array(bounds_of(counts))
    if missing is None or not missing.any():
        return pa.ListArray.from_arrays(offsets, values)
    return pa.ListArray.from_arrays(offsets, values, mask=pa.array(missing))


def text_array(data: bytes, sizes: npt.NDArray[Any]) -> pa.Array:
    """A string column from its UTF-8 bytes and the size of each."""
    return pa.StringArray.from_buffers(len(sizes), pa.py_buffer(bounds_of(sizes)), pa.py_buffer(data))


def bounds_of(counts: npt.NDArray[Any] | Sequence[int]) -> npt.NDArray[np.int32]:
    """Arrow's offsets of rows of these lengths (num_rows + 1)."""
    bounds = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def _sections(column: dict[str, pa.Array]) -> tuple[list[bytes], list[npt.NDArray[np.int64]]]:
    """The flat bytes of every section, and the bounds of each row in items."""
    spans, parts = column["spans"], column["reward_parts"]
    span_bounds, part_bounds = list_bounds(spans), list_bounds(parts)
    span_values = spans.flatten()
    table = np.empty((len(span_values), 4), np.int64)
    for i in range(4):
        table[:, i] = span_values.field(i).to_numpy()
    part_values = parts.flatten()
    names, name_bounds = _text_bytes(part_values.field(0))
    values = part_values.field(1).to_numpy(zero_copy_only=False).astype(np.float64, copy=False)
    flat: dict[str, tuple[Any, npt.NDArray[np.int64]]] = {
        "spans": (table, span_bounds),
        "part_values": (values, part_bounds),
        "part_name_sizes": (np.diff(name_bounds).astype(np.int32), part_bounds),
        "part_names": (names, name_bounds[part_bounds]),
        **{name: flat_values(column[name]) for name in ("token_ids", "logprobs", "reference_logprobs")},
        **{name: _text_bytes(column[name]) for name in TEXTS},
    }
    ordered = [flat[name] for name, _ in _SECTIONS]
    # Bytes and no views: the collector of garbage follows each of the many thousand views, but no bytes.
    return [np.ascontiguousarray(values).tobytes() for values, _ in ordered], [bound for _, bound in ordered]


def _text_bytes(column: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The UTF-8 bytes of a string column without nulls, and the bounds of each row in them."""
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4).astype(np.int64)
    flat = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return flat[bounds[0] : bounds[-1]], bounds - bounds[0]


def span_structs(table: npt.NDArray[np.int64]) -> pa.Array:
    """Spans as Arrow structs, from a table with one row per span and one column per field of `SPAN`."""
    kinds = (np.int32, np.int64, np.int32, np.int32)
    values = [pa.array(np.ascontiguousarray(table[:, i], kind)) for i, kind in enumerate(kinds)]
    return pa.StructArray.from_arrays(values, fields=list(SPAN))


def _part_structs(data: dict[str, bytes]) -> pa.Array:
    values = np.frombuffer(data["part_values"], np.float64)
    names = text_array(data["part_names"], np.frombuffer(data["part_name_sizes"], np.int32))
    return pa.StructArray.from_arrays([names, pa.array(values, mask=np.isnan(values))], fields=list(PART))
