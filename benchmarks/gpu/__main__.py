"""Measure correctness and speed of the learner, an engine and complete runs on one GPU.

    python -m benchmarks.gpu [--part NAME ...] [--steps NAME ...] [--out FILE] [--cpu] [--write] [--list]

Each part consists of steps:

    right   facts, exact, attention, head, groups, stage: correctness of the learner
    fast    baseline, sweep, profile, launching, copies, offloaded: speed of the learner
    mends   varlen, shadow, compiled, head2, shared: optimizations compared with alternatives on the same batches
    engine  startup, tokens/s, log-probabilities and weight updates of Leeway's engine, and rates of vLLM's defaults
    demo    a run of examples/demo.toml on the GPU
    pair    runs with random weights in the shape of Qwen3-0.6B, asynchronous and at max_lag 0
    gaps    time of a learner step outside its micro-batches

The benchmark needs one CUDA GPU; the parts engine, demo and pair also need vLLM and Ray. README.md in this folder
explains how to install vLLM and Ray on a machine without network. Each step runs in its own process with a time limit.
Each result is a JSON line with commit, card and versions. The line is written to standard output and appended to FILE
(default: runs/gpu.jsonl). --write generates docs/results/gpu.md from FILE, and runs no step unless --part or --steps is
given. --cpu uses the CPU and a tiny shape.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.card import UnsuitableMachine, check, origin
from benchmarks.gpu.page import PAGE, page_of
from benchmarks.gpu.steps import ON_CPU, PARTS, STEPS, Result, Step, chosen, run_step
from benchmarks.lib.machine import ROOT
from benchmarks.lib.page import write_page
from benchmarks.lib.processes import end_at_sigterm

OUT = ROOT / "runs" / "gpu.jsonl"


def main() -> None:
    """Run the selected steps, write the page, or both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=[], metavar="PART", help=" ".join(PARTS))
    parser.add_argument("--steps", nargs="+", default=[], metavar="NAME", help="names of steps, which --list prints")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="append the JSON lines to this file")
    parser.add_argument("--cpu", action="store_true", help="test all steps on the CPU, at a tiny shape")
    parser.add_argument(
        "--engine-args",
        type=_table,
        default={},
        metavar="JSON",
        help="additional arguments of every vLLM engine, such as '{\"enforce_eager\": true}'",
    )
    parser.add_argument("--write", action="store_true", help="write the page from FILE")
    parser.add_argument("--list", action="store_true", help="list the steps with their time limits")
    parsed = parser.parse_args()
    end_at_sigterm()
    if parsed.list:
        print("\n".join(f"{step.part:6} {step.name:18} {step.limit_s:4g} s  {step.answers}" for step in STEPS))
        return
    failed: list[str] = []
    if parsed.part or parsed.steps or not parsed.write:
        try:
            steps = chosen(parsed.part, parsed.steps)
            check(steps, on_cpu=parsed.cpu)
        except ValueError as error:
            parser.error(str(error))
        except UnsuitableMachine as error:
            sys.exit(f"benchmarks.gpu: {error}")
        failed = _run(steps, parsed.out, on_cpu=parsed.cpu, engine_args=parsed.engine_args)
    if parsed.write:
        _write(parsed.out, parser)
    sys.exit(1 if failed else 0)


def _table(text: str) -> dict[str, object]:
    """Parse the JSON object of a command-line option."""
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise argparse.ArgumentTypeError(f'expected a JSON object such as {{"enforce_eager": true}}, got {text!r}')
    return parsed


def _run(steps: list[Step], out: Path, *, on_cpu: bool, engine_args: dict[str, object]) -> list[str]:
    """Run steps in order; return the names of the failed steps."""
    out.parent.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    common = origin(on_cpu=on_cpu)
    remaining_s = {part: limit_s * (ON_CPU if on_cpu else 1) for part, limit_s in PARTS.items()}
    with out.open("a", encoding="utf-8") as file, tempfile.TemporaryDirectory(prefix="benchmark-gpu-") as folder:

        def write(result: Result) -> None:
            line = json.dumps({**result, **common})
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()

        for step in steps:
            began = time.monotonic()
            succeeded = run_step(
                step,
                Path(folder),
                on_cpu=on_cpu,
                limit_s=remaining_s[step.part],
                output_folder=out.parent,
                write=write,
                engine_args=engine_args,
            )
            if not succeeded:
                failed.append(step.name)
            remaining_s[step.part] -= time.monotonic() - began
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return failed


def _write(out: Path, parser: argparse.ArgumentParser) -> None:
    if not out.exists():
        parser.error(f"{out} does not exist: run the steps first, or set --out to the file with their results")
    results = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines() if line.strip()]
    on_gpu = [result for result in results if not result["cpu"]]
    if not on_gpu:
        parser.error(f"{out} has no line from a GPU: run steps without --cpu before writing {PAGE.name}")
    write_page(PAGE, page_of(on_gpu))


if __name__ == "__main__":
    main()
