"""Laws of lengths that are made up."""

from __future__ import annotations

import numpy as np

from planning.lengths import NUM_QUANTILES, REACH, LengthLaw


def lognormal(median: float, sigma: float, longest: int, explained: float = 0.0) -> LengthLaw:
    """exp(N(log median, sigma^2)), cut at `longest` as `max_new_tokens` does, and at one token."""
    scores = np.linspace(-REACH, REACH, NUM_QUANTILES)
    return LengthLaw(tuple(np.clip(median * np.exp(sigma * scores), 1.0, longest).tolist()), explained)


def constant(length: int) -> LengthLaw:
    """Every completion alike."""
    return LengthLaw((float(length), float(length)))
