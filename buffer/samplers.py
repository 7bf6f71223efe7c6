"""Samplers, which choose the groups of a step among the eligible groups.

A sampler is a frozen object with one method. A sampler reads the eligible groups from the index, reads no rows, and
uses only the given random generator, so that a draw is reproducible.

    Fifo           groups with the oldest tokens first
    Weighted       at random, in proportion to a weight: `uniform`, `reward_softmax` or `prioritised`
    OnPolicyShare  a fraction of groups with the newest tokens, the rest by another sampler
    FromFile       a user's sampler, with its choices validated
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

from leeway.buffer.config import BufferConfig
from leeway.buffer.errors import BufferRefused
from leeway.buffer.index import GroupIndex, Weight
from leeway.buffer.tables import Group
from leeway.common.user_input import UserFileError, is_reference, load_object

_log = logging.getLogger(__name__)

Random = np.random.Generator
Ids = AbstractSet[int]

REWARD_TEMPERATURE = 0.2
"""Temperature of `reward_softmax`: a group of reward 1 is drawn 150 times as often as one of reward 0."""
EPSILON = 0.01
"""Added to the reward spread in `prioritised`, so that groups of equal rewards have a weight."""
TAU = 8.0
"""Number of versions after which the weight of a group in `prioritised` has decayed by a factor of e."""
NOTHING: frozenset[int] = frozenset()


class Sampler(Protocol):
    def choose(self, candidates: GroupIndex, num_groups: int, random: Random, taken: Ids = NOTHING) -> list[int]:
        """Return up to `num_groups` group ids of the ready `candidates`, excluding those `taken` by another sampler."""
        ...


def uniform(_group: Group, _oldest: int) -> float:
    return 0.0


def reward_softmax(group: Group, oldest: int) -> float:
    """Weigh by exp(mean reward / `REWARD_TEMPERATURE`); unknown rewards count as 0."""
    return (group.mean_reward or 0.0) / REWARD_TEMPERATURE


def prioritised(group: Group, oldest: int) -> float:
    """Weigh by (spread of the rewards + `EPSILON`) * exp(-age / `TAU`), age in versions.

    Groups of equal rewards carry little signal. All ages grow equally, so exp(oldest / TAU) replaces exp(-age / TAU).
    """
    return math.log(group.reward_spread + EPSILON) + oldest / TAU


@dataclass(frozen=True)
class Fifo:
    """Sampler that draws the groups with the oldest tokens first."""

    def choose(self, candidates: GroupIndex, num_groups: int, random: Random, taken: Ids = NOTHING) -> list[int]:
        return _first(num_groups, (key.group_id for key in candidates.ready), taken)


@dataclass(frozen=True)
class Weighted:
    """Sampler that draws at random in proportion to weight, without replacement."""

    def choose(self, candidates: GroupIndex, num_groups: int, random: Random, taken: Ids = NOTHING) -> list[int]:
        return candidates.by_weight(num_groups, random, taken)


@dataclass(frozen=True)
class OnPolicyShare:
    """Sampler of trajectory balance with asynchrony (TBA): a fraction m of newest groups, and other groups by `rest`.

    m * G is rounded up or down at random, so that the newest groups make up the fraction m on average over steps.
    """

    share: float
    rest: Sampler

    def choose(self, candidates: GroupIndex, num_groups: int, random: Random, taken: Ids = NOTHING) -> list[int]:
        """Return the newest and the other groups in random order, so that every prefix has the same expected mix."""
        num_newest = min(num_groups, math.floor(self.share * num_groups + random.random()))
        newest = _first(num_newest, (key.group_id for key in reversed(candidates.ready)), taken)
        chosen = newest + self.rest.choose(candidates, num_groups - len(newest), random, taken | set(newest))
        return [chosen[i] for i in random.permutation(len(chosen))]


@dataclass(frozen=True)
class FromFile:
    """Wrapper of a user's sampler that reports errors and invalid choices with the user's file."""

    setting: str
    sampler: Sampler

    def choose(self, candidates: GroupIndex, num_groups: int, random: Random, taken: Ids = NOTHING) -> list[int]:
        """Return the sampler's choices; raise BufferRefused if it fails or returns too many or unavailable groups."""
        try:
            chosen = [int(group_id) for group_id in self.sampler.choose(candidates, num_groups, random, taken)]
        except Exception as error:
            raise BufferRefused(f"{self.setting} raised {type(error).__name__}: {error}") from error
        free = {key.group_id for key in candidates.ready} - taken
        wrong = [group_id for group_id, count in Counter(chosen).items() if count > 1 or group_id not in free]
        if wrong or len(chosen) > num_groups:
            what = f"group {wrong[0]}, which is already drawn or not ready" if wrong else f"{len(chosen)} groups"
            raise BufferRefused(
                f"{self.setting} chose {what}: return up to {num_groups} different ids from candidates.ready, "
                "excluding those in taken"
            )
        return chosen


def from_file(key: str, reference: str) -> tuple[Sampler | None, Weight | None]:
    """Return the sampler or the weight function FILE.py:NAME, which `key` refers to.

    Raise UserFileError if the object is neither a sampler nor a function, or fails on an example group.
    """
    found, setting = load_object(reference), f"buffer.{key} = '{reference}'"
    if isinstance(found, type):
        raise UserFileError(f"{setting} is a class: name an instance, such as NAME = {found.__name__}()")
    if hasattr(found, "choose"):
        return FromFile(setting, cast("Sampler", found)), None
    if callable(found):
        try:
            float(found(_example_group(), 0))
        except Exception as error:
            raise UserFileError(
                f"{setting} raised {type(error).__name__} on a group of two samples: {error}. Define a function of a "
                "group and the version of its oldest token that returns the logarithm of the group's weight"
            ) from error
        return None, _checked(setting, cast("Weight", found))
    raise UserFileError(
        f"{setting} is neither an object with choose(candidates, num_groups, random, taken) nor a "
        "function (group, oldest) that returns the logarithm of a group's weight"
    )


def _example_group() -> Group:
    """Return a complete, synthetic group."""
    group = Group.new(1, 0, 2)
    group.sample_states, group.records, group.rewards = ["waiting"] * 2, [1, 2], [0.0, 1.0]
    group.lengths, group.completion_lengths = [16, 16], [8, 8]
    group.phase, group.attempt, group.issued, group.oldest = "ready", 1, 2, (0, 0)
    return group


def _checked(setting: str, weight: Weight) -> Weight:
    """Wrap a user's weight function: if it raises or returns NaN, the group has weight 1.

    Failures number 1, 2, 4, 8 and so on are logged.
    """
    failures = count(1)

    def checked(group: Group, oldest: int) -> float:
        error = None
        try:
            if not math.isnan(found := float(weight(group, oldest))):
                return found
            what = "returned NaN for"
        except Exception as raised:  # an error in a user's file must not prevent storing a complete group
            what, error = "failed on", raised
        if (number := next(failures)) & (number - 1) == 0:
            text = "%s %s group %d, which now has weight 1; failures so far: %d"
            _log.error(text, setting, what, group.group_id, number, exc_info=error)
        return 0.0

    return checked


def build(config: BufferConfig) -> tuple[Sampler, Weight | None]:
    """Return the configured sampler and its weight function; raise UserFileError if a user's file is invalid."""
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
