"""Simulation of a run whose completion lengths and pool size change while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from leeway.common.staleness import PolicyVersion
from leeway.planning import simulator
from leeway.planning.simulator import Simulation
from leeway.planning.world import EnginePool, Outcome, TokenClock, World


class ScalingSimulation(Simulation):
    """A simulation with a callback after each step, which may call `scale` and change `stretch`."""

    def __init__(self, world: World, seed: int, after_step: Callable[[int], None]) -> None:
        """Prepare a simulation that calls `after_step` with the number of each finished step, starting at 1."""
        super().__init__(world, seed)
        self.stretch = 1.0
        """Factor by which drawn lengths are multiplied."""
        self._after_step, self._num_steps = after_step, 0
        self._draining: set[object] = set()
        """Engines that finish their running samples and lease no further groups."""
        drawn = self._prompts.next

        def stretched(pool: EnginePool, version: int) -> tuple[int, list[float]]:
            prompt, lengths = drawn(pool, version)
            return prompt, [max(1.0, round(self.stretch * length)) for length in lengths]

        self._prompts.next = stretched  # type: ignore[method-assign]

    def so_far(self) -> Outcome:
        """Return the counts since the start of the simulation; fractions of time are not set."""
        return self._found

    def count(self) -> int:
        """Return the number of actors that are not draining."""
        return len(self._engines) - len(self._draining)

    def scale(self, count: int, start_s: float = 0.0) -> None:
        """Scale the only pool. New actors start after `start_s`, and removed actors finish their running samples.

        Raises:
            ValueError: `count` is below 1, or there are several pools.
        """
        (kind,) = self._world.pools
        running = [engine for engine in self._engines if engine not in self._draining]
        if count < 1:
            raise ValueError(f"count = {count}: at least one actor must remain to take over waiting samples")
        for _ in range(count - len(running)):
            newest = PolicyVersion(0, self._published)
            slots, clock = kind.config.max_running_samples, TokenClock[Any](kind.law, self.now_s)
            engine = simulator._Engine(kind, slots, clock, kind.gate(), newest, newest)
            engine.is_requesting = True
            self._engines.append(engine)
            self._at(self.now_s + start_s, simulator._LEASE, engine)
        for engine in running[count:]:
            self._draining.add(engine)
            engine.closed_since_s = None
            successor = min(running[:count], key=lambda each: len(each.waiting))
            successor.waiting.extend(engine.waiting)
            engine.waiting.clear()
            self._advance(successor)
            self._resume(successor)

    def _lease(self, engine: simulator._Engine) -> None:
        if engine not in self._draining:
            super()._lease(engine)

    def _on_step(self, what: Any) -> None:  # noqa: ANN401 -- signature of the base class
        super()._on_step(what)
        self._num_steps += 1
        self._after_step(self._num_steps)
