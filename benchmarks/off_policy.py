"""Compare algorithms and off-policy corrections at every lag, in a world with a known optimal policy pi*.

    python benchmarks/off_policy.py [--quick] [--only NAME ...] [--tune] [--page] [--workers 2]

Each cell trains a small transformer with one loss of `algorithms` at one lag (`off_policy_world/training.py`) and
computes its exact KL to pi* and its expected reward by enumeration. The outcomes are stored in
docs/results/off_policy.json, from which docs/results/off_policy.md and its figure are written. The last line of stdout
is {algorithm: {lag: {"kl": ..., "reward": ...}}}. Values are means over seeds, or null if a seed became non-finite.

`--quick` is for development: it runs one seed and fewer draws, and stores no outcome. `--only` selects rows; rows of
earlier calls stay on the page. `--page` only rewrites the page from stored outcomes. `--tune` runs a grid of learning
rates at lag 0 with separate seeds instead of the matrix, and prints {algorithm: {rate: kl}}.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.machine import RESULTS
from benchmarks.lib.processes import MeasurementFailed, call_in_processes
from benchmarks.off_policy_world.page import Outcomes, means, write_results
from benchmarks.off_policy_world.training import LAGS, LEARNING_RATES, ROWS, Lag, Outcome

KEPT = RESULTS / "off_policy.json"
NUM_DRAWS = 200
QUICK_DRAWS = 50
SEEDS = (0, 1, 2)
TUNING_SEEDS = (100,)
"""Seeds of tuning. Their worlds differ from the worlds of the results."""
CELL_LIMIT_S = 120.0
"""Timeout in seconds, as a mean over cells; on an idle core a cell takes 5 s."""


class Cell(NamedTuple):
    """Parameters of one training run."""

    row: str
    lag: Lag
    seed: int
    num_draws: int
    learning_rate: float | None = None
    """Learning rate; None for the learning rate of the row."""


def main() -> None:
    """Run the matrix or the grid of learning rates, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run one seed and fewer draws, for development")
    parser.add_argument("--only", nargs="+", choices=[row.name for row in ROWS], metavar="NAME", help="rows to run")
    parser.add_argument("--tune", action="store_true", help="run the grid of learning rates at lag 0")
    parser.add_argument("--page", action="store_true", help="only rewrite the page from stored outcomes")
    parser.add_argument("--workers", type=int, default=2, help="number of processes of one thread each")
    args = parser.parse_args()
    names = args.only or [row.name for row in ROWS]
    if args.tune:
        print(json.dumps(tuned(names, args.workers)))
        return
    kept = Kept.read()
    if args.page:
        kept.write_page()
        return
    began = time.monotonic()
    seeds, num_draws = (SEEDS[:1], QUICK_DRAWS) if args.quick else (SEEDS, NUM_DRAWS)
    outcomes = run_matrix(names, seeds, num_draws, args.workers)
    if not args.quick:
        kept.add(outcomes, time.monotonic() - began)
        kept.write_page()
    print(json.dumps({name: {lag: means(seen) for lag, seen in by_lag.items()} for name, by_lag in outcomes.items()}))


@dataclass
class Kept:
    """Stored outcomes of calls at full size."""

    outcomes: Outcomes
    minutes: float

    @classmethod
    def read(cls) -> Kept:
        """Read the stored outcomes from the results folder."""
        if not KEPT.exists():
            return cls({}, 0.0)
        found = json.loads(KEPT.read_text())
        outcomes = {
            name: {lag: [Outcome(*each) for each in seen] for lag, seen in by_lag.items()}
            for name, by_lag in found["outcomes"].items()
        }
        return cls(outcomes, found["minutes"])

    def add(self, outcomes: Outcomes, wall_s: float) -> None:
        """Add or replace rows, and store them."""
        is_whole = outcomes.keys() >= {row.name for row in ROWS}
        self.outcomes = {
            row.name: each for row in ROWS if (each := outcomes.get(row.name, self.outcomes.get(row.name)))
        }
        self.minutes = wall_s / 60 + (0.0 if is_whole else self.minutes)
        rows = {
            name: {lag: [[each.kl, each.reward] for each in seen] for lag, seen in by_lag.items()}
            for name, by_lag in self.outcomes.items()
        }
        KEPT.write_text(json.dumps({"minutes": round(self.minutes, 1), "outcomes": rows}) + "\n")

    def write_page(self) -> None:
        """Write the page; if rows are missing, print their names and write nothing."""
        if missing := [row.name for row in ROWS if row.name not in self.outcomes]:
            print(f"page not written: {KEPT} has no {', '.join(missing)}", file=sys.stderr)
            return
        write_results(RESULTS, self.outcomes, SEEDS, NUM_DRAWS, self.minutes * 60)


def run_matrix(names: list[str], seeds: tuple[int, ...], num_draws: int, num_workers: int) -> Outcomes:
    """Run all cells of some rows; return the outcomes of these rows."""
    cells = [Cell(name, lag, seed, num_draws) for seed in seeds for name in names for lag in LAGS]
    outcomes: Outcomes = {name: {lag: [] for lag in LAGS} for name in names}
    for cell, outcome in zip(cells, run(cells, num_workers), strict=True):
        outcomes[cell.row][cell.lag].append(outcome)
    return outcomes


def tuned(names: list[str], num_workers: int) -> dict[str, dict[str, float | None]]:
    """Return the KL at lag 0 for every learning rate of the grid."""
    cells = [
        Cell(name, "0", seed, NUM_DRAWS, rate) for name in names for rate in LEARNING_RATES for seed in TUNING_SEEDS
    ]
    seen: Outcomes = {name: {f"{rate:g}": [] for rate in LEARNING_RATES} for name in names}
    for cell, outcome in zip(cells, run(cells, num_workers), strict=True):
        seen[cell.row][f"{cell.learning_rate:g}"].append(outcome)
    return {name: {rate: means(some)["kl"] for rate, some in by_rate.items()} for name, by_rate in seen.items()}


def run(cells: list[Cell], num_workers: int) -> list[Outcome]:
    """Run cells in processes of one thread each; return the outcomes in the order of the cells.

    Raises:
        SystemExit: a process failed, or the timeout expired.
    """
    shares = [cells[first::num_workers] for first in range(num_workers)]
    try:
        found = call_in_processes(
            "the matrix",
            "benchmarks.off_policy_world.training:run_cells",
            [{"cells": [cell._asdict() for cell in share]} for share in shares],
            limit_s=CELL_LIMIT_S * max(map(len, shares)),
        )
    except MeasurementFailed as error:
        sys.exit(f"benchmarks/off_policy.py: {error}: try --quick, or --only its last row with --workers 1")
    outcomes = [Outcome(None, None)] * len(cells)
    for first, some in enumerate(found):
        outcomes[first::num_workers] = [Outcome(**each) for each in some]
    return outcomes


if __name__ == "__main__":
    main()
