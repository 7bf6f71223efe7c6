"""The real buffer: `BufferCore` over a real LMDB environment, in one write transaction per seed.

The transaction is aborted at the end, so nothing is synced. The real service answers all requests of one turn in one
transaction. In the simulation, each request is a turn: the state in memory is flushed and discarded between requests,
as in a commit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import lmdb
import numpy as np

from leeway.buffer import protocol as p
from leeway.buffer import schema
from leeway.buffer.config import BufferConfig
from leeway.buffer.schema import REQUEUED, Trajectory, VersionSpan
from leeway.buffer.transaction import TABLES, Transaction
from leeway.common.run import RunFacts
from leeway.common.staleness import StalenessContract
from tests.simulation.actor import Leased, Sample, Tokens
from tests.simulation.knobs import Knobs
from tests.simulation.witness import Key, reward_of
from tests.trajectories import decode
from tests.world.buffer import InProcessBuffer

T = TypeVar("T")

RUN = "simulated"
_TOKENS = np.arange(6, dtype=np.int32)
_LOGPROBS = np.full(4, -0.5, np.float32)


class Environment:
    """An LMDB environment that is empty at the start of every seed."""

    def __init__(self) -> None:
        shared_memory = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None)
        self._env = lmdb.open(self._folder.name, map_size=2**28, max_dbs=len(TABLES), sync=False)
        self._dbs = {name: self._env.open_db(name.encode()) for name in TABLES}

    def begin(self) -> lmdb.Transaction:
        """Begin a write transaction, which the caller aborts."""
        return self._env.begin(write=True, buffers=True)

    def turn(self, txn: lmdb.Transaction) -> Transaction:
        """Return the transaction that the service opens for one turn."""
        return Transaction(txn, self._dbs, caches=True)

    def close(self) -> None:
        """Close and remove the environment."""
        self._env.close()
        self._folder.cleanup()


class Turns:
    """Replaces a store: each call is a turn within the single transaction of a seed."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._txn = env.begin()
        self.tx = env.turn(self._txn)

    def write(self, change: Callable[[Transaction], T]) -> T:
        """Run `change` in a new turn, which sees only what earlier turns flushed."""
        self.tx.flush()
        self.tx = self._env.turn(self._txn)
        return change(self.tx)

    read = write

    def close(self) -> None:
        """Do nothing: the data stays, as when a store is closed."""

    def abort(self) -> None:
        """Discard everything."""
        self._txn.abort()


class CoreBuffer:
    """The rules of the buffer service."""

    def __init__(self, knobs: Knobs, contract: StalenessContract, clock: Callable[[], float], env: Environment) -> None:
        facts = RunFacts(
            run_id=RUN, seed=1, num_prompts=7, group_size=knobs.group_size, groups_per_step=knobs.groups_per_step,
            updates_per_step=knobs.updates_per_step, vocab_size=16, max_tokens=16, staleness=contract.config,
        )  # fmt: skip
        config = BufferConfig(
            capacity_trajectories=64 * contract.capacity() * knobs.group_size,
            refill_uninformative=knobs.refill,
        )
        self._turns = Turns(env)
        self._buffer = InProcessBuffer(Path(), facts, config, open_store=lambda: self._turns, clock=clock)
        self.expire, self.restart, self.faults = self._buffer.expire, self._buffer.restart, self._buffer.faults
        self.published = lambda incarnation, version: self._buffer.publish(version, incarnation)
        self.close = self._turns.abort

    def hello(self, name: str, session: str) -> int:
        """Open an epoch; a repeated hello returns the same epoch."""
        first, again = (self._buffer.hello(name, session) for _ in range(2))
        assert first == again
        return first.epoch

    def lease(self, name: str, epoch: int, number: int, max_groups: int) -> Leased:
        """Grant leases."""
        answer = self._buffer.answer(p.LeaseRequest(name, epoch, number, max_groups))
        assert answer is not None
        grant, body = answer
        assert isinstance(grant, p.LeaseGrant)
        keys = [(lease.lease_id, index) for lease in grant.leases for index in lease.prefixes]
        rows = decode(body) if len(body) else []
        spans = [Tokens(row.spans[0].version, row.spans[-1].version) for row in rows]
        return Leased(grant.leases, grant.newest, grant.draining, prefixes=dict(zip(keys, spans, strict=True)))

    def push(self, sample: Sample) -> str:
        """Push a sample; return its outcome."""
        return self._buffer.push([_trajectory(sample)])[0]

    def give_up(self, name: str, epoch: int, lease: p.Lease, index: int) -> None:
        """Mark a sample as failed."""
        self._buffer.answer(p.GiveUp(name, epoch, lease.lease_id, lease.attempt, [index], "simulated"))

    def requeue(
        self, name: str, epoch: int, lease: p.Lease, indices: Sequence[int], partials: dict[int, Tokens], goes_on: bool
    ) -> None:
        """Requeue samples with their tokens, or only save the tokens if the actor continues."""
        rows = []
        for index, tokens in partials.items():
            sample = Sample(Key(name, epoch, 0), lease, index, tokens.oldest, tokens.newest)
            rows.append(replace(_trajectory(sample), reward=None, finish_reason=REQUEUED))
        message = p.HandOn(name, epoch, lease.lease_id, lease.attempt, list(indices), goes_on)
        self._buffer.answer(message, bytes(schema.encode(rows, RUN)))

    def renew(self, name: str, epoch: int, lease_ids: list[int]) -> list[int]:
        """Extend leases; return the lost leases."""
        return self._buffer.ask(p.Renew(name, epoch, lease_ids), p.RenewReply).lost

    def begin(self, session: str, version: int, step: int) -> int:
        """Start a learner; return its incarnation."""
        return self._buffer.ask(p.BeginIncarnation(session, version, step), p.IncarnationReply).incarnation

    def draw(self, step: int, version: int, incarnation: int, allowed: int | None) -> list[list[Key]] | None:
        """Return the samples of each group of the step; None if the step has to wait."""
        num_groups = self._buffer.facts.groups_per_step
        answer = self._buffer.answer(p.DrawRequest(step, version, incarnation, num_groups, 0.0, allowed))
        if answer is None:
            return None
        reply, body = answer
        assert isinstance(reply, p.DrawReply)
        groups: dict[int, list[Key]] = {group_id: [] for group_id in reply.group_ids}
        for row in decode(body):
            groups[row.group_id].append(Key(row.actor, row.epoch, row.seq))
        return list(groups.values())

    def finish(self, step: int, version: int, incarnation: int, skipped: bool) -> None:
        """Finish a step."""
        self._buffer.finish(step, version, incarnation=incarnation, skipped=skipped)

    def durable(self, step: int, incarnation: int) -> None:
        """Mark all uses of samples as final, up to and including this step."""
        self._buffer.answer(p.CheckpointDurable(step, incarnation))

    def counts(self) -> tuple[int, int, int, int]:
        """Return the ledger's gap with quarantined rows, samples committed, samples dropped, and groups outstanding."""
        tx, core = self._turns.tx, self._buffer.core
        counts, ledger = core.groups.checked_counts(tx), tx.state.ledger
        return (
            counts["gap"] + counts["quarantined"],
            ledger.committed,
            ledger.dropped_stale,
            core.leases.outstanding(tx),
        )

    def num_set_aside(self) -> int:
        """Return the number of uninformative groups that no step used, counted from their rows."""
        return self._turns.read(lambda tx: sum("uninformative" in g.sample_states for _, g in tx.groups.all_items()))

    def waiting_for(self) -> str:
        """Return the state of the buffer as text for a trace."""
        return self._turns.read(self._describe)

    def _describe(self, tx: Transaction) -> str:
        index = self._buffer.core.groups.index
        admission = self._buffer.core.leases.closed_because(tx) or "open"
        return (
            f"version {tx.state.version}, published {tx.state.published}, ready {index.ready}, "
            f"open {index.open}, drawn {tx.state.pending_draws}, admission: {admission}"
        )


def _trajectory(sample: Sample) -> Trajectory:
    """Return the trajectory that an actor sends, with tokens of one version, or of two if weights changed in flight."""
    spans = [VersionSpan(sample.oldest, 0, 4)]
    if sample.newest != sample.oldest:
        spans = [VersionSpan(sample.oldest, 0, 2), VersionSpan(sample.newest, 2, 4)]
    return Trajectory(
        lease_id=sample.lease.lease_id,
        attempt=sample.lease.attempt,
        group_id=sample.lease.group_id,
        sample_index=sample.index,
        prompt_id=sample.lease.prompt_id,
        token_ids=_TOKENS,
        prompt_length=2,
        logprobs=_LOGPROBS,
        spans=tuple(spans),
        reward=reward_of(sample.key),
        finish_reason="stop",
        actor=sample.key.actor,
        epoch=sample.key.epoch,
        seq=sample.key.seq,
        started_s=1.0,
        finished_s=2.0,
    )
