"""Simulation: a whole run, event by event, without a process, a model or a token.

What decides here is what decides in the run: `StalenessContract` admits, starts, drops and holds back, a `Sampler` over
a `GroupIndex` chooses, `ActorsConfig.room` leases. Costs are given, and time is what follows from them.

    engine     TokenClock: samples share it; leased ones wait for a slot, and for weights that are new enough
    groups     leased -> complete, when the last of K samples is scored -> drawn, once or more, or dropped as stale
    learner    draws when it can, trains, publishes what is due
    weights    come to each engine some time after they are published, and stop it for a moment

Not in it: failures, evaluations, choices by length (`buffer.length_correction`, `pack_tokens`), shards, preemption
(an engine starts no sample for which its cache may have no room), and whatever no cost is given for.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any

import numpy as np

from buffer.index import ELIGIBLE, Evictable, GroupIndex, Place, ReadyGroup
from buffer.lengths import bucket_of
from buffer.samplers import build
from buffer.tables import Group
from common.staleness import PolicyVersion
from planning.engine import TokenClock
from planning.lengths import PromptStream
from planning.world import EnginePool, Outcome, Prompts, World

_END, _UPDATE, _SCORED, _PUBLISHED, _STEP, _DRAW, _LEASE = range(7)
_NEVER = 1 << 60
_UNREWARDED = Group.new(0, 0, 2, 0)
"""What a sampler by rewards sees: none is known."""


@dataclass(slots=True, eq=False)
class _Group:
    id: int
    prompt: int
    leased_s: float
    min_version: int
    missing: int
    oldest: int
    """Version of the oldest token of its samples, and while some are missing at most `min_version`."""
    lengths: list[float]
    uses: int = 0


_Sample = tuple[_Group, int, float]
"""Its group, the version that it began with, and its tokens."""


@dataclass(slots=True, eq=False)
class _Engine:
    pool: EnginePool
    slots: int
    clock: TokenClock[_Sample]
    served: PolicyVersion
    heard: PolicyVersion
    """The newest published version that it knows of."""
    waiting: deque[tuple[_Group, float]] = field(default_factory=deque)
    """Leased samples without a slot, and their tokens."""
    num_scoring: int = 0
    is_updating: bool = False
    is_asking: bool = False
    """It is about to ask for leases."""
    is_leaving: bool = False
    """It leases nothing more."""
    event: int = 0
    """Number of the event that is its next end; an older one is over."""
    reserved: float = 0.0
    """Tokens that its samples may come to hold."""
    slot_s: float = 0.0
    """Slots in use, over time."""
    closed_since_s: float | None = None
    """Since when it has room, and admission is closed."""
    behind_since_s: float | None = None
    """Since when it has slots and samples, and too old weights."""


class Simulation:
    """One run under one seed."""

    def __init__(self, world: World, seed: int = 0) -> None:
        """All engines are empty, and version 0 is published."""
        self._world, self._costs, self._contract = world, world.costs, world.contract
        self._random = Random(seed)
        self._samples: Prompts
        if world.prompts is not None:
            self._samples = world.prompts(seed)
        else:
            self._samples = PromptStream(world.lengths, world.num_prompts, world.group_size, seed)
        self._draws = np.random.default_rng([seed, 2])
        self._sampler, weight = build(world.buffer)
        self._index = GroupIndex(world.buffer, weight)
        self._weigh = weight
        self._waits = world.contract.config.on_stale == "wait"
        self._runs_free = world.buffer.replays and world.contract.bound() is None
        self._longest = world.prompt_tokens + world.lengths.longest
        self._num_stored = 0
        self.now_s = 0.0
        self._events: list[tuple[float, int, int, Any]] = []
        self._seq = 0
        self._open: dict[int, _Group] = {}
        self._ready: dict[int, _Group] = {}
        self._num_groups = self._num_pending = 0
        first = PolicyVersion(0, 0)
        self._engines = [
            _Engine(pool, pool.config.max_running_samples, TokenClock(pool.law), first, first)
            for pool in world.pools
            for _ in range(pool.count)
        ]
        self._version = self._published = 0
        self._is_training = False
        self._found = Outcome()
        self.stretch = 1.0
        """Lengths are drawn so many times as long as the law says; may be changed while it runs."""

    # --- running ----------------------------------------------------------------------------------

    def run(
        self, num_steps: int, warm_up: int = 0, limit_s: float = inf, after_step: Callable[[int], None] | None = None
    ) -> Outcome:
        """Take so many steps, of which the first are not counted; end earlier at `limit_s`, or where none comes.

        `after_step` is called with the number of each step, and may `scale`.
        """
        self._knock()
        handlers: dict[int, Callable[[Any], None]] = {
            _UPDATE: self._on_update, _SCORED: self._on_scored, _PUBLISHED: self._on_published, _STEP: self._on_step,
            _DRAW: self._on_learner_free, _LEASE: self._on_lease,
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
                    self._begin_to_count()
                if after_step is not None:
                    after_step(step)
        return self._finish(max(0, step - warm_up), self.now_s - counted_from_s)

    def so_far(self) -> Outcome:
        """What is counted until now, but for shares of time."""
        return self._found

    def count(self, pool: str) -> int:
        """Actors of a pool that work."""
        return sum(1 for engine in self._engines if engine.pool.name == pool and not engine.is_leaving)

    def scale(self, pool: str, count: int, start_s: float = 0.0) -> None:
        """Let a pool have another number of actors; who comes takes a while, who leaves finishes what it runs."""
        there = [engine for engine in self._engines if engine.pool.name == pool and not engine.is_leaving]
        kind = next(each for each in self._world.pools if each.name == pool)
        for _ in range(count - len(there)):
            newest = PolicyVersion(0, self._published)
            engine = _Engine(kind, kind.config.max_running_samples, TokenClock(kind.law, self.now_s), newest, newest)
            engine.is_asking = True
            self._engines.append(engine)
            self._at(self.now_s + start_s, _LEASE, engine)
        for engine in there[count:]:
            engine.is_leaving = True
            heir = min((each for each in there[:count]), key=lambda each: len(each.waiting))
            heir.waiting.extend(engine.waiting)
            engine.waiting.clear()

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
        group, version, length = engine.clock.end()
        found, costs = self._found, self._costs
        found.num_generated += 1
        found.num_tokens += length
        engine.reserved -= self._longest
        if version < group.oldest:
            group.oldest = version
        if costs.reward_s:
            engine.num_scoring += 1
            self._at(self.now_s + costs.reward_s, _SCORED, (engine, group))
        else:
            self._complete(group)
        self._go_on(engine)

    def _on_scored(self, what: tuple[_Engine, _Group]) -> None:
        engine, group = what
        engine.num_scoring -= 1
        self._complete(group)
        if engine.clock.num_running < engine.slots and not engine.waiting:  # what is scored had been too much
            self._advance(engine)
            self._go_on(engine)

    def _go_on(self, engine: _Engine) -> None:
        """Lease what there is room for, start what may start, and see when the next sample ends."""
        has_room = engine.clock.num_running + len(engine.waiting) < engine.slots
        if has_room and not engine.is_asking and engine.closed_since_s is None:
            self._lease(engine)
        if engine.waiting:
            self._fill(engine)
        engine.event = self._at(engine.clock.next_end_s(), _END, engine) if engine.clock.num_running else 0

    def _fill(self, engine: _Engine) -> None:
        clock, waiting, world = engine.clock, engine.waiting, self._world
        while waiting and clock.num_running < engine.slots:
            group, length = waiting[0]
            if not self._contract.may_start(engine.served, engine.heard, group.min_version):
                if engine.behind_since_s is None:
                    engine.behind_since_s = self.now_s
                return
            if clock.num_running and engine.reserved + self._longest > engine.pool.kv_tokens:
                break
            waiting.popleft()
            engine.reserved += self._longest
            clock.start((group, engine.served.version, length), world.prompt_tokens, length)
        if engine.behind_since_s is not None:
            self._found.behind += self.now_s - engine.behind_since_s
            engine.behind_since_s = None

    def _lease(self, engine: _Engine) -> None:
        if engine.is_leaving:
            return
        in_engine = engine.clock.num_running + len(engine.waiting)
        room = engine.pool.config.room(in_engine, in_engine + engine.num_scoring)
        for _ in range(room):
            if self._is_closed():
                if engine.closed_since_s is None:
                    engine.closed_since_s = self.now_s
                return
            engine.heard = PolicyVersion(0, self._published)
            group = self._new_group()
            engine.waiting.extend((group, length) for length in group.lengths)
        if engine.closed_since_s is not None:
            self._found.closed += self.now_s - engine.closed_since_s
            engine.closed_since_s = None

    def _on_lease(self, engine: _Engine) -> None:
        engine.is_asking = False
        self._advance(engine)
        self._lease(engine)
        self._fill(engine)
        engine.event = self._at(engine.clock.next_end_s(), _END, engine) if engine.clock.num_running else 0

    def _knock(self) -> None:
        """Admission may be open again: who waits at the door asks, each in its own time."""
        if self._is_closed():
            return
        waiting = [each for each in self._engines if each.closed_since_s is not None or not self.now_s]
        for engine in self._random.sample(waiting, len(waiting)):
            if not engine.is_asking:
                engine.is_asking = True
                self._at(self.now_s + 2.0 * self._random.random() * self._costs.lease_s, _LEASE, engine)

    # --- groups -----------------------------------------------------------------------------------

    def _is_closed(self) -> bool:
        outstanding = len(self._open) + self._num_pending + (0 if self._runs_free else self._index.num_unused)
        contract = self._contract
        return bool(contract.admit(outstanding, contract.capacity(), version=self._version, published=self._published))

    def _new_group(self) -> _Group:
        self._num_groups += 1
        prompt, lengths = self._samples.next()
        if self.stretch != 1.0:
            lengths = [max(1.0, round(self.stretch * length)) for length in lengths]
        oldest = self._contract.min_version(self._published)
        group = _Group(self._num_groups, prompt, self.now_s, oldest, len(lengths), _NEVER, lengths)
        self._open[group.id] = group
        return group

    def _complete(self, group: _Group) -> None:
        """One more of its samples is in the buffer."""
        group.missing -= 1
        if group.missing:
            return
        del self._open[group.id]
        self._ready[group.id] = group
        self._index.put(group.id, self._place(group))
        self._num_stored += len(group.lengths)
        if self._world.buffer.replays:
            while self._num_stored > self._world.buffer.capacity_trajectories:
                first = self._index.first_to_go
                if first is None:
                    break
                self._leave(first.group_id)
        self._draw()

    def _place(self, group: _Group) -> Place:
        world = self._world
        key = ReadyGroup(group.oldest, group.id)
        return Place(
            evictable=Evictable(ELIGIBLE, (group.oldest, group.id), group.id) if world.buffer.replays else None,
            ready=key,
            prompt_id=group.prompt,
            uses=group.uses,
            bucket=bucket_of(sum(group.lengths) / len(group.lengths)),
            log_weight=0.0 if self._weigh is None else self._weigh(_UNREWARDED, group.oldest),
            is_scored=True,
        )

    def _leave(self, group_id: int) -> _Group:
        group = self._ready.pop(group_id)
        self._index.put(group_id, None)
        self._num_stored -= len(group.lengths)
        return group

    # --- the learner ------------------------------------------------------------------------------

    def _draw(self) -> None:
        """Begin a step, where one can begin."""
        if self._is_training:
            return
        contract, index, version = self._contract, self._index, self._version
        for group_id in list(contract.evict(index.ready, version)):
            group = self._leave(group_id)
            self._found.num_dropped += len(group.lengths) if not group.uses else 0
            self._samples.give_back(group.prompt)
        num = contract.groups_per_step
        if len(index.ready) < num:
            return
        chosen = self._sampler.choose(index, num, self._draws)
        if len(chosen) < num or (self._waits and self._is_held_back(set(chosen))):
            return
        self._is_training = True
        self._num_pending = len(chosen)
        groups = [self._ready[group_id] for group_id in chosen]
        tokens = [self._world.prompt_tokens + int(length) for group in groups for length in group.lengths]
        for group in groups:
            group.uses += 1
        for group_id in dict.fromkeys(chosen):
            group = self._ready[group_id]
            if group.uses < index.max_uses:
                index.put(group_id, self._place(group))
            else:
                self._leave(group_id)
        step_s, updates = self._world.step_s(tokens), contract.updates_per_step
        for update in range(1, updates + 1):
            if (version + update) % contract.config.publish_every == 0:
                done_s = self.now_s + step_s * update / updates
                self._at(done_s + self._costs.publish_s, _PUBLISHED, version + update)
        self._at(self.now_s + step_s, _STEP, (groups, self.now_s))

    def _is_held_back(self, chosen: set[int]) -> bool:
        contract, version = self._contract, self._version

        def left(ages: Iterable[int]) -> list[int]:
            return [steps for age in ages if (steps := contract.steps_left(age, version)) is not None]

        ready = self._index.ready
        return bool(
            contract.held_back(
                left(key.oldest for key in ready if key.group_id in chosen),
                left(key.oldest for key in ready if key.group_id not in chosen),
                left(min(group.oldest, group.min_version) for group in self._open.values()),
            )
        )

    def _on_step(self, what: tuple[list[_Group], float]) -> None:
        groups, began_s = what
        found, updates = self._found, self._contract.updates_per_step
        for group in groups:
            found.num_trained += len(group.lengths)
            found.lags[self._version + updates - 1 - group.oldest] += 1
            found.residence_s += self.now_s - group.leased_s
        found.busy_s += self.now_s - began_s
        self._version += updates
        self._num_pending = 0
        self._at(self.now_s + self._costs.between_steps_s, _DRAW, None)
        self._knock()

    def _on_learner_free(self, _: object) -> None:
        self._is_training = False
        self._draw()
        self._knock()

    # --- weights ----------------------------------------------------------------------------------

    def _on_published(self, version: int) -> None:
        self._published = max(self._published, version)
        for engine in self._engines:
            self._fetch(engine)
        self._knock()

    def _fetch(self, engine: _Engine) -> None:
        if not engine.is_updating and engine.served.version < self._published:
            engine.is_updating = True
            self._at(self.now_s + self._costs.fetch_s, _UPDATE, (engine, self._published))

    def _on_update(self, what: tuple[_Engine, int]) -> None:
        engine, version = what
        self._advance(engine)
        engine.clock.stall(self._costs.pause_s)
        engine.served = PolicyVersion(0, version)
        engine.heard = max(engine.heard, engine.served)
        engine.is_updating = False
        self._fetch(engine)
        self._go_on(engine)

    # --- what is told -----------------------------------------------------------------------------

    def _begin_to_count(self) -> None:
        self._found = Outcome()
        for engine in self._engines:
            self._advance(engine)
            engine.slot_s = 0.0
            engine.clock.kv_peak = engine.clock.kv_tokens
            engine.closed_since_s = None if engine.closed_since_s is None else self.now_s
            engine.behind_since_s = None if engine.behind_since_s is None else self.now_s

    def _finish(self, num_steps: int, seconds: float) -> Outcome:
        found, engines = self._found, self._engines
        found.num_steps, found.seconds = num_steps, seconds
        found.price = self._world.learner_price + sum(pool.count * pool.price for pool in self._world.pools)
        if seconds <= 0.0:
            return found
        slots: Counter[str] = Counter()
        for engine in engines:
            self._advance(engine)
            name = engine.pool.name
            slots[name] += engine.slots
            found.slots_used_by_pool[name] = found.slots_used_by_pool.get(name, 0.0) + engine.slot_s
            for since_s, share in ((engine.closed_since_s, "closed"), (engine.behind_since_s, "behind")):
                if since_s is not None:
                    setattr(found, share, getattr(found, share) + self.now_s - since_s)
        found.slots_used = sum(found.slots_used_by_pool.values()) / (slots.total() * seconds)
        found.slots_used_by_pool = {
            name: used / (slots[name] * seconds) for name, used in found.slots_used_by_pool.items()
        }
        found.closed /= seconds * len(engines)
        found.behind /= seconds * len(engines)
        found.kv_peak = max(engine.clock.kv_peak for engine in engines)
        return found
