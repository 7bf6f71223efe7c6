"""Autoscaling: advice derived from steps and engine costs, and the limits of growth."""

from random import Random

import pytest

from leeway.launch.config import load_config
from leeway.launch.observe.status import PoolStatus
from leeway.launch.observe.totals import PoolEngines
from leeway.planning.autoscale import MOST_ADVISED, REPEAT_AFTER, Advice, Autoscale
from leeway.planning.costs import LeastSquares, TokenTime
from tests.unit.made_up_profile import DEMO

LAW = TokenTime(4e-3, 6e-5)
K, G, SLOTS = 8, 32, 128


def moments():
    found = LeastSquares(4)
    for running in range(1, 129, 8):
        found.add((1.0, running, 0, 0), LAW.seconds(running, 0))
    return found.as_list()


def pool(count, slots_used=1.0, tokens=64.0):
    engines = PoolEngines(
        slots=count * SLOTS, slots_used=slots_used, tokens_per_sample=tokens, moments=moments(), step_s=0.01
    )
    return PoolStatus(name="actors", wanted=count, working=count, tokens_per_s=1000.0, engines=engines)


def rows(num, step_s, set_aside=0, uses=1, stale=0, every_s=None):
    """Yield one step of `step_s` seconds every `every_s` seconds; between two steps the learner waits for its batch."""
    every_s = every_s or step_s
    for step in range(1, num + 1):
        start_s = every_s * step
        yield {
            "step": step, "restarts": 0, "skipped": False, "started_s": start_s, "finished_s": start_s + step_s,
            "time/step": step_s, "time/wait_for_batch": every_s - step_s, "batch/trajectories": G * K,
            "batch/tokens": G * K * 70, "batch/completion_tokens": G * K * 64,
            "buffer/trained": step * G * K // uses, "buffer/uninformative": step * set_aside,
            "buffer/dropped_stale": step * stale,
        }  # fmt: skip


def autoscale(mode, *overrides):
    return Autoscale(load_config(DEMO, ["--launch.autoscale", mode, *overrides]))


def advised(mode, *overrides, room=100, step_s=0.2, count=2, steps=None, **of_pool):
    scale = autoscale(mode, *overrides)
    found = [scale.observe(row, [pool(count, **of_pool)], lambda name: room) for row in rows(30, step_s, **steps or {})]
    return [each for each in found if each is not None]


def needed(step_s):
    """Return the number of actors that generate the samples of a step in the time of a training step."""
    return G * K * 64 * LAW.seconds(SLOTS, 0) / SLOTS / step_s


def test_advice_states_the_number_of_actors_and_their_gain():
    first = advised("advise")[0]
    assert first.count == pytest.approx(needed(0.2), abs=1)
    assert first.text.endswith(f"would raise the rate by {needed(0.2) / 2 - 1:.0%}")


def test_unused_samples_raise_the_number_of_needed_actors_and_reuse_lowers_it():
    changes = ({}, {"set_aside": G * K}, {"stale": G * K}, {"uses": 2})
    plain, refilled, dropped, replayed = (advised("on", steps=each)[0].count for each in changes)
    assert plain == pytest.approx(needed(0.2), abs=1)
    assert refilled == dropped == pytest.approx(2 * needed(0.2), abs=1)
    assert replayed == pytest.approx(needed(0.2) / 2, abs=1)


def test_a_pool_shrinks_only_if_the_learner_does_not_wait():
    assert [each.kind for each in advised("on", step_s=0.5, count=6)] == ["shrink"]
    assert advised("on", step_s=0.5, count=6, steps={"every_s": 0.8}) == []


def test_growth_is_limited_by_free_resources():
    assert advised("on", room=1)[0].count == 3
    assert advised("advise", step_s=1e-3)[0].count == 2 * MOST_ADVISED
    none = advised("on", room=0)
    assert none[0].text.endswith("no pool can grow: no host or GPU has room for one more actor")
    assert len(none) == 1, "advice that cannot be followed is given once"


@pytest.mark.parametrize(
    ("mode", "step_s", "room", "facts"),
    [
        ("advise", 0.2, 9, {"count": 2}),
        ("advise", 0.5, 9, {"count": 6}),
        ("on", 0.2, 0, {"count": 2}),
        ("on", 0.2, 9, {"count": 2, "slots_used": 0.4}),
    ],
)
def test_advice_is_given_once_even_if_its_numbers_change(mode, step_s, room, facts):
    noise, scale, given = Random(0), autoscale(mode), []
    for row in rows(300, step_s):
        row["time/step"] *= noise.uniform(0.97, 1.03)
        given.append(scale.observe(row, [pool(tokens=64 * noise.uniform(0.97, 1.03), **facts)], lambda name: room))
    assert len([each for each in given if each is not None]) == 1


@pytest.mark.parametrize(("mode", "again"), [("advise", False), ("on", True)])
def test_lapsed_advice_is_given_again_and_scaling_is_always_reported(mode, again):
    scale, now = autoscale(mode), Advice("grow", "", "actors", 3)
    coming = iter([now, now, *[None] * REPEAT_AFTER, now])
    scale._policy.observe = lambda states, facts: next(coming)
    found = [scale.observe(row, [pool(2)], lambda name: 9) for row in rows(REPEAT_AFTER + 4, 0.2)]
    assert found == [None, now, now if again else None, *[None] * REPEAT_AFTER, now]


@pytest.mark.parametrize("gap", [{"step": 5}, {"restarts": 1}])
def test_a_gap_of_an_evaluation_or_a_restart_does_not_count_as_a_step(gap):
    scale, observed = autoscale("on"), []
    scale._policy.observe = lambda states, facts: observed.append(facts)
    one, two = rows(2, 0.2)
    for row in (one, two | gap):
        assert scale.observe(row, [pool(2)], lambda name: 9) is None
    assert not observed
    row = {**two, **gap, "step": (two | gap)["step"] + 1, "buffer/trained": 3 * G * K}
    assert scale.observe(row, [pool(2)], len) is None
    assert [each.samples for each in observed] == [G * K]


def test_an_empty_pool_does_not_suppress_advice_for_other_pools():
    empty = PoolStatus(name="slow", wanted=0)
    scale = autoscale("on")
    found = [scale.observe(row, [pool(2), empty], lambda name: 9) for row in rows(9, 0.2)]
    assert "actors" in [each.pool for each in found if each is not None]


def test_engines_without_measurements_give_no_advice():
    scale = autoscale("on")
    unknown = PoolStatus(name="actors", wanted=2, working=2)
    assert not any(scale.observe(row, [unknown], lambda name: 9) for row in rows(30, 0.2))


def test_empty_slots_do_not_call_for_more_actors():
    found = advised("on", slots_used=0.4)
    assert [each.pool for each in found] == [""]
    assert "weight_sync.max_lag" in found[0].text
