"""One `leeway train` run in a subprocess, and the files of its run folder."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from benchmarks.lib.machine import ROOT, make_model
from benchmarks.lib.processes import MeasurementFailed, end_families, environment

from leeway.buffer.offline.inspect import Inspection, export
from leeway.launch.observe.metrics import Rows
from leeway.launch.observe.totals import Interval, shared
from leeway.launch.observe.trace import read
from leeway.launch.run_folder import RunFolder

LIMIT_S = 900.0
"""Default timeout of a run in seconds."""
FEW_PROCESSES = ("--actors.num_actors", "1", "--learner.num_stages", "1")
"""Overrides for a run that starts fast and fits on one core."""
LOOK_EVERY_S = 0.5
LAST_LINES = 20
"""Number of last output lines in the error of a failed run, whose folder may be removed before the error is read."""

Row = Mapping[str, Any]
"""Metrics of a step from metrics.jsonl and actors.jsonl; docs/metrics.md describes the keys."""


def joined(folder: RunFolder) -> Iterator[dict[str, Any]]:
    """Yield the metrics of each step with those of the actors. If a step has several actor lines, the last line counts.

    Raises:
        ValueError: a line is not JSON.
    """
    of_actors = {row["step"]: row for row in Rows(folder.actors).read()}
    for row in Rows(folder.metrics).read():
        yield row | of_actors.get(row["step"], {})


class RunFailed(MeasurementFailed):
    """Raised if a run fails; the message has the reason and the last lines of its output."""

    def __init__(self, name: str, why: str, status: int | None, printed: Sequence[str]) -> None:
        last = ["last output:", *printed[-LAST_LINES:]] if printed else ["see the output above"]
        super().__init__("\n    ".join([f"{name} {why}; {last[0]}", *last[1:]]))
        self.why = why
        self.status = status
        """Exit status; None if the run timed out."""
        self.printed = printed


@dataclass(frozen=True)
class Samples:
    """Samples used for training; every attribute is an array with one entry per sample."""

    step: npt.NDArray[np.int64]
    """Number of the step that used each sample."""
    length: npt.NDArray[np.int64]
    """Length of each completion in tokens."""
    started_s: npt.NDArray[np.float64]
    finished_s: npt.NDArray[np.float64]


class Generated(NamedTuple):
    """Amount of generation of one actor within a window of time."""

    busy_s: float
    """Seconds with at least one training request running."""
    num_tokens: float
    """Completion tokens. A request that extends beyond the window counts by the fraction of its time inside."""


class FinishedRun:
    """Reader for the folder of a run that has ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cached_property
    def steps(self) -> list[Row]:
        """Rows of all steps in order, including steps that skipped the update."""
        return [row for row in joined(RunFolder(self.folder)) if "loss" in row]

    @functools.cached_property
    def updates(self) -> list[Row]:
        """Rows of the steps that took an update."""
        return [row for row in self.steps if not row["skipped"]]

    @functools.cached_property
    def summary(self) -> Mapping[str, Any]:
        """Content of summary.json.

        Raises:
            MeasurementFailed: the run ended before its last evaluation.
        """
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        if found["accuracy_after"] is None:
            raise MeasurementFailed(f"the run ended after {found['num_steps']} steps, before its last evaluation")
        return found

    def evaluations(self) -> list[tuple[int, float]]:
        """Return version and greedy accuracy of each evaluation, in order."""
        found = map(json.loads, (self.folder / "eval.jsonl").read_text().splitlines())
        return [(each["policy_version"], each["accuracy_greedy"]) for each in found]

    def samples(self) -> Samples:
        """Read all samples used for training from the buffer."""
        path = self.folder / "samples.parquet"
        columns = ["trained_step", "token_ids", "prompt_length", "started_s", "finished_s"]
        with Inspection.open(self.folder / "buffer") as inspection:
            export(inspection, path)
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
        """Return actor -> its generation within a window of seconds since the epoch, from timeline.json."""
        found: dict[str, Generated] = {}
        for span in read(self.folder / "timeline.json"):
            if span.cat == "generate" and span.dur:
                inside = shared([(span.start_s, span.end_s)], [window]) / (span.end_s - span.start_s)
                busy_s, num_tokens = found.get(span.who, Generated(0.0, 0.0))
                more = Generated(inside * (span.end_s - span.start_s), inside * span.args.get("num_tokens", 0))
                found[span.who] = Generated(busy_s + more.busy_s, num_tokens + more.num_tokens)
        return found


class KeptResults:
    """A folder of results of finished runs, from which an interrupted benchmark resumes."""

    def __init__(self, folder: Path, name: str, facts: object) -> None:
        """Open or create the folder.

        Args:
            folder: folder named by `--work`.
            name: name of the JSON file that stores the facts.
            facts: settings shared by all runs of this benchmark.

        Raises:
            SystemExit: the folder has runs with other facts.
        """
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / name
        if path.exists() and (stored := json.loads(path.read_text())) != facts:
            sys.exit(f"--work {folder} holds runs of {stored}, not of {facts}: choose another folder")
        path.write_text(json.dumps(facts))

    def has(self, name: str) -> bool:
        """Return whether a result is stored under a name."""
        return (self.folder / f"{name}.json").exists()

    def load(self, name: str) -> Any:  # noqa: ANN401 -- JSON
        """Return the result stored under a name."""
        return json.loads((self.folder / f"{name}.json").read_text())

    def result(self, name: str, make: Callable[[Path], Mapping[str, Any]]) -> Any:  # noqa: ANN401 -- JSON
        """Return the result stored under a name. A missing result is made in a run folder, which is then removed."""
        if self.has(name):
            return self.load(name)
        folder = self.folder / "runs" / name
        shutil.rmtree(folder, ignore_errors=True)  # folder of an earlier call that did not finish
        part = self.folder / f"{name}.part"
        part.write_text(json.dumps(result := make(folder)))
        part.replace(self.folder / f"{name}.json")
        shutil.rmtree(folder, ignore_errors=True)  # the run of a peer may not create the folder
        return result


def by_token(updates: Sequence[Row], key: str) -> float:
    """Return the mean of a metric over steps, weighted by their completion tokens."""
    num_tokens = sum(row["batch/completion_tokens"] for row in updates)
    return float(sum(row[key] * row["batch/completion_tokens"] for row in updates) / num_tokens)


def train(
    config: str | Path,
    folder: Path,
    overrides: Sequence[str],
    *,
    log: Path | None = None,
    limit_s: float = LIMIT_S,
    prefix: Sequence[str] = (),
    look: Callable[[Path], None] = lambda folder: None,
    module: str = "leeway.launch.cli",
    variables: Mapping[str, str] | None = None,
    checkout: Path = ROOT,
) -> FinishedRun:
    """Train a config in a subprocess.

    Args:
        config: TOML file.
        folder: run folder to create.
        overrides: arguments of `leeway train`.
        log: file for the output of the run; if None, the run prints to the output of this process.
        limit_s: timeout in seconds.
        prefix: command that starts the subprocess, such as `taskset`.
        look: callback that receives the folder about every LOOK_EVERY_S during the run.
        module: module whose command line is run.
        variables: further environment variables.
        checkout: checkout of Leeway to run; another one than this has its own .venv.

    Raises:
        RunFailed: the run failed or timed out.
    """
    python = sys.executable if checkout == ROOT else str(checkout / ".venv" / "bin" / "python")
    command = [*prefix, python, "-m", module, "train", str(config)]
    command += ["--run.dir", str(folder.parent), "--run.name", folder.name, *overrides]
    make_model(ROOT / config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") if log else contextlib.nullcontext() as output:
        process = subprocess.Popen(
            command, cwd=checkout, env=environment(**(variables or {})), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            is_over = _follow(process, folder, look, time.monotonic() + limit_s)
        finally:
            end_families(process)
    if not is_over or process.returncode:
        why = f"ended with status {process.returncode}" if is_over else f"took longer than {limit_s:g} s"
        printed = log.read_text(errors="replace").splitlines() if log else []
        raise RunFailed(folder.name, why, process.returncode if is_over else None, printed)
    return FinishedRun(folder)


def _follow(process: subprocess.Popen[bytes], folder: Path, look: Callable[[Path], None], deadline_s: float) -> bool:
    """Wait until the process exits; return False on timeout."""
    while True:
        try:
            process.wait(LOOK_EVERY_S)
        except subprocess.TimeoutExpired:
            look(folder)
        else:
            return True
        if time.monotonic() > deadline_s:
            return False
