"""Statistics of engine steps: contexts of running requests, and steps that are not counted."""

from types import SimpleNamespace

import pytest

from leeway.actors.engine_output import EngineStats
from leeway.planning.costs import LeastSquares
from tests.unit.fake_actor import Clock


def step(latencies, prompt_tokens=0, preempted=0, ended=()):
    """Return vLLM's statistics of one step; `latencies` belong to samples that also ran in the previous step."""
    return SimpleNamespace(
        num_generation_tokens=len(latencies) + (prompt_tokens > 0),
        inter_token_latencies_iter=list(latencies),
        num_preempted_reqs=preempted,
        prompt_token_stats=SimpleNamespace(computed=prompt_tokens),
        finished_requests=[SimpleNamespace(queued_time=each) for each in ended],
    )


def cache(usage, running=2):
    return SimpleNamespace(kv_cache_usage=usage, num_running_reqs=running)


def test_contexts_grow_by_one_token_per_step_and_end_with_their_request():
    clock = Clock()
    stats = EngineStats(clock)
    with stats.request(10):
        stats.record(cache(0.1), step([], prompt_tokens=10))  # not counted: the first step has no previous step
        with stats.request(20):
            clock.now_s += 1.0
            stats.record(cache(0.4), step([0.5], prompt_tokens=20))
            clock.now_s += 1.0
            stats.record(cache(0.2), step([0.25, 0.25], preempted=1, ended=[0.5]))
    with stats.request(30):
        clock.now_s += 1.0
        stats.record(cache(0.1), step([0.125]))
    # each entry: samples, tokens of their contexts, computed prompt tokens, seconds
    expected = LeastSquares(4)
    for *terms, seconds in (2, (10 + 2) + (20 + 1), 20, 0.5), (2, (10 + 3) + (20 + 2), 0, 0.25), (1, 30 + 1, 0, 0.125):
        expected.add((1.0, *terms), seconds)
    report = stats.report()
    assert list(report.moments) == expected.as_list()
    assert (report.num_preempted, report.num_ended, report.queued_s, report.kv_usage) == (1, 1, 0.5, 0.4)
    assert stats.report().kv_usage == 0.0


def test_a_step_interrupted_by_an_update_is_not_measured():
    clock = Clock()
    stats = EngineStats(clock)
    for interrupted in (False, True, False):
        clock.now_s += 1.0
        if interrupted:
            stats.interrupt()
        clock.now_s += 0.1
        stats.record(None, step([0.2 if interrupted else 0.05]))
    measured = LeastSquares.from_list(stats.report().moments)
    assert (measured.num_measured, measured.total) == (2, pytest.approx(0.1))


def test_recomputation_after_an_update_does_not_count_as_preemption():
    stats = EngineStats(Clock())
    with stats.request(10), stats.request(10), stats.request(10):  # the third request waits for a slot
        stats.record(cache(0.1), step([0.5], preempted=1))
        stats.interrupt(recomputes=True)
        stats.record(cache(0.1), step([0.5], preempted=2))
        assert stats.report().num_preempted == 1
        stats.record(cache(0.1), step([0.5], preempted=1))
        assert stats.report().num_preempted == 2
        stats.interrupt()
        stats.record(cache(0.1), step([0.5], preempted=2))
        assert stats.report().num_preempted == 4
