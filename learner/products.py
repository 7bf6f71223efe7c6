"""Custom matrix products of the learner: embeddings, linear maps and the head.

In bfloat16, modules hold rounded copies of the float32 masters, refreshed once per update (docs/learner.md). The
gradient of a copy is the float32 gradient of its master. On a GPU, the product of each micro-batch is added unrounded.
On a CPU, or if a schedule computes input and weight gradients separately, a bfloat16 product is widened and added.

The head computes log-probabilities of given tokens without materializing all logits. With z = logits / temperature,
log pi(y) = z_y - logsumexp(z). Logits exist for one chunk of tokens at a time, also in the backward pass. The gradient

    d log pi(y) / dh = (W_y - sum_v p_v W_v) / temperature

depends on the loss only through one factor c per token, so the forward pass computes it directly ([n, hidden]). The
gradient

    dL/dW_v = sum_t c_t (1[y_t = v] - p_tv) h_t / temperature

needs all c first. The forward pass keeps p, rounded to the dtype of products, for as many chunks as allowed, and the
backward pass recomputes it for the others. The two gradients are separate graph nodes, because a zero-bubble schedule
requests them at different times. Soft-capped logits (Gemma 2), cap * tanh(l / cap), multiply both p_v and 1[y = v] by
1 - tanh^2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from leeway.learner import kernels

COMPUTED = torch.bfloat16

LOGITS_MIB: Mapping[str, float] = {"cpu": 64.0, "cuda": 1024.0}
"""Device type -> MiB of logits in memory at a time; small compared with the states of a micro-batch, and large enough
that products take longer than reading the head."""
KEPT_MIB: Mapping[str, float] = {"cpu": 192.0, "cuda": 2048.0}
"""Device type -> MiB of probabilities kept for the backward pass, over all micro-batches in flight, to save one product
in four. On a CPU, 1,024 tokens with a vocabulary of 49k fit; on a GPU, 7,000 with a vocabulary of 152k."""
CACHED_BYTES = 2**20
"""Bytes of logits for which all elementwise operations run before those of the next rows, on a CPU; fits its cache."""


def round_parameters(module: nn.Module, *, exclude: Callable[[str], bool]) -> dict[str, nn.Parameter]:
    """Replace parameters wider than bfloat16 by rounded copies, except excluded names; return the originals by name.

    Only the first of several tied parameters is replaced: the caller must tie them again.
    """
    masters = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.dtype != COMPUTED and not exclude(name)
    }
    roundings = {}
    for name, master in masters.items():
        roundings[name] = nn.Parameter(master.detach().to(COMPUTED), requires_grad=master.requires_grad)
        roundings[name].grad_dtype = master.dtype
    module.load_state_dict(roundings, strict=False, assign=True)
    return masters


def narrow_norms(layers: nn.Module) -> None:
    """Make every norm of these layers return the dtype of products, so that each product need not cast its input."""
    for name, module in layers.named_modules():
        if name.endswith("norm"):  # true for every norm of a decoder layer
            module.register_forward_hook(lambda _module, _inputs, output: output.to(COMPUTED))


# --- products -------------------------------------------------------------------------------------


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices; the result of 16-bit factors is summed and stored in float32 if the device supports it."""
    if sums_in_float32(left):
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right


def add_product(total: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0) -> None:
    """Compute `total += alpha * left @ right`, without a temporary of the size of `total` if possible."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, alpha=alpha)
    elif sums_in_float32(left):
        torch.addmm(total, left, right, out_dtype=torch.float32, alpha=alpha, out=total)
    else:
        total.add_(left @ right, alpha=alpha)


def sums_in_float32(factor: Tensor) -> bool:
    """Return whether a product with this matrix can have a result wider than its factors."""
    return factor.device.type == "cuda" and factor.dtype in (torch.bfloat16, torch.float16)


def gradient_of(weight: Tensor) -> Tensor:
    """Return the gradient accumulator of a weight, float32 or wider; create it as zeros if missing."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    return weight.grad


# --- embeddings and linear maps -------------------------------------------------------------------


def embed(embedding: nn.Embedding, tokens: Tensor, *, adds_in_place: bool = False) -> Tensor:
    """Look up rows of an embedding as states of float32 or wider, the dtype in which the gradient is summed.

    `adds_in_place` adds the gradient directly to `grad`, without a temporary table.
    """
    options = (embedding.padding_idx, adds_in_place)
    states: Tensor = _Lookup.apply(embedding.weight, tokens, *options)  # type: ignore[no-untyped-call]
    scale: Tensor | None = getattr(embedding, "embed_scale", None)  # Gemma; the scale is rounded like the weights
    return states if scale is None else states * scale.to(embedding.weight.dtype)


def linear(module: nn.Linear, states: Tensor) -> Tensor:
    """Apply a linear map whose backward pass adds directly to the gradient of its weight."""
    if not (module.weight.requires_grad and torch.is_grad_enabled()):
        return F.linear(states, module.weight, module.bias)
    return _Map.apply(states.to(module.weight.dtype), module.weight, module.bias)  # type: ignore[no-untyped-call]


class _Lookup(torch.autograd.Function):
    """Embedding lookup with wide gradient sums; torch's own lookup sums in the dtype of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, padding: int | None, adds_in_place: bool) -> Tensor:  # noqa: ANN401 -- torch's
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.padding, ctx.adds_in_place = weight, -1 if padding is None else padding, adds_in_place
        return nn.functional.embedding(tokens, weight).to(_wide(weight.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # noqa: ANN401 -- torch's
        (tokens,) = ctx.saved_tensors
        wide = gradient.to(_wide(gradient.dtype)).masked_fill((tokens == ctx.padding).unsqueeze(-1), 0)
        total = gradient_of(ctx.weight) if ctx.adds_in_place else torch.zeros_like(ctx.weight, dtype=wide.dtype)
        total.index_add_(0, tokens.flatten(), wide.flatten(0, -2))
        return None if ctx.adds_in_place else total, None, None, None


class _Map(torch.autograd.Function):
    """Linear map that accumulates the gradient of its weight in place."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ANN401 -- torch's
        ctx.save_for_backward(states)
        ctx.weight = weight  # save_for_backward would return a different tensor under activation checkpointing
        return F.linear(states, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 -- torch's
        (states,), weight = ctx.saved_tensors, ctx.weight
        rows = gradient.flatten(0, -2)
        factors = rows.T, states.flatten(0, -2)
        if weight.grad is None:
            weight.grad = product(*factors).to(_wide(weight.dtype))
        else:
            add_product(weight.grad, *factors)
        states_gradient = gradient @ weight if ctx.needs_input_grad[0] else None
        return states_gradient, None, rows.sum(0, dtype=_wide(rows.dtype)) if ctx.needs_input_grad[2] else None


# --- the head -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogitRule:
    """Options of the map from hidden states to log-probabilities."""

    temperature: float
    softcap: float | None = None
    """Logits l become softcap * tanh(l / softcap), before the temperature."""
    chunk_mib: float | None = None
    """MiB of logits (float32 or wider) in memory at a time; None selects `LOGITS_MIB`."""
    kept_mib: float | None = None
    """MiB of probabilities kept for the backward pass; None selects `KEPT_MIB`."""
    is_fused: bool = False
    """Whether to use the softmax of `leeway.learner.kernels`; requires 16-bit products."""
    adds_in_place: bool = False
    """Whether the gradient of the head is added directly to `grad`."""

    def chunk_tokens(self, vocab_size: int, dtype: torch.dtype, device: str) -> int:
        """Return the tokens per chunk of logits over V words on a device of this type, at least 1."""
        mib = LOGITS_MIB[device] if self.chunk_mib is None else self.chunk_mib
        return max(1, int(mib * 2**20) // (vocab_size * _wide(dtype).itemsize))

    def kept_tokens(self, vocab_size: int, dtype: torch.dtype, device: str) -> int:
        """Return the maximum number of tokens whose probabilities over V words, in the dtype of products, are kept."""
        mib = KEPT_MIB[device] if self.kept_mib is None else self.kept_mib
        return int(mib * 2**20) // (vocab_size * dtype.itemsize)


def token_logprobs(hidden: Tensor, weight: Tensor, tokens: Tensor, rule: LogitRule) -> Tensor:
    """Return log pi of the given tokens: [n, hidden] (normed), [V, hidden], int64 [n] -> [n].

    The result and the gradient of the weight are float32 or wider, even under autocast; only products use 16 bits.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    learning = torch.is_grad_enabled()
    most_kept = rule.kept_tokens(len(weight), dtype, device) if learning and weight.requires_grad else 0
    with torch.autocast(device, enabled=False):
        options = (rule, dtype, learning and hidden.requires_grad, most_kept)
        found = _OfHidden.apply(hidden, weight.detach(), tokens, *options)  # type: ignore[no-untyped-call]
        logprobs: Tensor = found[0]
        if learning and weight.requires_grad:
            fixed = (hidden.detach(), tokens, rule, dtype)
            logprobs = logprobs + _OfWeight.apply(weight, *fixed, *found[1:])  # type: ignore[no-untyped-call]
    return logprobs


class _OfHidden(torch.autograd.Function):
    """Log-probabilities as a function of the hidden states only."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- torch's
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        rule: LogitRule,
        dtype: torch.dtype,
        needs_slopes: bool,
        most_kept: int,
    ) -> tuple[Tensor, ...]:
        logprobs = torch.empty(len(tokens), dtype=_wide(dtype), device=hidden.device)
        slopes = torch.empty_like(hidden) if needs_slopes else hidden.new_empty(0)
        kept: list[Tensor] = []
        cast = weight.to(dtype)
        for rows in _chunks(len(tokens), rule.chunk_tokens(len(weight), dtype, hidden.device.type)):
            own = weight.index_select(0, tokens[rows]).to(_wide(dtype)) if needs_slopes else None
            keep = rows.stop <= most_kept
            inputs = (hidden[rows].to(dtype), cast, tokens[rows], rule, own, keep)
            logprobs[rows], slopes_of_rows, shares = _chunk(*inputs)
            if slopes_of_rows is not None:
                slopes[rows] = slopes_of_rows.to(slopes.dtype)
            kept += shares
        ctx.save_for_backward(slopes)
        ctx.mark_non_differentiable(*kept)
        return logprobs, *kept

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 -- torch's
        (slopes,) = ctx.saved_tensors
        return ((slopes * gradient[:, None]).to(slopes.dtype), *[None] * 6)


class _OfWeight(torch.autograd.Function):
    """Zeros [n] that carry the gradient of the log-probabilities with respect to the head."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- torch's
        weight: Tensor,
        hidden: Tensor,
        tokens: Tensor,
        rule: LogitRule,
        dtype: torch.dtype,
        *kept: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(hidden, tokens, *kept)
        ctx.weight, ctx.rule, ctx.dtype = weight, rule, dtype
        return hidden.new_zeros(len(tokens), dtype=_wide(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 -- torch's
        hidden, tokens, *kept = ctx.saved_tensors
        weight, rule, dtype = ctx.weight, ctx.rule, ctx.dtype
        chunks = list(_chunks(len(tokens), rule.chunk_tokens(len(weight), dtype, hidden.device.type)))
        cast = weight if len(kept) == 2 * len(chunks) else weight.to(dtype)
        total = gradient_of(weight) if rule.adds_in_place else torch.zeros_like(weight, dtype=_wide(weight.dtype))
        factors = gradient / rule.temperature
        for number, rows in enumerate(chunks):
            again = (hidden[rows].to(dtype), cast, tokens[rows], rule, None, True)
            shares, pull = kept[2 * number : 2 * number + 2] or _chunk(*again)[2]
            # scale the states, which are small, instead of the matrix over the vocabulary
            wide = hidden[rows].to(factors.dtype) * factors[rows, None]
            total.index_add_(0, tokens[rows], (wide * pull[:, None]).to(total.dtype))
            add_product(total, shares.T, wide.to(dtype), alpha=-1)
            del shares  # freed before the next chunk is computed
        return (None if rule.adds_in_place else total, *[None] * (4 + len(kept)))


def _chunk(
    hidden: Tensor, cast: Tensor, tokens: Tensor, rule: LogitRule, own: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Compute a chunk of c tokens in 1.5 times the memory of its logits, from [c, hidden], [V, hidden] (`cast`), [c].

    `own` holds the head rows of the tokens, [c, hidden], if slopes are needed. Returns log pi [c],
    d log pi / dh [c, hidden], and, if `keep`, the result of `_shares`.
    """
    scaled = _scaled_logits(hidden, cast, rule)
    picked = scaled.gather(1, tokens[:, None]).squeeze(1)
    needs_shares = own is not None or keep
    slant = _steepness(scaled, rule) if needs_shares and rule.softcap is not None else None
    probabilities = scaled
    if rule.is_fused:
        if slant is None and needs_shares:
            probabilities = torch.empty_like(scaled, dtype=hidden.dtype)
        partition = picked - kernels.softmax(scaled, tokens, probabilities if needs_shares else None)
    else:
        partition = _normalize(scaled)
    if not needs_shares:
        return picked - partition, None, ()
    del scaled
    shares, pull = _shares(probabilities, slant, tokens, picked, partition, rule, hidden.dtype)
    slopes = None if own is None else (own * pull[:, None] - product(shares, cast)) / rule.temperature
    return picked - partition, slopes, (shares, pull) if keep else ()


def _normalize(scaled: Tensor) -> Tensor:
    """Replace logits [c, V] by probabilities in place; return their logsumexp [c]."""
    partition = scaled.new_empty(len(scaled))
    cached = CACHED_BYTES // scaled[0].nbytes if scaled.device.type == "cpu" else len(scaled)
    for rows in _chunks(len(scaled), max(1, cached)):
        top = scaled[rows].amax(1)
        sums = scaled[rows].sub_(top[:, None]).exp_().sum(1)
        partition[rows] = top + sums.log()
        scaled[rows].div_(sums[:, None])
    return partition


def _shares(
    probabilities: Tensor,
    slant: Tensor | None,
    tokens: Tensor,
    picked: Tensor,
    partition: Tensor,
    rule: LogitRule,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the coefficients of head rows in d log pi / dh: [c, V] of all words, subtracted; [c] of the tokens, added.

    The coefficients are p and 1, each times the derivative of the soft cap. If p is rounded, p of the token itself is
    set to 0, and its coefficient is 1 - p.
    """
    pull = _steepness(picked, rule)
    if dtype != _wide(dtype):
        if probabilities.dtype != dtype:  # set before rounding: on a CPU, scatter_ casts 16-bit tensors back and forth
            probabilities.scatter_(1, tokens[:, None], 0)
        pull = pull * -torch.expm1(picked - partition)
    return (probabilities if slant is None else probabilities.mul_(slant)).to(dtype), pull


def _scaled_logits(hidden: Tensor, weight: Tensor, rule: LogitRule) -> Tensor:
    """Return the scaled logits z of a chunk, [c, hidden], [V, hidden] -> [c, V]."""
    logits = product(hidden, weight.T)
    logits = logits.to(_wide(logits.dtype))
    if rule.softcap is not None:
        logits.div_(rule.softcap).tanh_().mul_(rule.softcap)
    return logits if rule.temperature == 1 else logits.div_(rule.temperature)


def _steepness(scaled: Tensor, rule: LogitRule) -> Tensor:
    """Return the derivative of the soft cap at scaled logits; 1 without a soft cap."""
    if rule.softcap is None:
        return torch.ones_like(scaled)
    return (scaled * (rule.temperature / rule.softcap)).square_().neg_().add_(1)


def _chunks(num_tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, num_tokens)) for start in range(0, num_tokens, chunk))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
