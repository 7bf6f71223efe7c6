"""ShardedClient: the services of several shards behind one client, with the methods of `BufferClient`.

A shard is *silent* while something that it was told or asked has been unanswered for some seconds. The
others go on without it: it has no part in new steps, its prompts wait, and what the learner says
meanwhile reaches it in order once it answers again. Two things wait for a silent shard: the start
of a learner, so that an incarnation has one number everywhere, and a step that the shard has a part in.

How the batch of a step comes together is in `buffer.joint`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from buffer import protocol as p
from buffer.client import BufferClient, Draw
from buffer.config import BufferConfig
from buffer.errors import BufferUnavailable
from buffer.joint import JointDraws
from buffer.links import Link, Links, Request, sum_of
from buffer.trajectory import Trajectory
from common.rpc.auth import ClientKeys

log = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""A shard that leaves something unanswered for so long is silent."""

_LEASE_POLL_S = 0.02

_CLOSED = "the client of the buffer's shards is closed"

R = TypeVar("R")


def open_client(
    addresses: Sequence[str],
    *,
    run_id: str,
    role: str,
    name: str,
    config: BufferConfig,
    keys: ClientKeys | None = None,
) -> BufferClient | ShardedClient:
    """A client of a buffer of one or several shards.

    Args:
        addresses: of the services, in the order of their shards.
        run_id: see `BufferClient`.
        role: see `BufferClient`.
        name: see `BufferClient`; the same for all shards.
        config: the `[buffer]` section.
        keys: see `BufferClient`.
    """
    clients = [
        BufferClient(
            address,
            run_id=run_id,
            role=role,
            name=name,
            config=config,
            shard=shard,
            num_shards=len(addresses),
            keys=keys,
        )
        for shard, address in enumerate(addresses)
    ]
    return clients[0] if len(clients) == 1 else ShardedClient(clients, config)


class ShardedClient:
    """One client of several shards; safe to use from several threads. Methods are as in `BufferClient`."""

    def __init__(
        self, clients: Sequence[BufferClient], config: BufferConfig, *, patience_s: float = PATIENCE_S
    ) -> None:
        """Start the thread in which the conversations with the shards interleave.

        Args:
            clients: of the shards, in their order; they are closed with this one.
            config: the `[buffer]` section.
            patience_s: a shard that leaves something unanswered for so long is silent.
        """
        self._config = config
        self._patience_s = patience_s
        self._links = Links([Link(client, patience_s) for client in clients], patience_s)
        self._turn = 0
        self._draws = JointDraws(self._links)
        self._is_closed = False
        self._leasing = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        name = f"{clients[0].name}-shards"
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    # --- any client -------------------------------------------------------------------------------

    def connect(self) -> p.Welcome:
        """Say hello; blocks until all shards answer, but those that are silent: they are greeted when they do.

        Raises:
            BufferUnavailable: none did for `give_up_after_s`.
            BufferRefused: one serves another run or another shard, or speaks another protocol.
        """
        return self._submit(self._connect).result(self._config.give_up_after_s + 20.0)

    @property
    def heard_at(self) -> float:
        """When any shard last answered anything, on the monotonic clock."""
        return max(link.client.heard_at for link in self._links)

    def status(self) -> Future[p.Status]:
        """The sum over all shards; of silent ones what was known last."""
        return self._submit(self._status)

    def drain(self) -> Future[p.Done]:
        """Let no shard grant further leases."""
        return self._tell(lambda client: client.drain())

    def close(self, timeout_s: float | None = None) -> None:
        """Give what is outstanding `timeout_s` (default: `request_timeout_s`) to be answered, then end."""
        if self._is_closed:
            return
        self._is_closed = True
        limit_s = self._config.request_timeout_s if timeout_s is None else timeout_s
        asyncio.run_coroutine_threadsafe(self._settle(limit_s), self._loop).result(limit_s + 10.0)
        with ThreadPoolExecutor(len(self._links)) as pool:
            list(pool.map(lambda link: link.client.close(limit_s), self._links))
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result(10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    # --- actors -----------------------------------------------------------------------------------

    def lease(self, max_groups: int) -> Future[p.LeaseGrant]:
        """Ask all shards in turn for up to `max_groups` groups; more come where a silent shard answers late."""
        return self._submit(lambda: self._lease(max_groups))

    def push(self, trajectory: Trajectory) -> Future[p.RowResult]:
        """Hand in a trajectory to the shard of its prompt. Does not block: what a shard has no credit for waits."""
        if self._is_closed:
            raise BufferUnavailable(_CLOSED)
        return self._links.owner(trajectory.lease_id).overflow.push(trajectory, self._loop)

    def has_room(self, _trajectory: Trajectory) -> bool:
        """`push` always returns at once."""
        return True

    def give_up(self, lease: p.Lease, sample_indices: Sequence[int], reason: str) -> Future[p.Done]:
        """Say that these samples of a lease will not come."""
        return self._links.owner(lease.lease_id).client.give_up(lease, sample_indices, reason)

    def renew(self, lease_ids: Sequence[int]) -> Future[p.RenewReply]:
        """Say that these leases are still worked on; those of a silent shard are not called lost."""
        return self._submit(lambda: self._renew(lease_ids))

    # --- the learner ------------------------------------------------------------------------------

    def begin_incarnation(self, version: int, step: int) -> Future[p.IncarnationReply]:
        """Start to learn; completes when every shard has answered."""
        return self._submit(lambda: self._begin(version, step))

    def draw(self, step: int, version: int, incarnation: int, num_groups: int, wait_s: float) -> Future[Draw]:
        """Ask for the batch of a step, in the order of the shards."""
        return self._submit(lambda: self._draws.draw(step, version, incarnation, num_groups, wait_s))

    def write_scores(self, record_ids: Sequence[int], logprobs: Sequence[npt.NDArray[np.float32]]) -> Future[p.Done]:
        """Store reference log-probabilities, each in the shard of its record."""
        if len(record_ids) != len(logprobs):
            raise ValueError(f"write_scores got {len(record_ids)} records but {len(logprobs)} arrays")
        of_shard: dict[int, tuple[list[int], list[npt.NDArray[np.float32]]]] = {}
        for record, array in zip(record_ids, logprobs, strict=True):
            records, arrays = of_shard.setdefault(record % len(self._links), ([], []))
            records.append(record)
            arrays.append(array)
        return self._tell(lambda client: client.write_scores(*of_shard[client.shard]), of_shard)

    def step_finished(self, step: int, version: int, skipped: bool = False) -> Future[p.Done]:
        """Say that step `step` is done; shards without a part in it only learn the version."""
        took_part = [self._draws.takes_part(step, link.shard) for link in self._links]
        return self._tell(
            lambda client: client.step_finished(step, version, skipped, took_part=took_part[client.shard])
        )

    def published(self, incarnation: int, version: int) -> Future[p.Done]:
        """Say that these weights can be pulled."""
        return self._tell(lambda client: client.published(incarnation, version))

    def checkpoint_durable(self, step: int) -> Future[p.Done]:
        """Say that a checkpoint at or past `step` is on disk: uses up to it are final."""
        return self._tell(lambda client: client.checkpoint_durable(step))

    # --- conversations ----------------------------------------------------------------------------

    async def _connect(self) -> p.Welcome:
        greetings = {link.shard: link.greet() for link in self._links}
        welcomes = await self._links.answered(greetings)
        return max(welcomes.values(), key=lambda welcome: welcome.epoch)

    async def _status(self) -> p.Status:
        replies = await self._links.answered(
            {link.shard: link.ask_one("status", lambda client: client.status()) for link in self._links}
        )
        for shard, status in replies.items():
            link = self._links[shard]
            link.status = status
            link.hear(status.ledger, status.fidelity)
        silent = [link.shard for link in self._links if link.shard not in replies]
        return sum_of([link.status for link in self._links if link.status is not None], silent)

    async def _lease(self, max_groups: int) -> p.LeaseGrant:
        async with self._leasing:
            while not (grants := await self._ask_for_leases(max_groups)):
                if self._links.late_error is not None:
                    raise self._links.late_error
                # all that are connected are silent, while another one is not: nothing was waited for
                await asyncio.sleep(_LEASE_POLL_S)
        leases = [lease for grant in grants for lease in grant.leases]
        return p.LeaseGrant(
            leases, max(grant.newest for grant in grants), draining=any(grant.draining for grant in grants)
        )

    async def _ask_for_leases(self, max_groups: int) -> list[p.LeaseGrant]:
        """One round over the shards. Another one begins it each time, so that none is always the last."""
        turn, self._turn = self._turn, (self._turn + 1) % len(self._links)
        order = [link for link in self._links[turn:] + self._links[:turn] if link.is_connected]
        grants: list[p.LeaseGrant] = []
        for i, link in enumerate(order):
            room = max_groups - sum(len(grant.leases) for grant in grants)
            if room <= 0:
                break
            wanted = -(-room // (len(order) - i))
            task = link.ask_one("lease", lambda client, num=wanted: client.lease(num), even_late=True)  # type: ignore[misc]
            answer = await self._links.answered({link.shard: task})
            if answer:
                link.taken("lease")
                grants += answer.values()
        return grants

    async def _renew(self, lease_ids: Sequence[int]) -> p.RenewReply:
        of_shard: dict[int, list[int]] = {}
        for lease_id in lease_ids:
            of_shard.setdefault(lease_id % len(self._links), []).append(lease_id)
        replies = await self._links.answered(
            {s: self._links[s].ask(lambda client: client.renew(of_shard[client.shard])) for s in of_shard}
        )
        return p.RenewReply([lease_id for reply in replies.values() for lease_id in reply.lost])

    async def _begin(self, version: int, step: int) -> p.IncarnationReply:
        """A learner begins nowhere before it has begun everywhere, under the same number."""

        async def all_begin(at_least: int) -> list[p.IncarnationReply]:
            return await asyncio.gather(
                *[
                    link.tell(lambda client: client.begin_incarnation(version, step, at_least=at_least))
                    for link in self._links
                ]
            )

        replies = await all_begin(0)
        number = max(reply.incarnation for reply in replies)
        if any(reply.incarnation < number for reply in replies):
            replies = await all_begin(number)
        resumed_at: dict[int, int] = {}
        for reply in replies:
            for incarnation, start in reply.resumed_at.items():
                resumed_at[incarnation] = min(start, resumed_at.get(incarnation, start))
        plans = self._draws.begin(reply.plans for reply in replies)
        await self._status()
        return p.IncarnationReply(number, resumed_at, plans)

    # --- parts ------------------------------------------------------------------------------------

    def _submit(self, talk: Callable[[], Coroutine[Any, Any, R]]) -> Future[R]:
        if self._is_closed:
            raise BufferUnavailable(_CLOSED)
        return asyncio.run_coroutine_threadsafe(self._guarded(talk), self._loop)

    async def _guarded(self, talk: Callable[[], Coroutine[Any, Any, R]]) -> R:
        if self._links.late_error is not None:
            raise self._links.late_error
        try:
            return await talk()
        except asyncio.CancelledError:
            raise BufferUnavailable(_CLOSED) from None

    def _tell(self, request: Request[p.Done], shards: Mapping[int, object] | None = None) -> Future[p.Done]:
        """Say something to all shards, or to these; completes when those that are not silent have answered."""

        async def told() -> p.Done:
            links = [link for link in self._links if shards is None or link.shard in shards]
            await self._links.answered({link.shard: link.tell(request) for link in links})
            return p.Done()

        return self._submit(told)

    async def _settle(self, limit_s: float) -> None:
        """Let the shards hear what they were told."""
        untold = [task for link in self._links for task in link.untold]
        if untold:
            await asyncio.wait(untold, timeout=limit_s)
        for link in self._links:
            if link.untold:
                log.warning("shard %d did not hear the last %d messages", link.shard, len(link.untold))

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
