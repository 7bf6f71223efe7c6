"""ShardedClient: the services of several shards behind one client, with the methods of `BufferClient`.

A shard is *silent* while something that it was told or asked has been unanswered for some seconds. The
others go on without it: it has no part in new steps, its prompts wait, and what the learner says
meanwhile reaches it in order once it answers again. Two things wait for a silent shard: the start
of a learner, so that an incarnation has one number everywhere, and a step that the shard has a part in.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from buffer import protocol as p
from buffer import schema
from buffer.client import REQUEST_TIMEOUT_S, BufferClient, Draw, Granted, Unscored, Visits, await_welcome
from buffer.config import BufferConfig
from buffer.errors import BufferUnavailable
from buffer.outbox import Together
from buffer.schema import Trajectory
from buffer.sharding.division import divide_step, must_wait
from buffer.sharding.shards import Request, Shard, Shards, sum_of
from common.rpc.auth import ClientKeys
from common.rpc.messages import Role

log = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""A shard that leaves something unanswered for so long is silent."""

_LEASE_POLL_S = 0.02
_POLL_S = 0.02
"""Pause before asking again what the shards could give to a step."""
_KEPT_STEPS = 64
"""Steps whose plans are remembered: more than may be drawn and not finished."""
_PART_WAIT_S = 1.0
"""A shard says after so long what its part of a step waits for."""

_Asking = Callable[[int], Callable[[BufferClient], Future[Granted]]]
"""How many groups -> what asks one shard for them."""
_CLOSED = "the client of the buffer's shards is closed"

Plan = dict[int, int]
"""Shard -> how many groups of a step it gives."""

R = TypeVar("R")


def open_client(
    addresses: Sequence[str],
    *,
    run_id: str,
    role: Role,
    name: str,
    config: BufferConfig,
    keys: ClientKeys | None = None,
) -> BufferClient | ShardedClient:
    """A `BufferClient`, or one of several shards where there are several addresses, in the order of their shards."""
    client = partial(
        BufferClient, run_id=run_id, role=role, name=name, config=config, num_shards=len(addresses), keys=keys
    )
    clients = [client(address, shard=shard) for shard, address in enumerate(addresses)]
    return clients[0] if len(clients) == 1 else ShardedClient(clients, config)


class ShardedClient:
    """One client of several shards; safe to use from several threads. Methods are as in `BufferClient`."""

    def __init__(
        self, clients: Sequence[BufferClient], config: BufferConfig, *, patience_s: float = PATIENCE_S
    ) -> None:
        """Start the thread in which the conversations with the shards interleave; their clients are closed with it."""
        self._config = config
        self._patience_s = patience_s
        self._shards = Shards([Shard(client, patience_s) for client in clients], patience_s)
        self._turn = 0
        self._draws = JointDraws(self._shards)
        self._is_closed = False
        self._leasing = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        name = f"{clients[0].name}-shards"
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    # --- any client -------------------------------------------------------------------------------

    def connect(self, deadline: float | None = None) -> p.Welcome:
        """Say hello; blocks until all shards answer, but those that are silent: they are greeted when they do.

        Raises:
            BufferUnavailable: none said anything for `give_up_after_s`, or no welcome by the deadline.
            BufferRefused: one serves another run or another shard, or speaks another protocol.
        """
        clients = [shard.client for shard in self._shards]
        return await_welcome(self._submit(self._connect), clients, self._config, deadline)

    @property
    def put_off_because(self) -> str:
        """Why shards last asked to try again later; empty where all have answered since."""
        return "; ".join(dict.fromkeys(filter(None, (shard.client.put_off_because for shard in self._shards))))

    def status(self) -> Future[p.Status]:
        """The sum over all shards; of silent ones what was known last."""
        return self._submit(self._status)

    def drain(self) -> Future[p.Done]:
        return self._tell(lambda client: client.drain())

    def close(self, timeout_s: float | None = None) -> None:
        """Give what is outstanding `timeout_s` (default: `REQUEST_TIMEOUT_S`) to be answered, then end."""
        if self._is_closed:
            return
        self._is_closed = True
        limit_s = REQUEST_TIMEOUT_S if timeout_s is None else timeout_s
        asyncio.run_coroutine_threadsafe(self._settle(limit_s), self._loop).result(limit_s + 10.0)
        with ThreadPoolExecutor(len(self._shards)) as pool:
            list(pool.map(lambda shard: shard.client.close(limit_s), self._shards))
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result(10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    # --- actors -----------------------------------------------------------------------------------

    def lease(
        self, max_groups: int, lane: str = "", token_s: float = 0.0, *, wants_lengths: bool = False
    ) -> Future[Granted]:
        """Ask all shards in turn for up to `max_groups` groups of K; more come where a silent shard answers late."""

        def asking(wanted: int) -> Callable[[BufferClient], Future[Granted]]:
            return lambda client: client.lease(wanted, lane, token_s, wants_lengths=wants_lengths)

        return self._submit(lambda: self._lease(max_groups, asking))

    def push(self, trajectory: Trajectory) -> Future[p.RowResult]:
        """Hand in a trajectory to the shard of its prompt. Does not block: what a shard has no credit for waits."""
        if self._is_closed:
            raise BufferUnavailable(_CLOSED)
        return self._shards.owner(trajectory.lease_id).push(trajectory, self._loop)

    def push_many(self, trajectories: Sequence[Trajectory]) -> Future[list[p.RowResult]]:
        """As `push` of each, with one future of all results; it fails with the first error, when all are known."""
        pushed = [self.push(trajectory) for trajectory in trajectories]
        return Together[p.RowResult](len(pushed)).follow(pushed)

    def has_room(self, _trajectory: Trajectory) -> bool:
        return True

    def give_up(self, lease: p.Lease, sample_indices: Sequence[int], reason: str) -> Future[p.Done]:
        """Say that these samples of a lease will not come."""
        return self._shards.owner(lease.lease_id).client.give_up(lease, sample_indices, reason)

    def hand_on(
        self, lease: p.Lease, sample_indices: Sequence[int], there: Sequence[Trajectory], *, goes_on: bool = False
    ) -> Future[p.Done]:
        """Leave samples of a lease unfinished, or keep what there is of them; as `BufferClient.hand_on`."""
        return self._shards.owner(lease.lease_id).client.hand_on(lease, sample_indices, there, goes_on=goes_on)

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

    def take_unscored(self, max_tokens: int) -> Future[Unscored]:
        """Ask for samples to score: one shard after the other, until one has some."""
        return self._submit(lambda: self._take_unscored(max_tokens))

    def write_scores(self, record_ids: Sequence[int], logprobs: Sequence[npt.NDArray[np.float32]]) -> Future[p.Done]:
        """Store reference log-probabilities, each in the shard of its record."""
        of_shard: dict[int, tuple[list[int], list[npt.NDArray[np.float32]]]] = {}
        for record, array in zip(record_ids, logprobs, strict=True):
            records, arrays = of_shard.setdefault(record % len(self._shards), ([], []))
            records.append(record)
            arrays.append(array)
        return self._tell(lambda client: client.write_scores(*of_shard[client.shard]), of_shard)

    def visits(self) -> Future[list[Visits]]:
        """Ask all shards that answer; each tells of its own prompts."""
        return self._submit(self._visits)

    def expect(self, means: npt.NDArray[np.float32], variance: float) -> Future[p.Done]:
        return self._tell(lambda client: client.expect(means, variance))

    def step_finished(self, step: int, version: int, skipped: bool = False) -> Future[p.Done]:
        """Say that step `step` is done; shards without a part in it only learn the version."""
        took_part = [self._draws.takes_part(step, shard.number) for shard in self._shards]
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
        greetings = {shard.number: shard.greet() for shard in self._shards}
        welcomes = await self._shards.answered(greetings)
        return max(welcomes.values(), key=lambda welcome: welcome.epoch)

    async def _status(self) -> p.Status:
        replies = await self._shards.answered(
            {shard.number: shard.ask_one("status", lambda client: client.status()) for shard in self._shards}
        )
        for number, status in replies.items():
            shard = self._shards[number]
            shard.status = status
            shard.hear(status.ledger, status.fidelity)
        silent = [shard.number for shard in self._shards if shard.number not in replies]
        return sum_of([shard.status for shard in self._shards if shard.status is not None], silent)

    async def _lease(self, max_groups: int, asking: _Asking) -> Granted:
        async with self._leasing:
            while not (grants := await self._ask_for_leases(max_groups, asking)):
                if self._shards.late_error is not None:
                    raise self._shards.late_error
                # all that are connected are silent, while another one is not: nothing was waited for
                await asyncio.sleep(_LEASE_POLL_S)
        leases = [lease for grant in grants for lease in grant.leases]
        newest, draining = max(grant.newest for grant in grants), any(grant.draining for grant in grants)
        bodies = [grant.body for grant in grants if len(grant.body)]
        hand_on_at = min((grant.hand_on_at for grant in grants if grant.hand_on_at), default=0)
        body = schema.join_streams(bodies) if bodies else b""
        # a shard that has none left sends the actor on to the next
        is_near_bound = all(grant.is_near_bound for grant in grants)
        num_taken = sum(grant.num_taken for grant in grants)
        return Granted(leases, newest, draining, hand_on_at, is_near_bound, num_taken, body=body)

    async def _ask_for_leases(self, max_groups: int, asking: _Asking) -> list[Granted]:
        """One round over the shards. Another one begins it each time, so that none is always the last."""
        turn, self._turn = self._turn, (self._turn + 1) % len(self._shards)
        order = [shard for shard in self._shards[turn:] + self._shards[:turn] if shard.is_connected]
        grants: list[Granted] = []
        for i, shard in enumerate(order):
            room = max_groups - sum(grant.num_taken for grant in grants)
            if room <= 0:
                break
            wanted = -(-room // (len(order) - i))
            task = shard.ask_one("lease", asking(wanted), even_late=True)
            answer = await self._shards.answered({shard.number: task})
            if answer:
                shard.taken("lease")
                grants += answer.values()
        return grants

    async def _take_unscored(self, max_tokens: int) -> Unscored:
        self._turn = (self._turn + 1) % len(self._shards)
        for shard in self._shards[self._turn :] + self._shards[: self._turn]:
            if shard.is_connected and not shard.is_silent:
                task = shard.ask_one("take_unscored", lambda client: client.take_unscored(max_tokens))
                answer = await self._shards.answered({shard.number: task})
                if any(taken.record_ids for taken in answer.values()):
                    return answer[shard.number]
        return Unscored([])

    async def _visits(self) -> list[Visits]:
        asked = {shard.number: shard.ask(lambda client: client.visits()) for shard in self._shards}
        return [each for told in (await self._shards.answered(asked)).values() for each in told]

    async def _renew(self, lease_ids: Sequence[int]) -> p.RenewReply:
        of_shard: dict[int, list[int]] = {}
        for lease_id in lease_ids:
            of_shard.setdefault(lease_id % len(self._shards), []).append(lease_id)
        replies = await self._shards.answered(
            {s: self._shards[s].ask(lambda client: client.renew(of_shard[client.shard])) for s in of_shard}
        )
        return p.RenewReply([lease_id for reply in replies.values() for lease_id in reply.lost])

    async def _begin(self, version: int, step: int) -> p.IncarnationReply:
        """A learner begins nowhere before it has begun everywhere, under the same number."""

        async def all_begin(at_least: int) -> list[p.IncarnationReply]:
            return await asyncio.gather(
                *[
                    shard.tell(lambda client: client.begin_incarnation(version, step, at_least=at_least))
                    for shard in self._shards
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
        if self._shards.late_error is not None:
            raise self._shards.late_error
        try:
            return await talk()
        except asyncio.CancelledError:
            raise BufferUnavailable(_CLOSED) from None

    def _tell(self, request: Request[p.Done], numbers: Mapping[int, object] | None = None) -> Future[p.Done]:
        """Say something to all shards, or to these; completes when those that are not silent have answered."""

        async def told() -> p.Done:
            shards = [shard for shard in self._shards if numbers is None or shard.number in numbers]
            await self._shards.answered({shard.number: shard.tell(request) for shard in shards})
            return p.Done()

        return self._submit(told)

    async def _settle(self, limit_s: float) -> None:
        """Let the shards hear what they were told."""
        untold = [task for shard in self._shards for task in shard.untold]
        if untold:
            await asyncio.wait(untold, timeout=limit_s)
        for shard in self._shards:
            if shard.untold:
                log.warning("shard %d did not hear the last %d messages", shard.number, len(shard.untold))

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class JointDraws:
    """The batch of a step from several shards: divides steps, and joins their parts.

    A step is divided among the shards that answer, by what they have. How, is recorded in each with its
    part of the draw, and told to every learner that begins: nobody divides a step twice. From then on
    the step waits for every shard that has a part in it.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._plans: dict[int, Plan] = {}
        """Step -> how it is divided; of the last steps."""
        self._parts: dict[tuple[int, int, int, int], asyncio.Task[Draw]] = {}
        """(step, version, incarnation, shard) -> its draw, until all of the step are there."""

    def begin(self, recorded: Iterable[dict[int, Plan]]) -> dict[int, Plan]:
        """A learner begins: these plans are recorded, by shard. A shard that lacks one was not asked yet."""
        self._plans = {}
        for plans in recorded:
            self._plans = {**plans, **self._plans}
        return self._plans

    def takes_part(self, step: int, shard: int) -> bool:
        """Does the shard give groups to the step? Of a step that is not divided each may think so."""
        return step not in self._plans or shard in self._plans[step]

    async def draw(self, step: int, version: int, incarnation: int, num_groups: int, wait_s: float) -> Draw:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while step not in self._plans:
            plan, why = await self._divide(step, version, incarnation, num_groups)
            if plan:
                self._plans = {**{s: old for s, old in self._plans.items() if s > step - _KEPT_STEPS}, step: plan}
            elif loop.time() + _POLL_S >= deadline:
                return self._joined(step, [], why)
            else:
                await asyncio.sleep(_POLL_S)
        plan = self._plans[step]
        for shard in plan:
            if (step, version, incarnation, shard) not in self._parts:
                part = self._shards[shard].draw(step, version, incarnation, plan, _PART_WAIT_S)
                task = self._parts[step, version, incarnation, shard] = loop.create_task(part)
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
        parts = {shard: self._parts[step, version, incarnation, shard] for shard in sorted(plan)}
        _, missing = await asyncio.wait(parts.values(), timeout=max(0.0, deadline - loop.time()))
        done = [task.result() for task in parts.values() if task.done()]
        if missing:
            waits = [
                f"shard {shard}: {_lacks(self._shards[shard])}" for shard, task in parts.items() if task in missing
            ]
            return self._joined(step, [], f"step {step} has {len(done)} of {len(parts)} parts; {'; '.join(waits)}")
        for shard in plan:
            del self._parts[step, version, incarnation, shard]
        return self._joined(step, done, "")

    async def _divide(self, step: int, version: int, incarnation: int, num_groups: int) -> tuple[dict[int, int], str]:
        """How many groups each shard gives to a new step; or nothing, and why the step must wait."""
        offers = await self._shards.answered(
            {
                shard.number: shard.tell(lambda client: client.offer(step, version, incarnation))
                for shard in self._shards
                if not shard.is_silent
            }
        )
        for number, offer in offers.items():
            self._shards[number].hear(offer.ledger, offer.fidelity)
        waits = any(offer.waits for offer in offers.values())
        is_whole = len(offers) == len(self._shards)
        plan = divide_step(num_groups, offers, in_order=waits, step=step)
        if plan and not (waits and (not is_whole or must_wait(plan, num_groups, offers))):
            return plan, ""
        num_ready = sum(offer.num_eligible for offer in offers.values())
        lacks = [f"shard {number} has {offer.num_eligible}, {offer.waiting_for}" for number, offer in offers.items()]
        lacks += [f"shard {each.number}: {_lacks(each)}" for each in self._shards if each.number not in offers]
        return {}, f"step {step} has {min(num_ready, num_groups)} of {num_groups} groups; {'; '.join(lacks)}"

    def _joined(self, step: int, parts: Sequence[Draw], waiting_for: str) -> Draw:
        """One draw of all parts; without any, one that is not ready."""
        return Draw(
            ready=bool(parts),
            step=step,
            group_ids=[group for part in parts for group in part.group_ids],
            record_ids=[record for part in parts for record in part.record_ids],
            waiting_for=waiting_for,
            body=schema.join_streams([part.body for part in parts]) if parts else b"",
            ledger=self._shards.ledger,
            lengths=[length for part in parts for length in part.lengths],
            fidelity=self._shards.fidelity,
        )


def _lacks(shard: Shard) -> str:
    """What the shard's part of a step waits for."""
    if shard.is_silent:
        return f"no answer from {shard.client.address} for {shard.silent_s:.0f} s"
    return shard.waiting_for or f"no answer from {shard.client.address} yet"
