"""Fakes of liger-kernel and of the learner's own kernels: the same functions in torch, with the same in-place
writes to their arguments.

The module fakes liger_kernel.transformers.functional 0.8, which needs a GPU: its formulas, float32 computations, output
dtypes and overwritten tensors. A rotary embedding overwrites its queries, its keys and their gradients. In the backward
pass, a gate overwrites its inputs, and a norm with `in_place` overwrites the incoming gradient. The fakes are slow and
need much memory. The fakes of `leeway.learner.row_kernels` need no Triton.
"""

from types import ModuleType

import torch
from torch.nn import functional as F


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, weight, eps, offset, casting_mode, in_place):
        wide = states.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        normed = wide * scale
        ctx.save_for_backward(states, weight, scale)
        ctx.rule = offset, in_place
        factor = offset + (weight.float() if casting_mode == "gemma" else weight)
        return ((normed if casting_mode == "gemma" else normed.to(states.dtype)) * factor).to(states.dtype)

    @staticmethod
    def backward(ctx, gradient):
        states, weight, scale = ctx.saved_tensors
        offset, in_place = ctx.rule
        normed = states.float() * scale
        of_weight = (gradient.float() * normed).flatten(0, -2).sum(0)
        pulled = gradient.float() * (offset + weight.float())
        of_states = scale * (pulled - normed * (pulled * normed).mean(-1, keepdim=True))
        target = gradient if in_place else torch.empty_like(gradient)
        return target.copy_(of_states), of_weight.to(weight.dtype), None, None, None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, activation):
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return activation(gate.float()).to(up.dtype) * up

    @staticmethod
    def backward(ctx, gradient):
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            wide = gate.detach().float().clone().requires_grad_()
            active = ctx.activation(wide)
            (slope,) = torch.autograd.grad(active.sum(), wide)
        of_up = gradient * active.detach()
        gate.data.copy_(gradient * slope * up)
        up.data.copy_(of_up)
        return gate, up, None


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, cosines, sines):
        ctx.save_for_backward(cosines, sines)
        return _turn(query, cosines, sines), _turn(key, cosines, sines)

    @staticmethod
    def backward(ctx, *gradients):
        cosines, sines = ctx.saved_tensors
        return *(_turn(each, cosines, -sines) for each in gradients), None, None


def _turn(states, cosines, sines):
    """Rotate in place if the memory of [1, H, T, D] is laid out as [1, T, H, D]."""
    memory = states.transpose(1, 2).contiguous()
    cosines, sines = (each[:, :, None, : memory.shape[-1] // 2] for each in (cosines, sines))
    left, right = (each.to(sines.dtype) for each in memory.chunk(2, -1))
    memory.copy_(torch.cat([left * cosines - right * sines, right * cosines + left * sines], -1))
    return memory.transpose(1, 2)


def liger_rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    return _Norm.apply(X, W, eps, offset, casting_mode, in_place)


def liger_swiglu(a, b):
    return _Gate.apply(a, b, F.silu)


def liger_geglu(a, b):
    return _Gate.apply(a, b, lambda wide: F.gelu(wide, approximate="tanh"))


def liger_rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    return _Rotation.apply(q, k, cos, sin)


def add_norm(states, added, weight, eps):
    summed = states.view_as(states) if added is None else states + added
    wide = summed.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(states.dtype)
    return summed, (normed * weight).to(weight.dtype)


@torch.no_grad()
def softmax(logits, tokens, out):
    assert logits.dtype == torch.float32
    logprobs = logits.log_softmax(1)
    if out is not None:
        out.copy_(logprobs.exp().scatter(1, tokens[:, None], 0))
    return logprobs.gather(1, tokens[:, None])[:, 0]


def as_module() -> ModuleType:
    """Return a module like `liger_kernel.transformers.functional`."""
    module = ModuleType("liger_kernel.transformers.functional")
    for function in (liger_rms_norm, liger_swiglu, liger_geglu, liger_rope):
        setattr(module, function.__name__, function)
    return module


def ours() -> ModuleType:
    """Return a module like `leeway.learner.row_kernels`."""
    module = ModuleType("leeway.learner.row_kernels")
    for function in (add_norm, softmax):
        setattr(module, function.__name__, function)
    return module
