"""RpcServer: the socket of a service, what comes over it, and an address that a restarted service keeps.

On one machine it is a Unix socket, which only its owner can open. libzmq binds over whatever has its name, and leaves
it behind at the end; both are handled here.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash
import zmq

from common.files import write_durably
from common.process import address_of
from common.rpc.auth import LOOPBACK, Doorkeeper, ServiceKeys
from common.rpc.messages import DAMAGED, Asker, Message, Protocol, Refused, checksum

log = logging.getLogger(__name__)

BIND_RETRY_S = 5.0
_MAX_FRAMES = 3
"""Of a message: identity, header, body."""
_LARGE_BYTES = 2**20
_NOTHING = memoryview(b"")
_SOCKET = "socket"
_MAX_UNIX_BYTES = 107
"""Of the path of a Unix socket."""
STRANGER = "a stranger"
"""How the description of a peer that was not greeted begins."""


class CannotBind(Exception):
    """The address is in use or does not exist, or the port cannot be written down."""


class Request(NamedTuple):
    identity: bytes
    request_id: int
    message: Any
    body: memoryview
    asker: Asker
    """Of a role that may ask it. The service checks whether it was greeted."""
    peer: str


class Rejected(NamedTuple):
    """A message that came damaged, is none of ours, or asks what its client may not ask, or not now."""

    identity: bytes
    request_id: int
    reply: Refused | None
    """None: there is no request to answer."""
    peer: str
    unreadable: str = ""
    """Why no request was read from it; '' if one was."""


class RpcServer:
    """The ROUTER socket of a service. For one thread."""

    def __init__(
        self,
        protocol: Protocol,
        run_id: str,
        *,
        keys: ServiceKeys | None,
        max_message_bytes: int,
        incoming: int,
        outgoing: int,
        refuse_body: Callable[[memoryview], str] = lambda _: "",
    ) -> None:
        """Make the socket, and bind it later.

        Args:
            protocol: of the service.
            run_id: clients of another run are refused.
            keys: only holders of the run's client key connect; None: the socket is not locked.
            max_message_bytes: a client that sends a longer frame is cut off.
            incoming: messages of a client that are held until the service takes them.
            outgoing: messages for a client that are held until it takes them.
            refuse_body: why a large body is refused before its checksum is computed; '' if it is not.
        """
        self._protocol = protocol
        self._run_id = run_id
        self._keys = keys
        self._refuse_body = refuse_body
        self._door: Doorkeeper | None = None
        self._unix: Path | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
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
            self._socket.setsockopt(option, value)

    def bind(self, host: str | None, remembered: Path) -> str:
        """Bind, after waiting for an address that was just given up; return it as clients need it.

        Args:
            host: interface, "0.0.0.0" or "*" for all; None: a Unix socket.
            remembered: the file with the port of the folder's last service, which is taken again if it is free; 0 for a
                Unix socket. The socket lies beside it, or has a short path of its own if the path is too long for the
                system, or the folder takes no sockets.

        Raises:
            CannotBind: says to what and why, and what to try.
        """
        if self._keys is not None:
            self._door = Doorkeeper(self._socket, self._keys, f"the {self._protocol.service}")
        address = self._bind_unix(remembered) if host is None else self._bind_tcp(host, remembered)
        bound = int(address.rsplit(":", 1)[1]) if self._unix is None else 0
        if _port_in(remembered) != bound or not remembered.exists():
            try:
                write_durably(remembered, str(bound).encode())
            except OSError as error:
                raise CannotBind(f"{remembered} cannot be written ({error}). Free some space") from error
        if host in ("0.0.0.0", "*", "::"):  # every interface: name one that other machines can reach
            return f"tcp://{_outward_address()}:{bound}"
        return address

    def _bind_tcp(self, host: str, remembered: Path) -> str:
        service, deadline = self._protocol.service, time.monotonic() + BIND_RETRY_S
        endpoint = f"tcp://{host}"
        while True:
            try:
                is_v6 = ":" in (name := address_of(host))
                self._socket.setsockopt(zmq.IPV6, is_v6)
                endpoint = f"tcp://{f'[{name}]' if is_v6 else name}:{_port_in(remembered) or '*'}"
                self._socket.bind(endpoint)
                return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            except (OSError, UnicodeError, zmq.ZMQError) as error:
                if getattr(error, "errno", 0) == errno.EADDRINUSE and time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                raise CannotBind(
                    f"the {service} cannot bind {endpoint} ({error}). Set launch.host to an address of this "
                    f"machine; the port of the last run is kept in {remembered}"
                ) from error

    def _bind_unix(self, remembered: Path) -> str:
        beside = remembered.absolute().with_name(_SOCKET)
        short = _short_path(beside)
        fits = len(os.fsencode(beside)) <= _MAX_UNIX_BYTES
        failed = ""
        for path in (beside, short) if fits else (short,):
            try:
                if path == short:
                    _make_private(path.parent)
                _wait_until_free(path)
                mask = os.umask(0o177)  # to connect to a Unix socket takes permission to write it
                try:
                    self._socket.bind(f"ipc://{path}")
                finally:
                    os.umask(mask)
            except (OSError, zmq.ZMQError) as error:
                failed = f"{failed}; {path}: {error}" if failed else f"{path}: {error}"
                if error.errno == errno.EADDRINUSE:  # two services of one folder are a mistake wherever they listen
                    break
            else:
                self._unix = path
                return f"ipc://{path}"
        raise CannotBind(
            f"the {self._protocol.service} cannot make its socket ({failed}). Set launch.host = '{LOOPBACK}' for "
            "a port instead, or TMPDIR to a folder of your own"
        )

    @property
    def is_closed(self) -> bool:
        return bool(self._socket.closed)

    def poll(self, timeout_s: float) -> bool:
        return bool(self._socket.poll(max(0, int(timeout_s * 1000))))

    def receive(self) -> list[zmq.Frame] | None:
        """Return the frames of the next message: identity, header, body; None: there is none.

        One frame more marks an invalid message.
        """
        try:
            frames: list[zmq.Frame] = [self._socket.recv(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return None
        while frames[-1].more:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            frames = [*frames, frame] if len(frames) <= _MAX_FRAMES else [*frames[:-1], frame]
        return frames

    def open(self, frames: Sequence[zmq.Frame]) -> Request | Rejected:
        identity, peer, rest = frames[0].bytes, _peer_of(frames[0]), [frame.buffer for frame in frames[1:]]
        try:
            header, body = (*rest, _NOTHING)[:2] if 1 <= len(rest) <= 2 else (_NOTHING, _NOTHING)
            envelope = self._protocol.decode(header, max_bytes=self._protocol.max_header_bytes)
        except msgspec.DecodeError:
            return Rejected(identity, 0, None, peer, "header")
        number, message = envelope.request_id, envelope.message
        if len(body) > _LARGE_BYTES and (reason := self._refuse_body(body)):
            refused = Refused(f"the message was quarantined: {reason}")
            return Rejected(identity, number, refused, peer, "schema")
        if envelope.body_checksum != checksum(body):
            damaged = Refused(f"a body of {len(body)} bytes does not match its checksum", DAMAGED)
            return Rejected(identity, number, damaged, peer, "checksum")
        if not isinstance(message, self._protocol.requests):
            refused = Refused(f"{type(message).__name__} is no request")
            return Rejected(identity, number, refused, peer, "header")
        asker = envelope.asker
        reason = self._stranger(envelope.run_id, envelope.protocol) or self._protocol.refusal(message, asker)
        if reason or asker is None:
            return Rejected(identity, number, Refused(reason), peer)
        return Request(identity, number, message, body, asker, peer)

    def answer(self, identity: bytes, request_id: int, reply: Message, body: bytes | memoryview = b"") -> None:
        """Answer a client. It may be gone, or not read: what it asked for is done, and it will ask again."""
        header = self._protocol.encode(request_id, reply, body, run_id=self._run_id)
        try:
            self._socket.send_multipart([identity, header, *([body] if len(body) else [])], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            log.info("an answer (%s) could not be delivered: %s", type(reply).__name__, error)

    def close(self) -> None:
        if not self._socket.closed:
            if self._unix is not None:
                self._unix.unlink(missing_ok=True)  # while it is still ours: nobody binds where somebody listens
            self._socket.close()
            if self._door is not None:
                self._door.stop()
            self._context.term()

    def _stranger(self, run_id: str, version: int) -> str:
        """Why a client is none of this service's; '' where it is."""
        service, mine = self._protocol.service, self._protocol.version
        if version != mine:
            return (
                f"this {service} speaks version {mine} of its protocol, the client version {version}; run all of a run "
                "from the same release"
            )
        return "" if run_id == self._run_id else f"this {service} serves run '{self._run_id}', not '{run_id}'"


def forget_port(remembered: Path) -> None:
    """Let the next service take any free port: no client knows the last one, which another program may have."""
    if _port_in(remembered):
        with contextlib.suppress(OSError):  # the service says what is wrong with the disk
            write_durably(remembered, b"0")


def _port_in(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


def _short_path(path: Path) -> Path:
    home = Path(tempfile.gettempdir()) / f"leeway-sockets-{os.geteuid()}"
    short = home / xxhash.xxh3_128_hexdigest(os.fsencode(path))
    return short if len(os.fsencode(short)) <= _MAX_UNIX_BYTES else Path("/tmp", *short.parts[-2:])


def _make_private(folder: Path) -> None:
    """Have a folder that this user alone may enter; OSError if another user may have made it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder that this user alone may enter")


def _wait_until_free(path: Path) -> None:
    """Wait until no service listens there; OSError if one does, or the name is not of a socket."""
    deadline = time.monotonic() + BIND_RETRY_S
    while path.exists():
        if not path.is_socket():
            raise FileExistsError("there is something that is no socket")
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            probe.settimeout(BIND_RETRY_S)
            probe.connect(str(path))
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            raise OSError(errno.EADDRINUSE, "another service listens there")
        return


def _peer_of(frame: zmq.Frame) -> str:
    """Who sent it, for people: of a Unix socket the system tells the process and its user, of TCP the host."""
    try:
        where = str(frame.get("Peer-Address"))
    except zmq.ZMQError:  # nothing is known of it
        return STRANGER
    unix = where.split(":") if where.startswith("localhost:") else []
    return f"{STRANGER} (process {unix[3]} of user {unix[1]})" if len(unix) == 4 else f"{STRANGER} ({where})"


def _outward_address() -> str:
    """The address of the interface that leads away from this machine; loopback where none does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of a range kept for documentation; nothing is sent
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])
