"""Run all steps of the GPU benchmark on the CPU, with and without optional packages."""

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
"""Packages that a bare GPU machine may lack; only other benchmark steps or other parts of Leeway need them."""
BLOCKER = f"""
from importlib.machinery import PathFinder

find = PathFinder.find_spec


def find_spec(name, *others):
    return None if name.partition(".")[0] in {LACKING!r} else find(name, *others)


PathFinder.find_spec = staticmethod(find_spec)
"""


@pytest.mark.full
def test_steps_without_an_engine_run_on_the_cpu_without_optional_packages(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    parts = [part for part in PARTS if part not in WITH_ENGINE]
    lines = _rehearse(tmp_path, parts, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert {line["step"] for line in lines if line["case"] == "took"} == {
        step.name for step in STEPS if step.part in parts
    }
    assert (tmp_path / "results" / "profile.txt").stat().st_size


@pytest.mark.full
def test_engine_demo_and_pair_run_on_the_cpu_and_store_reports_and_metrics(tmp_path):
    lines = _rehearse(tmp_path, WITH_ENGINE)
    cases = {(line["step"], line["case"]) for line in lines}
    assert {("engine", "after updates, keep"), ("engine of vLLM", "lag 0, head in bfloat16")} <= cases
    for name in ("demo", "pair-max-lag-4", "pair-max-lag-0"):
        for file in ("report.html", "metrics.jsonl"):
            assert (tmp_path / "results" / name / file).stat().st_size


def _rehearse(folder, parts, **variables):
    """Run some parts and return their lines; fail if a step failed."""
    out = folder / "results" / "gpu.jsonl"
    environment = {**os.environ, **variables}
    command = [sys.executable, "-m", "benchmarks.gpu", "--cpu", "--part", *parts, "--out", str(out)]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert out.exists(), ran.stderr[-4000:]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line for line in lines if "failed" in line] == [], ran.stderr[-4000:]
    assert ran.returncode == 0
    return lines
