"""Reads what was set aside: bytes from outside, of which nothing has been validated."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from buffer import rows
from buffer.flatbuffer import is_compressed
from buffer.schema import MAX_METADATA_BYTES, SCHEMA

_OLD_COMPRESSION = b"experimental_compression"
"""Arrow 0.17 said in a message's own key and value, and not in its batch, that it is compressed; pyarrow heeds it."""


def read_row(data: bytes) -> dict[str, Any] | None:
    """The row that was set aside; None where the bytes are no whole row, or would expand when they are read.

    Only what makes it unsafe to read is looked for: its values may be whatever they like, and null everywhere.

    Args:
        data: of `views.Quarantined`: a record of any schema version, or the beginning of a message.
    """
    try:
        batch = _arrow_message(data) if rows.is_first_version(data) else _compact_row(data)
        batch.validate()  # the bounds of its arrays, before anyone asks what they hold
        batch.validate(full=True)
        if batch.num_rows != 1:
            return None
        found: list[dict[str, Any]] = batch.to_pylist()
    except (pa.ArrowException, ValueError, IndexError, TypeError, OverflowError, OSError, EOFError, MemoryError):
        return None
    return found[0]


def _compact_row(data: bytes) -> pa.RecordBatch:
    columns = rows.decode([data])
    return pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _arrow_message(data: bytes) -> pa.RecordBatch:
    """A record of schema version 1.

    Raises:
        ValueError: it is another message, or a compressed one.
    """
    message = pa.ipc.read_message(pa.py_buffer(data))
    if message.type != "record batch" or message.metadata.size > MAX_METADATA_BYTES:
        raise ValueError(f"a {message.type} with {message.metadata.size} bytes of metadata is no record")
    metadata = message.metadata.to_pybytes()
    if is_compressed(metadata) or _OLD_COMPRESSION in metadata:
        raise ValueError("a compressed message may expand without bound")
    return pa.ipc.read_record_batch(message, SCHEMA)
