"""What the buffer service and the weight service have in common: sealed headers, messages, and a lasting address."""

from __future__ import annotations

import errno
import socket
import struct
import time
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash
import zmq

BIND_RETRY_S = 5.0
MAX_FRAMES = 3
"""Of a message to a service."""
_SEAL = struct.Struct("<Q")

E = TypeVar("E")


class CannotBind(Exception):
    """The address is in use or does not exist."""


def checksum(body: bytes | memoryview) -> int:
    """xxh3-64 of a message body; 0 for an empty one."""
    return int(xxhash.xxh3_64_intdigest(body)) if len(body) else 0


def sealed(payload: bytes) -> bytes:
    """A header frame: its checksum, then what it says."""
    return _SEAL.pack(checksum(payload)) + payload


def unsealed(header: bytes | memoryview, decoder: msgspec.msgpack.Decoder[E], *, max_bytes: int | None = None) -> E:
    """Read a header frame.

    Args:
        header: the frame.
        decoder: of what it says.
        max_bytes: a longer one is not looked at; None for any.

    Raises:
        msgspec.DecodeError: the frame is damaged or no known message; it is never guessed at.
    """
    if max_bytes is not None and len(header) > max_bytes:
        raise msgspec.DecodeError(f"a header of {len(header)} bytes, at most {max_bytes} are read")
    payload = memoryview(header)[_SEAL.size :]
    if len(payload) == 0 or _SEAL.unpack_from(header)[0] != checksum(payload):
        raise msgspec.DecodeError(f"a header of {len(header)} bytes does not match its checksum")
    try:
        return decoder.decode(payload)
    except (RecursionError, UnicodeDecodeError) as error:
        # what msgspec does not call its own: nested too deeply, or text that is none
        raise msgspec.DecodeError(f"a header of {len(header)} bytes cannot be read ({type(error).__name__})") from None


def receive_frames(service: zmq.Socket[bytes]) -> list[memoryview]:
    """The frames of one message: identity, header, body. One frame more shows that it is none of ours.

    Raises:
        zmq.Again: no message is there.
    """
    frames = [service.recv(zmq.NOBLOCK, copy=False)]
    while frames[-1].more:
        frame = service.recv(zmq.NOBLOCK, copy=False)
        frames = [*frames, frame] if len(frames) <= MAX_FRAMES else [*frames[:-1], frame]
    return [frame.buffer for frame in frames]


def send_frames(
    service: zmq.Socket[bytes], identity: bytes, header: bytes, body: bytes | memoryview
) -> zmq.ZMQError | None:
    """Answer a client.

    Returns:
        Why it could not be delivered: the client is gone or does not read. It will ask again. None where it was sent.

    Raises:
        zmq.ZMQError: anything else.
    """
    try:
        service.send_multipart([identity, header, *([body] if len(body) else [])], zmq.NOBLOCK, copy=False)
    except zmq.ZMQError as error:
        if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
            raise
        return error
    return None


def limit(service: zmq.Socket[bytes], max_message_bytes: int, incoming: int, outgoing: int) -> None:
    """Bound what a client can cost a service, whoever it is; before `bind`.

    Args:
        service: its ROUTER socket.
        max_message_bytes: a client that sends a longer frame is cut off.
        incoming: messages of a client that are held until the service takes them.
        outgoing: messages for a client that are held until it takes them.
    """
    for option, value in (
        (zmq.ROUTER_MANDATORY, 1),  # an answer to somebody who left is an error, and not silently dropped
        (zmq.MAXMSGSIZE, max_message_bytes),
        (zmq.LINGER, 0),
        (zmq.RCVHWM, incoming),
        (zmq.SNDHWM, outgoing),
        (zmq.HEARTBEAT_IVL, 2000),
        (zmq.HEARTBEAT_TIMEOUT, 20000),
        (zmq.HANDSHAKE_IVL, 5000),
        (zmq.BACKLOG, 1024),
    ):
        service.setsockopt(option, value)


def bind(service: zmq.Socket[bytes], host: str, port: int, remembered: Path) -> tuple[str, int]:
    """Bind a service; a port that was just given up is waited for.

    Args:
        service: its socket.
        host: interface, "0.0.0.0" or "*" for all.
        port: 0 takes the port that the last service of the folder had, or a free one.
        remembered: the file in which that port is kept.

    Returns:
        The address for clients, and the port.

    Raises:
        CannotBind: says to what and why.
    """
    endpoint = f"tcp://{host}:{port or port_in(remembered) or '*'}"
    deadline = time.monotonic() + BIND_RETRY_S
    while True:
        try:
            service.bind(endpoint)
            break
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            raise CannotBind(f"cannot bind {endpoint} ({error})") from error
    address = service.getsockopt_string(zmq.LAST_ENDPOINT)
    bound_port = int(address.rsplit(":", 1)[1])
    if host in ("0.0.0.0", "*"):  # every interface: name one that other machines can reach
        return f"tcp://{_outward_address()}:{bound_port}", bound_port
    return address, bound_port


def port_in(file: Path) -> int:
    """The port that the last service of the folder had; 0 where there was none."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


def _outward_address() -> str:
    """The address of the interface that leads away from this machine; loopback where none does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of a range kept for documentation; nothing is sent
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
