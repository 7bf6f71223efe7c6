"""Shares the cells of the matrix out to processes of one thread each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.off_policy_world.rows import ROWS
from benchmarks.off_policy_world.training import Lag, Outcome, train
from benchmarks.off_policy_world.world import World

ROOT = Path(__file__).resolve().parent.parent.parent
CELL_TIMEOUT_S = 120.0
"""What a cell may take on average; 5 on a core of its own."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    row: str
    lag: Lag
    seed: int
    num_draws: int
    learning_rate: float | None = None
    """None: the row's."""


class WorkerFailed(RuntimeError):
    """A process of the benchmark ended badly."""


def run_cells(cells: list[Cell], num_workers: int) -> list[Outcome]:
    """The outcome of each cell, in their order; progress goes to stderr.

    Raises:
        WorkerFailed: with what to do about it.
    """
    shares = [cells[first::num_workers] for first in range(num_workers)]
    command = [sys.executable, "-m", "benchmarks.off_policy_world.workers"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    deadline = time.monotonic() + CELL_TIMEOUT_S * max(map(len, shares))
    workers = [
        subprocess.Popen(
            [*command, json.dumps([asdict(cell) for cell in share])],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for share in shares
    ]
    outcomes = [Outcome(None, None)] * len(cells)
    try:
        for first, worker in enumerate(workers):
            lines, _ = worker.communicate(timeout=max(0.0, deadline - time.monotonic()))
            if worker.returncode:
                raise WorkerFailed(
                    f"process {first} of the benchmark ended with status {worker.returncode}; what it said is above. "
                    "Run its last cell alone with --only and --workers 1"
                )
            outcomes[first::num_workers] = [Outcome(**json.loads(line)) for line in lines.splitlines()]
    except subprocess.TimeoutExpired as error:
        raise WorkerFailed(f"the cells took longer than {CELL_TIMEOUT_S:.0f} s each; try --quick") from error
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(timeout=CELL_TIMEOUT_S)
    return outcomes


def main() -> None:
    """Run the cells of the command line, and print one JSON line for each."""
    torch.set_num_threads(1)
    rows = {row.name: row for row in ROWS}
    for number, values in enumerate(cells := json.loads(sys.argv[1])):
        cell = Cell(**values)
        row = rows[cell.row]
        if cell.learning_rate is not None:
            row = replace(row, learning_rate=cell.learning_rate)
        began = time.monotonic()
        outcome = train(World.made_from(cell.seed), row, cell.lag, cell.seed, cell.num_draws)
        wall_s = time.monotonic() - began
        text = f"[{number + 1}/{len(cells)}] {cell.row} lag={cell.lag} seed={cell.seed} lr={row.learning_rate:g}"
        print(f"{text} kl={outcome.kl} reward={outcome.reward} {wall_s:.1f} s", file=sys.stderr, flush=True)
        print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
