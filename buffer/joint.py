"""JointDraws: the batch of a step from several shards.

A step is divided among the shards that answer, by what they have. How, is recorded in each with its
part of the draw, and told to every learner that begins: nobody divides a step twice. From then on
the step waits for every shard that has a part in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from buffer import schema
from buffer.client import Draw
from buffer.links import Links
from buffer.shards import Supply, divide_step, must_wait

_POLL_S = 0.02
"""Pause before asking again what the shards could give to a step."""
_KEPT_STEPS = 64
"""Steps whose plans are remembered: more than may be drawn and not finished."""
_PART_WAIT_S = 1.0
"""A shard says after so long what its part of a step waits for."""

Plan = dict[int, int]
"""Shard -> how many groups of a step it gives."""


class JointDraws:
    """Divides steps, and joins their parts."""

    def __init__(self, links: Links) -> None:
        """Nothing is divided yet.

        Args:
            links: to all shards.
        """
        self._links = links
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
        """See `BufferClient.draw`."""
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
                part = self._links[shard].draw(step, version, incarnation, plan, _PART_WAIT_S)
                task = self._parts[step, version, incarnation, shard] = loop.create_task(part)
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
        parts = {shard: self._parts[step, version, incarnation, shard] for shard in sorted(plan)}
        _, missing = await asyncio.wait(parts.values(), timeout=max(0.0, deadline - loop.time()))
        done = [task.result() for task in parts.values() if task.done()]
        if missing:
            waits = [f"shard {shard}: {self._lacks(shard)}" for shard, task in parts.items() if task in missing]
            return self._joined(step, [], f"step {step} has {len(done)} of {len(parts)} parts; {'; '.join(waits)}")
        for shard in plan:
            del self._parts[step, version, incarnation, shard]
        return self._joined(step, done, "")

    async def _divide(self, step: int, version: int, incarnation: int, num_groups: int) -> tuple[dict[int, int], str]:
        """How many groups each shard gives to a new step; or nothing, and why the step must wait."""
        offers = await self._links.answered(
            {
                link.shard: link.tell(lambda client: client.offer(step, version, incarnation))
                for link in self._links
                if not link.is_silent
            }
        )
        for shard, offer in offers.items():
            self._links[shard].hear(offer.ledger, offer.fidelity)
        supplies = {
            shard: Supply(offer.num_eligible, offer.capacity, offer.due, offer.open_due)
            for shard, offer in offers.items()
        }
        waits = any(offer.waits for offer in offers.values())
        is_whole = len(offers) == len(self._links)
        plan = divide_step(num_groups, supplies, in_order=waits)
        if plan and not (waits and (not is_whole or must_wait(plan, num_groups, supplies))):
            return plan, ""
        num_ready = sum(supply.num_eligible for supply in supplies.values())
        lacks = [f"shard {shard} has {offer.num_eligible}, {offer.waiting_for}" for shard, offer in offers.items()]
        lacks += [f"shard {link.shard}: {self._lacks(link.shard)}" for link in self._links if link.shard not in offers]
        return {}, f"step {step} has {min(num_ready, num_groups)} of {num_groups} groups; {'; '.join(lacks)}"

    def _lacks(self, shard: int) -> str:
        link = self._links[shard]
        if link.is_silent:
            return f"no answer from {link.client.address} for {link.silent_s:.0f} s"
        return link.waiting_for or f"no answer from {link.client.address} yet"

    def _joined(self, step: int, parts: Sequence[Draw], waiting_for: str) -> Draw:
        """One draw of all parts; without any, one that is not ready."""
        return Draw(
            ready=bool(parts),
            step=step,
            group_ids=[group for part in parts for group in part.group_ids],
            record_ids=[record for part in parts for record in part.record_ids],
            waiting_for=waiting_for,
            body=bytes(schema.join_streams([part.body for part in parts])) if parts else b"",
            ledger=self._links.ledger,
            lengths=[length for part in parts for length in part.lengths],
            fidelity=self._links.fidelity,
        )
