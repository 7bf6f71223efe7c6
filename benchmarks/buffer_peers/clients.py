"""Many light clients at once: 64 processes that push, with no engine behind them.

Each has its own connection, leases and trajectories, and pushes as many as the others; they are forked
from one small process, begin together, and say when their last acknowledgement came. A client's rate
is its trajectories over its own time. Fairness is Jain's index of the rates (1: all alike, 1/64: one
client had everything) and the slowest over the mean.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.buffer_peers.leeway import push_all
from benchmarks.buffer_peers.mp_queue import expect
from benchmarks.buffer_peers.service import RUN_ID, Service, config_for, facts_for, lease_all, steps_for
from benchmarks.buffer_peers.workload import GROUP_SIZE, PATIENCE_S, Figures, Workload
from buffer import schema
from buffer.client import BufferClient
from buffer.config import BufferConfig

NUM_CLIENTS = 64
ROWS_PER_CLIENT = {False: 512, True: 64}
"""By `quick`."""


def measure(quick: bool, folder: Path) -> Figures:
    """Throughput, fairness and the service's memory."""
    num_rows = ROWS_PER_CLIENT[quick]
    work = Workload.make(num_rows)
    facts = facts_for(steps_for(NUM_CLIENTS * num_rows // GROUP_SIZE))
    with Service(folder / "store", facts, config_for()) as service:
        before = service.rss_anon_bytes()
        context = get_context("fork")  # before this process has a thread of its own
        pipes = [context.Pipe() for _ in range(NUM_CLIENTS)]
        schema.encode([work.trajectory(0)], RUN_ID)  # what Arrow imports at its first use is there before the fork
        gc.freeze()  # or every child would copy all pages at its first collection
        children = [
            context.Process(target=_client, args=(theirs, service.address, service.config, work, i), daemon=True)
            for i, (_, theirs) in enumerate(pipes)
        ]
        try:
            for child in children:
                child.start()
            learner = service.begin()
            seconds, wall_s = _let_run([ours for ours, _ in pipes])
            peak = service.rss_anon_bytes()
            learner.close()
        finally:
            for child in children:
                child.terminate()
            for child in children:
                child.join(PATIENCE_S)
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


def _let_run(pipes: list[Connection]) -> tuple[list[float], float]:
    """Let all begin once all are ready; each client's seconds, and the seconds until the last was done."""
    for pipe in pipes:
        pipe.send("lease")
    for pipe in pipes:
        _take(pipe)
    started = time.perf_counter()
    for pipe in pipes:
        pipe.send("push")
    seconds = [_take(pipe) for pipe in pipes]
    return seconds, time.perf_counter() - started


def _take(pipe: Connection) -> float:
    said = expect(pipe)
    if not isinstance(said, float):
        raise TypeError(f"a client failed: {said}")
    return said


def _client(pipe: Connection, address: str, config: BufferConfig, work: Workload, number: int) -> None:
    """One client's process."""
    try:
        expect(pipe)
        actor = BufferClient(address, run_id=RUN_ID, role="actor", name=f"actor-{number}", config=config)
        actor.connect()
        rows = work.leased(lease_all(actor, len(work) // GROUP_SIZE))
        pipe.send(0.0)
        expect(pipe)
        started = time.perf_counter()
        push_all(actor, rows)
        pipe.send(time.perf_counter() - started)
        actor.close()
    except Exception:  # whatever it is, the parent is told
        pipe.send(traceback.format_exc())
    os._exit(0)  # nothing of the parent's is to be cleaned up here
