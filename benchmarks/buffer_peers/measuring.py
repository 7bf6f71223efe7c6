"""Execution of each measurement in a new process, and package requirements of the peers."""

from __future__ import annotations

import gc
import importlib
import os
import tempfile
from pathlib import Path

from benchmarks.buffer_peers.workload import Figures, Workload
from benchmarks.lib.peers import python_with
from benchmarks.lib.processes import call_in_processes, end_at_sigterm

SETTINGS = {
    "RAY_AUTH_MODE": "token",  # Ray's default; an explicit value suppresses Ray's banner
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TQ_LOGGING_LEVEL": "ERROR",
}
"""Environment variables of every measurement, which libraries read at import."""
LIMIT_S = 900.0
"""Timeout of a measurement in seconds."""
REQUIREMENTS = [
    "torchrl==0.14.1", "tensordict==0.14.3", "TransferQueue==0.1.11", "omegaconf==2.3.0",
    "antlr4-python3-runtime==4.9.3", "redis==8.1.0", "hiredis==3.5.0",
]  # fmt: skip


def run_measurement(
    name: str, what: str, *, folder: Path, num_trajectories: int | None, quick: bool, python: Path | None
) -> Figures:
    """Run a measurement and return its figures.

    Args:
        name: name of the measurement.
        what: function of this package, as "module:function".
        folder: folder on the file system to measure; a temporary folder is created there and removed.
        num_trajectories: size of the workload; None if the function takes `quick` instead and sets its own sizes.
        quick: whether to use smaller sizes.
        python: interpreter of the environment to run in; None: the current one.

    Raises:
        MeasurementFailed: the measurement failed or timed out.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=f"buffer-{name}-", ignore_cleanup_errors=True) as fresh:
        call = {"what": what, "num_trajectories": num_trajectories, "quick": quick, "folder": fresh}
        found: Figures = call_in_processes(name, f"{__name__}:measure", [call], limit_s=LIMIT_S, python=python)[0]
    return found


def measure(what: str, num_trajectories: int | None, quick: bool, folder: str) -> Figures:
    """Run a measurement in this process."""
    end_at_sigterm()
    os.environ.update(SETTINGS)
    module, _, function = what.partition(":")
    called = getattr(importlib.import_module(f"{__package__}.{module}"), function)
    size = quick if num_trajectories is None else Workload.make(num_trajectories)
    # A real producer holds few trajectories at a time: exclude the workload from garbage collection.
    gc.collect()
    gc.freeze()
    found: Figures = called(size, Path(folder))
    return found


def peers_python() -> Path:
    """Return the interpreter of the peers' environment; raise PeersUnavailable if the environment cannot be created."""
    return python_with(*REQUIREMENTS)
