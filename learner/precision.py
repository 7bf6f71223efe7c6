"""Precision: weights that are computed with in bfloat16, and the float32 masters that an optimizer moves.

    float32, float64   a module's parameters are what the optimizer moves
    bfloat16           a module holds roundings of the masters, made anew once per update: no weight is cast for a
                       micro-batch, and none is kept a second time for the backward pass

Every weight of a model is rounded, norms and biases too: a 16-bit engine serves just these values, and what the learner
calls the policy is what wrote the samples. The gradient of a rounding is that of its master. A product of matrices
makes it in bfloat16 for each micro-batch, as under autocast; autograd widens it, and sums are float32.

The states between layers stay float32, or are rounded as in the engine (learner.residual). Norms compute in float32 and
hand bfloat16 to the products that read them, once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

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


def embed(embedding: nn.Embedding, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a rounded embedding as states of this dtype, with a gradient that is summed in float32."""
    states: Tensor = _Lookup.apply(embedding.weight, tokens, embedding.padding_idx, dtype)  # type: ignore[no-untyped-call]
    scale: Tensor | None = getattr(embedding, "embed_scale", None)  # Gemma, whose scale is rounded like its weights
    return states if scale is None else states * scale.to(embedding.weight.dtype)


class _Context(Protocol):
    """What autograd keeps for the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    num_rows: int
    padding: int

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Lookup(torch.autograd.Function):
    """Torch's own lookup sums the gradients of a token in the dtype of the weight: in bfloat16, of a frequent one."""

    @staticmethod
    def forward(ctx: _Context, weight: Tensor, tokens: Tensor, padding: int | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.num_rows, ctx.padding = len(weight), -1 if padding is None else padding
        return nn.functional.embedding(tokens, weight).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Any, ...]:
        (tokens,) = ctx.saved_tensors
        wide = gradient.float()
        total = torch.ops.aten.embedding_dense_backward(wide, tokens, ctx.num_rows, ctx.padding, False)
        return total, None, None, None
