"""What is trained on a GPU: shapes of models, random weights, fresh batches of long-tailed lengths, and their FLOPs.

Model FLOPs are what the mathematics needs, a recomputation not counted: 6 per weight of a layer's matrices and token,
6 per weight of the head and completion token, and 6 * hidden * n^2 per layer for causal attention over a sequence of n
tokens (queries and keys, then values: 2 * 2 * n^2 / 2 * hidden forward, twice that backward).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedConfig, Qwen2Config, Qwen2ForCausalLM

from benchmarks.learner_parts.sides import long_tailed
from benchmarks.lib.learner import sample
from buffer.schema import Trajectory

Shape = dict[str, int]
"""Keys of a Qwen2Config."""

SHAPES: dict[str, Shape] = {
    "0.5B": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
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
}
"""Those of Qwen2.5; one that is quick to write down, and one to see that the code runs."""
UNTIED = frozenset({"7B"})
"""Shapes whose head is no embedding."""
PEAK_BF16_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense peak of the tensor cores by what the device's name contains (SXM boards, vendor's data sheets)."""
MEDIAN, LONGEST = 512, 4096
"""Tokens of a sequence."""
PROMPT_SHARE = 0.2
GROUP = 8


def config_of(name: str, **changes: int) -> PreTrainedConfig:
    """Of a shape, as its checkpoint would have it."""
    shape = {**SHAPES[name], **changes}
    return Qwen2Config(**shape, tie_word_embeddings=name not in UNTIED, max_position_embeddings=LONGEST)


def random_weights(name: str, folder: Path, device: torch.device) -> Path:
    """A checkpoint folder of a shape; one that is there already stays."""
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        with device:
            model = Qwen2ForCausalLM(config_of(name))
        made = folder.with_name(f"{folder.name}.new")
        model.to(torch.bfloat16).save_pretrained(made)
        (made / "tokenizer_config.json").write_text(json.dumps({}))
        made.rename(folder)
    return folder


def fresh_rows(
    num: int, vocab_size: int, seed: int, *, median: float = MEDIAN, longest: int = LONGEST
) -> list[Trajectory]:
    """Samples of random tokens and long-tailed lengths, of which a fifth is the prompt; each seed gives others.

    Args:
        num: of samples; GROUP in a row have one prompt.
        vocab_size: V; the behaviour policy is uniform over it.
        seed: of lengths, tokens and rewards.
        median: of the lengths, prompt included.
        longest: to which they are clipped.
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
    """Weights of a layer's matrices."""
    hidden = shape["hidden_size"]
    of_keys = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
    return 2 * hidden * hidden + 2 * hidden * of_keys + 3 * hidden * shape["intermediate_size"]


def model_flops(shape: Shape, rows: Sequence[Trajectory]) -> float:
    """Forward and backward of a step; see the module's docstring."""
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    lengths = [len(row.token_ids) for row in rows]
    dense = 6 * layers * layer_weights(shape) * sum(lengths)
    head = 6 * hidden * shape["vocab_size"] * sum(row.num_completion_tokens for row in rows)
    attention = 6 * layers * hidden * sum(length**2 for length in lengths)
    return float(dense + head + attention)


def peak_of(device_name: str) -> float | None:
    """Dense bf16 peak in FLOP/s; None of a device that is not known."""
    return next((peak for key, peak in PEAK_BF16_FLOPS.items() if key in device_name), None)
