"""Simulate a GPU with fake CUDA tensors, which have a shape but no memory.

The learner runs its GPU code path on the fake tensors, under autocast as on a real GPU. Attention is the fused kernel.
If torch cannot select this kernel without a GPU, flash attention replaces it. The functions of liger-kernel that the
learner calls are replaced by operations that compute nothing. These operations read, write and keep the same tensors as
the kernels of version 0.8.
"""

from __future__ import annotations

import importlib.machinery
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from benchmarks.gpu.shapes import config_of
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers.models.qwen2 import modeling_qwen2

from leeway.learner import model as model_file
from leeway.learner.config import LearnerConfig
from leeway.learner.mesh import MeshPlace
from leeway.learner.model import StageModule
from leeway.learner.networks import load_chunks

CUDA = torch.device("cuda", 0)
BUDGET = 8192
"""Token budget of a micro-batch."""

_CAST_DOWN = frozenset(
    {"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "mv", "einsum"}
)
_CAST_UP = frozenset(
    {"pow", "__pow__", "__rpow__", "exp", "log", "rsqrt", "reciprocal", "softmax", "log_softmax", "logsumexp", "sum"}
    | {"rms_norm", "layer_norm", "prod", "cumsum", "linalg_vector_norm"}
)
"""Functions of the decoder whose inputs autocast casts to float32 on CUDA. Inputs of _CAST_DOWN are cast to 16 bits."""


def _operation(name: str, schema: str, result: Any) -> Any:  # noqa: ANN401 -- torch API
    """Register an operation that computes nothing; for fake tensors, `result` returns the outputs."""
    made: Any = torch.library.custom_op(f"leeway_counting::{name}", result, mutates_args=(), schema=schema)
    made.register_fake(result)
    return made


def _flash_stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    assert attn_mask is None, "flash attention takes no mask"
    assert enable_gqa or query.shape[1] == key.shape[1]
    query, key, value = (_as_autocast(each) for each in (query, key, value))
    found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    return found[0]


def _as_autocast(states: Tensor) -> Tensor:
    """Cast an input of attention, because autocast casts inputs of SDPA but not of the operation that replaces SDPA."""
    return states.to(torch.get_autocast_dtype("cuda")) if torch.is_autocast_enabled("cuda") else states


_silu_backward = _operation(
    "silu_backward", "(Tensor gradient, Tensor states) -> Tensor", lambda _, states: torch.empty_like(states)
)


class _Silu(torch.autograd.Function):
    """SiLU with a backward pass of one kernel, as on CUDA; for fake tensors, torch decomposes the pass into several."""

    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:  # noqa: ANN401 -- torch API
        ctx.save_for_backward(states)
        return torch.ops.aten.silu(states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401 -- torch API
        return _silu_backward(gradient, *ctx.saved_tensors)


class _CudaAutocast(TorchFunctionMode):
    """Mode that casts like autocast on CUDA. Autocast itself ignores fake tensors, which are on the host in C++."""

    def __init__(self) -> None:
        super().__init__()
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401 -- torch API
        types: object,
        args: Any = (),  # noqa: ANN401 -- torch API
        kwargs: Any = None,  # noqa: ANN401 -- torch API
    ) -> Any:  # noqa: ANN401 -- torch API
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "autocast_decrement_nesting":
            self._casts.clear()
        if name in _CAST_DOWN | _CAST_UP and torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda") if name in _CAST_DOWN else torch.float32
            args, kwargs = tree_map_only(Tensor, lambda each: self._cast(each, dtype), (args, kwargs))
        return _Silu.apply(args[0]) if name == "silu" else func(*args, **kwargs)

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.dtype == dtype or tensor.dtype not in (torch.float32, torch.bfloat16):
            return tensor
        if not (tensor.requires_grad and tensor.is_leaf and dtype == torch.bfloat16):
            return tensor.to(dtype)
        if id(tensor) not in self._casts:  # autocast caches casts of weights while enabled
            self._casts[id(tensor)] = (tensor, tensor.to(dtype))
        return self._casts[id(tensor)][1]


class _OnCuda(TorchDispatchMode):
    """Mode that creates tensors on the fake CUDA device where C++ code would create them on the host."""

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 -- torch API
        types: object,
        args: Any = (),  # noqa: ANN401 -- torch API
        kwargs: Any = None,  # noqa: ANN401 -- torch API
    ) -> Any:  # noqa: ANN401 -- torch API
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            name = func._schema.name.rpartition("::")[2]
            is_like_another = name.startswith("new_") or name.endswith("_like")
            in_backward = torch._C._current_graph_task_id() != -1
            if in_backward or (is_like_another and args[0].device.type == "cuda"):
                kwargs = {**kwargs, "device": CUDA}
        return func(*args, **kwargs)


def _host(args: Any) -> torch.device:  # noqa: ANN401 -- torch API
    return torch.device("meta" if args[0].fake_mode.in_kernel_invocation else "cpu")


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Make all tensors fake in this context, including tensors on "cuda", and let autocast accept fake tensors."""
    with (
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
        mock.patch("torch.cuda.is_bf16_supported", return_value=True),
        mock.patch.object(F, "scaled_dot_product_attention", _flash_stand_in),
        FakeTensorMode(allow_non_fake_inputs=True),
        # C++ code of torch initializes the runtime of a tensor's device, so this code gets the host as the device;
        # Python code and dispatch get "cuda"
        mock.patch.dict(fake_tensor._DISPATCH_META_HANDLERS, {torch.ops.prim.device.default: _host}),
        _CudaAutocast(),
        _OnCuda(),
    ):
        yield


# --- a stage ---------------------------------------------------------------------------------------


def fake_stage(name: str, layers: tuple[int, int], *, last: bool, **config: object) -> StageModule:
    """Return one of two stages of a shape, with fake weights.

    Args:
        name: name of the shape.
        layers: number of layers of the first and of the last stage.
        last: whether to return the last stage.
        config: keys of the learner's section.
    """
    with tempfile.TemporaryDirectory() as folder:
        config_of(name, num_hidden_layers=sum(layers)).save_pretrained(folder)
        section = LearnerConfig.model_validate(
            {"num_stages": 2, "precision": "bfloat16", "token_budget": BUDGET, **config}
        )
        mesh: Any = SimpleNamespace(place=MeshPlace(int(last), num_stages=2))
        with (
            mock.patch("leeway.learner.decoders.balance", return_value=[(0, layers[0]), (layers[0], sum(layers))]),
            mock.patch.object(model_file, "_check_names"),
            mock.patch.object(model_file, "_read_tensors", _fake_tensors),
            mock.patch.object(StageModule, "to", _move_buffers),
        ):
            (stage,) = load_chunks(Path(folder), "token", section, 1.0, mesh, CUDA)
    return stage


def _move_buffers(stage: StageModule, device: torch.device) -> StageModule:
    """Move only the buffers, because the weights are on the device already and torch cannot swap fake tensors."""
    for module in stage.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return stage


def _fake_tensors(_: Path, shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Tensor]]:
    """Yield fake tensors in place of the tensors of a checkpoint."""
    yield from ((name, torch.empty(tuple(shape), dtype=torch.bfloat16)) for name, shape in shapes.items())


# --- fused kernels ---------------------------------------------------------------------------------


LIBRARY = "liger_kernel"
_NAMES = (LIBRARY, f"{LIBRARY}.transformers", f"{LIBRARY}.transformers.functional")
_MULTIPROCESSORS = 132
"""Multiprocessors of an H100. Each multiprocessor writes one row of partial sums for the weight gradient of a norm."""

_norm = _operation(
    "fused_norm",
    "(Tensor states, Tensor weight) -> (Tensor, Tensor)",
    lambda states, weight: (torch.empty_like(states), states.new_empty(states.shape[:-1], dtype=torch.float32)),
)
_norm_backward = _operation(
    "fused_norm_backward",
    "(Tensor gradient, Tensor states, Tensor weight, Tensor scale) -> (Tensor, Tensor)",
    lambda gradient, states, weight, scale: (
        torch.empty_like(gradient),
        weight.new_empty((_MULTIPROCESSORS, *weight.shape), dtype=torch.float32),
    ),
)
_gate = _operation("fused_gate", "(Tensor gate, Tensor up) -> Tensor", lambda gate, up: torch.empty_like(up))
_gate_backward = _operation(
    "fused_gate_backward",
    "(Tensor gradient, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    lambda gradient, gate, up: (torch.empty_like(gate), torch.empty_like(up)),
)
_turn = _operation(
    "fused_rotation",
    "(Tensor query, Tensor key, Tensor cosines, Tensor sines) -> (Tensor, Tensor)",
    lambda query, key, cosines, sines: (torch.empty_like(query), torch.empty_like(key)),
)
_add_norm = _operation(
    "fused_add_norm",
    "(Tensor states, Tensor added, Tensor weight) -> (Tensor, Tensor, Tensor)",
    lambda states, added, weight: (torch.empty_like(states), *_normed(states, weight)),
)
_pass_norm = _operation(
    "fused_pass_norm", "(Tensor states, Tensor weight) -> (Tensor, Tensor)", lambda *of: _normed(*of)
)
_add_norm_backward = _operation(
    "fused_add_norm_backward",
    "(Tensor of_summed, Tensor of_normed, Tensor summed, Tensor weight, Tensor scale) -> (Tensor, Tensor, Tensor)",
    lambda of_summed, of_normed, summed, weight, scale: (
        torch.empty_like(summed),
        torch.empty_like(of_normed),
        weight.new_empty((4 * _MULTIPROCESSORS, *weight.shape), dtype=torch.float32),
    ),
)
_pass_norm_backward = _operation(
    "fused_pass_norm_backward",
    "(Tensor of_summed, Tensor of_normed, Tensor summed, Tensor weight, Tensor scale) -> (Tensor, Tensor)",
    lambda of_summed, of_normed, summed, weight, scale: (
        torch.empty_like(summed),
        weight.new_empty((4 * _MULTIPROCESSORS, *weight.shape), dtype=torch.float32),
    ),
)


def _normed(states: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(states, dtype=weight.dtype), states.new_empty(states.shape[:-1], dtype=torch.float32)


# a second pass over the logits computes the probabilities
_softmax = _operation(
    "fused_softmax", "(Tensor logits) -> Tensor", lambda logits: logits.new_empty(len(logits), dtype=torch.float32)
)
_softmax_again = _operation(
    "fused_softmax_again",
    "(Tensor logits) -> Tensor",
    lambda logits: torch.empty_like(logits, dtype=torch.bfloat16),
)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401 -- torch API
        out, scale = _norm(states, weight)
        ctx.save_for_backward(states, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401 -- torch API
        states, weight, scale = ctx.saved_tensors
        torch.zeros_like(gradient)  # the kernel clears its output first
        of_states, rows = _norm_backward(gradient, states, weight, scale)
        return of_states, rows.sum(0).to(weight.dtype)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:  # noqa: ANN401 -- torch API
        ctx.save_for_backward(gate, up)
        return _gate(gate, up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401 -- torch API
        found: tuple[Tensor, Tensor] = _gate_backward(gradient, *ctx.saved_tensors)
        return found


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        ctx.save_for_backward(cosines, sines)
        return _rotated(query, key, cosines, sines)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 -- torch API
        return *_rotated(*gradients, *ctx.saved_tensors), None, None


def _rotated(query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate query and key of shape [1, H, T, D], which the kernel requires to be contiguous as [1, T, H, D]."""
    query, key = (each.transpose(1, 2).contiguous() for each in (query, key))
    query, key = _turn(query, key, cosines.contiguous(), sines.contiguous())
    return query.transpose(1, 2), key.transpose(1, 2)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, added: Tensor | None, weight: Tensor, _: float) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        ctx.adds = added is not None
        if added is None:
            normed, scale = _pass_norm(states, weight)
            summed = states
        else:
            summed, normed, scale = _add_norm(states, added, weight)
        ctx.save_for_backward(summed, weight, scale)
        return (summed if ctx.adds else states.view_as(states)), normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 -- torch API
        if ctx.adds:
            of_states, of_added, rows = _add_norm_backward(*gradients, *ctx.saved_tensors)
            return of_states, of_added, rows.sum(0), None
        of_states, rows = _pass_norm_backward(*gradients, *ctx.saved_tensors)
        return of_states, None, rows.sum(0), None


def _logprobs(logits: Tensor, tokens: Tensor, out: Tensor | None) -> Tensor:
    if out is not None:
        _softmax_again(logits)
    found: Tensor = _softmax(logits)
    return found


@contextmanager
def pretended_kernels() -> Iterator[None]:
    """Replace liger-kernel and the kernels of the learner by fake operations in this context."""
    functional: Any = ModuleType(_NAMES[-1])
    functional.liger_rms_norm = lambda states, weight, *_, **__: _Norm.apply(states, weight)
    functional.liger_swiglu = functional.liger_geglu = _Gate.apply
    functional.liger_rope = lambda query, key, cosines, sines, *_, **__: _Rotation.apply(query, key, cosines, sines)
    kernels: Any = ModuleType("leeway.learner.row_kernels")
    kernels.add_norm, kernels.softmax = _AddNorm.apply, _logprobs
    modules = {kernels.__name__: kernels} | {name: ModuleType(name) for name in _NAMES[:-1]} | {_NAMES[-1]: functional}
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch("leeway.learner.kernels._first_wrong", return_value=None),
        # the learner replaces this function permanently: restore the original on exit
        mock.patch.object(modeling_qwen2, "apply_rotary_pos_emb", modeling_qwen2.apply_rotary_pos_emb),
    ):
        yield
