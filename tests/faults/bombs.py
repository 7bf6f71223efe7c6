"""Small messages that expand to a lot of memory at the receiver."""

import socket
import struct

import numpy as np
import pyarrow as pa
from tests.faults.malformed import UNKNOWN_LEASE
from tests.faults.service_process import sample

from leeway.buffer import protocol as p
from leeway.buffer import schema
from leeway.common.rpc.messages import ClientIdentity

ANNOUNCED_BYTES = 2 * 2**30
"""Size of the frame that `announce_a_large_frame` announces but never completes."""

Frames = list[bytes]


def compressed(run_id: str, client: ClientIdentity, epoch: int, size_bytes: int) -> Frames:
    """Return a push whose tokens expand to `size_bytes`."""
    batch = _batch(run_id, client.name, epoch)
    tokens = pa.ListArray.from_arrays(pa.array([0, size_bytes // 4], pa.int32()), np.zeros(size_bytes // 4, np.int32))
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, schema.SCHEMA, options=options) as writer:
        writer.write_batch(_with(batch, "token_ids", tokens))
    return _push(run_id, client, epoch, sink.getvalue().to_pybytes())


def wide(run_id: str, client: ClientIdentity, epoch: int, num_columns: int) -> Frames:
    """Return a push of `num_columns` columns."""
    columns = pa.schema([pa.field("c", pa.int8())] * num_columns)
    return _push(run_id, client, epoch, columns.serialize().to_pybytes())


def nested(run_id: str, client: ClientIdentity, epoch: int, depth: int) -> Frames:
    """Return a push of one trajectory whose task columns are nested `depth` levels deep."""
    text = pa.array(['{"a":' + "[" * depth + "]" * depth + "}"])
    return _push(run_id, client, epoch, schema.write_stream(_with(_batch(run_id, client.name, epoch), "columns", text)))


def spanned(run_id: str, client: ClientIdentity, epoch: int, num_spans: int) -> Frames:
    """Return a push of one trajectory of 4 tokens with `num_spans` version spans."""
    kind = schema.SCHEMA.field("spans").type.value_type
    fields = [pa.array(np.zeros(num_spans, np.int64)).cast(field.type) for field in kind]
    values = pa.StructArray.from_arrays(fields, fields=list(kind))
    spans = pa.ListArray.from_arrays(pa.array([0, num_spans], pa.int32()), values)
    return _push(run_id, client, epoch, schema.write_stream(_with(_batch(run_id, client.name, epoch), "spans", spans)))


def renewal(run_id: str, client: ClientIdentity, epoch: int, num_leases: int) -> Frames:
    """Return a request to renew `num_leases` leases."""
    return [p.encode(1, p.Renew(client.name, epoch, list(range(1, num_leases + 1))), run_id=run_id, client=client)]


def announce_a_large_frame(address: str) -> socket.socket:
    """Connect to a ROUTER by ZMTP 3.1, announce a frame of `ANNOUNCED_BYTES` and send 1 KB of it."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    connection.connect(address.removeprefix("ipc://"))
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY" + b"".join(
        bytes([len(key)]) + key + struct.pack(">I", len(value)) + value
        for key, value in ((b"Socket-Type", b"DEALER"), (b"Identity", b""))
    )
    connection.sendall(greeting + bytes([4, len(ready)]) + ready)
    reply = b""
    while b"READY" not in reply:
        reply += connection.recv(4096)
    connection.sendall(b"\x02" + struct.pack(">Q", ANNOUNCED_BYTES) + bytes(1024))
    return connection


def _batch(run_id: str, name: str, epoch: int) -> pa.RecordBatch:
    """Return a batch of one valid trajectory."""
    body = schema.encode([sample(UNKNOWN_LEASE, 0)], run_id, schema.Sender(name, epoch, [0]))
    return schema.read_stream(body)


def _with(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    at = schema.SCHEMA.get_field_index(name)
    return batch.set_column(at, schema.SCHEMA.field(at), column)


def _push(run_id: str, client: ClientIdentity, epoch: int, body: bytes) -> Frames:
    return [p.encode(1, p.Push(client.name, epoch), body, run_id=run_id, client=client), body]
