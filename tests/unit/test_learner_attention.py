"""Which attention kernels are asked for grouped heads."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from learner import attention
from learner.attention import AttentionLayout, packed_attention


@pytest.mark.parametrize(
    ("device", "dtype", "takes"),
    [
        ("cpu", torch.float32, True),
        ("cpu", torch.float64, True),
        ("cuda", torch.bfloat16, True),
        ("cuda", torch.float32, False),
        ("cuda", torch.float64, False),
    ],
)
def test_grouped_heads_are_left_to_kernels_that_keep_no_scores(device, dtype, takes):
    query = SimpleNamespace(device=torch.device(device), dtype=dtype)
    assert attention._takes_grouped_heads(query) == takes


def test_repeated_heads_give_what_grouped_ones_do(monkeypatch):
    heads, sdpa = [], F.scaled_dot_product_attention

    def counting(query, key, value, *args, **kwargs):
        heads.append((query.shape[1], key.shape[1], value.shape[1], kwargs["enable_gqa"]))
        return sdpa(query, key, value, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counting)
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, num, 40, 8, generator=random, dtype=torch.float64) for num in (6, 2, 2))
    layout = AttentionLayout.build(np.array([0, 17, 22, 40]), torch.device("cpu"))
    grouped, _ = packed_attention(torch.nn.Identity(), query, key, value, None, layout=layout)
    assert set(heads) == {(6, 2, 2, True)}
    heads.clear()
    monkeypatch.setattr(attention, "_takes_grouped_heads", lambda query: False)
    repeated, _ = packed_attention(torch.nn.Identity(), query, key, value, None, layout=layout)
    assert set(heads) == {(6, 6, 6, False)}
    torch.testing.assert_close(repeated, grouped, rtol=0, atol=1e-12)


def test_attention_never_waits_for_plans_of_cudnn():
    assert not torch.backends.cuda.cudnn_sdp_enabled()
