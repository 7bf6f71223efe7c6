"""Compare the simulator's predictions with measured fleets. Prints one JSON line last.

    python benchmarks/fleet.py [--quick] [--only N ...] [--keep FOLDER] [--page [FILE]]

A fleet is a real `leeway train` run whose engines sleep according to a token-time model and whose learner sleeps for
the rest of its step (`fleet_parts`). Actor loop, buffer, ledger, staleness bound, weights, Ray and supervisor are real.
Ten fleets with different engines, lags, lengths and token times are run and simulated. The simulation uses the same
token times, the same lengths, and the same prompts in the same order. The costs of leases, rewards, steps and weights
are measured in an eleventh fleet.

    sim_over_fleet_worst_error   largest relative error of the simulated samples per second used for training
    drop_share_worst             largest difference in the fraction of samples dropped as stale, percentage points
    sim_10M_s                    CPU seconds to simulate ten million completions on 896 engines

`--quick` is for development: it runs two short fleets, whose figures are meaningless. `--page` writes
docs/results/fleet.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.fleet_parts.prompts import FleetPrompts
from benchmarks.fleet_parts.setting import VARIABLE, FleetSetting
from benchmarks.lib.lengths import constant, lognormal
from benchmarks.lib.machine import RESULTS, ROOT, describe_machine
from benchmarks.lib.page import bars_table, judged, origin, table, write_page
from benchmarks.lib.processes import MeasurementFailed, end_at_sigterm
from benchmarks.lib.runs import FinishedRun, train

from leeway.common.staleness import StalenessConfig, StalenessContract
from leeway.launch.config import Config, load_config
from leeway.launch.pools import actor_pools
from leeway.launch.run_folder import RunFolder
from leeway.planning.costs import TokenTime
from leeway.planning.lengths import LengthDistribution
from leeway.planning.profiling import costs_of
from leeway.planning.simulator import Simulation
from leeway.planning.world import Costs, EnginePool, Outcome, World

PAGE = RESULTS / "fleet.md"
CONFIG = ROOT / "examples" / "demo.toml"
AT_MOST = {"sim_over_fleet_worst_error": 0.03, "drop_share_worst": 0.02, "sim_10M_s": 300.0}
WARM_UP = 6
"""Number of uncounted first steps, in which a run and its simulation differ by the time at which each starts."""
STEPS, MANY_STEPS = 30, 90
"""Numbers of counted steps. If milliseconds decide which groups are dropped, MANY_STEPS averages out this chance."""
BASE = (
    *("--actors.max_new_tokens", "56", "--learner.num_stages", "1", "--learner.token_budget", "4096"),
    *("--learner.groups_per_step", "8", "--actors.group_size", "8", "--learner.learning_rate", "1e-9"),
    *("--actors.cpus", "0.05", "--learner.cpus", "0.1", "--actors.reward_processes", "1"),
    *("--learner.checkpoint_every", "100000", "--task.num_heldout", "16", "--tracking.to", "[]"),
    *("--weight_sync.max_actor_lag", "0"),
)
TWO_POOLS = (
    *("--pools.slow.role", "actors", "--pools.slow.count", "3"),
    *("--pools.fast.role", "actors", "--pools.fast.count", "1"),
)
EVEN, TAIL, LONG = (
    constant(24),
    lognormal(16, 0.6, 56, 0.65),
    lognormal(20, 0.9, 56, 0.0),
)
LAW = TokenTime(0.04, 0.001)
STEEP = TokenTime(0.015, 0.005, 1e-5)

Figures = dict[str, Any]


@dataclass(frozen=True)
class Fleet:
    """Setting of one fleet."""

    name: str
    setting: FleetSetting
    overrides: tuple[str, ...]
    steps: int = STEPS

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of `leeway train`."""
        return (*BASE, *self.overrides, "--learner.num_steps", str(self.steps + WARM_UP))


def one_pool(name: str, count: int, slots: int, lag: object, law: TokenTime, lengths: LengthDistribution, step_s: float,
             *more: str) -> Fleet:  # fmt: skip
    """Return a fleet of identical engines."""
    setting = FleetSetting({"actors": law}, lengths, step_s, 1e-4)
    overrides = (
        "--actors.num_actors",
        str(count),
        "--actors.max_running_samples",
        str(slots),
        "--weight_sync.max_lag",
        str(lag),
    )
    return Fleet(name, setting, (*overrides, *more))


def two_pools(name: str, slots: int, lag: int, lengths: LengthDistribution, step_s: float) -> Fleet:
    """Return a fleet of three equal engines and a fourth engine that is twice as fast."""
    fast = TokenTime(LAW.base / 2, LAW.per_sample / 2)
    setting = FleetSetting({"slow": LAW, "fast": fast}, lengths, step_s, 1e-4)
    overrides = ("--actors.max_running_samples", str(slots), "--weight_sync.max_lag", str(lag))
    return Fleet(name, setting, (*TWO_POOLS, "--actors.num_actors", "4", *overrides))


CALIBRATION = one_pool("calibration", 6, 12, 4, LAW, TAIL, 1.2)
FLEETS = (
    one_pool("generation binds", 3, 16, 4, LAW, EVEN, 0.4),
    one_pool("training binds", 6, 16, 3, LAW, TAIL, 1.0),
    one_pool("synchronous", 4, 16, 0, LAW, TAIL, 0.5),
    replace(one_pool("lag 1, drop", 4, 12, 1, LAW, TAIL, 0.8), steps=MANY_STEPS),
    one_pool("lag 2, wait", 4, 12, 2, LAW, LONG, 0.8, "--weight_sync.on_stale", "wait"),
    replace(one_pool("long tail, lag 2, drop", 5, 12, 2, LAW, LONG, 0.8), steps=MANY_STEPS),
    one_pool("steep engines", 4, 10, 4, STEEP, TAIL, 0.8),
    one_pool("slots that K does not divide", 3, 13, 4, LAW, TAIL, 0.5),
    two_pools("unlike engines", 12, 3, TAIL, 0.6),
    one_pool("sixteen engines", 16, 8, 6, LAW, TAIL, 1.2),
)


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two short fleets, for development")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="run only these fleets, numbered from 1")
    parser.add_argument("--keep", type=Path, help="keep the run folders in this folder (default: remove them)")
    parser.add_argument(
        "--page", type=Path, nargs="?", const=PAGE, metavar="FILE", help="write the page (default: in docs/results/)"
    )
    args = parser.parse_args()
    if args.page and (args.quick or args.only):
        parser.error("--page needs all fleets at full size: omit --quick and --only, or omit --page")
    end_at_sigterm()
    machine = describe_machine()
    fleets = [FLEETS[number - 1] for number in args.only] if args.only else list(FLEETS)
    if args.quick:
        fleets = [replace(each, steps=10) for each in fleets[:2]]
    with tempfile.TemporaryDirectory(prefix="benchmark-fleet-") as fresh:
        folder = (args.keep or Path(fresh)).resolve()
        try:
            calibrated = run(folder, replace(CALIBRATION, steps=10) if args.quick else CALIBRATION)
            costs = costs_of([RunFolder(calibrated.folder)])
            print(f"costs: {costs}", file=sys.stderr, flush=True)
            rows = [compared(folder, fleet, costs) for fleet in fleets]
        except MeasurementFailed as error:
            sys.exit(f"benchmarks/fleet.py: {error}")
    result: Figures = {
        "quick": args.quick,
        "sim_over_fleet_worst_error": max(abs(row["error"]) for row in rows),
        "drop_share_worst": max(abs(row["simulated_dropped"] - row["dropped"]) for row in rows),
        "sim_10M_s": None if args.quick else simulate_many(),
        "fleets": rows,
        "machine": machine,
    }
    result["wanted"] = judged(result, AT_MOST, "at most", at_full_size=not args.quick and not args.only)
    if args.page:
        write_page(args.page, page(result))
    print(json.dumps(result))


def run(folder: Path, fleet: Fleet) -> FinishedRun:
    """Run a fleet to its end.

    Raises:
        MeasurementFailed: the run failed.
    """
    name = fleet.name.replace(" ", "-").replace(",", "")
    return train(
        CONFIG,
        folder / name,
        fleet.arguments,
        log=folder / f"{name}.log",
        module="benchmarks.fleet_parts.command",
        variables={VARIABLE: fleet.setting.as_text()},
    )


def compared(folder: Path, fleet: Fleet, costs: Costs) -> Figures:
    """Run and simulate a fleet; return the figures of run and simulation."""
    rows = run(folder, fleet).updates
    first, last = rows[WARM_UP - 1], rows[-1]
    counted = rows[WARM_UP:]
    measured = sum(row["batch/trajectories"] for row in counted) / (last["finished_s"] - first["finished_s"])
    made = last["buffer/committed"] - first["buffer/committed"]
    dropped = (last["buffer/dropped_stale"] - first["buffer/dropped_stale"]) / made
    found = simulated(fleet, costs)
    row = {
        "fleet": fleet.name,
        "samples_per_s": measured,
        "simulated": found.samples_per_s,
        "error": found.samples_per_s / measured - 1.0,
        "dropped": dropped,
        "simulated_dropped": found.drop_share,
        "age": sum(row["buffer/age_at_use"] for row in counted) / len(counted),
        "simulated_age": found.lag_mean,
        "binds": found.binds,
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def simulated(fleet: Fleet, costs: Costs) -> Outcome:
    """Simulate a fleet."""
    config = load_config(CONFIG, fleet.arguments)
    return Simulation(world_of(fleet, config, costs)).run(fleet.steps + WARM_UP, WARM_UP)


def world_of(fleet: Fleet, config: Config, costs: Costs) -> World:
    """Return the simulator's description of a fleet."""
    setting, prompts = fleet.setting, FleetPrompts(config, fleet.setting.lengths)
    pools = tuple(
        EnginePool(pool.name, pool.count, setting.pools[pool.name], pool.config) for pool in actor_pools(config)
    )
    return World(
        pools,
        StalenessContract(
            config.weight_sync.staleness(), config.learner.groups_per_step, config.learner.updates_per_step
        ),
        config.buffer,
        setting.lengths,
        lambda tokens: setting.step_s + setting.step_token_s * sum(tokens),
        num_prompts=prompts.num_prompts,
        prompt_tokens=round(prompts.mean_prompt_tokens),
        costs=costs,
        prompts=lambda seed: prompts.anew(),
    )


def simulate_many(completions: int = 10_000_000) -> float:
    """Return the CPU seconds to simulate a number of completions on 896 engines with 256 slots."""
    config = load_config(CONFIG, ["--actors.max_running_samples", "256", "--actors.max_new_tokens", "16384"])
    groups = 1024
    contract = StalenessContract(StalenessConfig(max_lag=32), groups)
    pool = EnginePool("actors", 896, TokenTime(1e-2, 5e-5, 2e-9), actor_pools(config)[0].config)
    world = World(
        (pool,), contract, config.buffer, lognormal(2500, 0.9, 16_384, 0.65),
        lambda tokens: 1.0 + 1e-7 * sum(tokens),
        costs=Costs(lease_s=0.03, publish_s=2.0, fetch_s=3.0, pause_s=0.2),
    )  # fmt: skip
    simulation, began_s = Simulation(world), time.process_time()
    found = simulation.run(completions // (groups * config.actors.group_size))
    return (time.process_time() - began_s) * completions / found.num_generated


def page(result: Figures) -> list[str]:
    """Return the paragraphs of the page."""
    command = "python benchmarks/fleet.py --page"
    head = (
        f"{origin(command, result['machine'], result['machine']['commit'])} Each fleet is a real run with 64 "
        "samples per step, whose engines and learner sleep instead of computing. The simulation of a fleet uses the "
        "same token times, prompts and lengths. The costs of leases, commits, steps and weights were measured in "
        "another fleet."
    )
    cells = [
        [
            row["fleet"],
            row["binds"],
            f"{row['samples_per_s']:.2f}",
            f"{row['simulated']:.2f}",
            f"{100 * row['error']:+.1f} %",
            f"{100 * row['dropped']:.1f} %",
            f"{100 * row['simulated_dropped']:.1f} %",
            f"{row['age']:.2f}",
            f"{row['simulated_age']:.2f}",
        ]
        for row in result["fleets"]
    ]
    columns = ["fleet", "bottleneck", "samples/s", "simulated", "error", "dropped", "simulated", "age", "simulated"]
    return ["# Measured and simulated fleets", head, bars_table(result["wanted"], "at most"), table(columns, cells)]


if __name__ == "__main__":
    main()
