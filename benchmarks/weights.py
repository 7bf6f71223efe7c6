"""Measure the cost of weight transfer from the learner to the actors. Prints one JSON line last.

    python benchmarks/weights.py [--quick] [--only NAME ...]

    update    pause of an update over one engine step plus vLLM's bare reload, and the learner's time lost to
              publishing, while two engines generate and the learner publishes every step
    deltas    bytes of a delta over bytes of the full version at two learning rates, from real optimizer steps
    sync      time from publish to verified and staged, over torch.save plus torch.load of the same tensors
    hosts     how often a version is sent to a machine with 16 pullers, and verified on this machine
    fairness  slowest over median time of 64 clients without engines that fetch a version at the same time

All parts use SmolLM2-135M in separate processes (`weights_parts/peers.py`). The compared sides take turns, and ratios
are medians over rounds. The docstring of each part describes the comparison. `--quick` is for development: its sizes
are smaller, and its figures are meaningless. A full run writes docs/results/weights.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import SubprocessError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.machine import RESULTS, ROOT, describe_machine
from benchmarks.lib.page import judged, write_page
from benchmarks.lib.processes import MeasurementFailed, end_at_sigterm
from benchmarks.weights_parts.measurements import Setting, deltas, fairness, hosts, sync, update
from benchmarks.weights_parts.page import BARS, page, summed_up
from benchmarks.weights_parts.peers import Figures, log

PAGE = RESULTS / "weights.md"
RUNS = ROOT / "runs"
"""Folder on the disk to which runs write their weights."""
MEMORY_FOLDER = Path("/dev/shm")
MEASUREMENTS: dict[str, Callable[[Setting], Figures]] = {
    "update": update,
    "deltas": deltas,
    "sync": sync,
    "hosts": hosts,
    "fairness": fairness,
}


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run with smaller sizes, for development")
    parser.add_argument("--only", nargs="+", choices=[*MEASUREMENTS], metavar="NAME", help=" ".join(MEASUREMENTS))
    args = parser.parse_args()
    end_at_sigterm()
    machine = describe_machine()
    began_s = time.monotonic()
    result: Figures = {"quick": args.quick}
    failed: dict[str, str] = {}
    RUNS.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="benchmark-weights-", dir=RUNS) as scratch,
        tempfile.TemporaryDirectory(prefix="benchmark-weights-", dir=MEMORY_FOLDER) as memory,
    ):
        setting = Setting(Path(scratch), Path(memory), args.quick)
        for name in args.only or MEASUREMENTS:
            try:
                found = MEASUREMENTS[name](setting)
                result |= found
                log(json.dumps(found))
            except (MeasurementFailed, OSError, SubprocessError) as error:
                failed[name] = str(error)
                print(f"{name}: {error}", file=sys.stderr, flush=True)
            _free(setting)
            log(f"{name}: {time.monotonic() - began_s:.0f} s since the start")
    result |= summed_up(result)
    targets = judged(result, BARS, "at most", at_full_size=not args.quick)
    result |= {"machine": machine, "failed": failed, "wanted": targets}
    if not (args.quick or args.only or failed):
        write_page(PAGE, page(result))
    print(json.dumps(result))
    sys.exit(1 if failed else 0)


def _free(setting: Setting) -> None:
    """Delete the versions left by a measurement, which take hundreds of megabytes each."""
    for folder in (setting.scratch, setting.memory):
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)


if __name__ == "__main__":
    main()
