"""Steps of the benchmark, each run as a process: `python -m benchmarks.gpu.steps NAME FOLDER OUTPUT --limit-s S`.

A step prints each result as a line immediately, so that results survive if the step fails or hangs later.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.lib.machine import ROOT
from benchmarks.lib.processes import end_families, end_with_parent, environment

PARTS = {"right": 540.0, "fast": 540.0, "mends": 540.0, "engine": 240.0, "demo": 150.0, "pair": 240.0, "gaps": 120.0}
"""Part -> time limit in seconds. A GPU machine may be available for ten minutes at a time, so limits are short."""
SHAPES_OF_PARTS = {"fast": "1.5B", "mends": "1.5B", "engine": "0.6B", "pair": "0.6B", "gaps": "1.5B"}
"""Part -> shape of its steps whose options contain no shape."""
WITH_ENGINE = ("engine", "demo", "pair")
"""Parts that need vLLM; the last two also need Ray."""
ON_CPU = 2.0
"""Factor of every time limit on a CPU, whose cores other processes may use."""
JOIN_S = 5.0
"""Seconds to wait for the last lines of a process that has exited."""

Result = dict[str, Any]
"""One line of results."""


@dataclass(frozen=True)
class Step:
    """A measurement, and the function that runs it."""

    name: str
    part: str
    limit_s: float
    function: str
    """MODULE:FUNCTION of this package, which is called with a Place and the options."""
    answers: str
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def shape(self) -> str | None:
        """Shape of the model that the step trains or serves; None if the model fits on any card."""
        return self.options.get("shape", SHAPES_OF_PARTS.get(self.part))


def _baseline(name: str, answers: str, *, limit_s: float = 70, **more: Any) -> Step:  # noqa: ANN401 -- fields of a Step
    return Step(name, "fast", limit_s, "fast:baseline", answers, **more)


STEPS: tuple[Step, ...] = (
    Step("facts", "right", 60, "right:facts", "versions; attention kernels; copies, products and memory traffic"),
    Step("exact", "right", 110, "right:exact", "loss and all gradients against the CPU: Llama, Qwen2, Gemma 2"),
    Step("attention", "right", 70, "right:attention", "packed attention against its formula; dtypes of kernel calls"),
    Step("head", "right", 80, "right:head", "error of log-probabilities in nats; ms by chunk size"),
    Step("groups", "right", 70, "right:groups", "process group over NCCL; error for two ranks on one GPU"),
    Step("stage", "right", 150, "life:stage", "a stage: kill -9 after step 4, resume, export"),
    _baseline("baseline", "seconds of a step on new batches; attention shapes, memory"),
    _baseline("baseline 0.5B", "seconds of a step of a smaller model", limit_s=50, options={"shape": "0.5B"}),
    _baseline(
        "baseline segments",
        "seconds of a step with expandable segments",
        environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    ),
    Step("sweep", "fast", 160, "fast:sweep", "chunks, budgets, checkpointing, passes: tokens/s, MFU, memory"),
    Step("profile", "fast", 50, "fast:profile", "kernels of one micro-batch by time; idle time of the GPU"),
    Step("launching", "fast", 40, "fast:launching", "ms of a full and of a nearly empty micro-batch: launch overhead"),
    Step("copies", "fast", 70, "fast:copies", "GB/s of versions, checkpoints and optimizer; a step during writes"),
    Step("offloaded", "fast", 30, "fast:offloaded", "GB/s of the reference from host memory to the GPU"),
    Step("varlen", "mends", 120, "mends:varlen", "one varlen kernel against buckets: ms by layout, and of a step"),
    Step("shadow", "mends", 150, "mends:shadow", "weights in bf16, fused kernels: ms, error of gradients"),
    Step("compiled", "mends", 90, "mends:compiled", "layers compiled by torch: ms, error of gradients"),
    Step("head2", "mends", 60, "mends:head2", "gradient of the head: out_dtype against a product and a sum"),
    Step("shared", "mends", 110, "mends:shared", "step time next to a decoding process on the same GPU; memory cap"),
    Step("engine", "engine", 160, "engine:leeway", "startup, tokens/s, lag-0 mismatch, 20 updates during 64 requests"),
    Step(
        "engine of vLLM", "engine", 80, "engine:vllm", "the requests of `engine` with vLLM's defaults: rate, mismatch"
    ),
    Step("demo", "demo", 150, "whole:demo", "complete run of examples/demo.toml"),
    Step("pair asynchronous", "pair", 130, "whole:pair", "20 steps at max_lag 4", options={"max_lag": 4}),
    Step("pair synchronous", "pair", 110, "whole:pair", "20 steps at max_lag 0", options={"max_lag": 0}),
    Step("gaps", "gaps", 120, "gaps:gaps", "time of a step outside its micro-batches; clocks and power"),
)


def chosen(parts: Sequence[str], names: Sequence[str]) -> list[Step]:
    """Return the steps that match the parts and the names, in order; an empty sequence matches all.

    Raises:
        ValueError: a name is unknown.
    """
    unknown = set(names) - {step.name for step in STEPS}
    if unknown:
        raise ValueError(f"no step {', '.join(sorted(unknown))}: choose from {', '.join(step.name for step in STEPS)}")
    return [step for step in STEPS if (not parts or step.part in parts) and (not names or step.name in names)]


def run_step(
    step: Step,
    folder: Path,
    *,
    on_cpu: bool,
    limit_s: float,
    output_folder: Path,
    write: Callable[[Result], None],
    engine_args: Mapping[str, object] | None = None,
) -> bool:
    """Run a step in its own process; pass each result, and a last line with the duration, to `write`.

    Args:
        step: step to run.
        folder: temporary folder shared by all steps.
        on_cpu: use the CPU and tiny shapes.
        limit_s: seconds that remain for the part. The limit of the step, multiplied by ON_CPU on the CPU, also applies.
        output_folder: folder for tables and traces.
        write: receives each result.
        engine_args: additional arguments of every vLLM engine.

    Returns whether the process exited with status 0.
    """
    limit_s = min(limit_s, step.limit_s * (ON_CPU if on_cpu else 1))
    start = time.monotonic()
    command = [sys.executable, "-m", __name__, step.name, str(folder), str(output_folder), "--limit-s", str(limit_s)]
    command += ["--cpu"] if on_cpu else []
    command += ["--engine-args", json.dumps(engine_args)] if engine_args else []
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        # copies of models for serving, and compiled code, are removed together with the models
        env=environment(**{"XDG_CACHE_HOME": str(folder / "cache"), **step.environment}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    has_reason: list[bool] = []
    last_line: list[str] = []
    assert process.stdout is not None
    assert process.stderr is not None

    def write_line(line: str) -> None:
        try:
            result = json.loads(line)
        except ValueError:
            print(line, file=sys.stderr)
            return
        has_reason.append("failed" in result)
        write(result)

    readers = [_read(process.stdout, write_line), _read(process.stderr, lambda line: _relay(line, last_line))]
    reason = ""
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        status, reason = -1, f"timed out after {limit_s:g} s"
    finally:
        end_families(process)
        for reader in readers:
            reader.join(JOIN_S)
    if status and not reason and not any(has_reason):
        reason = f"the process exited with status {status}: {last_line[-1] if last_line else 'no output on stderr'}"
    seconds = round(time.monotonic() - start, 1)
    failed = {"failed": reason} if reason else {}
    write({"step": step.name, "case": "took", "cpu": on_cpu, "seconds": seconds, **failed})
    return status == 0


def _read(stream: IO[str], handle: Callable[[str], None]) -> threading.Thread:
    def read() -> None:
        with stream:
            for line in stream:
                if line.strip():
                    handle(line.rstrip())

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def _relay(line: str, last_line: list[str]) -> None:
    print(line, file=sys.stderr, flush=True)
    last_line[:] = [line]


def main() -> None:
    """Run one step in this process."""
    end_with_parent()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step")
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--limit-s", type=float, required=True)
    parser.add_argument("--engine-args", type=json.loads, default={})
    args = parser.parse_args()
    (step,) = (step for step in STEPS if step.name == args.step)
    try:
        from benchmarks.gpu.place import Place

        place = Place(step.name, args.folder, on_cpu=args.cpu, output_folder=args.output, engine_args=args.engine_args)
        module, _, name = step.function.partition(":")
        getattr(importlib.import_module(f"{__package__}.{module}"), name)(place, **step.options)
    except Exception as error:
        traceback.print_exc()
        failed = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print("\n" + json.dumps({"step": step.name, "case": "failed", "cpu": args.cpu, "failed": failed}), flush=True)
        sys.exit(1)
    place.close()
    sys.stdout.flush()
    # skip the interpreter shutdown, in which libraries may block
    os._exit(0)


if __name__ == "__main__":
    main()
