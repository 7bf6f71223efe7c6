"""What autoscale makes of steps and pools: advice from the engines' own laws, once, and how far a pool may grow."""

import pytest

from common.costs import Moments, TokenTime
from launch.autoscale import MOST_ADVISED, Autoscale
from launch.config import load_config
from launch.observe.status import PoolStatus
from launch.observe.totals import PoolEngines
from tests.unit.made_up_profile import DEMO

LAW = TokenTime(4e-3, 6e-5)
K, G, SLOTS = 8, 32, 128


def moments():
    found = Moments(4)
    for running in range(1, 129, 8):
        found.add((1.0, running, 0, 0), LAW.seconds(running, 0))
    return found.as_list()


def pool(count, slots_used=1.0, tokens=64.0):
    engines = PoolEngines(
        slots=count * SLOTS, slots_used=slots_used, tokens_per_sample=tokens, moments=moments(), step_s=0.01
    )
    return PoolStatus(name="actors", wanted=count, working=count, tokens_per_s=1000.0, engines=engines)


def rows(num, step_s, set_aside=0, uses=1):
    for step in range(1, num + 1):
        yield {
            "step": step, "skipped": False, "started_s": 2.0 * step, "finished_s": 2.0 * step + step_s,
            "time/step": step_s, "time/wait_for_batch": 2.0 - step_s, "batch/trajectories": G * K,
            "batch/tokens": G * K * 70, "batch/completion_tokens": G * K * 64,
            "buffer/trained": step * G * K // uses, "buffer/uninformative": step * set_aside,
        }  # fmt: skip


def advised(mode, *overrides, room=100, step_s=0.2, count=2, set_aside=0, uses=1, **of_pool):
    config = load_config(DEMO, ["--launch.autoscale", mode, *overrides])
    scale = Autoscale(config)
    found = [scale.look(row, [pool(count, **of_pool)], lambda name: room) for row in rows(30, step_s, set_aside, uses)]
    return [each for each in found if each is not None]


def needed(step_s):
    """Actors with which generation takes as long as a step."""
    return G * K * 64 * LAW.seconds(SLOTS, 0) / SLOTS / step_s


def test_advice_says_how_many_actors_and_what_they_gain():
    first = advised("advise")[0]
    assert first.count == pytest.approx(needed(0.2), abs=1)
    assert first.text.endswith(f"would raise the rate by {needed(0.2) / 2 - 1:.0%}")


def test_what_is_set_aside_has_to_be_generated_too_and_what_is_trained_again_has_not():
    plain, refilled, replayed = (advised("on", **each)[0].count for each in ({}, {"set_aside": G * K}, {"uses": 2}))
    assert plain == pytest.approx(needed(0.2), abs=1)
    assert refilled == pytest.approx(2 * needed(0.2), abs=1)
    assert replayed == pytest.approx(needed(0.2) / 2, abs=1)


def test_it_grows_no_further_than_there_is_room_or_the_config_says():
    assert advised("on", room=1)[0].count == 3
    assert advised("on", "--launch.autoscale_most", "4")[0].count == 4
    assert advised("advise", step_s=1e-3)[0].count == 2 * MOST_ADVISED
    none = advised("on", room=0)
    assert "no pool may grow" in none[0].text
    assert len(none) == 1, "what cannot be changed is said once"


def test_off_says_nothing_and_neither_does_a_run_whose_engines_have_measured_nothing():
    assert advised("off") == []
    scale = Autoscale(load_config(DEMO, ["--launch.autoscale", "on"]))
    unknown = PoolStatus(name="actors", wanted=2, working=2)
    assert not any(scale.look(row, [unknown], lambda name: 9) for row in rows(30, 0.2))


def test_empty_slots_are_no_reason_for_more_actors():
    found = advised("on", slots_used=0.4)
    assert [each.pool for each in found] == [""]
    assert "weight_sync.max_lag" in found[0].text
