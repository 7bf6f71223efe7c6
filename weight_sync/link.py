"""Link: a connection to the weight service that asks again whatever is lost or damaged, and is made anew where needed.

Every request may be sent again, so the service may be killed and restarted in the middle of anything.
"""

from __future__ import annotations

import errno
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import zmq

from common.curve import ClientKeys, is_loopback
from weight_sync import protocol as p
from weight_sync.errors import PublishFailed, TransferFailed, WeightsCorrupt, WeightsGone

log = logging.getLogger(__name__)

SILENCE_S = 2.0
"""After so long without an answer the connection is made anew; twice as long each time that it did not help."""
_MAX_WORK_S = 600.0
"""What the service still works on after so long is given up."""
_MAX_DAMAGED = 4
"""A message is sent so often, where it comes damaged each time."""


class Ask(NamedTuple):
    """A request and its body."""

    message: p.Request
    body: bytes | memoryview = b""


class Answer(NamedTuple):
    """The reply to a request, and its body."""

    ask: Ask
    reply: p.Reply
    body: memoryview


@dataclass(eq=False)
class _Pending:
    request_id: int
    ask: Ask
    frames: list[bytes | memoryview]
    asked_at: float
    num_damaged: int = 0
    is_taken: bool = False
    """The service has it and works on it: it is asked again later, over the same connection."""
    answer: Answer | None = None


class Link:
    """Asks, and waits for the answers. For one thread at a time."""

    def __init__(
        self,
        address: str,
        run_id: str,
        timeout_s: float,
        *,
        keys: ClientKeys | None = None,
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is sent yet.

        Args:
            address: of the service, tcp://HOST:PORT.
            run_id: of the run; the service refuses others.
            timeout_s: give up when nothing at all was heard for so long.
            keys: of the run's clients; None where the service takes everybody.
            silence_s: connect anew when nothing was heard for so long.
            clock: monotonic, in seconds.
        """
        self.address = address
        self._run_id = run_id
        self._timeout_s = timeout_s
        self._keys = keys
        self._silence_s = min(silence_s, timeout_s)
        self._clock = clock
        # not from 1: an answer from an earlier connection's time must fit no question of this one
        self._numbers = itertools.count(secrets.randbits(48))
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self.num_connects = 0

    def ask(self, message: p.Request, body: bytes | memoryview = b"", *, timeout_s: float | None = None) -> Answer:
        """One question.

        Raises:
            TransferFailed: no answer in time, or the service refused.
            WeightsGone, WeightsCorrupt, PublishFailed, WholeFilesNeeded, OSError: what the service found.
        """
        return next(self.stream([Ask(message, body)], timeout_s=timeout_s))

    def stream(self, asks: Iterable[Ask], *, window: int = 1, timeout_s: float | None = None) -> Iterator[Answer]:
        """Ask many things, `window` of them at once; the answers come in the order of the questions.

        Args:
            asks: the questions; taken as there is room for them.
            window: how many may be unanswered.
            timeout_s: instead of that of the link.

        Raises:
            As `ask`.
        """
        rest = iter(asks)
        pending: deque[_Pending] = deque()
        is_asking = True
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        watch = _Watch(self._clock, min(self._silence_s, timeout_s), timeout_s)
        while True:
            while is_asking and len(pending) < window:
                ask = next(rest, None)
                if ask is None:
                    is_asking = False
                    break
                pending.append(self._pending(ask))
                self._send(pending[-1])
            if not pending:
                return
            if (answer := pending[0].answer) is not None:
                pending.popleft()
                yield answer
                watch.rest()
                continue
            self._hear(pending, watch)

    def close(self) -> None:
        """Let go of the connection. May be called twice."""
        self._drop()
        self._context.term()

    def _pending(self, ask: Ask) -> _Pending:
        number = next(self._numbers)
        header = p.encode(p.Envelope(number, self._run_id, ask.message, p.checksum(ask.body)))
        return _Pending(number, ask, [header, *([ask.body] if len(ask.body) else [])], self._clock())

    def _hear(self, pending: deque[_Pending], watch: _Watch) -> None:
        """Wait for an answer, or until it is time to ask again."""
        socket = self._socket or self._connect()
        if socket.poll(int(watch.wait_s() * 1000) + 1):
            while True:
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    return
                watch.heard()
                self._take([frame.buffer for frame in frames], pending)
        if watch.is_over():
            oldest = pending[0].ask.message
            raise TransferFailed(
                f"the weight service at {self.address} did not answer {oldest} for {watch.timeout_s:g} s. "
                f"Is its process alive? Its log is in the run folder{_loopback_hint(self.address)}"
            )
        if watch.is_silent():
            watch.connected()
            if any(each.is_taken for each in pending):
                log.debug("the weight service at %s still works", self.address)
            else:
                log.info("no word from the weight service at %s; connecting anew", self.address)
                self._drop()
            for each in pending:
                each.is_taken = False
                self._send(each)

    def _take(self, frames: list[memoryview], pending: deque[_Pending]) -> None:
        unanswered = [each for each in pending if each.answer is None]
        try:
            envelope = p.decode(frames[0])
        except msgspec.DecodeError as error:
            # one connection answers in order, so it was most likely meant for the first
            if unanswered:
                self._again(unanswered[0], f"the header of its answer: {error}")
            return
        found = next((each for each in unanswered if each.request_id == envelope.request_id), None)
        if found is None:
            return  # the answer to a request that was sent twice
        reply = envelope.message
        body = frames[1] if len(frames) > 1 else memoryview(b"")
        if not isinstance(reply, p.Reply) or envelope.body_checksum != p.checksum(body):
            self._again(found, f"its answer of {len(body)} bytes does not match its checksum")
        elif isinstance(reply, p.Working):
            found.is_taken = True
            if self._clock() - found.asked_at > _MAX_WORK_S:
                raise TransferFailed(f"the weight service at {self.address} works on {found.ask.message} for too long")
        elif isinstance(reply, p.Refused) and reply.kind == "damaged":
            self._again(found, reply.reason)
        else:
            if isinstance(reply, p.Refused):
                raise self._error(reply, found.ask.message)
            found.answer = Answer(found.ask, reply, body)

    def _again(self, call: _Pending, what: str) -> None:
        call.num_damaged += 1
        log.warning("%s: %s was damaged on its way (%s); asking again", self.address, call.ask.message, what)
        if call.num_damaged >= _MAX_DAMAGED:
            raise WeightsCorrupt(
                f"the weight service at {self.address}: {call.ask.message} was damaged on its way {call.num_damaged} "
                f"times ({what}). Something between the machines changes bytes"
            )
        self._send(call)

    def _error(self, refused: p.Refused, message: p.Request) -> Exception:
        text = f"the weight service at {self.address} refused {message}: {refused.reason}"
        match refused.kind:
            case "gone":
                return WeightsGone(text)
            case "corrupt":
                return WeightsCorrupt(text)
            case "publish":
                return PublishFailed(text)
            case "whole":
                return p.WholeFilesNeeded(text)
            case "disk":
                return OSError(refused.errno or errno.EIO, text)
            case _:
                return TransferFailed(text)

    def _send(self, call: _Pending) -> None:
        socket = self._socket or self._connect()
        try:
            socket.send_multipart(call.frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            log.debug("nobody takes messages at %s yet", self.address)  # sent again after a silence

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, p.MAX_DOCUMENT_BYTES),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 400),
            (zmq.CONNECT_TIMEOUT, 2000),
            (zmq.HANDSHAKE_IVL, 2000),
            (zmq.HEARTBEAT_IVL, 2000),
            (zmq.HEARTBEAT_TIMEOUT, 20000),
        ):
            socket.setsockopt(option, value)
        if self._keys is not None:
            self._keys.lock(socket)
        socket.connect(self.address)
        self.num_connects += 1
        return socket

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _loopback_hint(address: str) -> str:
    host = address.removeprefix("tcp://").rsplit(":", 1)[0]
    if not is_loopback(host):
        return ""
    return (
        f". {host} is this machine alone: does the service run on another one, [weight_sync] host has to be an "
        "interface of that one which this machine reaches, for instance 0.0.0.0 or its private address"
    )


class _Watch:
    """For how long nothing was heard."""

    def __init__(self, clock: Callable[[], float], silence_s: float, timeout_s: float) -> None:
        self._clock = clock
        self._first_s = self._silence_s = silence_s
        self.timeout_s = timeout_s
        self._heard_at = self._tried_at = clock()

    def heard(self) -> None:
        """The service lives."""
        self._heard_at = self._tried_at = self._clock()
        self._silence_s = self._first_s

    rest = heard
    """What the caller did with an answer is no silence of the service."""

    def connected(self) -> None:
        """Tried anew: a slow link, whose chunks take longer than this, must not be cut again and again."""
        self._tried_at = self._clock()
        self._silence_s *= 2

    def wait_s(self) -> float:
        now = self._clock()
        return max(0.0, min(self._tried_at + self._silence_s, self._heard_at + self.timeout_s) - now)

    def is_silent(self) -> bool:
        return self._clock() - self._tried_at >= self._silence_s

    def is_over(self) -> bool:
        return self._clock() - self._heard_at >= self.timeout_s
