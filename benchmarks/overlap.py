"""What asynchrony buys: samples trained per second, asynchronous over synchronous. Prints one JSON line last.

    python benchmarks/overlap.py [--quick] [--rounds 3] [--steps 40] [--groups N] [--keep FOLDER] [--page [FILE]]

Real runs of `leeway train`, one after the other on the same machine: `weight_sync.max_lag = 0`, then the default. The
only actor has a core of its own, everything else shares another, and both runs train the same number of samples with
the same seed. Completions end at random with a long tail of lengths (`overlap_parts/long_tail.py`). Rates are taken
from the last step of a warm-up to the last step of all, so that start-up does not count. `--groups` says how many
prompts a step has, and so how long training takes beside generation: `r` of the JSON line should be about 1.

`--quick` is for development: one short round, and its figures mean nothing. `--page` writes docs/results/overlap.md.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.machine import ROOT, describe_machine
from benchmarks.lib.runs import MeasurementFailed, train
from benchmarks.overlap_parts.cores import two_cores
from benchmarks.overlap_parts.figures import Figures, compared, figures_of
from benchmarks.overlap_parts.report import judged, write_page
from benchmarks.overlap_parts.setting import Setting, write_setting

PAGE = ROOT / "docs" / "results" / "overlap.md"
SIDES = {"sync": ("--weight_sync.max_lag", "0"), "async": ()}
"""Name -> what is other than the default."""
GROUPS_PER_STEP = 12
NUM_WARMUP = 5


def main() -> None:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round, for development")
    parser.add_argument("--rounds", type=int, default=3, help="of a synchronous and an asynchronous run")
    parser.add_argument("--steps", type=int, default=40, help="of each run that count")
    parser.add_argument("--groups", type=int, default=GROUPS_PER_STEP, help="prompts of a step")
    parser.add_argument("--keep", type=Path, help="keeps the folders of the runs (default: keeps none)")
    parser.add_argument(
        "--page", type=Path, nargs="?", const=PAGE, metavar="FILE", help="write it; by default to docs/results/"
    )
    args = parser.parse_args()
    if args.page and args.quick:
        parser.error("--quick measures nothing that a page could show; leave --quick or --page out")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C does, it ends the run in progress
    num_rounds, num_steps = (1, 8) if args.quick else (args.rounds, args.steps)
    setting = Setting(num_steps + NUM_WARMUP, NUM_WARMUP, args.groups)
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-overlap-") as fresh:
        folder = (args.keep or Path(fresh)).resolve()
        try:
            rounds = [measure_round(folder, number, setting) for number in range(num_rounds)]
        except MeasurementFailed as error:
            sys.exit(f"benchmarks/overlap.py: {error}")
    result = {"quick": args.quick, "groups_per_step": args.groups, **compared(rounds), "machine": machine}
    result["wanted"] = judged(result)
    if args.page:
        write_page(args.page, result, setting)
    print(json.dumps(result))


def measure_round(folder: Path, number: int, setting: Setting) -> tuple[Figures, Figures]:
    """One run of each side.

    Raises:
        MeasurementFailed: one did not end well.
    """
    config = write_setting(folder / "setting", setting)
    found = []
    for name, overrides in SIDES.items():
        cores = two_cores()
        log = folder / f"{name}-{number}.log"
        run = train(config, folder / log.stem, overrides, log=log, prefix=cores.prefix, look=cores.look)
        cores.check()
        found.append(figures_of(run, setting.num_warmup))
        shown = {key: round(value, 3) for key, value in found[-1].items()}
        print(f"round {number + 1}, {name}: {json.dumps(shown)}", file=sys.stderr, flush=True)
    return found[0], found[1]


if __name__ == "__main__":
    main()
