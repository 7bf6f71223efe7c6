"""Measure the cost of CURVE encryption for durable pushes into the buffer. Prints one JSON line last.

    python benchmarks/curve.py [--rounds 5] [--num-trajectories 4096]

The service is a separate process on loopback, and the trajectories are those of `buffer_peers/workload.py`. Each round
measures the rate with and without encryption keys, in alternating order. The ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.buffer_peers.leeway import push_all
from benchmarks.buffer_peers.service import LEASE_S, RUN_ID, config_for, facts_for, lease_all
from benchmarks.buffer_peers.workload import GROUP_SIZE, PATIENCE_S, Workload, expect
from benchmarks.lib.rounds import median_ratio

from leeway.buffer import leases
from leeway.buffer.client import BufferClient
from leeway.buffer.service import BufferService
from leeway.common.rpc.auth import RunKeys, ServiceKeys


def serve(folder: Path, num_groups: int, keys: ServiceKeys | None, pipe: Connection) -> None:
    """Run the service: send its address, then serve until a message arrives on the pipe."""
    leases.LEASE_TIMEOUT_S = LEASE_S  # clients of this benchmark do not renew leases
    service = BufferService(config_for(), facts_for(num_groups), folder, keys=keys)
    pipe.send(service.bind())
    stop = threading.Event()
    thread = threading.Thread(target=service.serve, args=(stop,))
    thread.start()
    pipe.recv()
    stop.set()
    thread.join(PATIENCE_S)


def push_rate(work: Workload, keys: RunKeys | None) -> float:
    """Return trajectories per second from the first push to the last acknowledgement."""
    num_groups = len(work) // GROUP_SIZE
    here, there = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as clients:
        arguments = (Path(folder) / "buffer", num_groups, keys.services if keys else None, there)
        process = multiprocessing.get_context("spawn").Process(target=serve, args=arguments)
        process.start()
        try:
            address = expect(here)
            learner, actor = (
                clients.enter_context(contextlib.closing(client(address, role, keys))) for role in ("learner", "actor")
            )
            learner.begin_incarnation(0, 0).result(PATIENCE_S)
            learner.published(0, 0).result(PATIENCE_S)
            rows = work.leased(lease_all(actor, num_groups))
            began = time.perf_counter()
            push_all(actor, rows)
            return len(rows) / (time.perf_counter() - began)
        finally:
            clients.close()
            here.send("end")
            process.join(PATIENCE_S)


def client(address: str, role: Literal["learner", "actor"], keys: RunKeys | None) -> BufferClient:
    """Return a connected client, with or without the encryption keys of a run."""
    made = BufferClient(address, run_id=RUN_ID, role=role, name=role, keys=keys.clients if keys else None)
    made.connect()
    return made


def main() -> None:
    """Run the benchmark; print each round and the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    parser.add_argument("--num-trajectories", type=int, default=4096, help="number of trajectories per measurement")
    args = parser.parse_args()
    work = Workload.make(args.num_trajectories)
    rates: dict[bool, list[float]] = {False: [], True: []}
    for number in range(args.rounds):
        for is_locked in ((False, True), (True, False))[number % 2]:
            rates[is_locked].append(push_rate(work, RunKeys.make() if is_locked else None))
        print(f"round {number + 1}: {rates[False][-1]:,.0f}/s without, {rates[True][-1]:,.0f}/s with CURVE", flush=True)
    result = {
        "benchmark": "curve",
        "push_per_s": round(statistics.median(rates[False])),
        "push_per_s_curve": round(statistics.median(rates[True])),
        "curve_over_plain": round(median_ratio(rates[True], rates[False]), 3),
        "rounds": args.rounds,
        "num_trajectories": args.num_trajectories,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
