"""BufferService: the one process that owns the store, behind a ZeroMQ ROUTER.

One thread, one loop. Each turn takes all messages that wait, answers them in ONE transaction, and
sends the replies after its commit: under load many acknowledgements share one fsync.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from buffer import protocol as p
from buffer.config import BufferConfig, RunFacts
from buffer.core import Answer, BufferCore
from buffer.credits import Credits
from buffer.errors import BufferRefused, StoreError, StoreFull
from buffer.intake import MAX_QUARANTINED_BYTES, set_aside
from buffer.schema import bomb
from buffer.store import PORT, Store
from buffer.transaction import Transaction
from buffer.upkeep import Upkeep
from weight_sync.files import write_durably

log = logging.getLogger(__name__)

_MAX_TURN_MESSAGES = 512
_MAX_TURN_BYTES = 8 * 2**20
"""So much is taken in between two commits: more share one fsync, fewer are acknowledged sooner."""
_MAX_PARKED = 64
"""Draws that wait at once; one learner has one or two."""
_IDLE_S = 0.2
"""How long a turn may wait for messages, which bounds how late `stop` is noticed."""
_BIND_RETRY_S = 5.0
_MAX_HEADER_BYTES = 256 * 2**10
"""Room for some ten thousand lease ids; each id of a longer list would cost its time before anyone else is served."""
_LARGE_BYTES = 2**20
_NOTHING = memoryview(b"")
_COMPLAIN_EVERY_S = 10.0


class _Parked(NamedTuple):
    """A draw that waits."""

    identity: bytes
    request_id: int
    request: p.DrawRequest
    deadline: float


class _Push(NamedTuple):
    """Trajectories that arrived."""

    identity: bytes
    request_id: int
    message: p.Push
    body: memoryview


class _Asked(NamedTuple):
    """Any other request that arrived."""

    identity: bytes
    request_id: int
    message: p.Request
    body: memoryview


class _Outgoing(NamedTuple):
    identity: bytes
    request_id: int
    reply: p.Reply
    body: bytes | memoryview


class BufferService:
    """Serves one run's buffer from one folder."""

    def __init__(
        self, config: BufferConfig, facts: RunFacts, folder: Path, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Open the store.

        Raises:
            StoreError: see `Store`; or the configuration contradicts itself.
        """
        self._config = config
        self._clock = clock
        self._core = BufferCore(config, facts, clock)
        self._store = Store(folder, facts, durability=config.durability)
        self._store.read(self._core.leases.restart)
        self._upkeep = Upkeep(config, self._store, clock)
        self._credits = Credits(config.inbox_mib * 2**20)
        self._folder = folder
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._parked: dict[tuple[bytes, int], _Parked] = {}
        self._complain_at = 0.0

    def bind(self) -> str:
        """Bind, and return the address for clients. With port 0, the port of the last run in this folder is kept.

        Raises:
            StoreError: the address is in use or does not exist.
        """
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.MAXMSGSIZE, self._config.max_message_mib * 2**20),
            (zmq.LINGER, 0),
            (zmq.RCVHWM, 1000),
            (zmq.SNDHWM, 1000),
            (zmq.HEARTBEAT_IVL, 2000),
            (zmq.HEARTBEAT_TIMEOUT, 20000),
            (zmq.HANDSHAKE_IVL, 5000),
        ):
            self._socket.setsockopt(option, value)
        remembered = self._folder / PORT
        port = self._config.port or _port_in(remembered)
        endpoint = f"tcp://{self._config.host}:{port or '*'}"
        deadline = time.monotonic() + _BIND_RETRY_S
        while True:
            try:
                self._socket.bind(endpoint)
                break
            except zmq.ZMQError as error:
                if error.errno == zmq.EADDRINUSE and time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                raise StoreError(
                    f"the buffer service cannot bind {endpoint} ({error}). Set [buffer] host and port to a free "
                    f"address of this machine; the port of the last run is kept in {remembered}"
                ) from error
        address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        bound_port = address.rsplit(":", 1)[1]
        write_durably(remembered, bound_port.encode())
        if self._config.host in ("0.0.0.0", "*"):  # every interface: name one that other machines can reach
            return f"tcp://{socket.gethostbyname(socket.gethostname())}:{bound_port}"
        return address

    def serve(self, stop: threading.Event) -> None:
        """Answer until `stop` is set.

        Raises:
            StoreError: the disk failed. Nothing of the last turn was acknowledged, so clients send it again.
        """
        try:
            while not stop.is_set():
                self.turn()
        finally:
            self.close()

    def turn(self) -> None:
        """Wait for messages or a deadline, and answer what there is."""
        inbox = self._receive()
        self._upkeep.run(idle=not inbox)
        due = self._core.leases.due_in_s()
        if not inbox and not self._parked and (due is None or due > 0):
            return
        try:
            outbox, self._parked = self._store.write(lambda tx: self._answer(tx, inbox))
        except StoreFull as error:
            outbox = self._let_wait(inbox, str(error))
        for outgoing in outbox:
            self._send(outgoing)

    def _let_wait(self, inbox: list[list[memoryview]], reason: str) -> list[_Outgoing]:
        """Nothing of this turn could be written: ask everyone to send it again a little later."""
        now = self._clock()
        if now >= self._complain_at:
            log.warning("%s. Everybody waits", reason)
            self._complain_at = now + _COMPLAIN_EVERY_S
        outbox = []
        for sender, *frames in inbox:
            identity = bytes(sender)
            try:
                request_id = p.decode(frames[0], max_bytes=_MAX_HEADER_BYTES).request_id
            except (msgspec.DecodeError, IndexError):
                continue
            outbox.append(_Outgoing(identity, request_id, p.Refused(reason, retry=True), b""))
        return outbox

    def close(self) -> None:
        """Give the address and the folder back."""
        if not self._socket.closed:
            self._socket.close()
            self._context.term()
            self._store.close()

    def _receive(self) -> list[list[memoryview]]:
        now = self._clock()
        waits = [_IDLE_S, self._upkeep.due_in_s, *(parked.deadline - now for parked in self._parked.values())]
        due = self._core.leases.due_in_s()
        if due is not None:
            waits.append(due)
        inbox: list[list[memoryview]] = []
        if not self._socket.poll(max(0, int(min(waits) * 1000))):
            return inbox
        size = 0
        while len(inbox) < _MAX_TURN_MESSAGES and size < _MAX_TURN_BYTES:
            try:
                inbox.append([frame.buffer for frame in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)])
            except zmq.Again:
                break
            size += sum(map(len, inbox[-1]))
        return inbox

    def _answer(
        self, tx: Transaction, inbox: list[list[memoryview]]
    ) -> tuple[list[_Outgoing], dict[tuple[bytes, int], _Parked]]:
        """All replies of one turn. May run twice where the store grows, so it changes nothing but `tx`."""
        outbox: list[_Outgoing] = []
        parked = dict(self._parked)
        pushes: list[_Push] = []
        for sender, *frames in inbox:
            identity = bytes(sender)
            request = self._opened(tx, identity, frames, outbox)
            if isinstance(request, _Push):
                pushes.append(request)
            elif request is not None:
                self._push(tx, pushes, outbox)
                self._answer_one(tx, request, outbox, parked)
        self._push(tx, pushes, outbox)
        self._core.leases.expire_due(tx)
        now = self._clock()
        for key, waiting in list(parked.items()):
            answer = self._draw(tx, waiting.request)
            if answer is None and waiting.deadline <= now:
                answer = self._core.draw_timed_out(tx, waiting.request)
            if answer is not None:
                del parked[key]
                outbox.append(_Outgoing(waiting.identity, waiting.request_id, *answer))
        return outbox, parked

    def _opened(
        self, tx: Transaction, identity: bytes, frames: list[memoryview], outbox: list[_Outgoing]
    ) -> _Push | _Asked | None:
        """A message that can be answered; None where it was set aside."""
        try:
            header, body = (*frames, _NOTHING)[:2] if 1 <= len(frames) <= 2 else (_NOTHING, _NOTHING)
            envelope = p.decode(header, max_bytes=_MAX_HEADER_BYTES)
        except msgspec.DecodeError:
            # There is no request to answer: whoever sent it will send it again, or is no client of ours.
            set_aside(tx, "header", b"|".join(frame[:MAX_QUARANTINED_BYTES] for frame in frames), matches_lease=False)
            return None
        message, request_id = envelope.message, envelope.request_id
        if len(body) > _LARGE_BYTES and (reason := bomb(body)):
            # Before its checksum is computed: that takes long for what is large.
            set_aside(tx, "schema", body, matches_lease=False)
            outbox.append(_Outgoing(identity, request_id, p.Refused(f"the message was quarantined: {reason}"), b""))
        elif envelope.body_checksum != p.checksum(body):
            set_aside(tx, "checksum", body, matches_lease=False)
            outbox.append(_Outgoing(identity, request_id, p.Refused("the body arrived damaged", retry=True), b""))
        elif not isinstance(message, p.Request):
            set_aside(tx, "header", header, matches_lease=False)
        elif not isinstance(message, p.Push):
            return _Asked(identity, request_id, message, body)
        elif reason := self._upkeep.pushes_wait_for:
            outbox.append(_Outgoing(identity, request_id, p.Refused(reason, retry=True), b""))
        else:
            return _Push(identity, request_id, message, body)
        return None

    def _push(self, tx: Transaction, pushes: list[_Push], outbox: list[_Outgoing]) -> None:
        """Take in what was collected, and empty the list."""
        replies = self._core.push(tx, [(push.message, push.body) for push in pushes])
        for push, reply in zip(pushes, replies, strict=True):
            outbox.append(_Outgoing(push.identity, push.request_id, self._completed(push.message, reply), b""))
        pushes.clear()

    def _answer_one(
        self, tx: Transaction, asked: _Asked, outbox: list[_Outgoing], parked: dict[tuple[bytes, int], _Parked]
    ) -> None:
        identity, request_id, message, body = asked
        if isinstance(message, p.DrawRequest):
            if len(parked) >= _MAX_PARKED:
                refused = p.Refused(f"{len(parked)} draws wait already: one learner draws from a buffer")
                outbox.append(_Outgoing(identity, request_id, refused, b""))
                return
            deadline = self._clock() + min(max(message.wait_s, 0.0), 3600.0)
            parked[identity, request_id] = _Parked(identity, request_id, message, deadline)
            return
        try:
            reply, reply_body = self._core.handle(tx, message, body)
        except BufferRefused as error:
            reply, reply_body = p.Refused(str(error)), b""
        outbox.append(_Outgoing(identity, request_id, self._completed(message, reply), reply_body))

    def _completed(self, message: p.Request, reply: p.Reply) -> p.Reply:
        """The reply with what the core does not know: the store's file, and how many clients there are."""
        match message, reply:
            case p.Push(), p.PushReply():
                return msgspec.structs.replace(reply, credit=self._credits.grant(message.actor, self._clock()))
            case p.Hello(role="actor"), p.Welcome():
                return msgspec.structs.replace(reply, credit=self._credits.grant(message.name, self._clock()))
            case _, p.Status():
                size, damaged = self._store.size_bytes, self._upkeep.num_damaged
                return msgspec.structs.replace(reply, size_bytes=size, num_damaged=damaged)
        return reply

    def _draw(self, tx: Transaction, request: p.DrawRequest) -> Answer | None:
        try:
            return self._core.try_draw(tx, request)
        except BufferRefused as error:
            return p.Refused(str(error)), b""

    def _send(self, outgoing: _Outgoing) -> None:
        envelope = p.Envelope(outgoing.request_id, outgoing.reply, p.checksum(outgoing.body))
        frames = [outgoing.identity, p.encode(envelope), *([outgoing.body] if len(outgoing.body) else [])]
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            # The peer is gone or does not read. What it asked for is done; it will ask again.
            log.info("a reply (%s) could not be delivered: %s", type(outgoing.reply).__name__, error)


def _port_in(file: Path) -> int:
    """The port that the last service of the folder had; 0 where there was none."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0
