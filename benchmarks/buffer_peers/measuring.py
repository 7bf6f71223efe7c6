"""One measurement in a process of its own, so that none warms up another; and the environment of the peers.

What Leeway is compared with and does not depend on lies in an environment in the user's cache folder, never in the
repository. It sees the packages of the environment that runs the benchmark (a .pth file names their folder), so torch
and Ray need no second copy.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from functools import lru_cache
from pathlib import Path

from benchmarks.buffer_peers.workload import Figures, Workload
from benchmarks.lib.machine import ROOT
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
REQUIREMENTS = ["torchrl==0.14.1", "tensordict==0.14.3", "TransferQueue==0.1.11", "redis==8.1.0", "hiredis==3.5.0"]
INSTALL_TIMEOUT_S = 900


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


class PeersUnavailable(RuntimeError):
    """The environment cannot be made; carries what the installer said."""


@lru_cache
def peers_python() -> Path:
    """The interpreter of the environment; makes it where it is missing or of another make.

    Raises:
        PeersUnavailable: it cannot be made.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    here = sysconfig.get_path("purelib")
    make = hashlib.sha256("\n".join([sys.version, here, *REQUIREMENTS]).encode()).hexdigest()[:12]
    folder = cache / "leeway" / f"buffer-peers-{make}"
    python, done = folder / "bin" / "python", folder / "done"
    if done.exists():
        return python
    print(f"installing {', '.join(REQUIREMENTS)} into {folder}", flush=True)
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "leeway_packages.pth").write_text(here + "\n")
    # The versions of the repository hold, above all torch's: a build for CPUs must not be replaced.
    constraints = ["-c", str(ROOT / "constraints.txt")]
    _run([str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS, *constraints])
    done.touch()
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, timeout=INSTALL_TIMEOUT_S, capture_output=True, text=True)
    if done.returncode:
        last = " | ".join(done.stderr.splitlines()[-4:])
        raise PeersUnavailable(f"the environment of the peers cannot be made: {' '.join(command[:4])} ... said: {last}")
