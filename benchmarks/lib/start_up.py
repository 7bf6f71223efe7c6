"""Start-up time of the demo in any checkout: seconds from the command to the first optimizer step, by phase."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from benchmarks.lib.machine import ROOT
from benchmarks.lib.page import table
from benchmarks.lib.processes import SETTINGS, MeasurementFailed, end_families

from leeway.launch.observe.trace import read

LIMIT_S = 300.0
"""Timeout in seconds of a run with one step."""
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
ROWS = {
    "first line of output": "first_line_s",
    "Ray is up": "ray_s",
    "stages and actors are ready": "ready_s",
    "first lease": "lease_s",
    "first step starts": "step_s",
    "processor seconds until training starts": "cpu_s",
    "processor seconds of actors and their engines": "actors_cpu_s",
}
"""Row of the table -> name of its figure."""
WANTED_S = {"now, warm": 25.0, "now, cold": 45.0}
"""Target in seconds from the command to the first step, by column."""


def measure(folder: Path, *, checkout: Path = ROOT, cold: bool = False) -> dict[str, float]:
    """Run one step of the demo and return the figures by name, in seconds since the command.

    Args:
        folder: run folder to create.
        checkout: checkout that is run, in the environment of this process.
        cold: empty the page cache first.

    Raises:
        MeasurementFailed: the run failed, or `cold` is set and this user has no permission to empty the page cache.
    """
    if cold:
        os.sync()
        try:
            DROP_CACHES.write_text("3")
        except OSError as error:
            raise MeasurementFailed(f"cannot empty the page cache ({error}): run a cold start as root") from error
    command = [sys.executable, "-m", "leeway", "train", "examples/demo.toml"]
    command += ["--run.dir", str(folder.parent), "--run.name", folder.name, "--learner.num_steps", "1"]
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(checkout)}
    began_s = time.time()
    process = subprocess.Popen(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    found: dict[str, float] = {}
    printed = []
    assert process.stdout is not None
    limit = threading.Timer(LIMIT_S, end_families, [process])  # ending the processes ends the loop over their output
    limit.start()
    try:
        for line in process.stdout:
            printed.append(line)
            found.setdefault("first_line_s", time.time() - began_s)
            if line.startswith("training"):
                found["cpu_s"], found["actors_cpu_s"] = _cpu(psutil.Process(process.pid))
    finally:
        limit.cancel()
    if process.wait(LIMIT_S) != 0:
        raise MeasurementFailed(f"the run in {folder} exited with {process.returncode}:\n{''.join(printed[-10:])}")
    spans = list(read(folder / "timeline.json"))
    phases = [span for span in spans if span.cat == "phase"]
    starting = [span for span in phases if span.name.startswith(("starting", "loading"))]
    if len(starting) > 1:  # older checkouts have one phase for the whole start
        found["ray_s"] = starting[0].end_s - began_s
    found["ready_s"] = starting[-1].end_s - began_s
    found["lease_s"] = min(span.start_s for span in spans if span.cat == "generate") - began_s
    found["step_s"] = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["started_s"] - began_s
    return found


def _cpu(command: psutil.Process) -> tuple[float, float]:
    """Return the processor seconds of a run, and the processor seconds of its actors."""
    total_s = actors_s = 0.0
    for process in _family(command):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total_s += times.user + times.system
            name = " ".join(process.cmdline())
            if "ActorRole" in name or "EngineCore" in name or "reward_process" in name:
                actors_s += times.user + times.system
    return total_s, actors_s


def _family(command: psutil.Process) -> Iterator[psutil.Process]:
    yield command
    with suppress(psutil.Error):
        yield from command.children(recursive=True)


def section(columns: Mapping[str, Sequence[dict[str, float]]]) -> list[str]:
    """Return the section of a page that shows the median over the starts of each column."""
    rows = []
    for row, key in ROWS.items():
        cells = [[start[key] for start in starts if key in start] for starts in columns.values()]
        rows.append([row, *(f"{median(values):.1f}" if values else "-" for values in cells)])
    counts = ", ".join(f"{head}: {len(starts)}" for head, starts in columns.items())
    return [
        "## Start-up time",
        f"Median seconds since the command. Number of starts: {counts}. *Cold* starts have an empty page cache.",
        table(["", *columns], rows),
        *(_judgement(head, median(start["step_s"] for start in columns[head])) for head in WANTED_S if head in columns),
    ]


def _judgement(head: str, step_s: float) -> str:
    is_met = step_s <= WANTED_S[head]
    return f"Target ({head}): at most {WANTED_S[head]:g} s to the first step. Measured: {step_s:.1f} s, " + (
        "met." if is_met else "**not met**."
    )


def figures(columns: Mapping[str, Sequence[dict[str, float]]]) -> dict[str, Any]:
    """Return the figures of each start, rounded, for the JSON line."""
    return {
        head: [{key: round(value, 2) for key, value in start.items()} for start in starts]
        for head, starts in columns.items()
    }
