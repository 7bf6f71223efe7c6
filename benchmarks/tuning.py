"""What each knob costs and brings: sweeps on the demo, one knob at a time. Prints one JSON line last.

    python benchmarks/tuning.py [--quick] [--only KEY ...] [--seeds 0] [--steps 60] [--work FOLDER] [--page [FILE]]

Every run is one `leeway train examples/demo.toml`, one after the other on the same machine; `tuning_parts/sweeps.py`
says which knobs are turned. `--work` keeps the figures of finished runs: called again, only the missing ones are run.
`--quick` is for development: the ends of each sweep, few steps, and its figures mean nothing. `--page` writes
docs/results/tuning.md and its charts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:1] = [str(ROOT), str(ROOT / "benchmarks")]  # 'buffer' is the package, not the benchmark of that name

from training_runs.machine import Machine, describe_machine  # noqa: E402
from training_runs.run import MeasurementFailed, train  # noqa: E402
from tuning_parts.figures import Figures, figures_of, over_seeds  # noqa: E402
from tuning_parts.report import Results, write_page  # noqa: E402
from tuning_parts.sweeps import EVERY_RUN, SWEEPS, Overrides, Sweep, runs_of  # noqa: E402

PAGE = ROOT / "docs" / "results" / "tuning.md"
CONFIG = Path("examples/demo.toml")
QUICK_STEPS = 10


class Work:
    """The folder of finished runs."""

    def __init__(self, folder: Path, num_steps: int, machine: Machine) -> None:
        """Open or make it.

        Raises:
            SystemExit: it holds runs of another length or commit.
        """
        self._folder = folder.resolve()
        self._num_steps = num_steps
        self._folder.mkdir(parents=True, exist_ok=True)
        said = self._folder / "runs.json"
        facts = {"num_steps": num_steps, "commit": machine["commit"]}
        if said.exists() and (theirs := json.loads(said.read_text())) != facts:
            sys.exit(f"--work {folder} holds runs of {theirs}, not of {facts}; choose another folder")
        said.write_text(json.dumps(facts))

    def figures(self, overrides: Overrides, seed: int) -> Figures:
        """Of a run, which is made where it was not before.

        Raises:
            MeasurementFailed: it did not end well.
        """
        words = [part.removeprefix("--") for part in overrides]
        name = "-".join([*words, f"seed{seed}"]) if words else f"demo-seed{seed}"
        path = self._folder / f"{name}.json"
        if path.exists():
            found: Figures = json.loads(path.read_text())
            return found
        folder = self._folder / "runs" / name
        shutil.rmtree(folder, ignore_errors=True)  # what an earlier call left unfinished
        arguments = ["--learner.num_steps", str(self._num_steps), "--run.seed", str(seed), *EVERY_RUN, *overrides]
        made = figures_of(train(CONFIG, folder, arguments))
        part = path.with_suffix(".part")
        part.write_text(json.dumps(made))
        part.replace(path)
        shutil.rmtree(folder)
        return made


def main() -> None:
    """Run what is missing, write the page and the charts."""
    keys = [sweep.key for sweep in SWEEPS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the ends of each sweep, few steps, for development")
    parser.add_argument("--only", nargs="+", choices=keys, metavar="KEY", help=" ".join(keys))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=60, help="learner.num_steps of every run")
    parser.add_argument("--work", type=Path, help="keeps finished runs (default: keeps none)")
    parser.add_argument(
        "--page", type=Path, nargs="?", const=PAGE, metavar="FILE", help="write it; by default to docs/results/"
    )
    args = parser.parse_args()
    if args.page and (args.quick or args.only):
        parser.error("a page shows all sweeps, whole; leave --page, or --quick and --only, out")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C does, it ends the run in progress
    sweeps = tuple(sweep for sweep in SWEEPS if args.only is None or sweep.key in args.only)
    if args.quick:
        sweeps = tuple(Sweep(each.key, (each.values[0], each.values[-1]), each.default) for each in sweeps)
    num_steps = QUICK_STEPS if args.quick else args.steps
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-tuning-") as fresh:
        work = Work(args.work or Path(fresh), num_steps, machine)
        try:
            results = measure(work, sweeps, args.seeds)
        except MeasurementFailed as error:
            sys.exit(f"benchmarks/tuning.py: {error}")
    if args.page:
        seeds = " ".join(map(str, args.seeds))
        command = f"python benchmarks/tuning.py --seeds {seeds} --steps {num_steps} --page"
        write_page(args.page, results, machine, command, args.seeds)
    print(json.dumps({"quick": args.quick, "num_steps": num_steps, "machine": machine, "sweeps": results}))


def measure(work: Work, sweeps: tuple[Sweep, ...], seeds: list[int]) -> Results:
    """The figures of every value of every sweep, means over seeds.

    Raises:
        MeasurementFailed: a run did not end well.
    """
    found: dict[Overrides, Figures] = {}
    runs = runs_of(sweeps)
    for number, overrides in enumerate(runs, 1):
        found[overrides] = over_seeds([work.figures(overrides, seed) for seed in seeds])
        shown = {key: round(value, 3) for key, value in found[overrides].items() if value is not None}
        print(f"{number} of {len(runs)}, {' '.join(overrides) or 'the demo'}: {json.dumps(shown)}", file=sys.stderr)
    return {sweep.key: {value: found[sweep.overrides(value)] for value in sweep.values} for sweep in sweeps}


if __name__ == "__main__":
    main()
