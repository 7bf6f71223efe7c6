"""The steps of the rehearsal, each a process with a limit: `python -m benchmarks.gpu.steps NAME FOLDER BESIDE`.

A step tells what it finds line by line, so that what it found before it failed or hung is not lost.
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
"""Part -> seconds that it takes at most: a machine with a GPU may be lent for ten minutes at a time."""
SHAPES_OF_PARTS = {"fast": "1.5B", "mends": "1.5B", "engine": "0.6B", "pair": "0.6B", "gaps": "1.5B"}
"""Part -> the shape of its steps, if their options name none."""
WITH_ENGINE = ("engine", "demo", "pair")
"""Parts that need vLLM; the last two also need Ray."""
ON_CPU = 2.0
"""Factor of every limit on a CPU, whose cores others may use too."""
JOIN_S = 5.0
"""For the last lines of a process that has ended."""

Result = dict[str, Any]
"""One line."""


@dataclass(frozen=True)
class Step:
    """One question and who answers it."""

    name: str
    part: str
    limit_s: float
    function: str
    """"module:function" of this package; called with a Place and the options."""
    answers: str
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def shape(self) -> str | None:
        """What it trains or serves; None if that is small on any card."""
        return self.options.get("shape", SHAPES_OF_PARTS.get(self.part))


def _baseline(name: str, answers: str, *, limit_s: float = 70, **more: Any) -> Step:  # noqa: ANN401 -- fields of a Step
    return Step(name, "fast", limit_s, "fast:baseline", answers, **more)


STEPS: tuple[Step, ...] = (
    Step("facts", "right", 60, "right:facts", "versions; attention's order; copies, products and memory traffic"),
    Step("exact", "right", 110, "right:exact", "loss and every gradient against the CPU: Llama, Qwen2, Gemma 2"),
    Step(
        "attention", "right", 70, "right:attention", "packed attention against its formula; dtypes that reach a kernel"
    ),
    Step("head", "right", 80, "right:head", "error of log-probabilities in nats; ms by size of a chunk"),
    Step("groups", "right", 70, "right:groups", "ranks meet over NCCL; what it says of two on one GPU"),
    Step("stage", "right", 150, "life:stage", "a whole stage: kill -9 after step 4, resume, export"),
    _baseline("baseline", "s of a step on fresh batches; shapes, memory"),
    _baseline("baseline 0.5B", "the same, of a smaller model", limit_s=50, options={"shape": "0.5B"}),
    _baseline(
        "baseline segments",
        "the same, with segments that grow",
        environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    ),
    Step("sweep", "fast", 160, "fast:sweep", "chunks, budgets, checkpointing, passes: tokens/s, MFU, memory"),
    Step("profile", "fast", 50, "fast:profile", "kernels of one micro-batch by time, and how long the GPU waits"),
    Step(
        "launching", "fast", 40, "fast:launching", "ms of a micro-batch, full and all but empty: does the host keep up?"
    ),
    Step("copies", "fast", 70, "fast:copies", "versions, checkpoints, the optimizer: GB/s; a step beside them"),
    Step("offloaded", "fast", 30, "fast:offloaded", "the reference from host memory to the GPU: GB/s"),
    Step("varlen", "mends", 120, "mends:varlen", "one varlen kernel against buckets: ms of real layouts, then a step"),
    Step("shadow", "mends", 150, "mends:shadow", "weights in bf16, fused kernels: ms, error of gradients"),
    Step("compiled", "mends", 90, "mends:compiled", "layers compiled by torch in place of fused kernels: the same"),
    Step("head2", "mends", 60, "mends:head2", "the head's gradient by out_dtype against a product and a sum"),
    Step("shared", "mends", 110, "mends:shared", "a neighbour that decodes on the same GPU: step time, memory"),
    Step("engine", "engine", 160, "engine:leeway", "start, tokens/s, mismatch at lag 0, 20 updates under 64 requests"),
    Step("engine of vLLM", "engine", 80, "engine:vllm", "the same requests by vLLM's defaults: tokens/s, mismatch"),
    Step("demo", "demo", 150, "whole:demo", "examples/demo.toml as a whole"),
    Step("pair asynchronous", "pair", 130, "whole:pair", "20 steps at max_lag 4", options={"max_lag": 4}),
    Step("pair synchronous", "pair", 110, "whole:pair", "the same at max_lag 0", options={"max_lag": 0}),
    Step("gaps", "gaps", 120, "gaps:gaps", "where a step spends what its micro-batches do not; clocks and power"),
)


def chosen(parts: Sequence[str], names: Sequence[str]) -> list[Step]:
    """Steps of some parts, or by name, in order; all where neither is said.

    Raises:
        ValueError: there is no such step.
    """
    unknown = set(names) - {step.name for step in STEPS}
    if unknown:
        raise ValueError(f"no step {', '.join(sorted(unknown))}; there are {', '.join(step.name for step in STEPS)}")
    return [step for step in STEPS if (not parts or step.part in parts) and (not names or step.name in names)]


def run_step(
    step: Step,
    folder: Path,
    *,
    on_cpu: bool,
    limit_s: float,
    beside: Path,
    write: Callable[[Result], None],
    engine_args: Mapping[str, object] | None = None,
) -> bool:
    """Run a step in a process of its own, and hand on its lines as they come, and one that says so where it fails.

    Args:
        step: which.
        folder: that steps share.
        on_cpu: at tiny shapes.
        limit_s: seconds that are left. Its own limit holds too, and is ON_CPU times as long on the CPU.
        beside: a folder for its tables and traces.
        write: takes each line.
        engine_args: further arguments of every vLLM engine.

    Returns whether it came to its end.
    """
    limit_s = min(limit_s, step.limit_s * (ON_CPU if on_cpu else 1))
    start = time.monotonic()
    command = [sys.executable, "-m", __name__, step.name, str(folder), str(beside), "--limit-s", str(limit_s)]
    command += ["--cpu"] if on_cpu else []
    command += ["--engine-args", json.dumps(engine_args)] if engine_args else []
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        # copies of models and compiled code go with the models
        env=environment(**{"XDG_CACHE_HOME": str(folder / "cache"), **step.environment}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    told_why: list[bool] = []
    said: list[str] = []
    assert process.stdout is not None
    assert process.stderr is not None

    def hand_on(line: str) -> None:
        try:
            result = json.loads(line)
        except ValueError:
            print(line, file=sys.stderr)
            return
        told_why.append("failed" in result)
        write(result)

    readers = [_read(process.stdout, hand_on), _read(process.stderr, lambda line: _relay(line, said))]
    why = ""
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        status, why = -1, f"took longer than {limit_s:g} s"
    finally:
        end_families(process)
        for reader in readers:
            reader.join(JOIN_S)
    if status and not why and not any(told_why):
        why = f"its process ended with status {status}: {said[-1] if said else 'it said nothing'}"
    seconds = round(time.monotonic() - start, 1)
    write({"step": step.name, "case": "took", "cpu": on_cpu, "seconds": seconds, **({"failed": why} if why else {})})
    return status == 0


def _read(stream: IO[str], take: Callable[[str], None]) -> threading.Thread:
    def read() -> None:
        with stream:
            for line in stream:
                if line.strip():
                    take(line.rstrip())

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def _relay(line: str, said: list[str]) -> None:
    print(line, file=sys.stderr, flush=True)
    said[:] = [line]


def main() -> None:
    """Be a step."""
    end_with_parent()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step")
    parser.add_argument("folder", type=Path)
    parser.add_argument("beside", type=Path)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--limit-s", type=float, required=True)
    parser.add_argument("--engine-args", type=json.loads, default={})
    parsed = parser.parse_args()
    (step,) = (step for step in STEPS if step.name == parsed.step)
    try:
        from benchmarks.gpu.place import Place

        place = Place(step.name, parsed.folder, on_cpu=parsed.cpu, beside=parsed.beside, engine_args=parsed.engine_args)
        module, _, name = step.function.partition(":")
        getattr(importlib.import_module(f"{__package__}.{module}"), name)(place, **step.options)
    except Exception as error:
        traceback.print_exc()
        failed = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print("\n" + json.dumps({"step": step.name, "case": "failed", "cpu": parsed.cpu, "failed": failed}), flush=True)
        sys.exit(1)
    place.close()
    sys.stdout.flush()
    # what a library still waits for when an interpreter ends is no part of the step
    os._exit(0)


if __name__ == "__main__":
    main()
