"""Dispatch: who gets which prompt of a window, and that every prompt leaves it whatever the policy."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer import protocol as p
from buffer.config import BufferConfig
from buffer.groups import Pace, order_of
from buffer.tables import Group, Waiting
from common.staleness import StalenessConfig, StalenessContract
from planning.dispatch import HAND_ON_SHARE, POLICIES, ByDeadline, InOrder, LongestFirst, Speeds
from planning.prompts import FORGOTTEN_S, WINDOW_STEPS, ChosenPrompts, Window, lag_budget_s
from tests.world.buffer import Actor, generate

FAST, SLOW = 0.01, 0.02
LANES = (FAST, SLOW)


def window(*lengths):
    found = Window()
    for order, length in enumerate(lengths):
        found.put(Waiting(order, 100 + order, float(length)))
    return found


def chosen(policy, waiting, *speeds):
    """The place of what it chooses."""
    return policy.choose(waiting, Speeds(*speeds)).order


def test_what_a_slow_lane_would_be_late_with_goes_to_the_fast_one_the_longest_first():
    waiting = window(50, 300, 120, 500, 80)  # in 2 s the slow lane makes 100 tokens, the fast one 200
    assert chosen(ByDeadline(), waiting, FAST, LANES, 2.0) == 3
    assert chosen(ByDeadline(), waiting, SLOW, LANES, 2.0) == 0


def test_where_nothing_is_late_every_lane_takes_what_is_next():
    waiting = window(50, 30, 80)
    assert chosen(ByDeadline(), waiting, FAST, LANES, 2.0) == 0
    assert chosen(ByDeadline(), waiting, SLOW, LANES, 2.0) == 0


def test_a_slow_lane_for_which_all_is_late_takes_the_shortest_for_no_engine_idles():
    assert chosen(ByDeadline(), window(500, 300, 400), SLOW, LANES, 2.0) == 1


def test_a_lane_between_takes_what_it_alone_saves():
    lanes = (FAST, SLOW, 0.04)
    waiting = window(30, 90, 500, 60)  # in 2 s: 50, 100 and 200 tokens
    assert chosen(ByDeadline(), waiting, SLOW, lanes, 2.0) == 1
    assert chosen(ByDeadline(), waiting, FAST, lanes, 2.0) == 2
    assert chosen(ByDeadline(), waiting, 0.04, lanes, 2.0) == 0


@pytest.mark.parametrize(
    "speeds",
    [
        Speeds(0.0, (), 2.0),
        Speeds(SLOW, (SLOW,), 2.0),
        Speeds(SLOW, (SLOW, 1.05 * SLOW), 0.1),
        Speeds(FAST, LANES, inf),
    ],
    ids=["speed not known", "one lane", "lanes alike", "no bound"],
)
def test_without_a_reason_it_goes_in_order(speeds):
    assert ByDeadline().choose(window(10, 900, 20), speeds).order == 0


def test_a_step_whose_end_was_not_committed_is_no_step_of_its_own(make):
    buffer = make()
    buffer.begin()
    generate(buffer, Actor(buffer), 6)
    for step in (1, 2, 3):
        buffer.draw(step, step - 1)
        buffer.now_s, buffer.loses = 10.0 * step, "commit"
        buffer.finish(step, step)
    assert buffer.core.groups.prompts.pace.step_s == 10.0


def test_the_time_without_a_learner_is_no_part_of_a_step(make):
    buffer = make()
    buffer.begin()
    generate(buffer, Actor(buffer), 8)
    for step in (1, 2, 3, 4):
        if step == 3:
            buffer.now_s = 600.0
            buffer.begin(2, 2, session="restarted")
        buffer.draw(step, step - 1, incarnation=step // 3)
        buffer.now_s += 10.0
        buffer.finish(step, step, incarnation=step // 3)
    assert buffer.core.groups.prompts.pace.step_s == 10.0


def test_what_nears_its_deadline_goes_on_on_a_faster_lane_and_only_there():
    policy, slow, fast = ByDeadline(), Speeds(SLOW, LANES, 2.0), Speeds(FAST, LANES, 2.0)
    assert policy.hands_on_at(slow) == HAND_ON_SHARE * 100  # which it makes in time
    assert policy.hands_on_at(fast) == inf
    assert policy.hands_on_at(Speeds(SLOW, (SLOW, SLOW), 2.0)) == inf
    assert policy.hands_on_at(Speeds(SLOW, LANES, inf)) == inf
    assert LongestFirst().hands_on_at(slow) == InOrder().hands_on_at(slow) == inf


def test_longest_first_is_what_it_says():
    assert chosen(LongestFirst(), window(10, 900, 20), 0.0, (), inf) == 1


@given(
    lengths=st.lists(st.floats(1, 1e6), min_size=1, max_size=40),
    askers=st.lists(st.tuples(st.sampled_from([0.0, *LANES, 0.05]), st.floats(0, 100)), min_size=40, max_size=40),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_whoever_asks_every_prompt_leaves_the_window_once(lengths, askers, policy):
    waiting, left = window(*lengths), []
    for token_s, budget_s in askers[: len(lengths)]:
        took = POLICIES[policy]().choose(waiting, Speeds(token_s, (*LANES, 0.05), budget_s))
        waiting.take(took)
        left.append(took.prompt_id)
    assert not len(waiting)
    assert sorted(left) == [100 + order for order in range(len(lengths))]


def test_the_budget_is_the_steps_that_may_lie_between_without_the_training_of_its_own():
    now = [0.0]
    pace = Pace(lambda: now[0])
    contract = StalenessContract(StalenessConfig(max_lag=2), 4)
    assert lag_budget_s(pace, contract) == inf
    for _ in range(60):
        now[0] += 3.0
        pace.drawn()
        now[0] += 2.0
        pace.finished()
    assert lag_budget_s(pace, contract) == pytest.approx(2 * 5.0 - 2.0)
    assert lag_budget_s(pace, StalenessContract(StalenessConfig(max_lag="unbounded"), 4)) == inf


# --- in a store -----------------------------------------------------------------------------------

NUM_PROMPTS, G = 96, 16


class Fleet:
    """Actors of two lanes, in a buffer whose steps take 5 s."""

    def __init__(self, make, policy):
        config = BufferConfig(dispatch=policy)
        self.buffer = make(config, num_prompts=NUM_PROMPTS, max_lag=60, groups_per_step=G, max_tokens=4096)
        self.actor, self.requests = Actor(self.buffer), 1000
        self.buffer.begin()

    def step(self, number):
        """One is trained."""
        generate(self.buffer, self.actor, G)
        self.buffer.now_s += 5.0
        assert self.buffer.draw(number, number - 1)[0].ready
        self.buffer.finish(number, number)
        self.buffer.publish(number)

    def ask(self, token_s, many=1):
        return self.granted(token_s, many).leases

    def granted(self, token_s, many=1):
        self.requests += 1
        lane = "fast" if token_s == FAST else "slow"
        request = p.LeaseRequest(self.actor.name, 1, self.requests, many, lane, token_s)
        return self.buffer.ask(request, p.LeaseGrant)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_prompt_is_leased_once_in_an_epoch_also_across_restarts(make, policy):
    fleet = Fleet(make, policy)
    fleet.step(1)
    fleet.step(2)
    seen = []
    for turn in range(2 * NUM_PROMPTS - 2):
        seen += [lease.prompt_id for lease in fleet.ask((FAST, SLOW)[turn % 3 == 0])]
        if turn % 20 == 7:
            fleet.buffer.restart()
            for token_s in LANES:  # who asks how fast is said anew
                seen += [lease.prompt_id for lease in fleet.ask(token_s)]
    window = fleet.buffer.store.read(lambda tx: [waiting for _, waiting in tx.window.all_items()])
    ahead = [each.prompt_id for each in window]
    order = [*order_of(7, 0, NUM_PROMPTS), *order_of(7, 1, NUM_PROMPTS), *order_of(7, 2, NUM_PROMPTS)]
    assert sorted([*seen, *ahead]) == sorted(order[2 * G :][: len(seen) + len(ahead)])


def test_the_fast_lane_gets_what_is_long_as_soon_as_lengths_are_known(make):
    fleet = Fleet(make, "by_deadline")
    prompts, long = fleet.buffer.core.groups.prompts, {3, 14, 15, 92}

    def learn(tx):
        prompts.lengths.shape = tx.state.lengths
        for prompt in 3 * [*range(NUM_PROMPTS)]:
            tx.lengths.put(prompts.lengths.see(prompt, 2 * [900 if prompt in long else 20], 2 * [False], 0), prompt)

    fleet.buffer.store.write(learn)
    fleet.step(1)
    prompts.pace.step_s, prompts.pace.train_s = 0.2, 0.0  # of which sixty may lie between
    fleet.ask(SLOW)
    assert {lease.prompt_id for lease in fleet.ask(FAST, 2)} <= long
    assert not {lease.prompt_id for lease in fleet.ask(SLOW, 20)} & long


def test_groups_that_the_slow_lane_would_be_late_with_are_counted(make):
    fleet = Fleet(make, "by_deadline")
    prompts = fleet.buffer.core.groups.prompts
    fleet.step(1)
    for token_s in LANES:
        fleet.ask(token_s)
    prompts.pace.step_s, prompts.pace.train_s = (
        0.2,
        0.0,
    )  # of which sixty may lie between: the slow lane makes 600 tokens

    def complete(tx):
        before = tx.state.lengths.num_late, tx.state.lengths.num_foretold
        for number, longest in enumerate((900, 20, 700, 0)):
            group = Group.new(number, number, 2, foretold=longest)
            group.completion_lengths = [30, 40]
            prompts.saw(tx, group)
        return tx.state.lengths.num_late - before[0], tx.state.lengths.num_foretold - before[1]

    late, foretold = fleet.buffer.store.write(complete)
    assert (late, foretold) == pytest.approx((2.0, 4.0), abs=0.02)


def test_a_lease_says_how_long_answers_are_where_its_actor_asks_and_lengths_are_learned_for_it(make):
    buffer = make(num_prompts=8, groups_per_step=2, max_lag=50)
    actor, number = Actor(buffer), 0
    buffer.begin()

    def leased(wants):
        nonlocal number
        number += 1
        request = p.LeaseRequest(actor.name, 1, 1000 + number, 8, wants_lengths=wants)
        return buffer.ask(request, p.LeaseGrant).leases

    def epoch(wants):
        told = {}
        for lease in leased(wants):
            told[lease.prompt_id] = lease.usual_tokens
            assert actor.work(lease, num_completion_tokens=1 + lease.prompt_id) == ["committed"] * 2
        return told

    assert set(epoch(False).values()) == {0.0}
    assert not isinstance(buffer.core.groups.prompts, ChosenPrompts), "no actor has asked"
    assert set(epoch(True).values()) == {0.0}, "and nothing was learned"
    assert buffer.core.groups.prompts.lengths.num_seen == 8
    told = epoch(True)
    assert len(told) == 8
    assert max(told[0], told[1]) < min(told[6], told[7])


def test_a_group_that_outgrew_its_lane_is_not_leased_to_it_again_and_who_is_told_to_hand_on(make):
    fleet = Fleet(make, "by_deadline")
    fleet.step(1)
    pace = fleet.buffer.core.groups.prompts.pace
    pace.step_s, pace.train_s = 0.02, 0.0  # of which sixty may lie between: the slow lane makes 60 tokens
    fleet.ask(FAST)
    [lease] = fleet.ask(SLOW)
    fleet.buffer.hand_on(lease, [0, 1], [0, 1], num_completion_tokens=42)
    assert lease.group_id not in {each.group_id for each in fleet.ask(SLOW, 8)}
    assert fleet.ask(FAST)[0].group_id == lease.group_id
    slow, fast = fleet.granted(SLOW), fleet.granted(FAST)
    assert 0.9 < slow.hand_on_at / (HAND_ON_SHARE * 60 * 0.02 / SLOW) < 1.1
    assert fast.hand_on_at == 0


def test_a_lane_that_renews_is_not_gone_and_one_that_is_gone_counts_nowhere(make):
    fleet, timeout_s = Fleet(make, "by_deadline"), FORGOTTEN_S
    prompts, buffer = fleet.buffer.core.groups.prompts, fleet.buffer
    fleet.step(1)
    prompts.pace.step_s, prompts.pace.train_s = 0.02, 0.0
    fast, num_seen = Actor(buffer, "fast"), prompts.lengths.num_seen
    asked = p.LeaseRequest(fast.name, 1, 1, 1, "fast", FAST)
    [lease] = buffer.ask(asked, p.LeaseGrant).leases
    for _ in range(3):  # all of its slots are busy
        buffer.now_s += 0.6 * timeout_s
        assert buffer.ask(p.Renew(fast.name, 1, [lease.lease_id]), p.RenewReply).lost == []
    for hands_on in (True, False):
        buffer.now_s += 0.6 * timeout_s
        granted = fleet.granted(SLOW)
        assert (granted.hand_on_at > 0) == hands_on
        assert fleet.actor.work(granted.leases[0]) == ["committed"] * 2
        assert prompts.lengths.num_seen == num_seen + 1, "with one lane nothing is learned"


def test_a_prompt_that_was_dropped_is_not_given_back_to_a_lane_that_would_be_late_again(make):
    fleet = Fleet(make, "by_deadline")
    prompts, long = fleet.buffer.core.groups.prompts, 5

    def drop(tx):
        prompts.lengths.shape = tx.state.lengths
        for prompt in 3 * [*range(NUM_PROMPTS)]:
            tx.lengths.put(prompts.lengths.see(prompt, 2 * [900 if prompt == long else 20], 2 * [False], 0), prompt)
        prompts.give_back(tx, long, 0)
        prompts.give_back(tx, 6, 0)

    for token_s in LANES:
        fleet.ask(token_s)
    fleet.buffer.store.write(drop)
    prompts.pace.step_s = 0.2
    assert [lease.prompt_id for lease in fleet.ask(SLOW)] == [6]
    assert fleet.ask(SLOW)[0].prompt_id != long
    assert fleet.ask(FAST)[0].prompt_id == long


def test_leases_that_are_not_committed_are_not_lost_to_the_window(make):
    fleet = Fleet(make, "longest_first")
    first = [lease.prompt_id for lease in fleet.ask(SLOW)]
    for fails in ("commit", "service"):
        fleet.buffer.loses = fails
        fleet.ask(SLOW)
    assert len(fleet.buffer.core.groups.prompts._window) == WINDOW_STEPS * G - 3
    assert first


def test_the_order_of_the_data_is_kept_where_all_lanes_are_alike(make):
    fleet = Fleet(make, "by_deadline")
    fleet.step(1)
    fleet.step(2)
    seen = [lease.prompt_id for _ in range(30) for lease in fleet.ask(SLOW)]
    assert seen == order_of(7, 0, NUM_PROMPTS)[2 * G :][:30].tolist()
    assert not len(fleet.buffer.core.groups.prompts._window)


def test_a_prompt_that_waits_without_having_been_taken_is_a_fault(make):
    fleet = Fleet(make, "longest_first")
    fleet.ask(SLOW)
    *_, last = fleet.buffer.core.groups.prompts._window
    beyond = last._replace(order=last.order + 1)
    fleet.buffer.store.write(lambda tx: tx.window.put(beyond, beyond.order))
    assert any(f"prompt {last.prompt_id} waits" in fault for fault in fleet.buffer.faults())
    fleet.buffer.store.write(lambda tx: tx.window.delete(beyond.order))
