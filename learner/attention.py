"""Exact block-diagonal causal attention over packed sequences, without a mask of token_budget^2 entries.

With flash attention (CUDA, 16-bit floats), one call computes all T packed tokens of a micro-batch. Without flash
attention, sequences are bucketed by power-of-two length, gathered into a padded grid [N, H, L, D] per bucket, run
through SDPA, and scattered back. Padding is on the right, so no real token attends to it. The queries of a shared
prompt are computed once, with its first sequence. Other sequences of this prompt compute only the queries of their
completions, in a grid of sequences with equally long prompts, under a mask [Q, L]. For short prompts, recomputed
queries are cheaper. Flash attention and SDPA do not support soft-capped scores (Gemma 2), which are computed one block
of queries at a time, and recomputed in the backward pass. `packed_attention` is registered as `IMPLEMENTATION`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from leeway.learner.packing import IntArray

IMPLEMENTATION = "leeway_packed"

SHORTEST_BUCKET = 16
"""Sequence length of the smallest bucket, which takes all shorter ones: a kernel call costs more than padding."""
SCORES_MIB = 64.0
"""Maximum MiB of soft-capped scores in memory at a time; limits the number of queries per block."""


class Grid(NamedTuple):
    """The sequences of a bucket; padding cells repeat the first token of the sequence."""

    queries: Tensor
    """int64 [N, Q]: packed position of each query."""
    keys: Tensor
    """int64 [N, L]: packed position of each key and value; the last Q positions are those of the queries."""


class Grids(NamedTuple):
    """Positions of a micro-batch's packed tokens in the grids of its buckets."""

    buckets: tuple[Grid, ...]
    scatter: Tensor
    """int64 [T]: row of each packed token in the concatenated, flattened queries."""


@dataclass(frozen=True)
class AttentionLayout:
    """Boundaries of the sequences of one micro-batch among its T packed tokens."""

    bounds: IntArray
    """Starts of the N sequences, each including its prompt, and the end of the last: [N + 1]."""
    places: IntArray
    """Packed position of each token of the sequences; the tokens of a shared prompt occur several times."""
    shared_N: IntArray
    """Number of each sequence's first tokens that an earlier sequence stores; its other tokens are contiguous."""
    edges: Tensor
    """Like `bounds`, but without tokens that an earlier sequence stores; on the device, int32 [N + 1]."""
    key_edges: Tensor
    """`bounds` on the device, int32 [N + 1]."""
    keys: Tensor | None
    """`places` on the device; None if no prompt is shared."""
    _bands: dict[tuple[int, int, int], Tensor] = field(default_factory=dict, compare=False)

    @classmethod
    def build(cls, bounds: IntArray, device: torch.device, places: IntArray | None = None) -> AttentionLayout:
        """Return the layout of one micro-batch from fields of `PackedBatch`; without `places`, no prompt is shared."""
        if places is None:
            places = np.arange(bounds[-1])
        is_new = np.diff(np.maximum.accumulate(places), prepend=-1) > 0
        own_N = np.add.reduceat(is_new, bounds[:-1], dtype=np.int64)
        has_queries = own_N > 0  # False for an empty completion of a prompt that is packed with another sequence
        lengths, own_N = np.diff(bounds)[has_queries], own_N[has_queries]
        places = places[np.repeat(has_queries, np.diff(bounds))]
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        key_edges = torch.from_numpy(bounds.astype(np.int32)).to(device)
        if (own_N == lengths).all():
            return cls(bounds, places, lengths - own_N, key_edges, key_edges, None)
        edges = torch.from_numpy(np.concatenate([[0], np.cumsum(own_N)]).astype(np.int32)).to(device)
        return cls(bounds, places, lengths - own_N, edges, key_edges, torch.from_numpy(places).to(device))

    @functools.cached_property
    def longest(self) -> int:
        return int(np.diff(self.bounds).max())

    @functools.cached_property
    def longest_own(self) -> int:
        return int((np.diff(self.bounds) - self.shared_N).max())

    @functools.cached_property
    def grids(self) -> Grids:
        """Grids of the sequences, one per bucket; built on first use, which never happens with flash attention."""
        starts, lengths = self.bounds[:-1], np.diff(self.bounds)
        # recompute shorter prompts: reuse needs a grid per prompt length, and masked scores cost time too
        reuses_prompt_N = self.shared_N >= np.maximum(lengths - self.shared_N, SHORTEST_BUCKET)
        shared_N = np.where(reuses_prompt_N, self.shared_N, 0)
        num_queries_N = np.maximum(SHORTEST_BUCKET, lengths - shared_N)
        bucket_N = 2 ** np.ceil(np.log2(num_queries_N)).astype(np.int64)
        scatter_T = np.zeros(int(self.places.max()) + 1, np.int64)
        grids: list[Grid] = []
        row = 0
        for shared, bucket in sorted(set(zip(shared_N.tolist(), bucket_N.tolist(), strict=True))):
            chosen = (shared_N == shared) & (bucket_N == bucket)
            offset_L = np.arange(lengths[chosen].max())
            inside_NL = offset_L < lengths[chosen, None]
            key_NL = self.places[starts[chosen, None] + np.where(inside_NL, offset_L, 0)]
            query_NQ = key_NL[:, shared:]
            row_NQ = row + np.arange(query_NQ.size).reshape(query_NQ.shape)
            # several sequences may write the rows of a short shared prompt; these rows are identical
            scatter_T[query_NQ[inside_NL[:, shared:]]] = row_NQ[inside_NL[:, shared:]]
            grids.append(Grid(*(torch.from_numpy(cells).to(self.edges.device) for cells in (query_NQ, key_NL))))
            row += query_NQ.size
        return Grids(tuple(grids), torch.from_numpy(scatter_T).to(self.edges.device))

    def band(self, queries: int, keys: int, window: int) -> Tensor:
        """Return `_band` as a cached mask, bool [queries, keys]; the last query and the last key are the same token."""
        if (queries, keys, window) not in self._bands:
            self._bands[queries, keys, window] = _band(queries, keys, keys - queries, window, self.edges.device)
        return self._bands[queries, keys, window]


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
    """Compute attention; Transformers' decoder layers call this signature: query [1, H, T, D] -> [1, T, H, D], None.

    Keys and values are [1, H_kv, T, D], with H a multiple of H_kv. Queries and keys are cast to the dtype of the
    values. `scaling` multiplies the scores (None: 1 / sqrt(D)). `sliding_window` is the number of tokens that a token
    attends to, including itself. `softcap` maps scores s to softcap * tanh(s / softcap). Raises ValueError if dropout
    is not 0: both passes of a step must compute the same function.
    """
    if dropout:
        raise ValueError(f"attention dropout {dropout} would make the two passes of a step differ; set dropout to 0")
    query_THD, key_THD, value_THD = (states[0].transpose(0, 1).to(value.dtype) for states in (query, key, value))
    window = sliding_window if sliding_window is not None and sliding_window < layout.longest else None
    if softcap is None and _supports_varlen(query_THD):
        return _varlen(query_THD, key_THD, value_THD, layout, scaling, window).unsqueeze(0), None
    outputs = []
    for grid in layout.grids.buckets:
        query_NHQD = _to_grid(query_THD, grid.queries)
        key_NHLD, value_NHLD = (_to_grid(states, grid.keys) for states in (key_THD, value_THD))
        out_NHQD = _in_grid(query_NHQD, key_NHLD, value_NHLD, layout, scaling, window, softcap)
        outputs.append(out_NHQD.transpose(1, 2).flatten(0, 1))
    rows_RHD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return rows_RHD.index_select(0, layout.grids.scatter).unsqueeze(0), None


# --- packed ---------------------------------------------------------------------------------------


def _supports_varlen(query_THD: Tensor) -> bool:
    size = query_THD.shape[-1]
    is_16_bit_gpu = query_THD.device.type == "cuda" and query_THD.dtype in (torch.bfloat16, torch.float16)
    return is_16_bit_gpu and size % 8 == 0 and size <= 256


def _varlen(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    layout: AttentionLayout,
    scale: float | None,
    window: int | None,
) -> Tensor:
    if layout.keys is not None:
        key_THD, value_THD = (states.index_select(0, layout.keys) for states in (key_THD, value_THD))
    # the window counts tokens before the query, without the query; -1 is unlimited. If a sequence has more keys than
    # queries, varlen_attn aligns the last key with the last query
    visible = (-1 if window is None else window - 1, 0)
    ends = (layout.edges, layout.key_edges, layout.longest_own, layout.longest)
    out_THD = varlen_attn(query_THD, key_THD, value_THD, *ends, scale=scale, window_size=visible, enable_gqa=True)
    assert isinstance(out_THD, Tensor), "only the output was requested"
    return out_THD


# --- in grids -------------------------------------------------------------------------------------


def _in_grid(
    query_NHQD: Tensor,
    key_NHLD: Tensor,
    value_NHLD: Tensor,
    layout: AttentionLayout,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    queries, length = query_NHQD.shape[2], key_NHLD.shape[2]
    window = min(window or length, length)
    is_plain = window == length and queries == length
    if softcap is not None or not _supports_grouped_heads(query_NHQD, is_plain):
        times = query_NHQD.shape[1] // key_NHLD.shape[1]
        key_NHLD, value_NHLD = (states.repeat_interleave(times, 1) for states in (key_NHLD, value_NHLD))
    if softcap is None:
        return F.scaled_dot_product_attention(
            query_NHQD,
            key_NHLD,
            value_NHLD,
            None if is_plain else layout.band(queries, length, window),
            is_causal=is_plain,
            scale=scaling,
            enable_gqa=query_NHQD.shape[1] != key_NHLD.shape[1],
        )
    scale = query_NHQD.shape[-1] ** -0.5 if scaling is None else scaling
    return _soft_capped_in_blocks(query_NHQD, key_NHLD, value_NHLD, window, scale, softcap)


def _supports_grouped_heads(query: Tensor, is_plain: bool) -> bool:
    """Return whether SDPA supports grouped heads without storing scores [N, H, L, L]; a mask is used unless `is_plain`.

    On CUDA, only flash attention supports grouped heads, in 16 bits without a mask (torch's documentation; not tested).
    """
    return query.device.type == "cpu" or (is_plain and query.dtype in (torch.bfloat16, torch.float16))


def _soft_capped_in_blocks(
    query_NHQD: Tensor, key_NHLD: Tensor, value_NHLD: Tensor, window: int, scale: float, softcap: float
) -> Tensor:
    """Compute attention in blocks of queries that fit `SCORES_MIB`; the backward pass recomputes two or more blocks."""
    (num, heads, queries, _), wide = query_NHQD.shape, torch.promote_types(query_NHQD.dtype, torch.float32)
    length = key_NHLD.shape[2]
    rows, offset = max(1, int(SCORES_MIB * 2**20) // (num * heads * length * wide.itemsize)), length - queries
    if rows >= queries:
        return _soft_capped(query_NHQD, key_NHLD, value_NHLD, offset, window, scale, softcap)
    key_NHLD, value_NHLD = key_NHLD.to(wide), value_NHLD.to(wide)  # gradients of the blocks are summed in this dtype
    blocks: list[Tensor] = []
    for first in range(0, queries, rows):
        end = min(first + rows, queries)
        start = max(0, offset + first - window + 1)
        states = (query_NHQD[:, :, first:end], *(each[:, :, start : offset + end] for each in (key_NHLD, value_NHLD)))
        rule = (offset + first - start, window, scale, softcap)
        # the random state need not be saved: a block draws no random numbers
        blocks.append(checkpoint(_soft_capped, *states, *rule, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(blocks, 2)


def _soft_capped(
    query_NHQD: Tensor, key_NHLD: Tensor, value_NHLD: Tensor, offset: int, window: int, scale: float, softcap: float
) -> Tensor:
    """Compute soft-capped attention; the first query is `offset` tokens after the first key."""
    key_NHLD, value_NHLD = key_NHLD.to(query_NHQD.dtype), value_NHLD.to(query_NHQD.dtype)
    scores_NHQL = query_NHQD @ key_NHLD.transpose(2, 3)
    scores_NHQL = scores_NHQL.to(torch.promote_types(scores_NHQL.dtype, torch.float32)) * scale
    scores_NHQL = torch.tanh(scores_NHQL / softcap) * softcap
    band_QL = _band(query_NHQD.shape[2], key_NHLD.shape[2], offset, window, query_NHQD.device)
    weights_NHQL = scores_NHQL.masked_fill(~band_QL, -torch.inf).softmax(-1)
    return weights_NHQL.to(value_NHLD.dtype) @ value_NHLD


def _band(queries: int, keys: int, offset: int, window: int, device: torch.device) -> Tensor:
    """Return the mask bool [queries, keys]: query q attends to key q + offset and `window - 1` keys before it."""
    behind = torch.arange(offset, offset + queries, device=device)[:, None] - torch.arange(keys, device=device)
    return (behind >= 0) & (behind < window)


def _to_grid(states_THD: Tensor, cell_NL: Tensor) -> Tensor:
    grid = states_THD.index_select(0, cell_NL.flatten())
    return grid.view(*cell_NL.shape, *grid.shape[1:]).transpose(1, 2)


AttentionInterface.register(IMPLEMENTATION, packed_attention)

# torch may prefer cuDNN to flash attention; cuDNN builds a plan for every new shape, and each step has new shapes
torch.backends.cuda.enable_cudnn_sdp(False)
