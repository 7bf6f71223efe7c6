"""Measurements of Leeway's buffer at scale: many clients, draws from a large store, memory over time, and a restart."""

from __future__ import annotations

import gc
import os
import statistics
import threading
import time
import traceback
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.buffer_peers.leeway import LEASES_AHEAD, draw_steps, fill, push_all
from benchmarks.buffer_peers.service import RUN_ID, Service, config_for, facts_for, lease_all, steps_for
from benchmarks.buffer_peers.workload import BATCH_TRAJECTORIES, GROUP_SIZE, PATIENCE_S, Figures, Workload, expect

from leeway.buffer import schema
from leeway.buffer.client import BufferClient
from leeway.buffer.config import BufferConfig
from leeway.buffer.schema import Trajectory, VersionSpan
from leeway.common.rpc.messages import Role
from leeway.common.staleness import PolicyVersion

NUM_CLIENTS = 64
ROWS_PER_CLIENT = {False: 512, True: 64}
"""Value of `quick` -> number of trajectories per client."""


def measure_clients(quick: bool, folder: Path) -> Figures:
    """Measure the throughput of 64 client processes that push at the same time, without engines.

    Each client has its own connection, leases and trajectories, and all clients push the same number. Clients are
    forked from one small process, start together, and report the time of their last acknowledgement. A client's rate is
    its number of trajectories divided by its own time. Fairness is given as the slowest rate over the mean, and as
    Jain's index of the rates: 1 if all rates are equal, 1/64 if the service serves only one client. The service's
    memory is also reported.
    """
    num_rows = ROWS_PER_CLIENT[quick]
    work = Workload.make(num_rows)
    seconds, wall_s, before, peak = _push_at_once(work, folder)
    client_rates = [num_rows / each for each in seconds]
    mean = sum(client_rates) / NUM_CLIENTS
    return {
        "num_clients": NUM_CLIENTS,
        "push_per_s": NUM_CLIENTS * num_rows / wall_s,
        "push_mb_per_s": NUM_CLIENTS * work.num_bytes / 1e6 / wall_s,
        "jain": sum(client_rates) ** 2 / (NUM_CLIENTS * sum(rate**2 for rate in client_rates)),
        "slowest_over_mean": min(client_rates) / mean,
        "service_rss_anon_mib_before": before / 2**20,
        "service_rss_anon_mib_after": peak / 2**20,
    }


def _push_at_once(work: Workload, folder: Path) -> tuple[list[float], float, int, int]:
    """Push the workload from many processes, each with its own leases.

    Returns:
        Seconds of each client, seconds until the last client finished, and the service's anonymous memory in bytes
        before and after the pushes.
    """
    facts = facts_for(steps_for(NUM_CLIENTS * len(work) // GROUP_SIZE))
    context = get_context("fork")
    with ExitStack() as stack:
        service = stack.enter_context(Service(folder / "store", facts, config_for()))
        before = service.rss_anon_bytes()
        pipes = [context.Pipe() for _ in range(NUM_CLIENTS)]  # before this process starts a thread
        schema.encode([work.trajectory(0)], RUN_ID)  # Arrow imports modules at first use: encode once before the fork
        gc.freeze()  # without this, every child copies all pages at its first garbage collection
        children = [
            context.Process(target=_client, args=(theirs, service.address, service.config, work, i), daemon=True)
            for i, (_, theirs) in enumerate(pipes)
        ]
        for child in children:
            child.start()
            stack.callback(child.join, PATIENCE_S)
            stack.callback(child.terminate)
        learner = _open(service.address, "learner", "learner", service.config)
        learner.begin_incarnation(0, 0).result(PATIENCE_S)
        learner.published(0, 0).result(PATIENCE_S)
        seconds, wall_s = _let_run([ours for ours, _ in pipes])
        peak = service.rss_anon_bytes()
        learner.close()
    return seconds, wall_s, before, peak


def _open(address: str, name: str, role: Role, config: BufferConfig) -> BufferClient:
    client = BufferClient(address, run_id=RUN_ID, role=role, name=name)
    client.connect()
    return client


def _let_run(pipes: list[Connection]) -> tuple[list[float], float]:
    """Start all clients when all are ready; return the seconds of each, and the seconds until the last one finishes."""
    for pipe in pipes:
        pipe.send("lease")
    for pipe in pipes:
        _receive_seconds(pipe)
    started = time.perf_counter()
    for pipe in pipes:
        pipe.send("push")
    seconds = [_receive_seconds(pipe) for pipe in pipes]
    return seconds, time.perf_counter() - started


def _receive_seconds(pipe: Connection) -> float:
    received = expect(pipe)
    if not isinstance(received, float):
        raise TypeError(f"a client failed: {received}")
    return received


def _client(pipe: Connection, address: str, config: BufferConfig, work: Workload, number: int) -> None:
    """Run a client in this process."""
    try:
        expect(pipe)
        actor = _open(address, f"actor-{number}", "actor", config)
        rows = work.leased(lease_all(actor, len(work) // GROUP_SIZE))
        pipe.send(0.0)
        expect(pipe)
        started = time.perf_counter()
        push_all(actor, rows)
        pipe.send(time.perf_counter() - started)
        actor.close()
    except Exception:  # any error is reported to the parent
        pipe.send(traceback.format_exc())
    os._exit(0)  # skip the parent's cleanup handlers


SAMPLERS = {"reward": "reward_softmax", "age": "prioritised"}
SIZES = {False: (10_000, 1_000_000), True: (10_000, 50_000)}
"""Value of `quick` -> numbers of stored trajectories at which draws are timed."""
SHORT_TOKENS = 32
NUM_VERSIONS = 50
WARM_UP_DRAWS = 10
TIMED_DRAWS = 100
DRAWN_GROUPS = BATCH_TRAJECTORIES // GROUP_SIZE


def measure_draws(quick: bool, folder: Path) -> Figures:
    """Measure the cost of a draw as the store grows from 10,000 to 1,000,000 trajectories of 32 tokens.

    Returns the median milliseconds of a draw for the reward sampler and the age sampler, with reuse. One service is
    filled, measured, filled further, and measured again. Trajectories come from 50 versions and have random rewards. A
    batch has 256 trajectories. The time of a draw runs from the request to the reply with its records, and does not
    include the end of the step.
    """
    figures: Figures = {}
    for name, sampler in SAMPLERS.items():
        small, large = _measure_sampler(sampler, SIZES[quick], folder / name)
        figures |= {f"draw_ms_{name}_small": small, f"draw_ms_{name}_large": large, f"draw_cost_{name}": large / small}
    worst = max(figures[f"draw_cost_{name}"] for name in SAMPLERS)
    figures["sizes"] = list(SIZES[quick])
    figures["draw_cost_quick" if quick else "draw_cost_1e6_over_1e4"] = worst
    return figures


def _measure_sampler(sampler: str, sizes: tuple[int, int], folder: Path) -> tuple[float, float]:
    work = Workload.make(sizes[0], fixed_tokens=SHORT_TOKENS)
    config = config_for(sampler=sampler, max_uses="unlimited", capacity_trajectories=2 * sizes[1])
    found = []
    with Service(folder, facts_for(DRAWN_GROUPS), config) as service:
        learner, actor = service.begin(), service.client("actor-0")
        learner.published(0, NUM_VERSIONS).result(PATIENCE_S)
        num_stored = 0
        for i, size in enumerate(sizes):
            while num_stored < size:
                num_stored += _push_some(actor, work, num_stored, size)
            found.append(_draw_ms(learner, i * (WARM_UP_DRAWS + TIMED_DRAWS)))
        actor.close()
        learner.close()
    return found[0], found[1]


def _push_some(actor: BufferClient, work: Workload, num_stored: int, goal: int) -> int:
    """Push groups whose policy versions increase evenly up to the goal; return the number of trajectories."""
    leases = lease_all(actor, min(LEASES_AHEAD, (goal - num_stored) // GROUP_SIZE))
    version = PolicyVersion(0, num_stored * NUM_VERSIONS // goal)
    samples = [(lease, index) for lease in leases for index in lease.sample_indices]
    rows = [
        _of_version(work.trajectory((num_stored + i) % len(work), *sample), version) for i, sample in enumerate(samples)
    ]
    push_all(actor, rows)
    return len(rows)


def _of_version(row: Trajectory, version: PolicyVersion) -> Trajectory:
    return replace(row, spans=(VersionSpan(version, 0, row.num_completion_tokens),))


def _draw_ms(learner: BufferClient, done: int) -> float:
    times_s = []
    for step in range(done + 1, done + WARM_UP_DRAWS + TIMED_DRAWS + 1):
        started = time.perf_counter()
        draw = learner.draw(step, step - 1, 0, DRAWN_GROUPS, PATIENCE_S).result(PATIENCE_S)
        times_s.append(time.perf_counter() - started)
        if not draw.ready or len(draw.record_ids) != BATCH_TRAJECTORIES:
            raise RuntimeError(f"step {step} cannot be drawn: {draw.waiting_for or len(draw.record_ids)}")
        learner.step_finished(step, step).result(PATIENCE_S)
    return 1000 * statistics.median(times_s[WARM_UP_DRAWS:])


GROUPS_PER_STEP = 32
STEPS_PER_CYCLE = 4
"""Number of steps whose groups may be open at once; a cycle pushes all of these groups and trains on them."""
CAPACITY_TRAJECTORIES = 2048
NUM_TOKENS = {False: 10_000_000, True: 5_000_000}
"""Value of `quick` -> total number of tokens to push."""
STORE_BYTES = {False: 2 * 2**30, True: 200 * 2**20}
SAMPLE_EVERY_S = 0.05
WORKLOAD_TRAJECTORIES = 4096
OPEN_GROUPS = 100
"""Number of open leases when the service is killed."""


class RssSampler:
    """Thread that records a service's anonymous memory (RssAnon) together with the progress of the measurement."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._stop = threading.Event()
        self.progress = 0.0
        """Fraction of the work that is done; updated by the measurement."""
        self._samples: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._run, name="rss", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            self._samples.append((self.progress, self._service.rss_anon_bytes()))

    def stop(self) -> None:
        """Stop sampling."""
        self._stop.set()
        self._thread.join(PATIENCE_S)

    def mib(self, first: float = 0.0, last: float = 1.0) -> list[float]:
        """Return the memory samples taken while the progress was in [first, last], in MiB."""
        return [size / 2**20 for progress, size in self._samples if first <= progress <= last]


def measure_memory(quick: bool, folder: Path) -> Figures:
    """Measure the service's memory while 10 million tokens are pushed, used for training and evicted.

    The measurement runs the cycle of a training run (lease, push, draw, finish, publish, checkpoint) and samples the
    service's RssAnon throughout. RssAnon is anonymous memory, so pages of the store, which belong to the page cache, do
    not count. Memory is constant if its median over the last quarter of the tokens is close to the median over the
    second quarter. The store reaches its capacity in the first quarter.
    """
    work = Workload.make(WORKLOAD_TRAJECTORIES)
    config = config_for(capacity_trajectories=CAPACITY_TRAJECTORIES)
    with Service(folder / "store", facts_for(GROUPS_PER_STEP), config) as service:
        learner, actor = service.begin(), service.client("actor-0")
        sampler = RssSampler(service)
        num_tokens, num_pushed, num_steps = 0, 0, 0
        while num_tokens < NUM_TOKENS[quick]:
            num_in_cycle = STEPS_PER_CYCLE * GROUPS_PER_STEP * GROUP_SIZE
            fill(actor, work, num_in_cycle, first=num_pushed)
            num_tokens += sum(_tokens(work, num_pushed + i) for i in range(num_in_cycle))
            num_pushed += num_in_cycle
            num_steps = _train(learner, num_steps)
            sampler.progress = min(1.0, num_tokens / NUM_TOKENS[quick])
        sampler.stop()
        status = learner.status().result(PATIENCE_S)
        file_bytes = (folder / "store" / "data.mdb").stat().st_size
        actor.close()
        learner.close()
    if status.num_records > CAPACITY_TRAJECTORIES or status.ledger["trained"] != num_pushed:
        raise RuntimeError(f"not all of {num_pushed} trajectories were used for training and evicted: {status}")
    early, late = statistics.median(sampler.mib(0.25, 0.5)), statistics.median(sampler.mib(0.75))
    return {
        "rss_anon_growth": late / early,
        "rss_anon_mib_early": early,
        "rss_anon_mib_late": late,
        "rss_anon_mib_max": max(sampler.mib()),
        "rss_anon_mib_over_tokens": [round(statistics.median(part), 1) for part in _tenths(sampler)],
        "num_tokens": num_tokens,
        "num_trajectories": num_pushed,
        "file_mib": file_bytes / 2**20,
    }


def _tenths(sampler: RssSampler) -> list[list[float]]:
    parts = [sampler.mib(i / 10, (i + 1) / 10) for i in range(10)]
    return [part for part in parts if part]


def _tokens(work: Workload, i: int) -> int:
    i %= len(work)
    return int(work.bounds[i + 1] - work.bounds[i])


def _train(learner: BufferClient, done: int) -> int:
    """Train on the pushed groups; return the number of finished steps."""
    draw_steps(learner, done, STEPS_PER_CYCLE, GROUPS_PER_STEP)
    done += STEPS_PER_CYCLE
    learner.published(0, done).result(PATIENCE_S)
    learner.checkpoint_durable(done).result(PATIENCE_S)
    return done


def measure_restart(quick: bool, folder: Path) -> Figures:
    """Measure how fast a killed service restarts on a store of 2 GiB.

    The service is killed with SIGKILL. Times run from the start of the new process to the line with its address, and to
    the first reply. Both times are measured twice: with the file of the store in the page cache, and without.
    """
    work = Workload.make(WORKLOAD_TRAJECTORIES)
    config = config_for(sampler="uniform", max_uses="unlimited")
    with Service(folder / "store", facts_for(GROUPS_PER_STEP), config) as service:
        learner, actor = service.begin(), service.client("actor-0")
        num_pushed = 0
        while (status := actor.status().result(PATIENCE_S)).size_bytes < STORE_BYTES[quick]:
            fill(actor, work, len(work), first=num_pushed)
            num_pushed += len(work)
        lease_all(actor, OPEN_GROUPS)
        figures: Figures = {"store_gib": status.size_bytes / 2**30, "num_records": status.num_records}
        for client in (actor, learner):
            client.close()
        for name, drop in (("", False), ("_cold", True)):
            service.kill()
            if drop:
                _drop_from_page_cache(folder / "store" / "data.mdb")
            answered_s = _restart(service, status.num_records)
            figures |= {f"restart{name}_s": answered_s, f"address_line{name}_s": service.address_after_s}
    return figures


def _restart(service: Service, num_records: int) -> float:
    """Restart the service; return the seconds from the start of the process to the first reply.

    Raises:
        RuntimeError: records are missing.
    """
    started = time.monotonic()
    service.start()
    client = service.client("observer", "observer")
    answered_s = time.monotonic() - started
    found = client.status().result(PATIENCE_S).num_records
    client.close()
    if found != num_records:
        raise RuntimeError(f"the store has {found} trajectories after the restart, but {num_records} were acknowledged")
    return answered_s


def _drop_from_page_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
