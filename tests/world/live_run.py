"""A real `leeway train` as a process, whose roles a test can stop, continue and kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pyarrow.parquet as pq
import pytest
from benchmarks.lib.runs import joined

from leeway.buffer.offline.inspect import Inspection, export
from leeway.common.staleness import PolicyVersion
from leeway.launch.errors import ExitStatus
from leeway.launch.run_folder import RunFolder
from leeway.weight_sync.store import WeightStore
from tests.world.files import json_rows

ROOT = Path(__file__).parents[2]
SMALL = [
    *("--learner.num_steps", "12"),
    *("--learner.groups_per_step", "8"),
    *("--learner.checkpoint_every", "5"),
    *("--task.num_heldout", "64"),
    *("--task.num_train", "512"),
    *("--actors.eval_every", "6"),
]


def start(folder: Path, *overrides: str, example: str = "demo") -> subprocess.Popen[str]:
    """Start `leeway train` in a new process group; `example` is the name of one of our examples, or a path."""
    config = str(Path("tests/world" if example == "demo" else "examples", f"{example}.toml"))
    command = [sys.executable, "-m", "leeway", "train", config, "--run.dir", str(folder)]
    return subprocess.Popen(
        [*command, "--run.name", "run", *SMALL, *overrides],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_reset_signals,
    )


def _reset_signals() -> None:
    """Restore default signal handling: signals are ignored if the tests run in the background or under nohup."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def command_of(process: psutil.Process) -> str:
    """Return the command line; empty if the process has just exited."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def wait_for_end(processes: list[psutil.Process], timeout_s: float = 60.0) -> list[str]:
    """Return the names of the processes that still run after the timeout."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [process.name() for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def wait_for_steps(process: subprocess.Popen[str], folder: Path, count: int, timeout_s: float) -> None:
    """Wait until there are `count` rows."""
    seen: list[dict] = []
    wait_for_rows(process, folder, lambda row: seen.append(row) or len(seen) >= count, timeout_s)


def wait_for_rows(
    process: subprocess.Popen[str], folder: Path, is_enough: Callable[[dict], bool], timeout_s: float
) -> None:
    """Pass each row of metrics.jsonl to `is_enough` until it returns True."""
    num_seen = 0
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the run ended with status {process.returncode}: {process.stdout.read()}")
        for row in json_rows(folder / "run" / "metrics.jsonl")[num_seen:]:
            num_seen += 1
            if is_enough(row):
                return
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    pytest.fail(f"after {timeout_s} s there were {num_seen} rows; output: {output}")


def assert_ended_in_order(run: Path) -> None:
    """Assert that an interrupted run finished its current step and saved a checkpoint of it."""
    summary = json.loads((run / "summary.json").read_text())
    assert summary["accuracy_after"] is None
    assert list((run / "checkpoints").glob(f"*{summary['num_steps']}")), "no checkpoint of the last step"


R = TypeVar("R")

GROUP_SIZE = 8
GROUPS_PER_STEP = 8
LIMIT_S = 480.0
"""Timeout of every wait of these tests, in seconds."""


class LiveRun:
    """A run with two actors, two stages, and 8 groups of 8 samples per step; without evaluation during training."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder / "run"
        self.process = start(folder, *("--actors.eval_every", "0"), *("--task.num_heldout", "16"), *overrides)
        self._stopped: list[psutil.Process] = []

    # --- what it reports --------------------------------------------------------------------------

    def steps(self) -> list[dict]:
        """Return the rows of all steps so far; the newest may still lack the columns of the actors."""
        return [row for row in joined(RunFolder(self.folder)) if "loss" in row]

    def events(self, kind: str, name: str | None = None) -> list[dict]:
        """Return all events of a kind so far, or those of one actor."""
        events = [event for event in json_rows(self.folder / "events.jsonl") if event["kind"] == kind]
        return [event for event in events if name is None or event["who"] == name]

    def newest(self, folder: Path | None = None) -> PolicyVersion:
        """Return the newest published version."""
        folder = folder or self.folder / "weights"
        found = WeightStore(folder).newest() if folder.exists() else None  # a store creates its folder
        return found or PolicyVersion(0, -1)

    def ledger(self) -> dict[str, int]:
        """Return the buffer's ledger, read from its files."""
        with Inspection.open(self.folder / "buffer") as inspection:
            return inspection.state().ledger.counts()

    def trajectories(self) -> list[dict[str, Any]]:
        """Return all stored trajectories."""
        out = self.folder / "trajectories.parquet"
        with Inspection.open(self.folder / "buffer") as inspection:
            export(inspection, out)
        return pq.read_table(out).to_pylist()

    def wait_for(self, name: str, read: Callable[[], R], limit_s: float = LIMIT_S, every_s: float = 0.1) -> R:
        """Poll `read` until its result is true; return the result."""
        deadline = time.monotonic() + limit_s
        while not (result := read()):
            if self.process.poll() is not None:
                pytest.fail(f"the run ended with {self.process.returncode} before {name}: {self.process.stdout.read()}")
            if time.monotonic() > deadline:
                events = json_rows(self.folder / "events.jsonl")
                pytest.fail(f"waited {limit_s:.0f} s for {name}; its events: {events[-8:]}")
            time.sleep(every_s)
        return result

    def wait_for_steps(self, count: int) -> None:
        """Wait until `count` more steps are reported."""
        goal = len(self.steps()) + count
        self.wait_for(f"step {goal}", lambda: len(self.steps()) >= goal)

    def end(self, *, now: bool = False, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """Wait until the run has exited successfully without leaving a process; return its summary.

        Args:
            now: request an end after the current step, with a checkpoint.
            limit_s: timeout in seconds.
        """
        family = descendants(self.process)
        if now:
            self.process.send_signal(signal.SIGTERM)
        output, _ = self.process.communicate(timeout=limit_s)
        assert self.process.returncode == (ExitStatus.INTERRUPTED if now else ExitStatus.OK), output
        assert wait_for_end(family) == []
        return json.loads((self.folder / "summary.json").read_text())

    # --- faults -----------------------------------------------------------------------------------

    def processes(self, role: str, number: int = 0) -> list[psutil.Process]:
        """Return the processes that write to the log of a role: its own, which is the oldest, and its engine."""
        log = str(self.folder / "logs" / f"{role}.{number}.log")
        found = [each for each in descendants(self.process) if _writes_into(each) == log]
        # a child that the role has just forked has its name until it executes another program
        return sorted(found, key=lambda each: (not command_of(each).startswith("ray::"), each.create_time()))

    def kill(self, role: str, number: int = 0) -> None:
        """Kill a role with SIGKILL."""
        self.processes(role, number)[0].kill()

    @contextmanager
    def stopped(self, *roles: tuple[str, int]) -> Iterator[None]:
        """Stop roles with SIGSTOP for the duration of a block."""
        family = [each for role in roles for each in self.processes(*role)]
        assert len(family) >= len(roles)
        self._stopped += family
        for each in family:
            each.suspend()
        try:
            yield
        finally:
            for each in family:
                with suppress(psutil.NoSuchProcess):
                    each.resume()
                self._stopped.remove(each)

    def close(self) -> None:
        """Kill all processes that are left."""
        if self.process.poll() is None:
            family = descendants(self.process)
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate(timeout=60)
            wait_for_end(family)
        if self.process.stdout is not None:
            self.process.stdout.close()


def _writes_into(process: psutil.Process) -> str:
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1")
    except OSError:
        return ""
