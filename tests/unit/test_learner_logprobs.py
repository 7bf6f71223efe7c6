"""Token log-probabilities and attention of a stage, compared with their plain formulas."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from leeway.learner import products
from leeway.learner.attention import AttentionLayout, packed_attention
from leeway.learner.products import KEPT_MIB, LOGITS_MIB, LogitRule, token_logprobs
from tests.unit.small_models import CPU, TEMPERATURE, assert_close

chunk = products._chunk

# --- log-probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
@pytest.mark.parametrize("kept_tokens", [0, 7, 100])
def test_log_probabilities_and_gradients_are_exact_for_any_chunk_and_kept_size(softcap, chunk_tokens, kept_tokens):
    torch.manual_seed(0)
    vocabulary, hidden_size, num_tokens = 19, 6, 11
    hidden = torch.randn(num_tokens, hidden_size, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, vocabulary, (num_tokens,))
    row_mib = vocabulary * 8 / 2**20
    rule = LogitRule(TEMPERATURE, softcap, chunk_tokens * row_mib, kept_tokens * row_mib)
    assert rule.chunk_tokens(vocabulary, torch.float64, "cpu") == chunk_tokens
    assert rule.kept_tokens(vocabulary, torch.float64, "cpu") == kept_tokens

    def ours(hidden, weight):
        return token_logprobs(hidden, weight, tokens, rule)

    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = (logits / TEMPERATURE).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert_close(ours(hidden, weight), expected)
    coefficients = torch.randn(num_tokens, dtype=torch.float64)
    found_gradients = torch.autograd.grad((ours(hidden, weight) * coefficients).sum(), (hidden, weight))
    for found, reference in zip(
        found_gradients, torch.autograd.grad((expected * coefficients).sum(), (hidden, weight)), strict=True
    ):
        assert_close(found, reference)
    assert torch.autograd.gradcheck(ours, (hidden, weight))


def test_autocast_affects_only_products_and_an_empty_batch_is_valid():
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    tokens = torch.randint(0, 300, (40,))
    exact = token_logprobs(hidden, weight, tokens, LogitRule(1.0))
    exact_gradients = torch.autograd.grad(exact.sum(), (hidden, weight))
    for chunk_mib in (64.0, 0.01):
        rule = LogitRule(1.0, chunk_mib=chunk_mib)
        with torch.autocast("cpu", torch.bfloat16):
            rough = token_logprobs(hidden, weight, tokens, rule)
            assert token_logprobs(hidden[:0], weight, tokens[:0], rule).shape == (0,)
        assert rough.dtype == torch.float32
        assert 1e-4 < float((rough - exact).detach().abs().max()) < 0.1, "logits are rounded to bfloat16, sums are not"
        for gradient, exact_gradient in zip(
            torch.autograd.grad(rough.sum(), (hidden, weight)), exact_gradients, strict=True
        ):
            assert gradient.dtype == torch.float32
            assert 1e-5 < float((gradient - exact_gradient).norm() / exact_gradient.norm()) < 0.02


def test_at_most_one_chunk_of_logits_exists_at_a_time():
    """With logits of 2000 tokens, no tensor created is larger than a chunk or the head."""

    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, torch.Tensor):
                    self.largest = max(self.largest, tensor.untyped_storage().nbytes())
            return result

    hidden, weight = torch.randn(2000, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    with Sizes() as sizes:
        rule = LogitRule(1.0, None, chunk_mib=0.1, kept_mib=1.0)
        token_logprobs(hidden, weight, torch.zeros(2000, dtype=torch.int64), rule).sum().backward()
    assert sizes.largest <= 0.1 * 2**20


def test_gradients_of_states_and_of_the_head_are_computed_separately_and_once(monkeypatch):
    """A zero-bubble schedule computes the gradients in two passes; the second reuses values that the first kept."""
    computed = []
    monkeypatch.setattr(products, "_chunk", lambda *args: computed.append(1) or chunk(*args))
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    for num_kept in (0, 4, 6):
        computed.clear()
        rule = LogitRule(1.0, None, chunk_mib=1e-9, kept_mib=num_kept * 9 * 4 / 2**20)
        found = token_logprobs(hidden, weight, torch.zeros(6, dtype=torch.int64), rule)
        torch.autograd.grad(found.sum(), hidden, retain_graph=True)
        assert len(computed) == 6
        torch.autograd.grad(found.sum(), weight)
        assert len(computed) == 6 + 6 - num_kept


def test_the_number_of_kept_probabilities_respects_its_limit():
    hidden, weight = torch.randn(600, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    rule = LogitRule(1.0, None, chunk_mib=100 * 1000 * 4 / 2**20, kept_mib=350 * 1000 * 4 / 2**20)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        token_logprobs(hidden, weight, torch.zeros(600, dtype=torch.int64), rule)
    assert [each.shape for each in kept if each.ndim == 2 and each.shape[1] == 1000] == [(100, 1000)] * 3


# --- products of 16-bit numbers -------------------------------------------------------------------


def peaked(num_tokens=64, width=128, vocabulary=2000):
    """Return states and a head that are exact in 16 bits, and sampled tokens, from uncertain to almost certain."""
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, width) * torch.linspace(1, 14, num_tokens)[:, None]
    hidden, weight = (each.bfloat16().float() for each in (hidden, torch.randn(vocabulary, width) * width**-0.5))
    return hidden, weight, torch.multinomial((hidden @ weight.T).softmax(-1), 1)[:, 0]


def log_probabilities_and_gradients(hidden, weight, tokens, rule, autocast=True):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = token_logprobs(hidden, weight, tokens, rule)
    coefficients = torch.randn(len(tokens), generator=torch.Generator().manual_seed(1))
    (found * coefficients).sum().backward()
    return found.detach(), hidden.grad, weight.grad


@pytest.fixture
def sums_in_float32(monkeypatch):
    """Make the CPU compute like CUDA: multiply 16-bit numbers, and accumulate and store in float32."""
    mm, addmm = torch.mm, torch.addmm
    called = []

    def wide(*matrices):
        assert {each.dtype for each in matrices} == {torch.bfloat16}
        return [each.float() for each in matrices]

    def mm_as_on_cuda(left, right, *, out_dtype):
        called.append("mm")
        assert out_dtype == torch.float32
        return mm(*wide(left, right))

    def addmm_as_on_cuda(total, left, right, *, out_dtype, alpha, out):
        called.append("addmm")
        assert out_dtype == total.dtype == torch.float32
        assert out is total
        return addmm(total, *wide(left, right), alpha=alpha, out=out)

    monkeypatch.setattr(torch, "mm", mm_as_on_cuda)
    monkeypatch.setattr(torch, "addmm", addmm_as_on_cuda)
    monkeypatch.setattr(products, "sums_in_float32", lambda factor: factor.dtype == torch.bfloat16)
    return called


@pytest.mark.parametrize("softcap", [None, 60.0])
@pytest.mark.parametrize("chunk_mib", [None, 0.1])
def test_float32_sums_make_log_probabilities_exact_and_gradients_nearly_so(softcap, chunk_mib, sums_in_float32):
    """Float32 sums reduce the measured errors from 0.03 to 1e-6 nats, and gradient errors from 5 % to 0.1 %."""
    hidden, weight, tokens = peaked()
    rule = LogitRule(1.0, softcap, chunk_mib)
    exact = log_probabilities_and_gradients(hidden.double(), weight.double(), tokens, rule, autocast=False)
    found = log_probabilities_and_gradients(hidden, weight, tokens, rule)
    assert set(sums_in_float32) == {"mm", "addmm"}
    assert [each.dtype for each in found] == [torch.float32] * 3
    assert float((found[0] - exact[0]).abs().max()) < 2e-5
    for gradient, reference in zip(found[1:], exact[1:], strict=True):
        assert float((gradient - reference).norm() / reference.norm()) < 0.003
    certain = exact[0] > -0.02
    assert 5 < int(certain.sum()) < len(tokens) / 2
    left = (found[1] - exact[1])[certain].norm() / exact[1][certain].norm()
    assert float(left) < 0.005, "16 bits would round 1 - p to 0"


def test_only_cuda_has_16_bit_products_with_float32_sums():
    hidden, weight, tokens = peaked()
    rule = LogitRule(1.0)
    exact, *_ = log_probabilities_and_gradients(hidden.double(), weight.double(), tokens, rule, autocast=False)
    found, *_ = log_probabilities_and_gradients(hidden, weight, tokens, rule)
    assert 0.005 < float((found - exact).abs().mean()) < 0.05, "update docs/learner.md if the error changes"
    for device, dtype, wide in (("cuda", torch.bfloat16, True), ("cuda", torch.float32, False)):
        assert products.sums_in_float32(SimpleNamespace(device=torch.device(device), dtype=dtype)) == wide


def test_a_16_bit_head_is_not_copied_and_its_gradient_is_float32(sums_in_float32):
    hidden, weight, tokens = peaked()
    head = torch.nn.Parameter(weight.bfloat16())
    head.grad_dtype = torch.float32
    rule = LogitRule(1.0, None, 0.05)
    *_, reference = log_probabilities_and_gradients(hidden, weight, tokens, rule)
    coefficients = torch.randn(len(tokens), generator=torch.Generator().manual_seed(1))

    class Copies(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.shape == head.shape and result.dtype == torch.bfloat16:
                self.found += result.untyped_storage().data_ptr() != head.untyped_storage().data_ptr()
            return result

    with Copies() as copies:
        (token_logprobs(hidden, head, tokens, rule) * coefficients).sum().backward()
    assert head.grad.dtype == torch.float32
    assert float((head.grad - reference).norm() / reference.norm()) < 1e-6
    assert not copies.found


def test_scatter_runs_in_float32_because_a_cpu_would_cast_the_whole_16_bit_tensor():
    hidden, weight, tokens = peaked()
    scattered = set()

    class Scatters(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function._schema.name.startswith("aten::scatter"):
                scattered.add(args[0].dtype)
            return function(*args, **(kwargs or {}))

    head = weight.bfloat16().requires_grad_()
    for chunk_mib in (64.0, 0.01):
        with Scatters():
            token_logprobs(hidden, head, tokens, LogitRule(1.0, chunk_mib=chunk_mib)).sum().backward()
    assert scattered == {torch.float32}


def test_a_gpu_uses_larger_logit_chunks_and_keeps_more_for_the_backward_pass():
    rule, words = LogitRule(1.0), 151_936
    assert rule.chunk_tokens(words, torch.bfloat16, "cuda") == 1766 == int(LOGITS_MIB["cuda"] * 2**20) // (words * 4)
    assert rule.chunk_tokens(words, torch.bfloat16, "cpu") == 110
    assert rule.kept_tokens(words, torch.bfloat16, "cuda") == 7067 == int(KEPT_MIB["cuda"] * 2**20) // (words * 2)
    assert rule.kept_tokens(words, torch.float32, "cpu") == 331


def test_logits_normalized_in_blocks_equal_those_normalized_at_once(monkeypatch):
    logits = torch.randn(7, 33) * 30
    for rows in (1, 3, 100):
        monkeypatch.setattr(products, "CACHED_BYTES", rows * logits[0].nbytes)
        found = logits.clone()
        torch.testing.assert_close(products._normalize(found), logits.logsumexp(1))
        torch.testing.assert_close(found, logits.softmax(1))


# --- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 6, 33, 100])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_packed_attention_and_its_gradient_equal_attention_per_sequence(window, softcap):
    torch.manual_seed(0)
    lengths, heads, kv_heads, size = [5, 33, 16, 17, 1, 40], 4, 2, 8
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    states = [torch.randn(1, n, bounds[-1], size, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]
    packed_states = [state.clone().requires_grad_() for state in states]
    plain_states = [state.clone().requires_grad_() for state in states]
    layout = AttentionLayout.build(bounds, CPU)
    out, _ = packed_attention(
        torch.nn.Module(), *packed_states, None, layout=layout, scaling=0.3, sliding_window=window, softcap=softcap
    )
    pieces = []
    for start, end in itertools.pairwise(bounds):
        query, key, value = (state[:, :, start:end] for state in plain_states)
        key, value = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (key, value))
        scores = query @ key.transpose(2, 3) * 0.3
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        behind = torch.arange(end - start)[:, None] - torch.arange(end - start)
        hidden = (behind < 0) | (behind >= (window or 1000))
        pieces.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value)
    expected = torch.cat(pieces, dim=2).transpose(1, 2)
    assert_close(out, expected)
    weight = torch.randn_like(expected)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for ours, theirs in zip(packed_states, plain_states, strict=True):
        assert_close(ours.grad, theirs.grad)


def test_attention_rejects_dropout():
    layout = AttentionLayout.build(np.array([0, 20]), CPU)
    with pytest.raises(ValueError, match=r"dropout 0\.1"):
        packed_attention(torch.nn.Module(), *[torch.zeros(1, 1, 20, 4)] * 3, None, layout=layout, dropout=0.1)
