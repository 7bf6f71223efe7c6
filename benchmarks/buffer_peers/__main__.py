"""One measurement in a process of its own: `python -m buffer_peers NAME NUMBER FOLDER`.

NUMBER is the number of trajectories, or 1 for quick and 0 for whole where the measurement has its own sizes.
Prints its figures as one JSON line, and ends with its parent.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import signal
import sys
from pathlib import Path

from benchmarks.buffer_peers.workload import Workload

MEASUREMENTS = {
    "leeway": "leeway:measure",
    "syncs": "leeway:count_syncs",
    "raw_zmq_arrow": "limits:measure_raw_zmq",
    "lmdb_alone": "limits:measure_lmdb",
    "mp_queue": "mp_queue:measure",
    "ray_actor": "ray_peers:measure_actor",
    "ray_queue": "ray_peers:measure_queue",
    "torchrl": "torchrl_peer:measure",
    "redis_aof_always": "redis_peer:measure",
    "transferqueue": "transferqueue_peer:measure",
    "clients": "clients:measure",
    "draw_cost": "draw_cost:measure",
    "memory": "endurance:measure_memory",
    "restart": "endurance:measure_restart",
}
"""Name -> module and function."""
SIZED_BY_WORKLOAD = {"leeway", "syncs", "raw_zmq_arrow", "lmdb_alone", "mp_queue", "ray_actor", "ray_queue"}
SIZED_BY_WORKLOAD |= {"torchrl", "redis_aof_always", "transferqueue"}
"""They take the workload; the others take whether to be quick."""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the measurement that the command line names."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    name, *arguments = sys.argv[1:]
    if name == "zmq_receiver":
        from benchmarks.buffer_peers.limits import receive

        receive(*arguments)
        return
    module, function = MEASUREMENTS[name].split(":")
    measure = getattr(importlib.import_module(f"benchmarks.buffer_peers.{module}"), function)
    number, folder = int(arguments[0]), Path(arguments[1])
    what = Workload.make(number) if name in SIZED_BY_WORKLOAD else bool(number)
    # A real producer holds a few trajectories, not all of them: do not have the collector walk over these.
    gc.collect()
    gc.freeze()
    print(json.dumps(measure(what, folder)), flush=True)


if __name__ == "__main__":
    main()
