"""Lengths of answers: how long those to each prompt will be (LengthModel), and whether training leaves some out
(Fidelity).

LengthModel foretells them by all that were generated so far:

    y = log tokens of a completion = level + own(prompt) + noise(sample)

    level   of the run: a mean that forgets, for training makes all answers longer or shorter; ranks survive that
    own     of each prompt: normal, N(0, spread) before its first visit; then what its visits leave of that (a Kalman
            filter), which fades back to N(0, spread) with the versions since, as fast as visits show it to
    noise   N(0, noise) of each sample

Level, spread, noise and fading are estimated as groups complete (empirical Bayes). A completion that was cut at its
longest counts as long as one is on average that passes it.

Fidelity counts lengths in log-spaced buckets, two to an octave. Both distributions, of completions that were committed
and of completions that entered a step, are counted with exponential forgetting, so that they tell of the last few
thousand samples however long the run is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from math import ceil, exp, log, log2, pi, sqrt
from statistics import NormalDist

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SHARE = 0.9
"""The quantile of the longest of K that is foretold."""
LEVEL_MEMORY, SHAPE_MEMORY = 256, 2048
"""Groups after which what they say of the level, and of spreads, has faded by e."""
MOST_TOLD = 50_000
_LIKE_GROUPS = 4.0
"""What is assumed of spread and noise weighs as much as so many groups."""
_ASSUMED = 0.2
"""Spread and noise before anything was seen: of 16 in 20 samples the length is within a factor of 2 of the median."""
_TURNS = 4
"""Of guessing what was cut from what the prompt has of its own, and that from what was cut."""
_NEVER = -1
_REACH = 5.0
"""Standard deviations above the mean at which the expected excess is no more than a fifth of one."""
_NORMAL = NormalDist()

NUM_BUCKETS = 48
"""Two to an octave: completions up to 2^24 tokens."""
ALARM = 0.2
"""Kolmogorov-Smirnov distance of the lengths trained from those generated above which a run is warned."""
MIN_SAMPLES = 256
"""Completions trained on before any alarm: few samples differ from any distribution."""
MEMORY = 4096
"""Completions after which the counts have faded by e: enough for a 95th percentile, and few enough to follow a run."""
NUM_NAMED = 3
"""How many starved buckets a warning names."""
_RESCALE_AT = 1e9
_LONG = 0.95


class Shape(msgspec.Struct):
    """What all prompts have in common, as sums that forget."""

    num_groups: float = 0.0
    level: float = 0.0
    noise_sum: float = _LIKE_GROUPS * _ASSUMED
    noise_weight: float = _LIKE_GROUPS
    spread_sum: float = _LIKE_GROUPS * _ASSUMED
    spread_weight: float = _LIKE_GROUPS
    again_product: float = 0.0
    """Of what a visit showed and what the visit before had left; where nothing fades it equals `again_square`."""
    again_square: float = 0.0
    again_versions: float = 0.0
    """Versions between the two, weighed as these."""
    num_foretold: float = 0.0
    """Groups; from here on of what was foretold of them before they were leased or seen."""
    num_covered: float = 0.0
    """Those whose longest completion was no longer than that."""
    num_late: float = 0.0
    """Those that the slowest lane would have been late with, by what was foretold."""
    total_square: float = 0.0
    """Of the means of groups, from the level."""
    error_square: float = 0.0

    @property
    def noise(self) -> float:
        """Variance of log tokens among the samples of a group."""
        return max(1e-6, self.noise_sum / self.noise_weight)

    @property
    def spread(self) -> float:
        return max(1e-6, self.spread_sum / self.spread_weight)

    @property
    def covered(self) -> float:
        """Share of the groups whose longest completion was no longer than foretold: `SHARE` where all is right."""
        return self.num_covered / self.num_foretold if self.num_foretold else 0.0

    @property
    def late(self) -> float:
        """Share of the groups that the slowest lane would have been late with, by what was foretold."""
        return self.num_late / self.num_foretold if self.num_foretold else 0.0

    @property
    def foretold(self) -> float:
        """Share of the variance among the means of groups that was foretold; below 0 it misled."""
        return 1.0 - self.error_square / self.total_square if self.total_square else 0.0

    @property
    def fading(self) -> float:
        """What a prompt has of its own fades by e in 1 / this versions."""
        if self.again_product >= self.again_square or not self.again_versions:
            return 0.0
        left = max(0.05, self.again_product / self.again_square)
        return -log(left) * self.again_square / self.again_versions


class Visit(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a prompt after a group of it: at that version its own part is N(mean, variance)."""

    mean: float
    variance: float
    version: int


class LengthModel:
    """Of the prompts of a store, by their ids from 0."""

    def __init__(self, num_prompts: int, shape: Shape | None = None) -> None:
        self.shape = Shape() if shape is None else shape
        self._means = np.zeros(num_prompts, np.float32)
        self._variances = np.zeros(num_prompts, np.float32)
        self._versions = np.full(num_prompts, _NEVER, np.int64)
        self._expected: npt.NDArray[np.float32] | None = None
        self._expected_variance = 0.0

    def expect(self, first: int, means: npt.NDArray[np.float32], variance: float) -> None:
        """What prompts from `first` on are like before their first visit, by what they are themselves."""
        if self._expected is None:
            self._expected = np.zeros(len(self._means), np.float32)
        self._expected[first : first + len(means)] = means
        self._expected_variance = variance

    @property
    def is_expecting(self) -> bool:
        return self._expected is not None

    @property
    def num_seen(self) -> int:
        return int(np.count_nonzero(self._versions != _NEVER))

    def recent(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """The prompts that were visited last, with mean and variance of what they have of their own."""
        seen = np.flatnonzero(self._versions != _NEVER)
        if len(seen) > MOST_TOLD:
            seen = np.sort(seen[np.argpartition(self._versions[seen], -MOST_TOLD)[-MOST_TOLD:]])
        return seen, self._means[seen], self._variances[seen]

    def put(self, prompt: int, visit: Visit | None) -> None:
        """What is known of a prompt; None: nothing."""
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
        """A group of a prompt completed; what is known of the prompt now.

        Args:
            prompt: its id.
            lengths: completion tokens of its samples, at least one.
            cut: which of them would have gone on.
            version: of the learner by now.
            is_late: the slowest lane would have been late with it, as was foretold.
        """
        shape, (own, variance), size = self.shape, self._own_at(prompt, version), len(lengths)
        weight, after = variance / (variance + shape.noise / size), own
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
        left = np.where(self._versions[prompts] == _NEVER, 0.0, np.exp(-shape.fading * passed))
        expected = 0.0 if self._expected is None else self._expected[prompts]
        own = left * self._means[prompts] + (1.0 - left) * expected
        return shape.level + own, left**2 * self._variances[prompts] + (1.0 - left**2) * self._unknown

    def usual(self, prompt: int, version: int) -> float:
        """Tokens of a sample of one prompt at a version, by the mean of logarithms; 0 before any group was seen."""
        if not self.shape.num_groups:
            return 0.0
        return exp(self.shape.level + self._own_at(prompt, version)[0])

    def longest_of(
        self, prompts: npt.NDArray[np.int64], group_size: int | npt.NDArray[np.int64], version: int
    ) -> Floats:
        """Tokens of the longest of K samples of each prompt: its quantile `SHARE`, were none cut.

        K is one number, or one for each prompt; each that was not asked for before takes some milliseconds.
        """
        means, shared = self.of(prompts, version)
        total, sizes = shared + self.shape.noise, np.broadcast_to(group_size, prompts.shape)
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
        left = exp(-self.shape.fading * max(0, version - visit.version))
        own = left * visit.mean + (1.0 - left) * expected
        return own, left**2 * visit.variance + (1.0 - left**2) * self._unknown

    def _expected_of(self, prompt: int) -> float:
        return 0.0 if self._expected is None else float(self._expected[prompt])

    @property
    def _unknown(self) -> float:
        """Variance of what a prompt has of its own around what is expected of it."""
        return self.shape.spread if self._expected is None else self._expected_variance

    def _uncut(self, lengths: Sequence[int], cut: Sequence[bool], own: float) -> tuple[list[float], float]:
        """Log tokens, and of what was cut the mean of those that come as far; and the variances of these, added up."""
        center, noise = self.shape.level + own, self.shape.noise
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
        """What was foretold of a group, N(own, variance) for its prompt, with what came."""
        shape, keep = self.shape, 1.0 - 1.0 / SHAPE_MEMORY
        total = variance + shape.noise
        score = float(np.interp(variance / total, _SHARES, _scores_of_longest(len(values))))
        shown = sum(values) / len(values) - shape.level
        shape.num_foretold = keep * shape.num_foretold + 1.0
        shape.num_covered = keep * shape.num_covered + (max(values) <= shape.level + own + sqrt(total) * score)
        shape.num_late = keep * shape.num_late + is_late
        shape.total_square = keep * shape.total_square + shown**2
        shape.error_square = keep * shape.error_square + (shown - own) ** 2

    def _learn(self, prompt: int, values: Sequence[float], beyond: float, version: int) -> None:
        """What a group says of the spread of all."""
        shape, size = self.shape, len(values)
        mean, keep = sum(values) / size, 1.0 - 1.0 / SHAPE_MEMORY
        if size > 1:  # one sample says nothing of it; of several the mean takes a part of what each may lie beyond
            within = sum((value - mean) ** 2 for value in values) + beyond * (size - 1) / size
            shape.noise_sum = keep * shape.noise_sum + within
            shape.noise_weight = keep * shape.noise_weight + (size - 1)
        shown = mean - shape.level
        shape.spread_sum = max(0.0, keep * shape.spread_sum + shown**2 - shape.noise / size)
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
    """Standard scores of the quantile `SHARE` of the longest of K, by the share of variance that all K have in common.

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


def bucket_of(num_tokens: float) -> int:
    """The bucket of a length: 0 is one token, and each octave has two."""
    whole = int(num_tokens)
    return _BUCKETS[whole] if whole < len(_BUCKETS) else _bucket(whole)


def _bucket(num_tokens: int) -> int:
    return min(NUM_BUCKETS - 1, int(2 * log2(max(1, num_tokens))))


_BUCKETS = bytes(_bucket(num_tokens) for num_tokens in range(2**16))


def bounds_of(bucket: int) -> tuple[int, int]:
    """The least and greatest length of a bucket, in tokens."""
    return ceil(2 ** (bucket / 2)), ceil(2 ** ((bucket + 1) / 2)) - 1


class LengthCounts(msgspec.Struct):
    """How many completions of each bucket, the older ones counting less."""

    counts: list[float] = []
    unit: float = 1.0
    """What the next sample counts; growing it is cheaper than fading all counts."""

    def add(self, lengths: Iterable[int], memory: float = MEMORY) -> None:
        """Count completions, one after the other. After `memory` further ones each counts 1/e of a new one."""
        counts, unit, growth = self.counts or [0.0] * NUM_BUCKETS, self.unit, 1.0 + 1.0 / memory
        for num_tokens in lengths:
            counts[bucket_of(num_tokens)] += unit
            unit *= growth
            if unit > _RESCALE_AT:
                counts = [count / unit for count in counts]
                unit = 1.0
        self.counts, self.unit = counts, unit

    @property
    def total(self) -> float:
        """How many new samples all of them count as."""
        return sum(self.counts) / self.unit

    def shares(self) -> list[float]:
        """The share of each bucket; all 0 before the first sample."""
        total = sum(self.counts)
        return [count / total for count in self.counts] if total else [0.0] * NUM_BUCKETS


class LengthFidelity(msgspec.Struct, frozen=True):
    """How far the lengths trained are from those generated."""

    ks: float = 0.0
    """Kolmogorov-Smirnov distance over the buckets: 0 the same, 1 disjoint; 0 before any training."""
    p95_ratio: float = 1.0
    """95th percentile trained over that generated, below 1 where long answers are starved; 1 before any training.
    Within buckets of half an octave it is interpolated, so it can be off by a factor of sqrt(2) at most, if the lengths
    of one bucket lie on one of its ends."""
    covered: float = 0.0
    """Share of the groups whose longest completion was no longer than foretold: 0.9 is right; 0 before any."""
    foretold: float = 0.0
    """Share of the variance among prompts' mean lengths, in logarithms, that was foretold."""
    late: float = 0.0
    """Share of the groups that the slowest lane would have been late with, by what was foretold."""


class Fidelity(msgspec.Struct):
    """Lengths generated and lengths trained, side by side."""

    generated: LengthCounts = msgspec.field(default_factory=LengthCounts)
    trained: LengthCounts = msgspec.field(default_factory=LengthCounts)
    warned_at: int = -1

    @property
    def now(self) -> LengthFidelity:
        if not self.trained.counts or not self.generated.counts:
            return LengthFidelity()
        generated, trained = self.generated.shares(), self.trained.shares()
        ratio = quantile(trained, _LONG) / quantile(generated, _LONG)
        return LengthFidelity(ks_distance(generated, trained), ratio)

    @property
    def is_alarming(self) -> bool:
        """Do the two differ by more than `ALARM`, after enough samples to tell?"""
        return self.trained.total >= MIN_SAMPLES * (1 - 1e-9) and self.now.ks > ALARM

    def starved(self) -> str:
        """The lengths that training misses most, in words."""
        pairs = zip(self.generated.shares(), self.trained.shares(), strict=True)
        missing = sorted(((made - used, made, used, b) for b, (made, used) in enumerate(pairs)), reverse=True)
        named = [
            "{}-{} tokens ({:.1%} of generated, {:.1%} of trained)".format(*bounds_of(bucket), made, used)
            for gap, made, used, bucket in missing[:NUM_NAMED]
            if gap > 0
        ]
        return "; ".join(named)


def quantile(shares: Sequence[float], share: float) -> float:
    """The length in tokens below which this share of the completions lies, interpolated within its bucket."""
    below = 0.0
    for bucket, part in enumerate(shares):
        if part and below + part >= share:
            return float(2 ** ((bucket + (share - below) / part) / 2))
        below += part
    return float(2 ** (len(shares) / 2))  # the sum was rounded below the share


def ks_distance(first: Sequence[float], second: Sequence[float]) -> float:
    """The greatest difference between two cumulative distributions over the same buckets."""
    return max(abs(a - b) for a, b in zip(accumulate(first), accumulate(second), strict=True))
