"""The real buffer: `BufferCore` over a real LMDB environment, one write transaction to a seed.

The transaction is aborted in the end, so nothing is ever synced. Between two requests everything that the
service would keep in memory for one turn is written and forgotten, as a commit does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np

from buffer import protocol as p
from buffer import schema
from buffer.config import BufferConfig
from buffer.core import BufferCore, OpenedPushes
from buffer.groups import live_gap
from buffer.offline.verify import verify
from buffer.trajectory import Trajectory, VersionSpan
from buffer.transaction import TABLES, Transaction
from common.run import RunFacts
from common.staleness import StalenessContract
from tests.simulation.actor import Sample
from tests.simulation.knobs import LEASE_TIMEOUT_S, Knobs
from tests.simulation.witness import Key
from tests.trajectories import decode

RUN = "simulated"
_TOKENS = np.arange(6, dtype=np.int32)
_LOGPROBS = np.full(4, -0.5, np.float32)


class Environment:
    """An LMDB environment that no seed leaves anything in."""

    def __init__(self) -> None:
        shared_memory = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None)
        self._env = lmdb.open(self._folder.name, map_size=2**28, max_dbs=len(TABLES), sync=False)
        self._dbs = {name: self._env.open_db(name.encode()) for name in TABLES}
        self._page_size = int(self._env.stat()["psize"])

    def begin(self) -> lmdb.Transaction:
        """A write transaction; the caller aborts it."""
        return self._env.begin(write=True, buffers=True)

    def turn(self, txn: lmdb.Transaction) -> Transaction:
        """What the service opens for one turn."""
        return Transaction(txn, self._dbs, page_size=self._page_size, caches=True)

    def close(self) -> None:
        """Remove it."""
        self._env.close()
        self._folder.cleanup()


class CoreBuffer:
    """The rules of the buffer service."""

    def __init__(self, knobs: Knobs, contract: StalenessContract, clock: Callable[[], float], env: Environment) -> None:
        staleness = contract.config
        self._clock, self._env = clock, env
        self._facts = RunFacts(
            run_id=RUN, seed=1, num_prompts=7, group_size=knobs.group_size, groups_per_step=knobs.groups_per_step,
            updates_per_step=knobs.updates_per_step, vocab_size=16, max_tokens=16, staleness=staleness,
        )  # fmt: skip
        self._config = BufferConfig(
            capacity_trajectories=64 * contract.capacity() * knobs.group_size,
            max_attempts=1_000_000,
            lease_timeout_s=LEASE_TIMEOUT_S,
        )
        self._txn = env.begin()
        self._tx = env.turn(self._txn)
        self._core = BufferCore(self._config, self._facts, clock)

    def close(self) -> None:
        """Forget everything."""
        self._txn.abort()

    def _turn(self) -> Transaction:
        """The next transaction, which sees what the last one wrote and nothing else."""
        self._tx.flush()
        self._tx = self._env.turn(self._txn)
        return self._tx

    def hello(self, name: str, session: str) -> int:
        """Open an epoch; said twice, it is one."""
        message = p.Hello("actor", name, session)
        first = self._core.handle(self._turn(), message, b"")[0]
        again = self._core.handle(self._turn(), message, b"")[0]
        assert isinstance(first, p.Welcome)
        assert first == again
        return first.epoch

    def lease(self, name: str, epoch: int, number: int, room: int) -> p.LeaseGrant:
        """Grant leases."""
        reply = self._core.handle(self._turn(), p.LeaseRequest(name, epoch, number, room), b"")[0]
        assert isinstance(reply, p.LeaseGrant)
        return reply

    def push(self, sample: Sample) -> str:
        """Settle one sample."""
        body = schema.encode([_trajectory(sample)], RUN)
        message = p.Push(sample.key.actor, sample.key.epoch)
        reply = self._core.push(self._turn(), OpenedPushes([(message, body)]))[0]
        assert isinstance(reply, p.PushReply), reply
        return reply.results[0].outcome

    def give_up(self, name: str, epoch: int, lease: p.Lease, index: int) -> None:
        """A sample will not come."""
        message = p.GiveUp(name, epoch, lease.lease_id, lease.attempt, [index], "simulated")
        self._core.handle(self._turn(), message, b"")

    def renew(self, name: str, epoch: int, lease_ids: list[int]) -> list[int]:
        """Extend leases; those that are lost."""
        reply = self._core.handle(self._turn(), p.Renew(name, epoch, lease_ids), b"")[0]
        assert isinstance(reply, p.RenewReply)
        return reply.lost

    def expire(self) -> None:
        """Lose the leases whose time is over."""
        self._core.leases.expire_due(self._turn())

    def restart(self) -> None:
        """What a new service process finds."""
        self._core = BufferCore(self._config, self._facts, self._clock)
        self._core.leases.restart(self._turn())

    def begin(self, session: str, version: int, step: int) -> int:
        """A learner starts."""
        reply = self._core.handle(self._turn(), p.BeginIncarnation(session, version, step), b"")[0]
        assert isinstance(reply, p.IncarnationReply)
        return reply.incarnation

    def published(self, incarnation: int, version: int) -> None:
        """Weights can be pulled."""
        self._core.handle(self._turn(), p.Published(incarnation, version), b"")

    def draw(self, step: int, version: int, incarnation: int) -> list[list[Key]] | None:
        """The samples of each group of the step; None where it must wait."""
        request = p.DrawRequest(step, version, incarnation, self._facts.groups_per_step, 0.0)
        answer = self._core.try_draw(self._turn(), request)
        if answer is None:
            return None
        reply, body = answer
        assert isinstance(reply, p.DrawReply)
        groups: dict[int, list[Key]] = {group_id: [] for group_id in reply.group_ids}
        for row in decode(body):
            groups[row.group_id].append(Key(row.actor, row.epoch, row.seq))
        return list(groups.values())

    def finish(self, step: int, version: int, incarnation: int, skipped: bool) -> None:
        """A step is done."""
        self._core.handle(self._turn(), p.StepFinished(step, version, incarnation, skipped), b"")

    def durable(self, step: int, incarnation: int) -> None:
        """Uses up to the step are final."""
        self._core.handle(self._turn(), p.CheckpointDurable(step, incarnation), b"")

    def counts(self) -> tuple[int, int, int, int]:
        """The ledger's gap, samples committed, samples dropped, and groups outstanding."""
        tx = self._tx
        ledger = tx.state.ledger
        return ledger.gap + live_gap(tx), ledger.committed, ledger.dropped_stale, self._core.leases.outstanding(tx)

    def faults(self) -> list[str]:
        """What `verify` finds wrong in the whole store."""
        found: list[str] = verify(self._turn())["faults"]
        return found

    def waiting_for(self) -> str:
        """What the buffer holds, for a trace."""
        tx = self._turn()
        admission = self._core.leases.closed_because(tx) or "open"
        return (
            f"version {tx.state.version}, published {tx.state.published}, ready {list(tx.ready_groups.all_keys())}, "
            f"open {list(tx.open_groups.all_keys())}, drawn {tx.state.pending_draws}, admission: {admission}"
        )


def _trajectory(sample: Sample) -> Trajectory:
    """The sample as an actor sends it: of one version, or of two where weights changed in flight."""
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
        reward=1.0,
        finish_reason="stop",
        actor=sample.key.actor,
        epoch=sample.key.epoch,
        seq=sample.key.seq,
        started_s=1.0,
        finished_s=2.0,
    )
