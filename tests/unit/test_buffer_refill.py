"""Refill: groups of equal rewards are set aside before a step, up to a bound, and replaced by other groups."""

from dataclasses import replace

import pytest

from leeway.buffer.config import BufferConfig
from leeway.buffer.groups import max_set_aside
from leeway.buffer.tables import Group
from tests.world.buffer import Actor, generate, train

INFORMATIVE, EQUAL = (0.0, 1.0), (1.0,)
"""Rewards of a group with different rewards, and of a group with equal rewards."""


def started(make, refill=2.0, config=None, **changes):
    changes = {"groups_per_step": 2, "num_prompts": 100, "max_lag": 16, **changes}
    buffer = make((config or BufferConfig()).model_copy(update={"refill_uninformative": refill}), **changes)
    actor = Actor(buffer)
    buffer.begin()
    return buffer, actor


def counted(buffer, *names):
    ledger = buffer.status().ledger
    return [ledger[name] for name in names]


@pytest.mark.parametrize(
    ("rewards", "is_equal"),
    [((1.0, 1.0), True), ((0.5, 0.5 + 1e-15), False), ((0.0, -0.0), True), ((1.0, None), False), ((0.1,) * 3, True)],
)
def test_rewards_are_equal_only_if_they_are_the_same_number(rewards, is_equal):
    group = Group.new(1, 1, len(rewards))
    group.rewards = [*rewards]
    group.sample_states = ["filtered" if reward is None else "waiting" for reward in rewards]
    assert group.is_uninformative is is_equal


def test_unusable_samples_are_not_compared():
    group = Group.new(1, 1, 3)
    group.rewards, group.sample_states = [1.0, 1.0, 0.0], ["waiting", "waiting", "filtered"]
    assert group.is_uninformative


def test_groups_of_equal_rewards_are_set_aside_and_replaced_by_others(make):
    buffer, actor = started(make)
    aside = generate(buffer, actor, 2, EQUAL)
    reply, _ = buffer.draw(1, 0)
    assert not reply.ready
    assert "step 1 has 0 of 2 groups (2 groups of equal rewards were set aside for this step)" in reply.waiting_for
    taken = generate(buffer, actor, 2, INFORMATIVE)
    assert train(buffer, 1).group_ids == taken
    assert counted(buffer, "uninformative", "trained", "trained_uninformative", "waiting") == [4, 4, 0, 0]
    phases = buffer.store.read(lambda tx: [tx.groups.require(group).phase for group in aside])
    assert phases == ["closed", "closed"]


def test_informative_rewards_decide_which_groups_are_equal(make):
    """A length reward makes the rewards of both groups differ; the groups are judged without this reward."""
    buffer, actor = started(make, informative_rewards={"exact": 2.0})
    taken = []
    for values in ((1.0, 1.0), (0.0, 1.0)) * 2:
        (lease,) = actor.lease(1)
        parts = [{"exact": value, "short": -index / 8} for index, value in enumerate(values)]
        rows = actor.rows(lease)
        buffer.push(
            [replace(row, reward_parts=each, reward=sum(each.values())) for row, each in zip(rows, parts, strict=True)]
        )
        taken += [lease.group_id] * (values[0] != values[1])
    assert train(buffer, 1).group_ids == taken
    assert counted(buffer, "uninformative", "trained", "trained_uninformative") == [4, 4, 0]


def test_prompts_of_set_aside_groups_are_not_leased_again(make):
    buffer, actor = started(make)
    (lease,) = actor.lease(1)
    actor.work(lease)
    assert counted(buffer, "uninformative") == [2]
    assert lease.prompt_id not in {each.prompt_id for each in actor.lease(6)}


def test_groups_of_equal_rewards_are_used_for_training_and_counted_by_default(make):
    buffer, actor = started(make, refill=0.0)
    equal, informative = generate(buffer, actor, 1, EQUAL) + generate(buffer, actor, 1, INFORMATIVE)
    assert train(buffer, 1).group_ids == [equal, informative]
    assert counted(buffer, "uninformative", "trained", "trained_uninformative") == [0, 4, 2]


def test_a_redone_step_counts_its_trained_groups_once(make):
    buffer, actor = started(make, refill=0.0)
    generate(buffer, actor, 2, EQUAL)
    train(buffer, 1)
    buffer.begin(session="again")
    train(buffer, 1, incarnation=1)
    assert counted(buffer, "trained", "trained_uninformative") == [4, 4]


def test_a_step_at_the_bound_trains_on_equal_rewards_and_each_step_has_its_own_bound(make):
    buffer, actor = started(make, refill=0.5)
    _, *others = generate(buffer, actor, 3, EQUAL)
    assert counted(buffer, "uninformative") == [2]
    assert train(buffer, 1).group_ids == others
    assert counted(buffer, "trained_uninformative") == [4]
    generate(buffer, actor, 1, EQUAL)
    assert counted(buffer, "uninformative") == [4]


def test_groups_left_by_the_bound_are_set_aside_before_the_next_step(make):
    buffer, actor = started(make, refill=0.5)
    _, *others, left = generate(buffer, actor, 4, EQUAL)
    assert train(buffer, 1).group_ids == others
    assert not buffer.draw(2, 1)[0].ready
    assert counted(buffer, "uninformative") == [4]
    assert buffer.store.read(lambda tx: tx.groups.require(left).phase) == "closed"


def test_the_number_of_set_aside_groups_survives_a_restart_of_the_service(make):
    buffer, actor = started(make, refill=0.5)
    generate(buffer, actor, 1, EQUAL)
    buffer.restart()
    generate(buffer, actor, 2, EQUAL)
    assert counted(buffer, "uninformative") == [2], "the bound applies to the step, not to the process"
    assert buffer.draw(1, 0)[0].ready


@pytest.mark.parametrize("fails", ["commit", "service"])
def test_an_uncommitted_request_sets_no_groups_aside(make, fails):
    buffer, actor = started(make, refill=0.5)
    (lease,) = actor.lease(1)
    actor.work(lease, [0])
    buffer.loses = fails
    actor.work(lease, [1])  # the commit of the sample is lost, and the sample is pushed again
    assert counted(buffer, "uninformative") == [2]
    generate(buffer, actor, 1, EQUAL)
    assert counted(buffer, "uninformative", "waiting") == [2, 2]


def test_a_redone_step_has_the_same_groups(make):
    buffer, actor = started(make, refill=0.5)
    generate(buffer, actor, 1, EQUAL)
    taken = generate(buffer, actor, 1, EQUAL) + generate(buffer, actor, 1, INFORMATIVE)
    assert train(buffer, 1).group_ids == taken
    buffer.begin(session="again")
    assert train(buffer, 1, incarnation=1).group_ids == taken
    assert counted(buffer, "uninformative") == [2]


def test_a_group_with_equal_rewards_after_losing_its_long_sample_is_set_aside(make):
    buffer, actor = started(make, group_size=3, groups_per_step=1)
    (lease,) = actor.lease(1)
    for index, (reward, tokens) in enumerate([(0.0, 13), (1.0, 4), (1.0, 4)]):
        actor.work(lease, [index], reward=reward, num_completion_tokens=tokens)
    buffer.facts = buffer.facts.model_copy(update={"max_tokens": 10})
    buffer.restart()
    assert not buffer.draw(1, 0)[0].ready
    assert counted(buffer, "filtered_too_long", "uninformative") == [1, 2]


def test_a_trained_group_of_equal_rewards_stays_trained_and_leaves_replay(make):
    config = BufferConfig(sampler="uniform", max_uses="unlimited")
    buffer, actor = started(make, refill=0.0, config=config, max_lag="unbounded", groups_per_step=1)
    generate(buffer, actor, 1, EQUAL)
    train(buffer, 1)
    buffer.config = buffer.config.model_copy(update={"refill_uninformative": 1.0})
    buffer.restart()
    taken = generate(buffer, actor, 1, INFORMATIVE)
    assert train(buffer, 2).group_ids == taken
    assert counted(buffer, "trained", "uninformative", "trained_uninformative") == [4, 0, 2]


def test_a_group_of_one_sample_is_never_set_aside(make):
    buffer, actor = started(make, group_size=1, groups_per_step=1)
    (group,) = generate(buffer, actor, 1, EQUAL)
    assert train(buffer, 1).group_ids == [group]
    assert counted(buffer, "uninformative", "trained_uninformative") == [0, 0]


def test_the_length_fidelity_alarm_covers_set_aside_groups(make):
    buffer, actor = started(make, 4.0, BufferConfig(), max_tokens=64, vocab_size=64, num_prompts=500, groups_per_step=8)
    for step in range(1, 20):
        rows = []
        for number, lease in enumerate(actor.lease(12)):
            tokens, rewards = (60, (1.0, 1.0)) if number % 3 == 0 else (4, INFORMATIVE)
            for index, reward in enumerate(rewards):
                rows += actor.rows(lease, [index], reward=reward, num_completion_tokens=tokens)
        buffer.push(rows)
        train(buffer, step)
    status = buffer.status()
    assert (status.fidelity_alarm, status.fidelity.ks) == (True, pytest.approx(1 / 3, abs=0.01))


@pytest.mark.parametrize(("refill", "num_groups", "most"), [(0.0, 8, 0), (0.1, 8, 1), (1.1, 10, 11), (2.5, 3, 8)])
def test_the_bound_is_a_multiple_of_the_step_rounded_up(refill, num_groups, most):
    assert max_set_aside(refill, num_groups) == most
