"""A real `leeway train` in a process of its own, for the end-to-end tests."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

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


def wait_for_end(processes: list[psutil.Process], timeout_s: float) -> list[str]:
    """Names of those that still run after the timeout."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [process.name() for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def wait_for_steps(process: subprocess.Popen[str], folder: Path, count: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the run ended with status {process.returncode}: {process.stdout.read()}")
        metrics = folder / "run" / "metrics.jsonl"
        if metrics.exists() and len(metrics.read_text().splitlines()) >= count:
            return
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    pytest.fail(f"no {count} steps within {timeout_s} s; it said: {output}")
