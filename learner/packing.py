"""Best-fit-decreasing packing of whole sequences into micro-batches of one shape.

All micro-batches of a step are [1, L], L <= token_budget: real sequences side by side, padding on the
right. One shape lets the pipeline reuse its buffers, and whole sequences keep attention and positions
exact. L is the narrowest of 16 widths that needs no more micro-batches than the full budget: few shapes,
and a batch just above 3 budgets does not compute 4 of them. The packing depends on lengths and order
alone, so every stage computes the same one from the same batch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

PAD_TOKEN = 0
"""Any valid token id: padding is attended to by nothing, and no loss reads it."""


@dataclass(frozen=True)
class PackedBatch:
    """A batch as M micro-batches of L tokens, and the way back to its T completion tokens.

    T runs over the sequences in the order they were given, whatever micro-batch each landed in.
    """

    tokens_ML: IntArray
    positions_ML: IntArray
    """Position within its sequence; 0 on padding."""
    bounds: tuple[IntArray, ...]
    """Per micro-batch: where its sequences start, and where the last ends (num_sequences + 1 values)."""
    predicting: tuple[IntArray, ...]
    """Per micro-batch: the positions whose next token is a completion token, ascending."""
    output_T: IntArray
    """For each completion token, the flat index m * L + l of the output that holds its log-probability."""
    num_tokens: int
    """Real tokens, prompts included."""

    @property
    def num_micro_batches(self) -> int:
        """M."""
        return len(self.bounds)

    @property
    def width(self) -> int:
        """L, tokens of each micro-batch with padding."""
        return int(self.tokens_ML.shape[1])

    @property
    def efficiency(self) -> float:
        """Real tokens over tokens computed, 0..1."""
        return self.num_tokens / max(1, self.tokens_ML.size)


def best_fit(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Assign sequences to bins: longest first, each into the fullest bin that still takes it.

    Args:
        lengths: tokens of each sequence.
        token_budget: tokens of a bin.

    Returns:
        Per bin, the indices of its sequences.

    Raises:
        ValueError: a sequence is longer than the budget; names it.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if order and lengths[order[0]] > token_budget:
        raise ValueError(
            f"sequence {order[0]} of the batch has {lengths[order[0]]} tokens, and a micro-batch takes "
            f"learner.token_budget = {token_budget}. Raise token_budget to the longest prompt plus completion, or more"
        )
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, bin), ascending
    for i in order:
        at = bisect_left(free, (lengths[i], -1))
        if at == len(free):
            bins.append([])
            room, chosen = token_budget, len(bins) - 1
        else:
            room, chosen = free.pop(at)
        bins[chosen].append(i)
        insort(free, (room - lengths[i], chosen))
    return bins


def narrowest(lengths: Sequence[int], token_budget: int, min_bins: int = 1) -> tuple[int, list[list[int]]]:
    """The narrowest width, in sixteenths of the budget, that needs no more bins than the budget itself.

    Args:
        lengths: tokens of each sequence.
        token_budget: the greatest width.
        min_bins: how many bins are needed in any case; a batch that fits fewer is spread over them.

    Returns:
        The width in tokens, and the bins as `best_fit` gives them, with empty ones up to `min_bins`.

    Raises:
        ValueError: a sequence is longer than the budget; names it.
    """
    width, bins = token_budget, best_fit(lengths, token_budget)
    num_bins = max(len(bins), min_bins)
    grain = max(1, token_budget // 16)
    least = max(max(lengths), -(-sum(lengths) // num_bins))
    for narrower in range(-(-least // grain) * grain, token_budget, grain):
        candidate = best_fit(lengths, narrower)
        if len(candidate) <= num_bins:
            width, bins = narrower, candidate
            break
    return width, bins + [[] for _ in range(num_bins - len(bins))]


def pack(
    sequences: Sequence[npt.NDArray[np.integer]],
    prompt_lengths: Sequence[int],
    token_budget: int,
    min_micro_batches: int = 1,
) -> PackedBatch:
    """Pack sequences (prompt, then completion) into micro-batches.

    Args:
        sequences: token ids of each sequence.
        prompt_lengths: tokens of each prompt, at least 1.
        token_budget: tokens of a micro-batch.
        min_micro_batches: what the pipeline's schedule needs; missing ones are made of padding.

    Raises:
        ValueError: there is no sequence, one is longer than the budget, or one has no prompt.
    """
    if not sequences:
        raise ValueError("there is nothing to pack: the batch has no sequence")
    for i, prompt_length in enumerate(prompt_lengths):
        if prompt_length < 1:
            raise ValueError(f"sequence {i} has no prompt token, so nothing predicts its first completion token")
    lengths = [len(sequence) for sequence in sequences]
    width, bins = narrowest(lengths, token_budget, min_micro_batches)
    tokens_ML = np.full((len(bins), width), PAD_TOKEN, np.int64)
    positions_ML = np.zeros((len(bins), width), np.int64)
    bounds: list[IntArray] = []
    predicting: list[IntArray] = []
    outputs: list[IntArray] = [np.zeros(0, np.int64)] * len(sequences)
    for m, members in enumerate(bins):
        edges = np.cumsum([0, *[lengths[i] for i in members]])
        sources: list[IntArray] = [np.zeros(0, np.int64)]
        for i, start, end in zip(members, edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            tokens_ML[m, start:end] = sequences[i]
            positions_ML[m, start:end] = np.arange(end - start)
            # the output at position l holds log pi of the token at l + 1
            source = np.arange(start + prompt_lengths[i] - 1, end - 1)
            sources.append(source)
            outputs[i] = m * width + source
        # an empty micro-batch shows one sequence of one padding token, so that attention need not know of it
        bounds.append(edges if members else np.array([0, 1]))
        predicting.append(np.concatenate(sources))
    return PackedBatch(
        tokens_ML, positions_ML, tuple(bounds), tuple(predicting), np.concatenate(outputs), num_tokens=sum(lengths)
    )
