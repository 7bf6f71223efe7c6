"""Products of matrices that the learner computes itself: of embeddings, linear maps and the head.

In bfloat16, modules hold roundings of the float32 masters, made anew once per update (docs/learner.md). The gradient of
a rounding is that of its master, float32: on a GPU each micro-batch's product is added to it unrounded. On a CPU, and
with a schedule that takes gradients of inputs and of weights apart, it is a product in bfloat16 that is widened and
added.

The head gives log-probabilities of given tokens without all logits at once. With z = logits / temperature, log pi(y) is
z_y - logsumexp(z). Logits exist a chunk of tokens at a time, in the backward pass too. The gradient

    d log pi(y) / dh = (W_y - sum_v p_v W_v) / temperature

depends on the loss by one factor c per token alone, so the forward pass computes it at once ([n, hidden]). The other,

    dL/dW_v = sum_t c_t (1[y_t = v] - p_tv) h_t / temperature,

needs all c first: the first pass keeps p, rounded as products read it, of as many chunks as it may, and the backward
pass makes it again for the others. The two are separate nodes of the graph, for a zero-bubble schedule asks for them at
different times. Soft-capped logits (Gemma 2), cap * tanh(l / cap), multiply p_v and 1[y = v] by 1 - tanh^2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from learner import kernels

COMPUTED = torch.bfloat16

LOGITS_MIB: Mapping[str, float] = {"cpu": 64.0, "cuda": 1024.0}
"""By type of device, logits held at a time: little beside a micro-batch's states, and enough that products take
longer than reading the head."""
KEPT_MIB: Mapping[str, float] = {"cpu": 64.0, "cuda": 2048.0}
"""By type of device, probabilities kept for the backward pass, of all micro-batches that have come to the head. On a
GPU those of 7,000 tokens and 152k words: that saves a product in four and two passes over logits."""


def round_parameters(module: nn.Module, *, but: Callable[[str], bool]) -> dict[str, nn.Parameter]:
    """Replace each wider parameter by a rounding, but for some; return the parameters of before by name.

    Of parameters that are tied the first alone is replaced: tie them again.
    """
    masters = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.dtype != COMPUTED and not but(name)
    }
    roundings = {}
    for name, master in masters.items():
        roundings[name] = nn.Parameter(master.detach().to(COMPUTED), requires_grad=master.requires_grad)
        roundings[name].grad_dtype = master.dtype
    module.load_state_dict(roundings, strict=False, assign=True)
    return masters


def narrow_norms(layers: nn.Module) -> None:
    """Have every norm of some layers give what products read, so that not each of them casts it again."""
    for name, module in layers.named_modules():
        if name.endswith("norm"):  # as of every norm of a decoder layer
            module.register_forward_hook(lambda _module, _inputs, output: output.to(COMPUTED))


# --- products -------------------------------------------------------------------------------------


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices; in float32 if 16-bit numbers can be multiplied as they are and summed and kept in it."""
    if sums_in_float32(left):
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right


def add_product(total: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0) -> None:
    """`total += alpha * left @ right`, without another matrix like `total` if possible."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, alpha=alpha)
    elif sums_in_float32(left):
        torch.addmm(total, left, right, out_dtype=torch.float32, alpha=alpha, out=total)
    else:
        total.add_(left @ right, alpha=alpha)


def sums_in_float32(factor: Tensor) -> bool:
    """Return whether a product with this matrix can have a result that is wider than its factors."""
    return factor.device.type == "cuda" and factor.dtype in (torch.bfloat16, torch.float16)


def gradient_of(weight: Tensor) -> Tensor:
    """Return what gradients of a weight are added to, float32 or wider: its `grad`, or zeros."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    return weight.grad


# --- embeddings and linear maps -------------------------------------------------------------------


def embed(embedding: nn.Embedding, tokens: Tensor, *, adds_in_place: bool = False) -> Tensor:
    """Look rows of a rounded embedding up as float32 states, with a gradient that is summed in float32.

    `adds_in_place`: it is added to `grad` itself, without another table.
    """
    asked = (embedding.padding_idx, adds_in_place)
    states: Tensor = _Lookup.apply(embedding.weight, tokens, *asked)  # type: ignore[no-untyped-call]
    scale: Tensor | None = getattr(embedding, "embed_scale", None)  # Gemma, whose scale is rounded like its weights
    return states if scale is None else states * scale.to(embedding.weight.dtype)


def add_gradients_in_place(layers: nn.Module) -> None:
    """Have every linear map of some rounded layers add to its weight's gradient itself.

    Autograd would keep a product in bfloat16, widen it and add it up: three passes over a matrix. Not for a schedule
    that takes gradients of inputs and of weights apart, for one node of the graph makes both here.
    """
    for module in layers.modules():
        if isinstance(module, nn.Linear):
            module.__dict__["forward"] = functools.partial(_mapped, module)


def _mapped(module: nn.Linear, states: Tensor) -> Tensor:
    if not (module.weight.requires_grad and torch.is_grad_enabled()):
        return F.linear(states, module.weight, module.bias)
    mapped: Tensor = _Map.apply(states.to(module.weight.dtype), module.weight, module.bias)  # type: ignore[no-untyped-call]
    return mapped


class _Lookup(torch.autograd.Function):
    """Torch's own lookup sums the gradients of a token in the dtype of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, padding: int | None, adds_in_place: bool) -> Tensor:  # noqa: ANN401 -- torch's
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.padding, ctx.adds_in_place = weight, -1 if padding is None else padding, adds_in_place
        return nn.functional.embedding(tokens, weight).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # noqa: ANN401 -- torch's
        (tokens,) = ctx.saved_tensors
        wide = gradient.float()
        if ctx.adds_in_place:
            wide = wide.masked_fill((tokens == ctx.padding).unsqueeze(-1), 0)
            gradient_of(ctx.weight).index_add_(0, tokens.flatten(), wide.flatten(0, -2))
            return None, None, None, None
        total = torch.ops.aten.embedding_dense_backward(wide, tokens, len(ctx.weight), ctx.padding, False)
        return total, None, None, None


class _Map(torch.autograd.Function):
    """A linear map that adds the gradient of its weight where it is kept."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ANN401 -- torch's
        ctx.save_for_backward(states)
        ctx.weight = weight  # itself: what is saved comes back as another tensor where activations are computed again
        return F.linear(states, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 -- torch's
        (states,), weight = ctx.saved_tensors, ctx.weight
        rows = gradient.flatten(0, -2)
        factors = rows.T, states.flatten(0, -2)
        if weight.grad is None:
            weight.grad = product(*factors).to(torch.float32)
        else:
            add_product(weight.grad, *factors)
        of_states = gradient @ weight if ctx.needs_input_grad[0] else None
        return of_states, None, rows.sum(0, dtype=torch.float32) if ctx.needs_input_grad[2] else None


# --- the head -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogitRule:
    """How hidden states become log-probabilities."""

    temperature: float
    softcap: float | None = None
    """Logits l become softcap * tanh(l / softcap), before the temperature."""
    chunk_mib: float | None = None
    """Logits (float32 or wider) held at a time; None: `LOGITS_MIB`."""
    kept_mib: float | None = None
    """Probabilities kept for the backward pass; None: `KEPT_MIB`."""
    is_fused: bool = False
    """Is their softmax that of `learner.kernels`? Only if products are of 16 bits."""
    adds_in_place: bool = False
    """Is the gradient of the head added to `grad` itself?"""

    def chunk_tokens(self, vocab_size: int, dtype: torch.dtype, device: str) -> int:
        """Tokens whose logits over V words make one chunk on a device of this type, at least 1."""
        mib = LOGITS_MIB[device] if self.chunk_mib is None else self.chunk_mib
        return max(1, int(mib * 2**20) // (vocab_size * _wide(dtype).itemsize))

    def kept_tokens(self, vocab_size: int, dtype: torch.dtype, device: str) -> int:
        """Tokens whose probabilities over V words, in the dtype of products, may be kept."""
        mib = KEPT_MIB[device] if self.kept_mib is None else self.kept_mib
        return int(mib * 2**20) // (vocab_size * dtype.itemsize)


def token_logprobs(hidden: Tensor, weight: Tensor, tokens: Tensor, rule: LogitRule) -> Tensor:
    """Log pi of the given tokens: [n, hidden] (normed), [V, hidden], int64 [n] -> [n].

    Float32 or wider, as is the gradient of the weight, also under autocast: the products alone are of 16 bits.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    learning = torch.is_grad_enabled()
    most_kept = rule.kept_tokens(len(weight), dtype, device) if learning and weight.requires_grad else 0
    with torch.autocast(device, enabled=False):
        asked = (rule, dtype, learning and hidden.requires_grad, most_kept)
        found = _OfHidden.apply(hidden, weight.detach(), tokens, *asked)  # type: ignore[no-untyped-call]
        logprobs: Tensor = found[0]
        if learning and weight.requires_grad:
            fixed = (hidden.detach(), tokens, rule, dtype)
            logprobs = logprobs + _OfWeight.apply(weight, *fixed, *found[1:])  # type: ignore[no-untyped-call]
    return logprobs


class _OfHidden(torch.autograd.Function):
    """The log-probabilities, as a function of the hidden states alone."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- torch's
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        rule: LogitRule,
        dtype: torch.dtype,
        wants_slopes: bool,
        most_kept: int,
    ) -> tuple[Tensor, ...]:
        logprobs = torch.empty(len(tokens), dtype=_wide(dtype), device=hidden.device)
        partition = torch.empty_like(logprobs)
        slopes = torch.empty_like(hidden) if wants_slopes else hidden.new_empty(0)
        kept: list[Tensor] = []
        cast = weight.to(dtype)
        for rows in _chunks(len(tokens), rule.chunk_tokens(len(weight), dtype, hidden.device.type)):
            own = weight.index_select(0, tokens[rows]).to(_wide(dtype)) if wants_slopes else None
            keep = rows.stop <= most_kept
            asked = (hidden[rows].to(dtype), cast, tokens[rows], rule, own, keep)
            logprobs[rows], partition[rows], slopes_of_rows, shares = _chunk(*asked)
            if slopes_of_rows is not None:
                slopes[rows] = slopes_of_rows.to(slopes.dtype)
            kept += shares
        ctx.save_for_backward(slopes)
        ctx.mark_non_differentiable(partition, *kept)
        return logprobs, partition, *kept

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 -- torch's
        (slopes,) = ctx.saved_tensors
        return ((slopes * gradient[:, None]).to(slopes.dtype), *[None] * 6)


class _OfWeight(torch.autograd.Function):
    """Zeros [n] whose gradient is the head's part in that of the log-probabilities."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- torch's
        weight: Tensor,
        hidden: Tensor,
        tokens: Tensor,
        rule: LogitRule,
        dtype: torch.dtype,
        partition: Tensor,
        *kept: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(hidden, tokens, partition, *kept)
        ctx.weight, ctx.rule, ctx.dtype = weight, rule, dtype
        return torch.zeros_like(partition)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 -- torch's
        hidden, tokens, partition, *kept = ctx.saved_tensors
        weight, rule, dtype = ctx.weight, ctx.rule, ctx.dtype
        chunks = list(_chunks(len(tokens), rule.chunk_tokens(len(weight), dtype, hidden.device.type)))
        cast = weight if len(kept) == 2 * len(chunks) else weight.to(dtype)
        total = gradient_of(weight) if rule.adds_in_place else torch.zeros_like(weight, dtype=_wide(weight.dtype))
        factors = gradient / rule.temperature
        for number, rows in enumerate(chunks):
            shares, pull = kept[2 * number : 2 * number + 2] or _shares_again(
                hidden[rows].to(dtype), cast, tokens[rows], partition[rows], rule
            )
            # the factor is put on the states, which are few, and not on the vocabulary
            wide = hidden[rows].to(factors.dtype) * factors[rows, None]
            total.index_add_(0, tokens[rows], (wide * pull[:, None]).to(total.dtype))
            add_product(total, shares.T, wide.to(dtype), alpha=-1)
            del shares  # before the next chunk is made
        return (None if rule.adds_in_place else total, *[None] * (5 + len(kept)))


def _chunk(
    hidden: Tensor, cast: Tensor, tokens: Tensor, rule: LogitRule, own: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Compute one chunk, in the memory of its logits and half as much: [c, hidden], [V, hidden] (`cast`), [c].

    `own` holds the head's rows of the tokens, [c, hidden], if slopes are wanted; `keep` asks for the shares. Returns
    log pi [c], the log of the sum of exp z [c], d log pi / dh [c, hidden], and what `_shares_again` returns if kept.
    """
    scaled = _scaled_logits(hidden, cast, rule)
    picked = scaled.gather(1, tokens[:, None]).squeeze(1)
    wants_shares = own is not None or keep
    slant = _steepness(scaled, rule) if wants_shares and rule.softcap is not None else None
    probabilities = scaled
    if rule.is_fused:
        if slant is None and wants_shares:
            probabilities = torch.empty_like(scaled, dtype=hidden.dtype)
        partition = picked - kernels.softmax(scaled, tokens, probabilities if wants_shares else None)
    else:
        # logsumexp in place, which leaves the probabilities behind
        top = scaled.amax(1)
        sums = scaled.sub_(top[:, None]).exp_().sum(1)
        partition = top + sums.log()
        if wants_shares:
            scaled.div_(sums[:, None])
    if not wants_shares:
        return picked - partition, partition, None, ()
    del scaled
    shares, pull = _shares(probabilities, slant, tokens, picked, partition, rule, hidden.dtype)
    slopes = None if own is None else (own * pull[:, None] - product(shares, cast)) / rule.temperature
    return picked - partition, partition, slopes, (shares, pull) if keep else ()


def _shares_again(
    hidden: Tensor, cast: Tensor, tokens: Tensor, partition: Tensor, rule: LogitRule
) -> tuple[Tensor, Tensor]:
    scaled = _scaled_logits(hidden, cast, rule)
    picked = scaled.gather(1, tokens[:, None]).squeeze(1)
    slant = _steepness(scaled, rule) if rule.softcap is not None else None
    return _shares(scaled.sub_(partition[:, None]).exp_(), slant, tokens, picked, partition, rule, hidden.dtype)


def _shares(
    probabilities: Tensor,
    slant: Tensor | None,
    tokens: Tensor,
    picked: Tensor,
    partition: Tensor,
    rule: LogitRule,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return how the rows of the head pull at a state: all words away from them [c, V], the tokens towards theirs [c].

    P and 1, each times the steepness of the soft cap; if p is rounded, the tokens' own is left out, and 1 - p pulls.
    """
    pull = _steepness(picked, rule)
    if dtype != _wide(dtype):
        if probabilities.dtype != dtype:  # before they are rounded: a CPU would cast all 16-bit ones there and back
            probabilities.scatter_(1, tokens[:, None], 0)
        pull = pull * -torch.expm1(picked - partition)
    return (probabilities if slant is None else probabilities.mul_(slant)).to(dtype), pull


def _scaled_logits(hidden: Tensor, weight: Tensor, rule: LogitRule) -> Tensor:
    """Z of a chunk, [c, hidden], [V, hidden] -> [c, V]; in place from the product on."""
    logits = product(hidden, weight.T)
    logits = logits.to(_wide(logits.dtype))
    if rule.softcap is not None:
        logits.div_(rule.softcap).tanh_().mul_(rule.softcap)
    return logits if rule.temperature == 1 else logits.div_(rule.temperature)


def _steepness(scaled: Tensor, rule: LogitRule) -> Tensor:
    """Return the derivative of the soft cap at scaled logits; 1 without one."""
    if rule.softcap is None:
        return torch.ones_like(scaled)
    return (scaled * (rule.temperature / rule.softcap)).square_().neg_().add_(1)


def _chunks(num_tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, num_tokens)) for start in range(0, num_tokens, chunk))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
