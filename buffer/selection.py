"""Choosing a step's groups among more candidates than it needs, by their lengths.

Pure functions over what the service knows of each candidate. `corrected` prefers lengths that training has
seen less of than were generated; `well_packed` then swaps groups of like length for others until the
samples fill micro-batches well. Both keep the law's order where they have no reason to leave it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from buffer.lengths import NUM_BUCKETS, Fidelity, bucket_of

NUM_SWAPS = 128
"""Swaps that `well_packed` tries; packing a step costs well under a millisecond each time."""
GOOD_ENOUGH = 0.99
"""Fill of the micro-batches above which it stops."""


class Offer(NamedTuple):
    """A candidate."""

    group_id: int
    lengths: tuple[int, ...]
    """Tokens of each sample that the step would use."""
    completions: tuple[int, ...]
    """Completion tokens of the same samples."""

    @property
    def bucket(self) -> int:
        """Of its mean completion."""
        return bucket_of(sum(self.completions) / max(1, len(self.completions)))


def corrected(offers: Sequence[Offer], num: int, fidelity: Fidelity) -> list[Offer]:
    """The `num` offers that bring the trained lengths nearest to the generated ones, taken greedily.

    Each pick lowers the squared distance between the counts trained so far, those picked included, and
    the counts that as many samples of the generated distribution would have.
    """
    if num >= len(offers):
        return list(offers)
    wanted = np.array(fidelity.generated.shares())
    have = np.array(fidelity.trained.shares()) * fidelity.trained.total
    histograms = np.stack([_histogram(offer.completions) for offer in offers])
    squares = (histograms**2).sum(axis=1)
    is_left = np.ones(len(offers), np.bool_)
    picked: list[Offer] = []
    for _ in range(num):
        deficit = wanted * (have.sum() + histograms[is_left].sum(axis=1).mean()) - have
        gains = np.where(is_left, 2 * (histograms @ deficit) - squares, -np.inf)
        best = int(gains.argmax())
        is_left[best] = False
        have += histograms[best]
        picked.append(offers[best])
    return picked


def well_packed(
    fixed: Sequence[Offer], chosen: Sequence[Offer], spare: Sequence[Offer], budget: int, random: np.random.Generator
) -> list[Offer]:
    """`chosen` with some offers swapped for spare ones of the same length bucket, so that all pack better.

    Args:
        fixed: offers that are in the step in any case.
        chosen: offers that may be swapped; as many are returned.
        spare: what they may be swapped for.
        budget: tokens of a micro-batch.
        random: proposes the swaps.
    """
    chosen, spare = list(chosen), list(spare)
    if not chosen or not spare:
        return chosen
    best = fill([*fixed, *chosen], budget)
    for out, new in zip(
        random.integers(len(chosen), size=NUM_SWAPS), random.integers(len(spare), size=NUM_SWAPS), strict=True
    ):
        if best >= GOOD_ENOUGH:
            break
        if chosen[out].bucket != spare[new].bucket:
            continue
        chosen[out], spare[new] = spare[new], chosen[out]
        tried = fill([*fixed, *chosen], budget)
        if tried > best:
            best = tried
        else:
            chosen[out], spare[new] = spare[new], chosen[out]
    return chosen


def fill(offers: Sequence[Offer], budget: int) -> float:
    """The share of micro-batches of `budget` tokens that the offers' samples fill, packed best-fit decreasing."""
    lengths = [length for offer in offers for length in offer.lengths]
    room = sum(max(budget, bin_size) for bin_size in best_fit(lengths, budget))
    return sum(lengths) / room if room else 1.0


def best_fit(lengths: Sequence[int], budget: int) -> list[int]:
    """Tokens in each micro-batch: every length, longest first, into the fullest one that has room.

    A length above the budget gets a micro-batch of its own.
    """
    free: list[int] = []
    full: list[int] = []
    for length in sorted(lengths, reverse=True):
        if length >= budget:
            full.append(length)
            continue
        place = bisect_left(free, length)
        left = free.pop(place) if place < len(free) else budget
        insort(free, left - length)
    return full + [budget - left for left in free]


def _histogram(completions: Sequence[int]) -> npt.NDArray[np.float64]:
    return np.bincount([bucket_of(length) for length in completions], minlength=NUM_BUCKETS).astype(np.float64)
