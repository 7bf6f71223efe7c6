"""Precision: weights that are computed with in bfloat16, and the float32 masters that an optimizer moves.

    float32, float64   a module's parameters are what the optimizer moves
    bfloat16           a module holds roundings of the masters, made anew once per update: no weight is cast for a
                       micro-batch, and none is kept a second time for the backward pass

Every weight of a model is rounded, norms and biases too: a 16-bit engine serves just these values, and what the learner
calls the policy is what wrote the samples. The gradient of a rounding is that of its master, float32: on a GPU each
micro-batch's product is added to it where it is kept, unrounded. On a CPU, and with a schedule that takes gradients of
inputs and of weights apart, it is a product in bfloat16 that is widened and added.

The states between layers stay float32, or are rounded as in the engine (learner.residual). Norms compute in float32 and
hand bfloat16 to the products that read them, once for all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

COMPUTED = torch.bfloat16
"""What products of matrices read."""

_NORM = "norm"
"""How the name of every norm of a decoder layer ends."""


def round_parameters(module: nn.Module, *, but: Callable[[str], bool]) -> dict[str, nn.Parameter]:
    """Put a rounding in the place of each wider parameter, but for some; the parameters of before are returned by name.

    Of parameters that are tied the first alone is replaced: tie them again.
    """
    masters = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.dtype != COMPUTED and not but(name)
    }
    module.load_state_dict({name: _rounding_of(master) for name, master in masters.items()}, strict=False, assign=True)
    return masters


def _rounding_of(master: nn.Parameter) -> nn.Parameter:
    rounding = nn.Parameter(master.detach().to(COMPUTED), requires_grad=master.requires_grad)
    rounding.grad_dtype = master.dtype
    return rounding


class Roundings:
    """The roundings of an optimizer's weights."""

    def __init__(self, masters: Mapping[str, nn.Parameter], computed: Mapping[str, nn.Parameter]) -> None:
        """Pair them by name; a weight that is computed with as it is has no rounding."""
        pairs = [(computed[name], master) for name, master in masters.items() if computed[name] is not master]
        self._roundings: list[Tensor] = [rounding for rounding, _ in pairs]
        self._masters: list[Tensor] = [master for _, master in pairs]

    def hand_over(self) -> None:
        """Make the gradients of the roundings, which forget them, those of the masters."""
        for rounding, master in zip(self._roundings, self._masters, strict=True):
            master.grad, rounding.grad = rounding.grad, None

    @torch.no_grad()
    def follow(self) -> None:
        """Round the masters anew."""
        if self._roundings:
            torch._foreach_copy_(self._roundings, self._masters)


def narrow_norms(layers: nn.Module) -> None:
    """Have every norm of some layers give what products read, so that not each of them casts it again."""
    for name, module in layers.named_modules():
        if name.endswith(_NORM):
            module.register_forward_hook(_narrowed)


def _narrowed(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    return output.to(COMPUTED)


def embed(embedding: nn.Embedding, tokens: Tensor, dtype: torch.dtype, *, adds_in_place: bool = False) -> Tensor:
    """Rows of a rounded embedding as states of this dtype, with a gradient that is summed in float32.

    `adds_in_place`: it is added to `grad` itself, and no other like the whole table is made.
    """
    asked = (embedding.padding_idx, dtype, adds_in_place)
    states: Tensor = _Lookup.apply(embedding.weight, tokens, *asked)  # type: ignore[no-untyped-call]
    scale: Tensor | None = getattr(embedding, "embed_scale", None)  # Gemma, whose scale is rounded like its weights
    return states if scale is None else states * scale.to(embedding.weight.dtype)


# --- products -------------------------------------------------------------------------------------


def product(left: Tensor, right: Tensor) -> Tensor:
    """Of matrices; in float32 where 16-bit numbers can be multiplied as they are and summed and kept in it."""
    if sums_in_float32(left):
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right


def add_product(total: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0) -> None:
    """`total += alpha * left @ right`, with no matrix like `total` between them where that can be."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, alpha=alpha)
    elif sums_in_float32(left):
        torch.addmm(total, left, right, out_dtype=torch.float32, alpha=alpha, out=total)
    else:
        total.add_(left @ right, alpha=alpha)


def sums_in_float32(factor: Tensor) -> bool:
    """Does a product with this matrix have a result that is wider than its factors?"""
    return factor.device.type == "cuda" and factor.dtype in (torch.bfloat16, torch.float16)


def gradient_of(weight: Tensor) -> Tensor:
    """What gradients of a weight are added to, float32 or wider: its `grad`, of zeros where it has none yet."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    return weight.grad


def add_gradients_in_place(layers: nn.Module) -> None:
    """Have every linear map of some rounded layers add to its weight's gradient itself.

    Autograd would keep a product in bfloat16, widen it and add it up: three passes over a matrix in place of one. Not
    where a schedule takes gradients of inputs and of weights apart, for one node of the graph makes both here.
    """
    for module in layers.modules():
        if isinstance(module, nn.Linear):
            module.__dict__["forward"] = functools.partial(_mapped, module)


def _mapped(module: nn.Linear, states: Tensor) -> Tensor:
    if not (module.weight.requires_grad and torch.is_grad_enabled()):
        return F.linear(states, module.weight, module.bias)
    mapped: Tensor = _Map.apply(states.to(module.weight.dtype), module.weight, module.bias)  # type: ignore[no-untyped-call]
    return mapped


class _Context(Protocol):
    """What autograd keeps for the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    weight: Tensor
    padding: int
    adds_in_place: bool

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Lookup(torch.autograd.Function):
    """Torch's own lookup sums the gradients of a token in the dtype of the weight: in bfloat16, of a frequent one."""

    @staticmethod
    def forward(
        ctx: _Context, weight: Tensor, tokens: Tensor, padding: int | None, dtype: torch.dtype, adds_in_place: bool
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.padding, ctx.adds_in_place = weight, -1 if padding is None else padding, adds_in_place
        return nn.functional.embedding(tokens, weight).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Any, ...]:
        (tokens,) = ctx.saved_tensors
        wide = gradient.float()
        if ctx.adds_in_place:
            wide = wide.masked_fill((tokens == ctx.padding).unsqueeze(-1), 0)
            gradient_of(ctx.weight).index_add_(0, tokens.flatten(), wide.flatten(0, -2))
            return None, None, None, None, None
        total = torch.ops.aten.embedding_dense_backward(wide, tokens, len(ctx.weight), ctx.padding, False)
        return total, None, None, None, None


class _Map(torch.autograd.Function):
    """A linear map. The gradient of its weight is not handed on, but added where it is kept."""

    @staticmethod
    def forward(ctx: _Context, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(states)
        ctx.weight = weight  # itself: what is saved comes back as another tensor where activations are computed again
        return F.linear(states, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (states,), weight = ctx.saved_tensors, ctx.weight
        rows = gradient.flatten(0, -2)
        factors = rows.T, states.flatten(0, -2)
        if weight.grad is None:
            weight.grad = product(*factors).to(torch.float32)
        else:
            add_product(weight.grad, *factors)
        of_states = gradient @ weight if ctx.needs_input_grad[0] else None
        return of_states, None, rows.sum(0, dtype=torch.float32) if ctx.needs_input_grad[2] else None
