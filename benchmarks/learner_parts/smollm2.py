"""SmolLM2-135M: the learner on two stages of one thread each, against a plain loop in one process on both cores.

Both sides have float32 weights, bf16 autocast, AdamW, the same packed micro-batches and the learner's attention per
sequence, and both compute logits at completion tokens alone. The learner takes the step once in one pass (a separable
loss) and once in two.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig

from benchmarks.learner_parts.ours import ALGORITHM, TEMPERATURE, Learner, configured
from benchmarks.learner_parts.plain import PlainLoop, packed
from benchmarks.learner_parts.processes import Figures, Spot, median_ratio
from benchmarks.learner_parts.workload import GROUP_SIZE, PROMPT, long_tailed, trajectories
from learner.attention import IMPLEMENTATION
from learner.batch import StepBatch
from learner.model import DeviceBatch
from learner.packing import PackingRule

NUM_MICRO_BATCHES = 16
BUDGET = 512
MEDIAN, LONGEST = 160, 448
"""Of prompt and completion together, in tokens."""
SHORTEST_COMPLETION = 16
FILL = 0.93
PLAIN_THREADS = 2
SIDES = {"plain": 1, "one_pass": 0, "two_pass": 0}
"""Side -> the world that runs it."""
SAME_WITHIN = 0.02
"""Greatest relative difference of gradient norms: bf16 products in another order."""


def measure(spot: Spot, *, path: str, quick: bool) -> Figures:
    """Seconds of a step, taking turns: the two stages of the first world, and the plain loop of the second."""
    num_micro_batches = 2 if quick else NUM_MICRO_BATCHES
    rows = trajectories(_lengths(num_micro_batches), AutoConfig.from_pretrained(path).vocab_size, seed=5)
    batch = StepBatch.build(rows, 0, {0: 0}, PackingRule(BUDGET, min_micro_batches=num_micro_batches))
    assert batch.packed.num_micro_batches == num_micro_batches, batch.packed.num_micro_batches
    steps = _ours(spot, Path(path), batch) if spot.world == 0 else _plain(spot, Path(path), batch)
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    norms: dict[str, float] = {}

    def run(name: str) -> None:
        norms[name] = steps[name]()

    for number in range(2 if quick else 4):
        taken = {name: spot.seconds(lambda name=name: run(name), worlds=[world]) for name, world in SIDES.items()}
        spot.say(f"smollm2, round {number}: {taken}")
        if number > 0:  # the first round warms up
            for name, each in taken.items():
                seconds[name].append(each)
    found = [max(spot.gather(norms.get(name, 0.0))) for name in SIDES]
    if max(found) > min(found) * (1 + SAME_WITHIN):
        raise RuntimeError(f"the sides do not train the same loss: gradient norms {found}")
    num_tokens = sum(len(row.token_ids) for row in rows)
    return {
        "smollm2_one_pass_over_plain": median_ratio(seconds["plain"], seconds["one_pass"]),
        "smollm2_two_pass_over_plain": median_ratio(seconds["plain"], seconds["two_pass"]),
        **{f"smollm2_{name}_tokens_per_s": num_tokens / statistics.median(each) for name, each in seconds.items()},
        "smollm2_num_tokens": num_tokens,
        "smollm2_completion_share": sum(row.num_completion_tokens for row in rows) / num_tokens,
        "smollm2_pack_efficiency": batch.packed.efficiency,
        "smollm2_grad_norms": found,
    }


def _ours(spot: Spot, folder: Path, batch: StepBatch) -> dict[str, Callable[[], float]]:
    mesh = spot.mesh()
    learner = Learner(folder, mesh, configured(mesh, token_budget=BUDGET, precision="bfloat16"))
    return {"one_pass": lambda: learner.step(batch), "two_pass": lambda: learner.step(batch, one_pass=False)}


def _plain(spot: Spot, folder: Path, batch: StepBatch) -> dict[str, Callable[[], float]]:
    torch.set_num_threads(PLAIN_THREADS)
    config = configured(spot.mesh(), precision="bfloat16")
    loop = PlainLoop(folder, ALGORITHM, config, attention=IMPLEMENTATION)
    batches = packed(batch, DeviceBatch(batch.packed, torch.device("cpu")), TEMPERATURE)
    return {"plain": lambda: loop.step(batches)}


def _lengths(num_micro_batches: int) -> list[int]:
    """As many sequences as fill the micro-batches to about nine tenths, in whole groups."""
    drawn = [
        max(length, PROMPT + SHORTEST_COMPLETION) for length in long_tailed(400, seed=6, median=MEDIAN, longest=LONGEST)
    ]
    chosen: list[int] = []
    while sum(chosen) + sum(drawn[len(chosen) : len(chosen) + GROUP_SIZE]) <= FILL * num_micro_batches * BUDGET:
        chosen += drawn[len(chosen) : len(chosen) + GROUP_SIZE]
    return chosen or drawn[:2]
