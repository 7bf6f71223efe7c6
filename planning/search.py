"""Search: the plan that is best by the bounds, and among the best ones by simulation.

A plan is a choice for each of a few dimensions: how many actors a pool has, their slots, the shape of the learner, how
often it publishes. Small spaces are enumerated; in large ones Metropolis chains walk, each from another place, ever
colder. What learning depends on (groups, samples, the algorithm) is no dimension.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from random import Random

Plan = tuple[int, ...]
"""For each dimension the place of its choice."""
Score = Callable[[Plan], float]
"""Greater is better; -inf where it cannot be."""

MOST_ENUMERATED = 20_000
NUM_CHAINS = 4
COLDEST, WARMEST = 1e-5, 1e-1
"""Temperatures, as shares of the best score so far."""
LIMIT_S = 8.0


@dataclass(frozen=True)
class Space:
    """Dimensions by name, each with its choices in an order in which neighbours are alike."""

    dimensions: Mapping[str, Sequence[object]]

    @property
    def size(self) -> int:
        return math.prod(len(choices) for choices in self.dimensions.values())

    def all(self) -> Iterable[Plan]:
        return product(*(range(len(choices)) for choices in self.dimensions.values()))

    def choices(self, plan: Plan) -> dict[str, object]:
        return {name: choices[place] for (name, choices), place in zip(self.dimensions.items(), plan, strict=True)}


@dataclass
class Best:
    """The best plans that were seen, each once."""

    num: int
    _heap: list[tuple[float, Plan]] = field(default_factory=list)
    _seen: set[Plan] = field(default_factory=set)

    def see(self, plan: Plan, score: float) -> None:
        if score == -math.inf or plan in self._seen:
            return
        if len(self._heap) < self.num:
            heapq.heappush(self._heap, (score, plan))
            self._seen.add(plan)
        elif score > self._heap[0][0]:
            _, gone = heapq.heapreplace(self._heap, (score, plan))
            self._seen.discard(gone)
            self._seen.add(plan)

    @property
    def plans(self) -> list[tuple[Plan, float]]:
        """Best first; of equal ones the first in order."""
        return [(plan, score) for score, plan in sorted(self._heap, key=lambda each: (-each[0], each[1]))]


def search(space: Space, score: Score, num_best: int = 20, *, seed: int = 0) -> list[tuple[Plan, float]]:
    """The best plans with their scores, best first; none where no plan can be."""
    if space.size <= MOST_ENUMERATED:
        best = Best(num_best)
        for plan in space.all():
            best.see(plan, score(plan))
        return best.plans
    return metropolis(space, score, num_best, seed=seed)


def metropolis(
    space: Space, score: Score, num_best: int = 20, *, seed: int = 0, limit_s: float = LIMIT_S, num_moves: int = 40_000
) -> list[tuple[Plan, float]]:
    """The same by chance: chains that prefer what is better, and are colder with every move.

    A move changes one or two dimensions, mostly to a neighbour. What cannot be scores -inf and is never entered.
    """
    best, until_s = Best(num_best), time.monotonic() + limit_s
    sizes = [len(choices) for choices in space.dimensions.values()]
    known: dict[Plan, float] = {}

    def scored(plan: Plan) -> float:
        if plan not in known:
            known[plan] = score(plan)
            best.see(plan, known[plan])
        return known[plan]

    for chain in range(NUM_CHAINS):
        random = Random(seed * NUM_CHAINS + chain)
        at = max((_any(sizes, random) for _ in range(64)), key=scored)
        top = scored(at)
        for move in range(num_moves // NUM_CHAINS):
            if move % 256 == 0 and time.monotonic() > until_s:
                break
            next_at = _neighbour(at, sizes, random)
            here, there = scored(at), scored(next_at)
            top = max(top, there)
            share = move * NUM_CHAINS / num_moves
            heat = WARMEST * (COLDEST / WARMEST) ** share * max(abs(top), 1e-300)
            if there >= here or (there > -math.inf and random.random() < math.exp((there - here) / heat)):
                at = next_at
    return best.plans


def _any(sizes: Sequence[int], random: Random) -> Plan:
    return tuple(random.randrange(size) for size in sizes)


def _neighbour(plan: Plan, sizes: Sequence[int], random: Random) -> Plan:
    """One dimension chosen anew, or two at once, for what one gives up another may use."""
    found = list(plan)
    for _ in range(1 + (random.random() < 0.3)):
        where = random.randrange(len(sizes))
        if random.random() < 0.7:
            found[where] = min(sizes[where] - 1, max(0, found[where] + random.choice((-1, 1))))
        else:
            found[where] = random.randrange(sizes[where])
    return tuple(found)
