"""The Arrow schema of a trajectory, and how trajectories become bytes and back.

A message body is an Arrow IPC stream of exactly one uncompressed record batch. A record on disk is
one row of it, as an IPC record batch without its schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from buffer.errors import BadBody
from buffer.flatbuffer import is_compressed
from buffer.trajectory import SCHEMA_VERSION, Trajectory, VersionSpan
from weight_sync.staleness import PolicyVersion

_SPAN = pa.struct(
    [
        pa.field("incarnation", pa.int32(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("end", pa.int32(), nullable=False),
    ]
)
_PART = pa.struct([pa.field("name", pa.string(), nullable=False), pa.field("value", pa.float64())])
_INTEGERS = ("lease_id", "attempt", "group_id", "sample_index", "prompt_id", "prompt_length", "epoch", "seq")
_WALL_TIMES = ("started_s", "finished_s")
_NULLABLE = ("reward", "reference_logprobs")

SCHEMA = pa.schema(
    [
        pa.field("run_id", pa.string(), nullable=False),
        *(pa.field(name, pa.int64(), nullable=False) for name in _INTEGERS),
        *(pa.field(name, pa.float64(), nullable=False) for name in _WALL_TIMES),
        pa.field("actor", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("spans", pa.list_(_SPAN), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("reward_parts", pa.list_(_PART), nullable=False),
        pa.field("columns", pa.string(), nullable=False),
        pa.field("reference_logprobs", pa.list_(pa.float32())),
    ],
    metadata={"schema_version": str(SCHEMA_VERSION)},
)

SCORES = pa.schema(
    [
        pa.field("record_id", pa.int64(), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
    ],
    metadata={"schema_version": str(SCHEMA_VERSION)},
)
"""Reference log-probabilities on their way back from the learner."""

_json_encoder = msgspec.json.Encoder()
_json_decoder = msgspec.json.Decoder(dict[str, Any])


def to_batch(trajectories: Sequence[Trajectory], run_id: str) -> pa.RecordBatch:
    """Trajectories as one Arrow record batch of `SCHEMA`.

    Raises:
        TypeError: `columns` holds something that JSON cannot.
    """
    rows = list(trajectories)
    columns: dict[str, Any] = {
        "run_id": pa.array([run_id] * len(rows), pa.string()),
        "actor": pa.array([row.actor for row in rows], pa.string()),
        "finish_reason": pa.array([row.finish_reason for row in rows], pa.string()),
        "token_ids": _lists([row.token_ids for row in rows], np.int32),
        "logprobs": _lists([row.logprobs for row in rows], np.float32),
        "spans": _spans(rows),
        "reward": pa.array([row.reward for row in rows], pa.float64()),
        "reward_parts": _reward_parts(rows),
        "columns": pa.array([_json_encoder.encode(dict(row.columns)).decode() for row in rows], pa.string()),
        "reference_logprobs": _optional_lists([row.reference_logprobs for row in rows]),
    }
    for name in _INTEGERS:
        columns[name] = pa.array(np.fromiter((getattr(row, name) for row in rows), np.int64, len(rows)))
    for name in _WALL_TIMES:
        columns[name] = pa.array(np.fromiter((getattr(row, name) for row in rows), np.float64, len(rows)))
    return pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def write_stream(batch: pa.RecordBatch) -> bytes:
    """One record batch as an IPC stream: a message body."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def encode(trajectories: Sequence[Trajectory], run_id: str) -> bytes:
    """Trajectories as a message body."""
    return write_stream(to_batch(trajectories, run_id))


def encode_scores(record_ids: Sequence[int], logprobs: Sequence[npt.NDArray[np.float32]]) -> bytes:
    """Reference log-probabilities of records as a message body."""
    columns = [pa.array(record_ids, pa.int64()), _lists(logprobs, np.float32)]
    return write_stream(pa.RecordBatch.from_arrays(columns, schema=SCORES))


def read_stream(
    body: bytes | memoryview, expected: pa.Schema = SCHEMA, *, max_rows: int | None = None
) -> pa.RecordBatch:
    """Read a message body from outside into a fully validated record batch of the expected schema.

    The order matters: a compressed body is refused by its metadata, before anything expands; the
    schema is compared before the columns are touched; offsets and UTF-8 are validated before use.

    Args:
        body: the message body.
        expected: its schema, metadata included.
        max_rows: refuse more; unset: any number, as in a draw, which is as large as its step.

    Raises:
        BadBody: it is not one uncompressed record batch of exactly this schema, or has too many rows.
    """
    try:
        reader = pa.ipc.MessageReader.open_stream(pa.py_buffer(body))
        schema = pa.ipc.read_schema(reader.read_next_message())
        if not schema.equals(expected, check_metadata=True):
            raise BadBody("schema", f"expected schema_version {SCHEMA_VERSION}, got {schema.metadata or 'another'}")
        message = reader.read_next_message()
        if message.type != "record batch":
            raise BadBody("body", f"expected a record batch, got a {message.type}")
        if is_compressed(message.metadata.to_pybytes()):
            raise BadBody("compressed", "a compressed body may expand without bound; send it uncompressed")
        batch = pa.ipc.read_record_batch(message, expected)
        if max_rows is not None and batch.num_rows > max_rows:
            raise BadBody("too many rows", f"{batch.num_rows} rows in one message; at most {max_rows}")
        batch.validate(full=True)
    except (pa.ArrowException, EOFError, StopIteration, OSError, ValueError, IndexError) as error:
        if isinstance(error, BadBody):
            raise
        raise BadBody("body", f"not an Arrow stream of trajectories ({type(error).__name__}: {error})") from error
    _refuse_nulls(batch)
    return batch


def decode(body: bytes | memoryview) -> list[Trajectory]:
    """The trajectories of a message body.

    Raises:
        BadBody: see `read_stream`.
    """
    return from_batch(read_stream(body))


def from_batch(batch: pa.RecordBatch) -> list[Trajectory]:
    """The rows of a record batch; arrays are read-only views into it."""
    column = {name: batch.column(i) for i, name in enumerate(SCHEMA.names)}
    plain = {name: column[name].to_pylist() for name in (*_INTEGERS, *_WALL_TIMES, "actor", "finish_reason", "reward")}
    tokens, token_bounds = flat_values(column["token_ids"])
    logprobs, logprob_bounds = flat_values(column["logprobs"])
    reference, reference_bounds = flat_values(column["reference_logprobs"])
    has_reference = column["reference_logprobs"].is_valid().to_pylist()
    spans = column["spans"].to_pylist()
    parts = column["reward_parts"].to_pylist()
    texts = column["columns"].to_pylist()
    return [
        Trajectory(
            **{name: values[i] for name, values in plain.items()},
            token_ids=tokens[token_bounds[i] : token_bounds[i + 1]],
            logprobs=logprobs[logprob_bounds[i] : logprob_bounds[i + 1]],
            spans=tuple(
                VersionSpan(PolicyVersion(span["incarnation"], span["version"]), span["start"], span["end"])
                for span in spans[i]
            ),
            reward_parts={part["name"]: part["value"] for part in parts[i]},
            columns=_json_decoder.decode(texts[i]),
            reference_logprobs=reference[reference_bounds[i] : reference_bounds[i + 1]] if has_reference[i] else None,
        )
        for i in range(batch.num_rows)
    ]


def row_bytes(batch: pa.RecordBatch, row: int) -> bytes:
    """One row as the bytes of a record on disk."""
    return batch.slice(row, 1).serialize().to_pybytes()


def join_rows(rows: Sequence[bytes], scores: Sequence[npt.NDArray[np.float32] | None]) -> pa.RecordBatch:
    """Records from disk as one record batch, with the reference log-probabilities that were written since."""
    batches = [pa.ipc.read_record_batch(pa.py_buffer(row), SCHEMA) for row in rows]
    batch = pa.concat_batches(batches) if batches else SCHEMA.empty_table().to_batches(max_chunksize=1)[0]
    index = SCHEMA.get_field_index("reference_logprobs")
    return batch.set_column(index, SCHEMA.field(index), _optional_lists(list(scores)))


def completion_length(row: bytes) -> int:
    """Number of completion tokens of a record on disk."""
    batch = pa.ipc.read_record_batch(pa.py_buffer(row), SCHEMA)
    return len(batch.column(SCHEMA.get_field_index("logprobs"))[0])


def flat_values(column: pa.Array) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """A list column as its flat values and the bounds of each row in them (num_rows + 1)."""
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return column.flatten().to_numpy(zero_copy_only=False), bounds


def _bounds(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    bounds = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def _lists(arrays: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> pa.Array:
    flat = np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)
    return pa.ListArray.from_arrays(pa.array(_bounds([len(array) for array in arrays])), pa.array(flat))


def _optional_lists(arrays: Sequence[npt.NDArray[np.float32] | None]) -> pa.Array:
    empty = np.zeros(0, np.float32)
    lists = _lists([empty if array is None else array for array in arrays], np.float32)
    missing = np.fromiter((array is None for array in arrays), np.bool_, len(arrays))
    if not missing.any():
        return lists
    return pa.ListArray.from_arrays(lists.offsets, lists.values, mask=pa.array(missing))


def _spans(rows: Sequence[Trajectory]) -> pa.Array:
    flat = np.array(
        [(*span.version, span.start, span.end) for row in rows for span in row.spans], dtype=np.int64
    ).reshape(-1, 4)
    values = [pa.array(flat[:, i]).cast(_SPAN.field(i).type) for i in range(4)]
    structs = pa.StructArray.from_arrays(values, fields=list(_SPAN))
    return pa.ListArray.from_arrays(pa.array(_bounds([len(row.spans) for row in rows])), structs)


def _reward_parts(rows: Sequence[Trajectory]) -> pa.Array:
    parts = [part for row in rows for part in row.reward_parts.items()]
    names = pa.array([name for name, _ in parts], pa.string())
    values = pa.array([value for _, value in parts], pa.float64())
    structs = pa.StructArray.from_arrays([names, values], fields=list(_PART))
    return pa.ListArray.from_arrays(pa.array(_bounds([len(row.reward_parts) for row in rows])), structs)


def _refuse_nulls(batch: pa.RecordBatch) -> None:
    """Arrow's own validation lets nulls pass where the schema forbids them."""
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if field.name not in _NULLABLE and column.null_count:
            raise BadBody("null", f"column '{field.name}' holds {column.null_count} nulls")
        if not pa.types.is_list(field.type):
            continue
        values = column.flatten()
        if values.null_count:
            raise BadBody("null", f"a list of column '{field.name}' holds a null")
        if pa.types.is_struct(values.type):
            for i, part in enumerate(values.type):
                if not part.nullable and values.field(i).null_count:
                    raise BadBody("null", f"'{field.name}.{part.name}' holds a null")
