"""Groups of one prompt that enter a step together (groups_per_prompt)."""

import math
from collections import Counter

import pytest
from pydantic import ValidationError

from buffer.config import BufferConfig
from buffer.errors import StoreError
from common.staleness import PolicyVersion
from tests.world.buffer import Actor, InProcessBuffer, facts, generate, train


def started(make, settings, **changes):
    buffer = make(settings, **{"max_lag": "unbounded", "group_size": 1, "num_prompts": 4, **changes})
    actor = Actor(buffer)
    buffer.begin()
    return buffer, actor


def prompts_of(buffer):
    """Group -> prompt."""
    return buffer.store.read(lambda tx: {g: group.prompt_id for (g,), group in tx.groups.all_items()})


def stored(buffer, actor, num_rounds):
    """So many groups of every prompt: prompt -> groups, oldest first."""
    of_prompt = {}
    for group in generate(buffer, actor, num_rounds * buffer.facts.num_prompts):
        of_prompt.setdefault(prompts_of(buffer)[group], []).append(group)
    return of_prompt


def test_a_group_brings_the_newest_others_of_its_prompt_ahead_of_the_laws_later_choices(make):
    buffer, actor = started(make, BufferConfig(groups_per_prompt=3, max_uses=2), groups_per_step=5, num_prompts=5)
    of_prompt = stored(buffer, actor, 4)
    oldest = sorted(groups[0] for groups in of_prompt.values())
    prompt = prompts_of(buffer)
    first, second = (of_prompt[prompt[group]] for group in oldest[:2])
    assert buffer.draw(1, 0)[0].group_ids == [first[0], first[3], first[2], second[0], second[3]], (
        "the oldest group, the two newest of its prompt, then the next oldest as far as there is room"
    )


def test_a_step_is_never_larger_and_its_groups_are_whole_and_named_once(make):
    buffer, actor = started(
        make,
        BufferConfig(sampler="uniform", max_uses="unlimited", groups_per_prompt=4),
        groups_per_step=6,
        group_size=2,
    )
    stored(buffer, actor, 5)
    for step in range(1, 30):
        reply, rows = buffer.draw(step, step - 1)
        assert len(set(reply.group_ids)) == len(reply.group_ids) == 6
        assert [row.group_id for row in rows] == [group for group in reply.group_ids for _ in range(2)]
        first, *others = (prompts_of(buffer)[group] for group in reply.group_ids)
        assert others[:3] == [first] * 3
        buffer.finish(step, step)


def test_every_group_is_the_first_of_its_prompt_as_often_as_the_sampler_says(make):
    rewards = {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5}
    settings = BufferConfig(sampler="reward_softmax", reward_temperature=0.5, max_uses="unlimited", groups_per_prompt=2)
    buffer, actor = started(make, settings, groups_per_step=2)
    for _ in range(2):
        leases = actor.lease(4)
        for lease in leases:
            actor.work(lease, reward=rewards[lease.prompt_id])
    firsts = Counter()
    for step in range(1, 501):
        one, other = train(buffer, step).group_ids
        assert prompts_of(buffer)[one] == prompts_of(buffer)[other]
        firsts[prompts_of(buffer)[one]] += 1
    total = sum(math.exp(2 * reward) for reward in rewards.values())
    for prompt, reward in rewards.items():
        chance = math.exp(2 * reward) / total
        assert abs(firsts[prompt] - 500 * chance) <= 4 * math.sqrt(500 * chance * (1 - chance))


def test_groups_of_an_unfinished_step_and_used_up_ones_are_no_mates(make):
    settings = BufferConfig(groups_per_prompt=4, max_uses=2)
    buffer, actor = started(make, settings, groups_per_step=2, num_prompts=1)
    first, second, third, fourth = generate(buffer, actor, 4)
    for step in (1, 3):
        assert buffer.draw(step, step - 1)[0].group_ids == [first, fourth]
        assert buffer.draw(step + 1, step)[0].group_ids == [second, third]
        buffer.finish(step, step)
        buffer.finish(step + 1, step + 1)
    fifth, sixth = generate(buffer, actor, 2)
    assert buffer.draw(5, 4)[0].group_ids == [fifth, sixth]


def test_mates_keep_the_use_limit_and_the_age_bound(make):
    settings = BufferConfig(sampler="uniform", groups_per_prompt=3, max_uses=2)
    buffer, actor = started(make, settings, groups_per_step=3, num_prompts=2, max_lag=6, max_actor_lag=0)
    uses, oldest_of = Counter(), {}
    for step in range(1, 25):
        for lease in actor.lease():
            newest = buffer.status().newest
            actor.work(lease, version=PolicyVersion(*newest))
            oldest_of[lease.group_id] = newest[1]
        reply = train(buffer, step)
        uses.update(reply.group_ids)
        assert all(step - 1 - oldest_of[group] <= 6 for group in reply.group_ids)
    assert max(uses.values()) == 2


@pytest.mark.parametrize("sampler", ["fifo", "uniform", "reward_softmax", "prioritised", "on_policy_share"])
def test_the_same_step_asked_again_is_the_same_also_after_a_restart_of_either_side(make, sampler):
    def run(restarts):
        settings = BufferConfig(sampler=sampler, max_uses=8, groups_per_prompt=2)
        buffer, actor = started(make, settings, groups_per_step=4, num_prompts=6)
        for reward in range(3):
            generate(buffer, actor, 6, [float(reward)])
        drawn = []
        for step in range(1, 6):
            first, _ = buffer.draw(step, step - 1)
            if restarts:
                buffer.restart()
                assert buffer.draw(step, step - 1)[0] == first
            drawn.append(train(buffer, step).record_ids)
        buffer.begin(2, 2, session="restarted")
        assert [train(buffer, step, incarnation=1).record_ids for step in (3, 4, 5)] == drawn[2:]
        return drawn

    assert run(restarts=False) == run(restarts=True)


def test_an_on_policy_share_keeps_its_meaning_for_the_groups_that_the_sampler_takes(make):
    """Every second group that the sampler takes is one of the newest, though others take half of the room."""
    settings = BufferConfig(sampler="on_policy_share", on_policy_share=0.5, max_uses="unlimited", groups_per_prompt=2)
    buffer, actor = started(make, settings, groups_per_step=4, num_prompts=40)
    generate(buffer, actor, 80)  # two of each prompt; the last two are the newest that a step looks for
    firsts = [train(buffer, step).group_ids[0] for step in range(1, 401)]
    share = sum(group > 78 for group in firsts) / 400
    assert abs(share - 0.5) <= 4 * math.sqrt(0.25 / 400)


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"sampler": "length_balanced"}, "sampler = 'length_balanced' could not balance those"),
        (
            {"sampler": "on_policy_share", "replay_sampler": "length_balanced"},
            "replay_sampler = 'length_balanced' could not",
        ),
        ({"groups_per_prompt": 0}, "groups_per_prompt"),
    ],
)
def test_what_would_part_the_groups_of_a_prompt_is_refused_in_a_sentence(knobs, sentence):
    with pytest.raises(ValidationError, match=sentence):
        BufferConfig(**{"groups_per_prompt": 2, **knobs})


def test_on_stale_wait_is_refused_where_a_prompts_other_groups_go_first(tmp_path):
    with pytest.raises(StoreError, match=r"on_stale = 'wait'.* groups_per_prompt = 2"):
        InProcessBuffer(tmp_path, facts(on_stale="wait"), BufferConfig(groups_per_prompt=2))
