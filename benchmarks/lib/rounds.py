"""Means, spreads, and ratios over rounds in which the sides take turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median

Figures = Mapping[str, float | None]
"""Figures of one run or round by name; None if a figure was not measured."""


def median_ratio(numerators: Iterable[float], denominators: Iterable[float]) -> float:
    """Return the median over rounds of numerator / denominator."""
    return median(above / below for above, below in zip(numerators, denominators, strict=True))


def means(found: Sequence[Figures]) -> dict[str, float | None]:
    """Return the mean of each figure over the runs that have this figure."""
    known = {name: [value for each in found if (value := each[name]) is not None] for name in found[0]}
    return {name: fmean(values) if values else None for name, values in known.items()}


def spread(values: Sequence[float], form: str) -> str:
    """Format the mean as a cell, with the minimum and maximum in brackets if they differ when formatted."""
    middle, low, high = (form.format(value) for value in (fmean(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"
