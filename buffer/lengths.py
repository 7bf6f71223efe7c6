"""Lengths of completions: how those generated and those trained are distributed, and whether training leaves some out.

Fidelity counts lengths in log-spaced buckets, two to an octave, with exponential forgetting: of completions that were
committed, and of those that entered a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import log2

import msgspec

NUM_BUCKETS = 48
"""Two to an octave: completions up to 2^24 tokens."""
ALARM = 0.2
"""Kolmogorov-Smirnov distance of trained from generated lengths above which a run is warned."""
MIN_SAMPLES = 256
"""Completions trained on before any alarm."""
MEMORY = 4096
"""Completions after which the counts have faded by e."""
_RESCALE_AT = 1e9
_LONG = 0.95


def bucket_of(num_tokens: int) -> int:
    """Return the bucket of a length: 0 is one token, and each octave has two."""
    return min(NUM_BUCKETS - 1, int(2 * log2(max(1, num_tokens))))


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
        total = sum(self.counts)
        return [count / total for count in self.counts] if total else [0.0] * NUM_BUCKETS


class LengthFidelity(msgspec.Struct, frozen=True):
    """How far the lengths trained are from those generated."""

    ks: float = 0.0
    """Kolmogorov-Smirnov distance over the buckets: 0 the same, 1 disjoint; 0 before any training."""
    p95_ratio: float = 1.0
    """95th percentile trained over that generated, below 1 if long answers are starved; 1 before any training. It is
    interpolated within buckets, so it is off by a factor of sqrt(2) at most."""
    covered: float = 0.0
    """Share of the groups whose longest completion was no longer than predicted: 0.9 is right; 0 before any."""
    foretold: float = 0.0
    """Predicted share of the variance among prompts' mean log lengths."""
    late: float = 0.0
    """Share of the groups that the slowest lane was predicted to be late with."""


class Fidelity(msgspec.Struct):
    """Lengths generated and lengths trained, side by side."""

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
        """Do the two differ by more than `ALARM`, after enough samples to tell?"""
        return self.trained.total >= MIN_SAMPLES * (1 - 1e-9) and self.now.ks > ALARM


def quantile(shares: Sequence[float], share: float) -> float:
    """The length in tokens below which this share of the completions lies, interpolated within its bucket."""
    below = 0.0
    for bucket, part in enumerate(shares):
        if part and below + part >= share:
            return float(2 ** ((bucket + (share - below) / part) / 2))
        below += part
    return float(2 ** (len(shares) / 2))  # the sum was rounded below the share


def ks_distance(first: Sequence[float], second: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(accumulate(first), accumulate(second), strict=True))
