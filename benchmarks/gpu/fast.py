"""How fast is it? Steps on fresh batches, what choices of the config cost, a micro-batch by its kernels, copies."""

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
from torch.profiler import ProfilerActivity

from benchmarks.gpu.counting import AttentionCall, Counting
from benchmarks.gpu.place import Place
from benchmarks.gpu.shapes import model_flops, peak_of
from benchmarks.lib.learner import Learner
from learner.checkpoint import TrainingState
from learner.model import DeviceBatch
from learner.networks import Networks
from learner.packing import PackingRule, pack
from learner.pipeline import OutOfMemory
from weight_sync.tensors import HostCopy

SECONDS = 30.0
"""Of steps that are measured in one step of the rehearsal, about."""
WARM_UP = 2
NUM_STEPS = 8
MFU_WANTED = 0.45


# --- steps ----------------------------------------------------------------------------------------


def baseline(place: Place, shape: str = "1.5B") -> None:
    """Steps in one pass, as the learner is; every one of them on a batch of its own."""
    learner = place.learner(shape)
    memory = psutil.Process()
    rss = memory.memory_info().rss
    found = timed_steps(place, learner, shape, seed=100)
    grown = (memory.memory_info().rss - rss) / 2**20
    is_fused = learner.policy.modules[-1].rule.is_fused
    place.tell("steps", shape=place.shape(shape)[0], fused_kernels=is_fused, **found, rss_grew_mib=grown)
    seen: set[AttentionCall] = set()
    for number in range(2):
        batch = learner.batch(place.rows(shape, 64, seed=200 + number))
        with Counting(place.device) as counting:
            learner.step(batch)
        new = counting.attention_shapes - seen
        seen |= counting.attention_shapes
        place.tell(
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
    """Steps until the time is over, at least one that counts; each packs and trains samples that none had before."""
    taken: list[float] = []
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
        taken.append(step_s)
        rates.append(sum(len(row.token_ids) for row in rows) / step_s)
        mfu += [model_flops(known, rows) / step_s / peak] if peak else []
        if time.perf_counter() - began > seconds:
            break
    return {
        "steps": len(taken),
        "step_s": statistics.median(taken),
        "slowest_s": max(taken),
        "tokens_per_s": statistics.median(rates),
        "mfu": statistics.median(mfu) if mfu else None,
        "packing_s": statistics.median(packing),
        "micro_batches": batch.packed.num_micro_batches,
        **place.peak(),
    }


def sweep(place: Place, shape: str = "1.5B") -> None:
    """One choice after another away from the first; a variant that does not fit says so."""
    variants: list[tuple[str, dict[str, Any], float | None, bool]] = [
        ("as it is", {}, None, True),
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
            found = timed_steps(
                place, learner, shape, seed=300, num_sequences=48, num_steps=3, seconds=9.0, one_pass=one_pass
            )
        except OutOfMemory as error:
            place.tell(name, out_of_memory=str(error)[:300], **place.peak())
        else:
            place.tell(name, **found)
        del learner


def set_chunk(learner: Learner, chunk_mib: float) -> None:
    """Let the head hold so many logits at a time."""
    last = learner.policy.modules[-1]
    last.rule = replace(last.rule, chunk_mib=chunk_mib)


# --- one micro-batch ------------------------------------------------------------------------------


def micro_batch(place: Place, learner: Learner, shape: str, seed: int) -> DeviceBatch:
    """The samples of a full micro-batch."""
    batch = learner.batch(place.rows(shape, 24, seed))
    return DeviceBatch(batch.packed, place.device)


def forward_and_backward(learner: Learner, batch: DeviceBatch, m: int = 0) -> None:
    """One micro-batch, by the stage itself; its gradients are forgotten."""
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
    """Kernels of one micro-batch by time; the table and a trace lie beside the results."""
    learner = place.learner(shape)
    for seed in (1, 2):
        forward_and_backward(learner, micro_batch(place, learner, shape, seed))
    batch = micro_batch(place, learner, shape, 3)
    unwatched_s = place.seconds(lambda: forward_and_backward(learner, batch))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if place.on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        start = time.perf_counter()
        forward_and_backward(learner, batch)
        launched = time.perf_counter() - start
        place.sync()
        whole = time.perf_counter() - start
    averages = profiler.key_averages()
    sort = "self_device_time_total" if place.on_gpu else "self_cpu_time_total"
    # an operation of the host has the time of its kernels too, which would count twice
    where = place.device.type.upper()
    own = [each for each in averages if each.device_type.name == where and not each.is_user_annotation]
    kernels = sorted(own, key=lambda each: -getattr(each, sort))
    busy_s = sum(getattr(each, sort) for each in own) / 1e6
    place.keep("profile.txt", averages.table(sort_by=sort, row_limit=60).encode())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        place.keep("trace.json.gz", gzip.compress(path.read_bytes()))
    place.tell(
        "micro-batch",
        tokens=batch.num_tokens[0],
        ms=1000 * unwatched_s,
        watched_ms=1000 * whole,
        launching_ms=1000 * launched,
        busy_ms=1000 * busy_s,
        idle_share=max(0.0, 1 - busy_s / whole),
        launches=sum(each.count for each in own if getattr(each, sort)),
    )
    for each in kernels[:25]:
        place.tell(each.key[:100], ms=getattr(each, sort) / 1000, calls=each.count)


def launching(place: Place, shape: str = "1.5B") -> None:
    """A full micro-batch, and one of a few tokens, which takes as long as the host needs to launch its kernels.

    Then all micro-batches of a step, whose lengths differ, twice: what a length costs when it is new.
    """
    learner = place.learner(shape)
    rows = place.rows(shape, 128, seed=5)
    shortest = min(rows, key=lambda row: len(row.token_ids))
    for name, chosen in (("full", rows), ("the shortest sample alone", [shortest])):
        batch = DeviceBatch(learner.batch(chosen).packed, place.device)
        fullest = max(range(len(batch.num_tokens)), key=batch.num_tokens.__getitem__)

        def run(batch: DeviceBatch = batch, m: int = fullest) -> None:
            forward_and_backward(learner, batch, m)

        place.tell(name, tokens=batch.num_tokens[fullest], ms=1000 * place.seconds(run))
    batch = DeviceBatch(learner.batch(place.rows(shape, 128, seed=6)).packed, place.device)
    for name in ("every micro-batch of a step, its lengths new", "the same again"):
        place.sync()
        start = time.perf_counter()
        for m in range(len(batch.num_tokens)):
            forward_and_backward(learner, batch, m)
        place.sync()
        place.tell(name, tokens=sum(batch.num_tokens), ms=1000 * (time.perf_counter() - start))


# --- copies ---------------------------------------------------------------------------------------


def copies(place: Place, shape: str = "1.5B") -> None:
    """What a version and a checkpoint move, and what a step loses beside them."""
    learner = place.learner(shape)
    published = learner.policy.published_tensors(rounded=True)
    start = time.perf_counter()
    copy = HostCopy.like(published, ("bfloat16",))
    place.tell("room for a version", seconds=time.perf_counter() - start)
    _tell_rate(place, "version to host", place.seconds(lambda: copy.fill(published), 3), 2 * _numel(published.values()))
    learner.step(learner.batch(place.rows(shape, 8, seed=400)))
    networks: Networks = learner.networks
    state = TrainingState(0)
    start = time.perf_counter()
    state.prepare(networks)
    place.tell("room for a checkpoint", seconds=time.perf_counter() - start, rss_gib=_rss_gib())
    size = sum(each.nbytes for each in state.take(networks).values())
    _tell_rate(place, "checkpoint to host", place.seconds(lambda: state.take(networks), 3), size)
    _tell_rate(place, "optimizer", *_optimizer(place, learner))
    alone = timed_steps(place, learner, shape, seed=500, num_sequences=48, num_steps=2, seconds=8.0)
    place.tell("step alone", step_s=alone["step_s"])
    with tempfile.TemporaryDirectory(dir=place.folder) as folder, _Writing(copy, state, networks, Path(folder)):
        beside = timed_steps(place, learner, shape, seed=510, num_sequences=48, num_steps=2, seconds=8.0)
    place.tell("step beside a checkpoint and a version on their way to disk", step_s=beside["step_s"])


def offloaded(place: Place, shape: str = "1.5B") -> None:
    """How long the reference takes to the GPU, from pinned memory of the host."""
    rule = PackingRule(4096)
    batches = [pack([row.token_ids], [row.prompt_length], rule) for row in place.rows(shape, 4, seed=1)]
    reference = place.reference(shape)
    size = sum(each.nbytes for each in reference.parameters())
    reference.offload()
    taken = []
    for packed in batches:
        batch = DeviceBatch(packed, place.device)
        place.sync()
        start = time.perf_counter()
        reference.batch = batch
        place.sync()
        taken.append(time.perf_counter() - start)
        reference.batch = None
        reference.release()
    _tell_rate(place, "reference to GPU", statistics.median(taken[1:]), size)


def _optimizer(place: Place, learner: Learner) -> tuple[float, int]:
    """Seconds of clipping and AdamW, and what AdamW alone reads and writes: 28 bytes of each parameter."""
    (optimizer,) = learner.policy.optimizers
    for parameter in optimizer.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    taken = place.seconds(lambda: optimizer.apply(1.0, 1e-12), 5)
    size = 28 * _numel(optimizer.parameters.values())
    optimizer.clear()
    return taken, size


def _tell_rate(place: Place, name: str, seconds: float, size: int) -> None:
    place.tell(name, seconds=seconds, gb=size / 1e9, gb_per_s=size / seconds / 1e9)


def _numel(tensors: Iterable[torch.Tensor]) -> int:
    return sum(each.numel() for each in tensors)


def _rss_gib() -> float:
    return float(psutil.Process().memory_info().rss / 2**30)


class _Writing:
    """A thread that copies and writes, as the publisher's and the checkpoint's do, while steps are measured."""

    def __init__(self, copy: HostCopy, state: TrainingState, networks: Networks, folder: Path) -> None:
        self._taken = state.take(networks)
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
            for name, tensor in self._taken.items():
                if self._stop.is_set():
                    return
                torch.save(tensor, self._folder / "tensor")
                assert name
            shutil.copyfileobj((self._folder / "version").open("rb"), (self._folder / "again").open("wb"))
