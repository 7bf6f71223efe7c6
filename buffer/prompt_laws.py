"""Prompt laws: which prompts are leased next, and of how many samples their groups are. Used by leases, and by their
simulation.

    epoch      the data's order: each epoch of it has every prompt once
    uniform    by chance, every prompt alike
    posterior  by chance, in proportion to E[p (1 - p)], but for a share that is drawn all alike; p is how often the
               policy answers the prompt with success

p (1 - p) is half the chance that two samples of a prompt differ in their success; it is greatest at p = 1/2. The
posterior of p is a Beta distribution:

    p ~ Beta(a, b),   a = 1 + sum_i d_i s_i,   b = 1 + sum_i d_i (1 - s_i),   d_i = exp(-age_i / tau)
    E[p (1 - p)] = a b / ((a + b) (a + b + 1))

over all samples i of the prompt; s_i is 1 where it succeeded, and 0 where not; its age is in policy versions. A prompt
of which nothing is known, or all is long ago, has the uniform distribution and the weight 1/6; the greatest is 1/4. The
expectation is what drawing p from its posterior and weighing by p (1 - p) comes to on average, without the noise.

A group of K samples is informative where some of them succeed, and some do not:

    I(K) = 1 - E[p^K + (1 - p)^K] = 1 - (B(a + K, b) + B(a, b + K)) / B(a, b),   1 - 2 / (K + 1) where nothing is known

A prompt that fails more often than not may have more samples: as many as make its group as likely to be informative as
that of a prompt of which nothing is known.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from math import exp, lgamma
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
LawName = Literal["epoch", "uniform", "posterior"]

_PRIOR = 1.0
"""Successes and failures of a prompt before its first sample."""
FLOOR = 0.1
"""This share of the prompts is drawn all alike, so that each is seen now and then."""
_AT_ONCE = 4
"""One prompt in so many is drawn at once, at most: were all of them drawn, none would be preferred."""
_BY_CHANCE = 3
"""Tells the chance of prompts from that of draws, under one seed."""
_ROUNDING = 1e-9
"""Chances that differ by no more are the same."""


class Tries(msgspec.Struct, frozen=True, array_like=True):
    """Samples of a prompt by their success, as they counted at a version."""

    passed: float
    failed: float
    version: int


class SuccessModel:
    """How often each prompt of a store is answered with success, by their ids from 0."""

    def __init__(self, num_prompts: int, tau: float) -> None:
        """Nothing is known; after `tau` versions a sample counts 1/e of a new one."""
        self._tau = tau
        self._passed, self._failed = np.zeros(num_prompts), np.zeros(num_prompts)
        self._versions = np.zeros(num_prompts, np.int64)
        self._is_known = np.zeros(num_prompts, np.bool_)

    def put(self, prompt: int, tries: Tries | None) -> None:
        """What is known of a prompt; None: nothing."""
        known = Tries(0.0, 0.0, 0) if tries is None else tries
        self._passed[prompt], self._failed[prompt], self._versions[prompt] = known.passed, known.failed, known.version
        self._is_known[prompt] = tries is not None

    def get(self, prompt: int) -> Tries | None:
        """As it was put."""
        if not self._is_known[prompt]:
            return None
        return Tries(float(self._passed[prompt]), float(self._failed[prompt]), int(self._versions[prompt]))

    def see(self, prompt: int, num_passed: int, num_failed: int, version: int) -> Tries:
        """Samples of a prompt came, the learner being at a version; what is known of the prompt now."""
        before = self.get(prompt) or Tries(0.0, 0.0, version)
        left = exp(-max(0, version - before.version) / self._tau)
        tries = Tries(left * before.passed + num_passed, left * before.failed + num_failed, version)
        self.put(prompt, tries)
        return tries

    def weights(self, prompts: Ids, version: int) -> Floats:
        """E[p (1 - p)] of each of these prompts at a version; above 0."""
        a, b = self.posteriors(prompts, version)
        weights: Floats = a * b / ((a + b) * (a + b + 1.0))
        return weights

    def posteriors(self, prompts: Ids, version: int) -> tuple[Floats, Floats]:
        """The parameters a and b of each of these prompts at a version."""
        left = np.exp(-np.maximum(0, version - self._versions[prompts]) / self._tau)
        return _PRIOR + left * self._passed[prompts], _PRIOR + left * self._failed[prompts]


def rate_of(tries: Tries) -> float:
    """Mean of the posterior of a prompt's rate of success, at the version of its last samples."""
    return (_PRIOR + tries.passed) / (2 * _PRIOR + tries.passed + tries.failed)


def chance_informative(a: float, b: float, num_samples: int) -> float:
    """I(K): that of so many samples of a prompt some succeed and some do not, p being Beta(a, b)."""

    def all_alike(these: float, others: float) -> float:
        given, then = lgamma(these + others) - lgamma(these), lgamma(these + num_samples)
        return exp(given + then - lgamma(these + others + num_samples))

    return 1.0 - all_alike(a, b) - all_alike(b, a)


class GroupSizes:
    """Of how many samples the groups of prompts are."""

    def __init__(self, group_size: int, most: int = 0, successes: SuccessModel | None = None) -> None:
        """All of K; or, by what is known of their success, of K to `most`."""
        self._group_size, self._most, self._successes = group_size, most, successes
        self._enough = chance_informative(_PRIOR, _PRIOR, group_size) - _ROUNDING

    def of(self, prompts: Ids, version: int) -> Ids:
        """Of each of these prompts at a version; the same whenever it is asked."""
        if self._successes is None or self._most <= self._group_size:
            return np.full(len(prompts), self._group_size)
        posteriors = self._successes.posteriors(prompts, version)
        return np.array([self._size(a, b) for a, b in zip(*(each.tolist() for each in posteriors), strict=True)])

    def _size(self, a: float, b: float) -> int:
        if a >= b:
            return self._group_size
        sizes = range(self._group_size, self._most)
        return self._group_size + bisect_left(sizes, self._enough, key=lambda size: chance_informative(a, b, size))


class PromptLaw(Protocol):
    """Which prompts are next."""

    in_order: bool
    """They may be taken one by one as well as many at once."""

    def ahead(self, first: int, many: int, version: int) -> Ids:
        """Up to `many` of them, at least one, where `first` were taken before; the same whenever it is asked."""


class EpochOrder:
    """The data's order."""

    in_order = True

    def __init__(self, own: Ids, seed: int) -> None:
        """Of the prompts with these ids."""
        self._own, self._seed = own, seed

    def ahead(self, first: int, many: int, version: int) -> Ids:
        """As `PromptLaw`; all that are asked for, of several epochs where one does not have them."""
        size, parts = len(self._own), []
        while many:
            epoch, place = divmod(first, size)
            parts.append(self._own[order_of(self._seed, epoch, size)[place : place + many]])
            first, many = first + len(parts[-1]), many - len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class ByChance:
    """One after the other, by chance; none twice among those that are drawn at once."""

    in_order = False

    def __init__(self, own: Ids, seed: int, successes: SuccessModel | None = None) -> None:
        """Of the prompts with these ids: alike, or by what is known of their success, but for the share `FLOOR`."""
        self._own, self._seed, self._successes = own, seed, successes

    def ahead(self, first: int, many: int, version: int) -> Ids:
        """As `PromptLaw`."""
        random = np.random.default_rng([self._seed & 0xFFFFFFFF, _BY_CHANCE, first])
        many = min(many, max(1, len(self._own) // _AT_ONCE))
        drawn: Ids = random.choice(self._own, many, replace=False, p=self.chances(version))
        return drawn

    def chances(self, version: int) -> Floats | None:
        """Of each prompt to be the next; None: all alike."""
        if self._successes is None:
            return None
        weights = self._successes.weights(self._own, version)
        chances: Floats = (1.0 - FLOOR) * weights / weights.sum() + FLOOR / len(weights)
        return chances


@lru_cache(maxsize=3)
def order_of(seed: int, epoch: int, num_prompts: int) -> Ids:
    """The order of prompts in one epoch of the data: the same after every restart."""
    return np.random.default_rng([seed & 0xFFFFFFFF, epoch]).permutation(num_prompts)
