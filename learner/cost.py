"""CostModel: what a sequence costs to compute, for packing and for sharing work among replicas."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class CostModel:
    """Cost of a sequence of n tokens: per_token * n + per_token_squared * n^2, in any unit.

    The first term is the weights' share (a token passes through each of them once), the second that of attention,
    where every token looks at those before it in its own sequence. Only their ratio matters. The default counts tokens.
    """

    per_token: float = 1.0
    per_token_squared: float = 0.0

    def of(self, lengths_B: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The cost of each sequence, from its tokens: [B] -> [B]."""
        tokens_B = np.asarray(lengths_B, np.float64)
        return self.per_token * tokens_B + self.per_token_squared * tokens_B**2
