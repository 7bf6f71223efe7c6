"""RpcServer: the socket of a service, its messages, and its address, which a restarted service keeps.

If all clients are on this machine, a Unix socket is used, which only its owner can open. On bind, libzmq replaces any
existing file at the path. At exit, libzmq leaves the socket file behind. The module prevents both problems.
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

from leeway.common.files import write_durably
from leeway.common.process import address_of
from leeway.common.rpc.auth import LOOPBACK, CurveAuthenticator, ServiceKeys
from leeway.common.rpc.messages import DAMAGED, ClientIdentity, Message, Protocol, Refused, checksum

log = logging.getLogger(__name__)

BIND_RETRY_S = 5.0
_MAX_FRAMES = 3
"""Number of frames of a valid message: identity, header, body."""
_LARGE_BYTES = 2**20
_NOTHING = memoryview(b"")
_SOCKET = "socket"
_MAX_UNIX_BYTES = 107
"""Maximum length of the path of a Unix socket."""
UNAUTHENTICATED = "an unauthenticated client"
"""Prefix of the description of a peer that has not sent a Hello."""


class CannotBind(Exception):
    """The address is in use or does not exist, or the port file cannot be written."""


class Request(NamedTuple):
    identity: bytes
    request_id: int
    message: Any
    body: memoryview
    client: ClientIdentity
    """The sender, whose role may send the request. The service checks whether the client has sent a Hello."""
    peer: str


class Rejected(NamedTuple):
    """A message that is damaged, invalid, or not allowed for its client."""

    identity: bytes
    request_id: int
    reply: Refused | None
    """None if there is no request to reply to."""
    peer: str
    unreadable: str = ""
    """Reason why the message is not a readable request; '' for a readable request."""


class RpcServer:
    """The ROUTER socket of a service. Not thread-safe."""

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
        """Create the socket without binding it.

        Args:
            protocol: protocol of the service.
            run_id: id of the run; clients of another run are refused.
            keys: keys of the service, which then admits only clients with the run's client key; None: no check.
            max_message_bytes: a client that sends a longer frame is disconnected.
            incoming: maximum messages queued per client until the service receives them.
            outgoing: maximum messages queued per client until the client receives them.
            refuse_body: returns a reason to refuse a large body before its checksum is computed; '' to accept it.
        """
        self._protocol = protocol
        self._run_id = run_id
        self._keys = keys
        self._refuse_body = refuse_body
        self._authenticator: CurveAuthenticator | None = None
        self._unix: Path | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),  # a reply to a disconnected client is an error, not dropped silently
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

    def bind(self, host: str | None, port_file: Path) -> str:
        """Bind the socket, and wait if the address is in use for a short time; return the address for clients.

        Args:
            host: interface; "0.0.0.0" or "*" for all interfaces; None for a Unix socket.
            port_file: file with the port of the folder's last service, which is reused if free; 0 for a Unix socket.
                The socket is created beside it, or at a short path if the path is too long for the system or the folder
                does not support sockets.

        Raises:
            CannotBind: names the address, the reason and the fix.
        """
        if self._keys is not None:
            self._authenticator = CurveAuthenticator(self._socket, self._keys, f"the {self._protocol.service}")
        address = self._bind_unix(port_file) if host is None else self._bind_tcp(host, port_file)
        bound = int(address.rsplit(":", 1)[1]) if self._unix is None else 0
        if _port_in(port_file) != bound or not port_file.exists():
            try:
                write_durably(port_file, str(bound).encode())
            except OSError as error:
                raise CannotBind(f"cannot write {port_file} ({error}). Free space or fix its permissions") from error
        if host in ("0.0.0.0", "*", "::"):  # all interfaces: return an address that other machines can reach
            return f"tcp://{_outward_address()}:{bound}"
        return address

    def _bind_tcp(self, host: str, port_file: Path) -> str:
        service, deadline = self._protocol.service, time.monotonic() + BIND_RETRY_S
        endpoint = f"tcp://{host}"
        while True:
            try:
                is_v6 = ":" in (name := address_of(host))
                self._socket.setsockopt(zmq.IPV6, is_v6)
                endpoint = f"tcp://{f'[{name}]' if is_v6 else name}:{_port_in(port_file) or '*'}"
                self._socket.bind(endpoint)
                return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            except (OSError, UnicodeError, zmq.ZMQError) as error:
                if getattr(error, "errno", 0) == errno.EADDRINUSE and time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                raise CannotBind(
                    f"the {service} cannot bind {endpoint} ({error}). Set launch.host to an address of this "
                    f"machine; the port of the last run is stored in {port_file}"
                ) from error

    def _bind_unix(self, port_file: Path) -> str:
        beside = port_file.absolute().with_name(_SOCKET)
        short = _short_path(beside)
        fits = len(os.fsencode(beside)) <= _MAX_UNIX_BYTES
        failed = ""
        for path in (beside, short) if fits else (short,):
            try:
                if path == short:
                    _make_private(path.parent)
                _wait_until_free(path)
                mask = os.umask(0o177)  # connecting to a Unix socket requires write permission
                try:
                    self._socket.bind(f"ipc://{path}")
                finally:
                    os.umask(mask)
            except (OSError, zmq.ZMQError) as error:
                failed = f"{failed}; {path}: {error}" if failed else f"{path}: {error}"
                if error.errno == errno.EADDRINUSE:  # do not start a second service of the folder at the other path
                    break
            else:
                self._unix = path
                return f"ipc://{path}"
        raise CannotBind(
            f"the {self._protocol.service} cannot create its socket ({failed}). Set launch.host = '{LOOPBACK}' to "
            "use a port instead, or TMPDIR to a folder that you own"
        )

    @property
    def is_closed(self) -> bool:
        return bool(self._socket.closed)

    def poll(self, timeout_s: float) -> bool:
        return bool(self._socket.poll(max(0, int(timeout_s * 1000))))

    def receive(self) -> list[zmq.Frame] | None:
        """Return the frames of the next message: identity, header, body; None if there is no message.

        A fourth frame marks an invalid message.
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
            refused = Refused(f"{type(message).__name__} is not a request")
            return Rejected(identity, number, refused, peer, "header")
        client = envelope.asker
        reason = self._mismatch(envelope.run_id, envelope.protocol) or self._protocol.refusal(message, client)
        if reason or client is None:
            return Rejected(identity, number, Refused(reason), peer)
        return Request(identity, number, message, body, client, peer)

    def answer(self, identity: bytes, request_id: int, reply: Message, body: bytes | memoryview = b"") -> None:
        """Reply to a client. A reply to a disconnected or slow client is dropped; the client resends its request."""
        header = self._protocol.encode(request_id, reply, body, run_id=self._run_id)
        try:
            self._socket.send_multipart([identity, header, *([body] if len(body) else [])], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            log.info("cannot deliver a reply (%s): %s", type(reply).__name__, error)

    def close(self) -> None:
        if not self._socket.closed:
            if self._unix is not None:
                self._unix.unlink(missing_ok=True)  # before closing: later, the next service may own the file
            self._socket.close()
            if self._authenticator is not None:
                self._authenticator.stop()
            self._context.term()

    def _mismatch(self, run_id: str, version: int) -> str:
        """Return why a client of another run or release is refused; '' if it belongs to this run and release."""
        service, own = self._protocol.service, self._protocol.version
        if version != own:
            return (
                f"this {service} uses protocol version {own}, but the client uses {version}; start all processes of "
                "a run from the same release"
            )
        return "" if run_id == self._run_id else f"this {service} serves run '{self._run_id}', not '{run_id}'"


def forget_port(port_file: Path) -> None:
    """Make the next service use any free port, since another program may use the last port, and no client does."""
    if _port_in(port_file):
        with contextlib.suppress(OSError):  # the service reports an unwritable disk when it binds
            write_durably(port_file, b"0")


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
    """Create a folder with mode 0700; raise OSError if another user owns it or can access it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder accessible to this user alone")


def _wait_until_free(path: Path) -> None:
    """Block until no service listens on the path; raise OSError on timeout, or if the path is not a socket."""
    deadline = time.monotonic() + BIND_RETRY_S
    while path.exists():
        if not path.is_socket():
            raise FileExistsError("the path exists and is not a socket")
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            probe.settimeout(BIND_RETRY_S)
            probe.connect(str(path))
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            raise OSError(errno.EADDRINUSE, "another service listens on this socket")
        return


def _peer_of(frame: zmq.Frame) -> str:
    """Describe the sender of a frame for log lines: process and user for a Unix socket, host for TCP."""
    try:
        address = str(frame.get("Peer-Address"))
    except zmq.ZMQError:  # unknown address
        return UNAUTHENTICATED
    unix = address.split(":") if address.startswith("localhost:") else []
    detail = f"process {unix[3]} of user {unix[1]}" if len(unix) == 4 else address
    return f"{UNAUTHENTICATED} ({detail})"


def _outward_address() -> str:
    """Return the address of the interface with the default route; loopback without a default route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation; a UDP connect sends nothing
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])
