"""The busy time of an actor is the union of the intervals of its requests, for any overlap."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from leeway.actors.report import BusyClock


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), max_size=30), st.sets(st.integers(0, 50)))
def test_busy_intervals_are_the_union_of_all_requests(requests, takes):
    now = 0
    clock = BusyClock(lambda: now)
    intervals = []
    for now in range(60):
        # at equal times, starts precede ends: requests that touch form one interval
        for start, length in requests:
            if start == now and length:
                clock.enter()
        for start, length in requests:
            if start + length == now and length:
                clock.leave()
        if now in takes:
            intervals += clock.take()
    intervals += clock.take()
    assert all(start <= end for start, end in intervals)
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(intervals))
    busy = {second for start, end in intervals for second in range(start, end)}
    assert busy == {second for start, length in requests for second in range(start, start + length)}
    assert clock.num_running == 0
    assert clock.running_s() == sum(length for _, length in requests)
    assert clock.take() == []
