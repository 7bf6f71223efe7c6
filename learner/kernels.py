"""Fused kernels of a library in the place of what is computed element by element, where it is installed.

Without them a norm, a rotation, a gate and a softmax are ten and more passes over memory each. liger-kernel (Triton)
does each in one or two, forward and backward, and keeps less for the backward pass. What is replaced, by which rule:

    norm        every RMS norm, with the offset and the rounding of its family; the gradient that comes in is left as it
                is, for where the output of a norm is added to states (Gemma), theirs is the same tensor
    gate        act(gate) * up of an MLP, for SiLU and the tanh form of GELU; its gradient is written over its inputs,
                which nothing else reads
    rotation    of queries and keys, for the attention of a model's file as a whole, since layers look it up there;
                the kernel takes it where it is of 16 bits and on CUDA, and torch all other
    softmax     of a chunk of the head's logits, in float32 as their product is; probabilities are written over them

The head itself stays two products of torch around that softmax. The library has the whole in one, and neither will do:
`fused_linear_cross_entropy` rounds logits to 16 bits, knows no temperature, and reads the head once for every
tokens * width / words tokens. `fused_linear_scaled_cross_entropy` has a temperature and a loss per token, but rounds
logits to float16 and sums the head's gradient in bfloat16; it is for compute capability 9.0 alone (elsewhere its logits
are of 16 bits), has no soft cap, and makes both gradients in one node, so twice where a schedule asks for them apart.
Neither saves a product: theirs are four too.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

logger = logging.getLogger(__name__)

LIBRARY = "liger_kernel"
DEVICE = "cuda"
"""Where its kernels run."""
ROTATED = (torch.bfloat16, torch.float16)
"""Of which queries and keys its rotation is taken."""

_FUNCTIONS = f"{LIBRARY}.transformers.functional"
_ROTATION = "apply_rotary_pos_emb"
_GATES = {"silu": "liger_swiglu", "gelu_pytorch_tanh": "liger_geglu"}
"""By the activation that a model's config names."""


def fuse(decoder: nn.Module, device: torch.device) -> bool:
    """Replace what the kernels compute in these layers, for good; False and nothing where they are not at hand."""
    library = _usable_library(device) if device.type == DEVICE else None
    if library is None:
        return False
    for module in decoder.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            _replace_forward(module, _norm(library, module, is_gemma=kind.startswith("Gemma")))
        elif kind.endswith("MLP"):
            config: Any = module.config
            gate = _GATES.get(getattr(config, "hidden_act", None) or config.hidden_activation)
            if gate is not None:
                _replace_forward(module, functools.partial(_gated, getattr(library, gate), module))
        elif kind.endswith("Attention"):
            _replace_rotation(library, sys.modules[type(module).__module__])
    logger.info("norms, gates, rotations and the softmax of logits are computed by %s", LIBRARY)
    return True


@torch.no_grad()
def softmax_in_place(logits: Tensor, tokens: Tensor, *, wants_shares: bool) -> Tensor:
    """Log-probabilities of tokens, float32 [c, V], int64 [c] -> [c]; only after `fuse` has said True.

    With `wants_shares` the logits become probabilities, but for those of the tokens, which become anything.
    """
    library: Any = importlib.import_module(_FUNCTIONS)
    # that a gradient is wanted is what it goes by, and it writes that over its input
    losses: Tensor = library.liger_cross_entropy(logits.detach().requires_grad_(wants_shares), tokens, reduction="none")
    return losses.detach().neg_()


def _replace_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    module.forward = forward  # hooks stay, for they are called around it


def _norm(library: ModuleType, module: nn.Module, *, is_gemma: bool) -> Callable[[Tensor], Tensor]:
    """Of Llama's kind, which rounds before the weight; or of Gemma's, which rounds at the end and adds one to it."""
    norm: Any = module
    eps = norm.eps if is_gemma else norm.variance_epsilon
    rule = {"offset": 1.0, "casting_mode": "gemma"} if is_gemma else {"offset": 0.0, "casting_mode": "llama"}

    def forward(states: Tensor) -> Tensor:
        normed: Tensor = library.liger_rms_norm(states, norm.weight, eps, in_place=False, **rule)
        return normed

    return forward


def _gated(gate: Callable[[Tensor, Tensor], Tensor], module: nn.Module, states: Tensor) -> Tensor:
    mlp: Any = module
    found: Tensor = mlp.down_proj(gate(mlp.gate_proj(states), mlp.up_proj(states)))
    return found


def _replace_rotation(library: ModuleType, model_file: ModuleType) -> None:
    plain = getattr(model_file, _ROTATION)
    if isinstance(plain, functools.partial):
        return  # replaced already, for another layer or stage
    setattr(model_file, _ROTATION, functools.partial(_rotated, library, plain))


def _rotated(
    library: ModuleType,
    plain: Callable[..., tuple[Tensor, Tensor]],
    query: Tensor,
    key: Tensor,
    cosines: Tensor,
    sines: Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Of [1, H, T, D] queries and keys by [1, T, D]; the kernel writes over its inputs, which nothing else reads."""
    takes = query.device.type == DEVICE and query.dtype == key.dtype and query.dtype in ROTATED
    if not takes or unsqueeze_dim != 1:
        return plain(query, key, cosines, sines, unsqueeze_dim)
    rotated = library.liger_rope(query, key, cosines, sines)
    return rotated[0], rotated[1]


# --- what is tried before anything is replaced ----------------------------------------------------


def _usable_library(device: torch.device) -> ModuleType | None:
    """Its functions; None where it is not installed, and where it fails on this device, which a warning tells."""
    if importlib.util.find_spec(LIBRARY) is None:
        return None
    try:
        library = importlib.import_module(_FUNCTIONS)
        wrong = _first_wrong(library, device)
    except Exception as error:  # Triton looks for a compiler and a driver, and each fails in its own way
        wrong = f"{type(error).__name__}: {error}"
    else:
        if wrong is None:
            return library
    logger.warning(
        "%s is installed and does not work on %s (%s): torch computes norms, gates, rotations and the softmax "
        "of logits in its place, which is slower. Mend it, or uninstall it",
        *(LIBRARY, device, wrong),
    )
    return None


def _first_wrong(library: ModuleType, device: torch.device) -> str | None:
    """Whose numbers or gradients on a small example are not torch's; None if all are."""
    for trial in _trials(library, device):
        found, wanted = (_with_gradients(function, trial.inputs) for function in (trial.fused, trial.plain))
        if not all(torch.allclose(*both, rtol=1e-3, atol=1e-4) for both in zip(found, wanted, strict=True)):
            return f"wrong numbers of its {trial.name}"
    logits, tokens = torch.linspace(-3, 3, 64, device=device).view(4, 16), torch.arange(4, device=device)
    wanted = [logits.log_softmax(1)[:, :4].diag(), logits.softmax(1).scatter(1, tokens[:, None], 0)]
    said = softmax_in_place(logits, tokens, wants_shares=True)
    if not all(map(torch.allclose, (said, logits.scatter(1, tokens[:, None], 0)), wanted)):
        return "wrong numbers of its softmax"
    return None


class _Trial(NamedTuple):
    name: str
    fused: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


def _trials(library: Any, device: torch.device) -> Iterator[_Trial]:  # noqa: ANN401 -- a module, of functions
    rows = torch.linspace(-3, 3, 64, device=device).view(4, 16)
    heads, weight = rows.view(1, 2, 2, 16), rows[3]
    halves = rows.view(1, 2, 32)[..., :8]
    cosines, sines = (torch.cat([each, each], -1) for each in (halves.cos(), halves.sin()))

    def fused_norm(states: Tensor, weight: Tensor) -> Tensor:
        normed: Tensor = library.liger_rms_norm(states, weight, 1e-6, in_place=False, offset=0.0, casting_mode="llama")
        return normed

    def rotation(query: Tensor, key: Tensor) -> Tensor:
        both = torch.cat([query, key], 1)
        left, right = both.chunk(2, -1)
        return both * cosines + torch.cat([-right, left], -1) * sines

    def fused_rotation(query: Tensor, key: Tensor) -> Tensor:
        return torch.cat(library.liger_rope(query, key, cosines, sines), 1)

    yield _Trial("norm", fused_norm, lambda states, weight: F.rms_norm(states, (16,), weight, 1e-6), (rows, weight))
    for name, act in (("liger_swiglu", F.silu), ("liger_geglu", functools.partial(F.gelu, approximate="tanh"))):
        yield _Trial("gate", getattr(library, name), lambda gate, up, act=act: act(gate) * up, (rows, rows.flip(0)))
    yield _Trial("rotation", fused_rotation, rotation, (heads, heads.flip(1)))


def _with_gradients(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [each.clone().requires_grad_() for each in inputs]
    with torch.enable_grad():
        found = function(*(leaf * 1 for leaf in leaves))  # what a kernel writes over is no leaf
    return [found.detach(), *torch.autograd.grad(found.sin().sum(), leaves)]
