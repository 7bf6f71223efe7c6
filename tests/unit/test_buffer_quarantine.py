"""What was quarantined is looked at as what it is: bytes from anybody, which may be made to do harm."""

import random
import struct

import pyarrow as pa
import pytest

from buffer import protocol as p
from buffer import rows, schema
from buffer.intake import MAX_QUARANTINED_BYTES
from buffer.quarantine import read_row
from buffer.views import Quarantined
from launch.verbs.buffer_text import quarantine_line, quarantined_in_full
from tests.in_process_buffer import make_trajectory

LEASE = p.Lease(1, 1, 1, 0, [0, 1, 2, 3], 0, 60.0)
NO_ROW = "  no row can be read from it; its first bytes:"


def one_row(**columns):
    """A batch of one trajectory, with some columns replaced."""
    batch = schema.to_batch([make_trajectory(LEASE, 0, seq=0)], "r")
    arrays = [pa.array(columns[f.name], f.type) if f.name in columns else batch.column(f.name) for f in batch.schema]
    nullable = pa.schema([field.with_nullable(True) for field in batch.schema])
    return pa.RecordBatch.from_arrays(arrays, schema=nullable)


def compressed_message(text):
    """The message of a batch whose column `columns` is this text, with all that it holds compressed."""
    batch, sink = one_row(columns=[text]), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()
    return reader.read_next_message()


def as_arrow_0_17_said_it(message):
    """The message with a header of format version 4, which declares its compression as a key and its value."""
    old = bytearray(message.metadata.to_pybytes())

    def u32(at):
        return struct.unpack_from("<I", old, at)[0]

    def entry(table, position):
        """Where the vtable says where the field is."""
        return table - struct.unpack_from("<i", old, table)[0] + 4 + 2 * position

    root = u32(0)
    header = root + struct.unpack_from("<H", old, entry(root, 2))[0]
    batch = header + u32(header)
    struct.pack_into("<H", old, entry(batch, 3), 0)  # the batch itself declares no compression
    key = b"ARROW:experimental_compression"
    new = bytearray(160)  # a Message, which refers to the old batch behind it
    struct.pack_into("<I", new, 0, 24)
    struct.pack_into("<7H", new, 8, 14, 24, 12, 14, 4, 16, 8)
    struct.pack_into("<iIIhB", new, 24, 16, len(new) + batch - 28, 48 - 32, 3, 3)
    struct.pack_into("<q", new, 40, message.body.size)
    struct.pack_into("<II4HiII", new, 48, 1, 64 - 52, 8, 12, 4, 8, 8, 80 - 68, 120 - 72)
    struct.pack_into(f"<I{len(key)}s", new, 80, len(key), key)
    struct.pack_into("<I4s", new, 120, 4, b"zstd")
    metadata = bytes(new + old)
    metadata += bytes(-len(metadata) % 8)
    return b"\xff\xff\xff\xff" + struct.pack("<I", len(metadata)) + metadata + message.body.to_pybytes()


def shown(data):
    return list(quarantined_in_full(Quarantined(0, 1, "body", data[:MAX_QUARANTINED_BYTES])))


def test_a_row_of_either_schema_version_is_read():
    batch = schema.to_batch([make_trajectory(LEASE, 2, seq=0)], "r")
    for data in (rows.encode(batch)[0], batch.serialize().to_pybytes()):
        assert read_row(data)["sample_index"] == 2
        assert "  actor: actor-0" in shown(data)


@pytest.mark.parametrize("declared", [lambda message: message.serialize().to_pybytes(), as_arrow_0_17_said_it])
def test_a_message_that_would_expand_when_it_is_read_is_shown_as_bytes(declared):
    data = declared(compressed_message(" " * 2**22))
    assert len(data) < MAX_QUARANTINED_BYTES
    assert shown(data)[1] == NO_ROW


def test_the_forged_header_is_one_that_arrow_would_read():
    """Without this, the test above could not fail."""
    data = as_arrow_0_17_said_it(compressed_message("x" * 100_000))
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(data)), schema.SCHEMA)
    assert batch.column("columns")[0].as_py() == "x" * 100_000


def test_nulls_where_the_schema_has_none_are_shown_as_such():
    missing = one_row(started_s=[None], logprobs=[[None, -0.5]], token_ids=[None], actor=[None], columns=[None])
    lines = shown(missing.serialize().to_pybytes())
    assert lines[0].startswith("quarantined 1: body")
    for line in ("  started_s: None", "  logprobs: null -0.5000", "  token_ids: None", "  actor: None"):
        assert line in lines


def test_long_values_and_reasons_are_cut_and_say_so():
    batch = schema.to_batch([make_trajectory(LEASE, 0, seq=0)], "r")
    long = one_row(columns=["x" * 60_000]).serialize().to_pybytes()
    assert "and 58000 more characters" in " ".join(shown(long))
    lines = list(quarantined_in_full(Quarantined(0, 1, "r\x1b" * 10_000, rows.encode(batch)[0])))
    assert max(map(len, lines)) < 500
    assert "\x1b" not in lines[0]
    assert len(quarantine_line(Quarantined(0, 1, "r" * 10_000, b""))) < 500


def test_no_bytes_make_it_fail():
    batch = schema.to_batch([make_trajectory(LEASE, 0, seq=0)], "r")
    bodies = [rows.encode(batch)[0], batch.serialize().to_pybytes(), bytes(schema.encode([], "r"))]
    chance = random.Random(1)
    for turn in range(1500):
        data = bytearray(bodies[turn % 3])
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(8, len(data))] = chance.choice([0, 1, 127, 255, chance.randrange(256)])
        assert shown(bytes(data[: chance.randrange(len(data))] if turn % 4 == 0 else data))
