"""The first half hour on a GPU: is the learner right, how fast is it, and which of its choices pay?

    python -m benchmarks.gpu [--part right fast mends] [--steps NAME ...] [--out FILE] [--cpu] [--write] [--list]

    right   facts exact attention head groups stage
    fast    baseline sweep profile copies offloaded
    mends   varlen shadow compiled head2 shared, each against what was before it, in turns on the same batches

Needs one CUDA GPU, torch 2.11 or later and transformers 5.17 or later, and neither vLLM nor Ray; docs/gpu.md says
how to carry what else is missing. A part takes nine minutes at most, a step is a process with a limit of its own, and
each result is a JSON line when it comes, on standard output and at the end of FILE (default: runs/gpu.jsonl). --write
makes docs/results/gpu.md from FILE; with neither part nor step it runs nothing. --cpu runs all of it at a tiny shape.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.page import PAGE, page_of
from benchmarks.gpu.steps import PART_LIMIT_S, PARTS, STEPS, Result, chosen, run_step
from benchmarks.lib.machine import ROOT, describe_commit
from benchmarks.lib.page import write_page
from benchmarks.lib.processes import end_at_sigterm

OUT = ROOT / "runs" / "gpu.jsonl"


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=[], metavar="PART", help=" ".join(PARTS))
    parser.add_argument("--steps", nargs="+", default=[], metavar="NAME", help="by name; see --list")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="JSON lines are added at its end")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, at a tiny shape: to see that all of it runs")
    parser.add_argument("--write", action="store_true", help="make the page from FILE")
    parser.add_argument("--list", action="store_true", help="say what each step answers")
    parsed = parser.parse_args()
    end_at_sigterm()
    if parsed.list:
        print("\n".join(f"{step.part:6} {step.name:18} {step.limit_s:4g} s  {step.answers}" for step in STEPS))
        return
    failed: list[str] = []
    if parsed.part or parsed.steps or not parsed.write:
        try:
            steps = chosen(parsed.part, parsed.steps)
        except ValueError as error:
            parser.error(str(error))
        failed = _run([step.name for step in steps], parsed.out, on_cpu=parsed.cpu)
    if parsed.write:
        _write(parsed.out, parser)
    sys.exit(1 if failed else 0)


def _run(names: list[str], out: Path, *, on_cpu: bool) -> list[str]:
    """The names of those that failed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    left_s, commit = dict.fromkeys(PARTS, PART_LIMIT_S), describe_commit()
    with out.open("a", encoding="utf-8") as file, tempfile.TemporaryDirectory(prefix="benchmark-gpu-") as folder:

        def write(result: Result) -> None:
            line = json.dumps({**result, "commit": commit} if result["case"] in ("software", "took") else result)
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()

        for step in (step for step in STEPS if step.name in names):
            began = time.monotonic()
            if not run_step(
                step, Path(folder), on_cpu=on_cpu, limit_s=left_s[step.part], beside=out.parent, write=write
            ):
                failed.append(step.name)
            left_s[step.part] -= time.monotonic() - began
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return failed


def _write(out: Path, parser: argparse.ArgumentParser) -> None:
    if not out.exists():
        parser.error(f"{out} does not exist: run the steps first, or name their file with --out")
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines() if line.strip()]
    on_gpu = [result for result in found if not result["cpu"]]
    if not on_gpu:
        parser.error(f"{out} has no line from a GPU; there is nothing to write to {PAGE.name}")
    write_page(PAGE, page_of(on_gpu))


if __name__ == "__main__":
    main()
