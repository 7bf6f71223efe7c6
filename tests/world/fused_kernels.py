"""A stand-in for liger-kernel: the same functions, and what they do to their arguments, in torch.

It fakes liger_kernel.transformers.functional as of 0.8, which needs a GPU: the formulas, what is computed in float32,
what dtype comes out, and what is written over. That is, for a rotation its queries and keys and their gradients, for a
gate its inputs in the backward pass, for a norm the incoming gradient where it may, and for a cross-entropy its logits
where their gradient is wanted. It is not fast and keeps much.
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
    """In place, as long as the memory of [1, H, T, D] is that of [1, T, H, D]."""
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


def liger_cross_entropy(input, target, reduction="mean"):
    assert reduction == "none"
    assert input.dtype == torch.float32
    logprobs = input.detach().log_softmax(1)
    if input.requires_grad:
        input.data.copy_(logprobs.exp())
        input.data[torch.arange(len(target)), target] -= 1
    return -logprobs.gather(1, target[:, None])[:, 0]


def as_module() -> ModuleType:
    """What `import liger_kernel.transformers.functional` would give."""
    module = ModuleType("liger_kernel.transformers.functional")
    for function in (liger_rms_norm, liger_swiglu, liger_geglu, liger_rope, liger_cross_entropy):
        setattr(module, function.__name__, function)
    return module
