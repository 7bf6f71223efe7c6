"""InProcessBuffer: the buffer's rules over a real store, without sockets, under a clock of the caller's.

What answers is what the service runs; only the wire is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from buffer import protocol as p
from buffer import schema
from buffer.config import BufferConfig
from buffer.core import BufferCore, OpenedPushes
from buffer.errors import BufferRefused
from buffer.offline.verify import verify
from buffer.store import Store
from buffer.trajectory import Trajectory, VersionSpan
from common.run import RunFacts
from common.staleness import PolicyVersion
from tests.trajectories import decode

M = TypeVar("M", bound=p.Message)


class InProcessBuffer:
    """One client's view of a buffer; every call is one transaction."""

    def __init__(self, folder: Path, facts: RunFacts, config: BufferConfig | None = None) -> None:
        self.folder = folder
        self.facts = facts
        self.config = config or BufferConfig()
        self.now_s = 0.0
        """The clock. Move it as you like; `expire` acts on it."""
        self._requests = 0
        self._open()

    def _open(self) -> None:
        # A map so small that it has to grow is part of what is tested.
        self.store = Store(self.folder, self.facts, first_map_size=2**18)
        self.core = BufferCore(self.config, self.facts, lambda: self.now_s)
        self.store.read(self.core.leases.restart)

    def restart(self) -> None:
        """What a new service process would find."""
        self.store.close()
        self._open()

    def close(self) -> None:
        """Give the folder back."""
        self.store.close()

    def ask(self, message: p.Request, kind: type[M], body: bytes = b"") -> M:
        """The reply to a request, which must be of this kind.

        Raises:
            BufferRefused: the request was refused.
        """
        refused: list[BufferRefused] = []

        def answer(tx: Any) -> p.Reply | None:
            try:
                if isinstance(message, p.Push):
                    return self.core.push(tx, OpenedPushes([(message, body)]))[0]
                return self.core.handle(tx, message, body)[0]
            except BufferRefused as error:
                refused.append(error)
                return None

        reply = self.store.write(answer)
        if isinstance(reply, p.Refused):
            raise BufferRefused(reply.reason)
        if refused:
            raise refused[0]
        assert isinstance(reply, kind)
        return reply

    def hello(self, name: str, session: str = "1", role: str = "actor") -> p.Welcome:
        """Connect a client."""
        return self.ask(p.Hello(role, name, session), p.Welcome)

    def begin(self, version: int = 0, step: int = 0, *, session: str = "learner") -> p.IncarnationReply:
        """Start a learner that publishes the version it starts from."""
        reply = self.ask(p.BeginIncarnation(session, version, step), p.IncarnationReply)
        self.publish(version, reply.incarnation)
        return reply

    def publish(self, version: int, incarnation: int = 0) -> None:
        """Announce weights."""
        self.ask(p.Published(incarnation, version), p.Done)

    def lease(self, actor: str, max_groups: int, *, epoch: int = 1) -> list[p.Lease]:
        """Ask for groups under a new request number."""
        self._requests += 1
        return self.ask(p.LeaseRequest(actor, epoch, self._requests, max_groups), p.LeaseGrant).leases

    def push(self, rows: Sequence[Trajectory]) -> list[str]:
        """Push trajectories of one actor; the outcome of each."""
        body = schema.encode(rows, self.facts.run_id)
        results = self.ask(p.Push(rows[0].actor, rows[0].epoch), p.PushReply, body).results
        return [result.outcome for result in results]

    def draw(self, step: int, version: int, *, incarnation: int = 0) -> tuple[p.DrawReply, list[Trajectory]]:
        """Ask for a batch; where it is not ready, the reply that a service gives at the deadline.

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
        """Finish a step, which led to `version`."""
        self.ask(p.StepFinished(step, version, incarnation, skipped), p.Done)

    def expire(self) -> None:
        """Lose the leases whose time is over."""
        self.store.write(self.core.leases.expire_due)

    def status(self) -> p.Status:
        """The ledger and what is in flight."""
        return self.ask(p.StatusRequest(), p.Status)

    def faults(self) -> list[str]:
        """What `verify` finds wrong."""
        found: list[str] = self.store.read(verify)["faults"]
        return found


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
    """A valid trajectory of a leased sample, of a single version (default: the lease's `min_version`)."""
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
