"""The block format on disk: trajectories of one group that were committed together, column by column.

    schema version, number of rows | header of each row
    | spans | reward parts | token_ids | logprobs | reference_logprobs | names | texts

A group is drawn and evicted as a whole, so samples that arrive together are stored in one block. Each row has a record
number in its header, and the lowest record number is the key of the block. A section holds the values of all rows,
aligned for NumPy to read in place; the headers contain the length of each row's part. An Arrow message per block would
add 2.4 kB of metadata and take 25 microseconds.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

SCHEMA_VERSION = 10
"""Version of the message schema and of the format on disk."""
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
"""Name of each section and the size of its items in bytes."""

_PREFIX = struct.Struct("<II")
"""Schema version and number of rows."""
HEADER = np.dtype(
    [
        ("record", "<i8"),
        *((name, "<i8") for name in INTEGERS),
        *((name, "<f8") for name in WALL_TIMES),
        ("reward", "<f8"),
        *((f"num_{name}", "<u4") for name, _ in _SECTIONS),
        ("flags", "<u4"),
    ]
)
"""Header of a row. A missing reward is NaN; stored rewards are finite."""
assert HEADER.itemsize % 8 == 0
_HAS_REFERENCE = 1
_ITEM_SIZES = np.array([size for _, size in _SECTIONS], np.int64)


def flat_values(column: pa.Array) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Return the flat values of a list column and the bounds of each row in them (num_rows + 1)."""
    if column.null_count:
        # A null row may hide values, which `flatten` omits.
        lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        return column.flatten().to_numpy(zero_copy_only=False), bounds_of(lengths).astype(np.int64)
    return column.flatten().to_numpy(zero_copy_only=False), list_bounds(column)


def list_bounds(column: pa.Array) -> npt.NDArray[np.int64]:
    """Return the bounds of each row of a list column without nulls in its flat values, from 0 (num_rows + 1)."""
    offsets = column.offsets.to_numpy()
    return offsets.astype(np.int64) - offsets[0]


def part_values(parts: pa.Array, name: str) -> npt.NDArray[np.float64]:
    """Return a part of the rewards of each row by its name; NaN if the row lacks the part or it is null."""
    names, values = parts.flatten().flatten()
    places = np.flatnonzero(pc.equal(names, name).to_numpy(zero_copy_only=False))
    found = np.full(len(parts), np.nan)
    rows = np.searchsorted(list_bounds(parts), places, side="right") - 1
    found[rows] = values.to_numpy(zero_copy_only=False)[places]
    return found


class RowBytes:
    """The encoded rows of a validated record batch of `SCHEMA`, to be split into blocks."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        """Encode every section for all rows at once, which takes little longer than for one row."""
        column = {name: batch.column(i) for i, name in enumerate(batch.schema.names)}
        flat, bounds = _sections(column)
        headers = np.zeros(batch.num_rows, HEADER)
        for name in (*INTEGERS, *WALL_TIMES):
            headers[name] = column[name].to_numpy()
        headers["reward"] = column["reward"].to_numpy(zero_copy_only=False)
        headers["flags"] = np.where(column["reference_logprobs"].is_valid().to_numpy(zero_copy_only=False), 1, 0)
        for (name, _), bound in zip(_SECTIONS, bounds, strict=True):
            headers[f"num_{name}"] = np.diff(bound)
        # View the headers as bytes: NumPy would copy structured records field by field, which is slow.
        self._headers = headers.view(np.uint8).reshape(-1, HEADER.itemsize)
        self._sections = [
            (data, (bound * item).tolist())
            for data, bound, item in zip(flat, bounds, _ITEM_SIZES.tolist(), strict=True)
            if data
        ]

    def block(self, rows: Sequence[int], records: Sequence[int]) -> list[bytes | memoryview]:
        """Return a block of these rows under these ascending record numbers, as consecutive pieces."""
        first, end = rows[0], rows[-1] + 1
        if end - first == len(rows) and list(rows) == list(range(first, end)):
            headers = self._headers[first:end].copy()
            parts = [data[bound[first] : bound[end]] for data, bound in self._sections]
        else:
            headers = self._headers[list(rows)]
            parts = [data[bound[row] : bound[row + 1]] for data, bound in self._sections for row in rows]
        headers[:, :8] = np.array(records, "<i8").view(np.uint8).reshape(-1, 8)  # `record`, the first field
        return [_PREFIX.pack(SCHEMA_VERSION, len(rows)), headers.data.cast("B"), *parts]


def decode(blocks: Sequence[bytes | memoryview]) -> dict[str, Any]:
    """Return the rows of blocks, in order, as columns of `SCHEMA` plus "record"; the data is copied once."""
    num_rows = np.array([_PREFIX.unpack_from(block)[1] for block in blocks], np.int64)
    starts = _PREFIX.size + num_rows * HEADER.itemsize
    heads = [block[_PREFIX.size : start] for block, start in zip(blocks, starts.tolist(), strict=True)]
    headers = np.frombuffer(b"".join(heads), HEADER)
    counts = np.stack([headers[f"num_{name}"] for name, _ in _SECTIONS]).astype(np.int64)
    of_rows = np.zeros((len(_SECTIONS), len(headers) + 1), np.int64)
    np.cumsum(counts, axis=1, out=of_rows[:, 1:])
    of_blocks = np.diff(of_rows[:, np.append(0, np.cumsum(num_rows))], axis=1)
    sizes = of_blocks * _ITEM_SIZES[:, None]
    ends = starts + np.cumsum(sizes, axis=0)
    data = {
        name: b"".join([block[start:end] for block, start, end in zip(blocks, *where, strict=True)])
        for (name, _), *where in zip(_SECTIONS, (ends - sizes).tolist(), ends.tolist(), strict=True)
    }
    number = {name: counts[i] for i, (name, _) in enumerate(_SECTIONS)}
    has_reference = (headers["flags"] & _HAS_REFERENCE).astype(bool)
    reward = headers["reward"]
    return {
        "record": headers["record"],
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


def records_in(block: bytes | memoryview) -> dict[int, int]:
    """Return the record numbers of a block, ascending, with the number of completion tokens of each."""
    headers = _headers_of(block)
    return dict(zip(headers["record"].tolist(), headers["num_logprobs"].tolist(), strict=True))


def num_tokens_in(block: bytes | memoryview) -> int:
    return int(_headers_of(block)["num_token_ids"].max())


def group_of(block: bytes | memoryview) -> int:
    return int(_headers_of(block)["group_id"][0])


def only(block: bytes | memoryview, record: int) -> bytes:
    headers = _headers_of(block)
    row = headers["record"].tolist().index(record)
    start = _PREFIX.size + headers.nbytes
    pieces: list[bytes | memoryview] = [_PREFIX.pack(SCHEMA_VERSION, 1), headers[row : row + 1].tobytes()]
    for name, item in _SECTIONS:
        counts = headers[f"num_{name}"].astype(np.int64)
        before = start + int(counts[:row].sum()) * item
        pieces.append(block[before : before + int(counts[row]) * item])
        start += int(counts.sum()) * item
    return b"".join(pieces)


def _headers_of(block: bytes | memoryview) -> npt.NDArray[Any]:
    _, num_rows = _PREFIX.unpack_from(block)
    return np.frombuffer(block, HEADER, num_rows, _PREFIX.size)


def list_array(
    counts: npt.NDArray[Any] | Sequence[int], values: pa.Array, *, missing: npt.NDArray[np.bool_] | None = None
) -> pa.Array:
    """Return a list column with rows of these lengths; `missing` rows are null."""
    mask = None if missing is None or not missing.any() else pa.array(missing)
    return pa.ListArray.from_arrays(pa.array(bounds_of(counts)), values, mask=mask)


def text_array(data: bytes, sizes: npt.NDArray[Any]) -> pa.Array:
    return pa.StringArray.from_buffers(len(sizes), pa.py_buffer(bounds_of(sizes)), pa.py_buffer(data))


def bounds_of(counts: npt.NDArray[Any] | Sequence[int]) -> npt.NDArray[np.int32]:
    """Return the Arrow offsets of rows of these lengths (num_rows + 1); raise ValueError if they exceed 32 bits."""
    bounds = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=bounds[1:])
    if bounds[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"a column of {len(counts)} samples has {bounds[-1]} items, above the limit of 2**31 - 1")
    return bounds.astype(np.int32)


def _sections(column: dict[str, pa.Array]) -> tuple[list[memoryview], list[npt.NDArray[np.int64]]]:
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
    return [_bytes_of(values) for values, _ in ordered], [bound for _, bound in ordered]


def _bytes_of(values: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(values).data.cast("B") if values.size else memoryview(b"")


def _text_bytes(column: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4).astype(np.int64)
    flat = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return flat[bounds[0] : bounds[-1]], bounds - bounds[0]


def span_structs(table: npt.NDArray[np.int64]) -> pa.Array:
    """Return spans as Arrow structs; `table` has one row per span and one column per field of `SPAN`."""
    kinds = (np.int32, np.int64, np.int32, np.int32)
    values = [pa.array(np.ascontiguousarray(table[:, i], kind)) for i, kind in enumerate(kinds)]
    return pa.StructArray.from_arrays(values, fields=list(SPAN))


def _part_structs(data: dict[str, bytes]) -> pa.Array:
    values = np.frombuffer(data["part_values"], np.float64)
    names = text_array(data["part_names"], np.frombuffer(data["part_name_sizes"], np.int32))
    return pa.StructArray.from_arrays([names, pa.array(values, mask=np.isnan(values))], fields=list(PART))
