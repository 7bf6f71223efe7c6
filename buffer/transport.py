"""Transport: one thread that owns a DEALER socket, sends requests, pairs replies, and resends.

A request is sent again with its number when it went unanswered, when the connection was made anew,
and when the service found its body damaged. Every request is safe to send again, so the service
may be killed and restarted under a client at any time.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from buffer import protocol as p
from buffer.errors import BufferRefused, BufferUnavailable
from buffer.futures import settle
from buffer.wake import Wake
from common.curve import ClientKeys

log = logging.getLogger(__name__)

Result = tuple[p.Reply, bytes]

_RETRY_S = 0.1
_MAX_RETRY_S = 1.0
_BUSY_FACTOR = 3
_TICK_S = 0.5


@dataclass(eq=False)
class _Call:
    request_id: int
    name: str
    frames: list[bytes | memoryview]
    future: Future[Result]
    resend_after_s: float
    asked_at: float
    gives_up_at: float
    sent_at: float | None = None
    """None while it waits to be sent."""
    not_before: float = 0.0
    num_refused: int = 0
    """How often the service said to try again."""


@dataclass(eq=False)
class _Inbox:
    """What other threads hand to the IO thread."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    calls: deque[_Call] = field(default_factory=deque)
    closing_at: float | None = None
    ended: bool = False


class Transport:
    """Requests in, futures out."""

    def __init__(
        self,
        address: str,
        request_timeout_s: float,
        give_up_after_s: float,
        *,
        name: str,
        keys: ClientKeys | None = None,
        silence_s: float = 20.0,
        pump: Callable[[], float | None] = lambda: None,
        ended: Callable[[BufferUnavailable], None] = lambda _: None,
    ) -> None:
        """Start the IO thread.

        Args:
            address: of the service, tcp://HOST:PORT.
            request_timeout_s: resend after so long without an answer.
            give_up_after_s: fail after so long without an answer.
            name: of the thread.
            keys: of the run's clients; None where the service takes everybody.
            silence_s: make the connection anew after so long without a heartbeat.
            pump: called by the IO thread in every round; may submit, and returns in how many seconds
                it wants to be called again (None: when woken).
            ended: called once by the IO thread when it ends, whatever ends it.
        """
        self.address = address
        self._request_timeout_s = request_timeout_s
        self._give_up_after_s = give_up_after_s
        self._keys = keys
        self._silence_s = silence_s
        self._pump = pump
        self._ended = ended
        self._inbox = _Inbox()
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self._wake = Wake()
        self._context = zmq.Context()
        self._heard_at = self._answered_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"{name}-buffer-io", daemon=True)
        self._thread.start()

    @property
    def heard_at(self) -> float:
        """When the service last said anything, on the monotonic clock."""
        return self._answered_at

    @property
    def has_ended(self) -> bool:
        """Nothing can be sent any more."""
        return self._inbox.ended

    def submit(
        self, message: p.Request, body: bytes | memoryview = b"", *, wait_s: float = 0.0, closing: bool = False
    ) -> Future[Result]:
        """Send a request.

        Args:
            message: the request.
            body: an Arrow IPC stream, or nothing.
            wait_s: how long the service may take to answer, beyond the usual.
            closing: allow it while the transport closes: for what `pump` still has to send.

        Returns:
            The reply and its body. Fails with BufferRefused or BufferUnavailable.
        """
        future: Future[Result] = Future()
        now = time.monotonic()
        with self._inbox.lock:
            if self._inbox.ended or (self._inbox.closing_at is not None and not closing):
                raise BufferUnavailable(f"the client of the buffer service at {self.address} is closed")
            number = next(self._numbers)
            frames = [p.encode(p.Envelope(number, message, p.checksum(body))), *([body] if len(body) else [])]
            call = _Call(
                number,
                type(message).__name__,
                frames,
                future,
                resend_after_s=self._request_timeout_s + wait_s,
                asked_at=now,
                gives_up_at=now + self._give_up_after_s + wait_s,
            )
            self._inbox.calls.append(call)
        self.wake()
        return future

    def wake(self) -> None:
        """Let the IO thread look around now."""
        self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for what is outstanding, fail the rest, and end the thread."""
        with self._inbox.lock:
            if self._inbox.ended:
                return
            self._inbox.closing_at = time.monotonic() + timeout_s
        self.wake()
        self._thread.join(timeout_s + 10.0)
        if self._thread.is_alive():
            raise BufferUnavailable(f"the IO thread of the client of {self.address} did not end in {timeout_s + 10} s")

    # --- the IO thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        socket, monitor = self._open()
        try:
            while True:
                closing_at = self._inbox.closing_at
                wake_in_s = self._pump()
                self._take()
                now = time.monotonic()
                if closing_at is not None and (not self._calls or now >= closing_at):
                    return
                if self._expire(now):
                    socket.close()
                    monitor.close()
                    socket, monitor = self._open()
                has_unsent = self._send_due(socket, now)
                self._wait(socket, monitor, has_unsent, _TICK_S if wake_in_s is None else min(_TICK_S, wake_in_s))
        finally:
            self._end(socket, monitor)

    def _open(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IMMEDIATE, 1),
            (zmq.SNDHWM, 4),
            (zmq.SNDBUF, 256 * 2**10),  # a heartbeat waits behind what the system holds
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 400),
            (zmq.CONNECT_TIMEOUT, 500),
            (zmq.HANDSHAKE_IVL, 1000),
            (zmq.HEARTBEAT_IVL, int(self._silence_s * 250)),
            (zmq.HEARTBEAT_TIMEOUT, int(self._silence_s * 1000)),
        ):
            socket.setsockopt(option, value)
        if self._keys is not None:
            self._keys.lock(socket)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        socket.connect(self.address)
        self._heard_at = time.monotonic()
        return socket, monitor

    def _take(self) -> None:
        with self._inbox.lock:
            while self._inbox.calls:
                call = self._inbox.calls.popleft()
                self._calls[call.request_id] = call

    def _expire(self, now: float) -> bool:
        """Fail what waited too long, mark what is to be sent again; True where the socket seems dead."""
        dead = False
        for call in list(self._calls.values()):
            if now >= call.gives_up_at:
                self._fail(call, f"did not answer {call.name} for {call.gives_up_at - call.asked_at:.0f} s")
            elif call.sent_at is not None and now - call.sent_at > self._patience_s(call):
                dead = dead or self._heard_at < call.sent_at
                call.sent_at = None
        if dead:
            log.info("no word from the buffer service at %s; connecting anew", self.address)
            for call in self._calls.values():
                call.sent_at = None
        return dead

    def _patience_s(self, call: _Call) -> float:
        """How long to wait for the answer: longer where others are answered, for a slow link loses nothing."""
        is_alive = call.sent_at is not None and self._heard_at > call.sent_at
        return call.resend_after_s * (_BUSY_FACTOR if is_alive else 1)

    def _send_due(self, socket: zmq.Socket[bytes], now: float) -> bool:
        """Send what waits, trajectories last; True where the socket would not take all of it.

        The socket takes a few messages only, so that a request for leases, or a renewal, does not
        wait behind all trajectories on a slow link.
        """
        due = []
        held_back = False
        for call in self._calls.values():
            is_push = call.name == p.Push.__name__
            if call.sent_at is None and call.not_before > now:
                # Asked to wait: what was said after it must not overtake it. Trajectories have no order.
                held_back = held_back or not is_push
            elif call.sent_at is None and (is_push or not held_back):
                due.append(call)
        for call in sorted(due, key=lambda call: call.name == p.Push.__name__):
            try:
                socket.send_multipart(call.frames, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            call.sent_at = now
        return False

    def _wait(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], has_unsent: bool, wait_s: float) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN | (zmq.POLLOUT if has_unsent else 0))
        poller.register(monitor, zmq.POLLIN)
        poller.register(self._wake.fd, zmq.POLLIN)
        if any(call.not_before > time.monotonic() for call in self._calls.values()):
            wait_s = min(wait_s, _RETRY_S)
        ready = dict(poller.poll(max(0, int(wait_s * 1000))))
        if self._wake.fd in ready:
            self._wake.clear()
        if monitor in ready:
            event = recv_monitor_message(monitor)["event"]
            if event == zmq.EVENT_DISCONNECTED:
                log.warning("no word from the buffer service at %s; connecting anew", self.address)
            else:
                # A new connection: what was sent on an older one may be lost.
                for call in self._calls.values():
                    call.sent_at = None
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard_at = self._answered_at = time.monotonic()
            self._receive(frames)

    def _receive(self, frames: list[bytes]) -> None:
        body = frames[1] if len(frames) > 1 else b""
        try:
            envelope = p.decode(frames[0])
        except msgspec.DecodeError as error:
            log.warning("an unreadable reply from the buffer service at %s: %s", self.address, error)
            return
        call = self._calls.get(envelope.request_id)
        if call is None:
            return  # The answer to a request that was sent twice.
        reply = envelope.message
        if not isinstance(reply, p.Reply) or envelope.body_checksum != p.checksum(body):
            log.warning("a damaged reply to %s from %s; asking again", call.name, self.address)
            call.sent_at = None
        elif isinstance(reply, p.Refused) and reply.retry:
            self._try_again(call, reply.reason)
        else:
            del self._calls[call.request_id]
            if isinstance(reply, p.Refused):
                text = f"the buffer service at {self.address} refused {call.name}: {reply.reason}"
                settle(call.future, BufferRefused(text))
            else:
                settle(call.future, (reply, body))

    def _try_again(self, call: _Call, reason: str) -> None:
        """The service lives, but cannot serve the request now: wait a little longer each time."""
        if call.num_refused in (1, 60):
            log.warning("the buffer service at %s lets %s wait: %s", self.address, call.name, reason)
        now = time.monotonic()
        call.sent_at, call.not_before = None, now + min(_RETRY_S * 2 ** min(call.num_refused, 8), _MAX_RETRY_S)
        call.num_refused += 1
        call.gives_up_at = max(call.gives_up_at, now + self._give_up_after_s)

    def _fail(self, call: _Call, why: str) -> None:
        self._calls.pop(call.request_id, None)
        text = f"the buffer service at {self.address} {why}. Is its process alive? Its log is in the run folder"
        settle(call.future, BufferUnavailable(text))

    def _end(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        with self._inbox.lock:
            self._inbox.ended = True
        self._take()
        for call in list(self._calls.values()):
            self._fail(call, f"had not answered {call.name} when the client was closed")
        self._ended(BufferUnavailable(f"the client of the buffer service at {self.address} was closed"))
        monitor.close()
        socket.close()
        self._context.term()
        self._wake.close()
