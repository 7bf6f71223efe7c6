"""Log-probabilities of tokens, and attention: exact pieces of a stage, against their plain formulas."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from learner import logprobs as logprobs_file
from learner.attention import AttentionLayout, packed_attention
from learner.logprobs import LogitRule, token_logprobs
from tests.unit.small_models import CPU, TEMPERATURE, assert_close

shares_again = logprobs_file._shares_again

# --- log-probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
def test_log_probabilities_and_their_gradients_are_exact_with_any_chunk(softcap, chunk_tokens):
    torch.manual_seed(0)
    vocabulary, hidden_size, num_tokens = 19, 6, 11
    hidden = torch.randn(num_tokens, hidden_size, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, vocabulary, (num_tokens,))
    rule = LogitRule(TEMPERATURE, softcap, chunk_tokens * vocabulary * 8 / 2**20)
    assert rule.chunk_tokens(vocabulary, torch.float64) == chunk_tokens

    def ours(hidden, weight):
        return token_logprobs(hidden, weight, tokens, rule)

    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = (logits / TEMPERATURE).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert_close(ours(hidden, weight), expected)
    coefficients = torch.randn(num_tokens, dtype=torch.float64)
    found_gradients = torch.autograd.grad((ours(hidden, weight) * coefficients).sum(), (hidden, weight))
    for found, wanted in zip(
        found_gradients, torch.autograd.grad((expected * coefficients).sum(), (hidden, weight)), strict=True
    ):
        assert_close(found, wanted)
    assert torch.autograd.gradcheck(ours, (hidden, weight))


def test_log_probabilities_follow_autocast_in_products_alone_and_no_tokens_are_no_error():
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
        assert 1e-4 < float((rough - exact).detach().abs().max()) < 0.1, (
            "logits were rounded to bfloat16, sums were not"
        )
        for gradient, exact_gradient in zip(
            torch.autograd.grad(rough.sum(), (hidden, weight)), exact_gradients, strict=True
        ):
            assert gradient.dtype == torch.float32
            assert 1e-5 < float((gradient - exact_gradient).norm() / exact_gradient.norm()) < 0.02


def test_no_more_logits_than_a_chunk_ever_exist():
    """Every tensor that is made is looked at: with logits of 2000 tokens, none is larger than a chunk or the head."""

    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            for tensor in made if isinstance(made, (tuple, list)) else (made,):
                if isinstance(tensor, torch.Tensor):
                    self.largest = max(self.largest, tensor.untyped_storage().nbytes())
            return made

    hidden, weight = torch.randn(2000, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    with Sizes() as sizes:
        token_logprobs(hidden, weight, torch.zeros(2000, dtype=torch.int64), LogitRule(1.0, None, 0.1)).sum().backward()
    assert sizes.largest <= 0.1 * 2**20


def test_gradients_of_states_and_of_the_head_are_computed_apart_and_each_once(monkeypatch):
    """A zero-bubble schedule asks for them one after the other."""
    again = []
    monkeypatch.setattr(logprobs_file, "_shares_again", lambda *args: again.append(1) or shares_again(*args))
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    found = token_logprobs(hidden, weight, torch.zeros(6, dtype=torch.int64), LogitRule(1.0, None, 1e-9))
    torch.autograd.grad(found.sum(), hidden, retain_graph=True)
    assert not again
    torch.autograd.grad(found.sum(), weight)
    assert len(again) == 6


# --- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 6, 33, 100])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_packed_attention_equals_attention_within_each_sequence_and_so_does_its_gradient(window, softcap):
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


def test_attention_refuses_dropout():
    layout = AttentionLayout.build(np.array([0, 20]), CPU)
    with pytest.raises(ValueError, match=r"dropout 0\.1"):
        packed_attention(torch.nn.Module(), *[torch.zeros(1, 1, 20, 4)] * 3, None, layout=layout, dropout=0.1)
