"""Runs one measurement in its own process and ends everything that it started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 900.0
"""No measurement takes longer; one that does has failed."""
END_WITHIN_S = 10.0

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_AUTH_MODE": "token",  # Ray's default; said aloud it prints no banner
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TQ_LOGGING_LEVEL": "ERROR",
}
"""Environment of every measurement: libraries read it when they are imported."""


class MeasurementFailed(RuntimeError):
    """A measurement ended without figures; carries the end of what it said."""


def run_measurement(
    name: str, *arguments: object, folder: Path | None = None, python: Path | None = None
) -> dict[str, Any]:
    """The figures of `python -m buffer_peers NAME ARGUMENTS FOLDER`, in a fresh folder that is removed after.

    Args:
        name: of the measurement.
        arguments: for it.
        folder: where to make the fresh folder: the file system that is measured. Default: that of temporary files.
        python: interpreter of the environment to run in; default: this one.

    Raises:
        MeasurementFailed: it failed or took too long.
    """
    paths = str(ROOT)
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": paths}
    with tempfile.TemporaryDirectory(dir=folder, prefix=f"buffer-{name}-", ignore_cleanup_errors=True) as fresh:
        command = [str(python or sys.executable), "-m", "benchmarks.buffer_peers", name, *map(str, arguments), fresh]
        log = Path(fresh) / "stderr.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            try:
                output, _ = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                raise MeasurementFailed(f"{name} took longer than {LIMIT_S:g} s; {_tail(log)}") from None
            finally:
                end_tree(process)
        lines = [line for line in output.splitlines() if line.startswith("{")]
        if process.returncode or not lines:
            raise MeasurementFailed(f"{name} ended with status {process.returncode}; {_tail(log)}")
        figures: dict[str, Any] = json.loads(lines[-1])
        return figures


def end_tree(process: subprocess.Popen[str]) -> None:
    """End a process and all of its descendants, by force where they do not go."""
    try:
        parent = psutil.Process(process.pid)
        family = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for member in family:
        _signal(member, "terminate")
    _, alive = psutil.wait_procs(family, timeout=END_WITHIN_S)
    for member in alive:
        _signal(member, "kill")
    psutil.wait_procs(alive, timeout=END_WITHIN_S)
    process.wait(END_WITHIN_S)


def _signal(member: psutil.Process, verb: str) -> None:
    try:
        getattr(member, verb)()
    except psutil.NoSuchProcess:
        return  # it went by itself


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "it said last: " + " | ".join(lines[-8:])[-2000:] if lines else "it said nothing"
