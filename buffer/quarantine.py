"""Reads what was set aside: bytes from outside, of which nothing has been validated."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from buffer import rows
from buffer.schema import SCHEMA
from buffer.trajectory import SCHEMA_VERSION


def read_row(data: bytes) -> dict[str, Any] | None:
    """The row that was set aside; None where the bytes are no whole row, such as the beginning of a message.

    Its values may be whatever they like.

    Args:
        data: of `views.Quarantined`.
    """
    if int.from_bytes(data[:4], "little") != SCHEMA_VERSION:
        return None
    try:
        columns = rows.decode([data])
        batch = pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)
        batch.validate()  # the bounds of its arrays, before anyone asks what they hold
        batch.validate(full=True)
        found: list[dict[str, Any]] = batch.to_pylist()
    except (pa.ArrowException, ValueError, IndexError, TypeError, OverflowError, MemoryError):
        return None
    return found[0]
