"""Requeued samples: their stored tokens, their next lease, and their counts."""

import dataclasses

import numpy as np
import pytest

from leeway.buffer import protocol as p
from leeway.buffer import schema
from leeway.buffer.client import Granted
from leeway.buffer.errors import BufferRefused
from leeway.buffer.schema import REQUEUED
from leeway.common.staleness import PolicyVersion
from tests.world.buffer import Actor, make_trajectory


def test_a_requeued_group_is_leased_before_new_prompts_with_its_tokens(make):
    buffer = make(group_size=3)
    slow, fast = Actor(buffer, "slow"), Actor(buffer, "fast")
    buffer.begin()
    first, second = slow.lease(2)
    buffer.requeue(first, [0, 1, 2], [0, 2], actor="slow", num_completion_tokens=3)
    ledger = buffer.status().ledger
    assert (ledger["issued"], ledger["in_flight"], ledger["requeued"], ledger["failed"]) == (6, 3, 3, 0)

    [again, new], rows = buffer.grant("fast", 2)
    assert (again.group_id, again.prompt_id, again.attempt) == (first.group_id, first.prompt_id, 2)
    assert (again.sample_indices, again.prefixes) == ([0, 1, 2], [0, 2])
    assert (new.prefixes, new.group_id) == ([], second.group_id + 1)
    sent = make_trajectory(first, 0, seq=0, num_completion_tokens=3)
    for row in rows:
        assert row.token_ids.tolist() == sent.token_ids.tolist()
        assert row.logprobs.tobytes() == sent.logprobs.tobytes()
        assert (row.spans, row.prompt_length, row.started_s) == (sent.spans, sent.prompt_length, sent.started_s)

    assert slow.work(first) == ["late"] * 3, "the slow actor no longer holds the lease"
    assert fast.work(again) == ["committed"] * 3
    ledger = buffer.status().ledger
    assert (ledger["issued"], ledger["committed"], ledger["requeued"]) == (12, 3, 3)


def test_a_client_reads_the_requeued_tokens_from_its_grant(make):
    buffer = make()
    Actor(buffer)
    buffer.begin()
    [lease] = buffer.lease("actor-0", 1)
    buffer.requeue(lease, [0, 1], [1], num_completion_tokens=2)
    reply, body = buffer.answer(p.LeaseRequest("actor-0", 1, 99, 1))
    granted = Granted(reply.leases, reply.newest, reply.draining, body=body)
    [(key, prefix)] = granted.prefixes().items()
    assert key == (reply.leases[0].lease_id, 1)
    assert (prefix.token_ids.tolist(), prefix.logprobs.tolist()) == ([3, 4], [-0.5, -0.5])
    assert (prefix.newest, prefix.spans[0].end, prefix.started_s) == (PolicyVersion(0, 0), 2, 1.0)
    assert Granted([], (0, 0), False).prefixes() == {}


def test_requeued_samples_wait_until_the_lease_of_their_siblings_is_closed(make):
    buffer = make(group_size=3)
    one, other = Actor(buffer, "one"), Actor(buffer, "other")
    buffer.begin()
    [lease] = one.lease(1)
    buffer.requeue(lease, [1, 2], [1, 2], actor="one")
    assert buffer.status().ledger["in_flight"] == 1
    assert lease.group_id not in [each.group_id for each in other.lease(1)]
    assert one.work(lease, [1]) == ["late"]
    assert one.work(lease, [0]) == ["committed"]
    [again], rows = buffer.grant("other", 1)
    assert (again.group_id, again.sample_indices) == (lease.group_id, [1, 2])
    assert [row.sample_index for row in rows] == [1, 2]


def test_a_repeated_requeue_or_one_by_another_actor_changes_nothing(make):
    buffer = make()
    Actor(buffer)
    Actor(buffer, "other")
    buffer.begin()
    [lease] = buffer.lease("actor-0", 1)
    buffer.requeue(lease, [0], [0])
    once = buffer.status()
    buffer.requeue(lease, [0], [0])
    buffer.requeue(lease, [0, 1], [], actor="other")
    message = p.HandOn("actor-0", 1, lease.lease_id, lease.attempt + 1, [1])
    buffer.ask(message, p.Done, bytes(schema.encode([], "r")))
    assert buffer.status() == once
    Actor(buffer, "actor-0", session="2")
    with pytest.raises(BufferRefused, match="replaced by a newer process"):
        buffer.requeue(lease, [1], [1])


def test_saved_tokens_of_running_samples_are_leased_after_their_actor_is_killed(make):
    buffer = make()
    actor, other = Actor(buffer), Actor(buffer, "other")
    buffer.begin()
    [lease] = actor.lease(1)
    for num_tokens in (1, 3):
        buffer.requeue(lease, [0, 1], [0, 1], goes_on=True, num_completion_tokens=num_tokens)
    assert buffer.status().ledger["in_flight"] == 2
    assert actor.work(lease, [0]) == ["committed"]
    buffer.restart()
    buffer.now_s += 61.0
    buffer.expire()
    [again], [row] = buffer.grant("other", 1)
    assert (again.sample_indices, again.prefixes, row.num_completion_tokens) == ([1], [1], 3)
    assert other.work(again) == ["committed"]
    ledger = buffer.status().ledger
    assert (ledger["failed_lease"], ledger["requeued"], ledger["committed"]) == (1, 0, 2)


def test_a_requeue_does_not_count_as_a_failed_attempt(make, monkeypatch):
    monkeypatch.setattr("leeway.buffer.groups.MAX_ATTEMPTS", 1)
    buffer = make()
    actor = Actor(buffer)
    buffer.begin()
    for attempt in range(1, 6):
        [lease] = actor.lease(1)
        assert lease.attempt == attempt
        buffer.requeue(lease, [0, 1], [0], num_completion_tokens=attempt)
    [lease] = actor.lease(1)
    assert (lease.group_id, lease.prefixes) == (1, [0])
    assert actor.work(lease) == ["committed", "committed"]


def test_a_repeated_request_gets_the_same_leases_and_tokens_after_a_restart(make):
    buffer = make()
    Actor(buffer)
    buffer.begin()
    [lease] = buffer.lease("actor-0", 1)
    buffer.requeue(lease, [0, 1], [0, 1])
    buffer.restart()
    leases, rows = buffer.grant("actor-0", 2)
    buffer.restart()
    again, same = buffer.grant("actor-0", 2, again=True)
    assert again == leases
    assert [row.token_ids.tolist() for row in same] == [row.token_ids.tolist() for row in rows]
    assert len(rows) == 2


def test_tokens_past_the_bound_are_dropped_and_the_sample_restarts(make):
    buffer = make(max_lag=2)
    actor = Actor(buffer)
    buffer.begin()
    leases = actor.lease(2)
    for lease, indices in zip(leases, ([0, 1], [1]), strict=True):
        buffer.requeue(lease, indices, indices, version=PolicyVersion(0, 0))
    actor.work(leases[1], [0], version=PolicyVersion(0, 2))
    buffer.begin(version=3, step=3, session="another learner")
    (first, second), rows = buffer.grant("actor-0", 2)
    assert [first.group_id, second.group_id] == [lease.group_id for lease in leases]
    assert (first.sample_indices, second.sample_indices) == ([0, 1], [1])
    assert (first.prefixes, second.prefixes, rows) == ([], [], [])
    assert buffer.status().ledger["dropped_stale"] == 0, "samples of the group that are fresh enough are kept"


def test_a_sample_longer_than_a_resumed_run_allows_restarts(make):
    buffer = make(max_tokens=64)
    Actor(buffer)
    buffer.begin()
    [lease] = buffer.lease("actor-0", 1)
    buffer.requeue(lease, [0, 1], [0], num_completion_tokens=40)
    buffer.facts = buffer.facts.model_copy(update={"max_tokens": 24})
    buffer.restart()
    [again], rows = buffer.grant("actor-0", 1)
    assert (again.group_id, again.prefixes, rows) == (lease.group_id, [], [])


def test_the_age_of_a_group_is_that_of_its_first_tokens_from_any_actor(make):
    buffer = make(max_lag=4)
    actor = Actor(buffer)
    buffer.begin()
    [lease] = actor.lease(1)
    buffer.requeue(lease, [0, 1], [0], version=PolicyVersion(0, 0))
    buffer.publish(3)
    [again] = actor.lease(1)
    assert again.min_version > 0

    def age(tx):
        return tx.groups.require(lease.group_id).oldest_effective(tx.state)

    assert buffer.store.read(age) == 0
    actor.work(again, version=PolicyVersion(0, 3))
    assert buffer.store.read(age) == 3, "all committed tokens have version 3"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ({"finish_reason": "stop"}, "finish_reason"),
        ({"logprobs": np.full(4, np.nan, np.float32)}, "logprob not finite"),
        ({"token_ids": np.full(7, 10**6, np.int32)}, "token outside the vocabulary"),
        ({"group_id": 77}, "not of a requeued sample"),
        ({"sample_index": 1}, "not of a requeued sample"),
    ],
)
def test_a_bad_row_is_quarantined_and_its_sample_restarts(make, damage, reason):
    buffer = make()
    Actor(buffer)
    buffer.begin()
    [lease] = buffer.lease("actor-0", 1)
    good = dataclasses.replace(make_trajectory(lease, 0, seq=0, reward=None), finish_reason=REQUEUED)
    bad = dataclasses.replace(good, **damage)
    message = p.HandOn("actor-0", 1, lease.lease_id, lease.attempt, [0])
    buffer.ask(message, p.Done, bytes(schema.encode([bad], "r")))
    status = buffer.status()
    assert status.quarantined_by_reason == {reason: 1}
    assert (status.ledger["requeued"], status.ledger["in_flight"]) == (1, 1)
    buffer.requeue(lease, [1], [])
    [again] = buffer.lease("actor-0", 1)
    assert (again.sample_indices, again.prefixes) == ([0, 1], [])


def test_a_requeue_with_more_rows_than_a_push_may_have_is_refused(make, monkeypatch):
    monkeypatch.setattr("leeway.buffer.core.MAX_PUSHED_ROWS", 1)
    buffer = make()
    actor = Actor(buffer)
    buffer.begin()
    [lease] = actor.lease(1)
    with pytest.raises(BufferRefused, match="2 rows in one message; at most 1"):
        buffer.requeue(lease, [0, 1], [0, 1])
    buffer.requeue(lease, [0], [0])
    assert buffer.status().ledger["requeued"] == 1


def test_an_invalid_body_is_refused_and_the_lease_stays(make):
    buffer = make()
    actor = Actor(buffer)
    buffer.begin()
    [lease] = actor.lease(1)
    message = p.HandOn("actor-0", 1, lease.lease_id, lease.attempt, [0, 1])
    for body in (b"", b"nothing", bytes(schema.encode_scores([1], [np.zeros(2, np.float32)]))):
        with pytest.raises(BufferRefused, match="quarantined"):
            buffer.answer(message, body)
    assert actor.work(lease) == ["committed", "committed"]
