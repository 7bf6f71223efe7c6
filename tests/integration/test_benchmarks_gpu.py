"""The rehearsal for a GPU, all of it, on the CPU; and what it has to be brought where it is to run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.steps import STEPS

ROOT = Path(__file__).parents[2]
LACKING = (
    "vllm",
    "ray",
    "wandb",
    "rich",
    "prometheus_client",
    "jinja2",
    "pandas",
    "matplotlib",
    "reasoning_gym",
    "gguf",
)
"""Of what Leeway and its benchmarks need elsewhere, what a bare machine with a GPU need not have."""
BLOCKER = f"""
from importlib.machinery import PathFinder

find = PathFinder.find_spec


def find_spec(name, *others):
    return None if name.partition(".")[0] in {LACKING!r} else find(name, *others)


PathFinder.find_spec = staticmethod(find_spec)
"""


@pytest.mark.full
def test_every_step_of_the_rehearsal_runs_on_the_cpu_without_what_a_bare_machine_lacks(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    out = tmp_path / "results" / "gpu.jsonl"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "benchmarks.gpu", "--cpu", "--out", str(out)]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert out.exists(), ran.stderr[-4000:]
    told = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line for line in told if "failed" in line] == [], ran.stderr[-4000:]
    assert ran.returncode == 0
    assert {line["step"] for line in told if line["case"] == "took"} == {step.name for step in STEPS}
    assert (out.parent / "profile.txt").stat().st_size
