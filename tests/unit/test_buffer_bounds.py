"""Out-of-range numbers in messages: each is refused or quarantined before it has an effect."""

import math
from dataclasses import replace

import msgspec
import pytest

from leeway.buffer import protocol as p
from leeway.buffer.config import BufferConfig
from leeway.buffer.errors import BufferRefused
from leeway.buffer.steps import MAX_BEHIND
from tests.world.buffer import Actor, generate

LARGEST = 2**53


def as_sent(message):
    """Return the message after encoding and decoding."""
    return p.decode(p.encode(1, message)).message


@pytest.mark.parametrize("reward", [1.7e308, -1.1e100])
@pytest.mark.parametrize("sampler", ["fifo", "reward_softmax", "prioritised"])
def test_rewards_whose_mean_would_overflow_are_quarantined(make, sampler, reward):
    buffer = make(BufferConfig(sampler=sampler))
    actor = Actor(buffer)
    buffer.begin()
    assert actor.work(actor.lease(1)[0], reward=reward) == ["quarantined", "quarantined"]
    assert buffer.status().quarantined_by_reason == {"reward out of range": 2}


@pytest.mark.parametrize("sampler", ["fifo", "reward_softmax", "prioritised"])
def test_the_largest_rewards_can_be_averaged_and_drawn(make, sampler):
    buffer = make(BufferConfig(sampler=sampler), groups_per_step=1)
    actor = Actor(buffer)
    buffer.begin()
    generate(buffer, actor, 2, rewards=(1e100, -1e100))
    assert buffer.draw(1, 0)[0].ready


def test_reward_parts_whose_sum_would_overflow_are_quarantined(make):
    buffer = make()
    actor = Actor(buffer)
    buffer.begin()
    row = actor.rows(actor.lease(1)[0], [0])[0]
    parts = {"exact": 1.0, "length": -1.7e308}
    assert buffer.push([replace(row, reward_parts=parts)]) == ["quarantined"]
    assert buffer.status().quarantined_by_reason == {"reward part out of range": 1}


@pytest.mark.parametrize(
    "message",
    [
        p.BeginIncarnation("s", 0, 2**64 - 1),
        p.BeginIncarnation("s", LARGEST + 1, 0),
        p.BeginIncarnation("s", -1, 0),
        p.Published(0, 2**63),
        p.Published(-2, 0),
        p.StepFinished(1, 2**63, 0),
        p.StepFinished(-1, 1, 0),
        p.CheckpointDurable(-5, 0),
        p.Renew("a", 1, [1, 2**64 - 1]),
        p.GiveUp("a", 1, 1, 1, [-1], ""),
        p.LeaseRequest("a", 1, 0, -1),
        p.Push("a", -1),
        p.DrawRequest(1, 0, 0, 0, 0.0),
        p.DrawRequest(1, 0, 0, 2, math.nan),
        p.DrawRequest(1, 0, 0, 2, math.inf),
    ],
)
def test_a_header_with_a_number_out_of_range_is_rejected(message):
    with pytest.raises(msgspec.DecodeError):
        as_sent(message)


@pytest.mark.parametrize(
    "message",
    [
        p.BeginIncarnation("s", LARGEST, LARGEST),
        p.StepFinished(LARGEST, LARGEST, -1),
        p.DrawRequest(1, 0, 0, 1, -0.5),
        p.Renew("a", 0, [0, LARGEST]),
    ],
)
def test_a_header_with_numbers_at_the_ends_of_their_range_is_accepted(message):
    assert as_sent(message) == message


def test_a_store_works_with_the_largest_numbers(make):
    buffer = make()
    actor = Actor(buffer)
    buffer.begin(LARGEST, LARGEST)
    for lease in actor.lease():
        assert set(actor.work(lease)) == {"committed"}
    assert buffer.draw(LARGEST + 1, LARGEST)[0].ready
    buffer.restart()
    buffer.begin(session="again")
    assert buffer.status().ledger["gap"] == 0


def test_impossible_versions_of_the_learner_are_refused_and_drop_nothing(make):
    buffer = make()
    actor = Actor(buffer)
    buffer.begin()
    generate(buffer, actor, 4)
    far = 10**6
    with pytest.raises(BufferRefused, match=str(far)):
        buffer.ask(p.Published(0, far), p.Message)
    with pytest.raises(BufferRefused, match="cannot train at version 1000000"):
        ask_for(buffer, p.DrawRequest(1, far, 0, 2, 0.0))
    status = buffer.status()
    assert (status.num_ready_groups, status.version, status.newest) == (4, 0, (0, 0))


def test_a_publication_may_be_ahead_of_the_learner_by_a_bounded_number_of_versions(make):
    buffer = make()
    buffer.begin()
    buffer.publish(MAX_BEHIND)
    with pytest.raises(BufferRefused, match=f"cannot be at version {MAX_BEHIND + 1}"):
        buffer.publish(MAX_BEHIND + 1)
    assert buffer.status().newest == (0, MAX_BEHIND)


def test_no_version_is_published_before_a_learner_begins(make):
    buffer = make()
    buffer.ask(p.Published(-1, 3), p.Done)
    assert buffer.status().newest == (0, 0)
    assert Actor(buffer).lease() == []


def ask_for(buffer, request):
    refused = []

    def answer(tx):
        try:
            buffer.core.try_draw(tx, request)
        except BufferRefused as error:
            refused.append(error)

    buffer.store.write(answer)
    for error in refused:
        raise error
