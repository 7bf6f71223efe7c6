"""Custom samplers: `buffer.sampler = "samplers.py:NAME"`; NAME is hard_ones, newest_first or same_prompt."""

from collections.abc import Set as AbstractSet
from itertools import islice

from numpy.random import Generator

from leeway.buffer.index import GroupIndex
from leeway.buffer.tables import Group


def hard_ones(group: Group, oldest: int) -> float:
    """Return the log weight of a group for random draws; the weight is larger for hard prompts and recent groups."""
    return -2.0 * (group.mean_reward or 0.0) + oldest / 16


class NewestFirst:
    """Chooses the groups with the newest tokens, without a random draw."""

    def choose(
        self, candidates: GroupIndex, num_groups: int, random: Generator, taken: AbstractSet[int] = frozenset()
    ) -> list[int]:
        """Return up to `num_groups` group ids."""
        ready = [key.group_id for key in reversed(candidates.ready) if key.group_id not in taken]
        return ready[:num_groups]


newest_first = NewestFirst()


class SamePrompt:
    """Draws random groups, each followed by other groups of its prompt, so that a loss can compare policy versions."""

    def __init__(self, num_others: int) -> None:
        """Add to each group up to `num_others` other groups of its prompt, most recently leased first."""
        self.num_others = num_others

    def choose(
        self, candidates: GroupIndex, num_groups: int, random: Generator, taken: AbstractSet[int] = frozenset()
    ) -> list[int]:
        """Return up to `num_groups` group ids; the last prompt may have fewer groups."""
        chosen: dict[int, None] = {}
        for group_id in random.permutation([key.group_id for key in candidates.ready]).tolist():
            if group_id not in taken and group_id not in chosen:
                others = (each for each in candidates.same_prompt(group_id) if each not in (*taken, *chosen, group_id))
                chosen |= dict.fromkeys([group_id, *islice(others, self.num_others)])
            if len(chosen) >= num_groups:
                break
        return list(chosen)[:num_groups]


same_prompt = SamePrompt(num_others=1)
