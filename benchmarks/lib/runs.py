"""One `leeway train` in a process of its own, and what it left in its folder."""

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
from buffer.offline.inspect import Inspection, export
from launch.observe.metrics import Rows
from launch.observe.totals import Interval, shared
from launch.observe.trace import read
from launch.run_folder import RunFolder

LIMIT_S = 900.0
"""No run takes longer, unless a benchmark says so."""
FEW_PROCESSES = ("--actors.num_actors", "1", "--learner.num_stages", "1")
"""Overrides: a run starts fast, and fits on one core."""
LOOK_EVERY_S = 0.5
LAST_LINES = 20
"""Of what a run has printed that failed: its folder may be gone when somebody reads why."""

Row = Mapping[str, Any]
"""A step as metrics.jsonl and actors.jsonl have it; docs/metrics.md says what its keys mean."""


def joined(folder: RunFolder) -> Iterator[dict[str, Any]]:
    """Yield the row of each step with the columns of the actors, of whose lines for a step the last counts.

    Raises:
        ValueError: a line is no JSON.
    """
    of_actors = {row["step"]: row for row in Rows(folder.actors).read()}
    for row in Rows(folder.metrics).read():
        yield row | of_actors.get(row["step"], {})


class RunFailed(MeasurementFailed):
    """A run did not end well; says why, with the last lines that it printed."""

    def __init__(self, name: str, why: str, status: int | None, said: Sequence[str]) -> None:
        last = ["it said last:", *said[-LAST_LINES:]] if said else ["it said why above"]
        super().__init__("\n    ".join([f"{name} {why}; {last[0]}", *last[1:]]))
        self.why = why
        self.status = status
        """Of its exit; None where it took too long."""
        self.said = said


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
    def steps(self) -> list[Row]:
        """In order, also those that took no update."""
        return [row for row in joined(RunFolder(self.folder)) if "loss" in row]

    @functools.cached_property
    def updates(self) -> list[Row]:
        """The steps that took one."""
        return [row for row in self.steps if not row["skipped"]]

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

    def evaluations(self) -> list[tuple[int, float]]:
        """Of each in order, the version and the greedy accuracy."""
        found = map(json.loads, (self.folder / "eval.jsonl").read_text().splitlines())
        return [(each["policy_version"], each["accuracy_greedy"]) for each in found]

    def samples(self) -> Samples:
        """All that a step has trained, read from the buffer."""
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
        """Actor -> what it generated within a window of seconds since the epoch, from timeline.json."""
        found: dict[str, Generated] = {}
        for span in read(self.folder / "timeline.json"):
            if span.cat == "generate" and span.dur:
                inside = shared([(span.start_s, span.end_s)], [window]) / (span.end_s - span.start_s)
                busy_s, num_tokens = found.get(span.who, Generated(0.0, 0.0))
                more = Generated(inside * (span.end_s - span.start_s), inside * span.args.get("num_tokens", 0))
                found[span.who] = Generated(busy_s + more.busy_s, num_tokens + more.num_tokens)
        return found


class KeptResults:
    """A folder of what was computed from finished runs: a benchmark that was ended goes on from there."""

    def __init__(self, folder: Path, name: str, facts: object) -> None:
        """Open or make it.

        Args:
            folder: as `--work` names it.
            name: of the JSON file that says what its runs have in common.
            facts: what those of this benchmark have.

        Raises:
            SystemExit: it holds others.
        """
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        said = self.folder / name
        if said.exists() and (theirs := json.loads(said.read_text())) != facts:
            sys.exit(f"--work {folder} holds runs of {theirs}, not of {facts}; choose another folder")
        said.write_text(json.dumps(facts))

    def has(self, name: str) -> bool:
        """Is something kept under a name?"""
        return (self.folder / f"{name}.json").exists()

    def result(self, name: str, make: Callable[[Path], Mapping[str, Any]]) -> Any:  # noqa: ANN401 -- JSON
        """What is kept under a name; where nothing is, it is made in a folder that is removed afterwards."""
        kept = self.folder / f"{name}.json"
        if self.has(name):
            return json.loads(kept.read_text())
        folder = self.folder / "runs" / name
        shutil.rmtree(folder, ignore_errors=True)  # what an earlier call left unfinished
        part = self.folder / f"{name}.part"
        part.write_text(json.dumps(result := make(folder)))
        part.replace(kept)
        shutil.rmtree(folder)
        return result


def by_token(updates: Sequence[Row], key: str) -> float:
    """Mean of a metric over steps, weighted by their completion tokens."""
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
    module: str = "launch.cli",
    variables: Mapping[str, str] | None = None,
) -> FinishedRun:
    """Train as a config says, in a process of its own.

    Args:
        config: TOML file.
        folder: of the run, made anew.
        overrides: arguments of `leeway train`.
        log: what it prints goes there; None: to this process's own output.
        limit_s: a run that takes longer has failed.
        prefix: a command that runs it, such as `taskset`.
        look: shown the folder about every LOOK_EVERY_S while it runs.
        module: whose command it is.
        variables: further ones of its environment.

    Raises:
        RunFailed: it did not end well, or took too long.
    """
    command = [*prefix, sys.executable, "-m", module, "train", str(config)]
    command += ["--run.dir", str(folder.parent), "--run.name", folder.name, *overrides]
    make_model(ROOT / config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") if log else contextlib.nullcontext() as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(**(variables or {})), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            is_over = _follow(process, folder, look, time.monotonic() + limit_s)
        finally:
            end_families(process)
    if not is_over or process.returncode:
        why = f"ended with status {process.returncode}" if is_over else f"took longer than {limit_s:g} s"
        said = log.read_text(errors="replace").splitlines() if log else []
        raise RunFailed(folder.name, why, process.returncode if is_over else None, said)
    return FinishedRun(folder)


def _follow(process: subprocess.Popen[bytes], folder: Path, look: Callable[[Path], None], deadline_s: float) -> bool:
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
