"""BufferClient: the client of the buffer service.

Methods return a `concurrent.futures.Future` immediately. The future fails with BufferRefused if the service refuses the
request. The client retries unanswered requests; the future fails with BufferUnavailable after `GIVE_UP_S`.
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

from leeway.buffer import protocol as p
from leeway.buffer import schema
from leeway.buffer.errors import BufferRefused, BufferUnavailable
from leeway.buffer.outbox import (
    MAX_ROWS_PER_MESSAGE,
    FutureGroup,
    Outbox,
    checked,
    message_room,
    parts_fitting,
    size_bytes,
)
from leeway.buffer.schema import Prefix, Trajectory
from leeway.common.rpc.auth import ClientKeys
from leeway.common.rpc.client import Answer, RpcClient, RpcErrors, Timeouts, resolve
from leeway.common.rpc.messages import ClientIdentity, Message, Role

SILENCE_S = 1.75
LONG_SILENCE_S = 20.0
"""Seconds without a heartbeat after which a client that is not an actor reconnects; actors use `SILENCE_S`."""
REQUEST_TIMEOUT_S = 10.0
"""Seconds without an answer after which the client retries a request; much longer than a turn of the service."""

GIVE_UP_S = 120.0
"""Timeout of a request, in seconds; much longer than the restart of a killed service."""
CONNECT_S = 600.0
"""Additional seconds for `connect`, during which the service may ask to retry, for example while its disk is full."""

A = TypeVar("A")
R = TypeVar("R")
M = TypeVar("M", bound=Message)


class Batch(p.DrawReply, frozen=True, dict=True):
    body: bytes | memoryview = b""
    """The trajectories as an Arrow IPC stream."""

    @cached_property
    def rows(self) -> pa.RecordBatch:
        """Trajectories of a `ready` batch, with the columns of `schema.SCHEMA`; BadBody if the body is invalid."""
        return schema.read_stream(self.body)


class Granted(p.LeaseGrant, frozen=True):
    """Leases and the partial rollouts of their samples."""

    body: bytes | memoryview = b""

    def prefixes(self) -> dict[tuple[int, int], Prefix]:
        """Return the partial rollouts by (lease, sample index); raise BadBody if the body is invalid."""
        keys = [(lease.lease_id, index) for lease in self.leases for index in lease.prefixes]
        return dict(zip(keys, schema.read_prefixes(self.body), strict=True)) if keys else {}


class Posteriors(p.PosteriorsReply, frozen=True):
    """Length posteriors of prompts."""

    body: bytes | memoryview = b""
    """Arrow IPC stream of `schema.POSTERIORS`."""


class BufferClient:
    """Client of the buffer service. Thread-safe."""

    def __init__(
        self,
        address: str,
        *,
        run_id: str,
        role: Role,
        name: str,
        keys: ClientKeys | None = None,
    ) -> None:
        """Start the client; it sends nothing before `connect`.

        Args:
            address: address of the service, as returned by `BufferService.bind`.
            run_id: id of the run; a service of another run refuses the client.
            role: role of the process; decides which requests it may send.
            name: unique in the run; a new process of the same name fences the old one.
            keys: keys of the run's clients; None if the service requires no keys.
        """
        self.address = address
        self.name = name
        self._run_id = run_id
        self._identity = ClientIdentity(name, role, secrets.token_hex(16))
        self.epoch = 0
        self._incarnation = -1
        self._lock = threading.Lock()
        self._next_request = 0
        self._last_lease: Future[Granted] | None = None
        self._outbox = Outbox(name, run_id, GIVE_UP_S, lambda: self._transport)
        # An actor's messages are small, so silence means a broken link; a learner's batch may take long to transfer.
        heartbeat_s = SILENCE_S if role == "actor" else LONG_SILENCE_S
        self._transport = RpcClient(
            p.PROTOCOL,
            address,
            run_id,
            identity=self._identity,
            timeouts=Timeouts(resend_s=REQUEST_TIMEOUT_S, request_s=GIVE_UP_S, heartbeat_s=heartbeat_s),
            errors=RpcErrors(lambda _, text: BufferRefused(text), BufferUnavailable),
            keys=keys,
            pump=self._outbox.pump,
            ended=self._outbox.fail,
        )

    # --- any client -------------------------------------------------------------------------------

    def connect(self, deadline: float | None = None) -> p.Welcome:
        """Send Hello; block until the service answers.

        Args:
            deadline: monotonic time at which to stop waiting; None means `GIVE_UP_S` + `CONNECT_S` from now.

        Raises:
            BufferUnavailable: the service did not answer for `GIVE_UP_S`, or did not send Welcome by the deadline.
            BufferRefused: the service serves another run, or uses another protocol.
        """
        limit_s = GIVE_UP_S + CONNECT_S if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return self.hello().result(limit_s)
        except TimeoutError:
            state = f"asked to retry: {why}" if (why := self.retry_reason) else "did not answer"
            raise BufferUnavailable(
                f"'{self.name}' could not connect within {limit_s:.0f} s: the buffer service at {self.address} {state}"
            ) from None

    def hello(self) -> Future[p.Welcome]:
        """Send Hello without blocking; use `connect` to wait for the reply."""

        def welcomed(answer: Answer) -> p.Welcome:
            welcome = _expect(answer, p.Welcome)
            self.epoch = welcome.epoch
            self._outbox.open(welcome.epoch, welcome.credit)
            return welcome

        client = self._identity
        return self._then(self._transport.submit(p.Hello(client.role, client.name, client.session)), welcomed)

    @property
    def retry_reason(self) -> str:
        """Reason given when the service last asked to retry; empty if it has answered since."""
        return self._transport.retry_reason

    def status(self) -> Future[p.Status]:
        return self._ask(p.StatusRequest(), p.Status)

    def drain(self) -> Future[p.Done]:
        """Stop granting leases until another learner begins. Only the launcher may call this."""
        return self._ask(p.Drain(), p.Done)

    def close(self, timeout_s: float | None = None) -> None:
        """Wait up to `timeout_s` (default: `REQUEST_TIMEOUT_S`) for outstanding answers, then close."""
        self._outbox.close()
        self._transport.close(REQUEST_TIMEOUT_S if timeout_s is None else timeout_s)

    # --- actors -----------------------------------------------------------------------------------

    def lease(
        self, max_groups: int, lane: str = "", token_s: float = 0.0, *, wants_lengths: bool = False
    ) -> Future[Granted]:
        """Request up to `max_groups` groups of K samples.

        Actors of equal speed share a `lane`. `token_s` is the seconds per token of each sample; 0 if unknown.

        Raises:
            BufferUnavailable: the client is closed.
            RuntimeError: the previous request is unanswered, but the service can repeat only its newest grant.
        """
        with self._lock:
            if self._last_lease is not None and not self._last_lease.done():
                raise RuntimeError(f"'{self.name}' requested leases before its last request was answered")
            request = p.LeaseRequest(
                self.name, self.epoch, self._next_request, int(max_groups), lane, token_s, wants_lengths
            )
            self._next_request += 1
            self._last_lease = self._ask_with_body(request, p.LeaseGrant, Granted)
            return self._last_lease

    def push(self, trajectory: Trajectory) -> Future[p.RowResult]:
        """Send a trajectory; the future completes when the trajectory is on disk or the service does not need it.

        Trajectories pushed within a few milliseconds share a message. The call blocks while the client has no credit.

        Raises:
            BufferUnavailable: there was no credit, and the service was silent, for `GIVE_UP_S`.
        """
        return self._outbox.push(trajectory)

    def push_many(self, trajectories: Sequence[Trajectory]) -> Future[list[p.RowResult]]:
        """Push several trajectories; the future holds all results, or fails at the end with the first error."""
        return self._outbox.push_many(trajectories)

    def has_room(self, trajectory: Trajectory) -> bool:
        return self._outbox.has_room(trajectory)

    def report_failed(self, lease: p.Lease, sample_indices: Sequence[int], reason: str) -> Future[p.Done]:
        message = p.GiveUp(self.name, self.epoch, lease.lease_id, lease.attempt, list(sample_indices), reason)
        return self._ask(message, p.Done)

    def requeue(
        self, lease: p.Lease, sample_indices: Sequence[int], partials: Sequence[Trajectory], *, goes_on: bool = False
    ) -> Future[p.Done]:
        """Requeue unfinished samples of a lease; their next lease resumes from their partial rollouts.

        The future completes when all partial rollouts are on disk.

        Args:
            lease: lease of the samples.
            sample_indices: indices of the samples; a stored partial rollout stays until a new one replaces it.
            partials: partial rollouts of the samples that have tokens, with finish_reason `REQUEUED`.
            goes_on: True if the actor continues generating and only saves the partial rollouts.
        """
        with_tokens = {row.sample_index for row in partials}
        parts: list[tuple[list[int], Sequence[Trajectory]]] = []
        if bare := [index for index in sample_indices if index not in with_tokens]:
            parts.append((bare, ()))
        fitting = parts_fitting([size_bytes(row) for row in partials], message_room(), MAX_ROWS_PER_MESSAGE)
        parts += [([row.sample_index for row in partials[part]], partials[part]) for part in fitting]
        sent = []
        for indices, rows in parts:
            message = p.HandOn(self.name, self.epoch, lease.lease_id, lease.attempt, indices, goes_on)
            sender = schema.Sender(self.name, self.epoch, [0] * len(rows))  # the lease identifies duplicates
            sent.append(self._ask(message, p.Done, checked(schema.encode(rows, self._run_id, sender))))
        return self._then(FutureGroup[p.Done](len(sent)).follow(sent), lambda _: p.Done())

    def renew(self, lease_ids: Sequence[int]) -> Future[p.RenewReply]:
        return self._ask(p.Renew(self.name, self.epoch, list(lease_ids)), p.RenewReply)

    # --- the learner ------------------------------------------------------------------------------

    def begin_incarnation(self, version: int, step: int) -> Future[p.IncarnationReply]:
        """Register that training starts at `version`, after `step` finished steps. Idempotent per client."""

        def begun(answer: Answer) -> p.IncarnationReply:
            reply = _expect(answer, p.IncarnationReply)
            self._incarnation = reply.incarnation
            return reply

        request = p.BeginIncarnation(self._identity.session, version, step)
        return self._then(self._transport.submit(request), begun)

    def draw(
        self,
        step: int,
        version: int,
        incarnation: int,
        num_groups: int,
        wait_s: float,
        allowed_lag: int | None = None,
    ) -> Future[Batch]:
        """Request the groups of a step, and set the lag bound for leasing new groups; see `protocol.DrawRequest`."""
        request = p.DrawRequest(step, version, incarnation, num_groups, wait_s, allowed_lag)
        return self._ask_with_body(request, p.DrawReply, Batch, wait_s)

    def write_scores(self, record_ids: Sequence[int], logprobs: Sequence[npt.NDArray[np.float32]]) -> Future[p.Done]:
        """Store reference log-probabilities: one array per record, one value per completion token.

        The future completes when all arrays are on disk. Raise ValueError if the numbers of records and arrays differ,
        or if an array does not fit into a message.
        """
        if len(record_ids) != len(logprobs):
            raise ValueError(f"write_scores got {len(record_ids)} records but {len(logprobs)} arrays")
        bodies = [
            checked(schema.encode_scores(record_ids[part], logprobs[part]))
            for part in parts_fitting([array.nbytes + 64 for array in logprobs], message_room())
        ]
        sent = [self._ask(p.WriteScores(), p.Done, body) for body in bodies]
        return self._then(FutureGroup[p.Done](len(sent)).follow(sent), lambda _: p.Done())

    def step_finished(self, step: int, version: int, skipped: bool = False) -> Future[p.Done]:
        """Report that step `step` (from 1) is done and the learner is at `version`; see `protocol.StepFinished`."""
        return self._ask(p.StepFinished(step, version, self._incarnation, skipped), p.Done)

    def published(self, incarnation: int, version: int) -> Future[p.Done]:
        return self._ask(p.Published(incarnation, version), p.Done)

    def checkpoint_durable(self, step: int) -> Future[p.Done]:
        return self._ask(p.CheckpointDurable(step, self._incarnation), p.Done)

    # --- the ranker -------------------------------------------------------------------------------

    def posteriors(self) -> Future[Posteriors]:
        """Request the length posteriors of prompts that have completed a group."""
        return self._ask_with_body(p.PosteriorsRequest(), p.PosteriorsReply, Posteriors)

    def set_prior(self, means: npt.NDArray[np.float32], variance: float) -> Future[p.Done]:
        """Send length predictions of prompts without a group: one mean per prompt id, and their common variance."""
        size = message_room() // (2 * means.itemsize)
        sent = [
            self._ask(p.Expect(first, variance), p.Done, checked(schema.encode_expected(means[first : first + size])))
            for first in range(0, len(means), size)
        ]
        return self._then(FutureGroup[p.Done](len(sent)).follow(sent), lambda _: p.Done())

    # --- parts ------------------------------------------------------------------------------------

    def _ask(self, message: p.Request, kind: type[M], body: bytes | memoryview = b"") -> Future[M]:
        return self._then(self._transport.submit(message, body), lambda answer: _expect(answer, kind))

    def _ask_with_body(
        self, message: p.Request, reply: type[M], build: Callable[..., R], wait_s: float = 0.0
    ) -> Future[R]:
        """Send a request; the future holds the result of `build`, called with the reply's fields and body."""

        def read(answer: Answer) -> R:
            return build(**msgspec.structs.asdict(_expect(answer, reply)), body=answer.body)

        return self._then(self._transport.submit(message, wait_s=wait_s), read)

    def _then(self, sent: Future[A], read: Callable[[A], R]) -> Future[R]:
        """Return a future of the result of `read`, called with the reply."""
        future: Future[R] = Future()

        def done(answered: Future[A]) -> None:
            try:
                resolve(future, answered.exception() or read(answered.result()))
            except (ValueError, TypeError) as unreadable:
                resolve(future, unreadable)

        sent.add_done_callback(done)
        return future


def _expect(answer: Answer, kind: type[M]) -> M:
    reply = answer.reply
    if not isinstance(reply, kind):
        raise TypeError(f"the buffer service answered with {type(reply).__name__} instead of {kind.__name__}")
    return reply
