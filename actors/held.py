"""What an actor holds, and how it hands unfinished samples on with their tokens.

HeldLease  a lease and its samples
HandingOn  requeues samples, or has the buffer keep what there is of them
Goodbye    what became of all that was held
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from actors.engine import EngineDead
from actors.sample import Completed, SampleMaker
from actors.tasks import Problem
from buffer.client import BufferClient, Granted
from buffer.protocol import Lease
from buffer.schema import Prefix, Trajectory

_log = logging.getLogger(__name__)

KEEP_EVERY_S = 300.0
"""Seconds between two saves of partial rollouts in the buffer; bounds what a killed actor loses."""
GOODBYE_S = 5.0
"""Bound of letting go of all that is held."""

R = TypeVar("R")


@dataclass(slots=True, eq=False)
class HeldLease:
    """Samples are known by their index in the group."""

    lease: Lease
    problem: Problem
    open: set[int]
    """Neither acknowledged nor failed nor handed on."""
    to_generate: set[int]
    """Of those, the ones that the engine has not completed."""
    renew_at_s: float
    prefixes: dict[int, Prefix]
    """The tokens that samples continue from."""
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """Of samples that generate or score; once a sample is being pushed nothing cancels it."""
    completed: dict[int, Completed] = field(default_factory=dict)
    """Samples that have left the engine and are not pushed yet."""
    left: set[int] = field(default_factory=set)
    pushing: set[int] = field(default_factory=set)

    @property
    def unfinished(self) -> set[int]:
        return self.open - self.pushing


class Goodbye(NamedTuple):
    """What became of the samples that an actor held when it ended."""

    num_handed_on: int = 0
    num_tokens_lost: int = 0
    """Of samples that could not be handed on: they are generated again."""


class HandingOn:
    """Hands on the samples of one actor."""

    def __init__(self, name: str, maker: SampleMaker, client: BufferClient) -> None:
        self._name, self._maker, self._client = name, maker, client
        self._asked: Future[Granted] | None = None

    async def granted(self, asked: Future[Granted]) -> Granted:
        """Wait for leases. If cancelled, `leave_all` hands on those that are granted later."""
        self._asked = asked
        grant = await settled(asked)
        self._asked = None
        return grant

    async def keep(self, leases: Collection[HeldLease]) -> None:
        """Report the tokens of running samples to the buffer now and then; `leases` may change."""
        while True:
            await asyncio.sleep(KEEP_EVERY_S)
            told = [
                self._client.hand_on(held.lease, [row.sample_index for row in there], there, goes_on=True)
                for held in leases
                if (there := self._there(held, held.to_generate - held.left))
            ]
            for each in told:
                await settled(each)

    async def leave_all(self, leases: Collection[HeldLease]) -> Goodbye:
        """Hand on all that is held, or granted only now, within `GOODBYE_S`.

        Leases that the buffer gets no message about expire.
        """
        leases, counts = list(leases), self._maker.counts
        before = counts.num_handed_on, counts.num_tokens_lost
        results: list[object] = [TimeoutError(f"no answer within {GOODBYE_S:g} s")]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                leaving = [self.leave(held, held.unfinished) for held in leases]
                leaving += [self._leave_granted(self._asked)] if self._asked is not None else []
                results = list(await asyncio.gather(*leaving, return_exceptions=True))
        errors = [each for each in results if isinstance(each, Exception)]
        if errors and (remaining := [held for held in leases if held.unfinished]):
            _log.warning(
                "%s could not hand on what it had of %d groups, and other actors make it anew: %s",
                self._name, len(remaining), errors[0],
            )  # fmt: skip
            self.count_lost(remaining)
        return Goodbye(counts.num_handed_on - before[0], counts.num_tokens_lost - before[1])

    async def leave(self, held: HeldLease, indices: set[int]) -> None:
        """Hand samples of a lease on, with the tokens that they have."""
        held.left |= indices
        tasks = {index: held.tasks[index] for index in indices if index in held.tasks}
        running = {index for index in tasks if self._maker.is_in_engine(held.lease, index)}
        for index in tasks.keys() - running:  # it waits for a slot or a policy version, or is scored
            tasks[index].cancel()
        with contextlib.suppress(EngineDead):
            await self._maker.interrupt(held.lease, running)
        if tasks:
            # within a goodbye the buffer is to be told too
            await asyncio.wait(tasks.values(), timeout=GOODBYE_S / 2)
        indices &= held.open
        await settled(self._client.hand_on(held.lease, sorted(indices), self._there(held, indices)))
        self._maker.counts.num_handed_on += len(indices & held.open)
        held.open -= indices

    async def _leave_granted(self, asked: Future[Granted]) -> None:
        """Hand on what was not begun; what the buffer has of it stays there."""
        leases = (await settled(asked)).leases
        for left in [self._client.hand_on(lease, lease.sample_indices, []) for lease in leases]:
            await settled(left)
        self._maker.counts.num_handed_on += sum(len(lease.sample_indices) for lease in leases)

    def count_lost(self, leases: Iterable[HeldLease]) -> None:
        for held in leases:
            for row in self._there(held, held.unfinished):
                prefix = held.prefixes.get(row.sample_index)
                before = 0 if prefix is None else len(prefix.token_ids)
                self._maker.counts.num_tokens_lost += row.num_completion_tokens - before

    def _there(self, held: HeldLease, indices: Iterable[int]) -> list[Trajectory]:
        lease, maker = held.lease, self._maker
        found = {index: held.completed.get(index) or maker.so_far(lease, index) for index in sorted(indices)}
        return [
            maker.unfinished(lease, held.problem, index, completed)
            for index, completed in found.items()
            if completed is not None and len(completed.generation.token_ids)
        ]


async def settled(future: Future[R]) -> R:
    """Wait for the buffer, within the client's own bound. Cancelling the wait leaves the request alone: the client owns
    its futures and must be able to complete them.
    """
    return await asyncio.shield(asyncio.wrap_future(future))
