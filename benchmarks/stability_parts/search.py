"""The greatest rate at which a row still learns at a lag, and what it comes to as it ships; many at a time."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.stability_parts.loop import DelayedRun
from benchmarks.stability_parts.rows import ROWS, Row

LAGS = (0, 1, 4, 16, 64)
RATES = (1.25e-5, 2.5e-5, 5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3)
FIRST_RATE = 1e-4
NUM_UPDATES = 120
LAGS_SEEN = 3
"""A run has at least so many times its lag of updates: what comes back late has to have come back."""
EVAL_EVERY = 20
MAY_FALL_BY = 0.05
"""Sampled accuracy below the best that is still no fall: three standard errors on 1,024 problems."""
SEED = 0

Result = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A row at a lag: what is searched for, or, as it ships, trained whole."""

    row: int
    lag: int
    as_shipped: bool

    @property
    def key(self) -> str:
        """Under which its result is kept."""
        return f"{ROWS[self.row].name} | lag {self.lag} | {'shipped' if self.as_shipped else 'greatest rate'}"


def tasks() -> list[Task]:
    """All of the page, the longest first."""
    rates = [Task(i, lag, False) for i, row in enumerate(ROWS) for lag in row.lags]
    shipped = [Task(i, lag, True) for i, row in enumerate(ROWS) for lag in LAGS if row.ships]
    return sorted([*rates, *shipped], key=lambda task: (task.as_shipped, -task.lag))


def run_all(kept: Path, num_workers: int, commit: str) -> None:
    """Add every result to a file that does not have it yet.

    Args:
        kept: JSON lines.
        num_workers: processes, of one thread each.
        commit: of the code that runs; said with each result.
    """
    known = dict(kept_in(kept))
    missing = [task for task in tasks() if task.key not in known]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = {pool.submit(run, task): task for task in missing}
        for number, future in enumerate(as_completed(futures), 1):
            task, result = futures[future], future.result()
            with kept.open("a") as file:
                file.write(json.dumps({"key": task.key, "commit": commit, **result}) + "\n")
            print(f"{number} of {len(missing)}, {task.key}: {result}", flush=True)


def kept_in(path: Path) -> Iterator[tuple[str, Result]]:
    """The results of a file, by the key of their task."""
    for line in path.read_text().splitlines() if path.exists() else []:
        found = json.loads(line)
        yield found.pop("key"), found


def run(task: Task) -> Result:
    """In a process of its own."""
    row = ROWS[task.row]
    return as_shipped(row, task.lag) if task.as_shipped else greatest_rate(row, task.lag)


def as_shipped(row: Row, lag: int) -> Result:
    """Accuracies of the whole run of the config."""
    delayed = DelayedRun(list(row.overrides), lag, SEED)
    before = delayed.accuracy()
    curve = delayed.train(delayed.config.learner.num_steps)
    return {
        "greedy_before": before[0],
        "greedy": list(curve.greedy.values())[-1],
        "sampled": list(curve.sampled.values())[-1],
        "ess_lowest": min(curve.ess),
        "k3_greatest": max(curve.k3),
    }


def greatest_rate(row: Row, lag: int) -> Result:
    """Go up from FIRST_RATE while it is stable, or down until it is.

    Returns:
        `rate`, None where even the smallest is not stable; and of each rate that was tried the sampled accuracies.
    """
    place = RATES.index(FIRST_RATE)
    tried: dict[float, Sequence[float]] = {}
    stable = _try(row, lag, RATES[place], tried)
    step = 1 if stable else -1
    while 0 <= place + step < len(RATES):
        place += step
        if _try(row, lag, RATES[place], tried) != stable:
            break
    found = [rate for rate, accuracies in tried.items() if is_stable(accuracies)]
    return {"rate": max(found, default=None), "tried": {f"{rate:g}": tried[rate] for rate in sorted(tried)}}


def _try(row: Row, lag: int, rate: float, tried: dict[float, Sequence[float]]) -> bool:
    overrides = [*row.overrides, "--learner.learning_rate", f"{rate:g}", "--learner.lr_schedule", "constant"]
    delayed = DelayedRun(overrides, lag, SEED)
    before = delayed.accuracy()
    curve = delayed.train(max(NUM_UPDATES, LAGS_SEEN * lag), eval_every=EVAL_EVERY)
    tried[rate] = [round(value, 4) for value in (before[1], *curve.sampled.values())]
    return is_stable(tried[rate])


def is_stable(accuracies: Sequence[float]) -> bool:
    """Has it not fallen? The last two, of which each is noisy, are held against the best."""
    return max(accuracies[-2:]) >= max(accuracies) - MAY_FALL_BY and min(accuracies[-2:]) >= accuracies[0] - MAY_FALL_BY
