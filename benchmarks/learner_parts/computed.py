"""Savings of a step: one pass instead of two, and a prompt computed once for all of its samples."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from benchmarks.learner_parts.measurements import (
    PLAIN_THREADS,
    SAME_WITHIN,
    SHORTEST_COMPLETION,
    SMOLLM2_SAME_WITHIN,
)
from benchmarks.learner_parts.sides import (
    PROMPT,
    BalanceLoop,
    configured,
    long_tailed,
    packed_for_balance,
    scored_by_themselves,
    small_llama,
    trajectories,
)
from benchmarks.learner_parts.spot import Figures, Spot
from benchmarks.lib.learner import GROUP_SIZE, TEMPERATURE, Learner, sample
from benchmarks.lib.rounds import median_ratio
from transformers import AutoConfig

from leeway.algorithms.trajectory_balance import TrajectoryBalanceConfig
from leeway.buffer.schema import Trajectory, to_batch
from leeway.learner import packing
from leeway.learner.batch import StepBatch
from leeway.learner.model import DeviceBatch
from leeway.learner.packing import PackingRule

UNWEIGHED = TrajectoryBalanceConfig(corrections=())

# --- one pass ----------------------------------------------------------------------------------------

BALANCE_GROUPS = 4
BALANCE_BUDGET = 2048
BALANCE_MEDIAN, BALANCE_LONGEST = 160, 240
"""Median and maximum number of tokens of a sample; a group of the longest samples fits the token budget."""
SIDES = {"ours": 0, "one_pass": 0, "two_pass": 0, "plain": 1, "plain_one_pass": 1}
"""Side of the comparison -> world (process group) that runs this side."""


def balance(spot: Spot, *, path: str, quick: bool) -> Figures:
    """Measure trajectory balance on SmolLM2-135M: two stages of one thread each, and a plain loop on both cores.

    The sides take turns; figures are seconds of a step. `ours` computes reference scores and takes one pass, because
    every group is whole in one micro-batch. `one_pass` and `two_pass` use precomputed scores. `plain` computes scores,
    then log Z in a separate forward pass, which split groups would require, and then runs forward and backward.
    `plain_one_pass` requires whole groups and computes log Z in the last pass. Precision, micro-batches and attention
    are the same on all sides, as in `measurements.smollm2`, and no samples share a prompt.
    """
    num_groups = 2 if quick else BALANCE_GROUPS
    lengths = long_tailed(GROUP_SIZE * num_groups, seed=7, median=BALANCE_MEDIAN, longest=BALANCE_LONGEST)
    lengths = [max(each, PROMPT + SHORTEST_COMPLETION) for each in lengths]
    rows = trajectories(lengths, AutoConfig.from_pretrained(path).vocab_size, seed=8)
    rule = PackingRule(BALANCE_BUDGET, min_micro_batches=num_groups, unit="group", num_stages=2)
    batch = StepBatch.build(to_batch(rows, "benchmark"), 0, {0: 0}, rule)
    assert batch.packed.unit == "group"
    if spot.world == 0:
        scored = StepBatch.build(to_batch(scored_by_themselves(rows), "benchmark"), 0, {0: 0}, rule)
        steps = _balance_ours(spot, Path(path), batch, scored)
    else:
        steps = _balance_plain(spot, Path(path), batch, rows)
    seconds, found = spot.take_turns(SIDES, steps, 2 if quick else 4)
    for same in (("one_pass", "two_pass"), ("ours", "plain", "plain_one_pass")):
        own = [found[name] for name in same]
        if max(own) > min(own) * (1 + SMOLLM2_SAME_WITHIN):
            raise RuntimeError(f"the sides do not compute the same loss: gradient norms {found}")
    return {
        "tb_one_pass_over_two": median_ratio(seconds["two_pass"], seconds["one_pass"]),
        "smollm2_tb_over_plain": median_ratio(seconds["plain"], seconds["ours"]),
        "smollm2_tb_over_plain_one_pass": median_ratio(seconds["plain_one_pass"], seconds["ours"]),
        **{f"tb_{name}_s": statistics.median(each) for name, each in seconds.items()},
        "tb_num_tokens": sum(lengths),
        "tb_num_micro_batches": batch.packed.num_micro_batches,
        "tb_grad_norms": [found[name] for name in ("plain", "plain_one_pass", "ours")],
    }


def _balance_ours(spot: Spot, folder: Path, batch: StepBatch, scored: StepBatch) -> dict[str, Callable[[], float]]:
    mesh = spot.mesh()
    config = configured(mesh, token_budget=BALANCE_BUDGET, precision="bfloat16")
    learner = Learner(folder, mesh, config, algorithm=UNWEIGHED, scores=True)
    return {
        "ours": lambda: learner.step(batch),
        "one_pass": lambda: learner.step(scored),
        "two_pass": lambda: learner.step(scored, one_pass=False),
    }


def _balance_plain(
    spot: Spot, folder: Path, batch: StepBatch, rows: Sequence[Trajectory]
) -> dict[str, Callable[[], float]]:
    torch.set_num_threads(PLAIN_THREADS)
    loop = BalanceLoop(folder, UNWEIGHED, configured(spot.mesh(), precision="bfloat16"))
    on_device = DeviceBatch(batch.packed, torch.device("cpu"))
    batches = packed_for_balance(batch.packed, rows, on_device, TEMPERATURE)
    return {
        "plain": lambda: loop.step(batches, one_pass=False),
        "plain_one_pass": lambda: loop.step(batches, one_pass=True),
    }


# --- shared prompts ----------------------------------------------------------------------------------

SHARED_VOCABULARY = 2048
SHARED_CASES = {"even": (128, 128), "long_prompts": (512, 128)}
"""Name of the case -> number of tokens of the prompt and of the completion."""
SHARED_GROUPS = 4


def shared_prompts(spot: Spot, *, quick: bool) -> Figures:
    """Measure a step over groups of 8 whose prompt is computed once, and a step with the prompt once per sample.

    Both sides run trajectory balance in one pass, on one stage with one thread, and have one group per micro-batch.
    """
    hidden, layers = (64, 2) if quick else (256, 8)
    path = small_llama(spot.folder / "model", hidden_size=hidden, num_layers=layers, vocab_size=SHARED_VOCABULARY)
    figures: Figures = {}
    for name, (prompt, answer) in SHARED_CASES.items():
        mesh = spot.mesh()
        config = configured(mesh, token_budget=GROUP_SIZE * (prompt + answer))
        learner = Learner(path, mesh, config, algorithm=UNWEIGHED)
        rows = scored_by_themselves(_groups_of_a_prompt(1 if quick else SHARED_GROUPS, prompt, answer))
        batches = {"shared": learner.batch(rows)}
        with mock.patch.object(packing, "same_prompts", _none_the_same):
            batches["plain"] = learner.batch(rows)
        norms = {side: learner.step(batch) for side, batch in batches.items()}
        if abs(norms["shared"] / norms["plain"] - 1) > SAME_WITHIN:
            raise RuntimeError(f"the sides do not compute the same loss: gradient norms {norms}")
        seconds: dict[str, list[float]] = {side: [] for side in batches}
        for _ in range(1 if quick else 5):
            for side, batch in batches.items():
                seconds[side].append(spot.seconds(partial(learner.step, batch)))
        spot.log(f"prompts of {prompt} tokens, completions of {answer}: {seconds}")
        figures |= {
            f"shared_prefix_over_plain_{name}": median_ratio(seconds["plain"], seconds["shared"]),
            f"shared_{name}_s": statistics.median(seconds["shared"]),
            f"shared_{name}_plain_s": statistics.median(seconds["plain"]),
        }
    return figures


def _none_the_same(sequences: Sequence[object], prompt_lengths: Sequence[int]) -> packing.IntArray:
    """Return that no samples share a prompt; replaces `packing.same_prompts`."""
    return np.arange(len(sequences))


def _groups_of_a_prompt(num_groups: int, prompt: int, answer: int) -> list[Trajectory]:
    random = np.random.default_rng(9)
    prompts = random.integers(0, SHARED_VOCABULARY, (num_groups, prompt))
    logprobs = np.full(answer, -np.log(SHARED_VOCABULARY), np.float32)
    return [
        sample(
            number,
            np.concatenate(
                (prompts[number // GROUP_SIZE], random.integers(0, SHARED_VOCABULARY, answer)), dtype=np.int32
            ),
            logprobs,
            float(random.random()),
            "stop",
        )
        for number in range(num_groups * GROUP_SIZE)
    ]
