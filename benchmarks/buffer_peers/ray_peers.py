"""Measurements of a Ray actor that holds a list, and of `ray.util.queue`.

Settings: 32 trajectories per call. The actor has eight calls in flight; more calls are not faster. The queue uses its
batch calls `put_nowait_batch` and `get_nowait_batch`, which wait for their replies. Ray sends arguments above 100 KB
through its shared-memory object store, which is large enough for the whole workload. Dashboard and log forwarding are
off. Trajectories are sent once as `Trajectory` objects and once as plain dicts, and the faster form counts.
`push_plain_per_s` is the rate of the straightforward use: one object per call, and a wait for each reply.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from benchmarks.buffer_peers.mp_queue import as_dict
from benchmarks.buffer_peers.workload import (
    BATCH_TRAJECTORIES,
    PATIENCE_S,
    ROWS_PER_CALL,
    Figures,
    Workload,
    calls,
    rates,
    sampled,
)
from ray.util.queue import Queue

from leeway.buffer.schema import Trajectory

PUSHES_IN_FLIGHT = 8
SAMPLES_IN_FLIGHT = 2
NUM_SAMPLED_BATCHES = 60
PLAIN_PART = 16
"""Divisor: 1 / PLAIN_PART of the workload is pushed again with one trajectory per call."""
OBJECT_STORE_BYTES = 2 * 2**30

FORMS: dict[str, Callable[[Trajectory], Any]] = {"objects": lambda row: row, "dicts": as_dict}


class Holder:
    """Ray actor that holds a list of trajectories."""

    def __init__(self) -> None:
        self._rows: list[Any] = []
        self._rng = random.Random(0)

    def extend(self, rows: list[Any]) -> int:
        """Append rows; return the length of the list."""
        self._rows += rows
        return len(self._rows)

    def sample(self, num_rows: int) -> list[Any]:
        """Draw rows uniformly without replacement."""
        return self._rng.sample(self._rows, num_rows)


def measure_actor(work: Workload, folder: Path) -> Figures:
    """Push objects and dicts into the actor and sample them; the faster form of each operation counts."""
    start_ray(folder)
    rows = work.trajectories()
    found = {form: _use_actor(rows, convert) for form, convert in FORMS.items()}
    push_s = min(seconds for seconds, _ in found.values())
    sample_s = min(seconds for _, seconds in found.values())
    return (
        rates(work, push_s)
        | sampled(NUM_SAMPLED_BATCHES, NUM_SAMPLED_BATCHES * BATCH_TRAJECTORIES, sample_s)
        | {f"push_{form}_per_s": len(work) / seconds for form, (seconds, _) in found.items()}
        | {"push_plain_per_s": len(rows) // PLAIN_PART / _plainly(rows[: len(rows) // PLAIN_PART])}
    )


def start_ray(folder: Path) -> None:
    """Start a Ray cluster for this measurement."""
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )


def _use_actor(rows: list[Trajectory], convert: Callable[[Trajectory], Any]) -> tuple[float, float]:
    """Return the seconds for all pushes, and the seconds for sampling all batches."""
    holder = ray.remote(num_cpus=0)(Holder).remote()
    ray.get(holder.sample.remote(0), timeout=PATIENCE_S)
    started = time.perf_counter()
    pending: deque[Any] = deque()
    for call in calls(rows):
        pending.append(holder.extend.remote([convert(row) for row in call]))
        if len(pending) >= PUSHES_IN_FLIGHT:
            ray.get(pending.popleft(), timeout=PATIENCE_S)
    num_held = max(ray.get(list(pending), timeout=PATIENCE_S))
    push_s = time.perf_counter() - started
    if num_held != len(rows):
        raise RuntimeError(f"the actor holds {num_held} of {len(rows)} trajectories")

    started = time.perf_counter()
    pending = deque(holder.sample.remote(BATCH_TRAJECTORIES) for _ in range(SAMPLES_IN_FLIGHT))
    for left in range(NUM_SAMPLED_BATCHES - 1, -1, -1):
        batch = ray.get(pending.popleft(), timeout=PATIENCE_S)
        if len(pending) < left:
            pending.append(holder.sample.remote(BATCH_TRAJECTORIES))
        if len(batch) != BATCH_TRAJECTORIES:
            raise RuntimeError(f"the actor sampled {len(batch)} of {BATCH_TRAJECTORIES} trajectories")
    sample_s = time.perf_counter() - started
    ray.kill(holder)
    return push_s, sample_s


def _plainly(rows: list[Trajectory]) -> float:
    """Push one trajectory per call and wait for each reply; return the seconds."""
    holder = ray.remote(num_cpus=0)(Holder).remote()
    ray.get(holder.sample.remote(0), timeout=PATIENCE_S)
    started = time.perf_counter()
    for row in rows:
        ray.get(holder.extend.remote([row]), timeout=PATIENCE_S)
    seconds = time.perf_counter() - started
    ray.kill(holder)
    return seconds


def measure_queue(work: Workload, folder: Path) -> Figures:
    """Put all trajectories into the queue, then get them, as objects and as dicts; the faster form counts."""
    start_ray(folder)
    rows = work.trajectories()
    found = [_use_queue(rows, convert) for convert in FORMS.values()]
    part = rows[: len(rows) // PLAIN_PART]
    plain = Queue(actor_options={"num_cpus": 0})
    plain.qsize()  # wait until the actor of the queue is ready
    started = time.perf_counter()
    for row in part:
        plain.put(row)
    plain_s = time.perf_counter() - started
    plain.shutdown(force=True)
    push_s = min(seconds for seconds, _ in found)
    get_s = min(seconds for _, seconds in found)
    return (
        rates(work, push_s)
        | sampled(len(work) // ROWS_PER_CALL, len(work), get_s)
        | {"push_plain_per_s": len(part) / plain_s}
    )


def _use_queue(rows: list[Trajectory], convert: Callable[[Trajectory], Any]) -> tuple[float, float]:
    queue = Queue(actor_options={"num_cpus": 0})
    queue.qsize()  # wait until the actor of the queue is ready
    started = time.perf_counter()
    for call in calls(rows):
        queue.put_nowait_batch([convert(row) for row in call])
    push_s = time.perf_counter() - started
    started = time.perf_counter()
    num_rows = 0
    while num_rows < len(rows):
        num_rows += len(queue.get_nowait_batch(min(ROWS_PER_CALL, len(rows) - num_rows)))
    get_s = time.perf_counter() - started
    queue.shutdown(force=True)
    return push_s, get_s
