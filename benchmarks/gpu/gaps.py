"""Time of a learner step outside its micro-batches, and clocks and power of the card during the step."""

from __future__ import annotations

import collections
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from benchmarks.gpu.fast import WARM_UP, forward_and_backward
from benchmarks.gpu.place import Place
from benchmarks.gpu.shapes import model_flops, peak_of
from benchmarks.lib.learner import Learner
from torch.profiler import ProfilerActivity

from leeway.learner.batch import StepBatch
from leeway.learner.model import DeviceBatch

NUM_STEPS, NUM_AGAIN, NUM_ALONE, NUM_SEQUENCES = 8, 5, 10, 128
NUM_KERNELS = 25
FIELDS = "clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"
EVERY_MS = 200
END_S = 5.0
BOUNDS_US = (0.0, 5.0, 20.0, 100.0, 1e3, 1e4, float("inf"))
"""Bounds of the classes of gaps between kernels by length, in microseconds."""


class Watch:
    """Sampler of clocks and power of the card, which changes no settings of the card."""

    def __init__(self, *, on_gpu: bool) -> None:
        """Start `nvidia-smi` if `on_gpu`; on a CPU, no samples are taken."""
        self._rows: list[tuple[float, list[str]]] = []
        self._process: subprocess.Popen[str] | None = None
        if on_gpu:
            command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits", "-lms", str(EVERY_MS)]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, args=[self._process], daemon=True).start()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_S)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._rows.append((time.perf_counter(), [cell.strip() for cell in line.split(",")]))

    def since(self, start_s: float) -> dict[str, Any]:
        """Return medians of clock, power and temperature since a time, and how often each reason limited the clock."""
        rows = [row for time_s, row in self._rows if time_s >= start_s and len(row) == FIELDS.count(",") + 1]
        if not rows:
            return {}
        mhz, watts, celsius = (statistics.median(float(row[k]) for row in rows) for k in range(3))
        reasons = collections.Counter(row[3] for row in rows)
        return {"sm_mhz": mhz, "watts": watts, "celsius": celsius, "held_back_by": reasons}


class Step(NamedTuple):
    """Duration of a learner step, in seconds."""

    seconds: float
    parts: dict[str, float]
    """Seconds of passes, loss and optimizer, from the metrics of the learner."""
    mfu: float | None


def gaps(place: Place, shape: str = "1.5B") -> None:
    """Time steps on new batches, repeated steps on the last batch, kernels of one step, and a single micro-batch."""
    learner = place.learner(shape)
    with Watch(on_gpu=place.on_gpu) as watch:
        for number in range(WARM_UP):
            _step(place, learner, shape, seed=100 + number)
        began_s = time.perf_counter()
        steps = []
        for number in range(NUM_STEPS):
            step, batch = _step(place, learner, shape, seed=200 + number)
            steps.append(step)
        place.report("fresh batches", **_medians(steps), **watch.since(began_s), **place.peak())
        began_s = time.perf_counter()
        again = [_step(place, learner, shape, seed=200 + NUM_STEPS - 1)[0] for _ in range(NUM_AGAIN)]
        place.report("the last batch again", **_medians(again), first_s=steps[-1].seconds, **watch.since(began_s))
        began_s = time.perf_counter()
        kind = ProfilerActivity.CUDA if place.on_gpu else ProfilerActivity.CPU
        with torch.profiler.profile(activities=[kind]) as profiler:
            step, batch = _step(place, learner, shape, seed=300)
        _report_kernels(place, profiler, step, watch.since(began_s))
        began_s = time.perf_counter()
        on_device = DeviceBatch(batch.packed, place.device)
        seconds = place.seconds(lambda: forward_and_backward(learner, on_device), NUM_ALONE)
        tokens = on_device.num_tokens[0]
        place.report("a micro-batch alone", tokens=tokens, ms=1000 * seconds, **watch.since(began_s))


def _step(place: Place, learner: Learner, shape: str, *, seed: int) -> tuple[Step, StepBatch]:
    """Train on one batch, which the seed determines."""
    rows = place.rows(shape, NUM_SEQUENCES, seed)
    batch = learner.batch(rows)
    peak = peak_of(torch.cuda.get_device_name()) if place.on_gpu else None
    place.sync()
    start_s = time.perf_counter()
    result = learner.result(batch)
    place.sync()
    seconds = time.perf_counter() - start_s
    parts = {name: value for name, value in result.metrics.items() if name.startswith("time/") and value is not None}
    mfu = model_flops(place.shape(shape)[1], rows) / seconds / peak if peak else None
    return Step(seconds, parts, mfu), batch


def _medians(steps: list[Step]) -> dict[str, Any]:
    known = [step.mfu for step in steps if step.mfu is not None]
    return {
        "steps": len(steps),
        "step_s": statistics.median(step.seconds for step in steps),
        "slowest_s": max(step.seconds for step in steps),
        "mfu": statistics.median(known) if known else None,
        **{name: statistics.median(step.parts[name] for step in steps) for name in steps[0].parts},
        "rest_s": statistics.median(step.seconds - sum(step.parts.values()) for step in steps),
    }


def _report_kernels(place: Place, profiler: torch.profiler.profile, step: Step, clock: dict[str, Any]) -> None:
    events = [each for each in profiler.events() or [] if each.device_type.name == place.device.type.upper()]
    spans = [(each.time_range.start, each.time_range.end) for each in events if each.time_range.elapsed_us() > 0]
    place.report("one step by its kernels", step_s=step.seconds, launches=len(spans), **idle(spans), **clock)
    by_kernel: dict[str, list[float]] = collections.defaultdict(list)
    for each in events:
        by_kernel[each.name].append(each.time_range.elapsed_us() / 1000)
    for name, ms in sorted(by_kernel.items(), key=lambda item: -sum(item[1]))[:NUM_KERNELS]:
        place.report(name[:90], ms=sum(ms), calls=len(ms))


def idle(spans: Iterable[tuple[float, float]]) -> dict[str, Any]:
    """Return the seconds with and without a running kernel, and the milliseconds of gaps by length class.

    Args:
        spans: start and end of each kernel in microseconds; overlapping kernels count once.
    """
    busy_us, gaps_us, end = 0.0, [], None
    for start, stop in sorted(spans):
        if end is not None and start > end:
            gaps_us.append(start - end)
        busy_us += max(0.0, stop - max(start, start if end is None else end))
        end = stop if end is None else max(end, stop)
    classes = {
        f"{low:g} to {high:g} us": round(sum(gap for gap in gaps_us if low <= gap < high) / 1000, 2)
        for low, high in pairwise(BOUNDS_US)
    }
    return {"busy_s": busy_us / 1e6, "idle_s": sum(gaps_us) / 1e6, "idle_ms": classes}
