"""BufferService: the only process that writes to the store; serves clients through a ZeroMQ ROUTER socket.

The service has one thread. Each turn receives all waiting messages and answers them in one transaction. The replies are
sent after the commit, so that under load many acknowledgements share one fsync.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import zmq
from msgspec.structs import replace

from leeway.buffer import protocol as p
from leeway.buffer.config import MAX_MESSAGE_MIB, BufferConfig
from leeway.buffer.core import Answer, BufferCore
from leeway.buffer.errors import BadBody, BufferRefused, CorruptRecord, InvalidRequest, StoreError, StoreFull
from leeway.buffer.ingest import Pushes
from leeway.buffer.schema import start_fault
from leeway.buffer.store import PORT, RESTORE, Store
from leeway.buffer.transaction import Transaction
from leeway.buffer.upkeep import LastSeen, Senders, Timers, Upkeep
from leeway.common.process import keep_freed_memory
from leeway.common.rpc.auth import ServiceKeys
from leeway.common.rpc.server import CannotBind, Rejected, Request, RpcServer
from leeway.common.run import RunFacts

log = logging.getLogger(__name__)

INBOX_BYTES = 256 * 2**20
"""Limit of unacknowledged bytes of all clients together; bounds the service's memory."""
_MAX_TURN_MESSAGES = 512
_MAX_TURN_BYTES = 4 * 2**20
"""Maximum bytes of one turn; a larger limit lets more messages share an fsync, a smaller limit sends replies sooner."""
_MAX_PARKED = 64
_IDLE_S = 0.2
"""Longest wait for messages, in seconds; bounds how late `stop` is noticed."""
_WARN_INTERVAL_S = 10.0
_FULL_PAUSE_S = 1.0
_FULL_REPORT_S = 5.0
"""Seconds after a pause for a full disk until clients have retried; the full disk is reported until then."""
_IDLE_CLIENT_S = 60.0
_MAX_CREDIT_ROWS = 1536
_LEAST_CREDIT = p.Credit(64, 2**20)


class _Pushed(NamedTuple):
    """Consecutive push requests, handled together."""

    requests: list[Request]
    opened: Pushes


Accepted = Request | _Pushed
Arrival = Accepted | Rejected
Invalid = tuple[str, str, int]
"""Sender, description and number of invalid messages."""


class _Parked(NamedTuple):
    """A draw that waits for groups; parked draws are keyed by connection and request id."""

    request: p.DrawRequest
    deadline: float


class _Outgoing(NamedTuple):
    identity: bytes
    request_id: int
    reply: p.Reply
    body: bytes | memoryview


class _Answers(NamedTuple):
    """Results of a transaction, except its changes of the store."""

    outbox: list[_Outgoing]
    parked: dict[tuple[bytes, int], _Parked]
    invalid: list[Invalid]


def keep_memory() -> None:
    """Reduce garbage collections, and keep freed memory instead of returning it after every turn.

    A turn allocates and frees about ten thousand small objects and a few large buffers, without reference cycles.
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    pa.set_memory_pool(pa.system_memory_pool())
    keep_freed_memory(largest=64 * 2**20, most=256 * 2**20)


class BufferService:
    """Service for the buffer of one run, stored in one folder."""

    def __init__(
        self,
        config: BufferConfig,
        facts: RunFacts,
        folder: Path,
        *,
        host: str | None = None,
        keys: ServiceKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the store. Raise StoreError as `Store` does, or if the configuration contradicts `facts`.

        `host` is the address to bind; None for a Unix socket. With keys, only holders of the run's client key connect.
        """
        self._host = host
        self._clock = clock
        self._core = BufferCore(config, facts, clock)
        self._store = Store(folder, facts, durability=config.durability)
        try:
            self._store.read(self._core.leases.restart)
            self._store.read(_refuse_damaged)
            with suppress(StoreFull):  # if the disk is full, a later start deletes the damaged rows
                self._store.write(self._core.groups.prompts.load)
        except CorruptRecord as error:
            self._store.close()
            raise StoreError(f"the buffer in {folder} cannot be served: {error}. {RESTORE.capitalize()}") from error
        self._upkeep = Upkeep(config, self._store, clock)
        self._credits = Credits(INBOX_BYTES)
        self._folder = folder
        self._rpc = RpcServer(
            p.PROTOCOL,
            facts.run_id,
            keys=keys,
            max_message_bytes=MAX_MESSAGE_MIB * 2**20,
            incoming=32,  # messages; credit bounds their bytes
            outgoing=1000,
            refuse_body=start_fault,
        )
        self._parked: dict[tuple[bytes, int], _Parked] = {}
        self._next_warning_at = 0.0
        self._senders = Senders()
        self._unreadable: Counter[str] = Counter()
        """Reason -> number of undecodable messages, which the transaction of the next request counts."""
        self._timers = Timers()
        self._full_until = 0.0
        """Time until which the disk is assumed to be full; only requests cause writes until then."""
        self._full_reason = ""
        self._last_seen = LastSeen(clock)

    def bind(self) -> str:
        """Bind and return the address for clients; reuses the port of the previous service of this folder.

        Raise StoreError if the address is in use or does not exist, or if the port file cannot be written.
        """
        try:
            return self._rpc.bind(self._host, self._folder / PORT)
        except CannotBind as error:
            raise StoreError(str(error)) from error

    def serve(self, stop: threading.Event) -> None:
        """Answer requests until `stop` is set; raise StoreError if the disk fails; clients then retry."""
        try:
            while not stop.is_set():
                self.turn()
        finally:
            self.close()

    def turn(self) -> None:
        """Wait for messages or a deadline, and answer all requests."""
        self._upkeep.run()
        accepted = self._answer_rejected(self._receive())
        due, now = self._core.leases.due_in_s(), self._clock()
        is_due = due is not None and due <= 0 and self._last_seen.is_complete(now)
        has_work = bool(self._parked) or is_due
        if not accepted and not (has_work and now >= self._full_until):
            return
        try:
            outbox, self._parked, invalid = self._commit(accepted)
        except StoreFull as error:
            outbox, self._parked, invalid = self._answer_on_full_disk(accepted, str(error))
        for each in invalid:
            self._senders.record_invalid(*each)
        self._timers.end("commit")
        for outgoing in outbox:
            self._rpc.answer(*outgoing)
        self._timers.end("acknowledge")

    def _answer_rejected(self, arrivals: list[Arrival]) -> list[Accepted]:
        """Answer and count the messages that were rejected without the store; return all other messages."""
        accepted: list[Accepted] = []
        for arrival in arrivals:
            if not isinstance(arrival, Rejected):
                accepted.append(arrival)
                continue
            identity, request_id, reply, peer, unreadable = arrival
            if unreadable:
                self._unreadable[unreadable] += 1
                self._senders.record_invalid(self._senders.name(identity, peer), f"failed validation: {unreadable}")
            elif reply is not None and reply.kind != p.RETRY:
                self._senders.record_invalid(self._senders.name(identity, peer), reply.reason)
            if reply is not None:
                self._rpc.answer(identity, request_id, reply)
        return accepted

    def _answer_on_full_disk(self, accepted: list[Accepted], reason: str) -> _Answers:
        """Ask for a retry of requests with data; try to answer the learner, because its requests free space."""
        now = self._clock()
        if now >= self._next_warning_at:
            log.warning("%s; clients retry until space is free", reason)
            self._next_warning_at = now + _WARN_INTERVAL_S
        self._full_until, self._full_reason = now + _FULL_PAUSE_S, reason
        # The store has undone the failed turn's changes of leases, so their deadlines restart too.
        self._store.read(self._core.leases.restart)
        data = [each for each in accepted if _has_data(each)]
        if data:
            others = [each for each in accepted if not _has_data(each)]
            try:
                answers = self._commit(others)
            except StoreFull:
                self._store.read(self._core.leases.restart)
            else:
                return answers._replace(outbox=answers.outbox + _retry_later(data, reason))
        return _Answers(_retry_later(accepted, reason), self._parked, [])

    def _commit(self, accepted: Sequence[Accepted]) -> _Answers:
        answers = self._store.write(lambda tx: self._answer(tx, accepted))
        if accepted:
            self._unreadable.clear()
        return answers

    def close(self) -> None:
        if not self._rpc.is_closed:
            self._rpc.close()
            self._store.close()

    def _receive(self) -> list[Arrival]:
        """Wait for messages or a deadline; receive and decode the messages."""
        now = self._clock()
        waits = [_IDLE_S, self._upkeep.due_in_s]
        if now >= self._full_until:
            waits += [parked.deadline - now for parked in self._parked.values()]
            due = self._core.leases.due_in_s()
            waits += [] if due is None else [max(due, self._last_seen.settles_in_s(now))]
        has_messages = self._rpc.poll(min(waits))
        self._last_seen.polled(now, min(waits))
        self._timers.end("wait")
        if not has_messages:
            self._last_seen.read(is_all=True)
            return []
        messages: list[list[zmq.Frame]] = []
        size = 0
        while len(messages) < _MAX_TURN_MESSAGES and size < _MAX_TURN_BYTES:
            frames = self._rpc.receive()
            if frames is None:
                break
            messages.append(frames)
            size += sum(map(len, frames))
        self._last_seen.read(is_all=len(messages) < _MAX_TURN_MESSAGES and size < _MAX_TURN_BYTES)
        requests = [self._rpc.open(frames) for frames in messages]
        self._timers.end("receive")
        arrivals = opened(requests, self._upkeep.watch.pushes_wait_for)
        self._timers.end("validate")
        return arrivals

    def _answer(self, tx: Transaction, accepted: Sequence[Accepted]) -> _Answers:
        """Return all replies of one turn. A full or growing store repeats the call, so the method changes only `tx`."""
        outbox: list[_Outgoing] = []
        invalid: list[Invalid] = []
        parked = dict(self._parked)
        if accepted:  # undecodable messages cause no commit by themselves
            for reason, number in self._unreadable.items():
                tx.state.ledger.quarantine(reason, number)
        for each in accepted:
            if isinstance(each, _Pushed):
                outbox += self._answer_pushes(tx, each, invalid)
                continue
            answer = self._answer_one(tx, each, parked, invalid)
            if answer is not None:
                reply = self._completed(each.message, answer[0])
                outbox.append(_Outgoing(each.identity, each.request_id, reply, answer[1]))
        now = self._clock()
        if self._last_seen.is_complete(now):
            self._core.leases.expire_due(tx)
        for key, waiting in list(parked.items()):
            answer = self._draw(tx, waiting.request)
            if answer is None and waiting.deadline <= now:
                answer = self._core.draw_timed_out(tx, waiting.request, self._pushes_wait_for(now))
            if answer is not None:
                del parked[key]
                outbox.append(_Outgoing(*key, *answer))
        self._timers.end("index")
        return _Answers(outbox, parked, invalid)

    def _pushes_wait_for(self, now: float) -> str:
        """Return why generated samples cannot be stored now; '' if they can."""
        is_full = now < self._full_until + _FULL_REPORT_S
        return self._upkeep.watch.pushes_wait_for or (self._full_reason if is_full else "")

    def _answer_pushes(self, tx: Transaction, pushed: _Pushed, invalid: list[Invalid]) -> list[_Outgoing]:
        requests, refusals = pushed.requests, {}
        for place, request in enumerate(requests):
            if refusal := self._refusal(tx, request, invalid):
                refusals[place] = refusal
        outbox = []
        for place, reply in enumerate(self._core.push(tx, pushed.opened, refusals)):
            request = requests[place]
            if isinstance(reply, p.PushReply):
                reasons = [row.reason for row in reply.others if row.outcome == "quarantined"]
                if reasons:
                    invalid.append((request.client.name, f"failed validation: {reasons[0]}", len(reasons)))
            elif place not in refusals and isinstance(pushed.opened.opened[place][1], BadBody):
                invalid.append((request.client.name, reply.reason, 1))
            complete = self._completed(request.message, reply)
            outbox.append(_Outgoing(request.identity, request.request_id, complete, b""))
        return outbox

    def _refusal(self, tx: Transaction, request: Request, invalid: list[Invalid]) -> str:
        """Return why the sender of a request is refused; '' if `Leases.authorize` accepts it."""
        try:
            self._core.leases.authorize(tx, request.client, request.message)
        except BufferRefused as error:
            if isinstance(error, InvalidRequest):
                invalid.append((self._senders.name(request.identity, request.peer), str(error), 1))
            return str(error)
        if not isinstance(request.message, p.Hello):  # Hello may still be refused
            self._senders.register(request.identity, request.client.name)
        return ""

    def _answer_one(
        self, tx: Transaction, request: Request, parked: dict[tuple[bytes, int], _Parked], invalid: list[Invalid]
    ) -> Answer | None:
        """Return the answer to any request except a push; park a draw and return None."""
        identity, request_id, message, body, client, _ = request
        if refusal := self._refusal(tx, request, invalid):
            return p.Refused(refusal), b""
        if not isinstance(message, p.DrawRequest):
            known = dict(tx.state.ledger.quarantined_by_reason)
            try:
                answer = self._core.handle(tx, message, body)
            except BufferRefused as error:
                if isinstance(error, InvalidRequest):
                    invalid.append((client.name, str(error), 1))
                return p.Refused(str(error)), b""
            if tx.state.ledger.quarantined_by_reason != known:  # some rows were quarantined
                new = Counter(tx.state.ledger.quarantined_by_reason) - Counter(known)
                invalid += [(client.name, f"failed validation: {why}", number) for why, number in new.items()]
            self._senders.register(identity, client.name)
            return answer
        if len(parked) >= _MAX_PARKED:
            return p.Refused(f"{len(parked)} draws are waiting already: only one learner may draw from a buffer"), b""
        for key, earlier in list(parked.items()):
            if (earlier.request.step, earlier.request.incarnation) == (message.step, message.incarnation):
                del parked[key]  # a duplicate request from a closed connection
        deadline = self._clock() + min(max(message.wait_s, 0.0), 3600.0)
        parked[identity, request_id] = _Parked(message, deadline)
        return None

    def _completed(self, message: p.Request, reply: p.Reply) -> p.Reply:
        """Add the fields that the core cannot set: credit, size and damage of the store, timings, invalid messages."""
        match message, reply:
            case p.Push(), p.PushReply():
                return replace(reply, credit=self._credits.grant(message.actor, self._clock()))
            case p.Hello(role="actor"), p.Welcome():
                return replace(reply, credit=self._credits.greet(message.name, self._clock()))
            case _, p.Status():
                size, damaged = self._store.size_bytes, self._upkeep.scrub.num_damaged
                counts, spent = self._senders.snapshot(), dict(self._timers.seconds)
                return replace(reply, size_bytes=size, num_damaged=damaged, invalid_messages=counts, spent_s=spent)
        return reply

    def _draw(self, tx: Transaction, request: p.DrawRequest) -> Answer | None:
        try:
            return self._core.try_draw(tx, request)
        except BufferRefused as error:
            return p.Refused(str(error)), b""


def in_own_process(
    config: BufferConfig, facts: RunFacts, folder: Path, *, host: str | None, keys: ServiceKeys | None
) -> BufferService:
    """Create the service of a dedicated process, with its memory settings."""
    keep_memory()
    return BufferService(config, facts, folder, host=host, keys=keys)


class Credits:
    """Division of the memory for received messages among the clients."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._last_seen_s: dict[str, float] = {}

    def greet(self, name: str, now_s: float) -> p.Credit:
        """Return the initial credit of a client: the minimum, because other clients may connect meanwhile."""
        self.grant(name, now_s)
        return _LEAST_CREDIT

    def grant(self, name: str, now_s: float) -> p.Credit:
        """Return the credit of a client that is active now: an equal share among clients active in the last minute.

        Each client gets at least 64 trajectories and 1 MiB, so a very large number of clients exceeds the budget.
        """
        self._last_seen_s.pop(name, None)
        self._last_seen_s[name] = now_s
        while now_s - next(iter(self._last_seen_s.values())) > _IDLE_CLIENT_S:
            del self._last_seen_s[next(iter(self._last_seen_s))]
        rows, size_bytes = _MAX_CREDIT_ROWS // len(self._last_seen_s), self._budget_bytes // len(self._last_seen_s)
        return p.Credit(max(_LEAST_CREDIT.rows, rows), max(_LEAST_CREDIT.size_bytes, size_bytes))


def opened(messages: Iterable[Request | Rejected], pushes_wait_for: str) -> list[Arrival]:
    """Return messages in order, with consecutive pushes joined; `pushes_wait_for` is the reason to refuse pushes."""
    arrivals: list[Arrival] = []
    pushes: list[Request] = []

    def join() -> None:
        if pushes:
            arrivals.append(_Pushed(list(pushes), Pushes([(push.message, push.body) for push in pushes])))
            pushes.clear()

    for arrival in messages:
        if not isinstance(arrival, Request) or not isinstance(arrival.message, p.Push):
            join()
            arrivals.append(arrival)
        elif pushes_wait_for:
            join()
            wait = p.Refused(pushes_wait_for, p.RETRY)
            arrivals.append(Rejected(arrival.identity, arrival.request_id, wait, arrival.peer))
        else:
            pushes.append(arrival)
    join()
    return arrivals


def _refuse_damaged(tx: Transaction) -> None:
    """Raise CorruptRecord if a table not read at start is damaged; requests for damaged rows would end the service."""
    for table in (tx.returned_prompts, tx.draws, tx.actors):
        for fault in table.damaged():
            raise CorruptRecord(fault)


def _has_data(each: Accepted) -> bool:
    return isinstance(each, _Pushed) or isinstance(each.message, p.HandOn | p.WriteScores)


def _retry_later(accepted: Iterable[Accepted], reason: str) -> list[_Outgoing]:
    """Return replies that ask the clients to retry these requests later."""
    refused = p.Refused(reason, p.RETRY)
    requests = (request for each in accepted for request in (each.requests if isinstance(each, _Pushed) else [each]))
    return [_Outgoing(request.identity, request.request_id, refused, b"") for request in requests]
