"""What locked sockets cost: pushing into the buffer, durably acknowledged, with CURVE and without.

    python benchmarks/curve.py [--rounds 5] [--num-trajectories 4096]

The service is a process of its own on loopback, the trajectories are those of `buffer_peers/workload.py`. Rounds with
and without keys alternate; the ratio is the median of the rounds' ratios. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.buffer_peers.service import RUN_ID, config_for, facts_for, lease_all
from benchmarks.buffer_peers.workload import GROUP_SIZE, PATIENCE_S, Workload
from buffer.client import BufferClient
from buffer.service import BufferService
from common.rpc.auth import RunKeys, ServiceKeys


def serve(folder: Path, num_groups: int, keys: ServiceKeys | None, pipe: Connection) -> None:
    """The service's process: says its address, and ends when it is told to."""
    service = BufferService(config_for(), facts_for(num_groups), folder, keys=keys)
    pipe.send(service.bind())
    stop = threading.Event()
    thread = threading.Thread(target=service.serve, args=(stop,))
    thread.start()
    pipe.recv()
    stop.set()
    thread.join(PATIENCE_S)


def push_rate(work: Workload, keys: RunKeys | None) -> float:
    """Trajectories per second, from the first push to the last acknowledgement."""
    num_groups = len(work) // GROUP_SIZE
    here, there = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        services = keys.services if keys else None
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=serve, args=(Path(folder) / "buffer", num_groups, services, there))
        process.start()
        clients = []
        try:
            if not here.poll(PATIENCE_S):
                raise RuntimeError(f"the service gave no address within {PATIENCE_S:g} s")
            address = here.recv()
            for role in ("learner", "actor"):
                clients.append(
                    BufferClient(
                        address,
                        run_id=RUN_ID,
                        role=role,
                        name=role,
                        config=config_for(),
                        keys=keys.clients if keys else None,
                    )
                )
                clients[-1].connect()
            learner, actor = clients
            learner.begin_incarnation(0, 0).result(PATIENCE_S)
            learner.published(0, 0).result(PATIENCE_S)
            rows = work.leased(lease_all(actor, num_groups))
            began = time.perf_counter()
            for answer in [actor.push(row) for row in rows]:
                if (outcome := answer.result(PATIENCE_S).outcome) != "committed":
                    raise RuntimeError(f"a trajectory was answered '{outcome}'")
            return len(rows) / (time.perf_counter() - began)
        finally:
            for client in clients:
                client.close()
            here.send("end")
            process.join(PATIENCE_S)


def main() -> None:
    """Measure, print each round, and one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-trajectories", type=int, default=4096)
    args = parser.parse_args()
    work = Workload.make(args.num_trajectories)
    plain, locked = [], []
    for number in range(args.rounds):
        pair = {}
        for is_locked in ((False, True), (True, False))[number % 2]:
            pair[is_locked] = push_rate(work, RunKeys.make() if is_locked else None)
        plain.append(pair[False])
        locked.append(pair[True])
        print(f"round {number + 1}: {pair[False]:,.0f}/s without, {pair[True]:,.0f}/s with CURVE", flush=True)
    ratios = [with_keys / without for without, with_keys in zip(plain, locked, strict=True)]
    result = {
        "benchmark": "curve",
        "push_per_s": round(statistics.median(plain)),
        "push_per_s_curve": round(statistics.median(locked)),
        "curve_over_plain": round(statistics.median(ratios), 3),
        "rounds": args.rounds,
        "num_trajectories": args.num_trajectories,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
