"""Samplers of one's own: `buffer.sampler = "samplers.py:NAME"`, NAME being hard_ones, newest_first or same_prompt."""

from collections.abc import Set as AbstractSet
from itertools import islice

from numpy.random import Generator

from buffer.index import GroupIndex
from buffer.tables import Group


def hard_ones(group: Group, oldest: int) -> float:
    """Prompts that are seldom solved, the recent ones first: the logarithm of a group's weight in a draw by chance."""
    return -2.0 * (group.mean_reward or 0.0) + oldest / 16


class NewestFirst:
    """Chooses by itself: the groups whose tokens are the newest."""

    def choose(
        self, candidates: GroupIndex, num_groups: int, random: Generator, taken: AbstractSet[int] = frozenset()
    ) -> list[int]:
        """Up to `num_groups` ids of groups."""
        ready = [key.group_id for key in reversed(candidates.ready) if key.group_id not in taken]
        return ready[:num_groups]


newest_first = NewestFirst()


class SamePrompt:
    """Draws groups by chance, each followed by others of its prompt, so that a loss can compare policy versions."""

    def __init__(self, num_others: int) -> None:
        """Bring up to `num_others` other groups of its prompt with each group, those leased last first."""
        self.num_others = num_others

    def choose(
        self, candidates: GroupIndex, num_groups: int, random: Generator, taken: AbstractSet[int] = frozenset()
    ) -> list[int]:
        """Return up to `num_groups` ids; the last prompt may have fewer groups."""
        chosen: dict[int, None] = {}
        for group_id in random.permutation([key.group_id for key in candidates.ready]).tolist():
            if group_id not in taken and group_id not in chosen:
                others = (each for each in candidates.same_prompt(group_id) if each not in (*taken, *chosen, group_id))
                chosen |= dict.fromkeys([group_id, *islice(others, self.num_others)])
            if len(chosen) >= num_groups:
                break
        return list(chosen)[:num_groups]


same_prompt = SamePrompt(num_others=1)
