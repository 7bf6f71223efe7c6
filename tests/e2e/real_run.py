"""A real `leeway train` in a process of its own, for the end-to-end tests."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.files import json_rows

ROOT = Path(__file__).parents[2]
SMALL = [
    *("--learner.num_steps", "12"),
    *("--learner.groups_per_step", "8"),
    *("--learner.checkpoint_every", "5"),
    *("--task.num_heldout", "64"),
    *("--task.num_train", "512"),
    *("--actors.eval_every", "6"),
    *("--actors.eval_problems", "32"),
]


def start(folder: Path, *overrides: str, example: str = "demo") -> subprocess.Popen[str]:
    """Start `leeway train` on the demo, in a process group of its own."""
    command = [sys.executable, "-m", "launch.cli", "train", f"examples/{example}.toml", "--run.dir", str(folder)]
    return subprocess.Popen(
        [*command, "--run.name", "run", *SMALL, *overrides],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def command_of(process: psutil.Process) -> str:
    """Its command line; empty where it has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def wait_for_end(processes: list[psutil.Process], timeout_s: float = 60.0) -> list[str]:
    """Names of those that still run after the timeout."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [process.name() for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def wait_for_steps(process: subprocess.Popen[str], folder: Path, count: int, timeout_s: float) -> None:
    """Wait until so many rows are there."""
    seen: list[dict] = []
    wait_for_rows(process, folder, lambda row: seen.append(row) or len(seen) >= count, timeout_s)


def wait_for_rows(
    process: subprocess.Popen[str], folder: Path, is_enough: Callable[[dict], bool], timeout_s: float
) -> None:
    """Show a test each row of metrics.jsonl as it comes, until it has seen enough."""
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
    pytest.fail(f"after {timeout_s} s there were {num_seen} rows; it said: {output}")


def assert_ended_in_order(run: Path) -> None:
    """Of a run that was interrupted: the step at hand was finished, and is in a checkpoint."""
    summary = json.loads((run / "summary.json").read_text())
    assert summary["accuracy_after"] is None
    assert list((run / "checkpoints").glob(f"*{summary['num_steps']}")), "no checkpoint of the last step"
