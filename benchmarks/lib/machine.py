"""Description of the machine and the commit of a measurement, and example models."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TypedDict

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
OURS = ("actors", "algorithms", "buffer", "common", "examples", "launch", "learner", "weight_sync")
GIT_LIMIT_S = 30.0
SCRIPT_LIMIT_S = 300.0


class Machine(TypedDict):
    """Description of the machine in a benchmark's JSON line."""

    cores: int
    processor: str
    python: str
    load_before: float
    commit: str


def describe_machine() -> Machine:
    """Describe the machine and its current load; call this function before the measurement starts."""
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        processor=platform.machine(),
        python=platform.python_version(),
        load_before=round(os.getloadavg()[0], 2),
        commit=describe_commit(),
    )


def describe_commit(checkout: Path = ROOT) -> str:
    """Return the current commit, and whether the code of the checkout differs from this commit."""
    if shutil.which("git") is None:
        return "unknown"
    found = []
    for arguments in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", *OURS]):
        completed = subprocess.run(
            ["git", *arguments], cwd=checkout, capture_output=True, text=True, check=False, timeout=GIT_LIMIT_S
        )
        found.append(completed.stdout.strip())
    commit, changes = found
    return f"{commit or 'unknown'} with changes" if changes else commit or "unknown"


def smollm2() -> Path:
    """Return the checkpoint folder of SmolLM2-135M; create the folder if missing. Raises the errors of `make_model`."""
    return make_model(ROOT / "examples" / "smollm2.toml")


def make_model(config: Path) -> Path:
    """Return the model folder of a config. A script next to the folder, if any, creates a missing folder.

    Raises:
        CalledProcessError: the script failed and printed the reason.
    """
    folder = config.parent / tomllib.loads(config.read_text())["model"]["path"]
    script = folder.with_suffix(".py")
    if script.is_file() and not (folder / "model.safetensors").exists():
        subprocess.run([sys.executable, str(script), str(folder)], check=True, timeout=SCRIPT_LIMIT_S)
    return folder
