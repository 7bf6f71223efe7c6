"""One stage on a GPU with the shape of Qwen2.5-1.5B and random weights, in bf16 autocast: tokens per second and MFU.

Model FLOPs are what the mathematics needs, a recomputation not counted: 6 per weight of a layer's matrices and token,
6 per weight of the head and completion token, and 6 * hidden * n^2 per layer for causal attention over a sequence of n
tokens (queries and keys, then values: 2 * 2 * n^2 / 2 * hidden forward, twice that backward).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.learner_parts.sides import configured, long_tailed, trajectories
from benchmarks.learner_parts.spot import Figures, Spot
from benchmarks.lib.learner import Learner
from buffer.trajectory import Trajectory

SHAPE = {
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151_936,
}
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
}
"""Where there is no GPU: to see that the code runs."""
PEAK_BF16_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense peak of the tensor cores by what the device's name contains (SXM boards, vendor's data sheets)."""
BUDGET, MEDIAN, LONGEST, NUM_SEQUENCES = 8192, 512, 4096, 256
NUM_STEPS = 5


def measure(spot: Spot, *, quick: bool) -> Figures:
    """Seconds of a one-pass step on the GPU; on the CPU at a tiny shape, with figures that say nothing."""
    on_gpu = torch.cuda.is_available() and not quick
    device = torch.device("cuda" if on_gpu else "cpu")
    shape = SHAPE if on_gpu else TINY
    lengths = (
        long_tailed(NUM_SEQUENCES, seed=7, median=MEDIAN, longest=LONGEST) if on_gpu else long_tailed(16, 7, longest=96)
    )
    rows = trajectories(lengths, shape["vocab_size"], seed=8)
    path = _random_weights(shape, spot.folder / "model", device)
    mesh = spot.mesh()
    config = configured(mesh, token_budget=BUDGET if on_gpu else 96, precision="bfloat16")
    learner = Learner(path, mesh, config, device)
    batch = learner.batch(rows)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()  # making the random weights is no part of it
    seconds: list[float] = []
    for number in range(NUM_STEPS + 2):
        start = time.perf_counter()
        learner.step(batch)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        spot.say(f"gpu: step {number} took {seconds[-1]:.2f} s")
    step_s = statistics.median(seconds[2:])  # two steps warm up
    num_tokens = sum(len(row.token_ids) for row in rows)
    flops = model_flops(shape, rows)
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    peak = next((peak for key, peak in PEAK_BF16_FLOPS.items() if key in name), None)
    return {
        "gpu_device": name,
        "gpu_shape": "Qwen2.5-1.5B" if on_gpu else "tiny",
        "gpu_num_parameters": sum(parameter.numel() for _, parameter in learner.policy.named_weights()),
        "gpu_tokens_per_s": num_tokens / step_s,
        "gpu_mfu": None if peak is None else flops / step_s / peak,
        "gpu_num_tokens": num_tokens,
        "gpu_micro_batches": batch.packed.num_micro_batches,
        "gpu_peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
    }


def model_flops(shape: dict[str, int], rows: Sequence[Trajectory]) -> float:
    """Forward and backward of a step; see the module's docstring."""
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    of_keys = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
    per_layer = 2 * hidden * hidden + 2 * hidden * of_keys + 3 * hidden * shape["intermediate_size"]
    lengths = [len(row.token_ids) for row in rows]
    completion = sum(row.num_completion_tokens for row in rows)
    dense = 6 * layers * per_layer * sum(lengths)
    head = 6 * hidden * shape["vocab_size"] * completion
    attention = 6 * layers * hidden * sum(length**2 for length in lengths)
    return float(dense + head + attention)


def _random_weights(shape: dict[str, int], folder: Path, device: torch.device) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(**shape, tie_word_embeddings=True, max_position_embeddings=LONGEST)
    with device:
        model = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
