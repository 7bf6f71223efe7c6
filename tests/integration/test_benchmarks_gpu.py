"""The rehearsal for a GPU, all of it, on the CPU; and what it has to be brought where it is to run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.steps import PARTS, STEPS, WITH_ENGINE

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
def test_every_step_that_needs_no_engine_runs_on_the_cpu_without_what_a_bare_machine_lacks(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    parts = [part for part in PARTS if part not in WITH_ENGINE]
    told = _rehearse(tmp_path, parts, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert {line["step"] for line in told if line["case"] == "took"} == {
        step.name for step in STEPS if step.part in parts
    }
    assert (tmp_path / "results" / "profile.txt").stat().st_size


@pytest.mark.full
def test_engine_demo_and_pair_run_on_the_cpu_and_keep_reports_and_metrics(tmp_path):
    told = _rehearse(tmp_path, WITH_ENGINE)
    cases = {(line["step"], line["case"]) for line in told}
    assert {("engine", "after updates, keep"), ("engine of vLLM", "lag 0, head in bfloat16")} <= cases
    for name in ("demo", "pair-max-lag-4", "pair-max-lag-0"):
        for file in ("report.html", "metrics.jsonl"):
            assert (tmp_path / "results" / name / file).stat().st_size


def _rehearse(folder, parts, **variables):
    """The lines of some parts, none of which may have failed."""
    out = folder / "results" / "gpu.jsonl"
    environment = {**os.environ, **variables}
    command = [sys.executable, "-m", "benchmarks.gpu", "--cpu", "--part", *parts, "--out", str(out)]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert out.exists(), ran.stderr[-4000:]
    told = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line for line in told if "failed" in line] == [], ran.stderr[-4000:]
    assert ran.returncode == 0
    return told
