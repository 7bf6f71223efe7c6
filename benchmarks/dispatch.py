"""Measure the gain from leasing long completions to fast engines. Prints one JSON line last.

    python benchmarks/dispatch.py [--quick] [--rounds 3] [--first 0] [--only NAME ...] [--after FILE ...]
                                  [--keep FOLDER] [--page [FILE]]

A fleet (`fleet_parts`) is a training run whose eight engines sleep instead of computing. Two engines are twice as fast
as the other six. Only the engines and the arithmetic of the learner are replaced. In every round, a fleet runs with
`buffer.dispatch = "in_order"` and with "by_deadline" on the same engines. Before the counted steps, lengths are learned
from completed groups over a few epochs of a small set of prompts. Each fleet is also simulated. A ratio divides the
samples used for training per second with "by_deadline" by those with "in_order":

    wait_over_in_order, lag0_over_in_order, drop_over_in_order    on_stale = "wait", max_lag = 0, on_stale = "drop"
    wait_over_all_fast, lag0_over_all_fast    by_deadline, over eight fast engines with in_order
    unknown_over_in_order    "wait" with prompts that never repeat, for which only requeued samples can be faster
    like_engines     eight identical engines, for which no gain is possible
    vllm_over_in_order    two pools of one real engine each; one engine shares its core with the learner
    vllm_over_simulated    gain of `vllm`, over the gain in a simulation with a profile of the same runs
    ks_over_in_order    `length/fidelity_ks` of the `drop` runs: distance between lengths trained on and generated

`--quick` is for development: it runs one short round, whose figures are meaningless. A full run takes an hour.
`--after` adds the output of earlier calls on this machine. The rounds of a call are numbered from `--first`. `--page`
writes docs/results/dispatch.md; it needs all cases.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.dispatch_parts import real
from benchmarks.fleet import CALIBRATION, CONFIG, Fleet, run, world_of
from benchmarks.fleet_parts.setting import FleetSetting
from benchmarks.lib.lengths import lognormal
from benchmarks.lib.machine import RESULTS, describe_machine
from benchmarks.lib.page import bars_table, judged, origin, table, write_page
from benchmarks.lib.processes import MeasurementFailed, end_at_sigterm
from benchmarks.lib.runs import FinishedRun

from leeway.launch.config import load_config
from leeway.launch.run_folder import RunFolder
from leeway.planning.costs import TokenTime
from leeway.planning.profiling import costs_of, profile_of
from leeway.planning.simulator import Simulation
from leeway.planning.world import Costs

PAGE = RESULTS / "dispatch.md"
AT_LEAST = {
    "wait_over_in_order": 1.40,
    "lag0_over_in_order": 1.45,
    "drop_over_in_order": 1.03,
    "wait_over_all_fast": 0.92,
    "lag0_over_all_fast": 0.92,
    "unknown_over_in_order": 1.35,
    "like_engines": 0.99,
    "vllm_over_simulated": 0.8,
}
AT_MOST = {"ks_over_in_order": 1.0, "vllm_over_simulated": 1.2}
POLICIES = ("in_order", "by_deadline")
ALL_FAST = "all_fast"
SLOW = TokenTime(0.05, 0.00075)
FAST = TokenTime(SLOW.base / 2, SLOW.per_sample / 2)
LENGTHS = lognormal(6, 0.9, 56, 0.65)
STEP_S = 0.15
PROMPTS, GROUPS, LEARNED, COUNTED = 128, 16, 16, 20
"""Number of prompts, groups per step, steps until lengths are learned, and steps that count."""
OVERRIDES = ("--actors.num_actors", "8", "--actors.max_running_samples", "32",
             "--learner.groups_per_step", str(GROUPS))  # fmt: skip
UNLIKE = (
    *("--pools.slow.role", "actors", "--pools.slow.count", "6"),
    *("--pools.fast.role", "actors", "--pools.fast.count", "2"),
)

Figures = dict[str, Any]


class Steps(NamedTuple):
    """Numbers of steps of a run."""

    learned: int
    """Number of steps until lengths are learned."""
    counted: int

    @property
    def total(self) -> int:
        """Number of all steps."""
        return self.learned + self.counted


@dataclass(frozen=True)
class Case:
    """Settings of a fleet, except for its dispatch policy."""

    name: str
    lag: int
    on_stale: str
    unlike: bool = True
    num_prompts: int = PROMPTS
    has_ceiling: bool = False
    """Whether the case also runs with fast engines only."""

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the runs of each round: the two policies, and ALL_FAST if the case has a ceiling."""
        return (*POLICIES, *([ALL_FAST] if self.has_ceiling else []))

    def fleet(self, policy: str, number: int, steps: Steps) -> Fleet:
        """Return the fleet with a policy, or with fast engines only. Its seed is the number of the round."""
        is_unlike = self.unlike and policy != ALL_FAST
        laws = {"slow": SLOW, "fast": FAST} if is_unlike else {"actors": FAST if policy == ALL_FAST else SLOW}
        overrides = (
            *OVERRIDES, "--task.num_train", str(self.num_prompts), *(UNLIKE if is_unlike else ()),
            "--run.seed", str(number), "--buffer.dispatch", POLICIES[0] if policy == ALL_FAST else policy,
            "--weight_sync.max_lag", str(self.lag), "--weight_sync.on_stale", self.on_stale,
        )  # fmt: skip
        setting = FleetSetting(laws, LENGTHS, STEP_S, 1e-4)
        return Fleet(f"{self.name} {policy} {number}", setting, overrides, steps.total)

    def simulated(self, number: int, costs: Costs, steps: Steps) -> float:
        """Simulate a round with both policies; return the ratio of by_deadline to in_order."""
        rates = []
        for policy in POLICIES:
            fleet = self.fleet(policy, number, steps)
            world = world_of(fleet, load_config(CONFIG, fleet.arguments), costs)
            rates.append(Simulation(world).run(steps.total, steps.learned).samples_per_s)
        return rates[1] / rates[0]


CASES = (
    Case("wait", 2, "wait", has_ceiling=True),
    Case("lag0", 0, "drop", has_ceiling=True),
    Case("drop", 2, "drop"),
    Case("unknown", 2, "wait", num_prompts=4096),
    Case("like_engines", 2, "wait", unlike=False),
)
VLLM = "vllm"


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round, for development")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds, each with one run per policy")
    parser.add_argument("--first", type=int, default=0, help="number of the first round, which is also its seed")
    parser.add_argument("--only", nargs="+", choices=[*(case.name for case in CASES), VLLM], help="cases to run")
    parser.add_argument("--after", type=Path, nargs="+", default=[], metavar="FILE", help="outputs of earlier calls")
    parser.add_argument("--keep", type=Path, help="keep the run folders in this folder (default: remove them)")
    parser.add_argument(
        "--page", type=Path, nargs="?", const=PAGE, metavar="FILE", help="write the page (default: in docs/results/)"
    )
    args = parser.parse_args()
    machine, names = describe_machine(), [*(case.name for case in CASES), VLLM]
    rows: dict[str, Figures] = {}
    for path in args.after:
        add_rounds(rows, json.loads(path.read_text().splitlines()[-1])["fleets"])
    chosen = args.only or [name for name in names if args.first or name not in rows]
    is_whole = not args.quick and {*rows, *chosen} == {*names}
    if args.page and not is_whole:
        parser.error("--page needs all cases at full size: omit --quick and --only, or add cases with --after")
    end_at_sigterm()
    rounds = range(args.first, args.first + (1 if args.quick else args.rounds))
    steps = Steps(4, 6) if args.quick else Steps(LEARNED, COUNTED)
    with tempfile.TemporaryDirectory(prefix="benchmark-dispatch-") as fresh:
        folder = (args.keep or Path(fresh)).resolve()
        try:
            if fleets := [case for case in CASES if case.name in chosen]:
                costs = costs_of([RunFolder(run(folder, CALIBRATION).folder)])
                found = measured(folder, fleets, rounds, steps)
                for case in fleets:
                    found[case.name]["simulated"] = [case.simulated(number, costs, steps) for number in rounds]
                add_rounds(rows, found)
            if VLLM in chosen:
                add_rounds(rows, {VLLM: measured_vllm(folder, rounds, steps)})
        except MeasurementFailed as error:
            sys.exit(f"benchmarks/dispatch.py: {error}")
    result = {"quick": args.quick, **figures_of(rows), "fleets": rows, "machine": machine}
    result["wanted_at_least"] = judged(result, AT_LEAST, "at least", at_full_size=is_whole)
    result["wanted_at_most"] = judged(result, AT_MOST, "at most", at_full_size=is_whole)
    if args.page:
        write_page(args.page, page(result))
    print(json.dumps(result))


def add_rounds(rows: dict[str, Figures], more: dict[str, Figures]) -> None:
    """Append the figures of further rounds to the rows of each case."""
    for name, row in more.items():
        known = rows.setdefault(name, {})
        for key, values in row.items():
            known[key] = [*known.get(key, []), *values]


def measured(folder: Path, cases: Sequence[Case], rounds: range, steps: Steps) -> dict[str, Figures]:
    """Run all cases; return for each case the figures by policy and round, and the ratio of each round.

    Raises:
        MeasurementFailed: a run failed.
    """
    rows: dict[str, Figures] = {case.name: {policy: [] for policy in case.variants} for case in cases}
    for number in rounds:
        for case in cases:
            for policy in case.variants:
                found = figures_of_run(run(folder, case.fleet(policy, number, steps)), steps)
                rows[case.name][policy].append(found)
                print(json.dumps({"fleet": f"{case.name} {policy} {number}", **found}), file=sys.stderr, flush=True)
    for row in rows.values():
        row["ratios"] = ratios_of(row)
    return rows


def measured_vllm(folder: Path, rounds: range, steps: Steps) -> Figures:
    """Run two pools with real engines, and simulate them with a profile of their in-order runs.

    Raises:
        MeasurementFailed: a run failed.
    """
    row: Figures = {policy: [] for policy in POLICIES}
    profiled = []
    for number in rounds:
        for policy in POLICIES:
            found = real.run(folder, f"vllm-{policy}-{number}", policy, number, steps.total)
            row[policy].append(figures_of_run(found, steps))
            print(json.dumps({"fleet": f"vllm {policy} {number}", **row[policy][-1]}), file=sys.stderr, flush=True)
            profiled += [RunFolder(found.folder)] if policy == POLICIES[0] else []
    profile = profile_of(profiled)
    print(profile.describe(), file=sys.stderr, flush=True)
    simulated = [[real.simulated(folder, policy, number, profile, steps) for policy in POLICIES] for number in rounds]
    return row | {"ratios": ratios_of(row), "simulated": [second / first for first, second in simulated]}


def figures_of_run(found: FinishedRun, steps: Steps) -> Figures:
    """Return the figures of the counted steps of a run."""
    rows = found.updates
    last = rows[steps.learned :]
    seconds = last[-1]["finished_s"] - rows[steps.learned - 1]["finished_s"]
    return {
        "samples_per_s": sum(row["batch/trajectories"] for row in last) / seconds,
        "ks": last[-1]["length/fidelity_ks"],
        "covered": last[-1]["length/covered"],
        "predicted": last[-1]["length/predicted"],
    }


def ratios_of(row: Figures) -> list[float]:
    """Return the ratio of by_deadline to in_order for each round."""
    pairs = zip(*(row[policy] for policy in POLICIES), strict=True)
    return [second["samples_per_s"] / first["samples_per_s"] for first, second in pairs]


def figures_of(rows: dict[str, Figures]) -> Figures:
    """Return the medians of the rounds' ratios."""
    ratios = {name: median(row["ratios"]) for name, row in rows.items()}
    found: Figures = {
        name if name == "like_engines" else f"{name}_over_in_order": each for name, each in ratios.items()
    }
    for name, row in rows.items():
        if ALL_FAST in row:
            pairs = zip(row[POLICIES[1]], row[ALL_FAST], strict=True)
            found[f"{name}_over_{ALL_FAST}"] = median(one["samples_per_s"] / two["samples_per_s"] for one, two in pairs)
    if VLLM in rows:
        found["vllm_over_simulated"] = ratios[VLLM] / median(rows[VLLM]["simulated"])
    if "drop" in rows:
        first, second = (fmean(each["ks"] for each in rows["drop"][policy]) for policy in POLICIES)
        found["ks_over_in_order"] = second / first
    return found


def page(result: Figures) -> list[str]:
    """Return the paragraphs of the page."""
    few = f"{PROMPTS} prompts ({CASES[3].num_prompts:,} in the case whose prompts never repeat)"
    command = "python benchmarks/dispatch.py --page"
    head = (
        f"{origin(command, result['machine'], result['machine']['commit'])} A fleet has eight engines and "
        "a learner that sleep instead of computing; two engines are twice as fast as the other six. There are "
        f"{few}. A step has {GROUPS} prompts with 8 samples each. The prompt explains 65 % of the variance of lengths. "
        f"Lengths are learned in the first {LEARNED} steps; the next {COUNTED} steps count. Ratios are medians over "
        "rounds. In the case `vllm` the engines are real: one engine has its own core, and the second engine shares "
        "its core with the learner and all other processes. The simulation of `vllm` uses a profile of its own runs; "
        "the other simulations use the sleep times of the engines."
    )
    cells = []
    for name, row in result["fleets"].items():
        first, second = ([each["samples_per_s"] for each in row[policy]] for policy in POLICIES)
        known = row[POLICIES[1]]
        cells.append([
            name, f"{fmean(first):.2f}", f"{fmean(second):.2f}",
            f"{fmean(each['samples_per_s'] for each in row[ALL_FAST]):.2f}" if ALL_FAST in row else "-",
            ", ".join(f"{each:.2f}" for each in row["ratios"]),
            ", ".join(f"{each:.2f}" for each in row["simulated"]), f"{fmean(each['predicted'] for each in known):.0%}",
            f"{fmean(each['covered'] for each in known):.0%}",
        ])  # fmt: skip
    columns = ["fleet", "in order, samples/s", "by deadline", "all fast", "ratios", "simulated", "predicted", "covered"]
    return [
        "# Dispatch of long completions to fast engines",
        head,
        bars_table(result["wanted_at_least"], "at least"),
        bars_table(result["wanted_at_most"], "at most"),
        table(columns, cells),
        "`predicted` is the fraction of the variance among group means that was predicted. `covered` is the fraction "
        "of groups whose longest completion was at most as long as predicted; its ideal value is 90 %.",
    ]


if __name__ == "__main__":
    main()
