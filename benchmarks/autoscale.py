"""Measure how `launch.autoscale = "on"` follows changing completion lengths. Prints one JSON line last.

    python benchmarks/autoscale.py [--quick] [--seeds 100] [--only fleets|response] [--keep FOLDER] [--page [FILE]]

Fleets are real `leeway train` runs whose engines and learner sleep instead of computing (`fleet_parts`). Completion
lengths double within 40 steps. One run scales automatically. Three static runs have a constant number of actors: the
best number for the final lengths, one actor less, and one actor more. The best number is the smallest number of engines
that, with all slots full, generate the samples of a step within the time of a step.

    grows_within_steps     maximum number of steps from the need for another actor to the advice that adds this actor
    rate_over_best_static  samples per second of the scaled run after its growth, over those of the best static run

A response is a simulated run with the same `ScalingPolicy`; engine speed, lengths, step time and noise vary by seed.

    steps_worst            maximum number of consecutive steps with a pool over one actor away from the best number
    rate_over_best_worst   samples per second in the last 60 steps, over those of the best static run

Admission never limits the simulated runs: the inputs of the policy state that all slots are in use.

`--quick` is for development; its figures are meaningless. `--page` writes docs/results/autoscale.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from math import ceil
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.autoscale_parts.simulation import ScalingSimulation
from benchmarks.fleet import Fleet, run
from benchmarks.fleet_parts.setting import FleetSetting, Stretch
from benchmarks.lib.lengths import lognormal
from benchmarks.lib.machine import RESULTS, describe_machine
from benchmarks.lib.page import bars_table, judged, origin, table, write_page
from benchmarks.lib.processes import MeasurementFailed, end_at_sigterm
from benchmarks.lib.runs import FinishedRun, Row

from leeway.actors.config import ActorsConfig
from leeway.buffer.config import BufferConfig
from leeway.common.staleness import StalenessConfig, StalenessContract
from leeway.planning.autoscale import ABOVE, PoolState, ScalingPolicy, StepFacts
from leeway.planning.costs import TokenTime
from leeway.planning.lengths import LengthDistribution
from leeway.planning.world import Costs, EnginePool, World

PAGE = RESULTS / "autoscale.md"
BARS: Mapping[str, Mapping[str, float]] = {
    "at most": {"grows_within_steps": 3, "reversals": 1, "samples_lost": 0, "reversals_worst": 1},
    "at least": {"rate_over_best_static": 0.95, "rate_over_best_worst": 0.95},
}
LAW, SLOTS, STEP_S, K, GROUPS, PROMPT_TOKENS = TokenTime(0.08, 0.002), 16, 2.1, 8, 8, 8
LENGTHS = lognormal(12, 0.4, 27, 0.5)
DOUBLES, AFTER = Stretch(20, 40, 2.0), 50
"""Change of completion lengths in the fleets, and number of steps after this change."""
CHANGES = {"sudden doubling": Stretch(20, 1, 2.0), "slow doubling": DOUBLES, "sudden halving": Stretch(20, 1, 0.5)}
NUM_STEPS, LAST, SEEDS = 160, 60, 100
"""Steps of a simulated run, last steps of the run whose rate counts, and runs per kind of change."""

Figures = dict[str, Any]


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short fleets and two seeds, for development")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds of the simulated response")
    parser.add_argument("--only", choices=("fleets", "response"), help="run only this part")
    parser.add_argument("--keep", type=Path, help="keep the run folders in this folder (default: remove them)")
    parser.add_argument(
        "--page", type=Path, nargs="?", const=PAGE, metavar="FILE", help="write the page (default: in docs/results/)"
    )
    args = parser.parse_args()
    is_full = not args.quick and args.seeds >= SEEDS
    if args.page and (args.only or not is_full):
        parser.error(f"--page needs both parts and {SEEDS} seeds: omit --quick, --only and --seeds, or omit --page")
    end_at_sigterm()
    machine = describe_machine()
    result: Figures = {"quick": args.quick, "seeds": 2 if args.quick else args.seeds, "machine": machine}
    with tempfile.TemporaryDirectory(prefix="benchmark-autoscale-") as fresh:
        try:
            if args.only != "response":
                result |= fleets((args.keep or Path(fresh)).resolve(), quick=args.quick)
        except MeasurementFailed as error:
            sys.exit(f"benchmarks/autoscale.py: {error}")
    if args.only != "fleets":
        result |= responses(result["seeds"])
    judgements = [judged(result, bars, word, at_full_size=is_full) for word, bars in BARS.items()]
    result["wanted"] = judgements[0] | judgements[1]
    if args.page:
        write_page(args.page, page(result))
    print(json.dumps(result))


def best_count(law: TokenTime, slots: int, tokens: float, num_groups: int, train_s: float) -> int:
    """Return the smallest number of actors that, with all slots full, generate a step's groups in a step's time."""
    return ceil(K * num_groups / (train_s * PoolState("", 1, 1, slots, law, 1).rate(tokens, PROMPT_TOKENS)))


def reversals(counts: Sequence[int]) -> int:
    """Return how often a count changes in the opposite direction to its previous change."""
    ups = [after > before for before, after in pairwise(counts) if after != before]
    return sum(one != two for one, two in pairwise(ups))


# --- fleets -------------------------------------------------------------------------------------------


def fleets(folder: Path, *, quick: bool) -> Figures:
    """Run the fleets; return figures that compare the automatically scaled run with the static runs.

    Raises:
        MeasurementFailed: a run failed.
    """
    stretch, after = (Stretch(4, 8, 2.0), 6) if quick else (DOUBLES, AFTER)
    setting, end = FleetSetting({"actors": LAW}, LENGTHS, STEP_S, stretch=stretch), stretch.start + stretch.over
    first, best = (best_count(LAW, SLOTS, LENGTHS.mean * times, GROUPS, STEP_S) for times in (1.0, stretch.to))

    def measured(name: str, count: int, *more: str) -> FinishedRun:
        arguments = ("--actors.num_actors", str(count), "--actors.max_running_samples", str(SLOTS), *more)
        return run(folder, Fleet(name, setting, (*arguments, "--weight_sync.max_lag", "4"), end + after))

    follows = measured("follows", first, "--launch.autoscale", "on")
    statics = {count: measured(f"static {count}", count).updates for count in (best - 1, best, best + 1)}
    rows, summary = follows.updates, follows.summary
    events = map(json.loads, (follows.folder / "events.jsonl").read_text().splitlines())
    advice = [each for each in events if each["kind"] == "advice"]
    changes = [each for each in advice if each["pool"]]
    growth = grown(rows, changes, stretch)
    since = min(max(end, growth[-1]["had"]), len(rows) - 2)
    rates = {f"static {count}": rate(each, since) for count, each in statics.items()}
    waits, failed = first_wait(statics[best - 1], stretch.start), rows[-1]["buffer/failed"]
    handed_back = rows[-1]["buffer/failed_lease"]
    return {
        "grows_within_steps": max(each["advised"] - each["asked"] for each in growth),
        "has_within_steps": max(each["had"] - each["asked"] for each in growth),
        "actor_start_s": median(each["start_s"] for each in growth),
        "has_after_one_less_waits_steps": None if waits is None else growth[-1]["had"] - waits,
        "rate_over_best_static": rate(rows, since) / max(rates.values()),
        "reversals": reversals([first, *(each["count"] for each in changes)]),
        "samples_lost": summary["ledger_gap"] + failed - handed_back + summary["ledger"]["evicted_unused"],
        "handed_back": handed_back,
        "best_by_arithmetic": best,
        "counted_from_step": since,
        "rates": {"follows": rate(rows, since), **rates},
        "growth": growth,
        "counts": [row["pool/actors/actors"] for row in rows],
        "advice": [each["text"] for each in advice],
    }


def grown(rows: Sequence[Row], changes: Sequence[Row], stretch: Stretch) -> list[Figures]:
    """Return the steps at which each number of actors is needed, advised and running; the last step if it never is."""
    train_s = median(two["finished_s"] - one["finished_s"] - two["time/wait_for_batch"] for one, two in pairwise(rows))
    needed = [best_count(LAW, SLOTS, LENGTHS.mean * stretch.at(row["step"]), GROUPS, train_s) for row in rows]
    last, found = rows[-1], []
    for count in range(needed[0] + 1, needed[-1] + 1):
        advised_s = next((each["time_s"] for each in changes if each["count"] >= count), last["finished_s"])
        had = next((row for row in rows if row["pool/actors/actors"] >= count), last)
        steps = {
            "asked": next(row["step"] for row, each in zip(rows, needed, strict=True) if each >= count),
            "advised": max((row["step"] for row in rows if row["finished_s"] <= advised_s), default=0),
            "had": had["step"],
        }
        found.append({"count": count, **steps, "start_s": max(0.0, had["finished_s"] - advised_s)})
    return found


def rate(rows: Sequence[Row], since: int) -> float:
    """Return the samples used for training per second after the first `since` steps."""
    counted = sum(row["batch/trajectories"] for row in rows[since:])
    return float(counted / (rows[-1]["finished_s"] - rows[since - 1]["finished_s"]))


def first_wait(rows: Sequence[Row], start: int) -> int | None:
    """Return the first of five steps whose mean wait for samples exceeds noise; None if the wait never does."""
    for at in range(start, len(rows) - 5):
        if fmean(row["time/wait_for_batch"] for row in rows[at : at + 5]) > ABOVE * STEP_S:
            return int(rows[at]["step"])
    return None


# --- response -----------------------------------------------------------------------------------------


class Case(NamedTuple):
    """Parameters of a simulated run."""

    seed: int
    world: World
    stretch: Stretch
    step_s: float
    start_s: float
    """Seconds from the decision to add an actor until the actor runs."""

    def best(self, step: int) -> int:
        """Return the best number of actors for the lengths of a step."""
        pool, tokens = self.world.pools[0], self.world.lengths.mean * self.stretch.at(step)
        groups = self.world.contract.groups_per_step
        return best_count(pool.law, pool.config.max_running_samples, tokens, groups, self.step_s)


class AtStep(NamedTuple):
    """State of a simulated run at the end of a step."""

    now_s: float
    working: int
    desired: int


def made_up(seed: int, stretch: Stretch) -> Case:
    """Return random parameters of a run: shorter lengths need 2 to 4 actors, longer lengths about twice as many."""
    random = Random(seed)
    least, groups, tokens = random.randint(2, 4), random.choice((8, 16, 32)), random.uniform(100, 400)
    slots, base_s = max(8, round(random.uniform(0.2, 0.5) * K * groups / least)), random.uniform(5e-3, 3e-2)
    law = TokenTime(base_s, base_s * random.uniform(0.1, 2.0) / slots)
    lengths = lognormal(tokens, random.uniform(0.3, 0.8), round(4 * tokens), random.uniform(0.0, 0.7))
    one = PoolState("", 1, 1, slots, law, 1).rate(lengths.mean, PROMPT_TOKENS)
    step_s = K * groups / (one * (least - random.uniform(0.05, 0.5)))
    if stretch.to < 1.0:
        lengths = LengthDistribution(tuple(each / stretch.to for each in lengths.quantiles), lengths.explained)
    costs = Costs(*(share * step_s for share in (0.01, 0.01, 0.02, 0.02, 0.01, 0.01)))
    pool = EnginePool("a", 1, law, ActorsConfig(group_size=K, max_running_samples=slots, max_new_tokens=8192))
    contract = StalenessContract(StalenessConfig(max_lag=8), groups)
    world = World((pool,), contract, BufferConfig(), lengths, lambda _: step_s, 10_000, PROMPT_TOKENS, costs)
    return Case(seed, world, stretch, step_s, random.uniform(0.0, 4.0) * step_s)


def simulated(case: Case, count: int, *, follows: bool) -> list[AtStep]:
    """Simulate a run that starts with `count` actors and whose step time varies by up to 5 %."""
    noise, took_s, pool = Random(case.seed), [0.0], replace(case.world.pools[0], count=count)
    slots, most = pool.config.max_running_samples, 4 * case.best(NUM_STEPS)
    following, found, ready_s = ScalingPolicy(), [AtStep(0.0, count, count)], 0.0
    used_up = K * case.world.contract.groups_per_step
    seen: tuple[int, float] = (0, 0.0)

    def step_s(_: Sequence[int]) -> float:
        took_s.append(case.step_s * noise.uniform(0.95, 1.05))
        return took_s[-1]

    def after_step(step: int) -> None:
        nonlocal ready_s, seen
        so_far, now_s, desired = simulation.so_far(), simulation.now_s, found[-1].desired
        working = desired if now_s >= ready_s else found[-1].working
        (ended, tokens), seen = seen, (so_far.num_generated, so_far.num_tokens)
        if follows and seen[0] > ended:
            train_s = took_s[-1] + case.world.costs.between_steps_s
            waited = max(0.0, 1.0 - train_s / (now_s - found[-1].now_s))
            facts = StepFacts((seen[1] - tokens) / (seen[0] - ended), PROMPT_TOKENS, train_s, 1.0, used_up, waited)
            advice = following.observe([PoolState("a", working, desired, slots, pool.law, most)], facts)
            if advice is not None and advice.pool:
                working = min(working, advice.count)
                desired, ready_s = advice.count, now_s + case.start_s * (advice.count > desired)
                simulation.scale(desired, case.start_s)
        simulation.stretch = case.stretch.at(step)
        found.append(AtStep(now_s, working, desired))

    simulation = ScalingSimulation(replace(case.world, pools=(pool,), step_s=step_s), case.seed, after_step)
    simulation.run(NUM_STEPS)
    return found


def response(case: Case) -> Figures:
    """Compare autoscaling with two static runs: the best number of actors for the final lengths, and one actor more."""
    found, end = simulated(case, case.best(0), follows=True), case.best(NUM_STEPS)
    statics = [simulated(case, count, follows=False) for count in (end, end + 1)]
    off = [abs(at.working - case.best(step)) > 1 for step, at in enumerate(found)]

    def over_best(since: int) -> float:
        return min(each[-1].now_s - each[since].now_s for each in statics) / (found[-1].now_s - found[since].now_s)

    return {
        "seed": case.seed,
        "steps": max((len(list(several)) for is_off, several in groupby(off) if is_off), default=0),
        "reversals": reversals([at.desired for at in found]),
        "rate": over_best(NUM_STEPS - LAST),
        "rate_since_change": over_best(case.stretch.start),
        "counts": [count for count, _ in groupby(at.desired for at in found)],
        "best": end,
    }


def responses(num_seeds: int) -> Figures:
    """Return the figures over all seeds for each kind of change, with the worst seed of each kind."""
    changes = {}
    for name, stretch in CHANGES.items():
        found = [response(made_up(seed, stretch)) for seed in range(num_seeds)]
        changes[name] = {
            "steps_median": median(each["steps"] for each in found),
            "steps_worst": max(each["steps"] for each in found),
            "reversals_worst": max(each["reversals"] for each in found),
            "rate_over_best_worst": min(each["rate"] for each in found),
            "rate_since_change_worst": min(each["rate_since_change"] for each in found),
            "worst": min(found, key=lambda each: (-each["reversals"], each["rate_since_change"])),
        }
        print(json.dumps({name: changes[name]}), file=sys.stderr, flush=True)
    return {
        "reversals_worst": max(each["reversals_worst"] for each in changes.values()),
        "rate_over_best_worst": min(each["rate_over_best_worst"] for each in changes.values()),
        "changes": changes,
    }


def page(result: Figures) -> list[str]:
    """Return the paragraphs of the page."""
    made = origin("python benchmarks/autoscale.py --page", result["machine"], result["machine"]["commit"])
    head = (
        f"{made} Fleets are real runs whose engines and learner sleep instead of computing. A step has {K * GROUPS} "
        f"samples and takes {STEP_S:g} s. Completion lengths double between steps {DOUBLES.start} and "
        f"{DOUBLES.start + DOUBLES.over}. An actor takes {result['actor_start_s']:.1f} s to start. Each added actor "
        f"ran at most {result['has_within_steps']} steps after the lengths required this actor. Rates cover the steps "
        f"from {result['counted_from_step']} on. The second table has runs simulated with {result['seeds']} seeds, "
        f"whose lengths change at step {DOUBLES.start}."
    )
    keys = ("count", "asked", "advised", "had")
    growth = [[*(str(each[key]) for key in keys), f"{each['start_s']:.1f}"] for each in result["growth"]]
    responses = [
        [name, f"{each['steps_median']:g}", str(each["steps_worst"]), str(each["reversals_worst"])]
        + [f"{each[key]:.3f}" for key in ("rate_over_best_worst", "rate_since_change_worst")]
        for name, each in result["changes"].items()
    ]
    targets = [bars_table({key: result["wanted"][key] for key in bars}, word) for word, bars in BARS.items()]
    columns = ["change of lengths", "steps over one actor off, median", "their worst", "reversals, worst"]
    return [
        "# Autoscaling of actor pools",
        head,
        *targets,
        table(["actors", "needed in step", "advised in step", "running in step", "start-up, s"], growth),
        table(["run", "samples/s"], [[name, f"{each:.2f}"] for name, each in result["rates"].items()]),
        table([*columns, "rate over best static, worst", "that rate since the change, worst"], responses),
    ]


if __name__ == "__main__":
    main()
