"""Replay that saves generation: groups that may be used again keep new ones from being leased (replay_steps)."""

import tempfile
from contextlib import closing
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from buffer.config import BufferConfig
from tests.world.buffer import Actor, InProcessBuffer, facts, train

GROUPS_PER_STEP = 4
LIMITS = {"groups_per_step": GROUPS_PER_STEP, "num_prompts": 100}


def all_leased(actor):
    """Generate everything that may be leased now; how many groups that was."""
    leases = actor.lease(1000)
    for lease in leases:
        actor.work(lease)
    return len(leases)


def trained(buffer, num_steps):
    """Take steps, before and within each generating all that may be; how many groups each of them could lease."""
    actor, index = Actor(buffer), buffer.core.groups.index
    buffer.begin()
    leased = []
    for step in range(1, num_steps + 1):
        leased.append(all_leased(actor))
        if not buffer.draw(step, step - 1)[0].ready:  # which has dropped what is too old
            leased[-1] += all_leased(actor)
        assert buffer.draw(step, step - 1)[0].ready
        leased[-1] += all_leased(actor)
        most = buffer.config.most_alive(GROUPS_PER_STEP)
        assert len(index.ready) - 1 < most, "beside those of the step in progress"
        train(buffer, step)
        assert len(index.ready) - 1 - GROUPS_PER_STEP < most
    return leased


def test_new_groups_take_the_place_of_what_was_used_up(make):
    config = BufferConfig(sampler="uniform", max_uses=4)
    freely = trained(make(config, max_lag=16, **LIMITS), 40)
    leased = trained(make(config.model_copy(update={"replay_steps": 2.0}), max_lag=16, **LIMITS), 40)
    assert leased[0] == 3 * GROUPS_PER_STEP, "two steps, and one in progress"
    assert sum(leased) == pytest.approx(40 * GROUPS_PER_STEP / 4, abs=3 * GROUPS_PER_STEP), "four uses each"
    assert sum(freely) > 3 * sum(leased)


def test_who_asks_in_vain_reads_why(make):
    buffer = make(BufferConfig(sampler="uniform", max_uses=4, replay_steps=1.0), max_lag=16, **LIMITS)
    trained(buffer, 1)
    why = buffer.store.read(buffer.core.leases.closed_because)
    assert why == "8 groups are in flight or may be used again, which is what buffer.replay_steps allows"


@settings(max_examples=30, deadline=None)
@given(
    steps=st.floats(1.0, 3.0),
    uses=st.integers(2, 6),
    max_lag=st.sampled_from([2, 5, "unbounded"]),
    sampler=st.sampled_from(["fifo", "uniform", "reward_softmax", "prioritised", "on_policy_share"]),
)
def test_no_step_waits_for_ever(steps, uses, max_lag, sampler):
    """What is too old makes room as what is used up does."""
    config = BufferConfig(sampler=sampler, max_uses=uses, replay_steps=steps)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(InProcessBuffer(Path(folder), facts(max_lag=max_lag, **LIMITS), config)) as buffer,
    ):
        leased = trained(buffer, 3 * uses)
        assert buffer.status().ledger["uses"] == 3 * uses * GROUPS_PER_STEP * buffer.facts.group_size
        assert max(leased) <= ceil(steps * GROUPS_PER_STEP) + 2 * GROUPS_PER_STEP
        assert buffer.faults() == []


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"replay_steps": 2.0}, "max_uses = 1 none is used twice: give max_uses a number above 1"),
        ({"replay_steps": 2.0, "max_uses": "unlimited", "sampler": "uniform"}, "unlimited none ever is"),
        ({"replay_steps": 0.5, "max_uses": 2}, "greater than or equal to 1"),
    ],
)
def test_what_makes_no_sense_is_refused(knobs, why):
    with pytest.raises(ValidationError, match=why):
        BufferConfig(**knobs)
