"""Measure the gain from keeping all engine slots filled. Prints one JSON line last.

    python benchmarks/fill.py [--quick] [--rounds 3] [--keep FOLDER] [--page [FILE]]

The benchmark runs `leeway train` on the long-tailed model of `benchmarks/overlap.py`. The only actor has one core, and
all other processes share a second core. Groups have 8 samples, and the engine has 16 slots. In every round, the actor
runs once with each of two lease rules:

    old   lease a group when the whole group fits, counting all leased samples not yet in the buffer
          (`fill_parts/roles.py`)
    new   lease a group as soon as a slot is free (`ActorsConfig.room`)

The maximum lag is so large that admission is always open and generation never waits for the learner. Figures are means
of the rows of actors.jsonl after a warm-up. The rates in a row cover about ten seconds before its step.

`--quick` is for development: it runs one short round, whose figures are meaningless. `--page` writes
docs/results/fill.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.machine import RESULTS, describe_machine
from benchmarks.lib.page import bars_table, judged, origin, parsed, table, write_page
from benchmarks.lib.processes import MeasurementFailed, end_at_sigterm
from benchmarks.lib.rounds import means
from benchmarks.lib.runs import FinishedRun
from benchmarks.overlap import GROUPS_PER_STEP, train_on_cores
from benchmarks.overlap_parts.long_tail import Setting, write_setting

PAGE = RESULTS / "fill.md"
OVERRIDES = (
    *("--actors.group_size", "8", "--actors.max_running_samples", "16"),
    *("--weight_sync.max_lag", "1000"),
)
MODULES = {"old": "benchmarks.fill_parts.command", "new": "leeway.launch.cli"}
"""Lease rule -> module whose `train` command applies this rule."""
NUM_STEPS = 30
"""Number of steps of a run, about two seconds each."""
WARM_UP_S = 15.0
"""Uncounted seconds after the first step; longer than the window over which actors measure their rates."""
AT_LEAST = {"slots_used": 0.97, "new_over_old_tokens_per_s": 1.10}

Figures = dict[str, Any]


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round, for development")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds, each with one run per rule")
    parser.add_argument("--keep", type=Path, help="keep the run folders in this folder (default: remove them)")
    args = parsed(parser, PAGE)
    end_at_sigterm()
    num_rounds, num_steps = (1, 16) if args.quick else (args.rounds, NUM_STEPS)
    setting, machine = Setting(num_steps, 0, GROUPS_PER_STEP), describe_machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-fill-") as fresh:
        folder = (args.keep or Path(fresh)).resolve()
        try:
            rounds = [measure_round(folder, number, setting) for number in range(num_rounds)]
        except MeasurementFailed as error:
            sys.exit(f"benchmarks/fill.py: {error}")
    result = {"quick": args.quick, **compared(rounds), "machine": machine}
    result["wanted"] = judged(result, AT_LEAST, "at least", at_full_size=not args.quick)
    if args.page:
        write_page(args.page, page(result))
    print(json.dumps(result))


def measure_round(folder: Path, number: int, setting: Setting) -> dict[str, Figures]:
    """Run once with each rule.

    Raises:
        MeasurementFailed: a run failed.
    """
    config, found = write_setting(folder / "setting", setting), {}
    for rule, module in MODULES.items():
        found[rule] = figures_of(train_on_cores(config, folder / f"{rule}-{number}.log", OVERRIDES, module=module))
        shown = {key: round(value, 3) for key, value in found[rule].items()}
        print(f"round {number + 1}, {rule}: {json.dumps(shown)}", file=sys.stderr, flush=True)
    return found


def figures_of(run: FinishedRun) -> Figures:
    """Return the figures of one run, as means over the counted time.

    Returns:
        `slots_used` is the fraction of slots with a sample. `tokens_per_s` is the number of completion tokens generated
        per second. `step_ms` is the duration of an engine step, which generates one token per sample. `waiting` is the
        fraction of steps at whose end the actor waited. `seconds` is the counted time.

    Raises:
        MeasurementFailed: the run is too short.
    """
    began_s = min((row["finished_s"] for row in run.updates), default=0.0) + WARM_UP_S
    rows = [row for row in run.updates if row["finished_s"] >= began_s]
    if len(rows) < 3:
        raise MeasurementFailed(
            f"{run.folder.name} has {len(rows)} steps after {WARM_UP_S:g} s of warm-up, expected at least 3: "
            "increase NUM_STEPS"
        )
    spans_s = [float(after["finished_s"] - before["finished_s"]) for before, after in pairwise(rows)]
    names = ("slots_used", "tokens_per_s", "step_ms")
    found = {name: fmean((row[f"pool/actors/{name}"] or 0.0 for row in rows[1:]), spans_s) for name in names}
    return found | {"waiting": fmean(row["actors/waiting"] for row in rows[1:]), "seconds": sum(spans_s)}


def compared(rounds: Sequence[dict[str, Figures]]) -> Figures:
    """Return the figures of the JSON line: medians of the new rule and of the ratio, and means of each rule."""
    ratios = [each["new"]["tokens_per_s"] / each["old"]["tokens_per_s"] for each in rounds]
    return {
        "rounds": len(rounds),
        "slots_used": median(each["new"]["slots_used"] for each in rounds),
        "new_over_old_tokens_per_s": median(ratios),
        "new_over_old_rounds": ratios,
        **{rule: means([each[rule] for each in rounds]) for rule in MODULES},
    }


def page(result: Figures) -> list[str]:
    """Return the paragraphs of the page."""
    command, ratios = f"python benchmarks/fill.py --rounds {result['rounds']} --page", result["new_over_old_rounds"]
    head = (
        f"{origin(command, result['machine'], result['machine']['commit'])} The runs are `leeway train` on the model "
        "and the machine of [overlap.md](overlap.md). One actor has its own core, and all other processes share a "
        "second core. Prompts have 8 samples, the engine has 16 slots, and admission is always open. With the old "
        "rule, the actor leases a group when the whole group fits, counting all leased samples not yet in the buffer. "
        "With the new rule, the actor leases a group as soon as a slot is free. Figures cover the time from "
        f"{WARM_UP_S:g} s after the first step of a run to its last step. The ratios of tokens per second, new rule "
        f"over old rule, in the {result['rounds']} rounds are {', '.join(f'{each:.2f}' for each in ratios)}."
    )
    lines = [
        ("fraction of slots with a sample", "slots_used", "{:.3f}"),
        ("completion tokens generated per second", "tokens_per_s", "{:.0f}"),
        ("engine step, ms", "step_ms", "{:.2f}"),
        ("steps at whose end the actor was waiting", "waiting", "{:.0%}"),
    ]
    rows = [[label, *(form.format(result[rule][key]) for rule in MODULES)] for label, key, form in lines]
    cells = table(["mean of the rounds", "old rule", "new rule"], rows)
    return ["# Engine slot utilization", head, bars_table(result["wanted"], "at least"), cells]


if __name__ == "__main__":
    main()
