"""Speed of the learner: steps on fresh batches, cost of config keys, kernels of a micro-batch, and copies."""

from __future__ import annotations

import gzip
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from benchmarks.gpu.counting import AttentionCall, Counting
from benchmarks.gpu.place import Place
from benchmarks.gpu.shapes import model_flops, peak_of
from benchmarks.lib.learner import Learner
from torch.profiler import ProfilerActivity

from leeway.learner.checkpoint import TrainingState
from leeway.learner.model import DeviceBatch
from leeway.learner.networks import Networks
from leeway.learner.packing import PackingRule, pack
from leeway.learner.pipeline import OutOfMemory
from leeway.weight_sync.tensors import HostCopy

SECONDS = 30.0
"""Approximate seconds of timed learner steps."""
WARM_UP = 2
NUM_STEPS = 8
MFU_TARGET = 0.45


# --- steps ----------------------------------------------------------------------------------------


def baseline(place: Place, shape: str = "1.5B") -> None:
    """Measure steps that compute loss and gradient in one pass, each on a new batch."""
    learner = place.learner(shape)
    memory = psutil.Process()
    rss = memory.memory_info().rss
    figures = timed_steps(place, learner, shape, seed=100)
    grown_mib = (memory.memory_info().rss - rss) / 2**20
    is_fused = learner.policy.modules[-1].rule.is_fused
    place.report("steps", shape=place.shape(shape)[0], fused_kernels=is_fused, **figures, rss_grew_mib=grown_mib)
    seen: set[AttentionCall] = set()
    for number in range(2):
        batch = learner.batch(place.rows(shape, 64, seed=200 + number))
        with Counting(place.device) as counting:
            learner.step(batch)
        new = counting.attention_shapes - seen
        seen |= counting.attention_shapes
        place.report(
            f"attention shapes, step {number}",
            micro_batches=batch.packed.num_micro_batches,
            shapes=len(counting.attention_shapes),
            new=len(new),
            kernels=sorted({each[0] for each in seen}),
        )


def timed_steps(
    place: Place,
    learner: Learner,
    shape: str,
    *,
    seed: int,
    num_sequences: int = 128,
    num_steps: int = NUM_STEPS,
    seconds: float = SECONDS,
    one_pass: bool = True,
) -> dict[str, Any]:
    """Time steps for about `seconds`, at least one after warm-up. Each step packs new samples and trains on them."""
    times_s: list[float] = []
    rates: list[float] = []
    mfu: list[float] = []
    packing: list[float] = []
    peak = peak_of(torch.cuda.get_device_name()) if place.on_gpu else None
    _, known = place.shape(shape)
    began = time.perf_counter()
    for number in range(WARM_UP + num_steps):
        rows = place.rows(shape, num_sequences, seed=seed + number)
        start = time.perf_counter()
        batch = learner.batch(rows)
        place.sync()
        packing.append(time.perf_counter() - start)
        start = time.perf_counter()
        learner.step(batch, number, one_pass=one_pass)
        place.sync()
        step_s = time.perf_counter() - start
        if number < WARM_UP:
            continue
        times_s.append(step_s)
        rates.append(sum(len(row.token_ids) for row in rows) / step_s)
        mfu += [model_flops(known, rows) / step_s / peak] if peak else []
        if time.perf_counter() - began > seconds:
            break
    return {
        "steps": len(times_s),
        "step_s": statistics.median(times_s),
        "slowest_s": max(times_s),
        "tokens_per_s": statistics.median(rates),
        "mfu": statistics.median(mfu) if mfu else None,
        "packing_s": statistics.median(packing),
        "micro_batches": batch.packed.num_micro_batches,
        **place.peak(),
    }


def sweep(place: Place, shape: str = "1.5B") -> None:
    """Measure variants of the default config, and report which variants run out of memory."""
    variants: list[tuple[str, dict[str, Any], float | None, bool]] = [
        ("default", {}, None, True),
        ("two passes", {}, None, False),
        ("chunk 64 MiB", {}, 64.0, True),
        ("chunk 256 MiB", {}, 256.0, True),
        ("chunk 2048 MiB", {}, 2048.0, True),
        ("budget 4096", {"token_budget": 4096}, None, True),
        ("budget 16384, checkpointing", {"token_budget": 16_384, "activation_checkpointing": True}, None, True),
        ("checkpointing", {"activation_checkpointing": True}, None, True),
        ("budget 16384", {"token_budget": 16_384}, None, True),
    ]
    for name, config, chunk_mib, one_pass in variants:
        learner = place.learner(shape, **config)
        if chunk_mib is not None:
            set_chunk(learner, chunk_mib)
        try:
            figures = timed_steps(
                place, learner, shape, seed=300, num_sequences=48, num_steps=3, seconds=9.0, one_pass=one_pass
            )
        except OutOfMemory as error:
            place.report(name, out_of_memory=str(error)[:300], **place.peak())
        else:
            place.report(name, **figures)
        del learner


def set_chunk(learner: Learner, chunk_mib: float) -> None:
    """Set the size of a chunk of logits in the head."""
    last = learner.policy.modules[-1]
    last.rule = replace(last.rule, chunk_mib=chunk_mib)


# --- one micro-batch ------------------------------------------------------------------------------


def micro_batch(place: Place, learner: Learner, shape: str, seed: int) -> DeviceBatch:
    """Return a batch on the device whose first micro-batch is full."""
    batch = learner.batch(place.rows(shape, 24, seed))
    return DeviceBatch(batch.packed, place.device)


def forward_and_backward(learner: Learner, batch: DeviceBatch, m: int = 0) -> None:
    """Run one micro-batch forward and backward through the stage, and discard its gradients."""
    (module,) = learner.policy.modules
    module.batch = batch
    try:
        out = module(batch.tokens_ML[m : m + 1], torch.tensor([m]))
        out.sum().backward()
    finally:
        module.batch = None
    for optimizer in learner.policy.optimizers:
        optimizer.clear()


def profile(place: Place, shape: str = "1.5B") -> None:
    """Report the kernels of one micro-batch by time; store the table and a trace with the results."""
    learner = place.learner(shape)
    for seed in (1, 2):
        forward_and_backward(learner, micro_batch(place, learner, shape, seed))
    batch = micro_batch(place, learner, shape, 3)
    unprofiled_s = place.seconds(lambda: forward_and_backward(learner, batch))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if place.on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        start = time.perf_counter()
        forward_and_backward(learner, batch)
        launching_s = time.perf_counter() - start
        place.sync()
        profiled_s = time.perf_counter() - start
    averages = profiler.key_averages()
    sort = "self_device_time_total" if place.on_gpu else "self_cpu_time_total"
    # exclude host operations: their times include kernel times, which would count twice
    device = place.device.type.upper()
    own = [each for each in averages if each.device_type.name == device and not each.is_user_annotation]
    kernels = sorted(own, key=lambda each: -getattr(each, sort))
    busy_s = sum(getattr(each, sort) for each in own) / 1e6
    place.save_file("profile.txt", averages.table(sort_by=sort, row_limit=60).encode())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        place.save_file("trace.json.gz", gzip.compress(path.read_bytes()))
    place.report(
        "micro-batch",
        tokens=batch.num_tokens[0],
        ms=1000 * unprofiled_s,
        watched_ms=1000 * profiled_s,
        launching_ms=1000 * launching_s,
        busy_ms=1000 * busy_s,
        idle_share=max(0.0, 1 - busy_s / profiled_s),
        launches=sum(each.count for each in own if getattr(each, sort)),
    )
    for each in kernels[:25]:
        place.report(each.key[:100], ms=getattr(each, sort) / 1000, calls=each.count)


def launching(place: Place, shape: str = "1.5B") -> None:
    """Time a full micro-batch, and a micro-batch with few tokens, whose time is mostly kernel launches by the host.

    Then time all micro-batches of a step twice. The difference is the cost of lengths that occur for the first time.
    """
    learner = place.learner(shape)
    rows = place.rows(shape, 128, seed=5)
    shortest = min(rows, key=lambda row: len(row.token_ids))
    for name, chosen in (("full", rows), ("the shortest sample alone", [shortest])):
        batch = DeviceBatch(learner.batch(chosen).packed, place.device)
        fullest = max(range(len(batch.num_tokens)), key=batch.num_tokens.__getitem__)

        def run(batch: DeviceBatch = batch, m: int = fullest) -> None:
            forward_and_backward(learner, batch, m)

        place.report(name, tokens=batch.num_tokens[fullest], ms=1000 * place.seconds(run))
    batch = DeviceBatch(learner.batch(place.rows(shape, 128, seed=6)).packed, place.device)
    for name in ("all micro-batches of a step, new lengths", "the same micro-batches again"):
        place.sync()
        start = time.perf_counter()
        for m in range(len(batch.num_tokens)):
            forward_and_backward(learner, batch, m)
        place.sync()
        place.report(name, tokens=sum(batch.num_tokens), ms=1000 * (time.perf_counter() - start))


# --- copies ---------------------------------------------------------------------------------------


def copies(place: Place, shape: str = "1.5B") -> None:
    """Time the copy of a version and of a checkpoint, the optimizer, and a step during writes to disk."""
    learner = place.learner(shape)
    published = learner.policy.published_tensors(rounded=True)
    start = time.perf_counter()
    copy = HostCopy.like(published, ("bfloat16",))
    place.report("allocation for a version", seconds=time.perf_counter() - start)
    seconds = place.seconds(lambda: copy.fill(published), 3)
    _report_rate(place, "version to host", seconds, 2 * _numel(published.values()))
    learner.step(learner.batch(place.rows(shape, 8, seed=400)))
    networks: Networks = learner.networks
    state = TrainingState(0)
    start = time.perf_counter()
    state.prepare(networks)
    place.report("allocation for a checkpoint", seconds=time.perf_counter() - start, rss_gib=_rss_gib())
    size = sum(each.nbytes for each in state.take(networks).values())
    _report_rate(place, "checkpoint to host", place.seconds(lambda: state.take(networks), 3), size)
    _report_rate(place, "optimizer", *_optimizer(place, learner))
    alone = timed_steps(place, learner, shape, seed=500, num_sequences=48, num_steps=2, seconds=8.0)
    place.report("step alone", step_s=alone["step_s"])
    with tempfile.TemporaryDirectory(dir=place.folder) as folder, _Writer(copy, state, networks, Path(folder)):
        concurrent = timed_steps(place, learner, shape, seed=510, num_sequences=48, num_steps=2, seconds=8.0)
    place.report("step during writes of a checkpoint and a version", step_s=concurrent["step_s"])


def offloaded(place: Place, shape: str = "1.5B") -> None:
    """Time the copy of the reference model from pinned host memory to the GPU."""
    rule = PackingRule(4096)
    batches = [pack([row.token_ids], [row.prompt_length], rule) for row in place.rows(shape, 4, seed=1)]
    reference = place.reference(shape)
    size = sum(each.nbytes for each in reference.parameters())
    reference.offload()
    times_s = []
    for packed in batches:
        batch = DeviceBatch(packed, place.device)
        place.sync()
        start = time.perf_counter()
        reference.batch = batch
        place.sync()
        times_s.append(time.perf_counter() - start)
        reference.batch = None
        reference.release()
    _report_rate(place, "reference to GPU", statistics.median(times_s[1:]), size)


def _optimizer(place: Place, learner: Learner) -> tuple[float, int]:
    """Time clipping and AdamW; return the seconds, and the bytes that AdamW reads and writes (28 per parameter)."""
    (optimizer,) = learner.policy.optimizers
    for parameter in optimizer.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    seconds = place.seconds(lambda: optimizer.apply(1.0, 1e-12), 5)
    size = 28 * _numel(optimizer.parameters.values())
    optimizer.clear()
    return seconds, size


def _report_rate(place: Place, name: str, seconds: float, size: int) -> None:
    place.report(name, seconds=seconds, gb=size / 1e9, gb_per_s=size / seconds / 1e9)


def _numel(tensors: Iterable[torch.Tensor]) -> int:
    return sum(each.numel() for each in tensors)


def _rss_gib() -> float:
    return float(psutil.Process().memory_info().rss / 2**30)


class _Writer:
    """Thread that writes files like the publisher and checkpoints do, while steps are timed."""

    def __init__(self, copy: HostCopy, state: TrainingState, networks: Networks, folder: Path) -> None:
        self._tensors = state.take(networks)
        self._copy, self._folder = copy, folder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60.0)

    def _write(self) -> None:
        while not self._stop.is_set():
            with (self._folder / "version").open("wb") as file:
                file.write(self._copy.bytes_of("bfloat16"))
            for name, tensor in self._tensors.items():
                if self._stop.is_set():
                    return
                torch.save(tensor, self._folder / "tensor")
                assert name
            shutil.copyfileobj((self._folder / "version").open("rb"), (self._folder / "again").open("wb"))
