"""Groups of one prompt drawn together: `same_prompt` of examples/samplers.py."""

from collections import Counter
from pathlib import Path

import pytest

from leeway.buffer.config import BufferConfig
from leeway.buffer.errors import StoreError
from leeway.common.staleness import PolicyVersion
from tests.world.buffer import Actor, InProcessBuffer, facts, generate, train

EXAMPLE = Path(__file__).parents[2] / "examples" / "samplers.py"
SAME_PROMPT = f"{EXAMPLE}:same_prompt"


def started(make, settings, **changes):
    buffer = make(settings, **{"max_lag": "unbounded", "group_size": 1, "num_prompts": 4, **changes})
    actor = Actor(buffer)
    buffer.begin()
    return buffer, actor


@pytest.fixture
def three_others(tmp_path):
    """Return a sampler that adds to each drawn group up to three other groups of the same prompt."""
    file = tmp_path / "mine.py"
    file.write_text(f"{EXAMPLE.read_text()}\n\nthree_others = SamePrompt(3)\n")
    return f"{file}:three_others"


def prompts_of(buffer):
    """Return the prompt of each group."""
    return buffer.store.read(lambda tx: {g: group.prompt_id for (g,), group in tx.groups.all_items()})


def stored(buffer, actor, num_rounds):
    """Generate `num_rounds` groups of every prompt; return prompt -> groups, oldest first."""
    of_prompt = {}
    for group in generate(buffer, actor, num_rounds * buffer.facts.num_prompts):
        of_prompt.setdefault(prompts_of(buffer)[group], []).append(group)
    return of_prompt


def test_a_group_is_followed_by_the_newest_other_group_of_its_prompt(make):
    buffer, actor = started(make, BufferConfig(sampler=SAME_PROMPT, max_uses="unlimited"), groups_per_step=5)
    of_prompt = stored(buffer, actor, 4)
    for step in range(1, 30):
        drawn = train(buffer, step).group_ids
        for one, other in (drawn[:2], drawn[2:4]):
            groups = of_prompt[prompts_of(buffer)[one]]
            left = [each for each in groups if each not in drawn[: drawn.index(other)]]
            assert other == left[-1], "expected the prompt's most recently leased group that is not yet in the step"


def test_a_step_keeps_its_size_and_its_groups_are_whole_and_distinct(make, three_others):
    settings = BufferConfig(sampler=three_others, max_uses="unlimited")
    buffer, actor = started(make, settings, groups_per_step=6, group_size=2)
    stored(buffer, actor, 5)
    for step in range(1, 30):
        reply, rows = buffer.draw(step, step - 1)
        assert len(set(reply.group_ids)) == len(reply.group_ids) == 6
        assert [row.group_id for row in rows] == [group for group in reply.group_ids for _ in range(2)]
        first, *others = (prompts_of(buffer)[group] for group in reply.group_ids)
        assert others[:3] == [first] * 3
        buffer.finish(step, step)


def test_every_prompt_comes_first_equally_often(make):
    buffer, actor = started(make, BufferConfig(sampler=SAME_PROMPT, max_uses="unlimited"), groups_per_step=2)
    stored(buffer, actor, 2)
    firsts = Counter(prompts_of(buffer)[train(buffer, step).group_ids[0]] for step in range(1, 401))
    assert all(abs(firsts[prompt] - 100) < 4 * (400 * 0.25 * 0.75) ** 0.5 for prompt in range(4))


def test_groups_of_an_unfinished_step_and_used_up_ones_are_not_added(make, three_others):
    buffer, actor = started(make, BufferConfig(sampler=three_others, max_uses=2), groups_per_step=2, num_prompts=1)
    generate(buffer, actor, 4)
    for step in (1, 3):
        one, other = (set(buffer.draw(each, each - 1)[0].group_ids) for each in (step, step + 1))
        assert one | other == {1, 2, 3, 4}
        buffer.finish(step, step)
        buffer.finish(step + 1, step + 1)
    fresh = generate(buffer, actor, 2)
    assert set(buffer.draw(5, 4)[0].group_ids) == set(fresh)


def test_added_groups_respect_the_use_limit_and_the_age_bound(make):
    settings = BufferConfig(sampler=SAME_PROMPT, max_uses=2)
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


def test_a_repeated_step_is_the_same_after_a_restart_of_service_and_learner(make):
    def run(restarts):
        settings = BufferConfig(sampler=SAME_PROMPT, max_uses=8)
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


def test_on_stale_wait_is_rejected_with_a_sampler_that_reorders_groups(tmp_path):
    with pytest.raises(StoreError, match=r"on_stale = 'wait'.*:same_prompt"):
        InProcessBuffer(tmp_path, facts(on_stale="wait"), BufferConfig(sampler=SAME_PROMPT))
