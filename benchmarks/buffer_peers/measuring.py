"""One measurement in a process of its own, so that none warms up another; and what the peers need."""

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
    "RAY_AUTH_MODE": "token",  # Ray's default; said aloud it prints no banner
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TQ_LOGGING_LEVEL": "ERROR",
}
"""Environment of every measurement: libraries read it when they are imported."""
LIMIT_S = 900.0
"""No measurement takes longer; one that does has failed."""
REQUIREMENTS = [
    "torchrl==0.14.1", "tensordict==0.14.3", "TransferQueue==0.1.11", "omegaconf==2.3.0",
    "antlr4-python3-runtime==4.9.3", "redis==8.1.0", "hiredis==3.5.0",
]  # fmt: skip


def run_measurement(
    name: str, what: str, *, folder: Path, num_trajectories: int | None, quick: bool, python: Path | None
) -> Figures:
    """The figures of a measurement.

    Args:
        name: as people know it.
        what: "module:function" of this package.
        folder: the file system that is measured; a fresh folder is made there, and removed.
        num_trajectories: of the workload that it is given; None: it has its own sizes, and is told whether to be quick.
        quick: smaller.
        python: interpreter of the environment to run in; None: this one.

    Raises:
        MeasurementFailed: it failed or took too long.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=f"buffer-{name}-", ignore_cleanup_errors=True) as fresh:
        call = {"what": what, "num_trajectories": num_trajectories, "quick": quick, "folder": fresh}
        found: Figures = call_in_processes(name, f"{__name__}:measure", [call], limit_s=LIMIT_S, python=python)[0]
    return found


def measure(what: str, num_trajectories: int | None, quick: bool, folder: str) -> Figures:
    """The process of a measurement."""
    end_at_sigterm()
    os.environ.update(SETTINGS)
    module, _, function = what.partition(":")
    called = getattr(importlib.import_module(f"{__package__}.{module}"), function)
    size = quick if num_trajectories is None else Workload.make(num_trajectories)
    # A real producer holds a few trajectories, not all of them: do not have the collector walk over these.
    gc.collect()
    gc.freeze()
    found: Figures = called(size, Path(folder))
    return found


def peers_python() -> Path:
    """The interpreter of the peers' environment; PeersUnavailable where it cannot be made."""
    return python_with(*REQUIREMENTS)
