"""The buffer in this process, and its clients.

InProcessBuffer  the buffer's rules over a store, with the caller's clock and without sockets; it runs the same code as
                 the service
Actor            generates trajectories for leases
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa

from leeway.buffer import protocol as p
from leeway.buffer import samplers, schema
from leeway.buffer.config import BufferConfig
from leeway.buffer.core import BufferCore
from leeway.buffer.errors import BufferRefused
from leeway.buffer.index import GroupIndex, Weights
from leeway.buffer.ingest import Pushes
from leeway.buffer.offline.inspect import verify
from leeway.buffer.rows import RowBytes, records_in
from leeway.buffer.schema import REQUEUED, Trajectory, VersionSpan
from leeway.buffer.store import Store
from leeway.buffer.transaction import Transaction
from leeway.common.run import RunFacts
from leeway.common.staleness import PolicyVersion
from tests.trajectories import decode
from tests.world.run_context import run_facts

M = TypeVar("M", bound=p.Message)


class _CommitAborted(Exception):
    """Raised to abort a commit."""


class InProcessBuffer:
    """A buffer as its clients see it; every call is one transaction."""

    def __init__(
        self,
        folder: Path,
        facts: RunFacts,
        config: BufferConfig | None = None,
        *,
        open_store: Callable[[], Any] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.folder = folder
        self.facts = facts
        self.config = config or BufferConfig()
        self.now_s = 0.0
        """Time of the default clock. Set it to any value; `expire` acts on it."""
        # small enough that the map has to grow, which is tested as well
        self._open_store = open_store or (lambda: Store(folder, facts, first_map_size=2**18))
        self._clock = clock or (lambda: self.now_s)
        self._requests = 0
        self.loses: Literal["", "commit", "service"] = ""
        """Failure of the next request except status requests, which is then repeated: "commit" fails as on a full disk;
        "service" also restarts the service."""
        self._open()

    def _lose(self, change: Callable[[Any], object]) -> None:
        """Apply a request without the commit; assert that no trace is left in the store or in memory."""

        def abort(tx: Any) -> None:
            change(tx)
            tx.flush()
            raise _CommitAborted

        with contextlib.suppress(_CommitAborted):
            self.store.write(abort)
        if self.loses == "service":
            self.restart()
        self.loses = ""
        assert self.faults() == []
        self.store.read(self.core.leases.restart)  # as the service does after a full disk

    def _open(self) -> None:
        self.store = self._open_store()
        self.core = BufferCore(self.config, self.facts, self._clock)
        self.store.read(self.core.leases.restart)

    def restart(self) -> None:
        """Reopen the store as a new service process does."""
        self.store.close()
        self._open()

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def answer(self, message: p.Request, body: bytes = b"") -> tuple[p.Reply, Any] | None:
        """Return the service's reply to a request and its body; None for a draw that is not ready.

        Raises:
            BufferRefused: the request was refused. Its earlier changes stay, as in the service's transaction.
        """
        refused: list[BufferRefused] = []

        def apply(tx: Any) -> tuple[p.Reply, Any] | None:
            try:
                if isinstance(message, p.Push):
                    return self.core.push(tx, Pushes([(message, body)]))[0], b""
                if isinstance(message, p.DrawRequest):
                    return self.core.try_draw(tx, message)
                return self.core.handle(tx, message, body)
            except BufferRefused as error:
                refused.append(error)
                return None

        if self.loses and not isinstance(message, p.StatusRequest):
            self._lose(apply)
            refused.clear()
        found: tuple[p.Reply, Any] | None = self.store.write(apply)
        if refused:
            raise refused[0]
        return found

    def ask(self, message: p.Request, kind: type[M], body: bytes = b"") -> M:
        """Return the reply to a request, which must be of this kind.

        Raises:
            BufferRefused: the request was refused.
        """
        answered = self.answer(message, body)
        assert answered is not None
        reply = answered[0]
        if isinstance(reply, p.Refused):
            raise BufferRefused(reply.reason)
        assert isinstance(reply, kind)
        return reply

    def hello(self, name: str, session: str = "1", role: str = "actor") -> p.Welcome:
        """Connect a client."""
        return self.ask(p.Hello(role, name, session), p.Welcome)

    def begin(self, version: int = 0, step: int = 0, *, session: str = "learner") -> p.IncarnationReply:
        """Start a learner that publishes its first version."""
        reply = self.ask(p.BeginIncarnation(session, version, step), p.IncarnationReply)
        self.publish(version, reply.incarnation)
        return reply

    def publish(self, version: int, incarnation: int = 0) -> None:
        """Announce a published version."""
        self.ask(p.Published(incarnation, version), p.Done)

    def lease(self, actor: str, max_groups: int, *, epoch: int = 1) -> list[p.Lease]:
        """Request leases under a new request number."""
        return self.grant(actor, max_groups, epoch=epoch)[0]

    def grant(
        self, actor: str, max_groups: int, *, epoch: int = 1, again: bool = False
    ) -> tuple[list[p.Lease], list[Trajectory]]:
        """Request leases under a new number, or the last one if `again`; return leases and partial samples."""
        self._requests += not again
        answered = self.answer(p.LeaseRequest(actor, epoch, self._requests, max_groups))
        assert answered is not None
        reply, body = answered
        assert isinstance(reply, p.LeaseGrant)
        rows = decode(body) if len(body) else []
        names = [(lease.group_id, index) for lease in reply.leases for index in lease.prefixes]
        assert names == [(row.group_id, row.sample_index) for row in rows]
        return reply.leases, rows

    def requeue(
        self,
        lease: p.Lease,
        indices: Sequence[int],
        with_tokens: Sequence[int],
        *,
        actor: str = "actor-0",
        epoch: int = 1,
        goes_on: bool = False,
        **fields: Any,
    ) -> None:
        """Requeue samples of a lease; those in `with_tokens` have partial rollouts."""
        rows = [
            dataclasses.replace(
                make_trajectory(lease, index, seq=0, actor=actor, epoch=epoch, reward=None, **fields),
                finish_reason=REQUEUED,
                columns={},
                reward_parts={},
            )
            for index in with_tokens
        ]
        body = schema.encode(rows, self.facts.run_id)
        message = p.HandOn(actor, epoch, lease.lease_id, lease.attempt, list(indices), goes_on)
        self.ask(message, p.Done, bytes(body))

    def push(self, rows: Sequence[Trajectory]) -> list[str]:
        """Push trajectories of one actor; return the outcome of each."""
        body = schema.encode(rows, self.facts.run_id)
        results = self.ask(p.Push(rows[0].actor, rows[0].epoch), p.PushReply, body).results
        return [result.outcome for result in results]

    def draw(self, step: int, version: int, *, incarnation: int = 0) -> tuple[p.DrawReply, list[Trajectory]]:
        """Request a batch; if it is not ready, return the service's reply at the deadline.

        Raises:
            BufferRefused: the draw was refused.
        """
        request = p.DrawRequest(step, version, incarnation, self.facts.groups_per_step, 0.0)
        reply, body = self.store.write(
            lambda tx: self.core.try_draw(tx, request) or self.core.draw_timed_out(tx, request)
        )
        assert isinstance(reply, p.DrawReply)
        return reply, decode(body) if body else []

    def finish(self, step: int, version: int, *, incarnation: int = 0, skipped: bool = False) -> None:
        """Finish a step that led to `version`."""
        self.ask(p.StepFinished(step, version, incarnation, skipped), p.Done)

    def expire(self) -> None:
        """Expire leases whose timeout has passed."""
        self.store.write(self.core.leases.expire_due)

    def status(self) -> p.Status:
        """Return the status with the ledger."""
        return self.ask(p.StatusRequest(), p.Status)

    def faults(self) -> list[str]:
        """Return the faults that `verify` finds and the differences between the index and the rows."""
        found: list[str] = self.store.read(verify)["faults"]
        return found + self.store.read(lambda tx: index_faults(self.core, tx))


def index_faults(core: BufferCore, tx: Transaction) -> list[str]:
    """Return how the index of a core differs from one that is rebuilt from the store."""
    current, rebuilt = core.groups.index, GroupIndex(core.groups.config, samplers.build(core.groups.config)[1])
    current.load(tx)
    rebuilt.load(tx)
    names = (
        "_places",
        "open",
        "unleased",
        "leases",
        "ready",
        "uninformative",
        "num_unused",
        "_by_prompt",
        "next_evictable",
    )
    pairs = [(name, getattr(current, name), getattr(rebuilt, name)) for name in names]
    pairs.append(("_weights", _log_weights(current), _log_weights(rebuilt)))
    pairs += _prompts_of(core, tx)
    return [f"the index has {name} = {kept}, but the rows give {found}" for name, kept, found in pairs if kept != found]


def _prompts_of(core: BufferCore, tx: Transaction) -> list[tuple[str, Any, Any]]:
    """Return pairs of the prompt statistics of a core and of rebuilt ones."""
    from leeway.planning.prompts import ChosenPrompts  # a test checks which processes import it

    current, facts = core.groups.prompts, core.facts
    if not isinstance(current, ChosenPrompts):
        return []
    rebuilt = ChosenPrompts(facts, core.groups.config, lambda: 0.0)
    current.load(tx)
    rebuilt.load(tx)
    both, every = (current, rebuilt), range(facts.num_prompts)
    visits = [[each.lengths.get(prompt) for prompt in every] for each in both]
    tries = [[each.successes and each.successes.get(prompt) for prompt in every] for each in both]
    return [("window", [*current._window], [*rebuilt._window]), ("lengths", *visits), ("tries", *tries)]


def _log_weights(index: GroupIndex) -> dict[int, float]:
    return {
        number * Weights.BLOCK + slot: log_weight
        for number, block in index._weights._blocks.items()
        for slot, log_weight in enumerate(block.tolist())
        if log_weight > -math.inf
    }


def weights_of(log_weights: Mapping[int, float]) -> Weights:
    """Return `Weights` with these log-weights."""
    weights = Weights()
    for item, log_weight in log_weights.items():
        weights.put(item, log_weight)
    return weights


def block_of(batch: pa.RecordBatch) -> bytes:
    """Return all rows of a batch as one block, with records from 1 on."""
    rows = range(batch.num_rows)
    return b"".join(RowBytes(batch).block(rows, [row + 1 for row in rows]))


def key_of_block(tx: Transaction, record: int) -> int:
    """Return the key of the block of a record in the store."""
    return min(records_in(tx.blocks_of([record])[0]))


def make_trajectory(
    lease: p.Lease,
    index: int,
    *,
    seq: int,
    actor: str = "actor-0",
    epoch: int = 1,
    version: PolicyVersion | None = None,
    reward: float | None = 1.0,
    num_completion_tokens: int = 4,
) -> Trajectory:
    """Return a valid trajectory of a leased sample, with a single version (default: the lease's `min_version`)."""
    sampled = version or PolicyVersion(0, lease.min_version)
    return Trajectory(
        lease_id=lease.lease_id,
        attempt=lease.attempt,
        group_id=lease.group_id,
        sample_index=index,
        prompt_id=lease.prompt_id,
        token_ids=np.arange(3 + num_completion_tokens, dtype=np.int32),
        prompt_length=3,
        logprobs=np.full(num_completion_tokens, -0.5, np.float32),
        spans=(VersionSpan(sampled, 0, num_completion_tokens),),
        reward=reward,
        finish_reason="stop",
        reward_parts={"exact": reward},
        columns={"question": "1+1=", "group": lease.group_id},
        actor=actor,
        epoch=epoch,
        seq=seq,
        started_s=1.0,
        finished_s=2.0,
    )


def facts(**changes):
    return run_facts(**{"run_id": "r", "seed": 7, "num_prompts": 10, "group_size": 2, **changes})


class Actor:
    """A simulated actor with its own sequence numbers."""

    def __init__(self, buffer, name="actor-0", session="1"):
        self.buffer, self.name, self.seq = buffer, name, 0
        self.epoch = buffer.hello(name, session).epoch

    def lease(self, max_groups=100):
        return self.buffer.lease(self.name, max_groups, epoch=self.epoch)

    def rows(self, lease, indices=None, **fields):
        rows = []
        for index in lease.sample_indices if indices is None else indices:
            rows.append(make_trajectory(lease, index, seq=self.seq, actor=self.name, epoch=self.epoch, **fields))
            self.seq += 1
        return rows

    def work(self, lease, indices=None, **fields):
        return self.buffer.push(self.rows(lease, indices, **fields))


def run_steps(buffer, actor, steps):
    drawn = {}
    for step in steps:
        for lease in actor.lease():
            actor.work(lease)
        reply, _ = buffer.draw(step, step - 1)
        assert reply.ready
        drawn[step] = reply.record_ids
        buffer.finish(step, step)
        buffer.publish(step)
    return drawn


def generate(buffer, actor, num_groups, rewards=(1.0,), tokens=4, version=None):
    """Complete groups with these rewards (the last one repeated) and this length; return their ids."""
    done = []
    while len(done) < num_groups:
        leases = actor.lease(num_groups - len(done))
        assert leases, "admission is closed"
        for lease in leases:
            for index in lease.sample_indices:
                reward = rewards[min(index, len(rewards) - 1)]
                actor.work(lease, [index], reward=reward, num_completion_tokens=tokens, version=version)
            done.append(lease.group_id)
    return done


def train(buffer, step, *, incarnation=0, publish=True):
    """Train one step at version step - 1; return the reply to its draw."""
    reply, _ = buffer.draw(step, step - 1, incarnation=incarnation)
    assert reply.ready, reply.waiting_for
    buffer.finish(step, step, incarnation=incarnation)
    if publish:
        buffer.publish(step, incarnation)
    return reply
