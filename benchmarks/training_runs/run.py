"""One `leeway train` in a process of its own, and what it left in its folder."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from buffer_peers.processes import end_tree

from buffer.export import export
from buffer.inspect import Inspection
from buffer.views import Selection
from launch.observe import trace as timeline
from launch.observe.totals import Interval, intersect, total

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900.0
"""No run of these benchmarks takes longer."""
LOOK_EVERY_S = 0.5
LAST_LINES = 20
"""Of what a run has printed that failed: its folder may be gone when somebody reads why."""
SETTINGS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Small tensors: more threads fight for the cores."""

Row = Mapping[str, Any]
"""A step as metrics.jsonl has it; docs/metrics.md says what its keys mean."""


class MeasurementFailed(RuntimeError):
    """A run has no figures; says why, with the last lines that it printed."""


@dataclass(frozen=True)
class Samples:
    """The samples that were trained, one entry for each."""

    step: npt.NDArray[np.int64]
    """That trained it."""
    length: npt.NDArray[np.int64]
    """Of its completion, tokens."""
    started_s: npt.NDArray[np.float64]
    finished_s: npt.NDArray[np.float64]


class Generated(NamedTuple):
    """By one actor in a window of time."""

    busy_s: float
    """In which it had at least one training request running."""
    num_tokens: float
    """Of completions; those of a span that reaches out of the window count by its share."""


class FinishedRun:
    """The folder of a run that has ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cached_property
    def rows(self) -> list[Row]:
        """Its steps in order; one that took no update is left out."""
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return [row for row in lines if "loss" in row and not row["skipped"]]

    @functools.cached_property
    def summary(self) -> Mapping[str, Any]:
        """Of summary.json.

        Raises:
            MeasurementFailed: it was ended before its last evaluation.
        """
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        if found["accuracy_after"] is None:
            raise MeasurementFailed(f"was ended after {found['num_steps']} steps, before its last evaluation")
        return found

    def samples(self) -> Samples:
        """All that a step has trained, read from the buffer."""
        path = self.folder / "samples.parquet"
        columns = ["trained_step", "token_ids", "prompt_length", "started_s", "finished_s"]
        with Inspection.open(self.folder / "buffer") as inspection:
            export(inspection, Selection(), path)
        found = pq.read_table(path, columns=columns)
        path.unlink()
        found = found.filter(found["trained_step"].is_valid())
        lengths = np.diff(found["token_ids"].combine_chunks().offsets.to_numpy())
        return Samples(
            step=found["trained_step"].to_numpy(),
            length=lengths - found["prompt_length"].to_numpy(),
            started_s=found["started_s"].to_numpy(),
            finished_s=found["finished_s"].to_numpy(),
        )

    def generated(self, window: Interval) -> dict[str, Generated]:
        """Actor -> what it generated within a window, from timeline.jsonl.

        Args:
            window: start and end, seconds since the epoch.
        """
        found: dict[str, Generated] = {}
        for line in timeline.read(self.folder / "timeline.jsonl"):
            if line.what == "generate" and line.end_s > line.start_s:
                inside = total(intersect([(line.start_s, line.end_s)], [window])) / (line.end_s - line.start_s)
                busy_s, num_tokens = found.get(line.who, Generated(0.0, 0.0))
                more = Generated(inside * (line.busy_s or 0.0), inside * (line.num_tokens or 0))
                found[line.who] = Generated(busy_s + more.busy_s, num_tokens + more.num_tokens)
        return found


def train(
    config: Path,
    folder: Path,
    overrides: Sequence[str],
    *,
    limit_s: float = LIMIT_S,
    prefix: Sequence[str] = (),
    look: Callable[[Path], None] = lambda folder: None,
) -> FinishedRun:
    """Train as a config says, in a process of its own; all that it prints goes to a file beside the run's folder.

    Args:
        config: TOML file.
        folder: of the run, made anew.
        overrides: arguments of `leeway train`.
        limit_s: a run that takes longer has failed.
        prefix: a command that runs it, such as `taskset`.
        look: shown the folder about every LOOK_EVERY_S while it runs.

    Raises:
        MeasurementFailed: it did not end well, or took too long.
    """
    command = [*prefix, sys.executable, "-m", "launch.cli", "train", str(config)]
    command += ["--run.dir", str(folder.parent), "--run.name", folder.name, "--tracking.display", "plain", *overrides]
    log = folder.with_suffix(".log")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **SETTINGS}, stdout=output, stderr=subprocess.STDOUT, text=True
        )
        try:
            is_over = _follow(process, folder, look, time.monotonic() + limit_s)
        finally:
            end_tree(process)
    if not is_over or process.returncode:
        why = f"ended with status {process.returncode}" if is_over else f"took longer than {limit_s:g} s"
        lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        raise MeasurementFailed("\n    ".join([f"{folder.name} {why}; it said last:", *lines]))
    return FinishedRun(folder)


def _follow(process: subprocess.Popen[str], folder: Path, look: Callable[[Path], None], deadline_s: float) -> bool:
    """Wait for its end; False where it did not come in time."""
    while True:
        try:
            process.wait(LOOK_EVERY_S)
        except subprocess.TimeoutExpired:
            look(folder)
        else:
            return True
        if time.monotonic() > deadline_s:
            return False
