"""Fused Triton kernels for elementwise operations that take torch many passes over memory; see docs/gpu.md.

    layer       the two norms of a layer and the sum between them, for layers that norm before each block and add after
                it (all families except Gemma), by `leeway.learner.row_kernels`
    norm        all other RMS norms, by liger-kernel, with the offset and rounding of the family; the incoming gradient
                is not overwritten: if the norm output is added to states (Gemma), both have the same gradient tensor
    gate        act(gate) * up of an MLP, for SiLU and the tanh form of GELU; its gradient overwrites its inputs
    rotation    rotary embedding of queries and keys; replaced in the model's module, where layers look it up
    softmax     softmax of a chunk of the head's logits, by `leeway.learner.row_kernels`

The head uses two torch products around the softmax kernel. The fused heads of liger-kernel round logits to 16 bits and
need four products instead of three for tokens whose probabilities are kept.
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

from leeway.learner.attention import AttentionLayout

logger = logging.getLogger(__name__)

LIBRARY = "liger_kernel"
DEVICE = "cuda"
ROTATED = (torch.bfloat16, torch.float16)

_FUNCTIONS = f"{LIBRARY}.transformers.functional"
_ROW_KERNELS = "leeway.learner.row_kernels"
"""Module that is imported on first use, because Triton is optional."""
_PRE_NORMED = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
"""Children of a layer whose only norms are before attention and before the MLP."""
_ROTATION = "apply_rotary_pos_emb"
_GATES = {"silu": "liger_swiglu", "gelu_pytorch_tanh": "liger_geglu"}
"""Activation in the model config -> liger-kernel function."""


def fuse(decoder: nn.Module, device: torch.device) -> bool:
    """Replace operations of these layers by kernels, permanently; return False if the kernels are unusable."""
    usable = _usable(device) if device.type == DEVICE else None
    if usable is None:
        return False
    library, row_kernels = usable
    for module in decoder.modules():  # hooks keep working: they are called around `forward`
        parts: Any = dict(module.named_children())
        if parts.keys() == _PRE_NORMED and not _is_gemma(parts["input_layernorm"]):
            module.forward = functools.partial(_pre_normed, row_kernels.add_norm, module)
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = _norm(library, module, is_gemma=_is_gemma(module))
        elif kind.endswith("MLP"):
            config: Any = module.config
            gate = _GATES.get(getattr(config, "hidden_act", None) or config.hidden_activation)
            if gate is not None:
                module.forward = functools.partial(_gated, getattr(library, gate), module)
        elif kind.endswith("Attention"):
            _replace_rotation(library, sys.modules[type(module).__module__])
    logger.info("using %s and %s for norms, gates, rotary embeddings and softmax", LIBRARY, _ROW_KERNELS)
    return True


def softmax(logits: Tensor, tokens: Tensor, out: Tensor | None) -> Tensor:
    """Call `row_kernels.softmax`; valid only after `fuse` returned True."""
    return importlib.import_module(_ROW_KERNELS).softmax(logits, tokens, out)


def _is_gemma(norm: nn.Module) -> bool:
    return type(norm).__name__.startswith("Gemma")


def _pre_normed(
    add_norm: Callable[..., tuple[Tensor, Tensor]],
    layer: nn.Module,
    states: Tensor,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    layout: AttentionLayout,
) -> Tensor:
    """Compute a decoder layer: [1, T, H] -> [1, T, H]."""
    parts: Any = layer
    first, second = parts.input_layernorm, parts.post_attention_layernorm
    states, normed = add_norm(states, None, first.weight, first.variance_epsilon)
    options = {"position_embeddings": position_embeddings, "attention_mask": None, "layout": layout}
    attended, _ = parts.self_attn(hidden_states=normed, **options)
    states, normed = add_norm(states, attended, second.weight, second.variance_epsilon)
    return states + parts.mlp(normed)


def _norm(library: ModuleType, module: nn.Module, *, is_gemma: bool) -> Callable[[Tensor], Tensor]:
    """Return a norm of Llama (rounds, then multiplies by the weight) or Gemma (adds 1 to the weight, rounds last)."""
    norm: Any = module
    eps = norm.eps if is_gemma else norm.variance_epsilon
    rule = {"offset": 1.0, "casting_mode": "gemma"} if is_gemma else {"offset": 0.0, "casting_mode": "llama"}

    def forward(states: Tensor) -> Tensor:
        return library.liger_rms_norm(states, norm.weight, eps, in_place=False, **rule)

    return forward


def _gated(gate: Callable[[Tensor, Tensor], Tensor], module: nn.Module, states: Tensor) -> Tensor:
    mlp: Any = module
    return mlp.down_proj(gate(mlp.gate_proj(states), mlp.up_proj(states)))


def _replace_rotation(library: ModuleType, model_file: ModuleType) -> None:
    plain = getattr(model_file, _ROTATION)
    if isinstance(plain, functools.partial):
        return  # already replaced for another layer or stage
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
    """Rotate queries and keys [1, H, T, D] by angles [1, T, D], in place: the inputs are not used again."""
    is_supported = query.device.type == DEVICE and query.dtype == key.dtype and query.dtype in ROTATED
    if not is_supported or unsqueeze_dim != 1:
        return plain(query, key, cosines, sines, unsqueeze_dim)
    rotated = library.liger_rope(query, key, cosines, sines)
    return rotated[0], rotated[1]


# --- validation before anything is replaced -------------------------------------------------------


def _usable(device: torch.device) -> tuple[ModuleType, ModuleType] | None:
    """Return liger-kernel's functions and the row kernels; None if a library is missing, or fails (logged)."""
    if importlib.util.find_spec(LIBRARY) is None:
        return None
    try:
        library, row_kernels = importlib.import_module(_FUNCTIONS), importlib.import_module(_ROW_KERNELS)
        wrong = _first_wrong(library, row_kernels, device)
    except Exception as error:  # the compiler and driver that Triton needs raise errors of many types
        wrong = f"{type(error).__name__}: {error}"
    else:
        if wrong is None:
            return library, row_kernels
    logger.warning(
        "%s is installed, but its kernels or those of the learner fail on %s (%s). The learner uses torch for norms, "
        "gates, rotary embeddings and the softmax of logits, which is slower. Fix the installation, or uninstall it",
        *(LIBRARY, device, wrong),
    )
    return None


def _first_wrong(library: ModuleType, row_kernels: ModuleType, device: torch.device) -> str | None:
    """Return the first kernel whose outputs or gradients on a small example differ from torch's; None if all agree."""
    for trial in (*_trials(library, device), *_row_kernel_trials(row_kernels, device)):
        fused, plain = (_with_gradients(function, trial.inputs) for function in (trial.fused, trial.plain))
        close = [(one - other).norm() <= trial.within * other.norm() for one, other in zip(fused, plain, strict=True)]
        if not all(close):
            return f"wrong results of the {trial.name} kernel"
    logits, tokens = torch.linspace(-3, 3, 64, device=device).view(4, 16), torch.arange(4, device=device)
    expected = [logits.log_softmax(1)[:, :4].diag(), logits.softmax(1).scatter(1, tokens[:, None], 0)]
    for dtype in (torch.float32, torch.bfloat16):
        shares = torch.empty_like(logits, dtype=dtype)
        found = [row_kernels.softmax(logits, tokens, shares), shares.float()]
        if not all(torch.allclose(*both, rtol=1e-2, atol=1e-5) for both in zip(found, expected, strict=True)):
            return "wrong results of the softmax kernel"
    return None


class _Trial(NamedTuple):
    name: str
    fused: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    within: float = 1e-3


def _row_kernel_trials(row_kernels: Any, device: torch.device) -> Iterator[_Trial]:  # noqa: ANN401 -- a module
    """Yield trials in each training dtype: a kernel that fails to compile during training can no longer be replaced."""
    rows = torch.linspace(-3, 3, 64, device=device).view(4, 16)
    inputs = rows, rows.flip(0), rows[3]

    def fused(narrow: torch.dtype, adds: bool, states: Tensor, added: Tensor, weight: Tensor) -> Tensor:
        added = added.to(narrow)
        found = row_kernels.add_norm(states, added if adds else None, weight.to(narrow), 1e-6)
        return torch.cat([found[0].float(), found[1].float()]) + (0 if adds else 0 * added.sum())

    def plain(adds: bool, states: Tensor, added: Tensor, weight: Tensor) -> Tensor:
        summed = states + added * float(adds)
        return torch.cat([summed, F.rms_norm(summed, (16,), weight, 1e-6)])

    for narrow in (torch.float32, torch.bfloat16):
        for adds in (True, False):
            within = 1e-3 if narrow == torch.float32 else 0.05
            both = functools.partial(fused, narrow, adds), functools.partial(plain, adds)
            yield _Trial("add_norm", *both, inputs, within)


def _trials(library: Any, device: torch.device) -> Iterator[_Trial]:  # noqa: ANN401 -- a module, of functions
    rows = torch.linspace(-3, 3, 64, device=device).view(4, 16)
    heads, weight = rows.view(1, 2, 2, 16), rows[3]
    halves = rows.view(1, 2, 32)[..., :8]
    cosines, sines = (torch.cat([each, each], -1) for each in (halves.cos(), halves.sin()))

    def fused_norm(states: Tensor, weight: Tensor) -> Tensor:
        return library.liger_rms_norm(states, weight, 1e-6, in_place=False, offset=0.0, casting_mode="llama")

    def rotation(query: Tensor, key: Tensor) -> Tensor:
        both = torch.cat([query, key], 1)
        left, right = both.chunk(2, -1)
        return both * cosines + torch.cat([-right, left], -1) * sines

    def fused_rotation(query: Tensor, key: Tensor) -> Tensor:
        return torch.cat(library.liger_rope(query, key, cosines, sines), 1)

    yield _Trial("norm", fused_norm, lambda states, weight: F.rms_norm(states, (16,), weight, 1e-6), (rows, weight))
    for name, act in (("liger_swiglu", F.silu), ("liger_geglu", functools.partial(F.gelu, approximate="tanh"))):
        yield _Trial("gate", getattr(library, name), lambda gate, up, act=act: act(gate) * up, (rows, rows.flip(0)))
    yield _Trial("rotary embedding", fused_rotation, rotation, (heads, heads.flip(1)))


def _with_gradients(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [each.clone().requires_grad_() for each in inputs]
    with torch.enable_grad():
        found = function(*(leaf * 1 for leaf in leaves))  # copies: some kernels overwrite their inputs
    return [found.detach(), *torch.autograd.grad(found.sin().sum(), leaves)]
