"""What the GPU path launches, moves and keeps, counted without a GPU: writes docs/results/gpu_paper.md.

    python -m benchmarks.gpu.paper [--before CHECKOUT]

CHECKOUT is another one, such as a worktree of an earlier commit, whose learner is counted by the same counter. Prints
one JSON line last. Times and MFU are arithmetic over what was counted, and no measurement: `python -m benchmarks.gpu`
measures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.counting import BYTES_PER_S, GEMM_FLOPS, NUM_SEQUENCES, NUM_STAGES
from benchmarks.gpu.pretended import BUDGET
from benchmarks.gpu.shapes import PEAK_BF16_FLOPS, SHAPES, UNTIED, Shape, layer_weights
from benchmarks.lib.machine import RESULTS, ROOT, describe_commit
from benchmarks.lib.page import MET, table, write_page

PAGE = RESULTS / "gpu_paper.md"
COUNTED = ("0.5B", "1.5B", "7B")
MFU_WANTED = 0.35
LIMIT_S = 300.0
GRADIENT_AND_MOMENTS = 12
"""Bytes of each parameter: float32, and two moments."""
PASSES = ("forward", "backward")
KINDS = {"other": "elementwise and reductions", "gemm": "products", "attention": "attention"}

Count = dict[str, Any]
"""Of one shape, as `counting.count_shape` gives it."""


class Way(NamedTuple):
    """A way to compute that is counted."""

    name: str
    checkout: Path
    arguments: tuple[str, ...] = ()


def main() -> None:
    """Count, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT")
    before = parser.parse_args().before
    ways = [
        *([Way("before", before)] if before is not None else []),
        Way("torch alone", ROOT),
        Way("fused", ROOT, ("--fused",)),
    ]
    found = {shape: {way.name: count(way, shape) for way in ways} for shape in COUNTED}
    write_page(PAGE, page_of(found, describe_commit(before) if before is not None else "", describe_commit()))
    print(json.dumps({"mfu_1.5B": best_mfu(found), "wanted": MFU_WANTED}))


def count(way: Way, shape: str) -> Count:
    """By the learner of a checkout, in a process of its own; the counter is always this one.

    Raises:
        RuntimeError: that learner cannot be counted.
    """
    paths = dict.fromkeys([str(way.checkout.resolve()), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "benchmarks.gpu.counting", shape, *way.arguments]
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    if ran.returncode:
        raise RuntimeError(
            f"{shape}, {way.name}: the learner of {way.checkout} cannot be counted: {ran.stderr[-2000:]}"
        )
    counted: Count = json.loads(ran.stdout.splitlines()[-1])
    return counted


# --- arithmetic -----------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """Seconds of a micro-batch, and the MFU that follows."""

    products: float
    others: float
    head: float
    train: float
    scoring: float
    mfu: float
    mfu_of_three: float
    """With a scoring pass of the policy and of the reference."""


def estimate(counted: Count) -> Estimate:
    """From counts alone: an operation takes its FLOPs or its bytes, whichever are slower."""
    shape = SHAPES[counted["shape"]]
    num_layers = shape["num_hidden_layers"]
    training, scoring = counted["training"], counted["scoring"]
    products = num_layers * _seconds(training["layer"], "gemm")
    others = num_layers * (_seconds(training["layer"], "other") + _attention_s(training["layer"], shape, counted))
    others += _seconds(training["embedding"])
    head = _seconds(training["head"])
    train = products + others + head
    score = num_layers * (_seconds(scoring["layer"], "gemm", "other") + _attention_s(scoring["layer"], shape, counted))
    score += _seconds(scoring["embedding"]) + _seconds(scoring["head"])
    ideal = _model_flops(shape, counted) / PEAK_BF16_FLOPS["H100"]
    return Estimate(products, others, head, train, score, ideal / train, ideal / (train + 2 * score))


def best_mfu(found: Mapping[str, Mapping[str, Count]]) -> float:
    """Of 1.5B in one pass."""
    return max(estimate(each).mfu for each in found["1.5B"].values())


def _seconds(figures: Mapping[str, float], *kinds: str) -> float:
    return sum(figures.get(f"{each}.{kind}.seconds", 0.0) for each in PASSES for kind in kinds or KINDS)


def _attention_s(figures: Mapping[str, float], shape: Shape, counted: Count) -> float:
    """Of a layer: 2 n^2 hidden FLOPs forward and, with the scores made again, 5 backward; or its bytes."""
    found = 0.0
    for each, times in (("forward", 2), ("backward", 5)):
        if figures.get(f"{each}.attention.kernels"):
            flops = times * shape["hidden_size"] * counted["squared_tokens"]
            found += max(flops / GEMM_FLOPS, figures[f"{each}.attention.seconds"])
    return found


def _model_flops(shape: Shape, counted: Count) -> float:
    hidden, num_layers = shape["hidden_size"], shape["num_hidden_layers"]
    dense = num_layers * layer_weights(shape) * counted["tokens"]
    head = hidden * shape["vocab_size"] * counted["completion_tokens"]
    return float(6 * (dense + head + num_layers * hidden * counted["squared_tokens"]))


def memory_gib(counted: Count, num_stages: int) -> list[float]:
    """Of each stage under 1F1B: what is trained, and what the micro-batches in flight keep."""
    shape, parts = SHAPES[counted["shape"]], counted["training"]
    table_size = shape["hidden_size"] * shape["vocab_size"]
    stages = []
    for stage, (first, end) in enumerate(counted["splits"][NUM_STAGES.index(num_stages)]):
        is_first, is_last = stage == 0, stage == num_stages - 1
        tables = (is_first + is_last) - (is_first and is_last and counted["shape"] not in UNTIED)
        weights = (end - first) * layer_weights(shape) + tables * table_size
        kept = (end - first) * _kept(parts["layer"])
        kept += is_first * _kept(parts["embedding"]) + is_last * _kept(parts["head"])
        in_flight = min(num_stages - stage, counted["micro_batches"])
        stages.append(weights * (counted["bytes_per_weight"] + GRADIENT_AND_MOMENTS) + in_flight * kept)
    return [size / 2**30 for size in stages]


def _kept(figures: Mapping[str, float]) -> float:
    return figures["kept.activations"] + figures["kept.weight_copies"]


# --- the page -------------------------------------------------------------------------------------


def page_of(found: Mapping[str, Mapping[str, Count]], before: str, commit: str) -> list[str]:
    """Its paragraphs.

    Args:
        found: by shape and way.
        before: which learner that of before is; "": there is none.
        commit: what is counted.
    """
    some = next(iter(found["1.5B"].values()))
    mfu = best_mfu(found)
    return [
        "# The GPU path on paper",
        f"Written by `python -m benchmarks.gpu.paper --before CHECKOUT`, commit {commit}. **Counted, not measured**; "
        "[gpu.md](gpu.md) has what one H100 measured. The learner's own stages run forward and backward on tensors "
        'that have a shape and no memory and say that they are on "cuda"; a dispatch mode sees every operation below '
        "autograd. Read is what an operation takes, written what it makes, a view moves nothing; each one that moves "
        "something is a kernel.",
        f"The micro-batch is the typical one, and not the first, of a step of {NUM_SEQUENCES} sequences of long-tailed "
        f"lengths in {some['micro_batches']} micro-batches of {BUDGET:,} tokens: {some['tokens']:,} tokens, "
        f"{some['completion_tokens']:,} of them of completions, in the shapes of Qwen2.5. "
        + (f"*before*: the learner of commit {before}, at the same keys. " if before else "")
        + "*torch alone*: as it is without liger-kernel. *fused*: with it, as the extra `gpu` installs it; in place of "
        "its kernels stand operations that move what its source reads and writes. "
        "Attention is flash attention everywhere.",
        table(
            ["figure", "wanted, at least", "computed", "met"],
            [["MFU of 1.5B, one pass", f"{MFU_WANTED:.0%}", f"{mfu:.0%}", MET[mfu >= MFU_WANTED]]],
        ),
        "## What a layer launches, moves and keeps",
        *(f"{shape}:\n\n{_layer_table(ways)}" for shape, ways in found.items()),
        "*Distinct shapes* are those that attention is called with in one step: cuDNN would build a plan for each, and "
        "flash attention, which is all that is asked now, none for any.",
        "## What follows for time",
        f"Arithmetic: an operation takes its FLOPs at {GEMM_FLOPS / 1e12:.0f} TFLOP/s or its bytes at "
        f"{BYTES_PER_S / 1e12:.1f} TB/s, whichever take longer. Launches cost nothing, and neither clipping nor AdamW, "
        "which come once per update, are in it. MFU is of model FLOPs against 989 TFLOP/s; *three passes* scores with "
        "reference and policy before it trains, as trajectory balance does.",
        _time_table(found),
        "## Memory by stage",
        "GiB under 1F1B: weights, what they are rounded from, gradients and moments, and what the "
        "micro-batches in flight keep for their backward pass. Not in it: the chunk of logits under way, buffers "
        "between stages, the reference (4 bytes per weight before, 2 now, unless it is off-loaded), and CUDA's own. "
        "[What one rank needs](../learner.md#what-one-rank-needs) has those too.",
        _memory_table(found),
    ]


def _layer_table(ways: Mapping[str, Count]) -> str:
    def per_token(name: str) -> list[str]:
        return [f"{each['training']['layer'].get(name, 0) / each['tokens'] / 1000:,.0f}" for each in ways.values()]

    def whole(name: str, unit: float = 1) -> list[str]:
        return [f"{each['training']['layer'].get(name, 0) / unit:,.0f}" for each in ways.values()]

    def kernels(phase: str) -> list[str]:
        layers = [each["training"]["layer"] for each in ways.values()]
        return [f"{sum(layer.get(f'{phase}.{kind}.kernels', 0) for kind in KINDS):,.0f}" for layer in layers]

    rows = [[f"{KINDS[k]}, {p}, kB/token", *per_token(f"{p}.{k}.bytes")] for k in KINDS for p in PASSES]
    rows += [
        ["kept for the backward pass, kB/token", *per_token("kept.activations")],
        ["copies of weights kept beside it, MB", *whole("kept.weight_copies", 1e6)],
        ["casts of weights", *whole("casts")],
        *([f"kernels, {phase}", *kernels(phase)] for phase in PASSES),
        ["distinct shapes of attention in a step", *(str(each["attention_shapes"]) for each in ways.values())],
    ]
    return table(["", *ways], rows)


def _time_table(found: Mapping[str, Mapping[str, Count]]) -> str:
    rows = []
    for shape, ways in found.items():
        for name, counted in ways.items():
            e = estimate(counted)
            taken = [f"{1000 * each:.0f}" for each in (e.products, e.others, e.head, e.train, e.scoring)]
            rows.append([f"{shape}, {name}", *taken, f"{e.mfu:.0%}", f"{e.mfu_of_three:.0%}"])
    times = ["products of layers, ms", "other kernels", "head", "training", "a scoring pass"]
    return table(["", *times, "MFU, one pass", "three passes"], rows)


def _memory_table(found: Mapping[str, Mapping[str, Count]]) -> str:
    rows = []
    for shape, ways in found.items():
        for name, counted in ways.items():
            cells = [" / ".join(f"{each:.0f}" for each in memory_gib(counted, num)) for num in NUM_STAGES]
            rows.append([f"{shape}, {name}", *cells])
    return table(["", *(f"{num} stages" if num > 1 else "1 stage" for num in NUM_STAGES)], rows)


if __name__ == "__main__":
    main()
