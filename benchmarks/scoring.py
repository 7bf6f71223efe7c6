"""What it gains to score with the reference before the step. Prints one JSON line last.

    python benchmarks/scoring.py [--quick] [--rounds 3] [--steps 40] [--groups N] [--keep FOLDER] [--page [FILE]]

Real runs of `leeway train` with trajectory balance on the long-tailed model of `benchmarks/overlap.py`, the only actor
on one core, everything else on another. In every round two pairs:

    synchronous       max_lag = 0: all scores in the step, and what has arrived while the learner waits
    generation-bound  the default lag, and an actor that has few samples in flight: the same

The bound of the first is what its first run's own times allow: the reference's share of a step gone, but for a last
group, which nothing can score before it is there.

`--quick` is for development: one short round, and its figures mean nothing. `--page` writes docs/results/scoring.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.machine import RESULTS, describe_machine
from benchmarks.lib.page import bars_table, judged, origin, parsed, share, table, write_page
from benchmarks.lib.processes import MeasurementFailed, end_at_sigterm
from benchmarks.lib.rounds import means
from benchmarks.lib.runs import FinishedRun
from benchmarks.overlap import GROUPS_PER_STEP, NUM_WARMUP, train_on_cores
from benchmarks.overlap_parts.long_tail import GROUP_SIZE, Setting, write_setting
from tests.constants import environment as constants

PAGE = RESULTS / "scoring.md"
IN_STEP = constants({"learner.coordinator._SCORE_POLL_S": 1e6})
"""Of processes that never ask for samples to score while they wait."""
FEW = ("--actors.max_running_samples", "8")


PAIRS: Mapping[str, tuple[str, ...]] = {"synchronous": ("--weight_sync.max_lag", "0"), "generation_bound": FEW}
"""Arguments of the two runs of each: one scores in the step, the other before it."""
AT_LEAST = {"step_over_bound": 0.9}
AT_MOST = {"reference_share": 0.02}

Figures = dict[str, Any]


def main() -> None:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round, for development")
    parser.add_argument("--rounds", type=int, default=3, help="of all pairs")
    parser.add_argument("--steps", type=int, default=40, help="of each run that count")
    parser.add_argument("--groups", type=int, default=GROUPS_PER_STEP, help="prompts of a step")
    parser.add_argument("--keep", type=Path, help="keeps the folders of the runs (default: keeps none)")
    args = parsed(parser, PAGE)
    end_at_sigterm()
    num_rounds, num_steps = (1, 8) if args.quick else (args.rounds, args.steps)
    setting = Setting(num_steps + NUM_WARMUP, NUM_WARMUP, args.groups)
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-scoring-") as fresh:
        folder = (args.keep or Path(fresh)).resolve()
        try:
            rounds = [measure_round(folder, number, setting) for number in range(num_rounds)]
        except MeasurementFailed as error:
            sys.exit(f"benchmarks/scoring.py: {error}")
    result = {"quick": args.quick, "groups_per_step": args.groups, **compared(rounds, setting), "machine": machine}
    full = not args.quick
    result["wanted"] = {
        **judged(result, AT_LEAST, "at least", at_full_size=full),
        **judged(result, AT_MOST, "at most", at_full_size=full),
    }
    if args.page:
        write_page(args.page, page(result, setting, args.rounds))
    print(json.dumps(result))


def measure_round(folder: Path, number: int, setting: Setting) -> dict[str, tuple[Figures, Figures]]:
    """Both runs of every pair.

    Raises:
        MeasurementFailed: one did not end well.
    """
    config = write_setting(folder / "setting", setting)
    found = {}
    for name, arguments in PAIRS.items():
        runs = []
        for side, variables in (("step", IN_STEP), ("before", {})):
            log = folder / f"{name}-{side}-{number}.log"
            with mock.patch.dict(os.environ, variables):
                run = train_on_cores(config, log, arguments)
            runs.append(figures_of(run, setting.num_warmup))
            shown = {key: round(value, 3) for key, value in runs[-1].items()}
            print(f"round {number + 1}, {name}, {side}: {json.dumps(shown)}", file=sys.stderr, flush=True)
        found[name] = (runs[0], runs[1])
    return found


def figures_of(run: FinishedRun, num_warmup: int) -> Figures:
    """Of one run, seconds of a step as means over those that count.

    Returns:
        `period_s`: from the end of one step to that of the next, of which `wait_s` is waiting for the batch, and
        `reference_s` scoring in the step; `ahead`: share of the samples that were scored before their step.

    Raises:
        MeasurementFailed: it is too short.
    """
    rows = run.updates
    if len(rows) < num_warmup + 2:
        raise MeasurementFailed(f"{run.folder.name} has {len(rows)} steps, of which {num_warmup} warm up: too few")
    counted = rows[num_warmup:]

    def mean(key: str) -> float:
        return fmean(float(row[key] or 0.0) for row in counted)

    return {
        "period_s": (counted[-1]["finished_s"] - rows[num_warmup - 1]["finished_s"]) / len(counted),
        "wait_s": mean("time/wait_for_batch"),
        "reference_s": mean("time/reference"),
        "step_s": mean("time/step"),
        "ahead": mean("scored/ahead_frac"),
    }


def compared(rounds: Sequence[Mapping[str, tuple[Figures, Figures]]], setting: Setting) -> Figures:
    """The figures of the JSON line; ratios are medians of the rounds', sides are means over them."""

    def gain(pair: str) -> float:
        return median(step["period_s"] / before["period_s"] for step, before in (each[pair] for each in rounds))

    earlier = 1 - 1 / setting.groups_per_step
    synchronous = median(
        one["period_s"] / (one["period_s"] - earlier * one["reference_s"])
        for one in (each["synchronous"][0] for each in rounds)
    )
    before = [each["generation_bound"][1] for each in rounds]
    return {
        "synchronous_gain": gain("synchronous"),
        "synchronous_bound": synchronous,
        "step_over_bound": gain("synchronous") / synchronous,
        "generation_bound_gain": gain("generation_bound"),
        "reference_share": median(one["reference_s"] / one["period_s"] for one in before),
        "pairs": {pair: [means([each[pair][side] for each in rounds]) for side in (0, 1)] for pair in PAIRS},
    }


def page(result: Figures, setting: Setting, num_rounds: int) -> list[str]:
    """The paragraphs of the page."""
    command = (
        f"python benchmarks/scoring.py --rounds {num_rounds} --steps {setting.num_steps - setting.num_warmup} "
        f"--groups {setting.groups_per_step} --page"
    )
    head = (
        f"{origin(command, result['machine'], result['machine']['commit'])} Real runs of `leeway train`, trajectory "
        "balance, on the model and the machine of [overlap.md](overlap.md): one actor on a core of its own, all else "
        f"on the other, {setting.groups_per_step} prompts of {GROUP_SIZE} samples a step. Synchronous is "
        "`weight_sync.max_lag = 0`; generation-bound is the default lag with 8 samples in flight. The bound "
        "comes from the times of the run that scores in the step: all of the reference's time gone but that of one "
        f"group. Rounds: {num_rounds}."
    )
    said = (
        f"Synchronous: {result['synchronous_gain']:.2f} of {result['synchronous_bound']:.2f} possible. "
        f"Generation-bound: {result['generation_bound_gain']:.2f}."
    )
    rows = []
    for pair, sides in result["pairs"].items():
        for name, one in zip(("in the step", "before it"), sides, strict=True):
            times = [f"{one[key]:.3f}" for key in ("period_s", "wait_s", "step_s", "reference_s")]
            rows.append([pair.replace("_", "-"), name, *times, share(one["ahead"])])
    columns = ["run", "scored", "s per step", "of it waiting", "training", "in which scoring", "scored before the step"]
    wanted = result["wanted"]
    bars = [
        bars_table({key: wanted[key] for key in names}, word)
        for names, word in ((AT_LEAST, "at least"), (AT_MOST, "at most"))
    ]
    return ["# Scores before the step, measured", head, said, *bars, table(columns, rows)]


if __name__ == "__main__":
    main()
