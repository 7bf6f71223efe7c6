"""Completion lengths: distributions for simulations, and a model that predicts them by prompt in runs.

LengthDistribution (sampled by PromptStream) has quantiles of lengths, and the fraction of variance due to the prompt:

    z = sqrt(explained) * u(prompt) + sqrt(1 - explained) * e(sample),   length = quantile(Phi(z)),   u, e ~ N(0, 1)

Any measured distribution can be combined with any explained fraction, and the best ranking of prompts, by u, is known.

LengthModel predicts the completion lengths of each prompt from all earlier completions:

    y = log tokens of a completion = level + own(prompt) + noise(sample)

    level   run-wide exponential moving average: training changes all lengths, but not their ranks
    own     offset of a prompt: N(0, spread) a priori, updated by each group of the prompt (a Kalman filter); it
            decays to N(0, spread) over the versions since the last group, at a rate estimated from repeated groups
    noise   N(0, noise) of each sample

Level, spread, noise and fading are estimated as groups complete (empirical Bayes). A completion cut at the maximum
length counts with the expected length of a completion beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import exp, log, pi, sqrt
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from leeway.buffer.tables import LengthStats, PromptPosterior

Floats = npt.NDArray[np.float64]

NUM_QUANTILES = 257
REACH = 4.0
"""Largest normal score with a quantile; 2 in 30,000 samples lie beyond and are clamped to it."""
SHARE = 0.9
"""Predicted quantile of the longest of K completions."""
LEVEL_MEMORY, SHAPE_MEMORY = 256, 2048
"""Number of groups after which the weight of a group in the level, or in spread and noise, has decayed to 1 / e."""
MAX_POSTERIORS = 50_000
_TURNS = 4
"""Number of alternating estimations of the lengths of cut samples and the offset of the prompt."""
_NEVER = -1
_REACH = 5.0
"""Standard deviations above the mean beyond which the expected excess is at most a fifth of a deviation."""
_NORMAL = NormalDist()


@dataclass(frozen=True)
class LengthDistribution:
    """Quantiles of lengths at evenly spaced normal scores from -4 to 4."""

    quantiles: tuple[float, ...]
    explained: float = 0.0
    """Fraction of the variance of the normal score that the prompt explains, 0..1."""

    def __post_init__(self) -> None:
        if len(self.quantiles) < 2 or self.quantiles[0] < 1 or list(self.quantiles) != sorted(self.quantiles):
            raise ValueError("expected at least two ascending length quantiles of at least 1 token")
        if not 0.0 <= self.explained <= 1.0:
            raise ValueError(f"explained = {self.explained}: expected a fraction between 0 and 1")

    @classmethod
    def measured(cls, lengths: npt.ArrayLike, explained: float = 0.0) -> LengthDistribution:
        """Return the distribution of measured completions; raise ValueError if there are none."""
        values = np.asarray(lengths, np.float64)
        if not len(values):
            raise ValueError("a length distribution needs at least one completion")
        at = [_NORMAL.cdf(score) for score in _SCORES.tolist()]
        return cls(tuple(np.quantile(values, at).tolist()), explained)

    def lengths(self, prompt_score: float | Floats, sample_scores: Sequence[float] | Floats) -> Floats:
        """Return the integer token counts of samples, from standard normal scores of the prompt and of each sample."""
        own = sqrt(1.0 - self.explained)
        return self.at(sqrt(self.explained) * prompt_score + own * np.asarray(sample_scores))

    def at(self, scores: Floats) -> Floats:
        """Return the integer token counts of samples, from the standard normal scores of their lengths."""
        return np.maximum(1.0, np.rint(np.interp(scores, self._scores, self.quantiles)))

    def share_below(self, prompt_scores: Floats, scores: Floats) -> Floats:
        """Return the fraction of the samples of each prompt with a length score of at most `scores`."""
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
    """Prompts in data order with the lengths of their samples, drawn in batches for speed."""

    _MANY = 4096

    def __init__(self, distribution: LengthDistribution, num_prompts: int, group_size: int, seed: int) -> None:
        self._distribution, self._group_size, self._num_prompts = distribution, group_size, num_prompts
        self._scores = np.random.default_rng([seed, 0]).standard_normal(num_prompts)
        self._random = np.random.default_rng([seed, 1])
        self._order: list[int] = []
        self._ahead: list[int] = []
        """Next prompts, in reverse order."""
        self._known: dict[int, list[list[float]]] = {}
        """Prompt -> for each of its next groups, the lengths of the samples."""

    def next(self) -> int:
        if not self._ahead:
            while len(self._order) < self._MANY:
                self._order += self._random.permutation(self._num_prompts).tolist()
            self._ahead = self._order[: self._MANY][::-1]
            del self._order[: self._MANY]
            self._draw(self._ahead[::-1])
        return self._ahead.pop()

    def lengths(self, prompt: int) -> list[float]:
        """Remove and return the tokens of each sample of the next group of a prompt."""
        if prompt not in self._known:
            self._draw([prompt])
        known = self._known.pop(prompt)
        if len(known) > 1:
            self._known[prompt] = known[1:]
        return known[0]

    def _draw(self, prompts: list[int]) -> None:
        own = self._random.standard_normal((len(prompts), self._group_size))
        lengths = self._distribution.lengths(self._scores[prompts][:, None], own)
        for prompt, each in zip(prompts, lengths.tolist(), strict=True):
            self._known.setdefault(prompt, []).append(each)


def explained_by_prompt(prompt_ids: npt.ArrayLike, lengths: npt.ArrayLike) -> float:
    """Return the fraction of the variance of the normal scores of lengths that prompts explain.

    Computed by one-way analysis of variance from the prompt and the tokens of each completion.
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


# --- prediction by prompt -----------------------------------------------------------------------------


class LengthModel:
    """Completion length model of the prompts of a store, by prompt id from 0."""

    def __init__(self, num_prompts: int, shape: LengthStats | None = None) -> None:
        self.shape = LengthStats() if shape is None else shape
        self._means = np.zeros(num_prompts, np.float32)
        self._variances = np.zeros(num_prompts, np.float32)
        self._versions = np.full(num_prompts, _NEVER, np.int64)
        self._prior: npt.NDArray[np.float32] | None = None
        self._prior_variance = 0.0

    def set_prior(self, first: int, means: npt.NDArray[np.float32], variance: float) -> None:
        """Set the prior means of prompts from `first` on, predicted from their tokens, and the variance around them."""
        if self._prior is None:
            self._prior = np.zeros(len(self._means), np.float32)
        self._prior[first : first + len(means)] = means
        self._prior_variance = variance

    @property
    def noise(self) -> float:
        """Variance of log tokens among the samples of a group."""
        return max(1e-6, self.shape.noise_sum / self.shape.noise_weight)

    @property
    def spread(self) -> float:
        """Variance of the prompt offsets."""
        return max(1e-6, self.shape.spread_sum / self.shape.spread_weight)

    @property
    def fading(self) -> float:
        """Return f: the offset of a prompt decays to 1 / e in 1 / f versions."""
        shape = self.shape
        if shape.again_product >= shape.again_square or not shape.again_versions:
            return 0.0
        left = max(0.05, shape.again_product / shape.again_square)
        return -log(left) * shape.again_square / shape.again_versions

    @property
    def has_prior(self) -> bool:
        return self._prior is not None

    @property
    def num_seen(self) -> int:
        return int(np.count_nonzero(self._versions != _NEVER))

    def recent(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return the most recently updated prompts, with mean and variance of their offsets."""
        seen = np.flatnonzero(self._versions != _NEVER)
        if len(seen) > MAX_POSTERIORS:
            seen = np.sort(seen[np.argpartition(self._versions[seen], -MAX_POSTERIORS)[-MAX_POSTERIORS:]])
        return seen, self._means[seen], self._variances[seen]

    def put(self, prompt: int, posterior: PromptPosterior | None) -> None:
        """Set the posterior of a prompt; None if it has had no group yet."""
        new = PromptPosterior(0.0, 0.0, _NEVER) if posterior is None else posterior
        self._means[prompt], self._variances[prompt], self._versions[prompt] = new.mean, new.variance, new.version

    def get(self, prompt: int) -> PromptPosterior | None:
        version = int(self._versions[prompt])
        if version == _NEVER:
            return None
        return PromptPosterior(float(self._means[prompt]), float(self._variances[prompt]), version)

    def update(
        self, prompt: int, lengths: Sequence[int], cut: Sequence[bool], version: int, *, is_late: bool = False
    ) -> PromptPosterior:
        """Update the model with a complete group; return the new posterior of the prompt.

        `lengths` are the completion tokens of its samples, at least one; `cut` marks samples cut at the maximum length;
        `version` is the learner's version; `is_late` is True if the slowest lane was predicted to miss the deadline.
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
            observed = sum(values) / size - own
            shape.level = level + gain * (observed - level)
            after = own + weight * (observed - shape.level)
        self._update_variances(prompt, values, beyond, version)
        self._score(values, own, variance, is_late)
        posterior = PromptPosterior(after, (1.0 - weight) * variance, version)
        self.put(prompt, posterior)
        return posterior

    def predict(self, prompts: npt.NDArray[np.int64], version: int) -> tuple[Floats, Floats]:
        """Return the mean log tokens of a sample of each prompt at a version, and the variance that samples share."""
        shape = self.shape
        passed = np.maximum(0, version - self._versions[prompts])
        left = np.where(self._versions[prompts] == _NEVER, 0.0, np.exp(-self.fading * passed))
        prior = 0.0 if self._prior is None else self._prior[prompts]
        own = left * self._means[prompts] + (1.0 - left) * prior
        return shape.level + own, left**2 * self._variances[prompts] + (1.0 - left**2) * self._unseen_variance

    def predicted_length(self, prompt: int, version: int) -> float:
        """Return the geometric mean tokens of a sample of a prompt at a version; 0 before any group."""
        if not self.shape.num_groups:
            return 0.0
        return exp(self.shape.level + self._own_at(prompt, version)[0])

    def longest_of(
        self, prompts: npt.NDArray[np.int64], group_size: int | npt.NDArray[np.int64], version: int
    ) -> Floats:
        """Return the tokens of the longest of K samples of each prompt: its quantile `SHARE`, assuming none is cut.

        K is a single number, or one number per prompt; the first call for each K takes a few milliseconds.
        """
        means, shared = self.predict(prompts, version)
        total, sizes = shared + self.noise, np.broadcast_to(group_size, prompts.shape)
        scores = np.empty(len(prompts))
        for size in np.unique(sizes).tolist():
            scores[sizes == size] = np.interp((shared / total)[sizes == size], _SHARES, _scores_of_longest(size))
        return np.exp(means + np.sqrt(total) * scores)

    # --- parts ------------------------------------------------------------------------------------

    def _own_at(self, prompt: int, version: int) -> tuple[float, float]:
        """Return mean and variance of the offset of a prompt at a version."""
        posterior, prior = self.get(prompt), self._prior_of(prompt)
        if posterior is None:
            return prior, self._unseen_variance
        left = exp(-self.fading * max(0, version - posterior.version))
        own = left * posterior.mean + (1.0 - left) * prior
        return own, left**2 * posterior.variance + (1.0 - left**2) * self._unseen_variance

    def _prior_of(self, prompt: int) -> float:
        return 0.0 if self._prior is None else float(self._prior[prompt])

    @property
    def _unseen_variance(self) -> float:
        """Variance of the offset of a prompt around its prior mean."""
        return self.spread if self._prior is None else self._prior_variance

    def _uncut(self, lengths: Sequence[int], cut: Sequence[bool], own: float) -> tuple[list[float], float]:
        """Return log tokens, or the conditional mean of cut samples beyond the cut; and the sum of these variances."""
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

    def _score(self, values: Sequence[float], own: float, variance: float, is_late: bool) -> None:
        """Score the prediction N(own, variance) for the prompt of a group by its lengths."""
        shape, keep = self.shape, 1.0 - 1.0 / SHAPE_MEMORY
        total = variance + self.noise
        score = float(np.interp(variance / total, _SHARES, _scores_of_longest(len(values))))
        observed = sum(values) / len(values) - shape.level
        shape.num_predicted = keep * shape.num_predicted + 1.0
        shape.num_covered = keep * shape.num_covered + (max(values) <= shape.level + own + sqrt(total) * score)
        shape.num_late = keep * shape.num_late + is_late
        shape.total_square = keep * shape.total_square + observed**2
        shape.error_square = keep * shape.error_square + (observed - own) ** 2

    def _update_variances(self, prompt: int, values: Sequence[float], beyond: float, version: int) -> None:
        """Update the estimates of spread, noise and fading with a group."""
        shape, size = self.shape, len(values)
        mean, keep = sum(values) / size, 1.0 - 1.0 / SHAPE_MEMORY
        if size > 1:  # one sample has no variance; the mean absorbs 1 / size of the variance of each cut length
            within = sum((value - mean) ** 2 for value in values) + beyond * (size - 1) / size
            shape.noise_sum = keep * shape.noise_sum + within
            shape.noise_weight = keep * shape.noise_weight + (size - 1)
        observed = mean - shape.level
        shape.spread_sum = max(0.0, keep * shape.spread_sum + observed**2 - self.noise / size)
        shape.spread_weight = keep * shape.spread_weight + 1.0
        before = self.get(prompt)
        if before is not None and version > before.version:
            prior = self._prior_of(prompt)
            square = (before.mean - prior) ** 2
            shape.again_product = keep * shape.again_product + (observed - prior) * (before.mean - prior)
            shape.again_square = keep * shape.again_square + square
            shape.again_versions = keep * shape.again_versions + square * (version - before.version)


_SHARES: Floats = np.linspace(0.0, 1.0, 17)


_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(64)
_GRID: Floats = np.linspace(-9.0, 9.0, 4097)
_BELOW: Floats = np.array([_NORMAL.cdf(score) for score in _GRID.tolist()])


@cache
def _scores_of_longest(group_size: int) -> Floats:
    """Return the standard score of the quantile `SHARE` of the longest of K, for each fraction of common variance.

    P(longest <= x) is the mean, over the common part, of P(one sample <= x)^K, by Gauss-Hermite quadrature.
    """
    shared = _SHARES[:-1, None]
    low, high = np.full(len(shared), -8.0), np.full(len(shared), 8.0)
    for _ in range(24):
        at = (low + high) / 2
        # tabulated for speed: the service calls this function for every group size that occurs
        below = np.interp((at[:, None] - np.sqrt(shared) * _NODES) / np.sqrt(1.0 - shared), _GRID, _BELOW)
        is_low = below**group_size @ (_WEIGHTS / _WEIGHTS.sum()) < SHARE
        low, high = np.where(is_low, at, low), np.where(is_low, high, at)
    return np.append(low, _NORMAL.inv_cdf(SHARE))  # samples that share all variance are equal
