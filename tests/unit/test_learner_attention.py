"""Attention kernels: the calls, their arguments, and the tensors stored for the backward pass."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from leeway.learner import attention
from leeway.learner.attention import AttentionLayout, packed_attention
from tests.unit.small_models import LOCAL, Model, assert_close, load, packed_batch, run

BOUNDS = np.array([0, 17, 22, 40])


def states(*heads, length=40):
    random = torch.Generator().manual_seed(0)
    return [torch.randn(1, num, length, 8, generator=random, dtype=torch.float64).requires_grad_() for num in heads]


def attend(query, key, value, bounds=BOUNDS, places=None, **options):
    layout = AttentionLayout.build(bounds, query.device, places)
    return packed_attention(torch.nn.Identity(), query, key, value, None, layout=layout, **options)[0]


def with_gradients(inputs, **options):
    out = attend(*inputs, **options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


class Operators(TorchDispatchMode):
    """Counter of operators by name, which also records the bytes of the largest tensor created."""

    def __init__(self):
        super().__init__()
        self.count = {}
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.name()
        self.count[name] = self.count.get(name, 0) + 1
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


# --- grouped heads and dtypes ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "dtype", "supported"),
    [
        ("cpu", torch.float32, True),
        ("cpu", torch.float64, True),
        ("cuda", torch.bfloat16, True),
        ("cuda", torch.float32, False),
        ("cuda", torch.float64, False),
    ],
)
def test_grouped_heads_run_only_on_kernels_that_store_no_scores(device, dtype, supported):
    query = SimpleNamespace(device=torch.device(device), dtype=dtype)
    assert attention._supports_grouped_heads(query, is_plain=True) == supported
    assert attention._supports_grouped_heads(query, is_plain=False) == (device == "cpu")


def test_repeated_and_grouped_heads_give_equal_outputs(monkeypatch):
    heads, sdpa = [], F.scaled_dot_product_attention

    def counting(query, key, value, *args, **kwargs):
        heads.append((query.shape[1], key.shape[1], value.shape[1], kwargs["enable_gqa"]))
        return sdpa(query, key, value, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counting)
    inputs = states(6, 2, 2)
    grouped = attend(*inputs)
    assert set(heads) == {(6, 2, 2, True)}
    heads.clear()
    monkeypatch.setattr(attention, "_supports_grouped_heads", lambda *_: False)
    repeated = attend(*inputs)
    assert set(heads) == {(6, 6, 6, False)}
    assert_close(repeated, grouped)


@pytest.mark.parametrize("model", [Model("qwen2", tied=True), Model("gemma3_text", tied=True, changes=LOCAL)])
def test_attention_inputs_have_16_bits_under_autocast(model, monkeypatch, tmp_path):
    """Rotary embeddings run in float32, so attention receives float32 queries and keys."""
    seen, gathered = set(), set()
    sdpa, to_grid = F.scaled_dot_product_attention, attention._to_grid

    def recording(query, key, value, *args, **kwargs):
        seen.add((query.dtype, key.dtype, value.dtype))
        return sdpa(query, key, value, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recording)
    monkeypatch.setattr(attention, "_to_grid", lambda each, cells: gathered.add(each.dtype) or to_grid(each, cells))
    stage = load(model.save(tmp_path), dtype=torch.float32)
    stage.compute_in_bfloat16()
    run([stage], packed_batch())
    assert seen == {(torch.bfloat16,) * 3}
    assert gathered == {torch.bfloat16}, "tensors are cast before they are gathered"


def test_cudnn_attention_is_disabled():
    assert not torch.backends.cuda.cudnn_sdp_enabled()


# --- shared prompts -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("prompt", [5, 17])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 4}, {"softcap": 2.0}, {"softcap": 2.0, "sliding_window": 6}]
)
def test_a_shared_prompt_equals_a_separate_copy_for_each_sequence(options, prompt, is_packed, monkeypatch):
    """Grids compute the queries of the shorter prompt for each sequence; a packed call computes them once."""
    own = [prompt + 4, 0, 13, 9, 20]  # unshared tokens per sequence; the first number includes the prompt
    ends = np.cumsum(own)
    places = [
        np.arange(ends[0]),
        *(np.r_[:prompt, end - num : end] for num, end in zip(own[1:], ends[1:], strict=True)),
    ]
    bounds, places = np.cumsum([0, *map(len, places)]), np.concatenate(places)
    inputs = states(6, 2, 2, length=ends[-1])
    weights = torch.randn(1, ends[-1], 6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    apart = attend(*(each.index_select(2, torch.from_numpy(places)) for each in inputs), bounds=bounds, **options)
    firsts = np.unique(places, return_index=True)[1]
    alone = [apart[:, firsts], *torch.autograd.grad((apart[:, firsts] * weights).sum(), inputs)]
    monkeypatch.setattr(attention, "SCORES_MIB", 1e-2)  # each block has a few queries
    if is_packed and "softcap" not in options:
        monkeypatch.setattr(attention, "_supports_varlen", lambda query: True)
        monkeypatch.setattr(attention, "varlen_attn", by_sequence)
    shared = attend(*inputs, bounds=bounds, places=places, **options)
    for found, expected in zip([shared, *torch.autograd.grad((shared * weights).sum(), inputs)], alone, strict=True):
        assert_close(found, expected)


def test_a_shared_prompt_is_queried_once_and_other_samples_query_their_completions():
    prompt, length, group = 40, 60, 8
    first = np.arange(length)
    others = [np.concatenate([first[:prompt], length + n * 20 + np.arange(20)]) for n in range(group - 1)]
    bounds = np.arange(group + 1) * length
    layout = AttentionLayout.build(bounds, torch.device("cpu"), np.concatenate([first, *others]))
    shapes = {(tuple(each.queries.shape), tuple(each.keys.shape)) for each in layout.grids.buckets}
    assert shapes == {((1, 60), (1, 60)), ((7, 20), (7, 60))}
    assert layout.edges.tolist() == [0, 60, *range(80, 201, 20)], "a packed kernel also queries the prompt once"


# --- packed, for flash attention ------------------------------------------------------------------


def by_sequence(query, key, value, edges, key_edges, longest, longest_key, *, scale, window_size, enable_gqa):
    """Compute `varlen_attn` as documented by torch, sequence by sequence, from plain formulas."""
    assert enable_gqa
    assert query.shape[1] == 3 * key.shape[1], "heads are not repeated"
    assert edges.dtype == key_edges.dtype == torch.int32
    assert (longest, longest_key) == (int(edges.diff().max()), int(key_edges.diff().max()))
    assert int(edges.diff().min()) > 0
    behind_most, after_most = window_size
    pieces = []
    spans = zip(itertools.pairwise(edges.tolist()), itertools.pairwise(key_edges.tolist()), strict=True)
    for (start, end), (key_start, key_end) in spans:
        one, keys, values = (
            each[slice(*span)].transpose(0, 1)
            for each, span in ((query, (start, end)), (key, (key_start, key_end)), (value, (key_start, key_end)))
        )
        keys, values = (each.repeat_interleave(len(one) // len(keys), 0) for each in (keys, values))
        # the last query and the last key are the same token, as in flash attention
        behind = torch.arange(key_end - key_start - (end - start), key_end - key_start)[:, None]
        behind = behind - torch.arange(key_end - key_start)
        is_seen = -behind <= after_most
        if behind_most >= 0:
            is_seen &= behind <= behind_most
        scores = one @ keys.transpose(1, 2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        pieces.append((scores.masked_fill(~is_seen, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(pieces)


@pytest.mark.parametrize("options", [{}, {"scaling": 0.3}, *({"sliding_window": each} for each in (1, 6, 17, 18, 100))])
def test_one_packed_call_and_the_grids_give_equal_outputs_and_gradients(options, monkeypatch):
    inputs = states(6, 2, 2)
    reference = with_gradients(inputs, **options)
    monkeypatch.setattr(attention, "_supports_varlen", lambda query: True)
    monkeypatch.setattr(attention, "varlen_attn", by_sequence)
    monkeypatch.setattr(attention, "_to_grid", None)
    for found, expected in zip(with_gradients(inputs, **options), reference, strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize(
    ("device", "dtype", "size", "supported"),
    [
        ("cuda", torch.bfloat16, 64, True),
        ("cuda", torch.float16, 256, True),
        ("cuda", torch.float32, 64, False),
        ("cuda", torch.float64, 64, False),
        ("cuda", torch.bfloat16, 12, False),
        ("cuda", torch.bfloat16, 320, False),
        ("cpu", torch.bfloat16, 64, False),
    ],
)
def test_sequences_stay_packed_if_flash_attention_supports_them(device, dtype, size, supported):
    query = SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(40, 6, size))
    assert attention._supports_varlen(query) == supported


@pytest.mark.parametrize("window", [None, 6])
def test_a_layer_calls_packed_attention_once_forward_and_once_backward(window, monkeypatch):
    """Run the installed torch on fake tensors, which have shapes but no data, and count its operators."""
    monkeypatch.setattr(attention, "_supports_varlen", lambda query: query.dtype == torch.bfloat16)
    rotated = {"dtype": torch.float32, "requires_grad": True}  # the dtype that rotary embeddings return
    with FakeTensorMode(), Operators() as operators:
        query, key = torch.empty(1, 6, 40, 64, **rotated), torch.empty(1, 2, 40, 64, **rotated)
        value = torch.empty(1, 2, 40, 64, dtype=torch.bfloat16, requires_grad=True)
        out = attend(query, key, value, sliding_window=window)
        out.sum().backward()
    assert (out.shape, out.dtype) == ((1, 40, 6, 64), torch.bfloat16)
    calls = {name: count for name, count in operators.count.items() if "att" in name}
    assert calls == {"torch_attn::_varlen_attn": 1, "torch_attn::_varlen_attn_backward": 1}
    assert not [name for name in operators.count if "index" in name or "repeat" in name], "nothing is gathered"


# --- soft-capped scores ---------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 6])
def test_blocked_soft_capped_scores_are_exact_and_only_one_block_is_allocated(window, monkeypatch):
    inputs, options = states(4, 2, 2, length=300), {"softcap": 0.5, "sliding_window": window}
    bounds = np.array([0, 300])
    with Operators() as full:
        reference = with_gradients(inputs, bounds=bounds, **options)
    all_scores = 4 * 300 * 300 * 8
    assert full.largest == all_scores
    monkeypatch.setattr(attention, "SCORES_MIB", all_scores / 20 / 2**20)
    kept = []
    with (
        Operators() as blocks,
        torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one),
    ):
        found = with_gradients(inputs, bounds=bounds, **options)
    assert blocks.largest <= all_scores / 20
    assert sum(each.nbytes for each in kept) < all_scores, "scores are not stored for the backward pass"
    for each, expected in zip(found, reference, strict=True):
        assert_close(each, expected)


def test_gradients_of_blocks_are_summed_in_float32(monkeypatch):
    """A 16-bit sum over many blocks would lose what a single block adds to the gradients of keys and values."""
    exact = [
        each.detach() for each in with_gradients(states(2, 2, 2, length=256), bounds=np.array([0, 256]), softcap=5.0)
    ]
    inputs = [each.detach().bfloat16().requires_grad_() for each in states(2, 2, 2, length=256)]

    def errors():
        found = with_gradients(inputs, bounds=np.array([0, 256]), softcap=5.0)
        return [
            float((each - one).detach().norm() / one.detach().norm()) for each, one in zip(found, exact, strict=True)
        ]

    full = errors()
    monkeypatch.setattr(attention, "SCORES_MIB", 2 * 256 * 4 / 2**20)  # one query per block
    blocks = errors()
    assert all(block < 1.25 * whole for block, whole in zip(blocks, full, strict=True)), (blocks, full)
