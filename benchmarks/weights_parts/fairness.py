"""Many light clients fetch a version from one service at the same time: how much longer does the slowest take?"""

from __future__ import annotations

import contextlib
import time

from benchmarks.weights_parts.figures import fairness_figures
from benchmarks.weights_parts.peers import Figures, Peer, call_all, say
from benchmarks.weights_parts.setting import DTYPE, Setting

NUM_PROCESSES, CLIENTS_EACH = 8, 8
NUM_VALUES = 4 * 2**20
"""Of the version, so that the machine can hold and send that of all clients: 8 MiB."""
HEAD_START_S = 0.5


def measure(setting: Setting) -> Figures:
    """Rounds of all clients at once."""
    num_each = 2 if setting.quick else CLIENTS_EACH
    snapshots = [str(path) for path in setting.snapshots()]
    weights = setting.new_folder("fairness") / "weights"
    rounds: list[list[float]] = []
    with (
        Peer("service", folder=str(weights)) as service,
        Peer("sender", snapshots=snapshots, dtype=DTYPE, folder=str(weights), num_values=NUM_VALUES) as sender,
        contextlib.ExitStack() as stack,
    ):
        address = service.call("address")
        sender.call("publish", version=1)
        num_bytes = sender.call("num_bytes")
        processes = [
            stack.enter_context(Peer("clients", address=address, num_clients=num_each)) for _ in range(NUM_PROCESSES)
        ]
        call_all(processes, "ready")
        for number in range(2 if setting.quick else 6):
            start = time.perf_counter() + HEAD_START_S
            found = call_all(processes, "fetch", version=1, start=start)
            rounds.append([seconds for each in found for seconds in each])
            say(f"fairness, round {number}: slowest {max(rounds[-1]):.2f} s")
    return fairness_figures(num_bytes, rounds[1:])
