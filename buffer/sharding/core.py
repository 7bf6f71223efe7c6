"""The rules as a service runs them: those of one store, and what they lack where it is one of several shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import ceil

from buffer import protocol as p
from buffer.config import BufferConfig
from buffer.core import BufferCore
from buffer.draws import Draws
from buffer.errors import BufferRefused, StoreError
from buffer.leases import Share
from buffer.sharding.division import admission_shares, owned_prompts
from buffer.steps import Steps
from buffer.tables import Incarnation
from buffer.transaction import Transaction
from common.run import RunFacts

MAX_FILLERS = 1024
"""An incarnation is given no number that is further above the last one."""


def share_of(config: BufferConfig, facts: RunFacts) -> Share:
    """What a shard has of the run: the prompts of its hash, and as much of every capacity.

    Raises:
        StoreError: no group could be used within the bound, or some shard could never lease one, or hold as many as it
            may; or the sampler contradicts on_stale.
    """
    _check_waits(config, facts)
    shard, num_shards = facts.shard, facts.num_shards
    whose = f", which is shard {shard}'s part," if num_shards > 1 else ""
    try:
        contract = facts.contract
        capacity = admission_shares(facts.num_prompts, num_shards, contract.capacity())[shard]
        part = capacity / contract.capacity()
        limits = {
            "capacity_trajectories": max(1, round(config.capacity_trajectories * part)),
            "capacity_gib": config.capacity_gib * part,
            "refill_uninformative": config.refill_uninformative * part,
            "replay_steps": None if config.replay_steps is None else config.replay_steps * part,
        }
        config, prompts = config.model_copy(update=limits), owned_prompts(facts)
        config.check_capacity(facts.group_size, capacity + min(facts.groups_per_step, capacity), whose)
    except ValueError as error:
        raise StoreError(str(error)) from None
    closed = "" if capacity else f"no prompt belongs to shard {shard} of {num_shards}"
    if config.source is not None:
        closed = "the run trains on recorded samples (buffer.source)"
    return Share(facts, contract, config, prompts, capacity, closed, may_be_behind=num_shards > 1, number=shard)


def _check_waits(config: BufferConfig, facts: RunFacts) -> None:
    """on_stale = "wait" promises that no group is dropped, which only drawing the oldest first can keep."""
    takes_others = config.replays or config.chooses_by_length or config.groups_per_prompt > 1
    is_plain = config.sampler == "fifo" and not takes_others
    if facts.staleness.on_stale == "wait" and not is_plain:
        raise StoreError(
            "on_stale = 'wait' lets no group pass the age bound, for which the oldest must be drawn first, but "
            f"[buffer] has sampler = '{config.sampler}', max_uses = {config.max_uses}, length_correction = "
            f"{config.length_correction}, pack_tokens = {config.pack_tokens}, groups_per_prompt = "
            f"{config.groups_per_prompt}: use sampler = 'fifo', max_uses = 1, no choice by length and "
            "groups_per_prompt = 1, or on_stale = 'drop'"
        )


class ShardSteps(Steps):
    """Follows a learner that began in other shards too, and takes steps without this one."""

    def begin(self, tx: Transaction, message: p.BeginIncarnation) -> p.IncarnationReply:
        """As `Steps.begin`, and give the incarnation the number that other shards gave it.

        A learner that died while it began may have begun in some shards only. What fills its place here
        resumed where the present one does, so it changes the age of no token.
        """
        state = tx.state
        if message.at_least > state.incarnation + MAX_FILLERS:
            raise BufferRefused(f"incarnation {message.at_least} cannot follow on incarnation {state.incarnation}")
        super().begin(tx, message)
        mine = state.incarnations[-1]
        filler = Incarnation("", mine.version, mine.step, newest=mine.version)
        while state.incarnation < message.at_least:
            state.incarnations.insert(-1, filler)
        plans = {step: plan for (step,) in tx.draws.all_keys(message.step + 1) if (plan := tx.draws.require(step).plan)}
        return p.IncarnationReply(state.incarnation, state.resumed_at, plans)

    def finish(self, tx: Transaction, message: p.StepFinished) -> None:
        """As `Steps.finish`; where it took no part in the step, a shard only learns the version."""
        state = tx.state
        if message.took_part:
            super().finish(tx, message)
            return
        self.check_incarnation(state, message.incarnation)
        if message.step > state.step:
            self._believe(state, message.version)
            state.version, state.step = message.version, message.step
            state.num_set_aside = 0  # for the next step as many may be set aside again
            self._finished(tx)


class ShardDraws(Draws):
    """Draws parts of steps."""

    def offer(self, tx: Transaction, request: p.PlanRequest) -> p.PlanReply:
        """What this shard could give to a step. Reads as many keys as groups may be outstanding.

        Raises:
            BufferRefused: the learner was replaced, or the step is over.
        """
        self._steps.check_incarnation(tx.state, request.incarnation)
        self._check_version(tx.state, request.step, request.version)
        if request.step > tx.state.step and not tx.draws.has(request.step):
            self._steps.release_from(tx, request.step)  # what is offered is drawn anew, as in `draw`
        self._drop_stale(tx, request.version)
        self._groups.set_aside_uninformative(tx)
        ready = self._groups.index.ready
        oldest_first = ready[: self._contract.capacity()]
        most_alive = self._groups.config.most_alive(self._facts.groups_per_step)
        return p.PlanReply(
            num_eligible=len(ready),
            # no more than it could lease anew: what is planned may leave, and whoever plans again must keep the plan
            capacity=ceil(min(self._share.capacity, most_alive)),
            due=dict(Counter(self._left(oldest_first, request.version))),
            open_due=dict(Counter(self._left(self._open(tx) if self._waits else (), request.version))),
            waits=self._waits,
            waiting_for=self._owed(tx),
            ledger=self._groups.checked_counts(tx, recounts=False),
            fidelity=tx.state.length_fidelity,
        )

    def _check(self, tx: Transaction, request: p.DrawRequest) -> None:
        """As `Draws._check`, and refuse what is no part of a step, or not the part that was drawn."""
        super()._check(tx, request)
        facts = self._facts
        plan = request.plan or {facts.shard: request.num_groups}
        asked = f"step {request.step} asks for {request.num_groups} groups of {plan}"
        if max(plan) >= facts.num_shards:
            raise BufferRefused(f"{asked}: the shards are 0 to {facts.num_shards - 1}")
        if sum(plan.values()) != facts.groups_per_step or plan.get(facts.shard) != request.num_groups:
            raise BufferRefused(
                f"{asked}, but admission counts on {facts.groups_per_step} per step: make [learner] groups_per_step "
                "agree with the run's facts"
            )
        draw = tx.draws.get(request.step)
        if draw is not None and draw.incarnation == request.incarnation and draw.plan != request.plan:
            raise BufferRefused(f"step {request.step} is divided as {draw.plan} already, not as {request.plan}")


class ShardCore(BufferCore):
    """The rules of one shard, be it the only one of its buffer."""

    draws: ShardDraws
    steps_type, draws_type = ShardSteps, ShardDraws

    def __init__(self, config: BufferConfig, facts: RunFacts, clock: Callable[[], float]) -> None:
        """Compose them; errors are those of `share_of`."""
        super().__init__(share_of(config, facts), clock)
        self._answers[p.PlanRequest] = self.draws.offer

    def _hello(self, tx: Transaction, message: p.Hello) -> p.Welcome:
        """Refuse a client that looks for another shard, or another number of them."""
        if (message.shard, message.num_shards) != (self.facts.shard, self.facts.num_shards):
            raise BufferRefused(
                f"this is shard {self.facts.shard} of {self.facts.num_shards}, the client looked for shard "
                f"{message.shard} of {message.num_shards}: give the addresses of all shards in their order"
            )
        return super()._hello(tx, message)
