"""Exact block-diagonal causal attention over packed sequences, without a mask of the budget squared.

The sequences of a micro-batch are bucketed by power-of-two length, gathered into a padded grid
[N, H, L, D] per bucket, run through SDPA with `is_causal`, and scattered back. Padding stands to the
right of every sequence, so no real token ever attends to it: the result is exact, and so is its gradient.
Two things that some models ask for are exact too: a sliding window is a band mask [L, L] where a bucket is
longer than the window, and soft-capped scores (Gemma 2), which SDPA does not know, are computed in full.
The function is registered with Transformers under `IMPLEMENTATION`; layers pass the layout through.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
    """int64 [T]: for each packed token its row in the concatenated, flattened grids."""
    _bands: dict[tuple[int, int], Tensor] = field(default_factory=dict, compare=False)

    @classmethod
    def build(cls, bounds: IntArray, device: torch.device) -> AttentionLayout:
        """Lay out the T = bounds[-1] tokens of one micro-batch; `bounds` are its sequences' starts, and the end."""
        starts, lengths = bounds[:-1], np.diff(bounds)
        buckets = np.maximum(SHORTEST_BUCKET, 2 ** np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64))
        scatter = np.zeros(int(bounds[-1]), np.int64)
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
        return cls(tuple(gather), torch.from_numpy(scatter).to(device))

    def band(self, length: int, window: int) -> Tensor:
        """Who sees whom, bool [length, length] by query and key: itself and the `window - 1` tokens before it."""
        band = self._bands.get((length, window))
        if band is None:
            position = torch.arange(length, device=self.scatter.device)
            behind = position[:, None] - position
            band = (behind >= 0) & (behind < window)
            self._bands[length, window] = band
        return band


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
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention function in the form that Transformers' decoder layers call.

    Args:
        module: the attention module; not read.
        query: [1, H, T, D].
        key: [1, H_kv, T, D], H a multiple of H_kv.
        value: like `key`.
        attention_mask: not read; the layout says who sees whom.
        layout: of this micro-batch.
        scaling: of the scores; None: 1 / sqrt(D).
        dropout: must be 0; both passes of a step have to compute the same function.
        sliding_window: tokens that a token sees, itself included; None: all before it.
        softcap: scores s become softcap * tanh(s / softcap); None: they stay.

    Returns:
        The output [1, T, H, D], and None for the weights.

    Raises:
        ValueError: dropout.
    """
    if dropout:
        raise ValueError(f"attention dropout {dropout} would make the two passes of a step differ; set it to 0")
    query_THD, key_THD, value_THD = (states[0].transpose(0, 1) for states in (query, key, value))
    outputs: list[Tensor] = []
    for cell_NL in layout.gather:
        query_NHLD, key_NHLD, value_NHLD = (_to_grid(states, cell_NL) for states in (query_THD, key_THD, value_THD))
        length = cell_NL.shape[1]
        window = sliding_window if sliding_window is not None and sliding_window < length else None
        is_plain = window is None and softcap is None
        if not (is_plain and _takes_grouped_heads(query)):
            times = query.shape[1] // key.shape[1]
            key_NHLD, value_NHLD = (states.repeat_interleave(times, 1) for states in (key_NHLD, value_NHLD))
        if is_plain:
            grouped = query_NHLD.shape[1] != key_NHLD.shape[1]
            out_NHLD = F.scaled_dot_product_attention(
                query_NHLD, key_NHLD, value_NHLD, is_causal=True, scale=scaling, enable_gqa=grouped
            )
        else:
            band_LL = layout.band(length, window or length)
            if softcap is None:
                out_NHLD = F.scaled_dot_product_attention(query_NHLD, key_NHLD, value_NHLD, band_LL, scale=scaling)
            else:
                out_NHLD = _soft_capped(query_NHLD, key_NHLD, value_NHLD, band_LL, scaling, softcap)
        outputs.append(out_NHLD.transpose(1, 2).flatten(0, 1))
    rows_RHD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return rows_RHD.index_select(0, layout.scatter).unsqueeze(0), None


def _takes_grouped_heads(query: Tensor) -> bool:
    """Has SDPA a kernel for them, without a mask, that keeps no scores [N, H, L, L]?

    On CUDA that is flash attention alone, which takes 16-bit floats: so torch documents it, and no GPU has run it here.
    """
    return query.device.type == "cpu" or query.dtype in (torch.bfloat16, torch.float16)


def _soft_capped(
    query_NHLD: Tensor, key_NHLD: Tensor, value_NHLD: Tensor, band_LL: Tensor, scaling: float | None, softcap: float
) -> Tensor:
    scores_NHLL = query_NHLD @ key_NHLD.transpose(2, 3)
    scores_NHLL = scores_NHLL.to(torch.promote_types(scores_NHLL.dtype, torch.float32))
    scores_NHLL = scores_NHLL * (query_NHLD.shape[-1] ** -0.5 if scaling is None else scaling)
    scores_NHLL = torch.tanh(scores_NHLL / softcap) * softcap
    weights_NHLL = scores_NHLL.masked_fill(~band_LL, -torch.inf).softmax(-1)
    return weights_NHLL.to(value_NHLD.dtype) @ value_NHLD


def _to_grid(states_THD: Tensor, cell_NL: Tensor) -> Tensor:
    grid = states_THD.index_select(0, cell_NL.flatten())
    return grid.view(*cell_NL.shape, *grid.shape[1:]).transpose(1, 2)


AttentionInterface.register(IMPLEMENTATION, packed_attention)

# cuDNN, which torch may prefer to flash attention, builds a plan for every new shape; ours are new in every step
torch.backends.cuda.enable_cudnn_sdp(False)
