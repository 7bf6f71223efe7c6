"""Schedules of fused passes have no deadlock, stay within memory, take the predicted time, and are nearly optimal."""

from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.learner.config import default_most_held, stage_of
from leeway.planning import fused
from leeway.planning.fused import PassSchedule, StageCost, find_schedule, shortest_possible


def works(share: float, passes: float = 2.0) -> tuple[StageCost, StageCost]:
    return StageCost(1.0, passes), StageCost(share, share * passes)


def run(
    schedule: PassSchedule, num_stages: int, num_micro_batches: int, work: tuple[StageCost, StageCost]
) -> tuple[float, int]:
    """Return the makespan of a schedule and the most micro-batches that a rank holds; fail on a deadlock."""
    ended: dict[tuple[int, int, bool, int], float] = {}
    at, free_at, held, most = [0] * num_stages, [0.0] * num_stages, [0] * num_stages, 0
    trains = work[0].backward > 0
    while any(at[rank] < len(schedule.ranks[rank]) for rank in range(num_stages)):
        has_moved = False
        for rank, actions in enumerate(schedule.ranks):
            if at[rank] == len(actions):
                continue
            network, is_backward, micro_batch = actions[at[rank]]
            stage = stage_of(network, rank, num_stages)
            needed = []
            if is_backward:
                needed.append((network, stage, False, micro_batch))
                if stage + 1 < num_stages:
                    needed.append((network, stage + 1, True, micro_batch))
            elif stage:
                needed.append((network, stage - 1, False, micro_batch))
            if not all(each in ended for each in needed):
                continue
            start_s = max([free_at[rank], *(ended[each] for each in needed)])
            key = (network, stage, is_backward, micro_batch)
            assert key not in ended, f"{key} runs twice"
            ended[key] = free_at[rank] = start_s + work[network][is_backward]
            held[rank] += -1 if is_backward else 1
            most = max(most, held[rank])
            at[rank] += 1
            has_moved = True
        assert has_moved, f"deadlock after {len(ended)} actions"
    assert len(ended) == 2 * num_stages * num_micro_batches * (1 + trains)
    return max(free_at), most if trains else 0


@given(
    num_stages=st.integers(2, 6),
    num_micro_batches=st.integers(1, 9),
    share=st.sampled_from([0.25, 0.5, 0.875, 1.0]),
    passes=st.sampled_from([0.0, 2.0, 3.0]),
    more=st.integers(0, 12),
)
@settings(max_examples=40, deadline=None)
def test_every_schedule_completes_and_matches_its_prediction(num_stages, num_micro_batches, share, passes, more):
    work = works(share, passes)
    schedule = find_schedule(num_stages, num_micro_batches, work, 2 + more)
    assert run(schedule, num_stages, num_micro_batches, work) == (pytest.approx(schedule.makespan), schedule.most_held)
    assert schedule.most_held <= 2 + more
    assert schedule.makespan >= shortest_possible(num_stages, num_micro_batches, work) - 1e-9
    for actions in schedule.ranks:
        for network in (0, 1):
            for is_backward in (False, True):
                own = [each.micro_batch for each in actions if each[:2] == (network, is_backward)]
                assert own == sorted(own), "sender and receiver use the same order of micro-batches"


@pytest.mark.parametrize(
    ("num_stages", "num_micro_batches"), [(2, 2), (2, 8), (3, 7), (4, 4), (4, 8), (4, 12), (6, 12)]
)
@pytest.mark.parametrize("passes", [0.0, 2.0])
def test_the_default_memory_gives_optimal_schedules_for_equal_networks(num_stages, num_micro_batches, passes):
    work = works(1.0, passes)
    schedule = find_schedule(num_stages, num_micro_batches, work, default_most_held(num_stages))
    assert schedule.makespan == pytest.approx(shortest_possible(num_stages, num_micro_batches, work))


@pytest.mark.parametrize(
    ("num_stages", "num_micro_batches", "share"), [(8, 8, 1.0), (8, 16, 1.0), (8, 8, 0.75), (4, 8, 0.5)]
)
def test_more_memory_gives_near_optimal_schedules(num_stages, num_micro_batches, share):
    work = works(share)
    schedule = find_schedule(num_stages, num_micro_batches, work, 9 * num_stages // 4)
    assert schedule.makespan <= 1.04 * shortest_possible(num_stages, num_micro_batches, work)


def test_less_memory_gives_longer_schedules_that_respect_the_limit():
    found = [find_schedule(4, 8, works(1.0), most_held) for most_held in (2, 3, 4, 5)]
    assert [schedule.most_held for schedule in found] == [2, 3, 4, 5]
    assert sorted(schedule.makespan for schedule in found)[::-1] == [schedule.makespan for schedule in found]
    assert found[2].makespan <= 1.02 * found[3].makespan, "1F1B memory for one network nearly suffices for two"


def test_the_schedule_is_the_same_on_every_machine():
    schedule = find_schedule(4, 6, works(0.875), 5)
    assert blake2b(repr(schedule.ranks).encode(), digest_size=8).hexdigest() == "69b6d110d3507604"


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(4, 60), (8, 16), (8, 64)])
def test_the_schedule_search_is_bounded_for_long_schedules(monkeypatch, num_stages, num_micro_batches):
    tries, make = [], fused._ListScheduler.run
    monkeypatch.setattr(fused._ListScheduler, "run", lambda self: tries.append(1) or make(self))
    find_schedule(num_stages, num_micro_batches, works(0.625), default_most_held(num_stages))
    assert len(tries) * num_stages * num_micro_batches <= 20_000, (
        "the search takes about 28 us per micro-batch and stage"
    )
