"""Replay with `replay_steps`: groups that can be reused limit the number of new groups that are leased."""

import tempfile
from contextlib import closing
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from leeway.buffer.config import BufferConfig
from tests.world.buffer import Actor, InProcessBuffer, facts, train

GROUPS_PER_STEP = 4
LIMITS = {"groups_per_step": GROUPS_PER_STEP, "num_prompts": 100}


def all_leased(actor):
    """Generate every group that can be leased now; return the number of groups."""
    leases = actor.lease(1000)
    for lease in leases:
        actor.work(lease)
    return len(leases)


def trained(buffer, num_steps):
    """Run steps, and generate all possible groups before and during each step; return the leases of each step."""
    actor, index = Actor(buffer), buffer.core.groups.index
    buffer.begin()
    leased = []
    for step in range(1, num_steps + 1):
        leased.append(all_leased(actor))
        if not buffer.draw(step, step - 1)[0].ready:  # the draw dropped stale groups
            leased[-1] += all_leased(actor)
        assert buffer.draw(step, step - 1)[0].ready
        leased[-1] += all_leased(actor)
        most = buffer.config.max_live_groups(GROUPS_PER_STEP)
        assert len(index.ready) - 1 < most, "the limit does not count the groups of the step in progress"
        train(buffer, step)
        assert len(index.ready) - 1 - GROUPS_PER_STEP < most
    return leased


def test_new_groups_replace_used_up_ones(make):
    config = BufferConfig(sampler="uniform", max_uses=4)
    without_limit = trained(make(config, max_lag=16, **LIMITS), 40)
    leased = trained(make(config.model_copy(update={"replay_steps": 2.0}), max_lag=16, **LIMITS), 40)
    assert leased[0] == 3 * GROUPS_PER_STEP, "the limit is the groups of two steps and of the step in progress"
    assert sum(leased) == pytest.approx(40 * GROUPS_PER_STEP / 4, abs=3 * GROUPS_PER_STEP), (
        "each group is used four times"
    )
    assert sum(without_limit) > 3 * sum(leased)


def test_the_reason_for_closed_admission_names_the_limit(make):
    buffer = make(BufferConfig(sampler="uniform", max_uses=4, replay_steps=1.0), max_lag=16, **LIMITS)
    trained(buffer, 1)
    reason = buffer.store.read(buffer.core.leases.closed_because)
    assert reason == "8 groups are open or ready, which reaches the limit of buffer.replay_steps"


@settings(max_examples=30, deadline=None)
@given(
    steps=st.floats(1.0, 3.0),
    uses=st.integers(2, 6),
    max_lag=st.sampled_from([2, 5, "unbounded"]),
    sampler=st.sampled_from(["fifo", "uniform", "reward_softmax", "prioritised", "on_policy_share"]),
)
def test_no_step_waits_forever(steps, uses, max_lag, sampler):
    """Stale groups make room for new groups, as groups that were used `max_uses` times do."""
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
    ("keys", "message"),
    [
        ({"replay_steps": 2.0}, "max_uses = 1 no group is used twice: set max_uses to a number above 1"),
        ({"replay_steps": 2.0, "max_uses": "unlimited", "sampler": "uniform"}, "unlimited no group is ever used up"),
        ({"replay_steps": 0.5, "max_uses": 2}, "greater than or equal to 1"),
    ],
)
def test_contradictory_keys_are_rejected(keys, message):
    with pytest.raises(ValidationError, match=message):
        BufferConfig(**keys)
