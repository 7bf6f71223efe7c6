"""RpcClient: one thread that owns a socket, sends requests, matches replies, and resends lost requests.

A request is resent with its number on a timeout, after a reconnect, and if the request or its reply arrives damaged.
Requests are idempotent, so the service may be killed and restarted at any time.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from leeway.common.rpc.auth import ClientKeys
from leeway.common.rpc.messages import DAMAGED, RETRY, ClientIdentity, Message, Protocol, Refused, Working, checksum

log = logging.getLogger(__name__)

_RETRY_S = 0.1
_MAX_RETRY_S = 1.0
_BUSY_FACTOR = 3
_TICK_S, _STALL_S = 0.5, 1.0
_MAX_WORK_S = 600.0
"""Maximum seconds for which `Working` replies extend the timeout of a request."""
_MAX_DAMAGED = 8
"""Number of damaged transfers after which a request fails."""
_MAX_RESEND_FACTOR = 64
_END_S = 10.0

R = TypeVar("R")


class Ask(NamedTuple):
    message: Message
    body: bytes | memoryview = b""


class Answer(NamedTuple):
    """The reply to a request, and its body."""

    reply: Any
    body: memoryview


class RpcErrors(NamedTuple):
    """Exceptions that the futures of a client raise."""

    refused: Callable[[Refused, str], Exception]
    """Creates the exception for a refusal, from the refusal and a message."""
    unavailable: Callable[[str], Exception]
    """Creates the exception for a timeout or a closed client, from a message."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Timeouts of a client, in seconds."""

    resend_s: float
    """Time without a reply after which a request is resent. If the service sent nothing at all, the client also
    reconnects and doubles this time, so that a slow link is not cut repeatedly."""
    request_s: float
    """Timeout of a request."""
    heartbeat_s: float
    """Time without a heartbeat after which the client reconnects."""


@dataclass(eq=False)
class _Call:
    request_id: int
    message: Message
    frames: list[bytes | memoryview]
    future: Future[Answer]
    wait_s: float
    submitted_at: float
    deadline: float
    sent_at: float | None = None
    """Time of the last send; None while the request is queued."""
    not_before: float = 0.0
    num_refused: int = 0
    """Number of RETRY replies."""
    num_damaged: int = 0

    @property
    def name(self) -> str:
        return type(self.message).__name__


class RpcClient:
    """Sends requests and returns futures. Thread-safe."""

    def __init__(
        self,
        protocol: Protocol,
        address: str,
        run_id: str,
        *,
        identity: ClientIdentity,
        timeouts: Timeouts,
        errors: RpcErrors,
        keys: ClientKeys | None = None,
        pump: Callable[[], float | None] = lambda: None,
        ended: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        """Start the IO thread of a client; `address` is the return value of `RpcServer.bind`.

        The thread calls `pump` in every iteration. `pump` may submit requests, and returns the seconds until its next
        call (None if only `wake` calls it again). The thread calls `ended` when it exits.
        """
        self.address = address
        self._protocol = protocol
        self._run_id = run_id
        self._identity = identity
        self._timeouts = timeouts
        self._errors = errors
        self._keys = keys
        self._pump = pump
        self._ended = ended
        self._lock = threading.Lock()
        self._submitted: deque[_Call] = deque()
        """New calls, guarded by the lock; the IO thread moves them to `_calls`."""
        self._closing_at: float | None = None
        self._calls: dict[int, _Call] = {}
        # start at a random number, so that a reply to an earlier process cannot match a request of this process
        self._numbers = itertools.count(secrets.randbits(48))
        self._wake = _Wake()
        self._context = zmq.Context()
        self._checked_at = self._link_seen_s = self.last_seen_s = time.monotonic()
        """`last_seen_s` is the time of the last message; `_link_seen_s` also counts a new connection and stalls."""
        self._resend_factor = 1
        self._service = f"the {protocol.service} at {address}"
        self.retry_reason = ""
        """Reason of the last RETRY reply; '' if a request has completed after that reply."""
        self.has_ended = False
        try:
            self._open()
        except zmq.ZMQError:
            self._context.destroy()
            self._wake.close()
            raise
        self._thread = threading.Thread(target=self._run, name=f"{identity.name} to {protocol.service}", daemon=True)
        self._thread.start()

    def submit(
        self,
        message: Message,
        body: bytes | memoryview = b"",
        *,
        wait_s: float = 0.0,
        num_before: int = 0,
        closing: bool = False,
    ) -> Future[Answer]:
        """Send a request, and return its future, which raises exceptions of `errors`. Cancelling it stops resends.

        Args:
            message: the request.
            body: bytes of the body; must not change until the reply has arrived.
            wait_s: seconds that are added to the timeout.
            num_before: number of requests in flight that are answered first; each adds `request_s` to the timeout.
            closing: accept the request even while the client closes; used for requests of `pump`.
        """
        future: Future[Answer] = Future()
        now = time.monotonic()
        with self._lock:
            if self.has_ended or (self._closing_at is not None and not closing):
                raise self._errors.unavailable(f"the client of {self._service} is closed")
            number = next(self._numbers)
            header = self._protocol.encode(number, message, body, run_id=self._run_id, client=self._identity)
            frames = [header, *([body] if len(body) else [])]
            deadline = now + self._timeouts.request_s * (1 + num_before) + wait_s
            self._submitted.append(_Call(number, message, frames, future, wait_s, now, deadline))
        self.wake()
        return future

    def ask(self, message: Message, body: bytes | memoryview = b"") -> Answer:
        return self.submit(message, body).result(_MAX_WORK_S + self._timeouts.request_s + _END_S)

    def stream(self, asks: Iterable[Ask], *, window: int) -> Iterator[tuple[Ask, Answer]]:
        """Send many requests, up to `window` in flight; yield the replies in the order of the requests."""
        sent: deque[tuple[Ask, Future[Answer]]] = deque()
        requests = iter(asks)
        try:
            while True:
                for ask in itertools.islice(requests, window - len(sent)):
                    sent.append((ask, self.submit(ask.message, ask.body, num_before=len(sent))))
                if not sent:
                    return
                ask, future = sent[0]
                answer = future.result(_MAX_WORK_S + (1 + window) * self._timeouts.request_s + _END_S)
                sent.popleft()
                yield ask, answer
        finally:
            for _, future in sent:
                future.cancel()

    def wake(self) -> None:
        self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for requests in flight, fail all others, and stop the thread. Idempotent."""
        with self._lock:
            if self.has_ended:
                return
            self._closing_at = time.monotonic() + timeout_s
        self.wake()
        self._thread.join(timeout_s + _END_S)
        if self._thread.is_alive():
            raise self._errors.unavailable(
                f"the IO thread of the client of {self._service} did not exit within {timeout_s + _END_S} s"
            )

    # --- the IO thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                closing_at = self._closing_at
                wake_in_s = self._pump()
                self._accept_submitted()
                now = time.monotonic()
                self._extend_after_stall(now)
                if closing_at is not None and (not self._calls or now >= closing_at):
                    return
                if self._expire(now):
                    self._socket.close()
                    self._monitor.close()
                    self._open()
                has_unsent = self._send_due(now)
                self._wait(has_unsent, _TICK_S if wake_in_s is None else min(_TICK_S, wake_in_s))
        finally:
            self._end()

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IMMEDIATE, 1),
            (zmq.IPV6, "[" in self.address),
            (zmq.SNDHWM, 4),
            (zmq.SNDBUF, 256 * 2**10),  # small, because heartbeats queue behind this buffer
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 400),
            (zmq.CONNECT_TIMEOUT, 500),
            (zmq.HANDSHAKE_IVL, 1000),
            (zmq.HEARTBEAT_IVL, int(self._timeouts.heartbeat_s * 250)),
            (zmq.HEARTBEAT_TIMEOUT, int(self._timeouts.heartbeat_s * 1000)),
        ):
            self._socket.setsockopt(option, value)
        if self._keys is not None:
            self._keys.lock(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(self.address)
        self._link_seen_s = time.monotonic()

    def _accept_submitted(self) -> None:
        with self._lock:
            self._calls |= {call.request_id: call for call in self._submitted}
            self._submitted.clear()

    def _extend_after_stall(self, now: float) -> None:
        """Extend timeouts by the time in which this process was stopped or had no CPU, and thus received nothing."""
        stalled_s, self._checked_at = now - self._checked_at - _TICK_S, now
        if stalled_s < _STALL_S:
            return
        for call in self._calls.values():
            lost_s = min(stalled_s, now - call.submitted_at)
            call.deadline = max(call.deadline, min(call.deadline + lost_s, call.submitted_at + _MAX_WORK_S))
            if call.sent_at is not None:
                call.sent_at += stalled_s
        self._link_seen_s = min(now, self._link_seen_s + stalled_s)

    def _expire(self, now: float) -> bool:
        """Fail expired requests and mark requests to resend; return whether the connection seems dead."""
        dead = False
        for call in list(self._calls.values()):
            if call.future.cancelled():
                del self._calls[call.request_id]
            elif now >= call.deadline:
                self._fail(call, f"did not reply to {call.name} for {round(call.deadline - call.submitted_at, 1):g} s")
            elif call.sent_at is not None and now - call.sent_at > self._resend_after_s(call):
                dead = dead or self._link_seen_s < call.sent_at
                call.sent_at = None
        if dead:
            log.info("lost the connection to %s; reconnecting", self._service)
            self._resend_factor = min(2 * self._resend_factor, _MAX_RESEND_FACTOR)
            self._resend_all()
        return dead

    def _resend_all(self) -> None:
        for call in self._calls.values():
            call.sent_at = None

    def _resend_after_s(self, call: _Call) -> float:
        is_alive = call.sent_at is not None and self._link_seen_s > call.sent_at
        return self._timeouts.resend_s * max(self._resend_factor, _BUSY_FACTOR if is_alive else 1) + call.wait_s

    def _send_due(self, now: float) -> bool:
        """Send queued requests, bulk messages last; return whether the socket's queue was full before all were sent.

        The socket queues only a few messages, so that a short request does not wait for all bulk messages.
        """
        due = []
        held_back = False
        for call in self._calls.values():
            is_bulk = call.message.is_bulk
            if call.sent_at is None and call.not_before > now:
                # A request to be retried later blocks later requests, to keep their order, but not bulk messages.
                held_back = held_back or not is_bulk
            elif call.sent_at is None and (is_bulk or not held_back):
                due.append(call)
        for call in sorted(due, key=lambda call: call.message.is_bulk):
            try:
                self._socket.send_multipart(call.frames, zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            call.sent_at = now
        return False

    def _wait(self, has_unsent: bool, wait_s: float) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if has_unsent else 0))
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._wake.fd, zmq.POLLIN)
        if any(call.not_before > time.monotonic() for call in self._calls.values()):
            wait_s = min(wait_s, _RETRY_S)
        ready = dict(poller.poll(max(0, int(min(wait_s, self._timeouts.resend_s / 2) * 1000))))
        if self._wake.fd in ready:
            self._wake.clear()
        if self._monitor in ready:
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED:
                log.warning("lost the connection to %s; reconnecting", self._service)
            else:
                self._resend_all()
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._link_seen_s = self.last_seen_s = time.monotonic()
            self._receive([frame.buffer for frame in frames])

    def _receive(self, frames: list[memoryview]) -> None:
        body = frames[1] if len(frames) > 1 else memoryview(b"")
        try:
            envelope = self._protocol.decode(frames[0])
        except msgspec.DecodeError as error:
            log.warning("unreadable reply from %s: %s", self._service, error)
            sent = [call for call in self._calls.values() if call.sent_at is not None]
            if sent:  # the reply most likely belongs to the oldest request, and resending is harmless
                self._resend(min(sent, key=lambda call: call.sent_at or 0.0), f"the header of its reply: {error}")
            return
        call = self._calls.get(envelope.request_id)
        if call is None:
            return  # the request was answered after a resend, has failed, or was cancelled
        reply = envelope.message
        if not isinstance(reply, self._protocol.replies) or envelope.body_checksum != checksum(body):
            self._resend(call, f"its reply of {len(body)} bytes does not match its checksum")
        elif isinstance(reply, Working):
            call.deadline = min(time.monotonic() + self._timeouts.request_s, call.submitted_at + _MAX_WORK_S)
        elif isinstance(reply, Refused) and reply.kind == DAMAGED:
            self._resend(call, reply.reason)
        elif isinstance(reply, Refused) and reply.kind == RETRY:
            self._try_later(call, reply.reason)
        else:
            self._resolve(call, reply, body)

    def _resolve(self, call: _Call, reply: Any, body: memoryview) -> None:  # noqa: ANN401 -- one of the protocol's
        del self._calls[call.request_id]
        self.retry_reason = ""
        if call.sent_at is not None and time.monotonic() - call.sent_at < self._timeouts.resend_s:
            self._resend_factor = 1  # the link is fast again
        if isinstance(reply, Refused):
            text = f"{self._service} refused {call.name}: {reply.reason}"
            resolve(call.future, self._errors.refused(reply, text))
        else:
            resolve(call.future, Answer(reply, body))

    def _resend(self, call: _Call, what: str) -> None:
        call.num_damaged += 1
        log.warning("%s: %s was damaged in transit (%s); resending", self._service, call.name, what)
        if call.num_damaged < _MAX_DAMAGED:
            call.sent_at = None
            return
        del self._calls[call.request_id]
        text = f"{self._service}: {call.name} was damaged in transit {call.num_damaged} times ({what}). "
        text += "Check the network between the machines, which corrupts data"
        resolve(call.future, self._errors.refused(Refused(what, DAMAGED), text))

    def _try_later(self, call: _Call, reason: str) -> None:
        """Retry a request that the service cannot serve yet, with exponential backoff."""
        if call.num_refused in (1, 60):
            log.warning("%s cannot serve %s yet; retrying: %s", self._service, call.name, reason)
        self.retry_reason, now = reason, time.monotonic()
        call.sent_at, call.not_before = None, now + min(_RETRY_S * 2 ** min(call.num_refused, 8), _MAX_RETRY_S)
        call.num_refused += 1
        call.deadline = max(call.deadline, now + self._timeouts.request_s)

    def _fail(self, call: _Call, why: str) -> None:
        self._calls.pop(call.request_id, None)
        text = f"{self._service} {why}. Check that this service is running; its log is in the run folder"
        resolve(call.future, self._errors.unavailable(text))

    def _end(self) -> None:
        with self._lock:
            self.has_ended = True
        self._accept_submitted()
        for call in list(self._calls.values()):
            self._fail(call, f"had not replied to {call.name} when the client was closed")
        self._ended(self._errors.unavailable(f"the client of {self._service} was closed"))
        self._monitor.close()
        self._socket.close()
        self._context.term()
        self._wake.close()


class _Wake:
    """Event that can be polled together with sockets. Only `set` may be called outside the thread that polls `fd`."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._is_closed = False

    def set(self) -> None:
        with self._lock:  # after `close`, another file may have this descriptor
            if not self._is_closed:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self.fd)


def resolve(future: Future[R], outcome: R | BaseException) -> None:
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
