"""Triton kernels over the rows of a matrix; imported only if Triton is available.

add_norm   sum of states and the output of a block, and the RMS norm of the sum: one pass over memory instead of three,
           and one instead of five in the backward pass. The sum keeps the dtype of the states; the norm is rounded to
           the dtype of the products that read it
softmax    from float32 logits: log-probabilities of the tokens, and probabilities of all other words, rounded on write
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_LOGITS_AT_ONCE = 4096
_WARPS = 8
_PROGRAMS_PER_PROCESSOR = 4
"""Programs per multiprocessor in the backward pass of add_norm; each sums the weight gradient of its rows."""
_INTERPRETED_PROCESSORS = 2
"""Assumed number of multiprocessors without a GPU, where Triton runs its interpreter."""


@torch.no_grad()
def softmax(logits: Tensor, tokens: Tensor, out: Tensor | None) -> Tensor:
    """Return the log-probabilities of the tokens: [c, V] float32, int64 [c] -> [c] float32.

    `out`, [c, V], receives the probabilities, with 0 at the given tokens; it may be the same tensor as `logits`.
    """
    assert logits.is_contiguous()
    assert out is None or out.is_contiguous()
    logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _softmax[(len(logits),)](
            logits, tokens, logprobs, logits if out is None else out, logits.shape[1],
            WRITES=out is not None, BLOCK=_LOGITS_AT_ONCE, num_warps=_WARPS,
        )  # fmt: skip
    return logprobs


def add_norm(states: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sum of `states` and `added` (None means zeros), and the RMS norm of the sum.

    [..., H], [..., H] and a weight [H] -> [..., H] in the dtype of the states, and [..., H] in that of the weight.
    """
    return _AddNorm.apply(states, added, weight, eps)  # type: ignore[no-untyped-call]


class _AddNorm(torch.autograd.Function):
    """`add_norm`, rounded as in Transformers: sum and normed states to the states' dtype, product to the weight's."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- torch's
        states: Tensor,
        added: Tensor | None,
        weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        states = states.contiguous()
        rows, width = states.numel() // states.shape[-1], states.shape[-1]
        summed = states if added is None else torch.empty_like(states)
        normed = torch.empty(states.shape, dtype=weight.dtype, device=states.device)
        scales = torch.empty(rows, dtype=torch.float32, device=states.device)
        if rows:
            _add_norm_forward[(rows,)](
                states, states if added is None else added.contiguous(), weight, summed, normed, scales, width, eps,
                ADDS=added is not None, BLOCK=triton.next_power_of_2(width), num_warps=_warps(width),
            )  # fmt: skip
        ctx.save_for_backward(summed, scales, weight)
        ctx.added_dtype = None if added is None else added.dtype
        return states.view_as(states) if added is None else summed, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_summed: Tensor, of_normed: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        summed, scales, weight = ctx.saved_tensors
        adds, width = ctx.added_dtype is not None, summed.shape[-1]
        of_states = torch.empty_like(summed)
        of_added = torch.empty(summed.shape, dtype=ctx.added_dtype, device=summed.device) if adds else of_states
        programs = min(len(scales), _PROGRAMS_PER_PROCESSOR * _processors(summed.device))
        shares = torch.empty(programs, width, dtype=torch.float32, device=summed.device)
        if programs:
            _add_norm_backward[(programs,)](
                of_summed.contiguous(), of_normed.contiguous(), summed, scales, weight, of_states, of_added, shares,
                len(scales), triton.cdiv(len(scales), programs), width,
                ADDS=adds, BLOCK=triton.next_power_of_2(width), num_warps=_warps(width),
            )  # fmt: skip
        return of_states, of_added if adds else None, shares.sum(0), None


def _warps(width: int) -> int:
    return min(16, max(1, triton.next_power_of_2(width) // 256))


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _softmax(logits, tokens, logprobs, out, width, WRITES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    picked = tl.load(logits + row * width + token)
    lanes = tl.arange(0, BLOCK)
    # each lane has its own maximum and sum, which are combined at the end
    tops = tl.full([BLOCK], -1e30, tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        at = start + lanes
        found = tl.load(logits + row * width + at, mask=at < width, other=-1e30)
        new = tl.maximum(tops, found)
        sums = sums * tl.exp(tops - new) + tl.exp(found - new)
        tops = new
    top = tl.max(tops, 0)
    partition = top + tl.log(tl.sum(sums * tl.exp(tops - top), 0))
    tl.store(logprobs + row, picked - partition)
    if WRITES:
        for start in range(0, width, BLOCK):
            at = start + lanes
            found = tl.load(logits + row * width + at, mask=at < width, other=-1e30)
            shares = tl.where(at == token, 0.0, tl.exp(found - partition))
            tl.store(out + row * width + at, shares.to(out.dtype.element_ty), mask=at < width)


@triton.jit
def _add_norm_forward(  # type: ignore[no-untyped-def] # noqa: ANN202
    states, added, weight, summed, normed, scales, width, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr  # noqa: ANN001
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    whole = tl.load(states + row * width + at, mask=inside, other=0.0)
    if ADDS:
        more = tl.load(added + row * width + at, mask=inside, other=0.0)
        whole = (whole.to(tl.float32) + more.to(tl.float32)).to(summed.dtype.element_ty)
        tl.store(summed + row * width + at, whole, mask=inside)
    wide = whole.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    tl.store(scales + row, scale)
    factors = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    scaled = (wide * scale).to(summed.dtype.element_ty).to(tl.float32)
    tl.store(normed + row * width + at, (scaled * factors).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm_backward(  # type: ignore[no-untyped-def] # noqa: ANN202
    of_summed, of_normed, summed, scales, weight, of_states, of_added, of_weight, num_rows, rows_each, width,  # noqa: ANN001
    ADDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    factors = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(program * rows_each, tl.minimum((program + 1) * rows_each, num_rows)):
        here = row * width + at
        scale = tl.load(scales + row)
        normed = tl.load(summed + here, mask=inside, other=0.0).to(tl.float32) * scale
        gradient = tl.load(of_normed + here, mask=inside, other=0.0).to(tl.float32)
        total += gradient * normed.to(summed.dtype.element_ty).to(tl.float32)
        pulled = gradient * factors
        through = scale * (pulled - normed * (tl.sum(pulled * normed, 0) / width))
        through += tl.load(of_summed + here, mask=inside, other=0.0).to(tl.float32)
        tl.store(of_states + here, through.to(of_states.dtype.element_ty), mask=inside)
        if ADDS:
            tl.store(of_added + here, through.to(of_added.dtype.element_ty), mask=inside)
    tl.store(of_weight + program * width + at, total, mask=inside)
