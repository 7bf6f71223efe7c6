"""The pool that lengths are chosen from leaves the sampler in charge."""

from collections import Counter

from buffer import draws
from buffer.config import BufferConfig
from common.staleness import PolicyVersion
from tests.world.buffer import Actor, generate, train

LONG = {"vocab_size": 8192, "max_tokens": 8192, "num_prompts": 500, "group_size": 1}
PACKS = {"pack_tokens": 4096}


def started(make, config, **changes):
    buffer = make(config, **{**LONG, "max_lag": "unbounded", "groups_per_step": 4, **changes})
    actor = Actor(buffer)
    buffer.begin()
    return buffer, actor


def test_packing_leaves_length_balanced_its_shares(make):
    buffer, actor = started(make, BufferConfig(sampler="length_balanced", max_uses=2, **PACKS))
    length_of = {}
    for tokens in (8, 64, 512, 4000):
        length_of |= dict.fromkeys(generate(buffer, actor, 12, tokens=tokens), tokens)
    drawn = Counter(length_of[group] for step in range(1, 9) for group in train(buffer, step).group_ids)
    assert drawn == dict.fromkeys((8, 64, 512, 4000), 8)


def test_packing_leaves_on_policy_share_its_share(make):
    settings = BufferConfig(sampler="on_policy_share", on_policy_share=0.5, max_uses="unlimited", **PACKS)
    buffer, actor = started(make, settings)
    generate(buffer, actor, 400)
    num_newest = 0
    for step in range(1, 13):
        new = set(generate(buffer, actor, 8, version=PolicyVersion(0, step - 1)))
        num_newest += len(new & set(train(buffer, step).group_ids))
    assert 24 <= num_newest <= 28, "half of 48, and now and then one by the other sampler"


def test_the_spare_groups_are_those_that_the_sampler_would_take_next(make, monkeypatch):
    monkeypatch.setattr(draws, "SELECTION_POOL", 2)
    settings = BufferConfig(max_uses=2, length_correction=True)
    buffer, actor = started(make, settings, groups_per_step=2)
    groups = generate(buffer, actor, 2, tokens=8) + generate(buffer, actor, 4, tokens=4000)
    drawn = [set(train(buffer, step).group_ids) for step in (1, 2)]
    assert drawn[0] <= set(groups[:4])
    assert drawn[0] & set(groups[2:4]), "the long ones were generated more often"
    assert not (drawn[0] | drawn[1]) & set(groups[5:])


def test_a_group_that_was_used_before_has_no_claim_to_its_last_chance(make):
    settings = BufferConfig(sampler="on_policy_share", on_policy_share=1.0, max_uses=50, **PACKS)
    buffer, actor = started(make, settings, max_lag=6, max_actor_lag=0)
    newest = {}
    for step in range(1, 20):
        newest[step] = set(generate(buffer, actor, 4, version=PolicyVersion(0, step - 1)))
        assert set(train(buffer, step).group_ids) == newest[step]


def test_an_unused_group_at_its_last_chance_enters_the_step_though_used_ones_are_older(make):
    settings = BufferConfig(sampler="on_policy_share", on_policy_share=1.0, max_uses=50, **PACKS)
    buffer, actor = started(make, settings, groups_per_step=2, max_lag=2, max_actor_lag=0)
    oldest = set(generate(buffer, actor, 4))
    used = set(train(buffer, 1).group_ids)
    generate(buffer, actor, 2, version=PolicyVersion(0, 1))
    train(buffer, 2)
    generate(buffer, actor, 2, version=PolicyVersion(0, 2))
    assert set(train(buffer, 3).group_ids) == oldest - used


def test_the_last_chance_of_an_unused_group_is_the_last_step_whose_updates_are_all_within_the_bound(make):
    settings = BufferConfig(sampler="on_policy_share", on_policy_share=1.0, max_uses=50, **PACKS)
    buffer, actor = started(make, settings, groups_per_step=2, max_lag=8, max_actor_lag=0, updates_per_step=2)
    unused = set(generate(buffer, actor, 4))
    for step, version in enumerate((0, 2, 4, 6), start=1):
        groups = set(buffer.draw(step, version)[0].group_ids)
        unused -= groups if step == 1 else set()
        # A step that begins at 8 trains at 9, which is more than 8 versions after the first groups.
        assert bool(groups & unused) == (step == 4)
        buffer.finish(step, version + 2)
        buffer.publish(version + 2)
        generate(buffer, actor, 2, version=PolicyVersion(0, version + 2))
    assert groups == unused
