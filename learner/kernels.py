"""Fused kernels of a library in the place of what decoder layers compute element by element, where it is installed.

Without them a norm, a rotation and a gate are ten and more passes over memory each. liger-kernel (Triton) does each in
one, forward and backward, and keeps less for the backward pass. What is replaced here, and by which rule:

    norm        every RMS norm, with the offset and the rounding of its family; the gradient that comes in is left as it
                is, for where the output of a norm is added to states (Gemma), theirs is the same tensor
    gate        act(gate) * up of an MLP, for SiLU and the tanh form of GELU; its gradient is written over its inputs,
                which nothing else reads
    rotation    of queries and keys, for the attention of a model's file as a whole, since layers look it up there;
                the kernel takes it where it is of 16 bits and on CUDA, and torch all other

The library's fused linear cross-entropy is not used: it rounds logits to 16 bits, knows no temperature, and its chunks
are of tokens * width / words, so that the head is read as often as `learner.logprobs` avoids.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

LIBRARY = "liger_kernel"
DEVICE = "cuda"
"""Where its kernels run."""
ROTATED = (torch.bfloat16, torch.float16)
"""Of which queries and keys its rotation is taken."""

_ROTATION = "apply_rotary_pos_emb"
_GATES = {"silu": "liger_swiglu", "gelu_pytorch_tanh": "liger_geglu"}
"""By the activation that a model's config names."""


def fuse(decoder: nn.Module, device: torch.device) -> bool:
    """Replace what the kernels compute in these layers, for good; False and nothing where they are not at hand."""
    if device.type != DEVICE or importlib.util.find_spec(LIBRARY) is None:
        return False
    library = importlib.import_module(f"{LIBRARY}.transformers.functional")
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
    logger.info("norms, gates and rotations are computed by %s", LIBRARY)
    return True


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
