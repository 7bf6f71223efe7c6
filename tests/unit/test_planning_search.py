"""Search finds the best plan: exactly by enumeration, and within 1 % by steepest ascent."""

import math
import random

import pytest

from leeway.planning import search as searching
from leeway.planning.search import Space, search


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
    found = search(space, score, (0, 0, 0), 7)
    expected = sorted((score(plan) for plan in space.all() if score(plan) > -math.inf), reverse=True)[:7]
    assert [each for _, each in found] == expected
    assert space.choices((1, 2, 3)) == {"d0": 1, "d1": 2, "d2": 3}


@pytest.mark.parametrize("seed", range(20))
def test_ascent_finds_a_plan_as_good_as_by_enumeration(seed):
    sizes = (6, 9, 5, 8, 4)
    score = hills(seed, sizes)
    best = search(space_of(sizes), score, (0,) * 5, 1)[0][1]
    assert search(space_of(sizes), score, (0,) * 5, most_enumerated=0)[0][1] >= best / 1.01


def test_a_large_space_is_searched_by_ascent_within_a_limit(monkeypatch):
    space = space_of((300, 300))
    found = search(space, lambda plan: -abs(plan[0] - 70) - abs(plan[1] - 9), (0, 0))
    assert found[0] == ((70, 9), 0)
    monkeypatch.setattr(searching, "LIMIT_S", 0.0)
    assert search(space, lambda plan: plan[0], (5, 5))[0][1] >= 5


def test_search_returns_nothing_if_no_plan_is_possible():
    assert search(space_of((3, 3)), lambda _: -math.inf, (0, 0)) == []
    assert search(space_of((3, 3)), lambda _: -math.inf, (0, 0), most_enumerated=0) == []
