"""What it gains that long answers go to fast engines. Prints one JSON line last.

    python benchmarks/dispatch.py [--quick] [--rounds 3] [--first 0] [--only NAME ...] [--after FILE ...]
                                  [--keep FOLDER] [--page [FILE]]

Fleets (`fleet_parts`) of eight sleeping engines, two of them twice as fast as the others: all but the engines and the
learner's arithmetic is real. In every round a fleet runs once with `buffer.dispatch = "in_order"` and once with
"by_deadline", on the same engines; lengths are learned from the groups that complete, in a few epochs of few prompts,
before anything counts. Each is simulated too. Ratios are of trained samples per second, by_deadline over in_order:

    wait_over_in_order, lag0_over_in_order, drop_over_in_order    on_stale = "wait", max_lag = 0, on_stale = "drop"
    wait_over_all_fast, lag0_over_all_fast    by_deadline over what eight fast engines do in order
    unknown_over_in_order    "wait" with prompts that are never seen again: only what is handed on gains
    like_engines     eight engines of one kind, where there is nothing to gain
    vllm_over_in_order    two pools of a real engine each, of which one shares its core with the learner
    vllm_over_simulated    that gain over the simulated one, from a profile of its own runs
    ks_over_in_order `length/fidelity_ks` of the runs that drop: how far lengths trained are from lengths generated

`--quick` is for development: one short round, and its figures mean nothing. All of it takes an hour;
`--after` adds what earlier calls on this machine printed, of other cases or of other rounds, which `--first` numbers.
`--page` writes docs/results/dispatch.md, of all cases.
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
from launch.config import load_config
from launch.run_folder import RunFolder
from planning.costs import TokenTime
from planning.profiling import costs_of, profile_of
from planning.simulator import Simulation
from planning.world import Costs

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
"""Prompts, and how many of them a step takes; steps until lengths are known, and steps that count."""
SAID = ("--actors.num_actors", "8", "--actors.max_running_samples", "32",
        "--learner.groups_per_step", str(GROUPS))  # fmt: skip
UNLIKE = (
    *("--pools.slow.role", "actors", "--pools.slow.count", "6"),
    *("--pools.fast.role", "actors", "--pools.fast.count", "2"),
)

Figures = dict[str, Any]


class Steps(NamedTuple):
    """Of a run."""

    learned: int
    """Until lengths are known."""
    counted: int

    @property
    def total(self) -> int:
        """All."""
        return self.learned + self.counted


@dataclass(frozen=True)
class Case:
    """A fleet, but for how prompts are dispatched."""

    name: str
    lag: int
    on_stale: str
    unlike: bool = True
    num_prompts: int = PROMPTS
    has_ceiling: bool = False
    """It is run with fast engines alone too."""

    @property
    def variants(self) -> tuple[str, ...]:
        """As it is run."""
        return (*POLICIES, *([ALL_FAST] if self.has_ceiling else []))

    def fleet(self, policy: str, number: int, steps: Steps) -> Fleet:
        """The fleet with a policy, or with fast engines alone; its seed is the round's."""
        is_unlike = self.unlike and policy != ALL_FAST
        laws = {"slow": SLOW, "fast": FAST} if is_unlike else {"actors": FAST if policy == ALL_FAST else SLOW}
        said = (
            *SAID, "--task.num_train", str(self.num_prompts), *(UNLIKE if is_unlike else ()), "--run.seed", str(number),
            "--buffer.dispatch", POLICIES[0] if policy == ALL_FAST else policy,
            "--weight_sync.max_lag", str(self.lag), "--weight_sync.on_stale", self.on_stale,
        )  # fmt: skip
        return Fleet(f"{self.name} {policy} {number}", FleetSetting(laws, LENGTHS, STEP_S, 1e-4), said, steps.total)

    def simulated(self, number: int, costs: Costs, steps: Steps) -> float:
        """The ratio of a round by simulation."""
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
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round, for development")
    parser.add_argument("--rounds", type=int, default=3, help="of a run by each policy")
    parser.add_argument("--first", type=int, default=0, help="number of the first round, and of its seed")
    parser.add_argument("--only", nargs="+", choices=[*(case.name for case in CASES), VLLM], help="some of the cases")
    parser.add_argument("--after", type=Path, nargs="+", default=[], metavar="FILE", help="what other calls printed")
    parser.add_argument("--keep", type=Path, help="keeps the folders of the runs (default: keeps none)")
    parser.add_argument(
        "--page", type=Path, nargs="?", const=PAGE, metavar="FILE", help="write it; by default to docs/results/"
    )
    args = parser.parse_args()
    machine, names = describe_machine(), [*(case.name for case in CASES), VLLM]
    rows: dict[str, Figures] = {}
    for path in args.after:
        add_rounds(rows, json.loads(path.read_text().splitlines()[-1])["fleets"])
    chosen = args.only or [name for name in names if args.first or name not in rows]
    is_whole = not args.quick and {*rows, *chosen} == {*names}
    if args.page and not is_whole:
        parser.error("a page has all cases at full size; leave --quick and --only out, or say --after")
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
    """To what is known of each case, what was measured in other rounds of it."""
    for name, row in more.items():
        known = rows.setdefault(name, {})
        for key, values in row.items():
            known[key] = [*known.get(key, []), *values]


def measured(folder: Path, cases: Sequence[Case], rounds: range, steps: Steps) -> dict[str, Figures]:
    """Case -> figures by policy and round, and the ratios of each round.

    Raises:
        MeasurementFailed: a run did not end well.
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
    """The same of two pools with real engines; their runs in order are the profile that is simulated by.

    Raises:
        MeasurementFailed: a run did not end well.
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
    """Of the steps that count."""
    rows = found.updates
    last = rows[steps.learned :]
    seconds = last[-1]["finished_s"] - rows[steps.learned - 1]["finished_s"]
    return {
        "samples_per_s": sum(row["batch/trajectories"] for row in last) / seconds,
        "ks": last[-1]["length/fidelity_ks"],
        "covered": last[-1]["length/covered"],
        "foretold": last[-1]["length/foretold"],
    }


def ratios_of(row: Figures) -> list[float]:
    """By deadline over in order, round by round."""
    pairs = zip(*(row[policy] for policy in POLICIES), strict=True)
    return [second["samples_per_s"] / first["samples_per_s"] for first, second in pairs]


def figures_of(rows: dict[str, Figures]) -> Figures:
    """Medians of the rounds' ratios."""
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
    """The paragraphs of the page."""
    few = f"{PROMPTS} prompts ({CASES[3].num_prompts:,} where none is seen again)"
    command = "python benchmarks/dispatch.py --page"
    head = (
        f"{origin(command, result['machine'], result['machine']['commit'])} Eight sleeping engines, of which two are "
        f"twice as fast, and a sleeping learner; {few}, of which a step takes {GROUPS}, with 8 samples "
        f"each; 65 % of the variance of lengths is the prompt's. Lengths are learned in the first {LEARNED} steps; the "
        f"next {COUNTED} count. Ratios are medians over rounds. In the case `vllm` the engines are "
        "real: one has a core of its own, the other shares its core with the learner and all else; it is simulated "
        "from a profile of its own runs, the others by the laws that they sleep by."
    )
    cells = []
    for name, row in result["fleets"].items():
        first, second = ([each["samples_per_s"] for each in row[policy]] for policy in POLICIES)
        known = row[POLICIES[1]]
        cells.append([
            name, f"{fmean(first):.2f}", f"{fmean(second):.2f}",
            f"{fmean(each['samples_per_s'] for each in row[ALL_FAST]):.2f}" if ALL_FAST in row else "-",
            ", ".join(f"{each:.2f}" for each in row["ratios"]),
            ", ".join(f"{each:.2f}" for each in row["simulated"]), f"{fmean(each['foretold'] for each in known):.0%}",
            f"{fmean(each['covered'] for each in known):.0%}",
        ])  # fmt: skip
    columns = ["fleet", "in order, samples/s", "by deadline", "all fast", "ratios", "simulated", "foretold", "covered"]
    return [
        "# Long answers on fast engines",
        head,
        bars_table(result["wanted_at_least"], "at least"),
        bars_table(result["wanted_at_most"], "at most"),
        table(columns, cells),
        "`foretold` is the share of the variance among the means of groups that was known before; `covered` that of "
        "the groups whose longest answer was no longer than foretold, where 90 % is right.",
    ]


if __name__ == "__main__":
    main()
