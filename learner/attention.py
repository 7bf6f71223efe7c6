"""Exact block-diagonal causal attention over packed sequences, without a mask of the budget squared.

The sequences of a micro-batch are bucketed by power-of-two length, gathered into a padded grid
[N, H, L, D] per bucket, run through SDPA with `is_causal`, and scattered back. Padding stands to the
right of every sequence, so no real token ever attends to it: the result is exact, and so is its gradient.
The function is registered with Transformers under `IMPLEMENTATION`; layers pass the layout through.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from learner.packing import IntArray

IMPLEMENTATION = "leeway_packed"

SHORTEST_BUCKET = 16
"""Shorter sequences share a bucket: below this, another kernel call costs more than the padding it saves."""


@dataclass(frozen=True)
class AttentionLayout:
    """Where the packed tokens of one micro-batch stand in the grids of its buckets."""

    gather: tuple[Tensor, ...]
    """Per bucket, int64 [N, L]: packed position of each grid cell; padding cells repeat the sequence's first."""
    scatter: Tensor
    """int64 [width]: for each packed position its row in the concatenated, flattened grids."""
    longest: int
    """Tokens of the longest sequence."""

    @classmethod
    def build(cls, bounds: IntArray, width: int, device: torch.device) -> AttentionLayout:
        """Lay out the sequences of one micro-batch.

        Args:
            bounds: where its sequences start, and where the last ends.
            width: tokens of the micro-batch, padding included.
            device: of the hidden states.
        """
        starts, lengths = bounds[:-1], np.diff(bounds)
        buckets = np.maximum(SHORTEST_BUCKET, 2 ** np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64))
        # padding of the micro-batch reads any row: nothing reads it in turn, and its gradient is zero
        scatter = np.zeros(width, np.int64)
        gather: list[Tensor] = []
        row = 0
        for bucket in np.unique(buckets):
            chosen = buckets == bucket
            offset_L = np.arange(lengths[chosen].max())
            inside_NL = offset_L < lengths[chosen, None]
            cell_NL = starts[chosen, None] + np.where(inside_NL, offset_L, 0)
            row_NL = row + np.arange(cell_NL.size).reshape(cell_NL.shape)
            scatter[cell_NL[inside_NL]] = row_NL[inside_NL]
            gather.append(torch.from_numpy(cell_NL).to(device))
            row += cell_NL.size
        return cls(tuple(gather), torch.from_numpy(scatter).to(device), int(lengths.max()))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: AttentionLayout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention function in the form that Transformers' decoder layers call.

    Args:
        module: the attention module; not read.
        query: [1, H, width, D].
        key: [1, H_kv, width, D], H a multiple of H_kv.
        value: like `key`.
        attention_mask: not read; the layout says who sees whom.
        layout: of this micro-batch.
        scaling: of the scores; None: 1 / sqrt(D).
        dropout: must be 0; both passes of a step have to compute the same function.
        sliding_window: tokens that a token sees; sequences must not be longer.

    Returns:
        The output [1, width, H, D], and None for the weights.

    Raises:
        ValueError: dropout, or a sequence longer than the sliding window.
    """
    if dropout:
        raise ValueError(f"attention dropout {dropout} would make the two passes of a step differ; set it to 0")
    if sliding_window is not None and layout.longest > sliding_window:
        raise ValueError(
            f"a sequence of {layout.longest} tokens is longer than the model's sliding window of {sliding_window}; "
            "the learner attends in full. Lower max_prompt_tokens + max_new_tokens"
        )
    query_THD, key_THD, value_THD = (states[0].transpose(0, 1) for states in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    outputs: list[Tensor] = []
    for cell_NL in layout.gather:
        query_NHLD, key_NHLD, value_NHLD = (_to_grid(states, cell_NL) for states in (query_THD, key_THD, value_THD))
        out_NHLD = F.scaled_dot_product_attention(
            query_NHLD, key_NHLD, value_NHLD, is_causal=True, scale=scaling, enable_gqa=grouped
        )
        outputs.append(out_NHLD.transpose(1, 2).flatten(0, 1))
    rows_RHD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return rows_RHD.index_select(0, layout.scatter).unsqueeze(0), None


def _to_grid(states_THD: Tensor, cell_NL: Tensor) -> Tensor:
    grid = states_THD.index_select(0, cell_NL.flatten())
    return grid.view(*cell_NL.shape, *grid.shape[1:]).transpose(1, 2)


AttentionInterface.register(IMPLEMENTATION, packed_attention)
