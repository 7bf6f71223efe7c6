"""Orders of fused passes: each can be run, keeps to its memory, takes what it says, and is nearly the shortest."""

from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.config import default_most_held, stage_of
from planning import fused as orders
from planning.fused import Order, Work, find_order, shortest_possible


def works(share: float, passes: float = 2.0) -> tuple[Work, Work]:
    return Work(1.0, passes), Work(share, share * passes)


def run(order: Order, num_stages: int, num_micro_batches: int, work: tuple[Work, Work]) -> tuple[float, int]:
    """How long an order takes where each rank waits for what it needs, and how much it holds; fails where it hangs."""
    ended: dict[tuple[int, int, bool, int], float] = {}
    at, free_at, held, most = [0] * num_stages, [0.0] * num_stages, [0] * num_stages, 0
    trains = work[0].backward > 0
    while any(at[rank] < len(order.ranks[rank]) for rank in range(num_stages)):
        has_moved = False
        for rank, actions in enumerate(order.ranks):
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
            assert key not in ended, f"{key} comes twice"
            ended[key] = free_at[rank] = start_s + work[network][is_backward]
            held[rank] += -1 if is_backward else 1
            most = max(most, held[rank])
            at[rank] += 1
            has_moved = True
        assert has_moved, f"all wait for each other after {len(ended)} actions"
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
def test_every_order_can_be_run_and_keeps_to_what_it_says(num_stages, num_micro_batches, share, passes, more):
    work = works(share, passes)
    order = find_order(num_stages, num_micro_batches, work, 2 + more)
    assert run(order, num_stages, num_micro_batches, work) == (pytest.approx(order.makespan), order.most_held)
    assert order.most_held <= 2 + more
    assert order.makespan >= shortest_possible(num_stages, num_micro_batches, work) - 1e-9
    for actions in order.ranks:
        for network in (0, 1):
            for is_backward in (False, True):
                own = [each.micro_batch for each in actions if each[:2] == (network, is_backward)]
                assert own == sorted(own), "both ends of a message count micro-batches alike"


@pytest.mark.parametrize(
    ("num_stages", "num_micro_batches"), [(2, 2), (2, 8), (3, 7), (4, 4), (4, 8), (4, 12), (6, 12)]
)
@pytest.mark.parametrize("passes", [0.0, 2.0])
def test_with_the_default_memory_nothing_can_be_shorter_where_the_networks_are_alike(
    num_stages, num_micro_batches, passes
):
    work = works(1.0, passes)
    order = find_order(num_stages, num_micro_batches, work, default_most_held(num_stages))
    assert order.makespan == pytest.approx(shortest_possible(num_stages, num_micro_batches, work))


@pytest.mark.parametrize(
    ("num_stages", "num_micro_batches", "share"), [(8, 8, 1.0), (8, 16, 1.0), (8, 8, 0.75), (4, 8, 0.5)]
)
def test_with_more_memory_eight_stages_and_unlike_networks_come_close(num_stages, num_micro_batches, share):
    work = works(share)
    order = find_order(num_stages, num_micro_batches, work, 9 * num_stages // 4)
    assert order.makespan <= 1.04 * shortest_possible(num_stages, num_micro_batches, work)


def test_less_memory_takes_longer_and_never_more_than_asked():
    found = [find_order(4, 8, works(1.0), most_held) for most_held in (2, 3, 4, 5)]
    assert [order.most_held for order in found] == [2, 3, 4, 5]
    assert sorted(order.makespan for order in found)[::-1] == [order.makespan for order in found]
    assert found[2].makespan <= 1.02 * found[3].makespan, "what 1F1B keeps of one network is nearly enough for two"


def test_every_machine_finds_the_same_order():
    order = find_order(4, 6, works(0.875), 5)
    assert blake2b(repr(order.ranks).encode(), digest_size=8).hexdigest() == "69b6d110d3507604"


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(4, 60), (8, 16), (8, 64)])
def test_a_search_ends_soon_however_long_its_orders(monkeypatch, num_stages, num_micro_batches):
    tries, make = [], orders._List.run
    monkeypatch.setattr(orders._List, "run", lambda self: tries.append(1) or make(self))
    find_order(num_stages, num_micro_batches, works(0.625), default_most_held(num_stages))
    assert len(tries) * num_stages * num_micro_batches <= 20_000, "28 us each"
