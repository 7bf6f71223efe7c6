"""Means, spreads, and ratios of rounds in which the sides took turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median

Figures = Mapping[str, float | None]
"""Of one run or round, by name; None where it has none."""


def median_ratio(numerators: Iterable[float], denominators: Iterable[float]) -> float:
    """The median of the ratios of rounds."""
    return median(above / below for above, below in zip(numerators, denominators, strict=True))


def means(found: Sequence[Figures]) -> dict[str, float | None]:
    """Of each figure the mean over those that have it."""
    known = {name: [value for each in found if (value := each[name]) is not None] for name in found[0]}
    return {name: fmean(values) if values else None for name, values in known.items()}


def spread(values: Sequence[float], form: str) -> str:
    """The mean as a cell, in brackets the lowest and the highest where they read otherwise."""
    middle, low, high = (form.format(value) for value in (fmean(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"
