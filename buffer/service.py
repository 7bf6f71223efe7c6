"""BufferService: the one process that owns the store, behind a ZeroMQ ROUTER.

One thread. Each turn takes all messages that wait, answers them in one transaction, and sends the replies after its
commit: under load many acknowledgements share one fsync.
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

from buffer import protocol as p
from buffer.config import MAX_MESSAGE_MIB, BufferConfig
from buffer.core import Answer, BufferCore
from buffer.errors import BadBody, BufferRefused, CorruptRecord, NotBelieved, StoreError, StoreFull
from buffer.ingest import Pushes
from buffer.schema import start_fault
from buffer.store import PORT, RESTORE, Store
from buffer.transaction import Transaction
from buffer.upkeep import Hearing, Senders, Stages, Upkeep
from common.process import keep_freed_memory
from common.rpc.auth import ServiceKeys
from common.rpc.server import CannotBind, Rejected, Request, RpcServer
from common.run import RunFacts

log = logging.getLogger(__name__)

INBOX_BYTES = 256 * 2**20
"""What all clients together may have sent without an acknowledgement; bounds the service's memory."""
_MAX_TURN_MESSAGES = 512
_MAX_TURN_BYTES = 4 * 2**20
"""Taken in between two commits: more share one fsync, fewer are acknowledged sooner."""
_MAX_PARKED = 64
_IDLE_S = 0.2
"""Longest wait of a turn for messages; bounds how late `stop` is noticed."""
_COMPLAIN_EVERY_S = 10.0
_FULL_PAUSE_S = 1.0
_FULL_HEARD_S = 5.0
"""Seconds after which a push that was put off has been tried again."""
_FORGET_S = 60.0
_MAX_CREDIT_ROWS = 1536
_LEAST_CREDIT = p.Credit(64, 2**20)


class _Pushed(NamedTuple):
    """Pushes that arrived one after the other."""

    requests: list[Request]
    opened: Pushes


Asked = Request | _Pushed
Arrival = Asked | Rejected
Blame = tuple[str, str, int]
"""A sender, what it sent that no client of the run would, and how often."""


class _Parked(NamedTuple):
    """A draw that waits, among others by who asked for it, and the number of its request."""

    request: p.DrawRequest
    deadline: float


class _Outgoing(NamedTuple):
    identity: bytes
    request_id: int
    reply: p.Reply
    body: bytes | memoryview


class _Answers(NamedTuple):
    """What a transaction comes to, beside its changes of the store."""

    outbox: list[_Outgoing]
    parked: dict[tuple[bytes, int], _Parked]
    blames: list[Blame]


def keep_memory() -> None:
    """Spare a busy service collections, and giving memory back after every turn.

    A turn makes some ten thousand small objects and some buffers of megabytes, none in a cycle, and frees all of them.
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    pa.set_memory_pool(pa.system_memory_pool())
    keep_freed_memory(largest=64 * 2**20, most=256 * 2**20)


class BufferService:
    """Serves one run's buffer from one folder."""

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
        """Open the store; StoreError as `Store`, or if the configuration contradicts itself.

        `host`: the address to bind; None: a Unix socket. With keys only holders of the run's client key connect.
        """
        self._host = host
        self._clock = clock
        self._core = BufferCore(config, facts, clock)
        self._store = Store(folder, facts, durability=config.durability)
        try:
            self._store.read(self._core.leases.restart)
            self._store.read(_refuse_damaged)
            with suppress(StoreFull):  # what is damaged is then deleted by a later start
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
            incoming=32,  # they are bounded in bytes by credit
            outgoing=1000,
            refuse_body=start_fault,
        )
        self._parked: dict[tuple[bytes, int], _Parked] = {}
        self._complain_at = 0.0
        self._senders = Senders()
        self._unreadable: Counter[str] = Counter()
        """Reason -> messages that no request could be read from. The next request's transaction counts them."""
        self._stages = Stages()
        self._full_until = 0.0
        """Until then the disk is taken to be full: nothing is written unless a message asks for it."""
        self._full_because = ""
        self._hearing = Hearing(clock)

    def bind(self) -> str:
        """Bind, and return the address for clients. The port of the last run in this folder is kept.

        StoreError if the address is in use or does not exist, or the port cannot be written down.
        """
        try:
            return self._rpc.bind(self._host, self._folder / PORT)
        except CannotBind as error:
            raise StoreError(str(error)) from error

    def serve(self, stop: threading.Event) -> None:
        """Answer until `stop` is set; StoreError if the disk failed: clients then send the last turn again."""
        try:
            while not stop.is_set():
                self.turn()
        finally:
            self.close()

    def turn(self) -> None:
        """Wait for messages or a deadline, and answer what there is."""
        self._upkeep.run()
        asked = self._turn_away(self._receive())
        due, now = self._core.leases.due_in_s(), self._clock()
        is_due = due is not None and due <= 0 and self._hearing.is_complete(now)
        has_news = bool(self._parked) or is_due
        if not asked and not (has_news and now >= self._full_until):
            return
        try:
            outbox, self._parked, blames = self._commit(asked)
        except StoreFull as error:
            outbox, self._parked, blames = self._answer_on_full_disk(asked, str(error))
        for blame in blames:
            self._senders.blame(*blame)
        self._stages.end("commit")
        for outgoing in outbox:
            self._rpc.answer(*outgoing)
        self._stages.end("acknowledge")

    def _turn_away(self, arrivals: list[Arrival]) -> list[Asked]:
        """Answer what is refused whatever the store holds; the rest."""
        asked: list[Asked] = []
        for arrival in arrivals:
            if not isinstance(arrival, Rejected):
                asked.append(arrival)
                continue
            identity, request_id, reply, peer, unreadable = arrival
            if unreadable:
                self._unreadable[unreadable] += 1
                self._senders.blame(self._senders.name(identity, peer), f"failed validation: {unreadable}")
            elif reply is not None and reply.kind != p.RETRY:
                self._senders.blame(self._senders.name(identity, peer), reply.reason)
            if reply is not None:
                self._rpc.answer(identity, request_id, reply)
        return asked

    def _answer_on_full_disk(self, asked: list[Asked], reason: str) -> _Answers:
        """Put off requests that bring data, and what else does not fit; the learner is answered, and makes room."""
        now = self._clock()
        if now >= self._complain_at:
            log.warning("%s. Everybody waits", reason)
            self._complain_at = now + _COMPLAIN_EVERY_S
        self._full_until, self._full_because = now + _FULL_PAUSE_S, reason
        # What a failed turn did to leases is undone in the store, so their deadlines start anew too.
        self._store.read(self._core.leases.restart)
        data = [each for each in asked if _brings_data(each)]
        if data:
            others = [each for each in asked if not _brings_data(each)]
            try:
                answers = self._commit(others)
            except StoreFull:
                self._store.read(self._core.leases.restart)
            else:
                return answers._replace(outbox=answers.outbox + _put_off(data, reason))
        return _Answers(_put_off(asked, reason), self._parked, [])

    def _commit(self, asked: Sequence[Asked]) -> _Answers:
        answers = self._store.write(lambda tx: self._answer(tx, asked))
        if asked:
            self._unreadable.clear()
        return answers

    def close(self) -> None:
        if not self._rpc.is_closed:
            self._rpc.close()
            self._store.close()

    def _receive(self) -> list[Arrival]:
        """Wait until something is there or due, and open what is there."""
        now = self._clock()
        waits = [_IDLE_S, self._upkeep.due_in_s]
        if now >= self._full_until:
            waits += [parked.deadline - now for parked in self._parked.values()]
            due = self._core.leases.due_in_s()
            waits += [] if due is None else [max(due, self._hearing.settles_in_s(now))]
        has_messages = self._rpc.poll(min(waits))
        self._hearing.listened(now, min(waits))
        self._stages.end("wait")
        if not has_messages:
            self._hearing.read(is_all=True)
            return []
        messages: list[list[zmq.Frame]] = []
        size = 0
        while len(messages) < _MAX_TURN_MESSAGES and size < _MAX_TURN_BYTES:
            frames = self._rpc.receive()
            if frames is None:
                break
            messages.append(frames)
            size += sum(map(len, frames))
        self._hearing.read(is_all=len(messages) < _MAX_TURN_MESSAGES and size < _MAX_TURN_BYTES)
        requests = [self._rpc.open(frames) for frames in messages]
        self._stages.end("receive")
        arrivals = opened(requests, self._upkeep.watch.pushes_wait_for)
        self._stages.end("validate")
        return arrivals

    def _answer(self, tx: Transaction, asked: Sequence[Asked]) -> _Answers:
        """All replies of one turn. May run twice, where the store grows or is full, so it changes nothing but `tx`."""
        outbox: list[_Outgoing] = []
        blames: list[Blame] = []
        parked = dict(self._parked)
        if asked:  # beside a draw that only waits, each unreadable message would cost a commit
            for reason, number in self._unreadable.items():
                tx.state.ledger.quarantine(reason, number)
        for each in asked:
            if isinstance(each, _Pushed):
                outbox += self._answer_pushes(tx, each, blames)
                continue
            answer = self._answer_one(tx, each, parked, blames)
            if answer is not None:
                reply = self._completed(each.message, answer[0])
                outbox.append(_Outgoing(each.identity, each.request_id, reply, answer[1]))
        now = self._clock()
        if self._hearing.is_complete(now):
            self._core.leases.expire_due(tx)
        for key, waiting in list(parked.items()):
            answer = self._draw(tx, waiting.request)
            if answer is None and waiting.deadline <= now:
                answer = self._core.draw_timed_out(tx, waiting.request, self._pushes_wait_for(now))
            if answer is not None:
                del parked[key]
                outbox.append(_Outgoing(*key, *answer))
        self._stages.end("index")
        return _Answers(outbox, parked, blames)

    def _pushes_wait_for(self, now: float) -> str:
        """What keeps samples that were generated out of the store; '' where nothing does."""
        is_full = now < self._full_until + _FULL_HEARD_S
        return self._upkeep.watch.pushes_wait_for or (self._full_because if is_full else "")

    def _answer_pushes(self, tx: Transaction, pushed: _Pushed, blames: list[Blame]) -> list[_Outgoing]:
        requests, refusals = pushed.requests, {}
        for place, request in enumerate(requests):
            if refusal := self._refusal(tx, request, blames):
                refusals[place] = refusal
        outbox = []
        for place, reply in enumerate(self._core.push(tx, pushed.opened, refusals)):
            request = requests[place]
            if isinstance(reply, p.PushReply):
                reasons = [row.reason for row in reply.others if row.outcome == "quarantined"]
                if reasons:
                    blames.append((request.asker.name, f"failed validation: {reasons[0]}", len(reasons)))
            elif place not in refusals and isinstance(pushed.opened.opened[place][1], BadBody):
                blames.append((request.asker.name, reply.reason, 1))
            complete = self._completed(request.message, reply)
            outbox.append(_Outgoing(request.identity, request.request_id, complete, b""))
        return outbox

    def _refusal(self, tx: Transaction, request: Request, blames: list[Blame]) -> str:
        """Why a request is refused for who asks it; '' where it is one of the run's clients, and asks for itself."""
        try:
            self._core.leases.recognise(tx, request.asker, request.message)
        except BufferRefused as error:
            if isinstance(error, NotBelieved):
                blames.append((self._senders.name(request.identity, request.peer), str(error), 1))
            return str(error)
        if not isinstance(request.message, p.Hello):  # which may still be refused
            self._senders.heard(request.identity, request.asker.name)
        return ""

    def _answer_one(
        self, tx: Transaction, asked: Request, parked: dict[tuple[bytes, int], _Parked], blames: list[Blame]
    ) -> Answer | None:
        """The answer to any request but a push; None to a draw, which waits among those parked."""
        identity, request_id, message, body, asker, _ = asked
        if refusal := self._refusal(tx, asked, blames):
            return p.Refused(refusal), b""
        if not isinstance(message, p.DrawRequest):
            known = dict(tx.state.ledger.quarantined_by_reason)
            try:
                answer = self._core.handle(tx, message, body)
            except BufferRefused as error:
                if isinstance(error, NotBelieved):
                    blames.append((asker.name, str(error), 1))
                return p.Refused(str(error)), b""
            if tx.state.ledger.quarantined_by_reason != known:  # rows beside others that were stored
                left_out = Counter(tx.state.ledger.quarantined_by_reason) - Counter(known)
                blames += [(asker.name, f"failed validation: {why}", number) for why, number in left_out.items()]
            self._senders.heard(identity, asker.name)
            return answer
        if len(parked) >= _MAX_PARKED:
            return p.Refused(f"{len(parked)} draws wait already: one learner draws from a buffer"), b""
        for key, earlier in list(parked.items()):
            if (earlier.request.step, earlier.request.incarnation) == (message.step, message.incarnation):
                del parked[key]  # asked over a connection that is gone
        deadline = self._clock() + min(max(message.wait_s, 0.0), 3600.0)
        parked[identity, request_id] = _Parked(message, deadline)
        return None

    def _completed(self, message: p.Request, reply: p.Reply) -> p.Reply:
        """The reply with what the core does not know: the store's file, and how many clients there are."""
        match message, reply:
            case p.Push(), p.PushReply():
                return replace(reply, credit=self._credits.grant(message.actor, self._clock()))
            case p.Hello(role="actor"), p.Welcome():
                return replace(reply, credit=self._credits.greet(message.name, self._clock()))
            case _, p.Status():
                size, damaged = self._store.size_bytes, self._upkeep.scrub.num_damaged
                told, spent = self._senders.told(), dict(self._stages.seconds)
                return replace(reply, size_bytes=size, num_damaged=damaged, nonsense=told, spent_s=spent)
        return reply

    def _draw(self, tx: Transaction, request: p.DrawRequest) -> Answer | None:
        try:
            return self._core.try_draw(tx, request)
        except BufferRefused as error:
            return p.Refused(str(error)), b""


def in_own_process(
    config: BufferConfig, facts: RunFacts, folder: Path, *, host: str | None, keys: ServiceKeys | None
) -> BufferService:
    """Make the service of a process that hosts nothing else."""
    keep_memory()
    return BufferService(config, facts, folder, host=host, keys=keys)


class Credits:
    """Divides the memory that the service has for messages on their way into the store."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._heard_at: dict[str, float] = {}

    def greet(self, name: str, now_s: float) -> p.Credit:
        """Return what a client may send before its first acknowledgement: the least, for others may come meanwhile."""
        self.grant(name, now_s)
        return _LEAST_CREDIT

    def grant(self, name: str, now_s: float) -> p.Credit:
        """Return the share of a client that was active now; those that were silent for a minute have none.

        Each client has at least 64 trajectories and 1 MiB: very many clients exceed the budget.
        """
        self._heard_at.pop(name, None)
        self._heard_at[name] = now_s
        while now_s - next(iter(self._heard_at.values())) > _FORGET_S:
            del self._heard_at[next(iter(self._heard_at))]
        rows, size_bytes = _MAX_CREDIT_ROWS // len(self._heard_at), self._budget_bytes // len(self._heard_at)
        return p.Credit(max(_LEAST_CREDIT.rows, rows), max(_LEAST_CREDIT.size_bytes, size_bytes))


def opened(messages: Iterable[Request | Rejected], pushes_wait_for: str) -> list[Arrival]:
    """Messages in order, pushes that follow one another together; `pushes_wait_for` says why none is taken in now."""
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
    """Of tables that no start reads: a request that met a damaged row would end each service that is started."""
    for table in (tx.returned_prompts, tx.draws, tx.actors):
        for fault in table.damaged():
            raise CorruptRecord(fault)


def _brings_data(asked: Asked) -> bool:
    return isinstance(asked, _Pushed) or isinstance(asked.message, p.HandOn | p.WriteScores)


def _put_off(asked: Iterable[Asked], reason: str) -> list[_Outgoing]:
    """Ask everyone to send it again a little later."""
    refused = p.Refused(reason, p.RETRY)
    requests = (request for each in asked for request in (each.requests if isinstance(each, _Pushed) else [each]))
    return [_Outgoing(request.identity, request.request_id, refused, b"") for request in requests]
