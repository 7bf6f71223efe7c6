"""Sums of measurements, from which least squares fit a law later (`planning.costs`); microseconds each, no memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class Sums:
    """Products of the terms of a law with each other and with what was measured, added up."""

    __slots__ = ("_products", "_squares", "_targets", "num_measured", "total")

    def __init__(self, num_terms: int) -> None:
        self._products: npt.NDArray[np.float64] = np.zeros((num_terms, num_terms))
        self._targets: npt.NDArray[np.float64] = np.zeros(num_terms)
        self._squares = 0.0
        self.num_measured = 0
        self.total = 0.0
        """Sum of what was measured."""

    def add(self, terms: Sequence[float], measured: float) -> None:
        """Add one measurement, and the values of the terms at which it was taken."""
        values = np.asarray(terms, np.float64)
        self._products += np.outer(values, values)
        self._targets += measured * values
        self._squares += measured * measured
        self.num_measured += 1
        self.total += measured

    def as_list(self) -> list[float]:
        sums = (self._squares, self.num_measured, self.total)
        return [*map(float, sums), *self._targets.tolist(), *self._products.reshape(-1).tolist()]
