"""The buffer of a simulated run, under the rules of the real buffer.

SimulatedBuffer    groups, with the index and the samplers of the real buffer
SimulatedPrompts   prompt selection: sampler, window, dispatch policy, length model
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from leeway.buffer.groups import MAX_CANDIDATES, StepTimer
from leeway.buffer.index import ELIGIBLE, Evictable, GroupIndex, Place, ReadyGroup
from leeway.buffer.samplers import build
from leeway.buffer.tables import Group, Waiting
from leeway.planning.dispatch import POLICIES, Speeds
from leeway.planning.lengths import LengthModel, PromptStream
from leeway.planning.prompts import WINDOW_STEPS, ByChance, Window, lag_budget_s, likely_tokens
from leeway.planning.world import EnginePool, World

_UNREWARDED = Group.new(0, 0, 2)
"""Group passed to samplers that weigh by rewards: rewards are not simulated."""


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    id: int
    prompt: int
    leased_s: float
    min_version: int
    missing: int
    oldest: int
    """Version of the oldest token generated so far; an open group counts as `min_version` or older."""
    lengths: list[float]
    tokens: list[int]
    """Tokens of each sample, prompt and completion."""
    usual_tokens: float = 0.0
    """Predicted tokens of a completion of the prompt."""
    uses: int = 0
    made: list[float] = field(default_factory=list)
    """Tokens of each completion so far; updated when a sample leaves its engine."""
    requeued: list[int] = field(default_factory=list)


class SimulatedBuffer:
    """Open groups, and groups that are ready for a step."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._draws = np.random.default_rng([seed, 2])
        self._sampler, self._weigh = build(world.buffer)
        self._index = GroupIndex(world.buffer, self._weigh)
        self._runs_free = world.buffer.replays and world.contract.bound() is None
        self._num_stored = 0
        self._open: dict[int, SimulatedGroup] = {}
        self._ready: dict[int, SimulatedGroup] = {}
        self._drawn: list[SimulatedGroup] = []
        """Groups of the step in progress."""

    @property
    def num_outstanding(self) -> int:
        """Number of groups that admission counts, without those of the step in progress."""
        return len(self._open) + (0 if self._runs_free else self._index.num_unused)

    @property
    def is_full(self) -> bool:
        """Whether `buffer.replay_steps` is reached; groups of the step in progress do not count."""
        groups_per_step = self._world.contract.groups_per_step
        return len(self._open) + len(self._ready) >= self._world.buffer.max_live_groups(groups_per_step)

    def open(self, group: SimulatedGroup) -> None:
        self._open[group.id] = group

    def complete(self, group: SimulatedGroup) -> None:
        """Store a finished group; evict other groups if the buffer exceeds its capacity."""
        self._ready[group.id] = self._open.pop(group.id)
        self._place(group)
        self._num_stored += len(group.lengths)
        if self._world.buffer.replays:
            while self._num_stored > self._world.buffer.capacity_trajectories:
                first = self._index.next_evictable
                if first is None:
                    break
                self._remove(first.group_id)

    def drop_stale(self, version: int) -> list[SimulatedGroup]:
        """Remove and return the groups that no step at this version or later may use."""
        return [self._remove(group_id) for group_id in list(self._world.contract.evict(self._index.ready, version))]

    def draw(self, version: int) -> list[SimulatedGroup]:
        """Return the groups of the next step; an empty list if the step must wait."""
        contract = self._world.contract
        num = contract.groups_per_step
        if len(self._index.ready) < num:
            return []
        chosen = self._sampler.choose(self._index, num, self._draws)
        waits = contract.config.on_stale == "wait"
        if len(chosen) < num or (waits and self._is_held_back(set(chosen), version)):
            return []
        return [self._ready[group_id] for group_id in chosen]

    def use(self, groups: Sequence[SimulatedGroup]) -> None:
        for group in groups:
            group.uses += 1
        self._drawn = [self._ready.pop(group.id) for group in dict.fromkeys(groups)]
        for group in self._drawn:
            self._index.put(group.id, None)

    def finish(self) -> None:
        """End the step; groups that may be used again become ready."""
        for group in self._drawn:
            if group.uses < self._index.max_uses:
                self._ready[group.id] = group
                self._place(group)
            else:
                self._num_stored -= len(group.lengths)
        self._drawn = []

    def _place(self, group: SimulatedGroup) -> None:
        replays = self._world.buffer.replays
        place = Place(
            evictable=Evictable(ELIGIBLE, (group.oldest, group.id), group.id) if replays else None,
            ready=ReadyGroup(group.oldest, group.id),
            prompt_id=group.prompt,
            uses=group.uses,
            log_weight=0.0 if self._weigh is None else self._weigh(_UNREWARDED, group.oldest),
        )
        self._index.put(group.id, place)

    def _remove(self, group_id: int) -> SimulatedGroup:
        group = self._ready.pop(group_id)
        self._index.put(group_id, None)
        self._num_stored -= len(group.lengths)
        return group

    def _is_held_back(self, chosen: set[int], version: int) -> bool:
        contract = self._world.contract

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


class SimulatedPrompts:
    def __init__(self, world: World, stream: PromptStream, seed: int, clock: Callable[[], float]) -> None:
        """Take prompts in the order of a stream or at random; lengths are learned, rewards are not simulated."""
        self._world, self._stream = world, stream
        self._sampler = None if world.buffer.prompt_law == "epoch" else ByChance(world.num_prompts, seed)
        self._policy = POLICIES[world.buffer.dispatch]()
        self._group_size = world.group_size
        self._longest = round(world.lengths.longest)
        self._token_s = {pool.name: self._token_s_of(pool) for pool in world.pools}
        self._lanes = list(self._token_s.values())
        may_be_full = any(pool.gate() is not None for pool in world.pools)
        self._learns = may_be_full or self._policy.needs_lengths(len(self._lanes))
        self._lengths = LengthModel(world.num_prompts if self._learns else 0)
        self._returned: list[int] = []
        self._requeued: list[SimulatedGroup] = []
        self._window = Window()
        self._order = 0
        self.pace = StepTimer(clock)

    def next(self, pool: EnginePool, version: int) -> tuple[int, list[float]]:
        """Return the next prompt for an engine of a pool, and the tokens of each sample."""
        speeds = self._speeds(pool)
        prompt = self._take_returned(speeds, version) if self._returned else None
        if prompt is None:
            prompt = self._next(speeds, version)
        return prompt, self._stream.lengths(prompt)

    def requeue(self, group: SimulatedGroup) -> None:
        self._requeued.append(group)

    def take_requeued(self, pool: EnginePool) -> SimulatedGroup | None:
        """Remove and return a requeued group that an engine of a pool may continue, or None if there is none."""
        if not self._requeued:
            return None
        speeds = self._speeds(pool)
        for place, group in enumerate(self._requeued):
            if self._policy.takes(likely_tokens(max(group.made[index] for index in group.requeued)), speeds):
                return self._requeued.pop(place)
        return None

    @property
    def has_requeued(self) -> bool:
        return bool(self._requeued)

    def requeue_at(self, pool: EnginePool) -> float:
        return self._policy.requeue_at(self._speeds(pool))

    def give_back(self, prompt: int) -> None:
        """Requeue the prompt of a dropped group, ahead of new prompts."""
        self._returned.append(prompt)

    def usual_tokens(self, prompt: int, version: int) -> float:
        return min(float(self._longest), self._lengths.predicted_length(prompt, version)) if self._learns else 0.0

    def observe(self, group: SimulatedGroup, version: int) -> None:
        if self._learns:
            lengths = [round(length) for length in group.lengths]
            self._lengths.update(group.prompt, lengths, [length >= self._longest for length in lengths], version)

    def _speeds(self, pool: EnginePool) -> Speeds:
        return Speeds(self._token_s[pool.name], self._lanes, lag_budget_s(self.pace, self._world.contract))

    def _take_returned(self, speeds: Speeds, version: int) -> int | None:
        first = self._returned[: 1 if self._policy.is_in_order(speeds) else MAX_CANDIDATES]
        longest = [0.0] * len(first)
        if self._learns:
            longest = self._lengths.longest_of(np.array(first), self._group_size, version).tolist()
        for place, most in enumerate(longest):
            if self._policy.takes(most, speeds):
                return self._returned.pop(place)
        return None

    def _next(self, speeds: Speeds, version: int) -> int:
        if not self._window:
            if self._sampler is None and self._policy.is_in_order(speeds):
                return self._stream.next()
            self._open_window(version)
        waiting = self._policy.choose(self._window, speeds)
        self._window.take(waiting)
        return waiting.prompt_id

    def _open_window(self, version: int) -> None:
        many = WINDOW_STEPS * self._world.contract.groups_per_step
        if self._sampler is None:
            prompts = [self._stream.next() for _ in range(many)]
        else:
            prompts = self._sampler.ahead(self._order, many, version).tolist()
        longest = np.zeros(len(prompts))
        if self._learns:
            longest = self._lengths.longest_of(np.array(prompts), self._group_size, version)
        for prompt, most in zip(prompts, longest.tolist(), strict=True):
            self._order += 1
            self._window.put(Waiting(self._order, prompt, min(most, self._longest)))

    def _token_s_of(self, pool: EnginePool) -> float:
        slots, world = pool.config.max_running_samples, self._world
        return pool.law.seconds(slots, slots * (world.prompt_tokens + world.lengths.mean / 2))
