"""Trajectory, its Arrow schema, and the encoding and validated decoding of message bodies.

A message body is an Arrow IPC stream of exactly one uncompressed record batch. An export has the same columns.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from leeway.buffer import rows
from leeway.buffer.errors import BadBody
from leeway.buffer.rows import INTEGERS, PART, SCHEMA_VERSION, SPAN, WALL_TIMES, list_array
from leeway.common.staleness import PolicyVersion

COMPLETE = ("stop", "length")
"""Finish reasons of a complete sample: an end-of-sequence token, or the token limit."""
REQUEUED: Literal["requeued"] = "requeued"
"""Finish reason of a partial rollout."""

_NULLABLE = ("reward", "reference_logprobs")
_METADATA = {"schema_version": str(SCHEMA_VERSION)}
_always = partial(pa.field, nullable=False)

SCHEMA = pa.schema(
    [
        _always("run_id", pa.string()),
        *(_always(name, pa.int64()) for name in INTEGERS),
        *(_always(name, pa.float64()) for name in WALL_TIMES),
        _always("actor", pa.string()),
        _always("finish_reason", pa.string()),
        _always("token_ids", pa.list_(pa.int32())),
        _always("logprobs", pa.list_(pa.float32())),
        _always("spans", pa.list_(SPAN)),
        pa.field("reward", pa.float64()),
        _always("reward_parts", pa.list_(PART)),
        _always("columns", pa.string()),
        pa.field("reference_logprobs", pa.list_(pa.float32())),
    ],
    _METADATA,
)

SCORES = pa.schema([_always("record_id", pa.int64()), _always("logprobs", pa.list_(pa.float32()))], _METADATA)
"""Reference log-probabilities that the learner sends back."""

POSTERIORS = pa.schema(
    [_always("prompt_id", pa.int64()), _always("mean", pa.float32()), _always("variance", pa.float32())], _METADATA
)
"""Length posteriors of prompts: `leeway.buffer.tables.PromptPosterior`."""

EXPECTED = pa.schema([_always("mean", pa.float32())], _METADATA)
"""Length predictions of the ranker for consecutive prompts."""

_ARROW_MARK = b"\xff\xff\xff\xff"
MAX_METADATA_BYTES = 64 * 2**10
"""Largest accepted metadata, in bytes; Leeway's has 4 kB. Parsing a schema of a million columns would take long."""

MAX_REWARD_PARTS = 256
_HEADER_TYPE, _HEADER, _CUSTOM_METADATA = 1, 2, 4
"""Positions of the fields in the flatbuffer table Message."""
_COMPRESSION = 3
"""Position of the field in the flatbuffer table RecordBatch."""
_RECORD_BATCH = 3


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The policy version that sampled completion tokens [start, end)."""

    version: PolicyVersion
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Partial rollout: the first tokens of a completion from an earlier lease, with the arrays of a `Trajectory`."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    spans: tuple[VersionSpan, ...]
    started_s: float

    @property
    def newest(self) -> PolicyVersion:
        """Version of the last token; no later token may be of an older version."""
        return self.spans[-1].version


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One sample: a prompt, a completion, its log-probabilities under the behaviour policy, and its reward."""

    lease_id: int
    attempt: int
    group_id: int
    sample_index: int
    prompt_id: int
    token_ids: npt.NDArray[np.int32]
    prompt_length: int
    logprobs: npt.NDArray[np.float32]
    """log mu of each completion token, at the sampling temperature, over the full vocabulary."""
    spans: tuple[VersionSpan, ...]
    """Spans in order; they cover the completion tokens without gaps."""
    reward: float | None
    """Reward of the sample; None if no reward function applied, in which case the sample is filtered."""
    finish_reason: str
    """One of `COMPLETE`, or `REQUEUED` for a partial rollout."""
    reward_parts: Mapping[str, float | None] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The task's columns of this prompt; JSON-serializable."""
    reference_logprobs: npt.NDArray[np.float32] | None = None
    """log pi_ref of each completion token; None until the learner has scored the sample."""
    actor: str = ""
    epoch: int = 0
    seq: int = 0
    """(actor, epoch, seq) is the key for deduplication; set by the client."""
    started_s: float = 0.0
    finished_s: float = 0.0
    """Wall-clock time in seconds since the Unix epoch."""

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_length


_integers_of = attrgetter(*INTEGERS)
_wall_times_of = attrgetter(*WALL_TIMES)
_json_encoder = msgspec.json.Encoder()


def columns_size(trajectory: Trajectory) -> int:
    """Return the bytes of the task's columns in a message; 0 if they cannot be encoded, which `to_batch` reports."""
    try:
        return len(_json_encoder.encode(trajectory.columns))
    except Exception:  # caller-supplied values may raise anything
        return 0


class Sender(NamedTuple):
    """The deduplication key that a client adds to its trajectories."""

    actor: str
    epoch: int
    seqs: Sequence[int]


def to_batch(trajectories: Sequence[Trajectory], run_id: str, sender: Sender | None = None) -> pa.RecordBatch:
    """Return trajectories as one record batch of `SCHEMA`; a sender replaces their `actor`, `epoch` and `seq`.

    Raise TypeError if `columns` holds a value that cannot be encoded as JSON.
    """
    many = list(trajectories)
    num = len(many)
    integers = np.array([_integers_of(row) for row in many], np.int64).reshape(num, len(INTEGERS))
    times = np.array([_wall_times_of(row) for row in many], np.float64).reshape(num, len(WALL_TIMES))
    columns: dict[str, Any] = {
        "run_id": pa.array([run_id] * num, pa.string()),
        **{name: pa.array(integers[:, i].copy()) for i, name in enumerate(INTEGERS)},
        **{name: pa.array(times[:, i].copy()) for i, name in enumerate(WALL_TIMES)},
        "actor": pa.array([row.actor if sender is None else sender.actor for row in many], pa.string()),
        "finish_reason": pa.array([row.finish_reason for row in many], pa.string()),
        "token_ids": _lists([row.token_ids for row in many], np.int32),
        "logprobs": _lists([row.logprobs for row in many], np.float32),
        "spans": _spans(many),
        "reward": pa.array([row.reward for row in many], pa.float64()),
        "reward_parts": _reward_parts(many),
        "columns": pa.array([_json_encoder.encode(row.columns).decode() for row in many], pa.string()),
        "reference_logprobs": _lists([row.reference_logprobs for row in many], np.float32),
    }
    if sender is not None:
        columns["epoch"] = pa.array(np.full(num, sender.epoch, np.int64))
        columns["seq"] = pa.array(np.array(sender.seqs, np.int64))
    return _batch_of(columns)


def write_stream(batch: pa.RecordBatch) -> memoryview:
    """Return one record batch as an IPC stream, written once into a buffer of the final size."""
    body = pa.allocate_buffer(len(_empty_stream(batch.schema)) + pa.ipc.get_record_batch_size(batch))
    sink = pa.FixedSizeBufferWriter(body)
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(body)[: sink.tell()]


@lru_cache(maxsize=8)
def _metadata_of(schema: pa.Schema) -> pa.Buffer:
    """Return the schema metadata of Leeway's streams; received metadata with equal bytes is not parsed."""
    return pa.ipc.MessageReader.open_stream(_empty_stream(schema)).read_next_message().metadata


@lru_cache(maxsize=8)
def _empty_stream(schema: pa.Schema) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    pa.ipc.new_stream(sink, schema).close()
    return sink.getvalue()


def encode(trajectories: Sequence[Trajectory], run_id: str, sender: Sender | None = None) -> memoryview:
    return write_stream(to_batch(trajectories, run_id, sender))


def encode_scores(record_ids: Sequence[int], logprobs: Sequence[npt.NDArray[np.float32]]) -> memoryview:
    columns = [pa.array(record_ids, pa.int64()), _lists(logprobs, np.float32)]
    return write_stream(pa.RecordBatch.from_arrays(columns, schema=SCORES))


def encode_expected(means: npt.NDArray[np.float32]) -> memoryview:
    return write_stream(pa.RecordBatch.from_arrays([pa.array(means, pa.float32())], schema=EXPECTED))


def read_stream(
    body: bytes | memoryview, expected: pa.Schema = SCHEMA, *, max_rows: int | None = None
) -> pa.RecordBatch:
    """Decode an untrusted message body into a fully validated record batch of the expected schema.

    The order matters: a compressed body is refused before anything is decompressed, the schema is compared before the
    columns are accessed, and offsets and UTF-8 are validated before use.

    Raises:
        BadBody: the body is not one uncompressed record batch of exactly this schema, or has too many rows.
    """
    if reason := start_fault(body):
        raise BadBody("schema", reason)
    try:
        reader = pa.ipc.MessageReader.open_stream(pa.py_buffer(body))
        first = reader.read_next_message()
        if first.type != "schema":
            # read_schema ignores the message type and would parse unverified metadata.
            raise BadBody("body", f"expected a schema, got a {first.type}")
        if not first.metadata.equals(_metadata_of(expected)):
            schema = pa.ipc.read_schema(first)
            if not schema.equals(expected, check_metadata=True):
                raise BadBody("schema", f"expected schema_version {SCHEMA_VERSION}, got {_version_of(schema)}")
        message = reader.read_next_message()
        if message.type != "record batch":
            raise BadBody("body", f"expected a record batch, got a {message.type}")
        if message.metadata.size > MAX_METADATA_BYTES:
            raise BadBody("body", f"the metadata of its batch has {message.metadata.size} bytes")
        if is_compressed(message.metadata.to_pybytes()):
            raise BadBody("compressed", "a compressed body may expand without bound: send it uncompressed")
        _refuse_more(reader)
        batch = pa.ipc.read_record_batch(message, expected)
        if max_rows is not None and batch.num_rows > max_rows:
            raise BadBody("too many rows", f"{batch.num_rows} rows in one message; at most {max_rows}")
        batch.validate()  # checks the bounds of arrays, before their lengths are used
        _refuse_oversize_lists(batch)
        batch.validate(full=True)
    except (pa.ArrowException, EOFError, StopIteration, OSError, ValueError, IndexError) as error:
        if isinstance(error, BadBody):
            raise
        raise BadBody("body", f"not an Arrow stream of trajectories ({type(error).__name__}: {error})") from error
    _refuse_nulls(batch)
    return batch


def start_fault(body: bytes | memoryview) -> str:
    """Return why the first eight bytes of a message body are invalid; '' if they are valid. Takes constant time."""
    if bytes(body[:4]) != _ARROW_MARK:
        return "it does not begin with the marker of an Arrow stream"
    size = int.from_bytes(body[4:8], "little")
    return f"its schema has {size} bytes; the limit is {MAX_METADATA_BYTES}" if size > MAX_METADATA_BYTES else ""


def _batch_of(columns: Mapping[str, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def join_rows(
    blocks: Sequence[bytes | memoryview],
    records: Sequence[int],
    scores: Sequence[npt.NDArray[np.float32] | None] = (),
) -> pa.RecordBatch:
    """Return records as one record batch, with their `scores` if any; the blocks contain each record once."""
    columns = rows.decode(blocks)
    batch = _batch_of(columns)
    if (stored := columns["record"]).tolist() != list(records):
        order = stored.argsort()
        batch = batch.take(order[np.searchsorted(stored[order], records)])
    return with_scores(batch, scores)


def all_rows(blocks: Sequence[bytes | memoryview]) -> pa.RecordBatch:
    return _batch_of(rows.decode(blocks))


def read_prefixes(body: bytes | memoryview) -> Iterator[Prefix]:
    """Yield the partial rollouts in the body of a grant, in order; raise BadBody if the body is invalid."""
    batch = read_stream(body)
    column = {name: batch.column(i) for i, name in enumerate(SCHEMA.names)}
    tokens, token_bounds = rows.flat_values(column["token_ids"])
    logprobs, bounds = rows.flat_values(column["logprobs"])
    started_s = column["started_s"].to_pylist()
    for i, spans in enumerate(column["spans"].to_pylist()):
        end = token_bounds[i + 1]
        yield Prefix(
            tokens[end - (bounds[i + 1] - bounds[i]) : end],
            logprobs[bounds[i] : bounds[i + 1]],
            tuple(
                VersionSpan(PolicyVersion(each["incarnation"], each["version"]), each["start"], each["end"])
                for each in spans
            ),
            started_s[i],
        )


def with_scores(batch: pa.RecordBatch, scores: Sequence[npt.NDArray[np.float32] | None]) -> pa.RecordBatch:
    """Return trajectories with these reference log-probabilities; rows with score None keep their values."""
    if all(score is None for score in scores):
        return batch
    index = SCHEMA.get_field_index("reference_logprobs")
    values, bounds = rows.flat_values(batch.column(index))
    has_some = batch.column(index).is_valid().to_pylist()
    stored = [values[bounds[i] : bounds[i + 1]] if has else None for i, has in enumerate(has_some)]
    merged = [old if new is None else new for old, new in zip(stored, scores, strict=True)]
    return batch.set_column(index, SCHEMA.field(index), _lists(merged, np.float32))


def _lists(arrays: Sequence[npt.NDArray[Any] | None], dtype: type[np.generic]) -> pa.Array:
    present = [array for array in arrays if array is not None]
    flat = np.concatenate(present).astype(dtype, copy=False) if present else np.zeros(0, dtype)
    missing = np.fromiter((array is None for array in arrays), np.bool_, len(arrays))
    return list_array([0 if array is None else len(array) for array in arrays], pa.array(flat), missing=missing)


def _spans(many: Sequence[Trajectory]) -> pa.Array:
    table = np.array([(*span.version, span.start, span.end) for row in many for span in row.spans], np.int64)
    return list_array([len(row.spans) for row in many], rows.span_structs(table.reshape(-1, 4)))


def _reward_parts(many: Sequence[Trajectory]) -> pa.Array:
    parts = [part for row in many for part in row.reward_parts.items()]
    names = pa.array([name for name, _ in parts], pa.string())
    values = pa.array([value for _, value in parts], pa.float64())
    structs = pa.StructArray.from_arrays([names, values], fields=list(PART))
    return list_array([len(row.reward_parts) for row in many], structs)


def _version_of(schema: pa.Schema) -> str:
    version = (schema.metadata or {}).get(b"schema_version", b"none").decode("utf-8", "replace")
    return version[:20] if version != str(SCHEMA_VERSION) else "other columns"


def _refuse_more(reader: pa.ipc.MessageReader) -> None:
    """Raise BadBody if another message follows the record batch; Arrow would ignore it silently."""
    try:
        reader.read_next_message()
    except StopIteration:
        return
    raise BadBody("body", "it has data after its record batch")


def _refuse_oversize_lists(batch: pa.RecordBatch) -> None:
    """Raise BadBody if the batch has more spans or reward parts than it can need, before they are processed."""
    if batch.schema is not SCHEMA and not batch.schema.equals(SCHEMA):
        return
    limits = {"spans": len(batch.column("token_ids").values), "reward_parts": MAX_REWARD_PARTS * batch.num_rows}
    for name, limit in limits.items():
        if (number := len(batch.column(name).values)) > limit:
            raise BadBody(f"too many {name.replace('_', ' ')}", f"{number} in a message of {batch.num_rows} rows")


def _refuse_nulls(batch: pa.RecordBatch) -> None:
    """Raise BadBody if a non-nullable column has nulls; Arrow's own validation accepts them."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name not in _NULLABLE and column.null_count:
            raise BadBody("null", f"column '{name}' has {column.null_count} nulls")
        if not pa.types.is_list(column.type):
            continue
        # `values` is free to access but includes values outside of all rows. If it has no null, no row has one.
        if _first_null(name, column.values) and (found := _first_null(name, column.flatten())):
            raise BadBody("null", f"a list of column '{found}' has a null")


def _first_null(name: str, values: pa.Array) -> str:
    """Return the name of a list column, or of its first non-nullable struct field, with a null; '' without nulls."""
    parts = enumerate(values.type) if pa.types.is_struct(values.type) else ()
    nulls = [f"{name}.{part.name}" for i, part in parts if not part.nullable and values.field(i).null_count]
    return name if values.null_count else next(iter(nulls), "")


def is_compressed(metadata: bytes) -> bool:
    """Return whether a record-batch message declares a compressed body; raise ValueError for other messages.

    pyarrow decompresses while it reads, so a message of 33 KB could expand to 1 GiB. The metadata, a small flatbuffer
    (Apache Arrow format, Message.fbs), declares the compression; `metadata` excludes its length prefix.
    """
    try:
        message = _flatbuffer_u32(metadata, 0)
        kind = _flatbuffer_field(metadata, message, _HEADER_TYPE)
        header = _flatbuffer_field(metadata, message, _HEADER)
        if kind is None or header is None or metadata[kind] != _RECORD_BATCH:
            raise ValueError("the message is not a record batch")
        if _flatbuffer_field(metadata, message, _CUSTOM_METADATA) is not None:
            return True  # Arrow 0.17 declared compression in this field, and pyarrow reads it; our messages have none
        batch = header + _flatbuffer_u32(metadata, header)
        return _flatbuffer_field(metadata, batch, _COMPRESSION) is not None
    except (struct.error, IndexError) as error:
        raise ValueError(f"broken message metadata of {len(metadata)} bytes ({error})") from error


def _flatbuffer_u32(data: bytes, at: int) -> int:
    value: int = struct.unpack_from("<I", data, at)[0]
    return value


def _flatbuffer_field(data: bytes, table: int, position: int) -> int | None:
    """Return the offset of a field of a flatbuffer table, or None if the field has its default."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0:
        raise IndexError("a vtable lies before the start")
    size = struct.unpack_from("<H", data, vtable)[0]
    entry = 4 + 2 * position
    if entry + 2 > size:
        return None
    offset: int = struct.unpack_from("<H", data, vtable + entry)[0]
    return table + offset if offset else None
