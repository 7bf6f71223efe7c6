"""Bounds: what the rate of a run is at most, by each of its parts alone; closed forms, microseconds each.

    generation   sum over engines of  1 / (E[L] * PTL(b, c) / b + prefill)         all slots full
    training     samples of a step / (step + what lies between two steps)
    staleness    groups that may be outstanding * K / E[W]                          Little's law on admission
    weights      samples of the steps in which an engine may fall behind, over the time to apply one version

W is how long a group is outstanding: its longest sample, its commit, its own step, and with room for a single step also
the way of the weights that it waits for. Contexts c are as they are on average over time, where long samples are seen
more often: E[L^2] / (2 E[L]) tokens of each completion.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf

import numpy as np

from planning.lengths import LengthLaw
from planning.world import Bound, EnginePool, World

NUM_GROUPS = 4096
"""Drawn for means over groups."""


@dataclass(frozen=True)
class Bounds:
    """Trained samples per second."""

    generation: float
    training: float
    staleness: float
    weights: float

    @property
    def rate(self) -> float:
        """The least of them."""
        return min(self.generation, self.training, self.staleness, self.weights)

    @property
    def binds(self) -> Bound:
        """Which that is."""
        named: dict[Bound, float] = {
            "training": self.training,
            "generation": self.generation,
            "staleness": self.staleness,
            "weights": self.weights,
        }
        return min(named, key=lambda name: named[name])


@dataclass(frozen=True)
class LengthFigures:
    """Means of a law of lengths."""

    mean: float
    at_a_moment: float
    """Tokens that a running sample has made, mean over time."""
    longest_of_group: float
    """Mean of the longest of K."""


@lru_cache(maxsize=256)
def figures_of(law: LengthLaw, group_size: int) -> LengthFigures:
    """Of groups of a law; the same every time."""
    random = np.random.default_rng(0)
    prompts = random.standard_normal((NUM_GROUPS, 1))
    lengths = law.lengths(prompts, random.standard_normal((NUM_GROUPS, group_size)))
    mean = float(lengths.mean())
    return LengthFigures(mean, float((lengths**2).mean()) / (2.0 * mean), float(lengths.max(axis=1).mean()))


def engine_rate(pool: EnginePool, lengths: LengthFigures, prompt_tokens: int, longest: float) -> float:
    """Samples per second of one engine whose slots are full."""
    return 1.0 / (lengths.mean * step_s(pool, lengths, prompt_tokens, longest) / _running(pool, prompt_tokens, longest)
                  + pool.law.per_prompt_token * prompt_tokens)  # fmt: skip


def step_s(pool: EnginePool, lengths: LengthFigures, prompt_tokens: int, longest: float) -> float:
    """Seconds of a step of one of its engines whose slots are full."""
    running = _running(pool, prompt_tokens, longest)
    return pool.law.seconds(running, running * (prompt_tokens + lengths.at_a_moment))


def _running(pool: EnginePool, prompt_tokens: int, longest: float) -> float:
    """Samples that an engine runs at most: its slots, or what its cache is sure to hold."""
    held = pool.kv_tokens / (prompt_tokens + longest)
    return float(max(1.0, min(pool.config.max_running_samples, held if held < inf else inf)))


def bounds_of(world: World, mean_step_s: float) -> Bounds:
    """All bounds of a run, whose steps take so long on average."""
    contract, costs, group_size = world.contract, world.costs, world.group_size
    lengths, longest = figures_of(world.lengths, group_size), world.lengths.longest
    rates = [pool.count * engine_rate(pool, lengths, world.prompt_tokens, longest) for pool in world.pools]
    steps_s = [step_s(pool, lengths, world.prompt_tokens, longest) for pool in world.pools]
    generation = sum(rates)
    per_step = contract.groups_per_step * group_size
    turn_s = mean_step_s + costs.between_steps_s
    apply_s = costs.fetch_s + costs.pause_s
    versions_behind = (contract.actor_lag + 1) * contract.config.publish_every
    weights = per_step * versions_behind / (contract.updates_per_step * apply_s) if apply_s else inf
    if contract.bound() is None:
        return Bounds(generation, per_step / turn_s, inf, weights)
    # an engine has as many of the groups as it makes of the samples
    token_s = sum(rate * seconds for rate, seconds in zip(rates, steps_s, strict=True)) / generation
    residence_s = lengths.longest_of_group * token_s + costs.reward_s + mean_step_s
    if contract.capacity() <= contract.groups_per_step:
        residence_s += costs.publish_s + apply_s
    return Bounds(generation, per_step / turn_s, contract.capacity() * group_size / residence_s, weights)
