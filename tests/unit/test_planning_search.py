"""Search finds the best plan: by enumeration always, by Metropolis chains within a hundredth."""

import math
import random

import pytest

from planning import search as searching
from planning.search import Space, metropolis, search


def hills(seed, sizes):
    """Scores with several hills, products of terms that depend on two dimensions, and forbidden regions."""
    chance = random.Random(seed)
    peaks = [([chance.uniform(0, size - 1) for size in sizes], chance.uniform(0.5, 1.0)) for _ in range(4)]
    forbidden = chance.randrange(len(sizes)), chance.randrange(len(sizes))

    def score(plan):
        if (plan[forbidden[0]] + plan[forbidden[1]]) % 7 == 3:
            return -math.inf
        return max(
            height * math.exp(-sum(((p - at) / size) ** 2 for p, at, size in zip(plan, peak, sizes, strict=True)))
            for peak, height in peaks
        )

    return score


def space_of(sizes):
    return Space({f"d{number}": tuple(range(size)) for number, size in enumerate(sizes)})


def test_a_small_space_is_enumerated_and_the_best_come_in_order():
    space, score = space_of((4, 5, 6)), hills(1, (4, 5, 6))
    found = search(space, score, 7)
    wanted = sorted((score(plan) for plan in space.all() if score(plan) > -math.inf), reverse=True)[:7]
    assert [each for _, each in found] == wanted
    assert space.choices((1, 2, 3)) == {"d0": 1, "d1": 2, "d2": 3}


@pytest.mark.parametrize("seed", range(20))
def test_chains_find_what_enumeration_finds(seed):
    sizes = (6, 9, 5, 8, 4)
    score = hills(seed, sizes)
    best = search(space_of(sizes), score, 1)[0][1]
    assert metropolis(space_of(sizes), score, 5, seed=seed, num_moves=8000)[0][1] >= best / 1.01


def test_a_large_space_is_walked_and_the_same_seed_walks_the_same(monkeypatch):
    monkeypatch.setattr(searching, "MOST_ENUMERATED", 10)
    space, score = space_of((30, 30)), hills(3, (30, 30))
    assert search(space, score, 3, seed=1) == search(space, score, 3, seed=1)


def test_where_no_plan_can_be_there_is_none():
    assert search(space_of((3, 3)), lambda _: -math.inf) == []
    assert metropolis(space_of((3, 3)), lambda _: -math.inf, num_moves=100) == []
