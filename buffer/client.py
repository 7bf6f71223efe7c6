"""BufferClient: what actors and the learner talk to the buffer through.

Methods return a `concurrent.futures.Future` at once. It fails with BufferRefused if the service will not serve the
request, and with BufferUnavailable if it did not answer for `GIVE_UP_S`. Until then requests are sent again.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from buffer import protocol as p
from buffer import schema
from buffer.errors import BufferRefused, BufferUnavailable
from buffer.outbox import MAX_ROWS_PER_MESSAGE, Outbox, Together, checked, message_room, parts_fitting, size_bytes
from buffer.schema import Prefix, Trajectory
from common.rpc.auth import ClientKeys
from common.rpc.client import Answer, Patience, RpcClient, RpcErrors, settle
from common.rpc.messages import Asker, Message, Role

SILENCE_S = 1.75
LONG_SILENCE_S = 20.0
"""Seconds without a heartbeat after which the connection is made anew."""
REQUEST_TIMEOUT_S = 10.0
"""Seconds after which a request without an answer is sent again: much more than a turn of the service takes."""

GIVE_UP_S = 120.0
"""Timeout of a request: a service that was killed is back long before."""
CONNECT_S = 600.0
"""How much longer a service is greeted that asks to try again later, as while its disk is full."""

A = TypeVar("A")
R = TypeVar("R")
M = TypeVar("M", bound=Message)


class Draw(p.DrawReply, frozen=True, dict=True):
    body: bytes | memoryview = b""
    """The trajectories as an Arrow IPC stream."""

    @cached_property
    def rows(self) -> pa.RecordBatch:
        """The trajectories by the columns of `schema.SCHEMA`; only if `ready`. BadBody if the bytes are no draw."""
        return schema.read_stream(self.body)


class Granted(p.LeaseGrant, frozen=True):
    """Leases, and what there is of their samples."""

    body: bytes | memoryview = b""

    def prefixes(self) -> dict[tuple[int, int], Prefix]:
        """Return (lease, sample index) -> its first tokens, of those that have some; BadBody if it is no grant."""
        keys = [(lease.lease_id, index) for lease in self.leases for index in lease.prefixes]
        return dict(zip(keys, schema.read_prefixes(self.body), strict=True)) if keys else {}


class Visits(p.VisitsReply, frozen=True):
    """What is known of the lengths of answers."""

    body: bytes | memoryview = b""
    """As an Arrow IPC stream of `schema.VISITS`."""


class BufferClient:
    """One client of the buffer service; safe to use from several threads."""

    def __init__(
        self,
        address: str,
        *,
        run_id: str,
        role: Role,
        name: str,
        keys: ClientKeys | None = None,
    ) -> None:
        """Start the client; nothing is sent before `connect`.

        Args:
            address: of the service, as its `bind` returns it.
            run_id: the run; a service of another run refuses.
            role: of the process, which decides what it may ask.
            name: unique in the run; a new process of the same name fences the old one.
            keys: of the run's clients; None: the service is not locked.
        """
        self.address = address
        self.name = name
        self._run_id = run_id
        self._asker = Asker(name, role, secrets.token_hex(16))
        self._epoch = 0
        self._incarnation = -1
        self._lock = threading.Lock()
        self._next_request = 0
        self._asked_for: Future[Granted] | None = None
        self._outbox = Outbox(name, run_id, GIVE_UP_S, lambda: self._transport)
        # An actor's messages are small, so a silent link is a broken one; a batch may take long to pass.
        heartbeat_s = SILENCE_S if role == "actor" else LONG_SILENCE_S
        self._transport = RpcClient(
            p.PROTOCOL,
            address,
            run_id,
            asker=self._asker,
            patience=Patience(resend_s=REQUEST_TIMEOUT_S, give_up_s=GIVE_UP_S, heartbeat_s=heartbeat_s),
            errors=RpcErrors(lambda _, text: BufferRefused(text), BufferUnavailable),
            keys=keys,
            pump=self._outbox.pump,
            ended=self._outbox.fail,
        )

    # --- any client -------------------------------------------------------------------------------

    def connect(self, deadline: float | None = None) -> p.Welcome:
        """Send Hello; block until the service answers.

        Args:
            deadline: on the monotonic clock; None: `CONNECT_S` beyond `GIVE_UP_S`.

        Raises:
            BufferUnavailable: no answer for `GIVE_UP_S`, or no welcome by the deadline.
            BufferRefused: it serves another run, or speaks another protocol.
        """
        limit_s = GIVE_UP_S + CONNECT_S if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return self.hello().result(limit_s)
        except TimeoutError:
            state = f"says: {why}" if (why := self.put_off_because) else "is silent"
            raise BufferUnavailable(
                f"the buffer service did not welcome '{self.name}' within {limit_s:.0f} s: {self.address} {state}"
            ) from None

    def hello(self) -> Future[p.Welcome]:
        """Say hello without blocking; `connect` bounds the wait."""

        def welcomed(answer: Answer) -> p.Welcome:
            welcome = _expect(answer, p.Welcome)
            self._epoch = welcome.epoch
            self._outbox.open(welcome.epoch, welcome.credit)
            return welcome

        me = self._asker
        return self._then(self._transport.submit(p.Hello(me.role, me.name, me.session)), welcomed)

    @property
    def put_off_because(self) -> str:
        """Why the service last asked to try again later; empty where it has answered since."""
        return self._transport.put_off_because

    @property
    def epoch(self) -> int:
        return self._epoch

    def status(self) -> Future[p.Status]:
        return self._ask(p.StatusRequest(), p.Status)

    def drain(self) -> Future[p.Done]:
        """Let the service grant no further leases until another learner begins; for the command of the run alone."""
        return self._ask(p.Drain(), p.Done)

    def close(self, timeout_s: float | None = None) -> None:
        """Give what is outstanding `timeout_s` (default: `REQUEST_TIMEOUT_S`) to be answered, then end."""
        self._outbox.close()
        self._transport.close(REQUEST_TIMEOUT_S if timeout_s is None else timeout_s)

    # --- actors -----------------------------------------------------------------------------------

    def lease(
        self, max_groups: int, lane: str = "", token_s: float = 0.0, *, wants_lengths: bool = False
    ) -> Future[Granted]:
        """Ask for up to `max_groups` groups of K samples.

        `lane` names actors of one speed, and `token_s` is the seconds for a token of each sample; 0: not known.

        Raises:
            BufferUnavailable: the client is closed.
            RuntimeError: the last request is not answered yet; after a loss the service repeats only the newest grant.
        """
        with self._lock:
            if self._asked_for is not None and not self._asked_for.done():
                raise RuntimeError(f"'{self.name}' asks for leases while its last request is not answered")
            request = p.LeaseRequest(
                self.name, self._epoch, self._next_request, int(max_groups), lane, token_s, wants_lengths
            )
            self._next_request += 1
            self._asked_for = self._ask_with_body(request, p.LeaseGrant, Granted)
            return self._asked_for

    def push(self, trajectory: Trajectory) -> Future[p.RowResult]:
        """Send a trajectory; the future completes when it is on disk, or is known not to be needed.

        Trajectories of some milliseconds travel together. Blocks while there is no credit.

        Raises:
            BufferUnavailable: there was no credit, and no sign of the service, for `GIVE_UP_S`.
        """
        return self._outbox.push(trajectory)

    def push_many(self, trajectories: Sequence[Trajectory]) -> Future[list[p.RowResult]]:
        """As `push` of each, with one future of all results. It fails with the first error, when all are known."""
        return self._outbox.push_many(trajectories)

    def has_room(self, trajectory: Trajectory) -> bool:
        return self._outbox.has_room(trajectory)

    def give_up(self, lease: p.Lease, sample_indices: Sequence[int], reason: str) -> Future[p.Done]:
        message = p.GiveUp(self.name, self._epoch, lease.lease_id, lease.attempt, list(sample_indices), reason)
        return self._ask(message, p.Done)

    def hand_on(
        self, lease: p.Lease, sample_indices: Sequence[int], there: Sequence[Trajectory], *, goes_on: bool = False
    ) -> Future[p.Done]:
        """Leave samples of a lease unfinished; the next lease of them continues what there is.

        The future completes when all of it is on disk.

        Args:
            lease: of the samples.
            sample_indices: which; what was stored of one before stays if nothing newer is given.
            there: their tokens so far, of those that have any, with finish_reason `HANDED_ON`.
            goes_on: the actor continues; what there is so far is only kept.
        """
        with_tokens = {row.sample_index for row in there}
        parts: list[tuple[list[int], Sequence[Trajectory]]] = []
        if bare := [index for index in sample_indices if index not in with_tokens]:
            parts.append((bare, ()))
        fitting = parts_fitting([size_bytes(row) for row in there], message_room(), MAX_ROWS_PER_MESSAGE)
        parts += [([row.sample_index for row in there[part]], there[part]) for part in fitting]
        asked = []
        for indices, rows in parts:
            message = p.HandOn(self.name, self._epoch, lease.lease_id, lease.attempt, indices, goes_on)
            sender = schema.Sender(self.name, self._epoch, [0] * len(rows))  # the lease tells copies apart
            asked.append(self._ask(message, p.Done, checked(schema.encode(rows, self._run_id, sender))))
        return self._then(Together[p.Done](len(asked)).follow(asked), lambda _: p.Done())

    def renew(self, lease_ids: Sequence[int]) -> Future[p.RenewReply]:
        return self._ask(p.Renew(self.name, self._epoch, list(lease_ids)), p.RenewReply)

    # --- the learner ------------------------------------------------------------------------------

    def begin_incarnation(self, version: int, step: int) -> Future[p.IncarnationReply]:
        """Start to learn at `version`, having finished `step` steps; the same client may say it again."""

        def begun(answer: Answer) -> p.IncarnationReply:
            reply = _expect(answer, p.IncarnationReply)
            self._incarnation = reply.incarnation
            return reply

        request = p.BeginIncarnation(self._asker.session, version, step)
        return self._then(self._transport.submit(request), begun)

    def draw(
        self,
        step: int,
        version: int,
        incarnation: int,
        num_groups: int,
        wait_s: float,
        allowed_lag: int | None = None,
    ) -> Future[Draw]:
        """Ask for the groups of a step, and say up to which lag new ones may be leased; see `protocol.DrawRequest`."""
        request = p.DrawRequest(step, version, incarnation, num_groups, wait_s, allowed_lag)
        return self._ask_with_body(request, p.DrawReply, Draw, wait_s)

    def write_scores(self, record_ids: Sequence[int], logprobs: Sequence[npt.NDArray[np.float32]]) -> Future[p.Done]:
        """Store reference log-probabilities: one array per record, one value per completion token.

        The future completes when all are on disk. ValueError if there are not as many records as arrays, or one exceeds
        a message.
        """
        if len(record_ids) != len(logprobs):
            raise ValueError(f"write_scores got {len(record_ids)} records but {len(logprobs)} arrays")
        bodies = [
            checked(schema.encode_scores(record_ids[part], logprobs[part]))
            for part in parts_fitting([array.nbytes + 64 for array in logprobs], message_room())
        ]
        asked = [self._ask(p.WriteScores(), p.Done, body) for body in bodies]
        return self._then(Together[p.Done](len(asked)).follow(asked), lambda _: p.Done())

    def step_finished(self, step: int, version: int, skipped: bool = False) -> Future[p.Done]:
        """Say that step `step` (from 1) is done and the learner is now at `version`; see `protocol.StepFinished`."""
        return self._ask(p.StepFinished(step, version, self._incarnation, skipped), p.Done)

    def published(self, incarnation: int, version: int) -> Future[p.Done]:
        return self._ask(p.Published(incarnation, version), p.Done)

    def checkpoint_durable(self, step: int) -> Future[p.Done]:
        return self._ask(p.CheckpointDurable(step, self._incarnation), p.Done)

    # --- the ranker -------------------------------------------------------------------------------

    def visits(self) -> Future[Visits]:
        """Ask what is known of the lengths of answers to prompts that groups were seen of."""
        return self._ask_with_body(p.VisitsRequest(), p.VisitsReply, Visits)

    def expect(self, means: npt.NDArray[np.float32], variance: float) -> Future[p.Done]:
        """Say what prompts are like that no group was seen of: of each prompt, by its id, and how far they differ."""
        most = message_room() // (2 * means.itemsize)
        asked = [
            self._ask(p.Expect(first, variance), p.Done, checked(schema.encode_expected(means[first : first + most])))
            for first in range(0, len(means), most)
        ]
        return self._then(Together[p.Done](len(asked)).follow(asked), lambda _: p.Done())

    # --- parts ------------------------------------------------------------------------------------

    def _ask(self, message: p.Request, kind: type[M], body: bytes | memoryview = b"") -> Future[M]:
        return self._then(self._transport.submit(message, body), lambda answer: _expect(answer, kind))

    def _ask_with_body(
        self, message: p.Request, reply: type[M], whole: Callable[..., R], wait_s: float = 0.0
    ) -> Future[R]:
        """As `_ask`, of what `whole` makes of the fields of the reply and its body."""

        def read(answer: Answer) -> R:
            return whole(**msgspec.structs.asdict(_expect(answer, reply)), body=answer.body)

        return self._then(self._transport.submit(message, wait_s=wait_s), read)

    def _then(self, sent: Future[A], read: Callable[[A], R]) -> Future[R]:
        """A future of what `read` makes of the reply."""
        future: Future[R] = Future()

        def done(answered: Future[A]) -> None:
            error = answered.exception()
            if error is None:
                try:
                    settle(future, read(answered.result()))
                except (ValueError, TypeError) as unreadable:
                    settle(future, unreadable)
            else:
                settle(future, error)

        sent.add_done_callback(done)
        return future


def _expect(answer: Answer, kind: type[M]) -> M:
    reply = answer.reply
    if not isinstance(reply, kind):
        raise TypeError(f"the buffer service answered {type(reply).__name__} where {kind.__name__} was due")
    return reply
