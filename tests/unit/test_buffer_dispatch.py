"""Dispatch policies: the prompt that each lane (pool of actors) gets. Every policy eventually leases every prompt."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.buffer import protocol as p
from leeway.buffer.config import BufferConfig
from leeway.buffer.groups import StepTimer, order_of
from leeway.buffer.tables import Group, Waiting
from leeway.common.staleness import StalenessConfig, StalenessContract
from leeway.planning.dispatch import POLICIES, REQUEUE_SHARE, ByDeadline, InOrder, LongestFirst, Speeds
from leeway.planning.prompts import FORGOTTEN_S, WINDOW_STEPS, ChosenPrompts, Window, lag_budget_s
from tests.world.buffer import Actor, generate

FAST, SLOW = 0.01, 0.02
LANES = (FAST, SLOW)


def window(*lengths):
    found = Window()
    for order, length in enumerate(lengths):
        found.put(Waiting(order, 100 + order, float(length)))
    return found


def chosen(policy, waiting, *speeds):
    """Return the position in the window of the prompt that the policy chooses."""
    return policy.choose(waiting, Speeds(*speeds)).order


def test_prompts_too_long_for_the_slow_lane_go_to_the_fast_one_longest_first():
    waiting = window(50, 300, 120, 500, 80)  # in 2 s, the slow lane generates 100 tokens and the fast lane 200
    assert chosen(ByDeadline(), waiting, FAST, LANES, 2.0) == 3
    assert chosen(ByDeadline(), waiting, SLOW, LANES, 2.0) == 0


def test_every_lane_takes_the_next_prompt_if_none_is_late():
    waiting = window(50, 30, 80)
    assert chosen(ByDeadline(), waiting, FAST, LANES, 2.0) == 0
    assert chosen(ByDeadline(), waiting, SLOW, LANES, 2.0) == 0


def test_a_slow_lane_takes_the_shortest_prompt_if_all_are_late():
    assert chosen(ByDeadline(), window(500, 300, 400), SLOW, LANES, 2.0) == 1


def test_a_middle_lane_takes_the_longest_prompt_that_only_slower_lanes_would_miss():
    lanes = (FAST, SLOW, 0.04)
    waiting = window(30, 90, 500, 60)  # in 2 s, the three lanes generate 50, 100 and 200 tokens
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
    ids=["unknown speed", "one lane", "similar lanes", "no bound"],
)
def test_by_deadline_keeps_the_order_without_a_reason_to_change_it(speeds):
    assert ByDeadline().choose(window(10, 900, 20), speeds).order == 0


def test_an_uncommitted_end_of_a_step_does_not_affect_the_step_time(make):
    buffer = make()
    buffer.begin()
    generate(buffer, Actor(buffer), 6)
    for step in (1, 2, 3):
        buffer.draw(step, step - 1)
        buffer.now_s, buffer.loses = 10.0 * step, "commit"
        buffer.finish(step, step)
    assert buffer.core.groups.prompts.pace.step_s == 10.0


def test_the_step_time_excludes_the_time_without_a_learner(make):
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


def test_samples_near_their_deadline_are_requeued_only_from_slower_lanes():
    policy, slow, fast = ByDeadline(), Speeds(SLOW, LANES, 2.0), Speeds(FAST, LANES, 2.0)
    assert policy.requeue_at(slow) == REQUEUE_SHARE * 100  # the slow lane generates 100 tokens before the deadline
    assert policy.requeue_at(fast) == inf
    assert policy.requeue_at(Speeds(SLOW, (SLOW, SLOW), 2.0)) == inf
    assert policy.requeue_at(Speeds(SLOW, LANES, inf)) == inf
    assert LongestFirst().requeue_at(slow) == InOrder().requeue_at(slow) == inf


def test_longest_first_chooses_the_longest_prompt():
    assert chosen(LongestFirst(), window(10, 900, 20), 0.0, (), inf) == 1


@given(
    lengths=st.lists(st.floats(1, 1e6), min_size=1, max_size=40),
    requests=st.lists(st.tuples(st.sampled_from([0.0, *LANES, 0.05]), st.floats(0, 100)), min_size=40, max_size=40),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_every_prompt_leaves_the_window_once_for_any_requests(lengths, requests, policy):
    waiting, left = window(*lengths), []
    for token_s, budget_s in requests[: len(lengths)]:
        took = POLICIES[policy]().choose(waiting, Speeds(token_s, (*LANES, 0.05), budget_s))
        waiting.take(took)
        left.append(took.prompt_id)
    assert not len(waiting)
    assert sorted(left) == [100 + order for order in range(len(lengths))]


def test_the_lag_budget_is_the_time_of_the_allowed_steps_without_the_last_training():
    now = [0.0]
    pace = StepTimer(lambda: now[0])
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
    """Buffer whose steps take 5 s, with requests from a fast and a slow lane."""

    def __init__(self, make, policy):
        config = BufferConfig(dispatch=policy)
        self.buffer = make(config, num_prompts=NUM_PROMPTS, max_lag=60, groups_per_step=G, max_tokens=4096)
        self.actor, self.requests = Actor(self.buffer), 1000
        self.buffer.begin()

    def step(self, number):
        """Generate the groups of one step and train on them."""
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
def test_every_prompt_is_leased_once_per_epoch_even_across_restarts(make, policy):
    fleet = Fleet(make, policy)
    fleet.step(1)
    fleet.step(2)
    seen = []
    for turn in range(2 * NUM_PROMPTS - 2):
        seen += [lease.prompt_id for lease in fleet.ask((FAST, SLOW)[turn % 3 == 0])]
        if turn % 20 == 7:
            fleet.buffer.restart()
            for token_s in LANES:  # the lanes report their speeds again
                seen += [lease.prompt_id for lease in fleet.ask(token_s)]
    window = fleet.buffer.store.read(lambda tx: [waiting for _, waiting in tx.window.all_items()])
    ahead = [each.prompt_id for each in window]
    order = [*order_of(7, 0, NUM_PROMPTS), *order_of(7, 1, NUM_PROMPTS), *order_of(7, 2, NUM_PROMPTS)]
    assert sorted([*seen, *ahead]) == sorted(order[2 * G :][: len(seen) + len(ahead)])


def test_the_fast_lane_gets_long_prompts_once_lengths_are_known(make):
    fleet = Fleet(make, "by_deadline")
    prompts, long = fleet.buffer.core.groups.prompts, {3, 14, 15, 92}

    def learn(tx):
        prompts.lengths.shape = tx.state.lengths
        for prompt in 3 * [*range(NUM_PROMPTS)]:
            tx.lengths.put(prompts.lengths.update(prompt, 2 * [900 if prompt in long else 20], 2 * [False], 0), prompt)

    fleet.buffer.store.write(learn)
    fleet.step(1)
    prompts.pace.step_s, prompts.pace.train_s = 0.2, 0.0  # max_lag allows sixty steps
    fleet.ask(SLOW)
    assert {lease.prompt_id for lease in fleet.ask(FAST, 2)} <= long
    assert not {lease.prompt_id for lease in fleet.ask(SLOW, 20)} & long


def test_groups_predicted_to_be_late_on_the_slow_lane_are_counted(make):
    fleet = Fleet(make, "by_deadline")
    prompts = fleet.buffer.core.groups.prompts
    fleet.step(1)
    for token_s in LANES:
        fleet.ask(token_s)
    prompts.pace.step_s, prompts.pace.train_s = (
        0.2,
        0.0,
    )  # max_lag allows sixty steps, in which the slow lane generates 600 tokens

    def complete(tx):
        before = tx.state.lengths.num_late, tx.state.lengths.num_predicted
        for number, longest in enumerate((900, 20, 700, 0)):
            group = Group.new(number, number, 2, predicted=longest)
            group.completion_lengths = [30, 40]
            prompts.observe(tx, group)
        return tx.state.lengths.num_late - before[0], tx.state.lengths.num_predicted - before[1]

    late, predicted = fleet.buffer.store.write(complete)
    assert (late, predicted) == pytest.approx((2.0, 4.0), abs=0.02)


def test_lengths_are_learned_and_leased_only_if_an_actor_requests_them(make):
    buffer = make(num_prompts=8, groups_per_step=2, max_lag=50)
    actor, number = Actor(buffer), 0
    buffer.begin()

    def leased(wants):
        nonlocal number
        number += 1
        request = p.LeaseRequest(actor.name, 1, 1000 + number, 8, wants_lengths=wants)
        return buffer.ask(request, p.LeaseGrant).leases

    def epoch(wants):
        usual = {}
        for lease in leased(wants):
            usual[lease.prompt_id] = lease.usual_tokens
            assert actor.work(lease, num_completion_tokens=1 + lease.prompt_id) == ["committed"] * 2
        return usual

    assert set(epoch(False).values()) == {0.0}
    assert not isinstance(buffer.core.groups.prompts, ChosenPrompts), "no actor has requested lengths"
    assert set(epoch(True).values()) == {0.0}, "no lengths are learned yet"
    assert buffer.core.groups.prompts.lengths.num_seen == 8
    usual = epoch(True)
    assert len(usual) == 8
    assert max(usual[0], usual[1]) < min(usual[6], usual[7])


def test_a_group_that_outgrows_its_lane_is_leased_to_a_faster_one(make):
    fleet = Fleet(make, "by_deadline")
    fleet.step(1)
    pace = fleet.buffer.core.groups.prompts.pace
    pace.step_s, pace.train_s = 0.02, 0.0  # max_lag allows sixty steps, in which the slow lane generates 60 tokens
    fleet.ask(FAST)
    [lease] = fleet.ask(SLOW)
    fleet.buffer.requeue(lease, [0, 1], [0, 1], num_completion_tokens=42)
    assert lease.group_id not in {each.group_id for each in fleet.ask(SLOW, 8)}
    assert fleet.ask(FAST)[0].group_id == lease.group_id
    slow, fast = fleet.granted(SLOW), fleet.granted(FAST)
    assert 0.9 < slow.requeue_at / (REQUEUE_SHARE * 60 * 0.02 / SLOW) < 1.1
    assert fast.requeue_at == 0


def test_a_lane_counts_while_it_renews_and_is_forgotten_after_a_timeout(make):
    fleet, timeout_s = Fleet(make, "by_deadline"), FORGOTTEN_S
    prompts, buffer = fleet.buffer.core.groups.prompts, fleet.buffer
    fleet.step(1)
    prompts.pace.step_s, prompts.pace.train_s = 0.02, 0.0
    fast, num_seen = Actor(buffer, "fast"), prompts.lengths.num_seen
    request = p.LeaseRequest(fast.name, 1, 1, 1, "fast", FAST)
    [lease] = buffer.ask(request, p.LeaseGrant).leases
    for _ in range(3):  # the fast actor requests no lease, because its slots are busy
        buffer.now_s += 0.6 * timeout_s
        assert buffer.ask(p.Renew(fast.name, 1, [lease.lease_id]), p.RenewReply).lost == []
    for requeues in (True, False):
        buffer.now_s += 0.6 * timeout_s
        granted = fleet.granted(SLOW)
        assert (granted.requeue_at > 0) == requeues
        assert fleet.actor.work(granted.leases[0]) == ["committed"] * 2
        assert prompts.lengths.num_seen == num_seen + 1, "lengths are not learned while there is only one lane"


def test_a_dropped_prompt_is_not_leased_to_a_lane_that_would_be_late_again(make):
    fleet = Fleet(make, "by_deadline")
    prompts, long = fleet.buffer.core.groups.prompts, 5

    def drop(tx):
        prompts.lengths.shape = tx.state.lengths
        for prompt in 3 * [*range(NUM_PROMPTS)]:
            tx.lengths.put(prompts.lengths.update(prompt, 2 * [900 if prompt == long else 20], 2 * [False], 0), prompt)
        prompts.give_back(tx, long, 0)
        prompts.give_back(tx, 6, 0)

    for token_s in LANES:
        fleet.ask(token_s)
    fleet.buffer.store.write(drop)
    prompts.pace.step_s = 0.2
    assert [lease.prompt_id for lease in fleet.ask(SLOW)] == [6]
    assert fleet.ask(SLOW)[0].prompt_id != long
    assert fleet.ask(FAST)[0].prompt_id == long


def test_prompts_of_uncommitted_leases_stay_in_the_window(make):
    fleet = Fleet(make, "longest_first")
    first = [lease.prompt_id for lease in fleet.ask(SLOW)]
    for fails in ("commit", "service"):
        fleet.buffer.loses = fails
        fleet.ask(SLOW)
    assert len(fleet.buffer.core.groups.prompts._window) == WINDOW_STEPS * G - 3
    assert first


def test_the_order_of_the_data_is_kept_if_all_lanes_are_equal(make):
    fleet = Fleet(make, "by_deadline")
    fleet.step(1)
    fleet.step(2)
    seen = [lease.prompt_id for _ in range(30) for lease in fleet.ask(SLOW)]
    assert seen == order_of(7, 0, NUM_PROMPTS)[2 * G :][:30].tolist()
    assert not len(fleet.buffer.core.groups.prompts._window)


def test_verify_reports_a_waiting_prompt_that_was_never_taken(make):
    fleet = Fleet(make, "longest_first")
    fleet.ask(SLOW)
    *_, last = fleet.buffer.core.groups.prompts._window
    beyond = last._replace(order=last.order + 1)
    fleet.buffer.store.write(lambda tx: tx.window.put(beyond, beyond.order))
    assert any(f"prompt {last.prompt_id} has" in fault for fault in fleet.buffer.faults())
    fleet.buffer.store.write(lambda tx: tx.window.delete(beyond.order))
