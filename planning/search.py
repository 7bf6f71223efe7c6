"""Search for the best plan by closed-form bounds on throughput, each computed in microseconds.

A plan has a choice for each of a few dimensions: actors of a pool, their slots, the shape of the learner, its
publication interval. Small spaces are enumerated, large ones are searched by steepest ascent from several starts. No
dimension changes learning (groups, samples, the algorithm). Throughput is bounded by:

    generation   sum over engines of  1 / (E[L] * PTL(b, c) / b + prefill)         all slots full
    training     samples of a step / (step with the scores of all its samples + time between two steps)
    staleness    maximum of outstanding groups * K / E[O]                           Little's law on admission

Generation and staleness count a sample once per use that `buffer.max_uses` allows.

W is the duration of a group: its longest sample, its commit, its own step and, with capacity for a single step, also
the delivery of the weights that it waits for. O is how long a group counts as outstanding. If steps wait for groups
that would become stale, or with capacity for one step only, O is the longest W of a step. If stale groups are dropped,
at a deadline D of max_lag + 1 steps, prompts with long samples are issued repeatedly, and with q = P(W <= D | prompt)

    E[O] = E[ E[W | W <= D, prompt] + D (1 / q - 1) ]       over prompts; D is the smallest feasible deadline

The formula describes the steady state; a run is faster at first, because no prompt has missed D yet. Contexts c are
averages over time, in which long samples weigh more: E[L^2] / (2 E[L]) tokens of each completion.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from math import inf, prod, sqrt
from random import Random
from statistics import NormalDist

import numpy as np

from leeway.common.staleness import StalenessContract
from leeway.planning.kv_gate import MARGIN
from leeway.planning.lengths import REACH, Floats, LengthDistribution
from leeway.planning.world import EnginePool, World

Plan = tuple[int, ...]
"""Index of the choice of each dimension."""
Score = Callable[[Plan], float]
"""Plan -> score; higher is better, -inf if the plan is infeasible."""

LIMIT_S = 8.0
NUM_RANDOM_STARTS = 12
NUM_GROUPS = 4096
NUM_LENGTHS, NUM_PROMPTS = 513, 65
"""Grid points at which a length distribution is evaluated."""
NUM_LOADS = 3
"""Fixed-point iterations for the load of the engines; the load changes little after the first."""
_DEVIATION = 0.5
"""Relative standard deviation of the cache use of a running sample; an estimate, refined by simulation."""
_PROMPT_SCORES = np.array([NormalDist().inv_cdf((place + 0.5) / NUM_PROMPTS) for place in range(NUM_PROMPTS)])


@dataclass(frozen=True)
class Bounds:
    """Upper bounds on the number of samples used for training per second."""

    generation: float
    training: float
    staleness: float

    @property
    def rate(self) -> float:
        return min(self.generation, self.training, self.staleness)


@dataclass(frozen=True)
class LengthFigures:
    """Statistics of a length distribution for groups of K."""

    mean: float
    at_a_moment: float
    """Mean over time of the tokens that a running sample has generated."""
    longest: Floats
    """Tokens of the longest sample of a group, ascending: the grid of the next three fields."""
    within: Floats
    """Fraction of the groups whose longest sample has at most the length `longest`."""
    kept: Floats
    """Mean length of the longest sample of the groups counted in `within`."""
    failed: Floats
    """Mean over prompts of the number of groups above `longest` before the first group within `longest`."""

    def longest_of(self, num_groups: int) -> float:
        """Return the expected length of the longest sample of `num_groups` groups."""
        return float(self.longest @ np.diff(self.within**num_groups, prepend=0.0))


@lru_cache(maxsize=256)
def figures_of(distribution: LengthDistribution, group_size: int) -> LengthFigures:
    """Return the statistics of a length distribution; deterministic."""
    random = np.random.default_rng(0)
    prompts = random.standard_normal((NUM_GROUPS, 1))
    lengths = distribution.lengths(prompts, random.standard_normal((NUM_GROUPS, group_size)))
    mean = float(lengths.mean())
    score_N = np.linspace(-REACH, REACH, NUM_LENGTHS)
    longest_N = distribution.at(score_N)
    within_PN = distribution.share_below(_PROMPT_SCORES[:, None], score_N) ** group_size
    within_PN[:, -1] = 1.0  # the maximum length
    within_PN = np.maximum(1e-300, within_PN[:, np.searchsorted(longest_N, longest_N, side="right") - 1])
    kept_PN = np.cumsum(np.diff(within_PN, axis=1, prepend=0.0) * longest_N, axis=1) / within_PN
    return LengthFigures(
        mean, float((lengths**2).mean()) / (2.0 * mean), longest_N, within_PN.mean(axis=0), kept_PN.mean(axis=0),
        (1.0 / within_PN - 1.0).mean(axis=0),
    )  # fmt: skip


def engine_rate(pool: EnginePool, lengths: LengthFigures, prompt_tokens: int, longest: float) -> float:
    """Return the samples per second of one engine whose slots are full."""
    running = _running(pool, lengths, prompt_tokens, longest)
    sample_s = lengths.mean * step_s(pool, lengths, prompt_tokens, longest) / running
    return 1.0 / (sample_s + pool.law.per_prompt_token * prompt_tokens)


def step_s(pool: EnginePool, lengths: LengthFigures, prompt_tokens: int, longest: float, load: float = 1.0) -> float:
    """Return the seconds of a step of one engine of the pool with the fraction `load` of its slots in use."""
    running = max(1.0, load * _running(pool, lengths, prompt_tokens, longest))
    return pool.law.seconds(running, running * (prompt_tokens + lengths.at_a_moment))


def _running(pool: EnginePool, lengths: LengthFigures, prompt_tokens: int, longest: float) -> float:
    """Return the maximum number of running samples: the slots, or the number that `KvGate` admits to the cache.

    The number that `KvGate` admits is n with n + MARGIN * _DEVIATION * sqrt(n) = tokens of the cache / mean context.
    """
    if pool.kv_tokens == inf:
        return float(pool.config.max_running_samples)
    free = MARGIN * _DEVIATION / 2.0
    likely = (sqrt(free**2 + pool.kv_tokens / (prompt_tokens + lengths.at_a_moment)) - free) ** 2
    sure = pool.kv_tokens / (prompt_tokens + longest)
    return max(1.0, min(float(pool.config.max_running_samples), max(sure, likely)))


def bounds_of(world: World, mean_step_s: float) -> Bounds:
    """Return the bounds of a run whose steps take `mean_step_s` on average."""
    contract, costs, group_size = world.contract, world.costs, world.group_size
    lengths, longest = figures_of(world.lengths, group_size), world.lengths.longest
    rates = [pool.count * engine_rate(pool, lengths, world.prompt_tokens, longest) for pool in world.pools]
    generation = sum(rates)
    per_step = contract.groups_per_step * group_size
    turn_s = mean_step_s + costs.between_steps_s
    uses = inf if world.buffer.max_uses == "unlimited" else world.buffer.max_uses
    turn_s += world.score_token_s * per_step / uses * (world.prompt_tokens + lengths.mean)  # each sample's first use
    if contract.bound() is None and world.buffer.replays:  # groups that wait for reuse are not outstanding
        return Bounds(uses * generation, per_step / turn_s, inf)
    rest_s = costs.reward_s + mean_step_s
    if contract.capacity() <= contract.groups_per_step:
        rest_s += costs.publish_s + costs.fetch_s + costs.pause_s
    staleness, load = 0.0, 1.0
    for _ in range(NUM_LOADS):  # engines limited by admission run fewer samples, and so are faster
        steps_s = [step_s(pool, lengths, world.prompt_tokens, longest, load) for pool in world.pools]
        # a pool generates the same fraction of the groups as of the samples
        token_s = sum(rate * seconds for rate, seconds in zip(rates, steps_s, strict=True)) / generation
        staleness = group_size * staleness_rate(contract, lengths, token_s, rest_s)
        load = min(1.0, staleness / generation)
    return Bounds(uses * generation, per_step / turn_s, uses * staleness)


def staleness_rate(contract: StalenessContract, lengths: LengthFigures, token_s: float, rest_s: float) -> float:
    """Return the groups used for training per second, assuming that the engines have slots for every admitted group.

    `token_s` is the time of an engine step, `rest_s` the time of a group excluding its tokens.
    """
    capacity, per_step, bound = contract.capacity(), contract.groups_per_step, contract.bound()
    if bound is None or contract.config.on_stale == "wait" or capacity <= per_step:
        return capacity / (lengths.longest_of(1 if bound is None else per_step) * token_s + rest_s)
    deadline_groups = (bound // contract.updates_per_step + 1) * per_step
    group_N = lengths.longest * token_s + rest_s
    # a deadline between two lengths drops as many groups as the shorter length, so the smallest feasible D is there
    deadline_N = (lengths.kept * token_s + rest_s + group_N * lengths.failed) * deadline_groups / capacity
    first = int(np.argmax(deadline_N <= np.append(group_N[1:], inf)))
    return deadline_groups / float(max(group_N[first], deadline_N[first]))


# --- search -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Space:
    """Dimensions by name, each with its choices ordered so that neighbours are similar."""

    dimensions: Mapping[str, Sequence[object]]

    @property
    def size(self) -> int:
        return prod(len(choices) for choices in self.dimensions.values())

    def all(self) -> Iterable[Plan]:
        return product(*(range(len(choices)) for choices in self.dimensions.values()))

    def choices(self, plan: Plan) -> dict[str, object]:
        return {name: choices[place] for (name, choices), place in zip(self.dimensions.items(), plan, strict=True)}


def search(
    space: Space, score: Score, start: Plan, num_best: int = 20, *, most_enumerated: int = 20_000
) -> list[tuple[Plan, float]]:
    """Return the best plans with their scores, best first; empty if no plan is feasible.

    Spaces of at most `most_enumerated` plans are enumerated. Larger spaces are searched by steepest ascent from
    `start`, the first choices, and random plans. A move changes up to two dimensions, because one may use the
    resources that the other frees.
    """
    if space.size <= most_enumerated:
        return _best({plan: score(plan) for plan in space.all()}, num_best)
    until_s, sizes, random = time.monotonic() + LIMIT_S, [len(each) for each in space.dimensions.values()], Random(0)
    starts = [start, (0,) * len(sizes), *(tuple(map(random.randrange, sizes)) for _ in range(NUM_RANDOM_STARTS))]
    known = {plan: score(plan) for plan in starts}
    for at in starts:
        better: Plan | None = at
        while better is not None:
            at, near = better, {}
            for plan in _neighbours(at, sizes):
                if time.monotonic() > until_s:
                    return _best(known, num_best)
                near[plan] = known[plan] = known[plan] if plan in known else score(plan)
            highest = max(near, key=lambda plan: near[plan], default=at)
            better = highest if known[highest] > known[at] else None
    return _best(known, num_best)


def _neighbours(plan: Plan, sizes: Sequence[int]) -> Iterator[Plan]:
    """Yield the plans that differ from a plan in up to two dimensions, with repetitions."""
    for one, two in combinations(range(len(sizes)), 2):
        for places in product(range(sizes[one]), range(sizes[two])):
            yield (*plan[:one], places[0], *plan[one + 1 : two], places[1], *plan[two + 1 :])


def _best(scores: Mapping[Plan, float], num: int) -> list[tuple[Plan, float]]:
    """Return the best plans, best first; ties are ordered by plan."""
    found = heapq.nsmallest(num, ((-score, plan) for plan, score in scores.items() if score > -inf))
    return [(plan, -score) for score, plan in found]
