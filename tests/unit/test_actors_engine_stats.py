"""Statistics of engine steps: contexts of running requests, and steps that are not counted."""

from leeway.actors.report import EngineStats, EngineStep
from leeway.planning.costs import LeastSquares


def step(seconds, num_running=2, prompt_tokens=0, preempted=0, queued_s=(), usage=0.1):
    """Return the facts of a step; `seconds` has one entry per sample that also ran in the previous step."""
    num_tokens = len(seconds) + (prompt_tokens > 0)
    return EngineStep(num_tokens, prompt_tokens, preempted, num_running, usage, queued_s, min(seconds, default=0.0))


def test_contexts_grow_by_one_token_per_step_and_end_with_their_request():
    stats = EngineStats()
    with stats.request(10):
        stats.record(step([], prompt_tokens=10))  # not counted: the first step has no previous step
        with stats.request(20):
            stats.record(step([0.5], prompt_tokens=20, usage=0.4))
            stats.record(step([0.25, 0.25], preempted=1, queued_s=[0.5], usage=0.2))
    with stats.request(30):
        stats.record(step([0.125]))
    # each entry: samples, tokens of their contexts, computed prompt tokens, seconds
    expected = LeastSquares(4)
    for *terms, seconds in (2, (10 + 2) + (20 + 1), 20, 0.5), (2, (10 + 3) + (20 + 2), 0, 0.25), (1, 30 + 1, 0, 0.125):
        expected.add((1.0, *terms), seconds)
    report = stats.report()
    assert list(report.moments) == expected.as_list()
    assert (report.num_preempted, report.num_ended, report.queued_s, report.kv_usage) == (1, 1, 0.5, 0.4)
    assert stats.report().kv_usage == 0.0


def test_recomputation_after_an_update_does_not_count_as_preemption():
    stats = EngineStats()
    with stats.request(10), stats.request(10), stats.request(10):  # the third request waits for a slot
        stats.record(step([0.5], preempted=1))
        stats.interrupt(recomputes=True)
        stats.record(step([0.5], preempted=2))
        assert stats.report().num_preempted == 1
        stats.record(step([0.5], preempted=1))
        assert stats.report().num_preempted == 2
        stats.interrupt(recomputes=False)
        stats.record(step([0.5], preempted=2))
        assert stats.report().num_preempted == 4
