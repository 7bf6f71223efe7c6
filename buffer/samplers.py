"""Samplers: which of the eligible groups enter a step.

A sampler is a frozen object with one method that chooses. It sees the eligible groups through `Candidates`,
whose methods are look-ups in an index, so that no sampler reads them all; and all its chance comes from
the generator it is given, so that a draw can be repeated.

    Fifo            the oldest tokens first
    Weighted        by chance, in proportion to a weight: Uniform, RewardSoftmax or Prioritised
    LengthBalanced  from every length in proportion to how many there are, oldest first within it
    OnPolicyShare   a share of the newest tokens, the rest by another sampler
    SamePrompt      what another sampler takes, each with other groups of its prompt
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from buffer.config import BufferConfig
from buffer.tables import Group

EPSILON = 0.01
"""Of `Prioritised`: a group whose rewards are all the same keeps a chance, a hundredth of one whose spread is 1."""
NOTHING: frozenset[int] = frozenset()
_FINENESS = 2**32
"""Into how many parts `systematic_shares` divides the distance of two marks."""


class ReadyGroup(NamedTuple):
    """A group that may be drawn."""

    oldest: int
    """Version that its oldest token counts with."""
    group_id: int


class WeightedPicker(Protocol):
    """Draws groups by weight; `buffer.sum_tree.Picker`."""

    def pick(self, random: np.random.Generator) -> int | None:
        """A group; None where none is left."""
        ...

    def take_out(self, item: int) -> None:
        """Never draw this group again."""
        ...


class Candidates(Protocol):
    """The eligible groups of one transaction; `buffer.eligible.Eligible` offers them."""

    def in_order(self, *, newest_first: bool = False) -> Iterator[ReadyGroup]:
        """By the version of their oldest token."""
        ...

    def picker(self) -> WeightedPicker:
        """To draw by the sampler's own weights."""
        ...

    def strata(self) -> Mapping[int, int]:
        """How many there are in each length bucket."""
        ...

    def stratum(self, bucket: int) -> Iterator[int]:
        """The groups of one bucket, oldest first."""
        ...

    def bucket(self, group_id: int) -> int:
        """The length bucket of a group."""
        ...

    def uses_left(self, group_id: int) -> float:
        """How many more times the group may be used."""
        ...

    def of_same_prompt(self, group_id: int) -> Iterator[int]:
        """The other eligible groups of its prompt, those leased last first."""
        ...


class Sampler(Protocol):
    """Chooses groups for a step."""

    @property
    def weight(self) -> Weight | None:
        """What the sum tree holds for this sampler; None where it needs none."""
        ...

    @property
    def needs_strata(self) -> bool:
        """Does it ask for strata?"""
        ...

    def choose(
        self, candidates: Candidates, num_groups: int, random: np.random.Generator, taken: AbstractSet[int] = NOTHING
    ) -> list[int]:
        """Up to `num_groups` group ids; fewer where there are no more.

        Args:
            candidates: groups within the age bound.
            num_groups: how many to choose.
            random: the only source of chance.
            taken: groups that another sampler has chosen already.
        """
        ...


class Weight(Protocol):
    """A group's weight in a draw by chance."""

    def log_weight(self, group: Group, oldest: int) -> float:
        """Its logarithm, up to a constant; fixed for as long as the group waits.

        Args:
            group: complete, so with its rewards.
            oldest: the version that its oldest token counts with.
        """
        ...


@dataclass(frozen=True)
class Uniform:
    """Every group alike."""

    def log_weight(self, group: Group, oldest: int) -> float:
        """0."""
        return 0.0


@dataclass(frozen=True)
class RewardSoftmax:
    """exp(mean reward / temperature)."""

    temperature: float

    def log_weight(self, group: Group, oldest: int) -> float:
        """Mean reward over temperature; a group whose rewards are unknown counts as 0."""
        return (group.mean_reward or 0.0) / self.temperature


@dataclass(frozen=True)
class Prioritised:
    """(spread of the rewards + `EPSILON`)^alpha * exp(-age / tau), age in versions.

    A group whose samples all have the same reward teaches little: its advantages are 0. Every group's
    age grows alike, so the ratio of two weights never changes, and exp(oldest / tau) stands for
    exp(-age / tau) at every version.
    """

    alpha: float
    tau: float

    def log_weight(self, group: Group, oldest: int) -> float:
        """The logarithm of priority^alpha * exp(oldest / tau)."""
        return self.alpha * math.log(group.reward_spread + EPSILON) + oldest / self.tau


@dataclass(frozen=True)
class Fifo:
    """Oldest tokens first."""

    weight: ClassVar[None] = None
    needs_strata: ClassVar[bool] = False

    def choose(
        self, candidates: Candidates, num_groups: int, random: np.random.Generator, taken: AbstractSet[int] = NOTHING
    ) -> list[int]:
        """The first `num_groups`."""
        return _first(num_groups, (key.group_id for key in candidates.in_order()), taken)


@dataclass(frozen=True)
class Weighted:
    """By chance, in proportion to weight; a group that was drawn is out, or stays in for the same step."""

    weight: Weight
    with_replacement: bool
    needs_strata: ClassVar[bool] = False

    def choose(
        self, candidates: Candidates, num_groups: int, random: np.random.Generator, taken: AbstractSet[int] = NOTHING
    ) -> list[int]:
        """One after another."""
        picker = candidates.picker()
        for each in taken:
            picker.take_out(each)
        chosen: Counter[int] = Counter()
        order: list[int] = []
        while len(order) < num_groups and (group_id := picker.pick(random)) is not None:
            order.append(group_id)
            chosen[group_id] += 1
            if not self.with_replacement or chosen[group_id] >= candidates.uses_left(group_id):
                picker.take_out(group_id)
        return order


@dataclass(frozen=True)
class LengthBalanced:
    """From every length bucket in proportion to the groups that wait in it, so that no length starves.

    The shares of a step are whole numbers; systematic sampling with a random start makes each right on
    average, so that a bucket of one in a thousand gets its turn too.
    """

    weight: ClassVar[None] = None
    needs_strata: ClassVar[bool] = True

    def choose(
        self, candidates: Candidates, num_groups: int, random: np.random.Generator, taken: AbstractSet[int] = NOTHING
    ) -> list[int]:
        """The buckets' shares, the shortest first."""
        counts = dict(candidates.strata())
        for group_id in taken:
            counts[candidates.bucket(group_id)] -= 1
        chosen: list[int] = []
        for bucket, share in systematic_shares(counts, num_groups, float(random.random())).items():
            chosen += _first(share, candidates.stratum(bucket), taken)
        return chosen


@dataclass(frozen=True)
class OnPolicyShare:
    """A share m of the newest tokens, the rest by another sampler (trajectory balance with asynchrony, TBA).

    The newest keep the learner near its own policy; the rest is replay. m * G need not be a whole number:
    it is rounded up or down by chance, so that the newest have the share m on average over steps.
    """

    share: float
    rest: Sampler

    @property
    def weight(self) -> Weight | None:
        """That of the other sampler."""
        return self.rest.weight

    @property
    def needs_strata(self) -> bool:
        """Does the other sampler?"""
        return self.rest.needs_strata

    def choose(
        self, candidates: Candidates, num_groups: int, random: np.random.Generator, taken: AbstractSet[int] = NOTHING
    ) -> list[int]:
        """The newest and the rest, in an order of chance: the first few of them have the same shares."""
        num_newest = min(num_groups, math.floor(self.share * num_groups + random.random()))
        newest = _first(num_newest, (key.group_id for key in candidates.in_order(newest_first=True)), taken)
        chosen = newest + self.rest.choose(candidates, num_groups - len(newest), random, taken | set(newest))
        return [chosen[i] for i in random.permutation(len(chosen))]


@dataclass(frozen=True)
class SamePrompt:
    """What another sampler takes, each group followed by others of its prompt, so that a loss can compare them.

    The other sampler must choose in an order that can be cut off: its later choices make room.
    """

    sampler: Sampler
    num_others: int
    """The most others of a prompt that follow each group that the sampler takes."""
    needs_strata: ClassVar[bool] = False

    @property
    def weight(self) -> Weight | None:
        """That of the other sampler."""
        return self.sampler.weight

    def choose(
        self, candidates: Candidates, num_groups: int, random: np.random.Generator, taken: AbstractSet[int] = NOTHING
    ) -> list[int]:
        """The sampler's choices in their order, each with the others of its prompt."""
        chosen: dict[int, None] = {}
        for group_id in self.sampler.choose(candidates, num_groups, random, taken):
            if group_id in chosen:
                continue  # it came as another of its prompt, and brings none
            chosen[group_id] = None
            free = (each for each in candidates.of_same_prompt(group_id) if each not in taken and each not in chosen)
            chosen.update(dict.fromkeys(islice(free, self.num_others)))
            if len(chosen) >= num_groups:
                break
        return list(chosen)[:num_groups]


def build(config: BufferConfig) -> Sampler:
    """The sampler that the configuration names."""
    if config.sampler == "on_policy_share":
        sampler: Sampler = OnPolicyShare(config.on_policy_share, _simple(config.replay_sampler, config))
    else:
        sampler = _simple(config.sampler, config)
    return SamePrompt(sampler, config.groups_per_prompt - 1) if config.groups_per_prompt > 1 else sampler


def systematic_shares(counts: Mapping[int, int], num: int, start: float) -> dict[int, int]:
    """Divide `num` among strata in proportion to their counts, none getting more than it has.

    Args:
        counts: how many each stratum has.
        num: how many are wanted; capped at what there is.
        start: in [0, 1): where on the line of all counts the first of `num` evenly spaced marks lies, in
            units of their spacing.
    """
    total = sum(counts.values())
    num = min(num, total)
    offset = int(start * _FINENESS)  # whole numbers throughout: a rounded mark could fall into the next stratum
    shares: dict[int, int] = {}
    marks = below = 0
    for stratum in sorted(counts):
        below += counts[stratum]
        # Mark i lies at (start + i) * total / num: count those below the end of this stratum.
        passed = -((offset * total - below * num * _FINENESS) // (total * _FINENESS)) if total else 0
        shares[stratum] = passed - marks
        marks = passed
    return shares


def _simple(name: str, config: BufferConfig) -> Sampler:
    match name:
        case "fifo":
            return Fifo()
        case "length_balanced":
            return LengthBalanced()
        case "uniform":
            weight: Weight = Uniform()
        case "reward_softmax":
            weight = RewardSoftmax(config.reward_temperature)
        case "prioritised":
            weight = Prioritised(config.priority_alpha, config.age_tau)
        case _:
            raise AssertionError(f"the configuration lets no sampler '{name}' pass")
    return Weighted(weight, config.with_replacement)


def _first(num: int, ids: Iterable[int], taken: AbstractSet[int]) -> list[int]:
    return list(islice((group_id for group_id in ids if group_id not in taken), num))
