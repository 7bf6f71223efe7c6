"""Measure the cost of removing and re-adding actors during generation. Prints one JSON line last.

    python benchmarks/requeued.py [--quick] [--keep FOLDER] [--page [FILE]]

The benchmark runs `leeway train` on the long-tailed model of `benchmarks/overlap.py` with two actors. `leeway scale`
repeatedly removes an actor while its engine is full, and later adds an actor.

    made_twice      tokens discarded with their samples, over tokens in flight in the removed actors
    kept            one minus `made_twice`
    left_s          maximum seconds from the command until the actor and its engine have exited
    length_ks       distance between the lengths of 1,000 training samples after each removal and those of other steps

`--quick` is for development: it removes one actor once. `--page` writes docs/results/requeued.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.machine import RESULTS, ROOT, describe_machine
from benchmarks.lib.page import bars_table, judged, origin, parsed, table, write_page
from benchmarks.lib.processes import MeasurementFailed, end_at_sigterm, environment
from benchmarks.lib.runs import FinishedRun, train
from benchmarks.overlap_parts.long_tail import GROUP_SIZE, Setting, write_setting

from leeway.buffer.lengths import ks_distance
from leeway.launch.observe.status import StatusError, read_status

PAGE = RESULTS / "requeued.md"
GROUPS, SLOTS, TIMES = 12, 32, 4
WARM_UP, BETWEEN, AWAY = 20, 30, 24
"""Numbers of steps: before the first removal, from an addition to a removal, and from a removal to an addition."""
AFTER = 1000
"""Number of training samples after each removal whose lengths are compared."""
OVERRIDES = (
    *("--actors.num_actors", "2", "--actors.max_running_samples", str(SLOTS), "--weight_sync.max_lag", "4"),
    *("--launch.autoscale", "off"),
)
AT_MOST = {"made_twice": 0.01, "length_ks": 0.05}
AT_LEAST = {"kept": 0.99}

Figures = dict[str, Any]


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="remove one actor once, for development")
    parser.add_argument("--keep", type=Path, help="keep the run folder in this folder (default: remove it)")
    args = parsed(parser, PAGE)
    end_at_sigterm()
    machine, scaling = describe_machine(), Scaling(1 if args.quick else TIMES)
    with tempfile.TemporaryDirectory(prefix="benchmark-handed-on-") as fresh:
        folder = (args.keep or Path(fresh)).resolve()
        try:
            # an actor starts within about BETWEEN steps; twice this number leaves time for the last addition
            steps = WARM_UP + scaling.times * (AWAY + 2 * BETWEEN)
            config = write_setting(folder / "setting", Setting(steps, 0, GROUPS))
            run = train(config, folder / "run", OVERRIDES, log=folder / "run.log", look=scaling.look)
            figures = figures_of(run, scaling)
        except MeasurementFailed as error:
            sys.exit(f"benchmarks/requeued.py: {error}")
    result = {"quick": args.quick, **figures, "machine": machine}
    result["wanted_at_most"] = judged(result, AT_MOST, "at most", at_full_size=not args.quick)
    result["wanted_at_least"] = judged(result, AT_LEAST, "at least", at_full_size=not args.quick)
    if args.page:
        write_page(args.page, page(result))
    print(json.dumps(result))


@dataclass
class Scaling:
    """Callback that alternately removes and adds an actor, according to the progress of a run."""

    times: int
    left: list[tuple[int, float]] = field(default_factory=list)
    """Last finished step and wall-clock time of each removal command."""
    _next_at: int = WARM_UP
    """Step after which the next removal or addition is due."""

    def look(self, folder: Path) -> None:
        """Remove or add an actor if a change is due."""
        try:
            status = read_status(folder / "status.json")
        except StatusError:
            return  # the run is still starting
        working = [actor for actor in status.actors if actor.state == "working"]
        if status.step < self._next_at or len(working) != len(status.actors):
            return
        if len(working) == 2 and len(self.left) < self.times:
            self.left.append((status.step, time.time()))
            _scale(folder, 1)
            self._next_at = status.step + AWAY
        elif len(working) == 1 and self.left:
            _scale(folder, 2)
            self._next_at = status.step + BETWEEN


def _scale(folder: Path, count: int) -> None:
    command = [sys.executable, "-m", "leeway", "scale", str(folder), "--count", str(count)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.DEVNULL, timeout=60)


def figures_of(run: FinishedRun, scaling: Scaling) -> Figures:
    """Return the figures of a run.

    Raises:
        MeasurementFailed: there were too few removals.
    """
    if len(scaling.left) < scaling.times:
        raise MeasurementFailed(f"the run was too short: {len(scaling.left)} of {scaling.times} actors were removed")
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    gone = [event["time_s"] for event in events if event["kind"] == "left"]
    left_s = [min(each for each in gone if each > requested_s) - requested_s for _, requested_s in scaling.left]
    last, samples = run.updates[-1], run.samples()
    lengths = samples.length.astype(float)
    in_flight = last["buffer/requeued"] * float((lengths**2).sum() / (2.0 * lengths.sum()))
    made_twice = last["pool/actors/tokens_lost"] / in_flight
    steps_after = AFTER // (GROUPS * GROUP_SIZE) + 1
    after = np.zeros(len(samples.step), bool)
    for step, _ in scaling.left:
        after |= (samples.step > step) & (samples.step <= step + steps_after)
    others = ~after & (samples.step > WARM_UP // 2)
    shares = [_shares(samples.length[each], samples.length.max()) for each in (after, others)]
    return {
        "times": scaling.times,
        "requeued": last["buffer/requeued"],
        "tokens_in_flight": in_flight,
        "tokens_lost": last["pool/actors/tokens_lost"],
        "failed": last["buffer/failed_lease"],
        "made_twice": made_twice,
        "kept": 1.0 - made_twice,
        "left_s": max(left_s),
        "length_ks": ks_distance(*shares),
        "samples_after": int(after.sum()),
        "samples_other": int(others.sum()),
        "mean_after": float(samples.length[after].mean()),
        "mean_other": float(samples.length[others].mean()),
    }


def _shares(lengths: npt.NDArray[np.int64], longest: int) -> list[float]:
    counted: list[float] = (np.bincount(lengths, minlength=longest + 1) / len(lengths)).tolist()
    return counted


def page(result: Figures) -> list[str]:
    """Return the paragraphs of the page."""
    head = (
        f"{origin('python benchmarks/requeued.py --page', result['machine'], result['machine']['commit'])} The run "
        f"uses the model of [overlap.md](overlap.md) and two actors with {SLOTS} slots. `leeway scale` removed an "
        f"actor {result['times']} times while its engine was full, and added an actor {AWAY} steps after each removal. "
        "Tokens in flight are estimated from the requeued samples and the mean length of a running sample."
    )
    lines = [
        ("requeued samples", f"{result['requeued']:.0f}"),
        ("tokens in flight of these samples, estimated", f"{result['tokens_in_flight']:.0f}"),
        ("tokens lost", f"{result['tokens_lost']:.0f}"),
        ("samples failed with a lease", f"{result['failed']:.0f}"),
        ("maximum seconds from the command to the exit of actor and engine", f"{result['left_s']:.1f}"),
        ("samples trained after removals, and others", f"{result['samples_after']:,}, {result['samples_other']:,}"),
        ("mean lengths after removals, and of others", f"{result['mean_after']:.1f}, {result['mean_other']:.1f}"),
    ]
    return [
        "# Removed actors and their partial rollouts",
        head,
        bars_table(result["wanted_at_most"], "at most"),
        bars_table(result["wanted_at_least"], "at least"),
        table(["figure", "measured"], [[*line] for line in lines]),
    ]


if __name__ == "__main__":
    main()
