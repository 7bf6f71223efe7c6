"""Search finds the best plan: exactly by enumeration, and within 1 % by Metropolis chains."""

import math
import random

import pytest

from leeway.planning import search as searching
from leeway.planning.search import Space, metropolis, search


def hills(seed, sizes):
    """Return a score with several hills, and with regions forbidden by two of the dimensions."""
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


def test_a_small_space_is_enumerated_and_the_best_plans_are_sorted():
    space, score = space_of((4, 5, 6)), hills(1, (4, 5, 6))
    found = search(space, score, 7)
    expected = sorted((score(plan) for plan in space.all() if score(plan) > -math.inf), reverse=True)[:7]
    assert [each for _, each in found] == expected
    assert space.choices((1, 2, 3)) == {"d0": 1, "d1": 2, "d2": 3}


@pytest.mark.parametrize("seed", range(20))
def test_chains_find_a_plan_as_good_as_by_enumeration(seed):
    sizes = (6, 9, 5, 8, 4)
    score = hills(seed, sizes)
    best = search(space_of(sizes), score, 1)[0][1]
    assert metropolis(space_of(sizes), score, 5, seed=seed, num_moves=8000)[0][1] >= best / 1.01


def test_a_large_space_is_searched_by_chains_that_repeat_with_their_seed(monkeypatch):
    monkeypatch.setattr(searching, "MOST_ENUMERATED", 10)
    space, score = space_of((30, 30)), hills(3, (30, 30))
    assert search(space, score, 3, seed=1) == search(space, score, 3, seed=1)


def test_search_returns_nothing_if_no_plan_is_possible():
    assert search(space_of((3, 3)), lambda _: -math.inf) == []
    assert metropolis(space_of((3, 3)), lambda _: -math.inf, num_moves=100) == []
