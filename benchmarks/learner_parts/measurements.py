"""Measurements with real compute: packing, packed and padded steps, log-probabilities, two stages, SmolLM2."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from benchmarks.learner_parts.sides import (
    PROMPT,
    TOKEN_BUDGET,
    PlainLoop,
    configured,
    long_tailed,
    packed,
    padded,
    scored_by_themselves,
    small_llama,
    trajectories,
)
from benchmarks.learner_parts.spot import Figures, Spot
from benchmarks.lib.learner import ALGORITHM, GROUP_SIZE, TEMPERATURE, Learner
from benchmarks.lib.rounds import median_ratio
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig

from leeway.algorithms.trajectory_balance import TrajectoryBalanceConfig
from leeway.buffer.schema import Trajectory, to_batch
from leeway.learner.attention import IMPLEMENTATION
from leeway.learner.batch import StepBatch
from leeway.learner.model import DeviceBatch
from leeway.learner.packing import PackingRule, pack
from leeway.learner.products import LOGITS_MIB, LogitRule, token_logprobs

SAME_WITHIN = 1e-3
"""Maximum relative difference between the gradient norms of two sides, due to the order of float32 sums."""

STEP_SIZES = (64, 256, 1024)
"""Numbers of sequences of a step at which packing is measured."""
HEADLINE = 256


def packing(spot: Spot, *, quick: bool) -> Figures:
    """Measure the number of real tokens over the tokens of the micro-batches that the learner packs for a step.

    Returns means over draws for steps of several sizes; free space in the last micro-batch counts as waste.

    `pack_extra_N` is the mean number of micro-batches of a step of N sequences beyond the minimum for their tokens.
    """
    figures: Figures = {}
    for size in STEP_SIZES:
        found, seconds, extra = [], [], 0
        for seed in range(4 if quick else 32):
            lengths = long_tailed(size, seed)
            sequences = [np.zeros(length, np.int32) for length in lengths]
            start = time.perf_counter()
            batches = pack(sequences, [1] * size, PackingRule(TOKEN_BUDGET))
            seconds.append(time.perf_counter() - start)
            found.append(batches.efficiency)
            extra += batches.num_micro_batches - math.ceil(sum(lengths) / TOKEN_BUDGET)
        figures[f"pack_efficiency_{size}"] = statistics.mean(found)
        figures[f"pack_efficiency_{size}_worst"] = min(found)
        figures[f"pack_extra_{size}"] = extra / len(found)
        figures[f"pack_ms_{size}"] = statistics.median(seconds) * 1000
    figures["pack_efficiency"] = figures[f"pack_efficiency_{HEADLINE}"]
    spot.log(f"packing: {figures['pack_efficiency']:.4f} with {HEADLINE} sequences per step")
    return figures


PADDED_BATCH = 16
PADDED_SEQUENCES = 128
PADDED_VOCABULARY = 1024


def packed_against_padded(spot: Spot, *, quick: bool) -> Figures:
    """Measure a packed step of the learner and a step of the plain padded loop, in alternating order.

    Both sides have the same model, data, loss, optimizer and threads, and take one pass; only real tokens count.
    """
    num_sequences = 32 if quick else PADDED_SEQUENCES
    path = small_llama(spot.folder / "model", hidden_size=128, num_layers=4, vocab_size=PADDED_VOCABULARY)
    rows = trajectories(long_tailed(num_sequences, seed=1), PADDED_VOCABULARY, seed=2)
    mesh = spot.mesh()
    learner = Learner(path, mesh, configured(mesh, token_budget=TOKEN_BUDGET))
    plain = PlainLoop(path, ALGORITHM, configured(mesh))
    packed_batch = learner.batch(rows)
    padded_batches = padded(rows, PADDED_BATCH, TEMPERATURE)
    norms = learner.step(packed_batch), plain.step(padded_batches)
    if abs(norms[0] / norms[1] - 1) > SAME_WITHIN:
        raise RuntimeError(f"the two sides do not compute the same loss: gradient norms {norms}")
    ours_s: list[float] = []
    plain_s: list[float] = []
    for number in range(1 if quick else 3):
        sides = [(ours_s, lambda: learner.step(packed_batch)), (plain_s, lambda: plain.step(padded_batches))]
        for seconds, step in sides[:: 1 if number % 2 == 0 else -1]:
            seconds.append(spot.seconds(step))
        spot.log(f"padded: {ours_s[-1]:.2f} s packed, {plain_s[-1]:.2f} s padded")
    num_tokens = sum(len(row.token_ids) for row in rows)
    return {
        "packed_over_padded": median_ratio(plain_s, ours_s),
        "packed_tokens_per_s": num_tokens / statistics.median(ours_s),
        "padded_tokens_per_s": num_tokens / statistics.median(plain_s),
        "padded_real_share": num_tokens / sum(batch.num_slots for batch in padded_batches),
        "packed_grad_norm": norms[0],
        "padded_grad_norm": norms[1],
        "padded_num_tokens": num_tokens,
        "padded_num_sequences": num_sequences,
    }


WEIGHED_SEQUENCES = 256
WEIGHED_LENGTH = 64


def weighed_gradients(spot: Spot, *, quick: bool) -> Figures:
    """Measure a step of trajectory balance with its default weights and a step without weights, in turns.

    Short completions and a small model maximize the relative cost of the loss.
    """
    num_sequences = 32 if quick else WEIGHED_SEQUENCES
    path = small_llama(spot.folder / "model", hidden_size=128, num_layers=4, vocab_size=PADDED_VOCABULARY)
    rows = trajectories([WEIGHED_LENGTH] * num_sequences, PADDED_VOCABULARY, seed=4)
    rows = scored_by_themselves(rows)  # avoids computing reference scores
    mesh = spot.mesh()
    config = configured(mesh, token_budget=TOKEN_BUDGET)
    losses = {"weighed": TrajectoryBalanceConfig(), "plain": TrajectoryBalanceConfig(corrections=())}
    learners = {name: Learner(path, mesh, config, algorithm=loss) for name, loss in losses.items()}
    batches = {name: learner.batch(rows) for name, learner in learners.items()}
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    for number in range(2 if quick else 12):
        for name in (*losses,) if number % 2 else (*reversed(losses),):
            taken = spot.seconds(partial(learners[name].step, batches[name]))
            if number > 0:  # the first round warms up
                seconds[name].append(taken)
    spot.log(f"weighed: {seconds}")
    return {
        "plain_over_weighed": median_ratio(seconds["plain"], seconds["weighed"]),
        "weighed_ms": statistics.median(seconds["weighed"]) * 1000,
        "weighed_num_sequences": num_sequences,
    }


HEAD_ROWS, HEAD_WIDTH, HEAD_TOKENS = 49_152, 576, 4096
HEAD_TEMPERATURE = 0.8


def logprob_memory(spot: Spot, *, side: str, quick: bool) -> Figures:
    """Measure peak memory of log-probabilities and their gradient: 'chunked' as in the last stage, or by 'full' logits.

    Each side runs forward and backward at the size of SmolLM2's head, in a separate process. The figure is the peak
    resident set size minus the size before the pass. The figure therefore includes logits, their gradients, and the
    gradients of head and states. The kernel records the peak (VmHWM, reset by writing 5 to /proc/self/clear_refs). The
    checksums `sums` verify that both sides compute the same values.
    """
    num_tokens = 1024 if quick else HEAD_TOKENS
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(HEAD_ROWS, HEAD_WIDTH, generator=generator).mul_(0.05).requires_grad_()
    hidden = torch.randn(num_tokens, HEAD_WIDTH, generator=generator).requires_grad_()
    tokens = torch.randint(HEAD_ROWS, (num_tokens,), generator=generator)
    coefficients = torch.randn(num_tokens, generator=generator)
    _score(side, hidden[:8], weight, tokens[:8], coefficients[:8])  # warm up: buffers of the first call stay allocated
    weight.grad = hidden.grad = None
    _reset_peak()
    before = _resident_mib("VmRSS")
    start = time.perf_counter()
    logprobs = _score(side, hidden, weight, tokens, coefficients)
    seconds = time.perf_counter() - start
    peak = _resident_mib("VmHWM") - before
    spot.log(f"log-probabilities, {side}: {peak:.0f} MiB, {seconds:.1f} s")
    assert weight.grad is not None
    assert hidden.grad is not None
    return {
        "peak_mib": peak,
        "seconds": seconds,
        "num_tokens": num_tokens,
        "chunk_mib": LOGITS_MIB["cpu"],
        "sums": [float(each.double().abs().sum()) for each in (logprobs, weight.grad, hidden.grad)],
    }


def _score(side: str, hidden: Tensor, weight: Tensor, tokens: Tensor, coefficients: Tensor) -> Tensor:
    if side == "chunked":
        logprobs = token_logprobs(hidden, weight, tokens, _head_rule())
    else:
        logits = F.linear(hidden, weight) / HEAD_TEMPERATURE
        logprobs = F.log_softmax(logits, dim=-1).gather(1, tokens[:, None]).squeeze(1)
        del logits
    (logprobs * coefficients).sum().backward()
    return logprobs.detach()


def _head_rule() -> LogitRule:
    return LogitRule(HEAD_TEMPERATURE)


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _resident_mib(key: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) / 1024
    raise RuntimeError(f"/proc/self/status has no {key}: measure peak memory on Linux")


REAL_MICRO_BATCHES = 8
REAL_BUDGET, REAL_LONGEST = 1024, 512
REAL_VOCABULARY = 2048
REAL_FILL = 0.9
"""Filled fraction of the capacity of the micro-batches; the free fraction allows for packing waste."""


def real_compute(spot: Spot, *, quick: bool) -> Figures:
    """Measure two stages with real compute on one core each, one stage on one core, and the scaling of two cores.

    The sides take turns: a pipeline of two stages (the first world), a single stage, and two independent single stages
    at the same time on one core each. The two single stages show the maximum gain of two processes, which is below 2 on
    a machine whose cores share memory bandwidth or clock.
    """
    spot.pin()
    mesh, path = spot.mesh(), spot.folder / "model"
    hidden, layers = (64, 4) if quick else (256, 8)
    if spot.number == 0:
        small_llama(path, hidden_size=hidden, num_layers=layers, vocab_size=REAL_VOCABULARY)
    spot.barrier()
    rows = trajectories(real_lengths(), REAL_VOCABULARY, seed=3)
    learner = Learner(path, mesh, configured(mesh, token_budget=REAL_BUDGET))
    batch = learner.batch(rows, min_micro_batches=REAL_MICRO_BATCHES)
    assert batch.packed.num_micro_batches == REAL_MICRO_BATCHES, batch.packed.num_micro_batches
    norms = spot.gather(learner.step(batch))
    if max(norms) > min(norms) * (1 + SAME_WITHIN):
        raise RuntimeError(f"the sides do not compute the same loss: gradient norms {norms}")
    split_s: list[float] = []
    one_s: list[float] = []
    two_s: list[float] = []
    for _ in range(1 if quick else 5):
        for seconds, worlds in ((split_s, [0]), (one_s, [1]), (two_s, [1, 2])):
            seconds.append(spot.seconds(lambda: learner.step(batch), worlds=worlds))
        spot.log(f"real compute: split {split_s[-1]:.2f} s, one {one_s[-1]:.2f} s, two at once {two_s[-1]:.2f} s")
    num_tokens = sum(len(row.token_ids) for row in rows)
    return {
        "pp2_over_pp1_real": median_ratio(one_s, split_s),
        "two_process_scaling": 2 * median_ratio(one_s, two_s),
        "pp1_tokens_per_s": num_tokens / statistics.median(one_s),
        "pp2_tokens_per_s": num_tokens / statistics.median(split_s),
        "real_num_tokens": num_tokens,
    }


def real_lengths() -> list[int]:
    """Return lengths of samples that fill the micro-batches of a step with real compute."""
    most = int(REAL_MICRO_BATCHES * REAL_BUDGET * REAL_FILL)
    lengths = [length for length in long_tailed(400, seed=4, longest=REAL_LONGEST) if length >= 16]
    chosen: list[int] = []
    while sum(chosen) + lengths[len(chosen)] <= most:
        chosen.append(lengths[len(chosen)])
    return chosen[: len(chosen) // 8 * 8]


SMOLLM2_MICRO_BATCHES = 16
SMOLLM2_BUDGET = 512
SMOLLM2_MEDIAN, SMOLLM2_LONGEST = 160, 448
"""Median and maximum number of tokens of prompt and completion together."""
SHORTEST_COMPLETION = 16
SMOLLM2_FILL = 0.93
PLAIN_THREADS = 2
SIDES = {"plain": 1, "one_pass": 0, "two_pass": 0}
"""Side of the comparison -> world (process group) that runs this side."""
SMOLLM2_SAME_WITHIN = 0.02
"""Maximum relative difference of gradient norms, due to the order of bf16 products."""


def smollm2(spot: Spot, *, path: str, quick: bool) -> Figures:
    """Measure SmolLM2-135M: the learner on two stages of one thread each, and a plain loop in one process on two cores.

    Figures are seconds of a step. The learner's two stages in the first world and the plain loop in the second world
    take turns. Both sides have float32 master weights, products in bf16, AdamW, the same packed micro-batches and the
    learner's attention per sequence, and compute logits only at completion tokens. The learner rounds the master
    weights to bf16. The plain loop uses autocast and starts with weights that are exact in bf16, so that both sides
    compute the same function. The learner takes the step once in one pass, which a separable loss permits, and once in
    two passes.
    """
    num_micro_batches = 2 if quick else SMOLLM2_MICRO_BATCHES
    rows = trajectories(_smollm2_lengths(num_micro_batches), AutoConfig.from_pretrained(path).vocab_size, seed=5)
    batch = StepBatch.build(
        to_batch(rows, "benchmark"), 0, {0: 0}, PackingRule(SMOLLM2_BUDGET, min_micro_batches=num_micro_batches)
    )
    assert batch.packed.num_micro_batches == num_micro_batches, batch.packed.num_micro_batches
    steps = _smollm2_ours(spot, Path(path), batch) if spot.world == 0 else _smollm2_plain(spot, Path(path), batch, rows)
    seconds, norms = spot.take_turns(SIDES, steps, 2 if quick else 4)
    found = list(norms.values())
    if max(found) > min(found) * (1 + SMOLLM2_SAME_WITHIN):
        raise RuntimeError(f"the sides do not compute the same loss: gradient norms {found}")
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


def _smollm2_ours(spot: Spot, folder: Path, batch: StepBatch) -> dict[str, Callable[[], float]]:
    mesh = spot.mesh()
    learner = Learner(folder, mesh, configured(mesh, token_budget=SMOLLM2_BUDGET, precision="bfloat16"))
    return {"one_pass": lambda: learner.step(batch), "two_pass": lambda: learner.step(batch, one_pass=False)}


def _smollm2_plain(
    spot: Spot, folder: Path, batch: StepBatch, rows: Sequence[Trajectory]
) -> dict[str, Callable[[], float]]:
    config = configured(spot.mesh(), precision="bfloat16")
    loop = PlainLoop(folder, ALGORITHM, config, attention=IMPLEMENTATION)
    batches = packed(batch.packed, rows, DeviceBatch(batch.packed, torch.device("cpu")), TEMPERATURE)
    # One thread, like a stage: two threads round bf16 products differently, which changes this norm by 16 % (AMX).
    norm = loop.step(batches)
    torch.set_num_threads(PLAIN_THREADS)

    def step() -> float:
        loop.step(batches)
        return norm

    return {"plain": step}


def _smollm2_lengths(num_micro_batches: int) -> list[int]:
    """Return lengths of whole groups that fill the micro-batches to about nine tenths."""
    drawn = [
        max(length, PROMPT + SHORTEST_COMPLETION)
        for length in long_tailed(400, seed=6, median=SMOLLM2_MEDIAN, longest=SMOLLM2_LONGEST)
    ]
    chosen: list[int] = []
    while (
        sum(chosen) + sum(drawn[len(chosen) : len(chosen) + GROUP_SIZE])
        <= SMOLLM2_FILL * num_micro_batches * SMOLLM2_BUDGET
    ):
        chosen += drawn[len(chosen) : len(chosen) + GROUP_SIZE]
    return chosen or drawn[:2]
