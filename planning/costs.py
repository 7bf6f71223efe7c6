"""What work costs: linear laws without negative coefficients, and their fit to work that was measured.

TokenTime    one token of every sample that runs in an engine
Moments      sums over many measurements, from which a law is fitted by least squares
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from common.sums import Sums

Floats = npt.NDArray[np.float64]

_ALIKE = 1e7
"""Condition of the scaled products from which on terms are not told apart."""
_NO_GAIN = 1e-4
"""A law with more terms has to lower the squared error by so large a share."""


@dataclass(frozen=True, slots=True)
class TokenTime:
    """Seconds of an engine's step, which makes one token of every running sample.

        base + per_sample * b + per_kv_token * c + per_prompt_token * p

    b samples run, their contexts have c tokens together, and p prompt tokens are computed in the step. The base is
    what reading the weights once costs, `per_kv_token` what reading the keys and values of a token does.
    """

    base: float
    per_sample: float = 0.0
    per_kv_token: float = 0.0
    per_prompt_token: float = 0.0

    def seconds(self, num_samples: float, num_kv_tokens: float, num_prompt_tokens: float = 0.0) -> float:
        return (
            self.base
            + self.per_sample * num_samples
            + self.per_kv_token * num_kv_tokens
            + self.per_prompt_token * num_prompt_tokens
        )


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients of a law, in the order of its terms, and how well they describe what they were fitted to."""

    coefficients: tuple[float, ...]
    num_measured: int
    relative_error: float
    """Root mean square of the residuals over the mean of what was measured."""


class Moments(Sums):
    """What least squares need to know of many measurements: sums that are stored, added and fitted."""

    __slots__ = ()

    @classmethod
    def from_list(cls, sums: Sequence[float]) -> Moments:
        """As they were stored; ValueError where they are none."""
        num_terms = int(len(sums) ** 0.5)
        while num_terms and 3 + num_terms + num_terms**2 > len(sums):
            num_terms -= 1
        if not num_terms or 3 + num_terms + num_terms**2 != len(sums):
            raise ValueError(f"{len(sums)} numbers are not the sums of any law")
        found, values = cls(num_terms), np.array(sums, np.float64)
        found._squares, found.num_measured, found.total = float(values[0]), int(values[1]), float(values[2])
        found._targets = values[3 : 3 + num_terms]
        found._products = values[3 + num_terms :].reshape(num_terms, num_terms)
        return found

    def __add__(self, other: Moments) -> Moments:
        return Moments.from_list([one + two for one, two in zip(self.as_list(), other.as_list(), strict=True)])

    def fit(self) -> Fit | None:
        """The law with the least squared error among those without a negative coefficient; None before two.

        There are few terms, so each subset of them is solved, and the best admissible one is the optimum (Lawson and
        Hanson, Solving Least Squares Problems, 1974, chapter 23: it is the unconstrained one over its own support).
        Where measurements do not tell two terms apart, the law with fewer terms is taken.
        """
        if self.num_measured < 2 or self.total <= 0.0:
            return None
        best: tuple[float, Floats] | None = None
        for size in range(1, len(self._targets) + 1):
            for support in combinations(range(len(self._targets)), size):
                found = self._solve(list(support))
                if found is not None and (best is None or found[0] < best[0] - _NO_GAIN * best[0]):
                    best = found
        if best is None:
            return None
        error = (best[0] / self.num_measured) ** 0.5 / (self.total / self.num_measured)
        return Fit(tuple(map(float, best[1])), self.num_measured, error)

    def _solve(self, support: list[int]) -> tuple[float, Floats] | None:
        """Squared error and coefficients with these terms alone; None where they are not told apart, or one is < 0."""
        products = self._products[np.ix_(support, support)]
        scale = np.sqrt(np.diag(products))
        if not scale.all():
            return None
        scaled = products / np.outer(scale, scale)
        if np.linalg.cond(scaled) > _ALIKE:
            return None
        part = np.linalg.solve(scaled, self._targets[support] / scale) / scale
        if (part < 0.0).any():
            return None
        coefficients = np.zeros(len(self._targets))
        coefficients[support] = part
        error = self._squares - 2.0 * coefficients @ self._targets + coefficients @ self._products @ coefficients
        return max(0.0, float(error)), coefficients
