"""A simulated run whose lengths and pools change while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.staleness import PolicyVersion
from planning import simulator
from planning.simulator import Simulation
from planning.world import EnginePool, Outcome, TokenClock, World


class ScalingSimulation(Simulation):
    """As its base; what is told after each step may `scale` it and change its `stretch`."""

    def __init__(self, world: World, seed: int, after_step: Callable[[int], None]) -> None:
        """Call `after_step` with the number of each step, from 1."""
        super().__init__(world, seed)
        self.stretch = 1.0
        """Lengths are drawn so many times as long as the law says."""
        self._after_step, self._num_steps = after_step, 0
        self._leaving: set[object] = set()
        """Engines that lease nothing more."""
        drawn = self._prompts.next

        def stretched(pool: EnginePool, version: int) -> tuple[int, list[float]]:
            prompt, lengths = drawn(pool, version)
            return prompt, [max(1.0, round(self.stretch * length)) for length in lengths]

        self._prompts.next = stretched  # type: ignore[method-assign]

    def so_far(self) -> Outcome:
        """What is counted until now, but for shares of time."""
        return self._found

    def count(self) -> int:
        """Actors that work."""
        return len(self._engines) - len(self._leaving)

    def scale(self, count: int, start_s: float = 0.0) -> None:
        """Let the only pool have another number of actors; who comes takes a while, who leaves finishes what it runs.

        Raises:
            ValueError: none is to be left, or there are several pools.
        """
        (kind,) = self._world.pools
        there = [engine for engine in self._engines if engine not in self._leaving]
        if count < 1:
            raise ValueError("who leaves hands what waits in it on: at least one actor stays")
        for _ in range(count - len(there)):
            newest = PolicyVersion(0, self._published)
            slots, clock = kind.config.max_running_samples, TokenClock[Any](kind.law, self.now_s)
            engine = simulator._Engine(kind, slots, clock, kind.gate(), newest, newest)
            engine.is_asking = True
            self._engines.append(engine)
            self._at(self.now_s + start_s, simulator._LEASE, engine)
        for engine in there[count:]:
            self._leaving.add(engine)
            engine.closed_since_s = None
            heir = min(there[:count], key=lambda each: len(each.waiting))
            heir.waiting.extend(engine.waiting)
            engine.waiting.clear()
            self._advance(heir)
            self._go_on(heir)

    def _lease(self, engine: simulator._Engine) -> None:
        if engine not in self._leaving:
            super()._lease(engine)

    def _on_step(self, what: Any) -> None:  # noqa: ANN401 -- its base's
        super()._on_step(what)
        self._num_steps += 1
        self._after_step(self._num_steps)
