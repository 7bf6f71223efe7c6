"""Reads one fact out of Arrow's message metadata: whether the record batch is compressed.

pyarrow decompresses while it reads and offers no switch against it, so 33 KB from outside could
become 1 GiB. The metadata is a small flatbuffer (Apache Arrow format, Message.fbs) that says so first.
"""

from __future__ import annotations

import struct

_HEADER_TYPE, _HEADER, _CUSTOM_METADATA = 1, 2, 4
"""Positions of the fields in the table Message."""
_COMPRESSION = 3
"""Position of the field in the table RecordBatch."""
_RECORD_BATCH = 3
"""Value of Message.header_type."""


def is_compressed(metadata: bytes) -> bool:
    """Does this record-batch message declare a compressed body?

    Args:
        metadata: the flatbuffer of an IPC message, without its length prefix.

    Raises:
        ValueError: it is not the metadata of a record batch.
    """
    try:
        message = _u32(metadata, 0)
        kind = _field(metadata, message, _HEADER_TYPE)
        header = _field(metadata, message, _HEADER)
        if kind is None or header is None or metadata[kind] != _RECORD_BATCH:
            raise ValueError("the message is not a record batch")
        if _field(metadata, message, _CUSTOM_METADATA) is not None:
            return True  # as Arrow 0.17 declared it, which pyarrow still heeds; ours have none
        batch = header + _u32(metadata, header)
        return _field(metadata, batch, _COMPRESSION) is not None
    except (struct.error, IndexError) as error:
        raise ValueError(f"broken message metadata of {len(metadata)} bytes ({error})") from error


def _u32(data: bytes, at: int) -> int:
    value: int = struct.unpack_from("<I", data, at)[0]
    return value


def _field(data: bytes, table: int, position: int) -> int | None:
    """Where the field of a flatbuffer table lies, or None where it has its default."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0:
        raise IndexError("a table before the start")
    size = struct.unpack_from("<H", data, vtable)[0]
    entry = 4 + 2 * position
    if entry + 2 > size:
        return None
    offset: int = struct.unpack_from("<H", data, vtable + entry)[0]
    return table + offset if offset else None
