"""Count kernels, bytes and memory of the learner without a GPU, and write docs/results/gpu_paper.md.

    python -m benchmarks.gpu.paper [--before CHECKOUT]

CHECKOUT is another checkout, such as a worktree of an earlier commit, whose learner is counted for comparison. The last
line of output is JSON. Times and MFU are computed from the counts; `python -m benchmarks.gpu` measures times and MFU.
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
MFU_TARGET = 0.35
LIMIT_S = 300.0
GRADIENT_AND_MOMENTS = 12
"""Bytes per parameter of the float32 gradient and the two moments."""
PASSES = ("forward", "backward")
KINDS = {"other": "elementwise and reductions", "gemm": "products", "attention": "attention"}

Count = dict[str, Any]
"""Figures of one shape, from `counting.count_shape`."""


class Variant(NamedTuple):
    """An implementation of the learner to count."""

    name: str
    checkout: Path
    arguments: tuple[str, ...] = ()


def main() -> None:
    """Count all shapes and variants, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT")
    before = parser.parse_args().before
    variants = [
        *([Variant("before", before)] if before is not None else []),
        Variant("torch alone", ROOT),
        Variant("fused", ROOT, ("--fused",)),
    ]
    found = {shape: {variant.name: count(variant, shape) for variant in variants} for shape in COUNTED}
    write_page(PAGE, page_of(found, describe_commit(before) if before is not None else "", describe_commit()))
    print(json.dumps({"mfu_1.5B": best_mfu(found), "wanted": MFU_TARGET}))


def count(variant: Variant, shape: str) -> Count:
    """Count a shape with the learner of a checkout, in a separate process with the counter of this checkout.

    Raises:
        RuntimeError: the process failed.
    """
    paths = dict.fromkeys([str(variant.checkout.resolve()), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "benchmarks.gpu.counting", shape, *variant.arguments]
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    if ran.returncode:
        raise RuntimeError(
            f"{shape}, {variant.name}: counting the learner of {variant.checkout} failed: {ran.stderr[-2000:]}"
        )
    counted: Count = json.loads(ran.stdout.splitlines()[-1])
    return counted


# --- arithmetic -----------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """Computed seconds of a micro-batch, and the resulting MFU."""

    products: float
    others: float
    head: float
    train: float
    scoring: float
    mfu: float
    mfu_of_three: float
    """MFU of three passes: training, and scoring by policy and reference."""


def estimate(counted: Count) -> Estimate:
    """Compute times from counts: an operation takes the longer of the time for its FLOPs and the time for its bytes."""
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
    """Return the best MFU of the 1.5B shape in one pass, over all variants."""
    return max(estimate(each).mfu for each in found["1.5B"].values())


def _seconds(figures: Mapping[str, float], *kinds: str) -> float:
    return sum(figures.get(f"{each}.{kind}.seconds", 0.0) for each in PASSES for kind in kinds or KINDS)


def _attention_s(figures: Mapping[str, float], shape: Shape, counted: Count) -> float:
    """Return the attention seconds of a layer, from bytes or FLOPs: 2 n^2 * hidden forward, 5 n^2 * hidden backward."""
    seconds = 0.0
    for each, times in (("forward", 2), ("backward", 5)):
        if figures.get(f"{each}.attention.kernels"):
            flops = times * shape["hidden_size"] * counted["squared_tokens"]
            seconds += max(flops / GEMM_FLOPS, figures[f"{each}.attention.seconds"])
    return seconds


def _model_flops(shape: Shape, counted: Count) -> float:
    hidden, num_layers = shape["hidden_size"], shape["num_hidden_layers"]
    dense = num_layers * layer_weights(shape) * counted["tokens"]
    head = hidden * shape["vocab_size"] * counted["completion_tokens"]
    return float(6 * (dense + head + num_layers * hidden * counted["squared_tokens"]))


def memory_gib(counted: Count, num_stages: int) -> list[float]:
    """Return the GiB of each stage under 1F1B: the training state, and the activations of micro-batches in flight."""
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
    """Return the paragraphs of the page.

    Args:
        found: counts by shape and variant.
        before: commit of the variant "before", or "" without this variant.
        commit: commit of all variants except "before".
    """
    some = next(iter(found["1.5B"].values()))
    mfu = best_mfu(found)
    return [
        "# The GPU path on paper",
        f"Written by `python -m benchmarks.gpu.paper --before CHECKOUT`, commit {commit}. **Counted, not measured**; "
        "[gpu.md](gpu.md) has measurements of one H100. The stages of the learner run forward and backward on fake "
        "CUDA tensors, which have a shape but no memory. A dispatch mode intercepts every operation below autograd. "
        "An operation reads its inputs and writes its outputs; a view moves no bytes. Each operation that moves bytes "
        "counts as one kernel.",
        f"The step has {NUM_SEQUENCES} sequences of long-tailed lengths in {some['micro_batches']} micro-batches of "
        f"{BUDGET:,} tokens. The counted micro-batch has a typical size and is not the first of the step. The counted "
        f"micro-batch has {some['tokens']:,} tokens, of which {some['completion_tokens']:,} are completion tokens. The "
        "shapes are of Qwen2.5. "
        + (f"The variant *before* is the learner of commit {before}, with the same config. " if before else "")
        + "*torch alone* is the learner without liger-kernel. *fused* is the learner with liger-kernel, which the "
        "extra `gpu` installs. Operations that move the same bytes replace the kernels of liger-kernel. "
        "Attention is flash attention in all variants.",
        table(
            ["figure", "target, at least", "computed", "met"],
            [["MFU of 1.5B, one pass", f"{MFU_TARGET:.0%}", f"{mfu:.0%}", MET[mfu >= MFU_TARGET]]],
        ),
        "## Kernels, bytes and memory of a layer",
        *(f"{shape}:\n\n{_layer_table(variants)}" for shape, variants in found.items()),
        "*Distinct shapes* are the shapes of the attention calls in one step. cuDNN would build a plan for each shape. "
        "Flash attention, the only kernel in use, needs no plans.",
        "## Computed time",
        f"The time of an operation is the longer of two times: its FLOPs at {GEMM_FLOPS / 1e12:.0f} TFLOP/s, and its "
        f"bytes at {BYTES_PER_S / 1e12:.1f} TB/s. Launches, clipping and AdamW (once per update) are not included. MFU "
        "counts model FLOPs relative to 989 TFLOP/s. *Three passes* includes scoring with reference and policy before "
        "training, as in trajectory balance.",
        _time_table(found),
        "## Memory by stage",
        "The table has the GiB of a stage under 1F1B: weights, master weights, gradients, moments, and the activations "
        "that micro-batches in flight keep for their backward pass. The table excludes the current chunk of logits, "
        "buffers between stages, the memory of CUDA, and a reference that is not offloaded (4 bytes per weight before, "
        "2 now). [What one rank needs](../learner.md#what-one-rank-needs) includes all of these.",
        _memory_table(found),
    ]


def _layer_table(variants: Mapping[str, Count]) -> str:
    def per_token(name: str) -> list[str]:
        return [f"{each['training']['layer'].get(name, 0) / each['tokens'] / 1000:,.0f}" for each in variants.values()]

    def whole(name: str, unit: float = 1) -> list[str]:
        return [f"{each['training']['layer'].get(name, 0) / unit:,.0f}" for each in variants.values()]

    def kernels(phase: str) -> list[str]:
        layers = [each["training"]["layer"] for each in variants.values()]
        return [f"{sum(layer.get(f'{phase}.{kind}.kernels', 0) for kind in KINDS):,.0f}" for layer in layers]

    rows = [[f"{KINDS[k]}, {p}, kB/token", *per_token(f"{p}.{k}.bytes")] for k in KINDS for p in PASSES]
    rows += [
        ["kept for the backward pass, kB/token", *per_token("kept.activations")],
        ["copies of weights kept for the backward pass, MB", *whole("kept.weight_copies", 1e6)],
        ["casts of weights", *whole("casts")],
        *([f"kernels, {phase}", *kernels(phase)] for phase in PASSES),
        ["distinct shapes of attention in a step", *(str(each["attention_shapes"]) for each in variants.values())],
    ]
    return table(["", *variants], rows)


def _time_table(found: Mapping[str, Mapping[str, Count]]) -> str:
    rows = []
    for shape, variants in found.items():
        for name, counted in variants.items():
            e = estimate(counted)
            times_ms = [f"{1000 * each:.0f}" for each in (e.products, e.others, e.head, e.train, e.scoring)]
            rows.append([f"{shape}, {name}", *times_ms, f"{e.mfu:.0%}", f"{e.mfu_of_three:.0%}"])
    times = ["products of layers, ms", "other kernels", "head", "training", "a scoring pass"]
    return table(["", *times, "MFU, one pass", "three passes"], rows)


def _memory_table(found: Mapping[str, Mapping[str, Count]]) -> str:
    rows = []
    for shape, variants in found.items():
        for name, counted in variants.items():
            cells = [" / ".join(f"{each:.0f}" for each in memory_gib(counted, num)) for num in NUM_STAGES]
            rows.append([f"{shape}, {name}", *cells])
    return table(["", *(f"{num} stages" if num > 1 else "1 stage" for num in NUM_STAGES)], rows)


if __name__ == "__main__":
    main()
