"""The first half hour on a GPU: is the learner right, how fast is it, and do an engine and whole runs work?

    python -m benchmarks.gpu [--part NAME ...] [--steps NAME ...] [--out FILE] [--cpu] [--write] [--list]

    right   facts exact attention head groups stage
    fast    baseline sweep profile launching copies offloaded
    mends   varlen shadow compiled head2 shared, each against what was before it, in turns on the same batches
    engine  start, tokens/s, log-probabilities and updates in flight of Leeway's engine; vLLM's defaults beside it
    demo    examples/demo.toml on the card
    pair    random weights in the shape of Qwen3-0.6B, asynchronously and at max_lag 0
    gaps    where a step of the learner spends what its micro-batches do not

Needs one CUDA GPU; engine, demo and pair also need vLLM and Ray. README.md of this folder says how to carry them to a
machine without network. A step is a process with a limit of its own. Each result is a JSON line with commit, card and
versions, on standard output and at the end of FILE (default: runs/gpu.jsonl). --write makes docs/results/gpu.md from
FILE; with neither part nor step it runs nothing. --cpu runs all of it at a tiny shape.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.card import Unfit, check, origin
from benchmarks.gpu.page import PAGE, page_of
from benchmarks.gpu.steps import ON_CPU, PARTS, STEPS, Result, Step, chosen, run_step
from benchmarks.lib.machine import ROOT
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
    parser.add_argument(
        "--engine-args",
        type=_table,
        default={},
        metavar="JSON",
        help="further arguments of every vLLM engine, such as '{\"enforce_eager\": true}'",
    )
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
            check(steps, on_cpu=parsed.cpu)
        except ValueError as error:
            parser.error(str(error))
        except Unfit as error:
            sys.exit(f"benchmarks.gpu: {error}")
        failed = _run(steps, parsed.out, on_cpu=parsed.cpu, engine_args=parsed.engine_args)
    if parsed.write:
        _write(parsed.out, parser)
    sys.exit(1 if failed else 0)


def _table(text: str) -> dict[str, object]:
    """Read a JSON object."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'expected a JSON object such as {{"enforce_eager": true}}, got {text!r}')
    return found


def _run(steps: list[Step], out: Path, *, on_cpu: bool, engine_args: dict[str, object]) -> list[str]:
    """Run steps in order; return the names of those that failed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    of_all = origin(on_cpu=on_cpu)
    left_s = {part: limit_s * (ON_CPU if on_cpu else 1) for part, limit_s in PARTS.items()}
    with out.open("a", encoding="utf-8") as file, tempfile.TemporaryDirectory(prefix="benchmark-gpu-") as folder:

        def write(result: Result) -> None:
            line = json.dumps({**result, **of_all})
            print(line, flush=True)
            file.write(line + "\n")
            file.flush()

        for step in steps:
            began = time.monotonic()
            came_to_its_end = run_step(
                step,
                Path(folder),
                on_cpu=on_cpu,
                limit_s=left_s[step.part],
                beside=out.parent,
                write=write,
                engine_args=engine_args,
            )
            if not came_to_its_end:
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
