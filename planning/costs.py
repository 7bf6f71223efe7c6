"""Cost models: linear functions with non-negative coefficients, fitted to measured steps.

TokenTime     seconds of an engine step, which generates one token of every running sample
LearnerTime   seconds of a learner step, for any parallel shape, from the costs of its parts on one stage
LeastSquares  sums over measurements, from which a cost model is fitted by least squares

    seconds of a step = step + sum over minibatches of  (M + b) * (micro_batch + work / (P * M))

`work` is the work of the most expensive replica, split into M micro-batches on P stages; b is the bubble of the
schedule. `leeway.learner.packing` computes the work of a batch from a cost per token and per squared token; shared
prompts count once. The coefficients include further epochs, and a forward pass that updates take regardless of packing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from leeway.learner.packing import (
    MOST_EVALUATED,
    ONE_PASS,
    CostModel,
    FloatArray,
    IntArray,
    PackingRule,
    cost_of_micro_batches,
    micro_batches_required,
)

NUM_TERMS = 4
MANY_SAMPLES = 4096
"""Number of samples in a minibatch above which only every n-th group is packed, and the total is extrapolated."""
_RIDGE = 1e-10
"""Added to the scaled products, so that terms which the measurements cannot separate get a very large variance."""
_LEAST_ERROR = 0.01
"""Minimum relative error of a measurement; a perfect fit to a few measurements proves nothing about others."""


@dataclass(frozen=True, slots=True)
class TokenTime:
    """Seconds of an engine step, which generates one token of every running sample.

        base + per_sample * b + per_kv_token * c + per_prompt_token * p

    b is the number of running samples, c the total tokens of their contexts, p the prompt tokens computed in the step.
    `base` covers one read of the weights, `per_kv_token` one read of the keys and values of a token.
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


class Fit(NamedTuple):
    """Coefficients of a cost model, in the order of its terms, and their goodness of fit."""

    coefficients: tuple[float, ...]
    relative_error: float
    """Root mean square of the residuals, divided by the mean of the measurements."""


class LeastSquares:
    """Sums over measurements, from which a cost model is fitted by least squares; they can be stored and added.

    The sums are the squares, number and total of the measurements, their products with the terms of the model,
    and the products of the terms with each other.
    """

    def __init__(self, num_terms: int) -> None:
        self._products: FloatArray = np.zeros((num_terms, num_terms))
        self._targets: FloatArray = np.zeros(num_terms)
        self._squares = 0.0
        self.num_measured = 0
        self.total = 0.0
        """Sum of the measurements."""

    def add(self, terms: Sequence[float], measured: float) -> None:
        """Add a measurement with the values of its terms."""
        values = np.asarray(terms, np.float64)
        self._products += np.outer(values, values)
        self._targets += measured * values
        self._squares += measured * measured
        self.num_measured += 1
        self.total += measured

    def as_list(self) -> list[float]:
        sums = (self._squares, self.num_measured, self.total)
        return [*map(float, sums), *self._targets.tolist(), *self._products.reshape(-1).tolist()]

    @classmethod
    def from_list(cls, sums: Sequence[float]) -> LeastSquares:
        """Restore the sums of `as_list`; raise ValueError if their number matches no cost model."""
        num_terms = int(max(0.0, len(sums) - 2.75) ** 0.5 - 0.5)  # the root of n**2 + n + 3 = len(sums)
        if not num_terms or 3 + num_terms + num_terms**2 != len(sums):
            raise ValueError(f"{len(sums)} numbers cannot be the sums of a cost model")
        found, values = cls(num_terms), np.array(sums, np.float64)
        found._squares, found.num_measured, found.total = float(values[0]), int(values[1]), float(values[2])
        found._targets = values[3 : 3 + num_terms]
        found._products = values[3 + num_terms :].reshape(num_terms, num_terms)
        return found

    def __add__(self, other: LeastSquares) -> LeastSquares:
        return LeastSquares.from_list([one + two for one, two in zip(self.as_list(), other.as_list(), strict=True)])

    def fit(self) -> Fit | None:
        """Return the fit with the least squared error and no negative coefficient, or None before two measurements.

        If the measurements cannot separate terms, these share their cost in some way.
        """
        if self.num_measured < 2 or self.total <= 0.0:
            return None
        scale, scaled = self._scaled
        factor = np.linalg.cholesky(scaled)
        part, _ = nnls(factor.T, np.linalg.solve(factor, self._targets / scale))
        found = part / scale
        squares = self._squares - 2.0 * found @ self._targets + found @ self._products @ found
        error = max(0.0, float(squares) / self.num_measured) ** 0.5 / (self.total / self.num_measured)
        return Fit(tuple(map(float, found)), error)

    def error_at(self, factors: Sequence[float]) -> float:
        """Return the relative standard error of a prediction; very large if the measurements do not separate the terms.

        The prediction is for the mean terms times `factors`. The first term must be 1 in every measurement.
        """
        terms = self._products[0] * factors / max(1, self.num_measured)
        if (fit := self.fit()) is None or not (predicted := float(terms @ np.array(fit.coefficients))):
            return math.inf
        scale, scaled = self._scaled
        deviation = max(fit.relative_error, _LEAST_ERROR) * self.total / self.num_measured
        return deviation * float(terms / scale @ np.linalg.solve(scaled, terms / scale)) ** 0.5 / predicted

    @property
    def _scaled(self) -> tuple[FloatArray, FloatArray]:
        """Return the norms of the terms, and the products of the terms divided by their norms."""
        scale = np.sqrt(np.diag(self._products))
        scale[scale == 0.0] = 1.0
        return scale, self._products / np.outer(scale, scale) + _RIDGE * np.eye(len(scale))


# --- the learner --------------------------------------------------------------------------------------


SHAPE_KEYS = ("num_stages", "num_replicas", "num_chunks", "schedule", "token_budget")
"""Keys of `[learner]` that a plan may set."""


@dataclass(frozen=True)
class LearnerShape:
    """Part of the learner config that determines the time of a step."""

    num_stages: int = 1
    num_replicas: int = 1
    num_chunks: int = 1
    schedule: str = "1f1b"
    token_budget: int = 1024
    unit: str = "sequence"
    num_minibatches: int = 1
    """Number of minibatches per step; each is packed and run through the pipeline separately."""
    saves_pass: bool = False
    """Whether updates save a forward pass if no unit is split over micro-batches; False if steps always take it."""
    device: str = "cuda"
    """Type of the stages' devices, which determines how shared prompts count towards the budget."""

    def rule(self, cost: CostModel) -> PackingRule:
        return PackingRule.of_schedule(
            self.schedule,
            self.num_stages,
            self.token_budget,
            self.num_replicas,
            cost,
            self.unit,  # type: ignore[arg-type]
        ).on_device(self.device)

    @property
    def idle(self) -> float:
        """b: idle time of a stage before its first and after its last micro-batch, in micro-batches."""
        return bubble_in_micro_batches(self.schedule, self.num_stages, self.num_chunks)


def bubble_in_micro_batches(schedule: str, num_stages: int, num_chunks: int) -> float:
    """Return the idle time of a stage in a step, in micro-batch times; the forward pass takes a third of one.

    GPipe and 1F1B: P - 1 (arXiv 1811.06965). Interleaved: (P - 1) / V (2104.04473, section 2.2). Zero bubble:
    (P - 1) / (3 V), as F + B - W remains of each of P - 1 (2401.10241, table 1).
    """
    return (num_stages - 1) / ((3 if schedule == "zero_bubble" else 1) * num_chunks)


@dataclass(frozen=True)
class LearnerTime:
    """Seconds of a learner step; the fields are non-negative coefficients in the order of `terms`."""

    step: float
    """Seconds that do not depend on the samples: the update, the draw of the batch, the loss."""
    micro_batch: float = 0.0
    """Fixed seconds of each micro-batch on each stage, independent of its tokens."""
    token: float = 0.0
    """Seconds per token through all stages: forward, backward, and the other passes of the algorithm."""
    token_squared: float = 0.0
    """Seconds per squared token of a sequence through all stages: attention."""

    def seconds(self, lengths: Sequence[int], prompt_tokens: int, group_size: int, shape: LearnerShape) -> float:
        """Return the seconds of a step; `lengths` are the tokens of each sample, prompt and completion, by group."""
        length_B = np.asarray(lengths, np.int64)
        part_B = np.arange(len(length_B)) // group_size % shape.num_minibatches
        parts = [length_B[part_B == part] for part in range(part_B.max() + 1)]
        return self.step + sum(self._minibatch_s(each, prompt_tokens, group_size, shape) for each in parts)

    def _minibatch_s(self, length_B: IntArray, prompt_tokens: int, group_size: int, shape: LearnerShape) -> float:
        every = -(-len(length_B) // MANY_SAMPLES)
        if every > 1:
            some_B = length_B[np.arange(len(length_B)) // group_size % every == 0]
            device = shape.device if shape.num_stages == 1 else "cuda"
            alone = LearnerShape(token_budget=shape.token_budget, unit=shape.unit, device=device)  # balanced replicas
            cost_M, unit = self._micro_batches(some_B, prompt_tokens, group_size, alone)
            times = float(length_B.sum() / some_B.sum()) / shape.num_replicas
            least, _ = micro_batches_required(shape.schedule, shape.num_stages)
            work, num_micro_batches = times * float(cost_M.sum()), max(times * len(cost_M), float(least))
        else:
            cost_M, unit = self._micro_batches(length_B, prompt_tokens, group_size, shape)
            work = float(cost_M.reshape(shape.num_replicas, -1).sum(axis=1).max())
            num_micro_batches = len(cost_M) / shape.num_replicas
        evaluated = num_micro_batches * (length_B - prompt_tokens).sum()
        takes_two = shape.saves_pass and (unit != shape.unit or evaluated > MOST_EVALUATED)
        rounds = (num_micro_batches + shape.idle) * (1 / ONE_PASS if takes_two else 1.0)
        return rounds * (self.micro_batch + work / (shape.num_stages * num_micro_batches))

    def _micro_batches(
        self, length_B: IntArray, prompt_tokens: int, group_size: int, shape: LearnerShape
    ) -> tuple[FloatArray, str]:
        """Return the cost of each micro-batch, and the unit that is never split over micro-batches."""
        group_B = np.arange(len(length_B)) // group_size
        prompt_B, rule = np.full(len(length_B), prompt_tokens), shape.rule(CostModel(self.token, self.token_squared))
        return cost_of_micro_batches(length_B, prompt_B, group_B, rule, group_B)


def terms(
    tokens: float, squares: float, num_micro_batches: int, shape: LearnerShape, *, takes_two: bool = False
) -> tuple[float, ...]:
    """Return the factor of each coefficient of `LearnerTime` for a measured step.

    Args:
        tokens: computed tokens of all replicas.
        squares: sum of the squared lengths of all sequences, without those of prompts shared with another sample.
        num_micro_batches: total number over all replicas, as if the step were one minibatch.
        shape: shape of the learner that took the step.
        takes_two: whether the updates took a separate forward pass.
    """
    num_parts = shape.num_minibatches
    per_part = shape.rule(CostModel()).num_micro_batches(-(-num_micro_batches // num_parts)) / shape.num_replicas
    rounds = num_parts * (per_part + shape.idle) * (1 / ONE_PASS if takes_two and shape.saves_pass else 1.0)
    share = rounds / (shape.num_stages * num_parts * per_part * shape.num_replicas)
    return 1.0, rounds, share * tokens, share * squares
