"""Measurements of Leeway's buffer: `python -m tests.world.buffer_process` and a BufferClient.

Settings: the default durability, 32 trajectories per call of `push_many`, and groups of 8. The client coalesces
messages up to 1 MiB. A push counts when its future returns 'committed', which is after the synced commit. For
`push_plain_per_s`, each call has one trajectory and one future, like the calls of actors.
"""

from __future__ import annotations

import re
import shutil
import statistics
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import chain
from pathlib import Path

from benchmarks.buffer_peers.service import LEASES_PER_REQUEST, Service, config_for, facts_for, lease_all, steps_for
from benchmarks.buffer_peers.workload import (
    BATCH_TRAJECTORIES,
    GROUP_SIZE,
    PATIENCE_S,
    Figures,
    Workload,
    calls,
    rates,
    sampled,
)

from leeway.buffer import schema
from leeway.buffer.client import Batch, BufferClient
from leeway.buffer.protocol import STAGES, Done, Lease, RowResult
from leeway.buffer.rows import flat_values
from leeway.buffer.schema import Trajectory
from leeway.common.run import RunFacts

LONE_GROUPS = 8
HALF_LOAD_PART = 4
"""Divisor: 1 / HALF_LOAD_PART of the workload is pushed again at half of the measured rate."""
DRAWS_IN_FLIGHT = 2
NUM_SAMPLED_BATCHES = 60
LEASES_AHEAD = 128
"""Number of groups leased at a time while a store is filled; with 32 groups per step, admission allows this number."""


def measure(work: Workload, folder: Path) -> Figures:
    """Push the workload with leases requested in advance, push it with leasing in the timed part, and draw it."""
    figures = _push(work, folder / "push")
    figures |= _push_with_leasing(work, folder / "leasing")
    figures |= _sample(work, folder / "sample")
    return figures


def count_syncs(work: Workload, folder: Path) -> Figures:
    """Count commits and sync system calls per 1,000 trajectories; counting the system calls requires `strace`."""
    tracer = shutil.which("strace")
    trace = folder / "syncs.txt"
    calls = "fsync,fdatasync,msync,sync_file_range"
    under = [tracer, "-f", "-qq", "-e", f"trace={calls}", "-o", str(trace)] if tracer else []
    with Service(folder / "store", _facts(work), config_for(), under=under) as service:
        learner, actor = service.begin(), service.client("actor-0")
        rows = work.leased(lease_all(actor, len(work) // GROUP_SIZE))
        commits, syncs = service.num_commits(), _count_calls(trace)
        push_all(actor, rows)
        commits, syncs = service.num_commits() - commits, _count_calls(trace) - syncs
        actor.close()
        learner.close()
    per_thousand = 1000 / len(work)
    return {
        "commits_per_1000": commits * per_thousand,
        "fsync_calls_per_1000": syncs * per_thousand if tracer else None,
    }


def push_all(actor: BufferClient, rows: list[Trajectory], latencies_s: list[float] | None = None) -> None:
    """Push trajectories and wait until all are acknowledged as committed.

    Raises:
        RuntimeError: a trajectory was not committed.
    """
    futures: list[Future[list[RowResult]]] = []
    for call in calls(rows):
        pushed_at = time.perf_counter()
        future = actor.push_many(call)
        futures.append(future)
        if latencies_s is not None:
            _time(future, pushed_at, latencies_s)
    check(futures)


def check(futures: Sequence[Future[list[RowResult]]]) -> None:
    """Wait for all acknowledgements.

    Raises:
        RuntimeError: a trajectory was not committed.
    """
    for future in futures:
        for result in future.result(PATIENCE_S):
            if result.outcome != "committed":
                raise RuntimeError(f"a trajectory was not committed: {result}")


def _facts(work: Workload) -> RunFacts:
    """Return facts of a run whose admission is open for the whole workload and all further pushes."""
    return facts_for(steps_for(len(work) // GROUP_SIZE * 2 + LONE_GROUPS))


def _push(work: Workload, folder: Path) -> Figures:
    """Push with leases requested in advance; then measure the latency at half of that rate and of single pushes."""
    latencies_s: list[float] = []
    with Service(folder, _facts(work), config_for()) as service:
        learner, actor = service.begin(), service.client("actor-0")
        rows = work.leased(lease_all(actor, len(work) // GROUP_SIZE))
        commits, spent_s = service.num_commits(), learner.status().result(PATIENCE_S).spent_s
        started = time.perf_counter()
        push_all(actor, rows, latencies_s)
        seconds = time.perf_counter() - started
        commits = service.num_commits() - commits
        stages = learner.status().result(PATIENCE_S).spent_s
        stages_us = {stage: 1e6 * (stages[stage] - spent_s[stage]) / len(rows) for stage in STAGES}
        plain = work.leased(_some_leases(work, actor))
        started = time.perf_counter()
        pushed = [actor.push(row) for row in plain]
        for each in pushed:
            each.result(PATIENCE_S)
        plain_per_s = len(plain) / (time.perf_counter() - started)
        at_half = _at_rate(actor, work.leased(_some_leases(work, actor)), len(rows) / seconds / 2)
        lone = _lone(actor, work.leased(lease_all(actor, LONE_GROUPS)))
        actor.close()
        learner.close()
    return rates(work, seconds) | {
        "push_plain_per_s": plain_per_s,
        **{f"push_us_{stage}": microseconds for stage, microseconds in stages_us.items()},
        "commits_per_s": commits / seconds,
        "commits_per_1000": 1000 * commits / len(rows),
        "ack_ms_saturated": 1000 * statistics.median(latencies_s),
        "ack_ms_half_load": 1000 * at_half,
        "ack_ms_lone": 1000 * lone,
    }


def _some_leases(work: Workload, actor: BufferClient) -> list[Lease]:
    return lease_all(actor, max(1, len(work) // GROUP_SIZE // HALF_LOAD_PART))


def _at_rate(actor: BufferClient, rows: list[Trajectory], per_s: float) -> float:
    """Push groups at a constant rate; return the median seconds from a push to its acknowledgement."""
    latencies_s: list[float] = []
    futures = []
    started = time.perf_counter()
    for i, row in enumerate(rows):
        if i % GROUP_SIZE == 0:
            time.sleep(max(0.0, started + i / per_s - time.perf_counter()))
        pushed_at = time.perf_counter()
        future = actor.push_many([row])
        futures.append(future)
        _time(future, pushed_at, latencies_s)
    check(futures)
    return statistics.median(latencies_s)


def _lone(actor: BufferClient, rows: list[Trajectory]) -> float:
    """Push with one push in flight at a time; return the median seconds from a push to its acknowledgement."""
    latencies_s = []
    for row in rows:
        started = time.perf_counter()
        check([actor.push_many([row])])
        latencies_s.append(time.perf_counter() - started)
    return statistics.median(latencies_s)


def _time(future: Future[list[RowResult]], pushed_at: float, latencies_s: list[float]) -> None:
    future.add_done_callback(lambda _: latencies_s.append(time.perf_counter() - pushed_at))


def _push_with_leasing(work: Workload, folder: Path) -> Figures:
    """Push with leases requested in the timed part; each request is sent while the previous groups are pushed."""
    with Service(folder, _facts(work), config_for()) as service:
        learner, actor = service.begin(), service.client("actor-0")
        futures = []
        num_groups = len(work) // GROUP_SIZE
        started = time.perf_counter()
        leased = 0
        ahead = actor.lease(LEASES_PER_REQUEST)
        while leased < num_groups:
            leases = ahead.result(PATIENCE_S).leases[: num_groups - leased]
            ahead = actor.lease(LEASES_PER_REQUEST)
            first, leased = leased * GROUP_SIZE, leased + len(leases)
            samples = chain.from_iterable([(lease, index) for index in lease.sample_indices] for lease in leases)
            rows = [work.trajectory(first + i, *sample) for i, sample in enumerate(samples)]
            futures += [actor.push_many(call) for call in calls(rows)]
        check(futures)
        seconds = time.perf_counter() - started
        actor.close()
        learner.close()
    return rates(work, seconds, name="push_with_leasing")


# --- drawing --------------------------------------------------------------------------------------


def _sample(work: Workload, folder: Path) -> Figures:
    """Draw batches uniformly and with reuse from the whole workload, with two draws in flight.

    The client decodes each batch to Arrow columns and NumPy views, and reports its step as finished.
    """
    config = config_for(sampler="uniform", max_uses="unlimited")
    groups_per_step = BATCH_TRAJECTORIES // GROUP_SIZE
    with Service(folder, facts_for(groups_per_step), config) as service:
        learner, actor = service.begin(), service.client("actor-0")
        fill(actor, work, len(work))
        started = time.perf_counter()
        num_drawn = draw_steps(learner, 0, NUM_SAMPLED_BATCHES, groups_per_step)
        seconds = time.perf_counter() - started
        actor.close()
        learner.close()
    return sampled(NUM_SAMPLED_BATCHES, num_drawn, seconds)


def fill(actor: BufferClient, work: Workload, num_trajectories: int, *, first: int = 0) -> None:
    """Push trajectories of the workload repeatedly, and request leases as needed.

    Args:
        actor: client that pushes.
        work: workload; the i-th pushed trajectory is trajectory `i % len(work)` of the workload.
        num_trajectories: number of trajectories to push, rounded down to whole groups.
        first: index in the workload at which to start.
    """
    pushed = 0
    while pushed + GROUP_SIZE <= num_trajectories:
        leases = lease_all(actor, min(LEASES_AHEAD, (num_trajectories - pushed) // GROUP_SIZE))
        samples = [(lease, index) for lease in leases for index in lease.sample_indices]
        numbers = range(first + pushed, first + pushed + len(samples))
        rows = [work.trajectory(i % len(work), *sample) for i, sample in zip(numbers, samples, strict=True)]
        push_all(actor, rows)
        pushed += len(rows)


def draw_steps(learner: BufferClient, done: int, num_steps: int, groups_per_step: int) -> int:
    """Draw the steps after `done` with one draw ahead; return the number of trajectories.

    Like the learner, the loop does not wait until the service acknowledges a finished step.

    Raises:
        RuntimeError: a batch was not ready.
    """
    ahead: deque[Future[Batch]] = deque()
    finished: list[Future[Done]] = []
    requested, num_trajectories = done, 0
    for step in range(done + 1, done + num_steps + 1):
        while requested < done + num_steps and len(ahead) < DRAWS_IN_FLIGHT:
            requested += 1
            ahead.append(learner.draw(requested, requested - 1, 0, groups_per_step, PATIENCE_S))
        draw = ahead.popleft().result(PATIENCE_S)
        if not draw.ready:
            raise RuntimeError(f"step {step} cannot be drawn: {draw.waiting_for}")
        num_trajectories += open_batch(draw.body)
        finished.append(learner.step_finished(step, step))
    for each in finished:
        each.result(PATIENCE_S)
    return num_trajectories


def open_batch(body: bytes | memoryview) -> int:
    """Decode a batch to NumPy views of its columns; return the number of trajectories."""
    batch = schema.read_stream(body)
    for name in ("token_ids", "logprobs"):
        values, bounds = flat_values(batch.column(schema.SCHEMA.get_field_index(name)))
        if bounds[-1] != len(values):
            raise RuntimeError(f"column '{name}' of a batch is truncated: its values do not match its offsets")
    return int(batch.num_rows)


def _count_calls(trace: Path) -> int:
    """Return the number of system calls in a trace; a call that is split over two lines counts once."""
    if not trace.exists():
        return 0
    return sum(1 for line in trace.read_text().splitlines() if re.match(r"^\d+ +\w+\(", line))
