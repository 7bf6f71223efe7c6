"""Simulation: discrete-event simulation of a whole run, without processes, models or tokens.

The policies are those of a real run: `StalenessContract` admits, starts, drops and holds back groups, a `Sampler` over
a `GroupIndex` selects groups, `ActorsConfig.room` sizes leases, `buffer.dispatch` selects prompts, `KvGate` starts
samples. Costs are inputs; times follow from them.

    engine     TokenClock: samples share it; leased samples wait for a slot and for sufficiently new weights
    groups     leased -> complete, once the last of K samples has its reward -> drawn, once or more, or dropped as stale
    learner    draws a batch when possible, scores unscored samples, trains, publishes due versions
    weights    reach each engine some time after publication, and pause it briefly

Not simulated: failures, evaluations, preemption (rare because of the gate), and everything without a cost.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any

from leeway.actors.config import KvSample
from leeway.common.staleness import PolicyVersion
from leeway.planning.buffer import SimulatedBuffer, SimulatedGroup, SimulatedPrompts
from leeway.planning.kv_gate import KvGate
from leeway.planning.lengths import PromptStream
from leeway.planning.world import EnginePool, Outcome, TokenClock, World

_END, _UPDATE, _REWARDED, _PUBLISHED, _STEP, _DRAW, _LEASE = range(7)
_NEVER = 1 << 60

_Sample = tuple[SimulatedGroup, int, int, float]
"""Group, index in the group, version at its start in this engine, and tokens to generate in this engine."""


@dataclass(slots=True, eq=False)
class _Engine:
    pool: EnginePool
    slots: int
    clock: TokenClock[_Sample]
    gate: KvGate[_Sample] | None
    """Admission gate; None if the cache cannot fill up."""
    served: PolicyVersion
    observed: PolicyVersion
    """Newest published version that the engine has observed."""
    waiting: deque[tuple[SimulatedGroup, int]] = field(default_factory=deque)
    num_unrewarded: int = 0
    is_updating: bool = False
    is_requesting: bool = False
    """Whether a lease request is scheduled."""
    event: int = 0
    """Sequence number of the event of its next sample end; older end events are obsolete."""
    slot_s: float = 0.0
    requeue_at: float = inf
    """Tokens at which a sample is requeued for another engine."""
    closed_since_s: float | None = None
    """Time since which the engine has had free slots while admission is closed."""
    behind_since_s: float | None = None
    """Time since which the engine has had free slots and waiting samples, but weights that are too old."""


class Simulation:
    def __init__(self, world: World, seed: int = 0) -> None:
        self._world, self._costs, self._contract = world, world.costs, world.contract
        self._random = Random(seed)
        if world.prompts is not None:
            stream = world.prompts(seed)
        else:
            stream = PromptStream(world.lengths, world.num_prompts, world.group_size, seed)
        self._prompts = SimulatedPrompts(world, stream, seed, lambda: self.now_s)
        self._buffer = SimulatedBuffer(world, seed)
        self._most = world.lengths.longest
        self.now_s = 0.0
        self._events: list[tuple[float, int, int, Any]] = []
        self._seq = 0
        self._num_groups = self._num_pending = 0
        first = PolicyVersion(0, 0)
        self._engines = [
            _Engine(pool, pool.config.max_running_samples, TokenClock(pool.law), pool.gate(), first, first)
            for pool in world.pools
            for _ in range(pool.count)
        ]
        self._version = self._published = 0
        self._is_training = False
        self._found = Outcome()

    # --- running ----------------------------------------------------------------------------------

    def run(self, num_steps: int, warm_up: int = 0, limit_s: float = inf) -> Outcome:
        """Simulate `num_steps` steps; count steps after `warm_up`. Stop early at `limit_s` or if no step can start."""
        self._request_leases()
        handlers: dict[int, Callable[[Any], None]] = {
            _UPDATE: self._on_update, _REWARDED: self._on_rewarded, _PUBLISHED: self._on_published,
            _STEP: self._on_step, _DRAW: self._on_learner_free, _LEASE: self._on_lease,
        }  # fmt: skip
        events, step, counted_from_s = self._events, 0, 0.0
        while events and step < num_steps:
            now_s, seq, kind, what = heapq.heappop(events)
            if now_s > limit_s:
                self.now_s = limit_s
                break
            if kind == _END:
                if what.event == seq:
                    self.now_s = now_s
                    self._on_end(what)
                continue
            self.now_s = now_s
            handlers[kind](what)
            if kind == _STEP:
                step += 1
                if step == warm_up:
                    counted_from_s = now_s
                    self._reset_counts()
        return self._finish(max(0, step - warm_up), self.now_s - counted_from_s)

    def _at(self, time_s: float, kind: int, what: object) -> int:
        self._seq += 1
        heapq.heappush(self._events, (time_s, self._seq, kind, what))
        return self._seq

    # --- engines ----------------------------------------------------------------------------------

    def _advance(self, engine: _Engine) -> None:
        clock = engine.clock
        engine.slot_s += clock.num_running * (self.now_s - clock.now_s)
        clock.advance(self.now_s)

    def _on_end(self, engine: _Engine) -> None:
        self._advance(engine)
        sample = engine.clock.end()
        found, costs = self._found, self._costs
        group, index, _, _ = sample
        self._record_tokens(engine, sample, sample[3])
        is_cut = group.made[index] < group.lengths[index]
        if engine.gate is not None:
            engine.gate.end(sample, round(group.made[index]), is_cut=is_cut or group.lengths[index] >= self._most)
        if is_cut:
            self._requeue(engine, group, index)
            self._resume(engine)
            return
        found.num_generated += 1
        if costs.reward_s:
            engine.num_unrewarded += 1
            self._at(self.now_s + costs.reward_s, _REWARDED, (engine, group))
        else:
            self._complete(group)
        self._resume(engine)

    def _record_tokens(self, engine: _Engine, sample: _Sample, made: float) -> None:
        """Record the tokens of a sample that leaves its engine."""
        group, index, version, _ = sample
        group.made[index] += made
        self._found.num_tokens += made
        if made and version < group.oldest:
            group.oldest = version

    def _requeue(self, engine: _Engine, group: SimulatedGroup, index: int) -> None:
        """Requeue all unfinished samples of a group in this engine."""
        left = [index, *(place for each, place in engine.waiting if each is group)]
        engine.waiting = deque(each for each in engine.waiting if each[0] is not group)
        for sample in [each for each in engine.clock.running() if each[0] is group]:
            context = engine.clock.cancel(sample)
            there = self._world.prompt_tokens + group.made[sample[1]]
            self._record_tokens(engine, sample, max(0.0, context - there))
            if engine.gate is not None:
                engine.gate.end(sample, None)
            left.append(sample[1])
        group.requeued = left
        self._found.num_requeued += len(left)
        self._prompts.requeue(group)
        self._request_leases()

    def _on_rewarded(self, what: tuple[_Engine, SimulatedGroup]) -> None:
        engine, group = what
        engine.num_unrewarded -= 1
        self._complete(group)
        if engine.clock.num_running < engine.slots and not engine.waiting:  # samples without a reward limited the lease
            self._advance(engine)
            self._resume(engine)

    def _resume(self, engine: _Engine) -> None:
        """Lease up to the free slots, start admissible samples, and schedule the next end of a sample."""
        has_room = engine.clock.num_running + len(engine.waiting) < engine.slots
        if has_room and not engine.is_requesting and engine.closed_since_s is None:
            self._lease(engine)
        if engine.waiting:
            self._fill(engine)
        engine.event = self._at(engine.clock.next_end_s(), _END, engine) if engine.clock.num_running else 0

    def _fill(self, engine: _Engine) -> None:
        clock, gate, waiting, world = engine.clock, engine.gate, engine.waiting, self._world
        while waiting and clock.num_running < engine.slots:
            group, index = waiting[0]
            if not self._contract.may_start(engine.served, engine.observed, group.min_version):
                if engine.behind_since_s is None:
                    engine.behind_since_s = self.now_s
                return
            if gate is not None:
                to_run = self._to_run(engine, group, index)
                if not gate.has_room(to_run, clock.made):
                    break
            waiting.popleft()
            there = group.made[index]
            length = max(1.0, group.lengths[index] - there)
            if there == 0.0:
                length = min(length, engine.requeue_at)
            sample = group, index, engine.served.version, length
            if gate is not None:
                gate.start(sample, to_run, clock.made)
            clock.start(sample, round(world.prompt_tokens + there), length)
        if engine.behind_since_s is not None:
            self._found.behind += self.now_s - engine.behind_since_s
            engine.behind_since_s = None

    def _to_run(self, engine: _Engine, group: SimulatedGroup, index: int) -> KvSample:
        there, limit = group.made[index], self._most
        if there == 0.0:
            limit = min(limit, engine.requeue_at)
        return KvSample(group.id, self._world.prompt_tokens, round(limit), round(there), group.usual_tokens)

    def _lease(self, engine: _Engine) -> None:
        in_engine = engine.clock.num_running + len(engine.waiting)
        slots = engine.slots if engine.gate is None else engine.gate.slots(engine.clock.made)
        room = engine.pool.config.room(in_engine, in_engine + engine.num_unrewarded, slots=slots)
        engine.requeue_at = self._prompts.requeue_at(engine.pool)
        for _ in range(room):
            if (requeued := self._prompts.take_requeued(engine.pool)) is not None:
                engine.observed = PolicyVersion(0, self._published)
                requeued.min_version = self._contract.min_version(self._published)
                engine.waiting.extend((requeued, index) for index in requeued.requeued)
                continue
            if self._is_closed():
                if engine.closed_since_s is None:
                    engine.closed_since_s = self.now_s
                return
            engine.observed = PolicyVersion(0, self._published)
            group = self._new_group(engine.pool)
            engine.waiting.extend((group, index) for index in range(len(group.lengths)))
        if engine.closed_since_s is not None:
            self._found.closed += self.now_s - engine.closed_since_s
            engine.closed_since_s = None

    def _on_lease(self, engine: _Engine) -> None:
        engine.is_requesting = False
        self._advance(engine)
        self._lease(engine)
        self._fill(engine)
        engine.event = self._at(engine.clock.next_end_s(), _END, engine) if engine.clock.num_running else 0

    def _request_leases(self) -> None:
        """Schedule lease requests of the engines that wait for admission, at random times."""
        if self._is_closed() and not self._prompts.has_requeued:
            return
        waiting = [each for each in self._engines if each.closed_since_s is not None or not self.now_s]
        for engine in self._random.sample(waiting, len(waiting)):
            if not engine.is_requesting:
                engine.is_requesting = True
                self._at(self.now_s + 2.0 * self._random.random() * self._costs.lease_s, _LEASE, engine)

    # --- groups -----------------------------------------------------------------------------------

    def _is_closed(self) -> bool:
        if self._buffer.is_full:
            return True
        contract, outstanding = self._contract, self._buffer.num_outstanding + self._num_pending
        return bool(contract.admit(outstanding, version=self._version, published=self._published))

    def _new_group(self, pool: EnginePool) -> SimulatedGroup:
        self._num_groups += 1
        prompt, lengths = self._prompts.next(pool, self._version)
        group = SimulatedGroup(
            self._num_groups,
            prompt,
            self.now_s,
            min_version=self._contract.min_version(self._published),
            missing=len(lengths),
            oldest=_NEVER,
            lengths=lengths,
            tokens=[self._world.prompt_tokens + int(length) for length in lengths],
            usual_tokens=self._prompts.usual_tokens(prompt, self._version),
            made=[0.0] * len(lengths),
        )
        self._buffer.open(group)
        return group

    def _complete(self, group: SimulatedGroup) -> None:
        """Commit one sample of a group to the buffer."""
        group.missing -= 1
        if not group.missing:
            self._buffer.complete(group)
            self._prompts.observe(group, self._version)
            self._draw()

    # --- the learner ------------------------------------------------------------------------------

    def _draw(self) -> None:
        """Start a step if possible."""
        if self._is_training:
            return
        contract, version = self._contract, self._version
        dropped = self._buffer.drop_stale(version)
        for group in dropped:
            if not group.uses:
                self._found.num_dropped += len(group.lengths)
                self._prompts.give_back(group.prompt)
        if dropped:  # dropped groups free capacity even if no step starts
            self._request_leases()
        groups = self._buffer.draw(version)
        if not groups:
            return
        self._is_training = True
        self._num_pending = len(set(groups))
        self._prompts.pace.drawn()
        step_s = self._world.step_s([tokens for group in groups for tokens in group.tokens])
        step_s += self._world.score_token_s * sum(sum(group.tokens) for group in groups if not group.uses)
        self._buffer.use(groups)
        updates = contract.updates_per_step
        for update in range(1, updates + 1):
            if (version + update) % contract.config.publish_every == 0:
                done_s = self.now_s + step_s * update / updates
                self._at(done_s + self._costs.publish_s, _PUBLISHED, version + update)
        self._at(self.now_s + step_s, _STEP, (groups, self.now_s))

    def _on_step(self, what: tuple[list[SimulatedGroup], float]) -> None:
        groups, began_s = what
        found, updates = self._found, self._contract.updates_per_step
        for group in groups:
            found.num_trained += len(group.lengths)
            found.lags[self._version + updates - 1 - group.oldest] += 1
            found.residence_s += self.now_s - group.leased_s
        found.busy_s += self.now_s - began_s
        found.between_s += self._costs.between_steps_s
        self._version += updates
        self._buffer.finish()
        self._num_pending = 0
        self._prompts.pace.finished()
        self._at(self.now_s + self._costs.between_steps_s, _DRAW, None)
        self._request_leases()

    def _on_learner_free(self, _: object) -> None:
        self._is_training = False
        self._draw()
        self._request_leases()

    # --- weights ----------------------------------------------------------------------------------

    def _on_published(self, version: int) -> None:
        self._published = max(self._published, version)
        for engine in self._engines:
            self._fetch(engine)
        self._request_leases()

    def _fetch(self, engine: _Engine) -> None:
        if not engine.is_updating and engine.served.version < self._published:
            engine.is_updating = True
            self._at(self.now_s + self._costs.fetch_s, _UPDATE, (engine, self._published))

    def _on_update(self, what: tuple[_Engine, int]) -> None:
        engine, version = what
        self._advance(engine)
        engine.clock.stall(self._costs.pause_s)
        engine.served = PolicyVersion(0, version)
        engine.observed = max(engine.observed, engine.served)
        engine.is_updating = False
        self._fetch(engine)
        self._resume(engine)

    # --- outcome ----------------------------------------------------------------------------------

    def _reset_counts(self) -> None:
        self._found = Outcome()
        for engine in self._engines:
            self._advance(engine)
            engine.slot_s = 0.0
            engine.closed_since_s = None if engine.closed_since_s is None else self.now_s
            engine.behind_since_s = None if engine.behind_since_s is None else self.now_s

    def _finish(self, num_steps: int, seconds: float) -> Outcome:
        found, engines = self._found, self._engines
        found.num_steps, found.seconds = num_steps, seconds
        found.price = self._world.learner_price + sum(pool.count * pool.price for pool in self._world.pools)
        if seconds <= 0.0:
            return found
        for engine in engines:
            self._advance(engine)
            for since_s, share in ((engine.closed_since_s, "closed"), (engine.behind_since_s, "behind")):
                if since_s is not None:
                    setattr(found, share, getattr(found, share) + self.now_s - since_s)
        found.slots_used = sum(engine.slot_s for engine in engines) / (sum(each.slots for each in engines) * seconds)
        found.closed /= seconds * len(engines)
        found.behind /= seconds * len(engines)
        return found
