"""Fidelity: compares the length distribution of completions used for training with that of all completions.

Fidelity counts the lengths of committed completions, and of completions that steps trained on, in log-spaced buckets,
two per octave, with exponential decay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import log2

import msgspec

NUM_BUCKETS = 48
"""Number of buckets; at two per octave they cover completions of up to 2^24 tokens."""
ALARM = 0.2
"""Kolmogorov-Smirnov distance between the two length distributions above which the run logs a warning."""
MIN_SAMPLES = 256
"""Minimum number of completions used for training before any alarm."""
MEMORY = 4096
"""Number of completions after which the counts have decayed by a factor of e."""
_RESCALE_AT = 1e9
_LONG = 0.95


def bucket_of(num_tokens: int) -> int:
    """Return the bucket of a length. Bucket 0 is for one token; each octave has two buckets."""
    return min(NUM_BUCKETS - 1, int(2 * log2(max(1, num_tokens))))


class LengthCounts(msgspec.Struct):
    """Exponentially decayed number of completions in each bucket."""

    counts: list[float] = []
    unit: float = 1.0
    """Weight of the next sample; increasing this weight is cheaper than decaying all counts."""

    def add(self, lengths: Iterable[int], memory: float = MEMORY) -> None:
        """Count completions in order. After `memory` more completions, a completion counts 1/e as much as a new one."""
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
        """Sum of all counts, in units of a new sample."""
        return sum(self.counts) / self.unit

    def shares(self) -> list[float]:
        total = sum(self.counts)
        return [count / total for count in self.counts] if total else [0.0] * NUM_BUCKETS


class LengthFidelity(msgspec.Struct, frozen=True):
    """Difference between the lengths of completions used for training and of all completions."""

    ks: float = 0.0
    """Kolmogorov-Smirnov distance over the buckets: 0 if equal, 1 if disjoint, and 0 before any training."""
    p95_ratio: float = 1.0
    """95th percentile of the lengths used for training, divided by that of all lengths; below 1 if training uses too
    few long answers, 1 before any training. Interpolation in buckets limits the error to a factor of sqrt(2)."""
    covered: float = 0.0
    """Fraction of groups whose longest completion was no longer than predicted; target 0.9; 0 before any group."""
    predicted: float = 0.0
    """Fraction of the variance among prompts' mean log lengths that the predictions explain."""
    late: float = 0.0
    """Fraction of groups predicted to miss the staleness deadline on the slowest lane."""


class Fidelity(msgspec.Struct):
    """Length counts of generated completions and of completions used for training."""

    generated: LengthCounts = msgspec.field(default_factory=LengthCounts)
    trained: LengthCounts = msgspec.field(default_factory=LengthCounts)

    @property
    def now(self) -> LengthFidelity:
        if not self.trained.counts or not self.generated.counts:
            return LengthFidelity()
        generated, trained = self.generated.shares(), self.trained.shares()
        ratio = quantile(trained, _LONG) / quantile(generated, _LONG)
        return LengthFidelity(ks_distance(generated, trained), ratio)

    @property
    def is_alarming(self) -> bool:
        """True if the distributions differ by over `ALARM` after training on at least `MIN_SAMPLES` completions."""
        return self.trained.total >= MIN_SAMPLES * (1 - 1e-9) and self.now.ks > ALARM


def quantile(shares: Sequence[float], share: float) -> float:
    """Return the length in tokens below which this fraction of completions lies, interpolated within its bucket."""
    below = 0.0
    for bucket, part in enumerate(shares):
        if part and below + part >= share:
            return float(2 ** ((bucket + (share - below) / part) / 2))
        below += part
    return float(2 ** (len(shares) / 2))  # reached if rounding makes the sum smaller than `share`


def ks_distance(first: Sequence[float], second: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(accumulate(first), accumulate(second), strict=True))
