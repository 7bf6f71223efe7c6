"""Check `leeway.learner.row_kernels` in Triton's interpreter, which must be selected before Triton is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import itertools

import torch

from leeway.learner import kernels, row_kernels
from tests.world import fused_kernels

EPS = 1e-6
BF16 = torch.bfloat16
ROUNDED = 1e-5
"""Relative tolerance of a probability: its exponent of about 40 is rounded by at least 1e-6."""


def check_softmax() -> None:
    """Check a vocabulary of several blocks that is not a multiple of the block size."""
    logits, tokens = torch.randn(5, 9001) * 5, torch.tensor([0, 4095, 4096, 9000, 7])
    expected, others = logits.log_softmax(1), logits.softmax(1).scatter(1, tokens[:, None], 0)
    for dtype, within in ((torch.float32, ROUNDED), (BF16, 1e-2)):
        out = torch.empty_like(logits, dtype=dtype)
        found = row_kernels.softmax(logits, tokens, out)
        torch.testing.assert_close(found, expected.gather(1, tokens[:, None])[:, 0], rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(out.float(), others, rtol=within, atol=1e-7)
    in_place = logits.clone()
    assert torch.equal(row_kernels.softmax(in_place, tokens, in_place), row_kernels.softmax(logits, tokens, None))
    torch.testing.assert_close(in_place, others, rtol=ROUNDED, atol=1e-7)
    assert row_kernels.softmax(logits[:0], tokens[:0], None).shape == (0,)


def check_add_norm(dtype: torch.dtype, adds: bool, num_tokens: int) -> None:
    """Check outputs and gradients for a width that is not a power of two and rows that do not divide evenly."""
    states, added = (torch.randn(1, num_tokens, 48).to(kind).requires_grad_() for kind in (dtype, BF16))
    weight = torch.nn.Parameter((1 + 0.1 * torch.randn(48)).to(BF16))
    weight.grad_dtype = torch.float32
    summed, normed = row_kernels.add_norm(states, added if adds else None, weight, EPS)
    assert (summed.dtype, normed.dtype) == (dtype, BF16)
    factors = torch.randn(summed.shape).to(dtype), torch.randn(summed.shape).to(BF16)
    torch.autograd.backward((summed, normed), factors)
    exact = [each.detach().double().requires_grad_() for each in (states, added, weight)]
    whole = exact[0] + exact[1] if adds else exact[0] * 1
    scaled = whole * torch.rsqrt(whole.square().mean(-1, keepdim=True) + EPS) * exact[2]
    torch.autograd.backward((whole, scaled), [each.double() for each in factors])
    pairs = [(summed, whole), (normed, scaled), (states.grad, exact[0].grad), (weight.grad, exact[2].grad)]
    if adds:
        pairs.append((added.grad, exact[1].grad))
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    for found, expected in pairs:
        assert found is not None
        assert expected is not None
        within = 1e-6 if found.dtype == torch.float32 == dtype else 1e-2
        assert float((found.double() - expected).norm()) <= within * float(expected.norm()), (dtype, adds, found.dtype)


def check_gradients_apart() -> None:
    """Check that separate gradients of inputs and weights, as in zero-bubble schedules, equal those of one pass."""
    leaves = [torch.randn(3, 48).requires_grad_(), torch.randn(48).requires_grad_()]
    found = torch.cat(row_kernels.add_norm(leaves[0] * 1, leaves[0].sin(), leaves[1], EPS)).cos().sum()
    at_once = torch.autograd.grad(found, leaves, retain_graph=True)
    apart = [torch.autograd.grad(found, leaf, retain_graph=True)[0] for leaf in leaves]
    assert all(map(torch.equal, at_once, apart))


def check_self_test() -> None:
    """Check that the self-test of a stage accepts the kernels in every dtype."""
    wrong = kernels._first_wrong(fused_kernels.as_module(), row_kernels, torch.device("cpu"))
    assert wrong is None, wrong


def main() -> None:
    """Run all checks."""
    torch.manual_seed(0)
    check_softmax()
    check_gradients_apart()
    check_self_test()
    for case in itertools.product((torch.float32, BF16), (True, False), (1, 19)):
        check_add_norm(*case)
    print("right")


if __name__ == "__main__":
    main()
