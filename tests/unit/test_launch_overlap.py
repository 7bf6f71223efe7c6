"""Interval arithmetic of the overlap between generation and training steps."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.launch.observe.totals import OPEN_STEPS, OverlapMeter, merge, shared, total

ticks = st.integers(0, 60)
intervals = st.lists(st.tuples(ticks, ticks).map(lambda pair: (float(min(pair)), float(max(pair)))), max_size=12)


def covered(spans):
    """Return the unit cells that intervals cover, to check the interval arithmetic independently."""
    return {cell for start, end in spans for cell in range(int(start), int(end))}


@given(intervals)
def test_a_union_covers_its_parts_and_is_disjoint(spans):
    merged = merge(spans)
    assert covered(merged) == covered(spans)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(merged))
    assert total(spans) == len(covered(spans))


@given(intervals, intervals)
def test_shared_time_is_the_intersection(left, right):
    assert shared(left, right) == len(covered(left) & covered(right))


def test_overlap_is_the_share_of_step_time_in_which_any_actor_generated():
    meter = OverlapMeter()
    assert meter.fraction() is None
    meter.add_step(0.0, 4.0)
    meter.add_step(6.0, 10.0)
    meter.add_busy([(0.0, 1.0)])
    meter.add_busy([(1.0, 2.0)])
    meter.add_busy([(1.0, 3.0), (4.0, 6.0)])
    assert meter.fraction() == pytest.approx(3 / 8)


def test_the_overlap_of_a_long_run_is_correct_and_only_a_few_steps_are_stored():
    meter = OverlapMeter()
    for step in range(10_000):
        start = 10.0 * step
        meter.add_busy([(start - 4.0, start + 2.0)])
        meter.add_busy([(start + 1.0, start + 3.0)] if step % 2 else [])
        meter.add_step(start, start + 8.0)
    assert meter.fraction() == pytest.approx((2 + 2 + 0.5) / 8, rel=1e-3)
    assert max(len(meter._steps), len(meter._busy)) <= 4 * OPEN_STEPS + 2


def test_a_report_that_arrives_after_its_step_counts():
    meter = OverlapMeter()
    for step in range(1000):
        meter.add_step(10.0 * step, 10.0 * step + 10.0)
        if step >= 5:
            meter.add_busy([(10.0 * (step - 5), 10.0 * (step - 5) + 5.0)])
    assert meter.fraction() == pytest.approx(0.5, rel=0.01)
