"""What the figures were measured on: the machine, the commit, and a model of the examples."""

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
    """Of a JSON line."""

    cores: int
    processor: str
    python: str
    load_before: float
    commit: str


def describe_machine() -> Machine:
    """As it is now: call it before anything is measured."""
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        processor=platform.machine(),
        python=platform.python_version(),
        load_before=round(os.getloadavg()[0], 2),
        commit=describe_commit(),
    )


def describe_commit(checkout: Path = ROOT) -> str:
    """Which code runs: the commit, and whether what runs differs from it."""
    if shutil.which("git") is None:
        return "unknown"
    found = []
    for question in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", *OURS]):
        ran = subprocess.run(
            ["git", *question], cwd=checkout, capture_output=True, text=True, check=False, timeout=GIT_LIMIT_S
        )
        found.append(ran.stdout.strip())
    commit, changes = found
    return f"{commit or 'unknown'} with changes" if changes else commit or "unknown"


def smollm2() -> Path:
    """Return the checkpoint folder of SmolLM2-135M, which is made once; errors as `make_model`."""
    return make_model(ROOT / "examples" / "smollm2.toml")


def make_model(config: Path) -> Path:
    """Return the model's folder of a config; make it once if a script of its name lies beside it.

    Raises:
        CalledProcessError: it cannot be made; the script printed why.
    """
    folder = config.parent / tomllib.loads(config.read_text())["model"]["path"]
    script = folder.with_suffix(".py")
    if script.is_file() and not (folder / "model.safetensors").exists():
        subprocess.run([sys.executable, str(script), str(folder)], check=True, timeout=SCRIPT_LIMIT_S)
    return folder
