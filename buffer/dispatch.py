"""Which prompt is next, and for whom: prompt laws and dispatch. Used by leases, and by their simulation.

A law says which prompts are leased next.

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

The next prompts of a law that draws by chance wait in a window, and dispatch chooses which of them goes to the actor
that asks. A new window begins where the old one is empty: every prompt leaves it, so dispatch decides who generates
what, and not what is trained. `buffer.dispatch = "in_order"` gives the first that waits (`buffer.prompts`); the others
lie in `planning.dispatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from math import exp, inf
from typing import Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from common.staleness import StalenessContract

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
PolicyName = Literal["in_order", "longest_first", "by_deadline"]
LawName = Literal["epoch", "uniform", "posterior"]

WINDOW_STEPS = 4
"""A window has the prompts of so many steps: with more of them the fast lanes find more that is late, and the steps of
a window are less alike."""
MOST_LOOKED_AT = 32
"""Prompts that came back, for each lease."""
_NEWEST = 0.1
"""Weight of the newest in running means."""
_PRIOR = 1.0
"""Successes and failures of a prompt before its first sample."""
FLOOR = 0.1
"""This share of the prompts is drawn all alike, so that each is seen now and then."""
_AT_ONCE = 4
"""One prompt in so many is drawn at once, at most: were all of them drawn, none would be preferred."""
_BY_CHANCE = 3
"""Tells the chance of prompts from that of most draws, under one seed. NumPy pads seeds with zeros: draws of step 3
share it, and the order of epoch n shares that of step n by incarnation 0 there."""


def likely_tokens(there: float) -> float:
    """How long a sample becomes of which so many tokens are there: what ran long is likely to run as long again."""
    return 2.0 * there


class Pace:
    """How long a step takes; forgets."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._drawn_s = self._finished_s = -inf
        self.step_s = self.train_s = 0.0
        """From a step's end to the next one's; and of it from its draw. 0: not known yet."""

    def undo(self) -> Callable[[], None]:
        """What makes it know again what it knows now."""
        return partial(self.__dict__.update, dict(self.__dict__))

    def begun(self) -> None:
        """A learner begins: the time without one is no part of a step."""
        self._finished_s = -inf

    def drawn(self) -> None:
        self._drawn_s = self._clock()

    def finished(self) -> None:
        now_s = self._clock()
        if self._finished_s > -inf:
            step_s, train_s = now_s - self._finished_s, now_s - max(self._drawn_s, self._finished_s)
            weight = _NEWEST if self.step_s else 1.0
            self.step_s += weight * (step_s - self.step_s)
            self.train_s += weight * (train_s - self.train_s)
        self._finished_s = now_s

    def budget_s(self, contract: StalenessContract) -> float:
        """From a lease to the draw of the step that is to use its group; infinite where that is not known."""
        if contract.bound() is None or not self.step_s:
            return inf
        return contract.capacity() // contract.groups_per_step * self.step_s - self.train_s


class Waiting(NamedTuple):
    """A prompt of the window."""

    order: int
    """Its place in the data's order, all epochs counted."""
    prompt_id: int
    longest: float
    """Predicted tokens of the longest of its samples."""


class Window:
    """The prompts that wait, in the data's order."""

    def __init__(self) -> None:
        self._in_order: dict[int, Waiting] = {}

    def __len__(self) -> int:
        return len(self._in_order)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._in_order.values())

    def put(self, waiting: Waiting) -> None:
        """One more waits; or waits again, where its lease was not committed."""
        is_back = bool(self._in_order) and waiting.order < next(reversed(self._in_order))
        self._in_order[waiting.order] = waiting
        if is_back:
            self._in_order = dict(sorted(self._in_order.items()))

    def take(self, waiting: Waiting) -> None:
        del self._in_order[waiting.order]


def window_size(groups_per_step: int) -> int:
    return WINDOW_STEPS * groups_per_step


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


class PromptLaw(Protocol):
    """Which prompts are next."""

    in_order: bool
    """They may be taken one by one as well as many at once."""

    def ahead(self, first: int, many: int, version: int) -> Ids:
        """Up to `many` of them, at least one, where `first` were taken before; the same whenever it is asked."""


class EpochOrder:
    """The data's order."""

    in_order = True

    def __init__(self, num_prompts: int, seed: int) -> None:
        self._num_prompts, self._seed = num_prompts, seed

    def ahead(self, first: int, many: int, version: int) -> Ids:
        """As `PromptLaw`; all that are asked for, of several epochs where one does not have them."""
        size, parts = self._num_prompts, []
        while many:
            epoch, place = divmod(first, size)
            parts.append(order_of(self._seed, epoch, size)[place : place + many])
            first, many = first + len(parts[-1]), many - len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class ByChance:
    """One after the other, by chance; none twice among those that are drawn at once."""

    in_order = False

    def __init__(self, num_prompts: int, seed: int, successes: SuccessModel | None = None) -> None:
        """Of these prompts: alike, or by what is known of their success, but for the share `FLOOR`."""
        self._num_prompts, self._seed = num_prompts, seed
        self._successes = successes

    def ahead(self, first: int, many: int, version: int) -> Ids:
        random = np.random.default_rng([self._seed & 0xFFFFFFFF, _BY_CHANCE, first])
        many = min(many, max(1, self._num_prompts // _AT_ONCE))
        drawn: Ids = random.choice(self._num_prompts, many, replace=False, p=self.chances(version))
        return drawn

    def chances(self, version: int) -> Floats | None:
        """Of each prompt to be the next; None: all alike."""
        if self._successes is None:
            return None
        weights = self._successes.weights(np.arange(self._num_prompts), version)
        chances: Floats = (1.0 - FLOOR) * weights / weights.sum() + FLOOR / len(weights)
        return chances


@lru_cache(maxsize=3)
def order_of(seed: int, epoch: int, num_prompts: int) -> Ids:
    """The order of prompts in one epoch of the data: the same after every restart."""
    return np.random.default_rng([seed & 0xFFFFFFFF, epoch]).permutation(num_prompts)
