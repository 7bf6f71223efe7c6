"""LearnerTime: how long a step takes, for any shape of the learner, from what its parts cost on one stage.

    seconds = step + sum over minibatches of  (M + b) * (micro_batch + work / (P * M))

The dearest replica has so much work in M micro-batches, P stages share it, and b is the bubble of the schedule. The
work of a batch is what `learner.packing` counts, shared prompts once, at the price of a token and of a squared token.
Further epochs are in the coefficients, and so is a forward pass that an update takes however it is packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from learner.packing import (
    MOST_EVALUATED,
    ONE_PASS,
    CostModel,
    FloatArray,
    IntArray,
    PackingRule,
    cost_of_micro_batches,
    micro_batches_asked,
)

NUM_TERMS = 4
MANY_SAMPLES = 4096
"""Of a minibatch with more samples than these every n-th group is packed, and the rest is taken to be like it."""


@dataclass(frozen=True)
class LearnerShape:
    """What of a learner decides how long its step takes."""

    num_stages: int = 1
    num_replicas: int = 1
    num_chunks: int = 1
    schedule: str = "1f1b"
    token_budget: int = 1024
    unit: str = "sequence"
    num_minibatches: int = 1
    """Of a step; each is packed and runs through the pipeline by itself."""
    saves_pass: bool = False
    """Does an update take a forward pass less where every unit lies whole in a micro-batch? Not if the draw has one."""

    def rule(self, cost: CostModel) -> PackingRule:
        least, multiple = micro_batches_asked(self.schedule, self.num_stages)
        return PackingRule(
            self.token_budget,
            num_replicas=self.num_replicas,
            min_micro_batches=least,
            multiple=multiple,
            cost=cost,
            unit=self.unit,  # type: ignore[arg-type]
            num_stages=self.num_stages,
        )

    @property
    def idle(self) -> float:
        """b: micro-batches that a stage could compute while it waits for the first and after the last."""
        return bubble_in_micro_batches(self.schedule, self.num_stages, self.num_chunks)


def bubble_in_micro_batches(schedule: str, num_stages: int, num_chunks: int) -> float:
    """What a stage idles in a step, in the time of one micro-batch on it, where forward is a third of that.

    GPipe and 1F1B: P - 1 (arXiv 1811.06965). Interleaved: over V (2104.04473, section 2.2). Zero bubble: over 3 V, for
    what is left is F + B - W of each of P - 1 (2401.10241, table 1).
    """
    return (num_stages - 1) / ((3 if schedule == "zero_bubble" else 1) * num_chunks)


@dataclass(frozen=True)
class LearnerTime:
    """Seconds of a step, by the terms of `terms`; none is negative."""

    step: float
    """What does not depend on its samples: the update, the draw, the loss."""
    micro_batch: float = 0.0
    """Of each on each stage, besides its tokens."""
    token: float = 0.0
    """Forward and backward, and whatever else the algorithm asks for, of a token through all stages."""
    token_squared: float = 0.0
    """The same of a squared token of a sequence: attention."""

    def seconds(self, lengths: Sequence[int], prompt_tokens: int, group_size: int, shape: LearnerShape) -> float:
        """Of a step on samples of so many tokens each, prompt and completion, those of a group beside each other."""
        length_B = np.asarray(lengths, np.int64)
        part_B = np.arange(len(length_B)) // group_size % shape.num_minibatches
        parts = [length_B[part_B == part] for part in range(part_B.max() + 1)]
        return self.step + sum(self._minibatch_s(each, prompt_tokens, group_size, shape) for each in parts)

    def _minibatch_s(self, length_B: IntArray, prompt_tokens: int, group_size: int, shape: LearnerShape) -> float:
        every = -(-len(length_B) // MANY_SAMPLES)
        if every > 1:
            some_B = length_B[np.arange(len(length_B)) // group_size % every == 0]
            alone = LearnerShape(token_budget=shape.token_budget, unit=shape.unit)  # so many are dealt evenly
            cost_M, unit = self._micro_batches(some_B, prompt_tokens, group_size, alone)
            times = float(length_B.sum() / some_B.sum()) / shape.num_replicas
            least, _ = micro_batches_asked(shape.schedule, shape.num_stages)
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
        """The cost of each, and what lies in one whole."""
        group_B = np.arange(len(length_B)) // group_size
        prompt_B, rule = np.full(len(length_B), prompt_tokens), shape.rule(CostModel(self.token, self.token_squared))
        return cost_of_micro_batches(length_B, prompt_B, group_B, rule, group_B)


def terms(
    tokens: float, squares: float, num_micro_batches: int, shape: LearnerShape, *, takes_two: bool = False
) -> tuple[float, ...]:
    """What each coefficient of `LearnerTime` is multiplied with, for a step that was measured.

    Args:
        tokens: that were computed, of all replicas.
        squares: sum of the squared lengths of its sequences, less those of prompts that were computed for another.
        num_micro_batches: of all replicas, if the step were one minibatch.
        shape: of the learner that took the step.
        takes_two: did its updates take a forward pass by themselves?
    """
    num_parts = shape.num_minibatches
    per_part = shape.rule(CostModel()).num_micro_batches(-(-num_micro_batches // num_parts)) / shape.num_replicas
    rounds = num_parts * (per_part + shape.idle) * (1 / ONE_PASS if takes_two and shape.saves_pass else 1.0)
    share = rounds / (shape.num_stages * num_parts * per_part * shape.num_replicas)
    return 1.0, rounds, share * tokens, share * squares
