"""`TokenClock` agrees with a step-by-step engine and with closed forms."""

import math
import random

import pytest

from leeway.planning.costs import TokenTime
from leeway.planning.world import TokenClock


def ends(clock):
    """Return the end time of each sample, by key."""
    found = {}
    while (next_s := clock.next_end_s()) < math.inf:
        clock.advance(next_s)
        found[clock.end()] = next_s
    return found


def test_samples_that_start_together_end_after_one_step_per_token():
    law = TokenTime(4e-3, 6e-5)
    clock = TokenClock(law)
    for key, length in (("short", 100), ("long", 300)):
        clock.start(key, 50, length)
    found = ends(clock)
    short_s = 100 * law.seconds(2, 0)
    assert found["short"] == pytest.approx(short_s, rel=1e-12)
    assert found["long"] == pytest.approx(short_s + 200 * law.seconds(1, 0), rel=1e-12)


def test_growing_contexts_cost_the_integral_of_the_cost_model():
    law = TokenTime(4e-3, 6e-5, 1e-7)
    clock = TokenClock(law)
    clock.start("a", 500, 1000)
    clock.start("b", 100, 1000)
    # mean context of two samples that together grow from 600 to 2,600
    assert ends(clock)["b"] == pytest.approx(1000 * law.seconds(2, 600 + 1000), rel=1e-12)


def test_the_clock_matches_a_step_by_step_engine_for_random_arrivals():
    law, chance = TokenTime(4e-3, 6e-5, 2e-8, 1e-6), random.Random(3)
    arrivals = sorted((chance.random() * 3.0, chance.randrange(10, 60), chance.randrange(20, 400)) for _ in range(40))
    clock, found = TokenClock(law), {}
    for number, (at_s, prompt, length) in enumerate(arrivals):
        while clock.next_end_s() <= at_s:
            next_s = clock.next_end_s()
            clock.advance(next_s)
            found[clock.end()] = next_s
        clock.advance(at_s)
        clock.start(number, prompt, length)
    found |= ends(clock)
    now_s, waiting, running, stepped = 0.0, list(enumerate(arrivals)), {}, {}
    while waiting or running:
        if not running:
            now_s = max(now_s, waiting[0][1][0])
        new = 0
        while waiting and waiting[0][1][0] <= now_s:
            number, (_, prompt, length) = waiting.pop(0)
            running[number] = [prompt, length]
            new += prompt
        now_s += law.seconds(len(running), sum(context for context, _ in running.values()), new)
        for number in list(running):
            running[number][0] += 1
            running[number][1] -= 1
            if not running[number][1]:
                del running[number]
                stepped[number] = now_s
    for number, at_s in stepped.items():
        assert found[number] == pytest.approx(at_s, abs=3 * law.seconds(40, 20_000, 60)), (
            "the times differ by a few steps"
        )


def test_stalls_and_cancellations_shift_end_times():
    law = TokenTime(1e-2, 1e-3)
    clock = TokenClock(law)
    for key in ("stays", "goes"):
        clock.start(key, 0, 100)
    clock.advance(50 * law.seconds(2, 0))
    clock.stall(5.0)
    assert clock.cancel("goes") == pytest.approx(50)
    assert ends(clock) == {"stays": pytest.approx(50 * law.seconds(2, 0) + 5.0 + 50 * law.seconds(1, 0))}
    assert (clock.num_running, clock.kv_tokens) == (0, 0.0)
