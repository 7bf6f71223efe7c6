"""LengthLaw: how many tokens completions have, and how much of that the prompt decides; PromptStream: in their order.

A law is a distribution of lengths and the share of variance, on a normal scale, that siblings have in common:

    z = sqrt(explained) * u(prompt) + sqrt(1 - explained) * e(sample),   length = quantile(Phi(z)),   u, e ~ N(0, 1)

So any measured distribution can have any share of it explained, and the best ranking of prompts is known: by u.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

NUM_QUANTILES = 257
REACH = 4.0
"""Quantiles are kept for normal scores up to this: of 30,000 samples two lie beyond, and count as the outermost."""


@dataclass(frozen=True)
class LengthLaw:
    """Lengths by their quantiles at evenly spaced normal scores from -4 to 4."""

    quantiles: tuple[float, ...]
    explained: float = 0.0
    """Share of the variance of the normal score that the prompt decides, 0..1."""

    def __post_init__(self) -> None:
        """Refuse what is no law.

        Raises:
            ValueError: lengths below a token, or not ascending; a share that is none.
        """
        if len(self.quantiles) < 2 or self.quantiles[0] < 1 or list(self.quantiles) != sorted(self.quantiles):
            raise ValueError("quantiles of lengths are at least two, at least 1, and ascending")
        if not 0.0 <= self.explained <= 1.0:
            raise ValueError(f"explained = {self.explained}: a share of the variance lies between 0 and 1")

    @classmethod
    def measured(cls, lengths: npt.ArrayLike, explained: float = 0.0) -> LengthLaw:
        """Of completions that were seen; ValueError where there are none."""
        seen = np.asarray(lengths, np.float64)
        if not len(seen):
            raise ValueError("a law of lengths needs at least one completion")
        at = [NormalDist().cdf(score) for score in _SCORES.tolist()]
        return cls(tuple(np.quantile(seen, at).tolist()), explained)

    def lengths(self, prompt_score: float | Floats, sample_scores: Sequence[float] | Floats) -> Floats:
        """Whole tokens of the samples of a prompt, from standard normal scores of the prompt and of each sample."""
        own = math.sqrt(1.0 - self.explained)
        return self.at(math.sqrt(self.explained) * prompt_score + own * np.asarray(sample_scores))

    def at(self, scores: Floats) -> Floats:
        """Whole tokens of samples, from the standard normal scores of their lengths."""
        return np.maximum(1.0, np.rint(np.interp(scores, self._scores, self.quantiles)))

    def share_below(self, prompt_scores: Floats, scores: Floats) -> Floats:
        """Of the samples of a prompt those whose length has at most such a score."""
        own = max(1e-9, math.sqrt(1.0 - self.explained))
        return np.vectorize(NormalDist().cdf)((scores - math.sqrt(self.explained) * prompt_scores) / own)

    @cached_property
    def _scores(self) -> Floats:
        return np.linspace(-REACH, REACH, len(self.quantiles))

    @cached_property
    def mean(self) -> float:
        scores = np.linspace(-2 * REACH, 2 * REACH, 8001)
        density = np.exp(-(scores**2) / 2)
        return float((np.interp(scores, self._scores, self.quantiles) * density).sum() / density.sum())

    @property
    def longest(self) -> float:
        return self.quantiles[-1]


_SCORES = np.linspace(-REACH, REACH, NUM_QUANTILES)


class PromptStream:
    """Which prompt comes next, in the data's order, and how long its samples will be; many at once, for speed."""

    _MANY = 4096

    def __init__(self, law: LengthLaw, num_prompts: int, group_size: int, seed: int) -> None:
        """Of so many prompts, each of which the law makes long or short for ever; a new order in every epoch."""
        self._law, self._group_size, self._num_prompts = law, group_size, num_prompts
        self._scores = np.random.default_rng([seed, 0]).standard_normal(num_prompts)
        self._random = np.random.default_rng([seed, 1])
        self._order: list[int] = []
        self._ahead: list[int] = []
        """The next of them, in reverse."""
        self._known: dict[int, list[list[float]]] = {}
        """Lengths of the samples of their groups, by prompt."""

    def next(self) -> int:
        """The next prompt of the data's order."""
        if not self._ahead:
            while len(self._order) < self._MANY:
                self._order += self._random.permutation(self._num_prompts).tolist()
            self._ahead = self._order[: self._MANY][::-1]
            del self._order[: self._MANY]
            self._draw(self._ahead[::-1])
        return self._ahead.pop()

    def lengths(self, prompt: int) -> list[float]:
        """Tokens of each sample of the group of a prompt that is leased now."""
        if prompt not in self._known:
            self._draw([prompt])
        known = self._known.pop(prompt)
        if len(known) > 1:
            self._known[prompt] = known[1:]
        return known[0]

    def _draw(self, prompts: list[int]) -> None:
        own = self._random.standard_normal((len(prompts), self._group_size))
        lengths = self._law.lengths(self._scores[prompts][:, None], own)
        for prompt, each in zip(prompts, lengths.tolist(), strict=True):
            self._known.setdefault(prompt, []).append(each)


def explained_by_prompt(prompt_ids: npt.ArrayLike, lengths: npt.ArrayLike) -> float:
    """Share of the variance of the normal scores of lengths that prompts explain, by one-way analysis of variance.

    Args:
        prompt_ids: of each completion.
        lengths: its tokens.
    """
    prompts, values = np.asarray(prompt_ids), np.asarray(lengths, np.float64)
    if len(values) < 2 or values.min() == values.max():
        return 0.0
    ranks = np.empty(len(values))
    ranks[np.argsort(values, kind="stable")] = np.arange(1, len(values) + 1)
    _, same = np.unique(values, return_inverse=True)  # ties share the mean of their ranks
    ranks = (np.bincount(same, ranks) / np.bincount(same))[same]
    normal = NormalDist()
    scores = np.array([normal.inv_cdf((rank - 0.5) / len(values)) for rank in ranks.tolist()])
    _, which = np.unique(prompts, return_inverse=True)
    counts = np.bincount(which)
    within_df = len(scores) - len(counts)
    if within_df < 1 or len(counts) < 2:
        return 0.0
    means = np.bincount(which, scores) / counts
    within = float(((scores - means[which]) ** 2).sum()) / within_df
    between = float((counts * (means - scores.mean()) ** 2).sum()) / (len(counts) - 1)
    size = (len(scores) - float((counts**2).sum()) / len(scores)) / (len(counts) - 1)
    shared = max(0.0, (between - within) / size)
    return shared / (shared + within) if shared + within > 0.0 else 0.0
