"""Run the simulation with one seed or with many seeds."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from random import Random
from typing import NamedTuple
from unittest import mock

from leeway.common.staleness import StaleTokens
from tests.simulation.core import Environment
from tests.simulation.knobs import Faults, Knobs, choose_faults, choose_knobs
from tests.simulation.witness import Broken
from tests.simulation.world import NUM_EVENTS, World


class Outcome(NamedTuple):
    """Result of a run."""

    seed: int
    knobs: Knobs
    faults: Faults
    trace: list[str]
    trace_hash: str
    num_steps: int
    """Number of the last step that the last learner finished."""
    num_trained: int
    """Number of updates."""
    greatest_lag: int
    num_dropped: int
    """Number of dropped samples."""
    num_final_rounds: int
    num_set_aside: int
    """Number of groups of equal rewards set aside until the last step was drawn."""


class SimulationFailed(AssertionError):
    """A seed broke an invariant; the message has the command that reproduces it."""

    def __init__(
        self, seed: int, depth: str, knobs: Knobs, faults: Faults, broken: Broken, trace: Sequence[str]
    ) -> None:
        self.seed, self.invariant = seed, broken.invariant
        lines = "\n".join(trace[-40:])
        super().__init__(
            f"seed {seed}, depth {depth}: {broken}\n{knobs}\n{faults}\n{lines}\n"
            f"to reproduce it, run: python -m tests.simulation --depth {depth} --seed {seed} --trace"
        )


def simulate(
    seed: int, env: Environment | None = None, *, num_events: int = NUM_EVENTS, trace: bool = False
) -> Outcome:
    """Run one seed.

    Args:
        seed: seed of all random choices.
        env: LMDB environment of the real buffer; None for depth "policy", which has no real buffer.
        num_events: random events before the steps without faults.
        trace: record every event.

    Raises:
        SimulationFailed: an invariant does not hold.
    """
    chance = Random(seed ^ 0x5EED)
    return simulate_with(seed, choose_knobs(chance), choose_faults(chance), env, num_events=num_events, trace=trace)


class Totals(NamedTuple):
    """Totals over many seeds."""

    num_seeds: int
    num_updates: int
    num_dropped: int
    """Number of dropped samples."""
    num_at_bound: int
    """Number of seeds in which an update used a token with a lag of exactly `max_lag`."""

    @classmethod
    def of(cls, seeds: range, env: Environment | None = None) -> Totals:
        """Run the seeds as `simulate` does."""
        num_updates = num_dropped = num_at_bound = 0
        for seed in seeds:
            outcome = simulate(seed, env)
            num_updates += outcome.num_trained
            num_dropped += outcome.num_dropped
            num_at_bound += outcome.greatest_lag == outcome.knobs.max_lag
        return cls(len(seeds), num_updates, num_dropped, num_at_bound)


def _without_attempt_limit() -> mock._patch:
    """Disable the limit of attempts, because faults are far more frequent than in a run."""
    return mock.patch("leeway.buffer.groups.MAX_ATTEMPTS", 1_000_000)


def simulate_with(
    seed: int,
    knobs: Knobs,
    faults: Faults,
    env: Environment | None = None,
    *,
    num_events: int = NUM_EVENTS,
    trace: bool = False,
) -> Outcome:
    """Run one seed with these settings as `simulate` does; run a failing seed again to record its trace."""
    lines: list[str] | None = [] if trace else None
    broken: Broken | None = None
    num_rounds = 0
    with _without_attempt_limit(), contextlib.closing(World(seed, knobs, faults, env, lines)) as world:
        try:
            num_rounds = world.run(num_events)
            world.check_store()
        except Broken as error:
            broken = error
        except StaleTokens as error:
            broken = Broken("last line", str(error))
    if broken is not None and not trace:
        return simulate_with(seed, knobs, faults, env, num_events=num_events, trace=True)
    if broken is not None:
        raise SimulationFailed(seed, "policy" if env is None else "system", knobs, faults, broken, lines or [])
    witness = world.witness
    return Outcome(
        seed,
        knobs,
        faults,
        lines or [],
        hashlib.blake2b("\n".join(lines or []).encode(), digest_size=8).hexdigest(),
        world.learner.step,
        witness.num_trained,
        witness.greatest_lag,
        witness.num_dropped,
        num_rounds,
        witness.num_set_aside,
    )
