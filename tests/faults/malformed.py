"""Malformed messages generated from a seed, and a process that sends them at a steady rate.

Every message is broken in a known way, so the correct reaction is known. Messages of the kinds `SET_ASIDE` are always
quarantined. Messages of the kinds `RESEALED` have valid checksums over changed content, so some are valid messages
with another meaning; the service must not store the trajectories of these messages.
"""

import random
import sys
import time
from typing import NamedTuple

import msgspec
import pyarrow as pa
import zmq
from tests.faults.service_process import sample

from leeway.buffer import protocol as p
from leeway.buffer import schema
from leeway.common.rpc.messages import ClientIdentity, sealed

NAME = "fuzzer"
"""Client name in all malformed messages."""

CLIENT = ClientIdentity(NAME, "actor", "fuzz")
"""Identity of the client `NAME` after `greet`."""

UNKNOWN_LEASE = p.Lease(2**40, 1, 2**40, 0, [0], 0, 60.0)
"""A lease that was never granted."""


_PREFIX_BYTES = 8
"""Bytes before the metadata of an Arrow message: a marker and the length of the metadata."""


class Malformed(NamedTuple):
    """A message and the way in which it is broken."""

    kind: str
    frames: list[bytes]


class Source:
    """An endless sequence of malformed messages; equal seeds give equal sequences."""

    def __init__(
        self, run_id: str, epoch: int, seed: int, *, lease: p.Lease = UNKNOWN_LEASE, client: ClientIdentity = CLIENT
    ) -> None:
        """Args:
        run_id: run ID.
        epoch: epoch of the client `NAME`.
        seed: seed of the sequence.
        client: identity of the client at the service.
        lease: lease that the trajectories name.
        """
        self._chance = random.Random(seed)
        self._push = p.Push(NAME, epoch)
        self._numbers = 1
        self._run_id, self._client = run_id, client
        rows = [sample(lease, index, 8) for index in range(3)]
        self._body = bytes(schema.encode(rows, run_id, schema.Sender(NAME, epoch, [0, 1, 2])))
        self._schema_ends = _PREFIX_BYTES + int.from_bytes(self._body[4:8], "little")
        self._type_at = _PREFIX_BYTES + _type_position(self._body[_PREFIX_BYTES : self._schema_ends])
        table = pa.table({"lease_id": [1, 2], "reward": [0.5, None]})
        self._foreign = schema.write_stream(table.to_batches()[0])

    def next(self, *kinds: str) -> Malformed:
        """Return the next message, of one of these kinds; its request number is its position in the sequence."""
        kind = self._chance.choice(kinds)
        frames: list[bytes] = getattr(self, f"_{kind}")()
        self._numbers += 1
        return Malformed(kind, frames)

    def _header(self, body: bytes) -> bytes:
        return p.encode(self._numbers, self._push, body, run_id=self._run_id, client=self._client)

    def _flipped(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self._chance.choice((1, 1, 4))):
            changed[self._chance.randrange(len(data))] ^= 1 << self._chance.randrange(8)
        return bytes(changed) if bytes(changed) != data else data[:-1]

    def _cut_off(self, data: bytes) -> bytes:
        return data[: self._chance.randrange(len(data))]

    def _noise(self) -> list[bytes]:
        return [self._chance.randbytes(self._chance.randrange(200)) for _ in range(self._chance.randrange(1, 6))]

    def _flipped_header(self) -> list[bytes]:
        return [self._flipped(self._header(self._body)), self._body]

    def _cut_header(self) -> list[bytes]:
        return [self._cut_off(self._header(self._body)), self._body]

    def _frame_count(self) -> list[bytes]:
        return [self._header(self._body), self._body, *[b"more"] * self._chance.randrange(1, 5)]

    def _deep_header(self) -> list[bytes]:
        envelope = msgspec.msgpack.encode({"request_id": self._numbers, "message": {"type": "StatusRequest"}})
        return [sealed(b"\x83" + envelope[1:] + b"\xa4more" + b"\x91" * 50_000 + b"\x90")]

    def _reply_as_request(self) -> list[bytes]:
        return [p.encode(self._numbers, p.Done(), run_id=self._run_id)]

    def _flipped_body(self) -> list[bytes]:
        return [self._header(self._body), self._flipped(self._body)]

    def _cut_body(self) -> list[bytes]:
        return [self._header(self._body), self._cut_off(self._body)]

    def _foreign_table(self) -> list[bytes]:
        return [self._header(self._foreign), self._foreign]

    def _no_arrow(self) -> list[bytes]:
        body = self._chance.randbytes(self._chance.randrange(1, 500))
        return [self._header(body), body]

    def _unverified_schema(self) -> list[bytes]:
        # The type is unknown, so Arrow verifies nothing after the type.
        changed = bytearray(self._flipped(self._body[: self._schema_ends]) + self._body[self._schema_ends :])
        changed[:_PREFIX_BYTES] = self._body[:_PREFIX_BYTES]
        changed[self._type_at] = self._chance.randrange(6, 256)
        return [self._header(bytes(changed)), bytes(changed)]

    def _no_text(self) -> list[bytes]:
        request = p.encode(self._numbers, p.Drain(), run_id=self._run_id)[8:]
        return [sealed(request.replace(b"Drain", b"Dra\xfan"))]

    def _resealed_body(self) -> list[bytes]:
        body = self._flipped(self._body)
        return [self._header(body), body]

    def _resealed_header(self) -> list[bytes]:
        return [sealed(self._flipped(self._header(self._body)[8:])), self._body]


def _type_position(metadata: bytes) -> int:
    """Return the offset of the type in an Arrow message's metadata (Message.fbs: second field of the root table)."""
    table = int.from_bytes(metadata[:4], "little")
    vtable = table - int.from_bytes(metadata[table : table + 4], "little", signed=True)
    return table + int.from_bytes(metadata[vtable + 6 : vtable + 8], "little")


SET_ASIDE = (
    "noise", "flipped_header", "cut_header", "frame_count", "deep_header", "reply_as_request", "flipped_body",
    "cut_body", "foreign_table", "no_arrow", "unverified_schema", "no_text",
)  # fmt: skip
RESEALED = ("resealed_body", "resealed_header")


def connect(context: zmq.Context, address: str) -> zmq.Socket:
    """Return a raw socket to the service that discards unsent messages when it is closed."""
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(address)
    return socket


def greet(socket: zmq.Socket, run_id: str, client: ClientIdentity = CLIENT) -> int:
    """Send a hello over a raw socket; return the epoch."""
    hello = p.Hello(client.role, client.name, client.session)
    socket.send(p.encode(0, hello, run_id=run_id, client=client))
    assert socket.poll(20_000), "the service does not answer"
    return p.decode(socket.recv_multipart()[0]).message.epoch


def main(address: str, run_id: str, per_second: str) -> None:
    """Send messages at a steady rate and ignore the replies, until killed."""
    socket = connect(zmq.Context(), address)
    source = Source(run_id, greet(socket, run_id), seed=time.monotonic_ns())
    while True:
        socket.send_multipart(source.next(*SET_ASIDE, *RESEALED).frames)
        due = time.monotonic() + 1 / float(per_second)
        while socket.poll(max(0.0, due - time.monotonic()) * 1000):
            socket.recv_multipart()


if __name__ == "__main__":
    main(*sys.argv[1:])
