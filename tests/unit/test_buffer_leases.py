"""Leases, commits and admission, driven without sockets under a virtual clock."""

import dataclasses

import pytest

from leeway.actors.rewards import RewardFailed
from leeway.buffer import protocol as p
from leeway.buffer.config import BufferConfig
from leeway.buffer.errors import BufferRefused
from leeway.buffer.leases import NEAR_BOUND_S
from leeway.buffer.ledger import GENERATION_FAILED
from tests.world.buffer import Actor


def test_a_sample_goes_from_lease_to_trained(make):
    buffer = make()
    actor = Actor(buffer)
    buffer.begin()
    for lease in actor.lease(2):
        assert actor.work(lease) == ["committed", "committed"]
    reply, rows = buffer.draw(1, 0)
    assert reply.ready
    assert [row.group_id for row in rows] == [g for g in reply.group_ids for _ in range(2)]
    buffer.finish(1, 1)
    ledger = buffer.status().ledger
    assert (ledger["issued"], ledger["trained"], ledger["uses"]) == (4, 4, 4)


def test_no_lease_is_granted_before_weights_are_published_or_while_draining(make):
    buffer = make()
    actor = Actor(buffer)
    assert actor.lease() == []
    buffer.begin()
    assert len(actor.lease(1)) == 1
    buffer.ask(p.Drain(), p.Done)
    assert actor.lease() == []


def test_prompts_follow_a_permutation_that_a_restart_neither_skips_nor_repeats(make):
    buffer = make(max_lag=50)
    actor = Actor(buffer)
    buffer.begin()
    seen = []
    for _ in range(10):
        seen += [lease.prompt_id for lease in actor.lease(2)]
        buffer.restart()
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]


def test_a_grant_reports_for_a_while_that_admission_reached_its_bound(make):
    buffer = make(max_lag=1, max_actor_lag=0)
    buffer.begin()
    for name in ("one", "other"):
        buffer.hello(name)

    def near(name, number, max_groups):
        grant = buffer.ask(p.LeaseRequest(name, 1, number, max_groups), p.LeaseGrant)
        return len(grant.leases), grant.is_near_bound

    assert near("one", 0, 1) == (1, False)
    granted, is_near = near("other", 0, 1000)
    assert 0 < granted < 1000
    assert is_near
    assert near("one", 1, 1) == (0, True)
    buffer.now_s += NEAR_BOUND_S
    assert near("one", 0, 1) == (1, False)


def test_the_same_lease_request_returns_the_same_leases(make):
    buffer = make()
    Actor(buffer)
    buffer.begin()
    request = p.LeaseRequest("actor-0", 1, 0, 2)
    first = buffer.ask(request, p.LeaseGrant).leases
    buffer.restart()
    assert buffer.ask(request, p.LeaseGrant).leases == first
    assert buffer.status().ledger["issued"] == 4


def test_a_duplicate_is_acknowledged_and_not_stored_even_after_eviction(make):
    buffer = make(BufferConfig(capacity_trajectories=12), max_lag=1, max_actor_lag=0)
    actor = Actor(buffer)
    buffer.begin()
    first = None
    for step in range(1, 6):
        for lease in actor.lease():
            rows = actor.rows(lease)
            first = first or rows
            buffer.push(rows)
        assert buffer.draw(step, step - 1)[0].ready
        buffer.finish(step, step)
        buffer.publish(step)
        buffer.ask(p.CheckpointDurable(step, 0), p.Done)
    assert buffer.status().num_records == 12
    assert buffer.push(first) == ["duplicate", "duplicate"]
    assert buffer.status().ledger["duplicates"] == 2


def test_out_of_order_sequence_numbers_are_remembered(make):
    buffer = make()
    actor = Actor(buffer)
    buffer.begin()
    one, two = actor.rows(actor.lease(1)[0])
    assert [buffer.push([two]), buffer.push([two]), buffer.push([one]), buffer.push([one, two])] == [
        ["committed"], ["duplicate"], ["committed"], ["duplicate", "duplicate"],
    ]  # fmt: skip


def test_the_first_commit_of_an_index_wins_and_later_ones_are_late(make):
    buffer = make()
    actor = Actor(buffer)
    buffer.begin()
    lease = actor.lease(1)[0]
    assert actor.work(lease, [0, 0, 1]) == ["committed", "late", "committed"]
    assert actor.work(lease, [1]) == ["late"]
    assert buffer.status().ledger["late"] == 2


def test_an_expired_lease_is_issued_again_for_its_missing_samples_only(make):
    buffer = make()
    slow, fast = Actor(buffer, "slow"), Actor(buffer, "fast")
    buffer.begin()
    lease = slow.lease(1)[0]
    slow.work(lease, [0])
    buffer.now_s = 40.0
    assert buffer.ask(p.Renew("slow", 1, [lease.lease_id]), p.RenewReply).lost == []
    buffer.now_s = 90.0
    buffer.expire()
    assert fast.lease(1)[0].attempt == 1, "the lease was renewed, so the slow actor still holds it"
    buffer.now_s = 101.0
    buffer.expire()
    again = fast.lease(1)[0]
    assert (again.group_id, again.sample_indices, again.attempt) == (lease.group_id, [1], 2)
    assert slow.work(lease, [1]) == ["late"]
    assert buffer.ask(p.Renew("slow", 1, [lease.lease_id]), p.RenewReply).lost == [lease.lease_id]
    assert fast.work(again) == ["committed"]
    status = buffer.status()
    assert status.failed_by_reason == {"lease expired": 1}
    assert (status.ledger["issued"], status.num_ready_groups) == (5, 1)


def test_lease_deadlines_are_reset_when_the_service_restarts(make):
    buffer = make()
    actor = Actor(buffer)
    buffer.begin()
    actor.lease(1)
    buffer.now_s = 59.0
    buffer.restart()
    buffer.now_s = 61.0
    buffer.expire()
    assert buffer.status().ledger["failed"] == 0
    buffer.now_s = 120.0
    buffer.expire()
    assert buffer.status().ledger["failed"] == 2


def test_a_closed_lease_has_no_deadline(make):
    buffer = make()
    actor = Actor(buffer)
    buffer.begin()
    first, second = actor.lease(2)
    buffer.now_s = 10.0
    actor.work(first)
    buffer.ask(p.Renew(actor.name, 1, [second.lease_id]), p.RenewReply)
    assert buffer.core.leases.due_in_s() == 60.0
    actor.work(second)
    assert buffer.core.leases.due_in_s() is None


def test_missing_samples_are_abandoned_after_the_maximum_number_of_attempts(make, monkeypatch):
    monkeypatch.setattr("leeway.buffer.groups.MAX_ATTEMPTS", 2)
    buffer = make(group_size=3)
    actor = Actor(buffer)
    buffer.begin()
    actor.work(actor.lease(1)[0], [0, 1])
    for attempt in range(2):
        buffer.now_s += 61.0
        buffer.expire()
        if attempt == 0:
            assert actor.lease(1)[0].sample_indices == [2]
    assert buffer.status().num_ready_groups == 1


def test_a_new_process_of_an_actor_fences_the_old_one(make):
    buffer = make()
    old = Actor(buffer, session="old")
    buffer.begin()
    lease = old.lease(1)[0]
    new = Actor(buffer, session="new")
    assert (old.epoch, new.epoch) == (1, 2)
    assert old.work(lease) == ["fenced", "fenced"]
    with pytest.raises(BufferRefused, match="newer process"):
        old.lease()
    again = new.lease(1)[0]
    assert again.group_id == lease.group_id
    assert new.work(again) == ["committed", "committed"]
    assert buffer.status().failed_by_reason == {"fenced": 2}


def test_a_late_hello_of_a_replaced_process_does_not_fence_the_current_one(make):
    buffer = make()
    for number in range(12):
        Actor(buffer, session=f"session-{number}")
    buffer.begin()
    current = Actor(buffer, session="current")
    lease = current.lease(1)[0]
    for late in ("session-4", "session-11"):
        with pytest.raises(BufferRefused, match=r"replaced by a newer process \(epoch 13\)"):
            Actor(buffer, session=late)
    assert current.work(lease) == ["committed", "committed"]
    assert len(buffer.store.read(lambda tx: tx.actors.require("actor-0")).replaced) == 8


def test_a_group_with_failed_samples_is_ready_if_two_have_rewards(make):
    buffer = make(group_size=3)
    actor = Actor(buffer)
    buffer.begin()
    good, poor = actor.lease(2)
    for lease, done in ((good, [0, 1]), (poor, [0])):
        actor.work(lease, done)
        rest = [index for index in range(3) if index not in done]
        give_up = p.GiveUp("actor-0", 1, lease.lease_id, lease.attempt, rest, "reward failed")
        for _ in range(2):
            buffer.ask(give_up, p.Done)
    status = buffer.status()
    assert status.failed_by_reason == {"reward failed": 3}
    assert (status.num_ready_groups, status.ledger["filtered"]) == (1, 1)
    assert actor.lease(1)[0].prompt_id == poor.prompt_id, "the prompt of a filtered group is leased again"


def test_a_prompt_that_never_yields_a_group_is_abandoned(make, monkeypatch):
    monkeypatch.setattr("leeway.buffer.groups.MAX_ATTEMPTS", 3)
    buffer = make(num_prompts=2)
    actor = Actor(buffer)
    buffer.begin()
    prompts = []
    for _ in range(4):
        lease = actor.lease(1)[0]
        prompts.append(lease.prompt_id)
        actor.work(lease, reward=None)
    assert prompts[0] == prompts[1] == prompts[2] != prompts[3]
    assert buffer.status().ledger["prompts_given_up"] == 1


def test_a_sample_without_a_reward_is_not_drawn(make):
    buffer = make(group_size=3, groups_per_step=1)
    actor = Actor(buffer)
    buffer.begin()
    lease = actor.lease(1)[0]
    actor.work(lease, [0, 2])
    actor.work(lease, [1], reward=None)
    _, rows = buffer.draw(1, 0)
    assert [row.sample_index for row in rows] == [0, 2]
    assert buffer.status().ledger["filtered"] == 1


def test_a_bad_row_is_quarantined_and_fails_its_sample_but_not_its_neighbours(make):
    buffer = make(group_size=3)
    actor = Actor(buffer)
    buffer.begin()
    rows = actor.rows(actor.lease(1)[0])
    rows[1] = dataclasses.replace(rows[1], reward=float("nan"))
    stray = dataclasses.replace(rows[1], seq=99, group_id=77)
    assert buffer.push([*rows, stray]) == ["committed", "quarantined", "committed", "quarantined"]
    status = buffer.status()
    assert status.quarantined_by_reason == {"reward not finite": 2}
    assert status.failed_by_reason == {"quarantined: reward not finite": 1}
    assert (status.ledger["quarantined_outside"], status.num_ready_groups) == (1, 1)


def test_the_failed_count_is_the_sum_of_four_kinds_of_reasons(make):
    buffer = make(group_size=4)
    actor = Actor(buffer)
    buffer.begin()
    lease = actor.lease(1)[0]
    reasons = [str(RewardFailed("exact", "ValueError")), f"{GENERATION_FAILED}: took too long", "lease expired"]
    for index, reason in enumerate(reasons):
        buffer.ask(p.GiveUp("actor-0", 1, lease.lease_id, lease.attempt, [index], reason), p.Done)
    rows = actor.rows(lease)
    assert buffer.push([dataclasses.replace(rows[3], reward=float("nan"))]) == ["quarantined"]
    kinds = ("failed_reward", "failed_generation", "failed_lease", "failed_quarantined")
    ledger = buffer.status().ledger
    assert [ledger[kind] for kind in kinds] == [1, 1, 1, 1]
    assert ledger["failed"] == 4
