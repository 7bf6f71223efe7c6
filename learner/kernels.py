"""Fused kernels (Triton) for what torch computes element by element in many passes over memory; docs/gpu.md.

    layer       its two norms and the sum between them, of layers that norm before each block and add after it (all
                families but Gemma's), by `learner.row_kernels`
    norm        every other RMS norm, by liger-kernel, with the offset and the rounding of its family; the incoming
                gradient is left as it is: where a norm's output is added to states (Gemma), theirs is the same tensor
    gate        act(gate) * up of an MLP, for SiLU and the tanh form of GELU; its gradient overwrites its inputs
    rotation    of queries and keys, in the module of the model's attention, where layers look it up
    softmax     of a chunk of the head's logits, by `learner.row_kernels`

The head stays two products of torch around that softmax: the library's fused heads round logits to 16 bits, and take
four products where ours take three for tokens whose probabilities are kept.
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

from learner.attention import AttentionLayout

logger = logging.getLogger(__name__)

LIBRARY = "liger_kernel"
DEVICE = "cuda"
ROTATED = (torch.bfloat16, torch.float16)

_FUNCTIONS = f"{LIBRARY}.transformers.functional"
_OURS = "learner.row_kernels"
"""Imported on use, for Triton is not everywhere."""
_PRE_NORMED = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
"""Parts of a layer that norms before attention and before its MLP, and nowhere else."""
_ROTATION = "apply_rotary_pos_emb"
_GATES = {"silu": "liger_swiglu", "gelu_pytorch_tanh": "liger_geglu"}
"""By the activation that a model's config names."""


def fuse(decoder: nn.Module, device: torch.device) -> bool:
    """Replace what the kernels compute in these layers, for good; return False if no kernels are usable."""
    usable = _usable(device) if device.type == DEVICE else None
    if usable is None:
        return False
    library, ours = usable
    for module in decoder.modules():  # hooks stay, for they are called around `forward`
        parts: Any = dict(module.named_children())
        if parts.keys() == _PRE_NORMED and not _is_gemma(parts["input_layernorm"]):
            module.forward = functools.partial(_pre_normed, ours.add_norm, module)
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
    logger.info("norms, gates, rotations and the softmax of logits are computed by %s and %s", LIBRARY, _OURS)
    return True


def softmax(logits: Tensor, tokens: Tensor, out: Tensor | None) -> Tensor:
    """`row_kernels.softmax`; only after `fuse` has returned True."""
    found: Tensor = importlib.import_module(_OURS).softmax(logits, tokens, out)
    return found


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
    """A decoder layer, [1, T, H] -> [1, T, H]."""
    parts: Any = layer
    first, second = parts.input_layernorm, parts.post_attention_layernorm
    states, normed = add_norm(states, None, first.weight, first.variance_epsilon)
    known = {"position_embeddings": position_embeddings, "attention_mask": None, "layout": layout}
    attended, _ = parts.self_attn(hidden_states=normed, **known)
    states, normed = add_norm(states, attended, second.weight, second.variance_epsilon)
    added: Tensor = parts.mlp(normed)
    return states + added


def _norm(library: ModuleType, module: nn.Module, *, is_gemma: bool) -> Callable[[Tensor], Tensor]:
    """Of Llama's kind, which rounds before the weight; or of Gemma's, which adds one to it and rounds at the end."""
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
    """Rotate [1, H, T, D] queries and keys by [1, T, D]; the kernel overwrites its inputs, which nothing else reads."""
    takes = query.device.type == DEVICE and query.dtype == key.dtype and query.dtype in ROTATED
    if not takes or unsqueeze_dim != 1:
        return plain(query, key, cosines, sines, unsqueeze_dim)
    rotated = library.liger_rope(query, key, cosines, sines)
    return rotated[0], rotated[1]


# --- what is tried before anything is replaced ----------------------------------------------------


def _usable(device: torch.device) -> tuple[ModuleType, ModuleType] | None:
    """Return the library's functions and ours; None if it is not installed, or, with a warning, if one fails."""
    if importlib.util.find_spec(LIBRARY) is None:
        return None
    try:
        library, ours = importlib.import_module(_FUNCTIONS), importlib.import_module(_OURS)
        wrong = _first_wrong(library, ours, device)
    except Exception as error:  # Triton looks for a compiler and a driver, and each fails in its own way
        wrong = f"{type(error).__name__}: {error}"
    else:
        if wrong is None:
            return library, ours
    logger.warning(
        "%s is installed, and its kernels or the learner's own do not work on %s (%s): torch computes norms, gates, "
        "rotations and the softmax of logits in their place, which is slower. Mend it, or uninstall it",
        *(LIBRARY, device, wrong),
    )
    return None


def _first_wrong(library: ModuleType, ours: ModuleType, device: torch.device) -> str | None:
    """Return the kernel whose numbers or gradients on a small example are not torch's; None if all are."""
    for trial in (*_trials(library, device), *_trials_of_ours(ours, device)):
        found, wanted = (_with_gradients(function, trial.inputs) for function in (trial.fused, trial.plain))
        close = [(one - other).norm() <= trial.within * other.norm() for one, other in zip(found, wanted, strict=True)]
        if not all(close):
            return f"wrong numbers of the {trial.name}"
    logits, tokens = torch.linspace(-3, 3, 64, device=device).view(4, 16), torch.arange(4, device=device)
    wanted = [logits.log_softmax(1)[:, :4].diag(), logits.softmax(1).scatter(1, tokens[:, None], 0)]
    for dtype in (torch.float32, torch.bfloat16):
        shares = torch.empty_like(logits, dtype=dtype)
        said = [ours.softmax(logits, tokens, shares), shares.float()]
        if not all(torch.allclose(*both, rtol=1e-2, atol=1e-5) for both in zip(said, wanted, strict=True)):
            return "wrong numbers of the softmax"
    return None


class _Trial(NamedTuple):
    name: str
    fused: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    within: float = 1e-3


def _trials_of_ours(ours: Any, device: torch.device) -> Iterator[_Trial]:  # noqa: ANN401 -- a module
    """In each dtype of training: what is compiled for the first time then cannot be replaced any more."""
    rows = torch.linspace(-3, 3, 64, device=device).view(4, 16)
    inputs = rows, rows.flip(0), rows[3]

    def fused(narrow: torch.dtype, adds: bool, states: Tensor, added: Tensor, weight: Tensor) -> Tensor:
        added = added.to(narrow)
        found = ours.add_norm(states, added if adds else None, weight.to(narrow), 1e-6)
        return torch.cat([found[0].float(), found[1].float()]) + (0 if adds else 0 * added.sum())

    def plain(adds: bool, states: Tensor, added: Tensor, weight: Tensor) -> Tensor:
        summed = states + added * float(adds)
        return torch.cat([summed, F.rms_norm(summed, (16,), weight, 1e-6)])

    for narrow in (torch.float32, torch.bfloat16):
        for adds in (True, False):
            within = 1e-3 if narrow == torch.float32 else 0.05
            both = functools.partial(fused, narrow, adds), functools.partial(plain, adds)
            yield _Trial("sum and its norm", *both, inputs, within)


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
