"""How many tokens completions have: by a law in simulations (LengthLaw, PromptStream), by prompt in runs (LengthModel).

A law is a distribution of lengths and the share of variance, on a normal scale, that siblings have in common:

    z = sqrt(explained) * u(prompt) + sqrt(1 - explained) * e(sample),   length = quantile(Phi(z)),   u, e ~ N(0, 1)

So any measured distribution can have any share of it explained, and the best ranking of prompts is known: by u.

LengthModel predicts how long the answers to each prompt will be, by all that were generated so far:

    y = log tokens of a completion = level + own(prompt) + noise(sample)

    level   of the run: a mean that forgets, for training makes all answers longer or shorter; ranks survive that
    own     of each prompt: normal, N(0, spread) before its first visit; then what its visits leave of that (a Kalman
            filter), which fades back to N(0, spread) with the versions since, as fast as visits show it to
    noise   N(0, noise) of each sample

Level, spread, noise and fading are estimated as groups complete (empirical Bayes). A completion that was cut at its
longest counts as long as one is on average that passes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import exp, log, pi, sqrt
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from buffer.tables import Shape, Visit

Floats = npt.NDArray[np.float64]

NUM_QUANTILES = 257
REACH = 4.0
"""Quantiles are kept for normal scores up to this: of 30,000 samples two lie beyond, and count as the outermost."""
SHARE = 0.9
"""The quantile of the longest of K that is predicted."""
LEVEL_MEMORY, SHAPE_MEMORY = 256, 2048
"""Groups after which what they say of the level, and of spreads, has faded by e."""
MOST_TOLD = 50_000
_TURNS = 4
"""Iterations in which the lengths of cut samples and the prompt's own part are estimated from each other."""
_NEVER = -1
_REACH = 5.0
"""Standard deviations above the mean at which the expected excess is no more than a fifth of one."""
_NORMAL = NormalDist()


@dataclass(frozen=True)
class LengthLaw:
    """Lengths by their quantiles at evenly spaced normal scores from -4 to 4."""

    quantiles: tuple[float, ...]
    explained: float = 0.0
    """Share of the variance of the normal score that the prompt decides, 0..1."""

    def __post_init__(self) -> None:
        if len(self.quantiles) < 2 or self.quantiles[0] < 1 or list(self.quantiles) != sorted(self.quantiles):
            raise ValueError("quantiles of lengths are at least two, at least 1, and ascending")
        if not 0.0 <= self.explained <= 1.0:
            raise ValueError(f"explained = {self.explained}: a share of the variance lies between 0 and 1")

    @classmethod
    def measured(cls, lengths: npt.ArrayLike, explained: float = 0.0) -> LengthLaw:
        """Return the law of completions that were seen; ValueError if there are none."""
        seen = np.asarray(lengths, np.float64)
        if not len(seen):
            raise ValueError("a law of lengths needs at least one completion")
        at = [_NORMAL.cdf(score) for score in _SCORES.tolist()]
        return cls(tuple(np.quantile(seen, at).tolist()), explained)

    def lengths(self, prompt_score: float | Floats, sample_scores: Sequence[float] | Floats) -> Floats:
        """Return whole tokens of the samples of a prompt, from standard normal scores of the prompt and the samples."""
        own = sqrt(1.0 - self.explained)
        return self.at(sqrt(self.explained) * prompt_score + own * np.asarray(sample_scores))

    def at(self, scores: Floats) -> Floats:
        """Return whole tokens of samples, from the standard normal scores of their lengths."""
        return np.maximum(1.0, np.rint(np.interp(scores, self._scores, self.quantiles)))

    def share_below(self, prompt_scores: Floats, scores: Floats) -> Floats:
        """Return the share of the samples of each prompt whose length has at most this score."""
        own = max(1e-9, sqrt(1.0 - self.explained))
        return np.vectorize(_NORMAL.cdf)((scores - sqrt(self.explained) * prompt_scores) / own)

    @cached_property
    def _scores(self) -> Floats:
        return np.linspace(-REACH, REACH, len(self.quantiles))

    @cached_property
    def mean(self) -> float:
        scores = np.linspace(-2 * REACH, 2 * REACH, 8001)
        density = np.exp(-(scores**2) / 2)
        return float((np.interp(scores, self._scores, self.quantiles) * density).sum() / density.sum())

    @property
    def longest(self) -> float:
        return self.quantiles[-1]


_SCORES = np.linspace(-REACH, REACH, NUM_QUANTILES)


class PromptStream:
    """Which prompt comes next, in the data's order, and how long its samples will be; many at once, for speed."""

    _MANY = 4096

    def __init__(self, law: LengthLaw, num_prompts: int, group_size: int, seed: int) -> None:
        self._law, self._group_size, self._num_prompts = law, group_size, num_prompts
        self._scores = np.random.default_rng([seed, 0]).standard_normal(num_prompts)
        self._random = np.random.default_rng([seed, 1])
        self._order: list[int] = []
        self._ahead: list[int] = []
        """The next of them, in reverse."""
        self._known: dict[int, list[list[float]]] = {}
        """Lengths of the samples of their groups, by prompt."""

    def next(self) -> int:
        if not self._ahead:
            while len(self._order) < self._MANY:
                self._order += self._random.permutation(self._num_prompts).tolist()
            self._ahead = self._order[: self._MANY][::-1]
            del self._order[: self._MANY]
            self._draw(self._ahead[::-1])
        return self._ahead.pop()

    def lengths(self, prompt: int) -> list[float]:
        """Return the tokens of each sample of the group of a prompt that is leased now."""
        if prompt not in self._known:
            self._draw([prompt])
        known = self._known.pop(prompt)
        if len(known) > 1:
            self._known[prompt] = known[1:]
        return known[0]

    def _draw(self, prompts: list[int]) -> None:
        own = self._random.standard_normal((len(prompts), self._group_size))
        lengths = self._law.lengths(self._scores[prompts][:, None], own)
        for prompt, each in zip(prompts, lengths.tolist(), strict=True):
            self._known.setdefault(prompt, []).append(each)


def explained_by_prompt(prompt_ids: npt.ArrayLike, lengths: npt.ArrayLike) -> float:
    """Return the share of the variance of the normal scores of lengths that prompts explain.

    By one-way analysis of variance, from the prompt and the tokens of each completion.
    """
    prompts, values = np.asarray(prompt_ids), np.asarray(lengths, np.float64)
    if len(values) < 2 or values.min() == values.max():
        return 0.0
    ranks = np.empty(len(values))
    ranks[np.argsort(values, kind="stable")] = np.arange(1, len(values) + 1)
    _, same = np.unique(values, return_inverse=True)  # ties share the mean of their ranks
    ranks = (np.bincount(same, ranks) / np.bincount(same))[same]
    scores = np.array([_NORMAL.inv_cdf((rank - 0.5) / len(values)) for rank in ranks.tolist()])
    _, which = np.unique(prompts, return_inverse=True)
    counts = np.bincount(which)
    within_df = len(scores) - len(counts)
    if within_df < 1 or len(counts) < 2:
        return 0.0
    means = np.bincount(which, scores) / counts
    within = float(((scores - means[which]) ** 2).sum()) / within_df
    between = float((counts * (means - scores.mean()) ** 2).sum()) / (len(counts) - 1)
    size = (len(scores) - float((counts**2).sum()) / len(scores)) / (len(counts) - 1)
    shared = max(0.0, (between - within) / size)
    return shared / (shared + within) if shared + within > 0.0 else 0.0


# --- predicted, by prompt -----------------------------------------------------------------------------


class LengthModel:
    """Predicts lengths for the prompts of a store, by their ids from 0."""

    def __init__(self, num_prompts: int, shape: Shape | None = None) -> None:
        self.shape = Shape() if shape is None else shape
        self._means = np.zeros(num_prompts, np.float32)
        self._variances = np.zeros(num_prompts, np.float32)
        self._versions = np.full(num_prompts, _NEVER, np.int64)
        self._expected: npt.NDArray[np.float32] | None = None
        self._expected_variance = 0.0

    def expect(self, first: int, means: npt.NDArray[np.float32], variance: float) -> None:
        """Set the prior means of prompts from `first` on, predicted from their tokens, and the variance around them."""
        if self._expected is None:
            self._expected = np.zeros(len(self._means), np.float32)
        self._expected[first : first + len(means)] = means
        self._expected_variance = variance

    @property
    def noise(self) -> float:
        """Variance of log tokens among the samples of a group."""
        return max(1e-6, self.shape.noise_sum / self.shape.noise_weight)

    @property
    def spread(self) -> float:
        """Variance of the prompts' own parts."""
        return max(1e-6, self.shape.spread_sum / self.shape.spread_weight)

    @property
    def fading(self) -> float:
        """Return f: what a prompt has of its own fades by e in 1 / f versions."""
        shape = self.shape
        if shape.again_product >= shape.again_square or not shape.again_versions:
            return 0.0
        left = max(0.05, shape.again_product / shape.again_square)
        return -log(left) * shape.again_square / shape.again_versions

    @property
    def is_expecting(self) -> bool:
        return self._expected is not None

    @property
    def num_seen(self) -> int:
        return int(np.count_nonzero(self._versions != _NEVER))

    def recent(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return the prompts that were visited last, with mean and variance of their own part."""
        seen = np.flatnonzero(self._versions != _NEVER)
        if len(seen) > MOST_TOLD:
            seen = np.sort(seen[np.argpartition(self._versions[seen], -MOST_TOLD)[-MOST_TOLD:]])
        return seen, self._means[seen], self._variances[seen]

    def put(self, prompt: int, visit: Visit | None) -> None:
        """Set the posterior of a prompt; None if it has not been visited."""
        known = Visit(0.0, 0.0, _NEVER) if visit is None else visit
        self._means[prompt], self._variances[prompt], self._versions[prompt] = known.mean, known.variance, known.version

    def get(self, prompt: int) -> Visit | None:
        version = int(self._versions[prompt])
        if version == _NEVER:
            return None
        return Visit(float(self._means[prompt]), float(self._variances[prompt]), version)

    def see(
        self, prompt: int, lengths: Sequence[int], cut: Sequence[bool], version: int, *, is_late: bool = False
    ) -> Visit:
        """Learn from a complete group of a prompt; return what is known of the prompt now.

        `lengths` are the completion tokens of its samples, at least one; `cut`: which of them would have gone on;
        `version`: of the learner by now; `is_late`: the slowest lane would have been late with it, as was foretold.
        """
        shape, (own, variance), size = self.shape, self._own_at(prompt, version), len(lengths)
        weight, after = variance / (variance + self.noise / size), own
        values, beyond = [log(max(1, length)) for length in lengths], 0.0
        if shape.num_groups < LEVEL_MEMORY:
            shape.num_groups += 1.0
        level, gain = shape.level, 1.0 / shape.num_groups
        for _ in range(_TURNS if any(cut) else 1):
            if any(cut):
                values, beyond = self._uncut(lengths, cut, after)
            shown = sum(values) / size - own
            shape.level = level + gain * (shown - level)
            after = own + weight * (shown - shape.level)
        self._learn(prompt, values, beyond, version)
        self._compare(values, own, variance, is_late)
        visit = Visit(after, (1.0 - weight) * variance, version)
        self.put(prompt, visit)
        return visit

    def of(self, prompts: npt.NDArray[np.int64], version: int) -> tuple[Floats, Floats]:
        """Mean of the log tokens of a sample of each prompt at a version, and the variance of what siblings share."""
        shape = self.shape
        passed = np.maximum(0, version - self._versions[prompts])
        left = np.where(self._versions[prompts] == _NEVER, 0.0, np.exp(-self.fading * passed))
        expected = 0.0 if self._expected is None else self._expected[prompts]
        own = left * self._means[prompts] + (1.0 - left) * expected
        return shape.level + own, left**2 * self._variances[prompts] + (1.0 - left**2) * self._unknown

    def usual(self, prompt: int, version: int) -> float:
        """Return the tokens of a sample of a prompt at a version, by the mean of logarithms; 0 before any group."""
        if not self.shape.num_groups:
            return 0.0
        return exp(self.shape.level + self._own_at(prompt, version)[0])

    def longest_of(
        self, prompts: npt.NDArray[np.int64], group_size: int | npt.NDArray[np.int64], version: int
    ) -> Floats:
        """Return the tokens of the longest of K samples of each prompt: its quantile `SHARE`, if none is cut.

        K is one number, or one for each prompt; each that was not asked for before takes some milliseconds.
        """
        means, shared = self.of(prompts, version)
        total, sizes = shared + self.noise, np.broadcast_to(group_size, prompts.shape)
        scores = np.empty(len(prompts))
        for size in np.unique(sizes).tolist():
            scores[sizes == size] = np.interp((shared / total)[sizes == size], _SHARES, _scores_of_longest(size))
        return np.exp(means + np.sqrt(total) * scores)

    # --- parts ------------------------------------------------------------------------------------

    def _own_at(self, prompt: int, version: int) -> tuple[float, float]:
        """Mean and variance of a prompt's own part at a version."""
        visit, expected = self.get(prompt), self._expected_of(prompt)
        if visit is None:
            return expected, self._unknown
        left = exp(-self.fading * max(0, version - visit.version))
        own = left * visit.mean + (1.0 - left) * expected
        return own, left**2 * visit.variance + (1.0 - left**2) * self._unknown

    def _expected_of(self, prompt: int) -> float:
        return 0.0 if self._expected is None else float(self._expected[prompt])

    @property
    def _unknown(self) -> float:
        """Variance of a prompt's own part around its prior mean."""
        return self.spread if self._expected is None else self._expected_variance

    def _uncut(self, lengths: Sequence[int], cut: Sequence[bool], own: float) -> tuple[list[float], float]:
        """Log tokens, and of what was cut the mean of those that come as far; and the variances of these, added up."""
        center, noise = self.shape.level + own, self.noise
        values, variances = [], 0.0
        for length, is_cut in zip(lengths, cut, strict=True):
            value = log(max(1, length))
            score = (value - center) / sqrt(noise)
            if is_cut and score < _REACH:
                excess = exp(-(score**2) / 2) / sqrt(2 * pi) / (1.0 - _NORMAL.cdf(score))
                value = center + sqrt(noise) * excess
                variances += noise * max(0.0, 1.0 - excess * (excess - score))
            values.append(value)
        return values, variances

    def _compare(self, values: Sequence[float], own: float, variance: float, is_late: bool) -> None:
        """Score the prediction for a group, N(own, variance) for its prompt, by its lengths."""
        shape, keep = self.shape, 1.0 - 1.0 / SHAPE_MEMORY
        total = variance + self.noise
        score = float(np.interp(variance / total, _SHARES, _scores_of_longest(len(values))))
        shown = sum(values) / len(values) - shape.level
        shape.num_foretold = keep * shape.num_foretold + 1.0
        shape.num_covered = keep * shape.num_covered + (max(values) <= shape.level + own + sqrt(total) * score)
        shape.num_late = keep * shape.num_late + is_late
        shape.total_square = keep * shape.total_square + shown**2
        shape.error_square = keep * shape.error_square + (shown - own) ** 2

    def _learn(self, prompt: int, values: Sequence[float], beyond: float, version: int) -> None:
        """Update spread, noise and fading by a group."""
        shape, size = self.shape, len(values)
        mean, keep = sum(values) / size, 1.0 - 1.0 / SHAPE_MEMORY
        if size > 1:  # one sample says nothing of it; of several the mean takes a part of what each may lie beyond
            within = sum((value - mean) ** 2 for value in values) + beyond * (size - 1) / size
            shape.noise_sum = keep * shape.noise_sum + within
            shape.noise_weight = keep * shape.noise_weight + (size - 1)
        shown = mean - shape.level
        shape.spread_sum = max(0.0, keep * shape.spread_sum + shown**2 - self.noise / size)
        shape.spread_weight = keep * shape.spread_weight + 1.0
        visit = self.get(prompt)
        if visit is not None and version > visit.version:
            expected = self._expected_of(prompt)
            square = (visit.mean - expected) ** 2
            shape.again_product = keep * shape.again_product + (shown - expected) * (visit.mean - expected)
            shape.again_square = keep * shape.again_square + square
            shape.again_versions = keep * shape.again_versions + square * (version - visit.version)


_SHARES: Floats = np.linspace(0.0, 1.0, 17)


_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(64)
_GRID: Floats = np.linspace(-9.0, 9.0, 4097)
_BELOW: Floats = np.array([_NORMAL.cdf(score) for score in _GRID.tolist()])


@cache
def _scores_of_longest(group_size: int) -> Floats:
    """Return the standard score of the quantile `SHARE` of the longest of K, by the share of variance in common.

    P(longest <= x) is the mean, over what they share, of the K-th power of what each does: by Gauss and Hermite.
    """
    shared = _SHARES[:-1, None]
    low, high = np.full(len(shared), -8.0), np.full(len(shared), 8.0)
    for _ in range(24):
        at = (low + high) / 2
        # the service asks for every size of a group that comes up, so the distribution is looked up, not computed
        below = np.interp((at[:, None] - np.sqrt(shared) * _NODES) / np.sqrt(1.0 - shared), _GRID, _BELOW)
        is_low = below**group_size @ (_WEIGHTS / _WEIGHTS.sum()) < SHARE
        low, high = np.where(is_low, at, low), np.where(is_low, high, at)
    return np.append(low, _NORMAL.inv_cdf(SHARE))  # what they have all in common has one longest
