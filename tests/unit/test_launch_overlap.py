"""Interval arithmetic of the overlap between generating and stepping."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.observe.totals import OverlapMeter, merge, shared, total

ticks = st.integers(0, 60)
intervals = st.lists(st.tuples(ticks, ticks).map(lambda pair: (float(min(pair)), float(max(pair)))), max_size=12)


def covered(spans):
    """The unit cells that a set of intervals covers: an independent way to the same answer."""
    return {cell for start, end in spans for cell in range(int(start), int(end))}


@given(intervals)
def test_a_union_covers_what_its_parts_cover_and_is_disjoint(spans):
    merged = merge(spans)
    assert covered(merged) == covered(spans)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(merged))
    assert total(spans) == len(covered(spans))


@given(intervals, intervals)
def test_shared_time_is_what_both_cover(left, right):
    assert shared(left, right) == len(covered(left) & covered(right))


def test_overlap_is_the_share_of_step_time_in_which_any_actor_generated():
    meter = OverlapMeter()
    assert meter.fraction() is None
    meter.add_step(0.0, 4.0)
    meter.add_step(6.0, 10.0)
    meter.add_busy("actor-0", [(0.0, 1.0)])
    meter.add_busy("actor-0", [(1.0, 2.0)])
    meter.add_busy("actor-1", [(1.0, 3.0), (4.0, 6.0)])
    assert meter.fraction() == pytest.approx(3 / 8)
    assert meter.fraction_by_actor() == {"actor-0": pytest.approx(2 / 8), "actor-1": pytest.approx(2 / 8)}
