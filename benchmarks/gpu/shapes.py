"""Shapes of models, random weights, samples of long-tailed lengths, and model FLOPs.

Model FLOPs exclude recomputation. There are 6 model FLOPs per token and weight of a layer's matrices, and 6 per
completion token and weight of the head. Causal attention over a sequence of n tokens takes 6 * width * n^2 per layer,
with width = heads * head_dim: 2 * 2 * n^2 / 2 * width forward for two products (queries with keys, weights with
values), and twice that backward.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from benchmarks.learner_parts.sides import long_tailed
from benchmarks.lib.learner import sample
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config, Qwen3Config

from leeway.buffer.schema import Trajectory

Shape = dict[str, int]
"""Keys of a Qwen2Config or Qwen3Config."""

SHAPES: dict[str, Shape] = {
    "0.5B": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151_936,
    },
    "0.6B": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
    },
    "1.5B": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151_936,
    },
    "7B": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18_944,
        "vocab_size": 152_064,
    },
    "small": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 2048,
        "vocab_size": 32_000,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 512,
    },
    "tiny 0.6B": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # minimum size for vLLM's attention on a CPU
        "intermediate_size": 128,
        "vocab_size": 512,
    },
}
"""Shapes of Qwen2.5 and Qwen3 (0.6B). "small" is fast to write to disk; the tiny shapes test the code on a CPU."""
QWEN3 = frozenset({"0.6B", "tiny 0.6B"})
TINY = {"0.6B": "tiny 0.6B"}
"""Shape -> its replacement on a CPU; all other shapes are replaced by "tiny"."""
UNTIED = frozenset({"7B"})
"""Shapes whose head is not tied to the embedding."""
PEAK_BF16_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Part of a device's name -> peak FLOP/s of dense bf16 products (SXM boards, from the vendor's data sheets)."""
MEDIAN, LONGEST = 512, 4096
"""Median and maximum tokens of a sequence."""
PROMPT_SHARE = 0.2
GROUP = 8
EOS = 0
"""Token that ends a completion."""
BYTES_PER_WEIGHT = 18
"""Bytes for training: float32 master and gradient, two moments, and the bfloat16 weight."""
ACTIVATIONS_GIB = 20.0
"""GiB for activations and logits of the largest step. A step of 1.5B took 47 GiB on an H100, 26 for weights."""


def config_of(name: str, **changes: int) -> PreTrainedConfig:
    """Return the model config of a shape."""
    make = Qwen3Config if name in QWEN3 else Qwen2Config
    return make(
        **{**SHAPES[name], **changes},
        tie_word_embeddings=name not in UNTIED,
        max_position_embeddings=LONGEST,
        eos_token_id=EOS,
    )


def random_weights(name: str, folder: Path, device: torch.device) -> Path:
    """Return a checkpoint folder with random weights of a shape; create the folder if it does not exist."""
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        with device:
            model = AutoModelForCausalLM.from_config(config_of(name))
        temporary = folder.with_name(f"{folder.name}.new")
        model.to(torch.bfloat16).save_pretrained(temporary)
        (temporary / "tokenizer_config.json").write_text(json.dumps({}))
        temporary.rename(folder)
    return folder


def fresh_rows(
    num: int, vocab_size: int, seed: int, *, median: float = MEDIAN, longest: int = LONGEST
) -> list[Trajectory]:
    """Return samples of random tokens and long-tailed lengths; a fifth of each is its prompt.

    Args:
        num: number of samples; GROUP consecutive samples form a group.
        vocab_size: V, the size of the vocabulary; the behaviour policy is uniform.
        seed: seed of lengths, tokens and rewards.
        median: median length, including the prompt.
        longest: maximum length.
    """
    random = np.random.default_rng(seed)
    rows = []
    for number, length in enumerate(long_tailed(num, seed, median=median, longest=longest)):
        completion = length - max(1, round(PROMPT_SHARE * length))
        tokens = random.integers(0, vocab_size, length).astype(np.int32)
        logprobs = np.full(completion, -math.log(vocab_size), np.float32)
        rows.append(sample(number, tokens, logprobs, float(random.random()), "stop"))
    return rows


def layer_weights(shape: Shape) -> int:
    """Return the number of weights in the matrices of a layer."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    query_width = _width(shape)
    key_width = query_width * shape["num_key_value_heads"] // heads
    return 2 * hidden * query_width + 2 * hidden * key_width + 3 * hidden * shape["intermediate_size"]


def _width(shape: Shape) -> int:
    """Return the total width of the queries of a token."""
    heads = shape["num_attention_heads"]
    return heads * shape.get("head_dim", shape["hidden_size"] // heads)


def memory_gib(name: str) -> float:
    """Return the GiB of GPU memory that a step of a shape needs, together with an engine of that shape."""
    shape = SHAPES[name]
    tables = shape["vocab_size"] * shape["hidden_size"] * (2 if name in UNTIED else 1)
    weights = shape["num_hidden_layers"] * layer_weights(shape) + tables
    return BYTES_PER_WEIGHT * weights / 2**30 + ACTIVATIONS_GIB


def model_flops(shape: Shape, rows: Sequence[Trajectory]) -> float:
    """Return the model FLOPs of the forward and backward pass of a step; see the module docstring."""
    layers = shape["num_hidden_layers"]
    lengths = [len(row.token_ids) for row in rows]
    dense = 6 * layers * layer_weights(shape) * sum(lengths)
    head = 6 * shape["hidden_size"] * shape["vocab_size"] * sum(row.num_completion_tokens for row in rows)
    attention = 6 * layers * _width(shape) * sum(length**2 for length in lengths)
    return float(dense + head + attention)


def peak_of(device_name: str) -> float | None:
    """Return the dense bf16 peak in FLOP/s; None for an unknown device."""
    return next((peak for key, peak in PEAK_BF16_FLOPS.items() if key in device_name), None)
