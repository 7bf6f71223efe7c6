"""The sampler of the TBA paper on a real store: a share m of each step are the newest groups.

The other groups are drawn uniformly or with weights exp(reward / temperature).
"""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.buffer.config import BufferConfig
from leeway.buffer.index import ReadyGroup
from leeway.buffer.samplers import REWARD_TEMPERATURE as TEMPERATURE
from leeway.buffer.samplers import OnPolicyShare
from leeway.common.staleness import PolicyVersion
from tests.world.buffer import Actor, generate, train

REWARDS = {"low": 0.0, "middle": 0.5, "high": 1.0}


class Plain:
    """Candidates in a list, oldest first."""

    def __init__(self, num):
        self.ready = [ReadyGroup(group, group) for group in range(num)]


class OldestOfTheRest:
    """Replay sampler that chooses the oldest groups, so that its choices differ from the newest groups."""

    def choose(self, candidates, num_groups, random, taken=frozenset()):
        return [key.group_id for key in candidates.ready if key.group_id not in taken][:num_groups]


@given(share=st.floats(0, 1), num_groups=st.integers(1, 64), seed=st.integers(0, 2**32 - 1))
def test_a_step_is_full_and_has_the_rounded_share_of_newest_groups(share, num_groups, seed):
    sampler = OnPolicyShare(share, OldestOfTheRest())
    chosen = sampler.choose(Plain(200), num_groups, np.random.default_rng(seed))
    num_newest = sum(group >= 200 - num_groups for group in chosen)
    assert len(set(chosen)) == num_groups
    assert abs(num_newest - share * num_groups) < 1 + 1e-9


@pytest.mark.parametrize(("share", "num_groups"), [(0.95, 8), (0.5, 5), (0.01, 4), (0.99, 32)])
def test_the_mean_share_of_newest_groups_over_many_steps_is_m(share, num_groups):
    sampler, random = OnPolicyShare(share, OldestOfTheRest()), np.random.default_rng(0)
    num_steps = 4000
    counts = [
        sum(group >= 200 - num_groups for group in sampler.choose(Plain(200), num_groups, random))
        for _ in range(num_steps)
    ]
    spread = math.sqrt(np.var(counts) / num_steps)
    assert abs(np.mean(counts) - share * num_groups) <= 4 * spread + 1e-12
    assert len(set(counts)) == (1 if share * num_groups == int(share * num_groups) else 2)


def test_the_first_half_of_a_choice_has_the_same_shares():
    sampler, random = OnPolicyShare(0.5, OldestOfTheRest()), np.random.default_rng(0)
    halves = [sampler.choose(Plain(200), 8, random)[:4] for _ in range(2000)]
    assert np.mean([group >= 192 for half in halves for group in half]) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("replay_sampler", ["reward_softmax", "uniform"])
def test_the_newest_have_the_share_m_and_the_rest_follows_the_replay_sampler(make, replay_sampler):
    """With m = 0.9, a step of 4 groups has 3 or 4 of the newest groups; the others are replayed."""
    settings = BufferConfig(
        sampler="on_policy_share",
        on_policy_share=0.9,
        replay_sampler=replay_sampler,
        max_uses="unlimited",
    )
    buffer = make(settings, max_lag="unbounded", groups_per_step=4, num_prompts=50)
    actor = Actor(buffer)
    buffer.begin()
    # A group is drawn with both samples, and its weight depends on the mean reward of both samples.
    stored = {generate(buffer, actor, 1, [reward - 0.25, reward + 0.25])[0]: reward for reward in REWARDS.values()}
    num_steps, num_newest, replayed = 400, 0, Counter()
    buffer.publish(1)
    newest = generate(buffer, actor, 4, [-5.0], version=PolicyVersion(0, 1))
    for step in range(1, num_steps + 1):
        groups = train(buffer, step, publish=False).group_ids
        assert len(set(groups)) == 4
        old = [group for group in groups if group in stored]
        assert len(old) <= 1
        # If only three of the newest four are chosen, the oldest of the four is left for the replay sampler.
        num_newest += set(newest[1:]) <= set(groups)
        replayed.update(old if old else ["newest"])
    assert num_newest == num_steps
    weights = {group: math.exp(reward / TEMPERATURE) for group, reward in stored.items()}
    weights["left"] = math.exp(-5.0 / TEMPERATURE)
    if replay_sampler == "uniform":
        weights = dict.fromkeys(weights, 1.0)
    # m * G = 3.6, so the fourth group is replayed in 0.4 of the steps.
    for group in stored:
        rate = 0.4 * weights[group] / sum(weights.values())
        assert abs(replayed[group] - num_steps * rate) <= 4 * math.sqrt(num_steps * rate * (1 - rate))


def test_replay_continues_to_draw_old_groups_while_new_ones_arrive(make):
    settings = BufferConfig(sampler="on_policy_share", on_policy_share=0.75, max_uses="unlimited")
    buffer = make(settings, max_lag="unbounded", groups_per_step=4, group_size=1, num_prompts=50)
    actor = Actor(buffer)
    buffer.begin()
    generate(buffer, actor, 12)
    num_new, ages = 0, []
    for step in range(1, 61):
        new = generate(buffer, actor, 3, version=PolicyVersion(0, step - 1))
        groups = train(buffer, step).group_ids
        num_new += len(set(new) & set(groups))
        ages += [max(new) - group for group in groups if group not in new]
    assert num_new == 180, "three of the four groups of each step are the newest"
    assert max(ages) > 90, "the fourth may be any older group"
