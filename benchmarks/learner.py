"""The learner: what packing, pipeline and log-probabilities cost, and what they save. Prints one JSON line last.

    python benchmarks/learner.py [--quick] [--only NAME ...] [--gpu]

    packing      real tokens over the tokens of the micro-batches, on long-tailed lengths
    padded       the learner's packed step against a plain padded Transformers loop
    logprobs     peak memory of log-probabilities, in chunks and through the full logits
    sleeping2/4  every schedule on 2 and on 4 stages that sleep: gain and bubble
    real         two stages with real compute, one core each
    smollm2      SmolLM2-135M on two stages in bf16, against a plain loop on both cores
    gpu          only with --gpu: the shape of Qwen2.5-1.5B on one GPU

Each measurement runs in processes of its own (`learner_parts/processes.py`); sides that are compared take turns, and
ratios are medians of rounds. Every part says in its docstring what it compares. `--quick` is for development: smaller,
and its figures mean nothing. A whole run writes docs/results/learner.md; --gpu adds its section alone.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.learner_parts.processes import Figures, MeasurementFailed, run_measurement
from benchmarks.learner_parts.report import judged, write_gpu_section, write_page
from benchmarks.lib.machine import ROOT, describe_machine

PAGE = ROOT / "docs" / "results" / "learner.md"
SMOLLM2 = ROOT / "examples" / "smollm2_model"
RECIPE = ROOT / "examples" / "smollm2_model.py"
RECIPE_LIMIT_S = 300.0
SUMS_AGREE_WITHIN = 1e-4


def main() -> None:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller, for development")
    parser.add_argument("--only", nargs="+", choices=[*MEASUREMENTS], metavar="NAME", help=" ".join(MEASUREMENTS))
    parser.add_argument("--gpu", action="store_true", help="measure on the GPU, and nothing else")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C does, it ends what is being measured
    chosen = ["gpu"] if args.gpu else args.only or [name for name in MEASUREMENTS if name != "gpu"]
    machine = describe_machine()
    result: Figures = {"quick": args.quick}
    failed: dict[str, str] = {}
    for name in chosen:
        try:
            found = MEASUREMENTS[name](args.quick)
            bubbles = {**result.get("bubble_fraction", {}), **found.get("bubble_fraction", {})}
            result |= {**found, **({"bubble_fraction": bubbles} if bubbles else {})}
        except (MeasurementFailed, OSError, subprocess.SubprocessError) as error:
            failed[name] = str(error)
            print(f"{name}: {error}", file=sys.stderr, flush=True)
    result |= {
        "machine": machine,
        "failed": failed,
        "wanted": judged(result),
    }
    if args.gpu and not failed and result["gpu_mfu"] is not None:
        write_gpu_section(PAGE, result)
    elif not (args.quick or args.only or args.gpu or failed):
        write_page(PAGE, result)
    print(json.dumps(result))
    sys.exit(1 if failed else 0)


def logprobs(quick: bool) -> Figures:
    """Both sides, each in a fresh process, and the ratio of their peaks."""
    sides = {side: run_measurement("logprob_memory", {"side": side, "quick": quick}) for side in ("chunked", "full")}
    for ours, full in zip(sides["chunked"]["sums"], sides["full"]["sums"], strict=True):
        if abs(ours / full - 1) > SUMS_AGREE_WITHIN:
            raise MeasurementFailed(f"the two sides of logprobs compute different numbers: {sides}")
    return {
        "logprob_peak_mib": sides["chunked"]["peak_mib"],
        "logprob_full_peak_mib": sides["full"]["peak_mib"],
        "logprob_peak_ratio": sides["full"]["peak_mib"] / sides["chunked"]["peak_mib"],
        "logprob_s": sides["chunked"]["seconds"],
        "logprob_full_s": sides["full"]["seconds"],
        "logprob_num_tokens": sides["chunked"]["num_tokens"],
        "logprob_chunk_mib": sides["chunked"]["chunk_mib"],
    }


def smollm2(quick: bool) -> Figures:
    """The checkpoint first, which the recipe of the examples makes once."""
    if not (SMOLLM2 / "model.safetensors").exists():
        subprocess.run([sys.executable, str(RECIPE), str(SMOLLM2)], check=True, timeout=RECIPE_LIMIT_S)
    return run_measurement("smollm2", {"path": str(SMOLLM2), "quick": quick}, worlds=(2, 1), limit_s=1200.0)


def measurement(name: str, *worlds: int) -> Callable[[bool], Figures]:
    """A measurement in processes of so many worlds, and no more to it."""
    return lambda quick: run_measurement(name, {"quick": quick}, worlds=worlds)


MEASUREMENTS: dict[str, Callable[[bool], Figures]] = {
    "packing": measurement("packing", 1),
    "padded": measurement("padded", 1),
    "logprobs": logprobs,
    "sleeping2": measurement("sleeping", 2, 1),
    "sleeping4": measurement("sleeping", 4),
    "real": measurement("real_compute", 2, 1, 1),
    "smollm2": smollm2,
    "gpu": measurement("gpu", 1),
}


if __name__ == "__main__":
    main()
