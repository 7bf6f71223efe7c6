"""RpcClient: one thread that owns a socket, sends requests, pairs replies with them, and sends again what was lost.

A request is sent again with its number if it is not answered in time, if the connection was made anew, and if it or its
answer came damaged. Requests are idempotent, so the service may be killed and restarted at any time.
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

from common.rpc.auth import ClientKeys
from common.rpc.messages import DAMAGED, RETRY, Asker, Message, Protocol, Refused, Working, checksum

log = logging.getLogger(__name__)

_RETRY_S = 0.1
_MAX_RETRY_S = 1.0
_BUSY_FACTOR = 3
_TICK_S, _STILL_S = 0.5, 1.0
_MAX_WORK_S = 600.0
"""Longest time for which a service may say that it works on a request."""
_MAX_DAMAGED = 8
"""A request that came damaged so often fails: something on the way changes every message."""
_MAX_PATIENCE_FACTOR = 64
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
    """What the futures of a client fail with."""

    refused: Callable[[Refused, str], Exception]
    """Called with a refusal and the sentence about it."""
    unavailable: Callable[[str], Exception]
    """Called on a timeout, or if the client is closed."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a client waits before it does what."""

    resend_s: float
    """Without an answer a request is sent again; without any sign of the service over a new connection, after twice as
    long each time: a slow link must not be cut again and again."""
    give_up_s: float
    """Timeout of a request."""
    heartbeat_s: float
    """Seconds without a heartbeat after which the client reconnects."""


@dataclass(eq=False)
class _Call:
    request_id: int
    message: Message
    frames: list[bytes | memoryview]
    future: Future[Answer]
    wait_s: float
    asked_at: float
    gives_up_at: float
    sent_at: float | None = None
    """None while it waits to be sent."""
    not_before: float = 0.0
    num_refused: int = 0
    """How often the service said to try again."""
    num_damaged: int = 0

    @property
    def name(self) -> str:
        return type(self.message).__name__


class RpcClient:
    """Requests in, futures out. For any thread."""

    def __init__(
        self,
        protocol: Protocol,
        address: str,
        run_id: str,
        *,
        asker: Asker,
        patience: Patience,
        errors: RpcErrors,
        keys: ClientKeys | None = None,
        pump: Callable[[], float | None] = lambda: None,
        ended: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        """Start the IO thread of a client of the service at an address of `RpcServer.bind`.

        The thread calls `pump` in every round, which may submit, and returns the seconds until it is to be called again
        (None: when woken). At its end it calls `ended`.
        """
        self.address = address
        self._protocol = protocol
        self._run_id = run_id
        self._asker = asker
        self._patience = patience
        self._errors = errors
        self._keys = keys
        self._pump = pump
        self._ended = ended
        self._lock = threading.Lock()
        self._submitted: deque[_Call] = deque()
        """Under the lock; the IO thread moves them to `_calls`."""
        self._closing_at: float | None = None
        self._calls: dict[int, _Call] = {}
        # not from 1: an answer to an earlier process with this connection must fit no question of this one
        self._numbers = itertools.count(secrets.randbits(48))
        self._wake = _Wake()
        self._context = zmq.Context()
        self._looked_at = self._heard_at = self._answered_at = time.monotonic()
        self._patience_factor = 1
        self._who = f"the {protocol.service} at {address}"
        self.put_off_because = ""
        """Why the service last asked to try again later; '' if it has answered since."""
        self.has_ended = False
        try:
            self._open()
        except zmq.ZMQError:
            self._context.destroy()
            self._wake.close()
            raise
        self._thread = threading.Thread(target=self._run, name=f"{asker.name} to {protocol.service}", daemon=True)
        self._thread.start()

    @property
    def heard_at(self) -> float:
        return self._answered_at

    def submit(
        self,
        message: Message,
        body: bytes | memoryview = b"",
        *,
        wait_s: float = 0.0,
        num_before: int = 0,
        closing: bool = False,
    ) -> Future[Answer]:
        """Send a request; the future fails as `errors` say, and a cancelled one is not sent again.

        Args:
            message: the request.
            body: bytes, or nothing; must not change until the answer is there.
            wait_s: added to the timeout.
            num_before: requests whose answers have to come first; each adds a timeout.
            closing: allow it while the client closes: for what `pump` still has to send.
        """
        future: Future[Answer] = Future()
        now = time.monotonic()
        with self._lock:
            if self.has_ended or (self._closing_at is not None and not closing):
                raise self._errors.unavailable(f"the client of {self._who} is closed")
            number = next(self._numbers)
            header = self._protocol.encode(number, message, body, run_id=self._run_id, asker=self._asker)
            frames = [header, *([body] if len(body) else [])]
            gives_up_at = now + self._patience.give_up_s * (1 + num_before) + wait_s
            self._submitted.append(_Call(number, message, frames, future, wait_s, now, gives_up_at))
        self.wake()
        return future

    def ask(self, message: Message, body: bytes | memoryview = b"") -> Answer:
        return self.submit(message, body).result(_MAX_WORK_S + self._patience.give_up_s + _END_S)

    def stream(self, asks: Iterable[Ask], *, window: int) -> Iterator[tuple[Ask, Answer]]:
        """Ask many things, of which `window` may be unanswered; the answers come in the order of the questions."""
        sent: deque[tuple[Ask, Future[Answer]]] = deque()
        questions = iter(asks)
        try:
            while True:
                for ask in itertools.islice(questions, window - len(sent)):
                    sent.append((ask, self.submit(ask.message, ask.body, num_before=len(sent))))
                if not sent:
                    return
                ask, future = sent[0]
                answer = future.result(_MAX_WORK_S + (1 + window) * self._patience.give_up_s + _END_S)
                sent.popleft()
                yield ask, answer
        finally:
            for _, future in sent:
                future.cancel()

    def wake(self) -> None:
        self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for what is outstanding, fail the rest, and end the thread. May be called twice."""
        with self._lock:
            if self.has_ended:
                return
            self._closing_at = time.monotonic() + timeout_s
        self.wake()
        self._thread.join(timeout_s + _END_S)
        if self._thread.is_alive():
            raise self._errors.unavailable(
                f"the IO thread of the client of {self._who} did not end in {timeout_s + _END_S} s"
            )

    # --- the IO thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                closing_at = self._closing_at
                wake_in_s = self._pump()
                self._take()
                now = time.monotonic()
                self._pass_over_standstill(now)
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
            (zmq.SNDBUF, 256 * 2**10),  # a heartbeat waits behind what the system holds
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 400),
            (zmq.CONNECT_TIMEOUT, 500),
            (zmq.HANDSHAKE_IVL, 1000),
            (zmq.HEARTBEAT_IVL, int(self._patience.heartbeat_s * 250)),
            (zmq.HEARTBEAT_TIMEOUT, int(self._patience.heartbeat_s * 1000)),
        ):
            self._socket.setsockopt(option, value)
        if self._keys is not None:
            self._keys.lock(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(self.address)
        self._heard_at = time.monotonic()

    def _take(self) -> None:
        with self._lock:
            self._calls |= {call.request_id: call for call in self._submitted}
            self._submitted.clear()

    def _pass_over_standstill(self, now: float) -> None:
        """Time in which this process was stopped, or had no core, is no silence of the service: nothing was read."""
        stood_still_s, self._looked_at = now - self._looked_at - _TICK_S, now
        if stood_still_s < _STILL_S:
            return
        for call in self._calls.values():
            lost_s = min(stood_still_s, now - call.asked_at)
            call.gives_up_at = max(call.gives_up_at, min(call.gives_up_at + lost_s, call.asked_at + _MAX_WORK_S))
            if call.sent_at is not None:
                call.sent_at += stood_still_s
        self._heard_at = min(now, self._heard_at + stood_still_s)

    def _expire(self, now: float) -> bool:
        """Fail what waited too long, mark what is to be sent again; True where the connection seems dead."""
        dead = False
        for call in list(self._calls.values()):
            if call.future.cancelled():
                del self._calls[call.request_id]
            elif now >= call.gives_up_at:
                self._fail(call, f"did not answer {call.name} for {round(call.gives_up_at - call.asked_at, 1):g} s")
            elif call.sent_at is not None and now - call.sent_at > self._patience_s(call):
                dead = dead or self._heard_at < call.sent_at
                call.sent_at = None
        if dead:
            log.info("no word from %s; connecting anew", self._who)
            self._patience_factor = min(2 * self._patience_factor, _MAX_PATIENCE_FACTOR)
            self._send_all_again()
        return dead

    def _send_all_again(self) -> None:
        for call in self._calls.values():
            call.sent_at = None

    def _patience_s(self, call: _Call) -> float:
        is_alive = call.sent_at is not None and self._heard_at > call.sent_at
        return self._patience.resend_s * max(self._patience_factor, _BUSY_FACTOR if is_alive else 1) + call.wait_s

    def _send_due(self, now: float) -> bool:
        """Send what waits, bulk last; True: the socket would not take all of it.

        It takes a few messages only, so that a short request does not wait behind all bulk on a slow link.
        """
        due = []
        held_back = False
        for call in self._calls.values():
            is_bulk = call.message.is_bulk
            if call.sent_at is None and call.not_before > now:
                # Asked to wait: what was said after it must not overtake it. Bulk has no order.
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
        ready = dict(poller.poll(max(0, int(min(wait_s, self._patience.resend_s / 2) * 1000))))
        if self._wake.fd in ready:
            self._wake.clear()
        if self._monitor in ready:
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED:
                log.warning("no word from %s; connecting anew", self._who)
            else:
                self._send_all_again()
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._heard_at = self._answered_at = time.monotonic()
            self._receive([frame.buffer for frame in frames])

    def _receive(self, frames: list[memoryview]) -> None:
        body = frames[1] if len(frames) > 1 else memoryview(b"")
        try:
            envelope = self._protocol.decode(frames[0])
        except msgspec.DecodeError as error:
            log.warning("an unreadable reply from %s: %s", self._who, error)
            sent = [call for call in self._calls.values() if call.sent_at is not None]
            if sent:  # most likely it was meant for the one that waits longest; to ask again harms nobody
                self._send_again(min(sent, key=lambda call: call.sent_at or 0.0), f"the header of its answer: {error}")
            return
        call = self._calls.get(envelope.request_id)
        if call is None:
            return  # The answer to a request that was sent twice, or that nobody waits for any more.
        reply = envelope.message
        if not isinstance(reply, self._protocol.replies) or envelope.body_checksum != checksum(body):
            self._send_again(call, f"its answer of {len(body)} bytes does not match its checksum")
        elif isinstance(reply, Working):
            call.gives_up_at = min(time.monotonic() + self._patience.give_up_s, call.asked_at + _MAX_WORK_S)
        elif isinstance(reply, Refused) and reply.kind == DAMAGED:
            self._send_again(call, reply.reason)
        elif isinstance(reply, Refused) and reply.kind == RETRY:
            self._try_later(call, reply.reason)
        else:
            self._settle(call, reply, body)

    def _settle(self, call: _Call, reply: Any, body: memoryview) -> None:  # noqa: ANN401 -- one of the protocol's
        del self._calls[call.request_id]
        self.put_off_because = ""
        if call.sent_at is not None and time.monotonic() - call.sent_at < self._patience.resend_s:
            self._patience_factor = 1  # the link is fast again
        if isinstance(reply, Refused):
            text = f"{self._who} refused {call.name}: {reply.reason}"
            settle(call.future, self._errors.refused(reply, text))
        else:
            settle(call.future, Answer(reply, body))

    def _send_again(self, call: _Call, what: str) -> None:
        call.num_damaged += 1
        log.warning("%s: %s was damaged on its way (%s); asking again", self._who, call.name, what)
        if call.num_damaged < _MAX_DAMAGED:
            call.sent_at = None
            return
        del self._calls[call.request_id]
        text = f"{self._who}: {call.name} was damaged on its way {call.num_damaged} times ({what}). "
        text += "Something between the machines changes bytes"
        settle(call.future, self._errors.refused(Refused(what, DAMAGED), text))

    def _try_later(self, call: _Call, reason: str) -> None:
        """The service lives, but cannot serve the request now: wait a little longer each time."""
        if call.num_refused in (1, 60):
            log.warning("%s lets %s wait: %s", self._who, call.name, reason)
        self.put_off_because, now = reason, time.monotonic()
        call.sent_at, call.not_before = None, now + min(_RETRY_S * 2 ** min(call.num_refused, 8), _MAX_RETRY_S)
        call.num_refused += 1
        call.gives_up_at = max(call.gives_up_at, now + self._patience.give_up_s)

    def _fail(self, call: _Call, why: str) -> None:
        self._calls.pop(call.request_id, None)
        text = f"{self._who} {why}. Is its process alive? Its log is in the run folder"
        settle(call.future, self._errors.unavailable(text))

    def _end(self) -> None:
        with self._lock:
            self.has_ended = True
        self._take()
        for call in list(self._calls.values()):
            self._fail(call, f"had not answered {call.name} when the client was closed")
        self._ended(self._errors.unavailable(f"the client of {self._who} was closed"))
        self._monitor.close()
        self._socket.close()
        self._context.term()
        self._wake.close()


class _Wake:
    """Something to poll beside sockets. `set` is for any thread, the rest for the one that polls `fd`."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._is_closed = False

    def set(self) -> None:
        with self._lock:  # after `close` the number may be that of another file
            if not self._is_closed:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self.fd)


def settle(future: Future[R], outcome: R | BaseException) -> None:
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
