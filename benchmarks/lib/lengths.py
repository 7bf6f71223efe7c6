"""Synthetic distributions of completion lengths."""

from __future__ import annotations

import numpy as np

from leeway.planning.lengths import NUM_QUANTILES, REACH, LengthDistribution


def lognormal(median: float, sigma: float, longest: int, explained: float = 0.0) -> LengthDistribution:
    """Return the distribution exp(N(log median, sigma^2)), clipped to at least one token and at most `longest`."""
    scores = np.linspace(-REACH, REACH, NUM_QUANTILES)
    return LengthDistribution(tuple(np.clip(median * np.exp(sigma * scores), 1.0, longest).tolist()), explained)


def constant(length: int) -> LengthDistribution:
    """Return the distribution in which every completion has the same length."""
    return LengthDistribution((float(length), float(length)))
