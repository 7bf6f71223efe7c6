"""Samplers of one's own: `buffer.sampler = "samplers.py:hard_ones"`, or `"samplers.py:newest_first"`."""

from collections.abc import Set as AbstractSet

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
