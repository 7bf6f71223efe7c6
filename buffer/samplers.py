"""Samplers: which of the eligible groups enter a step.

A sampler is a frozen object with one method. It sees the eligible groups in the index, reads no row, and uses only the
generator it is given, so that a draw can be repeated.

    Fifo           the oldest tokens first
    Weighted       by chance, in proportion to a weight: `uniform`, `reward_softmax` or `prioritised`
    OnPolicyShare  a share of the newest tokens, the rest by another sampler
    FromFile       what a sampler of a user's takes, which is checked
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import count, islice
from typing import Protocol, cast

import numpy as np

from buffer.config import BufferConfig
from buffer.errors import BufferRefused
from buffer.index import GroupIndex, Weight
from buffer.tables import Group
from common.user_input import UserFileError, is_reference, load_object

_log = logging.getLogger(__name__)

Random = np.random.Generator
Ids = AbstractSet[int]

REWARD_TEMPERATURE = 0.2
"""Of `reward_softmax`: a group of reward 1 is drawn 150 times as often as one of reward 0."""
EPSILON = 0.01
"""Of `prioritised`: weight of a group whose rewards are all equal, as if their spread were so large."""
TAU = 8.0
"""Of `prioritised`: versions after which the weight of a group has fallen by e."""
NOTHING: frozenset[int] = frozenset()


class Sampler(Protocol):
    def choose(self, candidates: GroupIndex, num_groups: int, random: Random, taken: Ids = NOTHING) -> list[int]:
        """Return up to `num_groups` group ids of the ready `candidates`, without those `taken` by another sampler."""
        ...


def uniform(_group: Group, _oldest: int) -> float:
    return 0.0


def reward_softmax(group: Group, oldest: int) -> float:
    """exp(mean reward / `REWARD_TEMPERATURE`); a group whose rewards are unknown counts as one of reward 0."""
    return (group.mean_reward or 0.0) / REWARD_TEMPERATURE


def prioritised(group: Group, oldest: int) -> float:
    """(spread of the rewards + `EPSILON`) * exp(-age / `TAU`), age in versions.

    A group of equal rewards teaches little. All ages grow alike, so exp(oldest / TAU) stands for exp(-age / TAU).
    """
    return math.log(group.reward_spread + EPSILON) + oldest / TAU


@dataclass(frozen=True)
class Fifo:
    """Takes the groups with the oldest tokens first."""

    def choose(self, candidates: GroupIndex, num_groups: int, random: Random, taken: Ids = NOTHING) -> list[int]:
        return _first(num_groups, (key.group_id for key in candidates.ready), taken)


@dataclass(frozen=True)
class Weighted:
    """By chance, in proportion to weight; a group that was drawn is out."""

    def choose(self, candidates: GroupIndex, num_groups: int, random: Random, taken: Ids = NOTHING) -> list[int]:
        return candidates.by_weight(num_groups, random, taken)


@dataclass(frozen=True)
class OnPolicyShare:
    """A share m of the newest tokens, the rest by another sampler (trajectory balance with asynchrony, TBA).

    m * G is rounded up or down by chance, so that the newest have the share m on average over steps.
    """

    share: float
    rest: Sampler

    def choose(self, candidates: GroupIndex, num_groups: int, random: Random, taken: Ids = NOTHING) -> list[int]:
        """The newest and the rest, in an order of chance: the first few of them have the same shares."""
        num_newest = min(num_groups, math.floor(self.share * num_groups + random.random()))
        newest = _first(num_newest, (key.group_id for key in reversed(candidates.ready)), taken)
        chosen = newest + self.rest.choose(candidates, num_groups - len(newest), random, taken | set(newest))
        return [chosen[i] for i in random.permutation(len(chosen))]


@dataclass(frozen=True)
class FromFile:
    """A sampler of a user's: what it raises and what it takes wrongly names its file."""

    setting: str
    sampler: Sampler

    def choose(self, candidates: GroupIndex, num_groups: int, random: Random, taken: Ids = NOTHING) -> list[int]:
        """Return the sampler's choices; BufferRefused if it raised, or took too many or what is not to be had."""
        try:
            chosen = [int(group_id) for group_id in self.sampler.choose(candidates, num_groups, random, taken)]
        except Exception as error:
            raise BufferRefused(f"{self.setting} raised {type(error).__name__}: {error}") from error
        free = {key.group_id for key in candidates.ready} - taken
        wrong = [group_id for group_id, count in Counter(chosen).items() if count > 1 or group_id not in free]
        if wrong or len(chosen) > num_groups:
            what = f"group {wrong[0]}, which is taken or not ready" if wrong else f"{len(chosen)} groups"
            raise BufferRefused(
                f"{self.setting} took {what}: it is to take up to {num_groups} different ids "
                "out of candidates.ready without those in taken"
            )
        return chosen


def from_file(key: str, reference: str) -> tuple[Sampler | None, Weight | None]:
    """Return the sampler, or the weight that groups are drawn by, of FILE.py:NAME, which `key` names.

    UserFileError if it is neither, or fails on an ordinary group.
    """
    found, setting = load_object(reference), f"buffer.{key} = '{reference}'"
    if isinstance(found, type):
        raise UserFileError(f"{setting} is a class: name an object of it, as NAME = {found.__name__}()")
    if hasattr(found, "choose"):
        return FromFile(setting, cast("Sampler", found)), None
    if callable(found):
        try:
            float(found(_ordinary_group(), 0))
        except Exception as error:
            raise UserFileError(
                f"{setting} raised {type(error).__name__} on a group of two samples: {error}; it is called with a "
                "group and the version of its oldest token, and gives the logarithm of the group's weight"
            ) from error
        return None, _checked(setting, cast("Weight", found))
    raise UserFileError(
        f"{setting} is neither an object with choose(candidates, num_groups, random, taken) nor a "
        "function (group, oldest) that gives the logarithm of a group's weight"
    )


def _ordinary_group() -> Group:
    """One that is complete, as nobody made it."""
    group = Group.new(1, 0, 2)
    group.sample_states, group.records, group.rewards = ["waiting"] * 2, [1, 2], [0.0, 1.0]
    group.lengths, group.completion_lengths = [16, 16], [8, 8]
    group.phase, group.attempt, group.issued, group.oldest = "ready", 1, 2, (0, 0)
    return group


def _checked(setting: str, weight: Weight) -> Weight:
    """Wrap a user's weight: if it raises or does not return a number, the group has the weight 1.

    The first failure is logged, and each that doubles their number.
    """
    failures = count(1)

    def checked(group: Group, oldest: int) -> float:
        error = None
        try:
            if not math.isnan(found := float(weight(group, oldest))):
                return found
            what = "gave NaN for"
        except Exception as raised:  # a group that is complete is stored, whatever a file of the user's does
            what, error = "failed on", raised
        if (number := next(failures)) & (number - 1) == 0:
            text = "%s %s group %d, which has weight 1; failures so far: %d"
            _log.error(text, setting, what, group.group_id, number, exc_info=error)
        return 0.0

    return checked


def build(config: BufferConfig) -> tuple[Sampler, Weight | None]:
    """Return the sampler of the configuration, and its weight; UserFileError if a user's file has none."""
    key = "replay_sampler" if config.sampler == "on_policy_share" else "sampler"
    name = getattr(config, key)
    sampler: Sampler | None = Fifo() if name == "fifo" else None
    weight: Weight | None = {"uniform": uniform, "reward_softmax": reward_softmax, "prioritised": prioritised}.get(name)
    if is_reference(name):
        sampler, weight = from_file(key, name)
    sampler = sampler or Weighted()
    if config.sampler == "on_policy_share":
        sampler = OnPolicyShare(config.on_policy_share, sampler)
    return sampler, weight


def _first(num: int, ids: Iterable[int], taken: Ids) -> list[int]:
    return list(islice((group_id for group_id in ids if group_id not in taken), num))
