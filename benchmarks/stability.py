"""Measure the highest stable learning rate of each algorithm at each simulated lag.

    python benchmarks/stability.py [--anew] [--workers 2]

A loop (`stability_parts/loop.py`) trains the model of examples/sums.toml on samples that are exactly `lag` updates old,
or up to `lag` updates old with lag control. Each algorithm runs with and without its default importance weights. A
full run takes about three hours on two cores. Finished results and their commits are stored in stability.jsonl beside
the page. An interrupted run resumes from that file; `--anew` deletes the file first.

Writes docs/results/stability.md; the last line of stdout is {row: {"rate_lagL": ..., "accuracy_lagL": ...}}.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.machine import RESULTS, describe_machine, make_model
from benchmarks.lib.page import origin, table, write_page
from benchmarks.lib.processes import end_with_parent
from benchmarks.stability_parts import response
from benchmarks.stability_parts.loop import CONFIG, DelayedRun

from leeway.launch.config import load_config
from leeway.learner.lag_control import ALLOWED_DRIFT, BRAKE_DRIFT

PAGE = RESULTS / "stability.md"
LAGS = (0, 1, 4, 16, 64)
RATES = (1.25e-5, 2.5e-5, 5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3)
FIRST_RATE = {0: 2e-4, 1: 2e-4, 4: 1e-4, 16: 1e-4, 64: 5e-5}
"""Lag -> learning rate at which the search starts; a start near the result needs the fewest runs."""
NUM_UPDATES = 120
LAGS_SEEN = 3
"""Minimum number of updates of a run, as a multiple of its lag, so that delayed effects become visible."""
EVAL_EVERY = 20
MAY_FALL_BY = 0.05
"""Largest drop in sampled accuracy of a stable run: three standard errors on 1,024 problems."""
SEED = 0

Result = dict[str, Any]


def main() -> None:
    """Run the missing tasks and write the page."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anew", action="store_true", help="delete the stored results first")
    parser.add_argument("--workers", type=int, default=2, help="number of single-threaded processes")
    args = parser.parse_args()
    machine = describe_machine()
    kept = PAGE.with_suffix(".jsonl")
    if args.anew:
        kept.unlink(missing_ok=True)
    text = origin("python benchmarks/stability.py", machine, machine["commit"])
    make_model(CONFIG)  # make the model before several worker processes need it at the same time
    try:
        run_all(kept, args.workers, machine["commit"])
    finally:  # an interrupted run writes a page too, from the finished results
        results = dict(kept_in(kept))
        write_page(PAGE, page(results, text))
    print(json.dumps(line(results)))


# --- the rows of the page: each algorithm with its defaults, and without its weights -------------


@dataclass(frozen=True)
class Row:
    """A row of the page, which is one configuration of a loss."""

    name: str
    overrides: tuple[str, ...]
    """Overrides of examples/sums.toml."""
    lags: tuple[int, ...]
    """Lags at which the highest stable rate is searched."""
    trained_at: tuple[int, ...] = ()
    """Lags of full training runs with defaults, for rows that set only `algorithm.type` (and `variant`)."""


def _row(
    name: str, *overrides: str, lags: tuple[int, ...], trained_at: tuple[int, ...] = (), control: str = "off"
) -> Row:
    kind = name.split(",")[0]
    controlled = ("--weight_sync.lag_control", control)
    row = Row(name, ("--algorithm.type", kind, *controlled, *overrides), lags, trained_at)
    load_config(CONFIG, row.overrides)  # reports a typo before any run starts
    return row


def _ships(name: str, *overrides: str, trained_at: tuple[int, ...] = (64,)) -> Row:
    # accuracy_over_lag.py trains these rows at smaller lags, on the real system
    return _row(name, *overrides, lags=LAGS, trained_at=trained_at)


def _unweighted(name: str, *overrides: str) -> Row:
    # at lag 0, every weight is 1
    return _row(f"{name}, no weights", *overrides, *NONE, lags=(1, 4, 16, 64))


def _candidate(name: str, *overrides: str) -> Row:
    return _row(name, *overrides, lags=(16,))


def _controlled(name: str, *overrides: str, samples: int = 256) -> Row:
    words = "" if samples == 256 else f", {samples} samples"
    size = ("--learner.groups_per_step", str(samples // 8))
    return _row(f"{name}, lag control{words}", *size, *overrides, lags=(4, 16, 64), control="on")


NONE = ("--algorithm.corrections", "[]")
IPO = ("--algorithm.variant", "ipo")
ROWS = (
    _ships("trajectory_balance"),
    _unweighted("trajectory_balance"),
    _candidate("trajectory_balance, weights up to 1", "--algorithm.corrections", '[{type = "token_tis", cap = 1.0}]'),
    _candidate("trajectory_balance, raw weights in [0.5, 5], else 0", "--algorithm.corrections", '["icepop"]'),
    _candidate("trajectory_balance, weights of sequences", "--algorithm.corrections", '["sequence_tis"]'),
    _ships("online_dpo"),
    _unweighted("online_dpo"),
    _ships("online_dpo, ipo", *IPO, trained_at=LAGS),
    _unweighted("online_dpo, ipo", *IPO),
    _ships("off_policy_ppo"),
    _row("off_policy_ppo, raw weights", *NONE, lags=(4, 16)),
    _candidate("off_policy_ppo, proximal = behaviour", "--algorithm.proximal", "behaviour"),
    _candidate("off_policy_ppo, proximal = interpolated", "--algorithm.proximal", "interpolated"),
    _ships("oapl"),
    _unweighted("oapl"),
    *(_controlled(name) for name in ("trajectory_balance", "online_dpo", "off_policy_ppo", "oapl")),
    *(_controlled("trajectory_balance", samples=samples) for samples in (64, 128, 512)),
)


# --- the highest stable rate of a row, and its accuracy with default settings --------------------


@dataclass(frozen=True)
class Task:
    """A search for the highest stable rate of a row at one lag, or a full training run with default settings."""

    row: int
    lag: int
    as_shipped: bool

    @property
    def key(self) -> str:
        """Return the key under which the result is stored."""
        return f"{ROWS[self.row].name} | lag {self.lag} | {'shipped' if self.as_shipped else 'greatest rate'}"


@dataclass(frozen=True)
class Response:
    """The response of lag control to a tenfold learning rate, on one model."""

    model: str

    @property
    def key(self) -> str:
        """Return the key under which the result is stored."""
        return f"{self.model} | step response"


def tasks() -> list[Task | Response]:
    """Return all tasks of the page; the longest tasks come first."""
    responses = [Response(model) for model in response.MODELS]
    rates = [Task(i, lag, False) for i, row in enumerate(ROWS) for lag in row.lags]
    shipped = [Task(i, lag, True) for i, row in enumerate(ROWS) for lag in row.trained_at]
    return [*responses, *sorted([*rates, *shipped], key=lambda task: (task.as_shipped, -task.lag))]


def run_all(kept: Path, num_workers: int, commit: str) -> None:
    """Run the tasks whose results are not in the file yet, and append each result.

    Args:
        kept: file of JSON lines.
        num_workers: number of single-threaded processes.
        commit: commit of the running code; stored with each result.
    """
    known = dict(kept_in(kept))
    missing = [task for task in tasks() if task.key not in known]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_worker) as pool:
        futures = {pool.submit(run, task): task for task in missing}
        for number, future in enumerate(as_completed(futures), 1):
            task, result = futures[future], future.result()
            with kept.open("a") as file:
                file.write(json.dumps({"key": task.key, "commit": commit, **result}) + "\n")
            print(f"{number} of {len(missing)}, {task.key}: {result}", flush=True)


def _start_worker() -> None:
    end_with_parent()
    torch.set_num_threads(1)


def kept_in(path: Path) -> Iterator[tuple[str, Result]]:
    """Yield the task key and the result of each line of a file."""
    for line in path.read_text().splitlines() if path.exists() else []:
        found = json.loads(line)
        yield found.pop("key"), found


def run(task: Task | Response) -> Result:
    """Run a task in a worker process; return its result."""
    if isinstance(task, Response):
        return response.respond(task.model, SEED)
    row = ROWS[task.row]
    return as_shipped(row, task.lag) if task.as_shipped else greatest_rate(row, task.lag)


def as_shipped(row: Row, lag: int) -> Result:
    """Train for all steps of the config and return the final accuracies."""
    delayed = DelayedRun([*row.overrides, "--weight_sync.max_lag", str(lag)], SEED)
    curve = delayed.train(delayed.config.learner.num_steps)
    return {
        "greedy": delayed.accuracy(greedy=True),
        "sampled": list(curve.sampled.values())[-1],
        "ess_lowest": min(curve.ess),
        "k3_greatest": max(curve.k3),
    }


def greatest_rate(row: Row, lag: int) -> Result:
    """Search the highest stable rate: raise a stable rate while runs are stable, or lower an unstable rate.

    Returns:
        `rate` is the highest stable rate, or None if even the lowest rate is unstable. `tried` maps each rate to its
        sampled accuracies.
    """
    place = RATES.index(FIRST_RATE[lag])
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
    delayed = DelayedRun([*overrides, "--weight_sync.max_lag", str(lag)], SEED)
    before = delayed.accuracy()
    curve = delayed.train(max(NUM_UPDATES, LAGS_SEEN * lag), eval_every=EVAL_EVERY)
    tried[rate] = [round(value, 4) for value in (before, *curve.sampled.values())]
    return is_stable(tried[rate])


def is_stable(accuracies: Sequence[float]) -> bool:
    """Return whether the better of the last two accuracies is near the best one, and neither is far below the start."""
    return max(accuracies[-2:]) >= max(accuracies) - MAY_FALL_BY and min(accuracies[-2:]) >= accuracies[0] - MAY_FALL_BY


# --- the page ------------------------------------------------------------------------------------


SETTING = f"""\
**Setup.** `examples/sums.toml`, an ordinary model, trains in a synchronous loop of one process and one thread. The \
updates are those of the config (loss, optimizer, clipping, schedule). The samples of an update come from the policy \
exactly `lag` updates earlier, which is the maximum lag of a run with that `max_lag`. No other part of the system \
runs; [accuracy_over_lag.md](accuracy_over_lag.md) measures the real system. In rows with lag control, `lag` is the \
upper bound, and generation is twice as fast as training while admission permits. Each row has one seed.

**Highest stable rate.** A run has {NUM_UPDATES} updates, and at least {LAGS_SEEN} times the lag, at a constant \
learning rate after the warm-up of the config. Sampled accuracy on the held-out problems is measured every \
{EVAL_EVERY} updates. A rate is stable if accuracy ends at most {MAY_FALL_BY} below its best and its start. Rates \
are {RATES[0]:g} to {RATES[-1]:g}, in factors of 2; the search raises a stable rate, or lowers an unstable one."""


RESPONSE = f"""\
Trajectory balance at `max_lag = {response.MAX_LAG}`, 128 samples and a constant 1e-4; after {response.NUM_BEFORE} \
updates, the rate is ten times higher for the other {response.NUM_AFTER}. The drift is the drift per token times the \
root of the answer length, as a mean over {response.MEAN_OVER} updates. The brake keeps it below {BRAKE_DRIFT}, and \
leads it to {ALLOWED_DRIFT} within {response.SETTLED_BY} updates."""


def page(results: Mapping[str, Result], origin: str) -> list[str]:
    """Return the paragraphs of the page; `results` maps task keys to results."""
    head = ["", *[f"lag {lag}" for lag in LAGS]]
    rates = [[f"`{row.name}`", *[_rate(results, i, lag) for lag in LAGS]] for i, row in enumerate(ROWS)]
    shipped = [
        [f"`{row.name}`", *[_shipped(results, i, lag) for lag in LAGS]] for i, row in enumerate(ROWS) if row.trained_at
    ]
    return [
        "# Highest stable learning rate by lag",
        origin,
        SETTING,
        "## Highest stable rate",
        table(head, rates),
        "Brackets hold the final sampled accuracy at that rate and, after the arrow, at the next higher rate that was "
        "tried. At lag 0, every weight is 1. Most rows that are not defaults were searched at lag 16 only. A dash "
        "marks a combination that was not run.",
        "## Default settings",
        "The table has held-out accuracy (greedy / sampled) after the full run of `examples/sums.toml`, and the lowest "
        "effective sample share of a step. Cells that [accuracy_over_lag.md](accuracy_over_lag.md) measures on the "
        "real system are not simulated again.",
        table(head, shipped),
        "## Step response of lag control",
        RESPONSE,
        response.describe(
            {model: results[key] for model in response.MODELS if (key := Response(model).key) in results}
        ),
        "## Findings",
        "\n".join(shown(results)),
        "The results are for one seed and one small model, with a resolution of a factor of 2. stability.jsonl "
        "stores the commit of each result.",
    ]


def shown(results: Mapping[str, Result]) -> Iterator[str]:
    """Yield one line per algorithm with its highest stable rates by lag, also without weights and with lag control."""
    indexes = {row.name: i for i, row in enumerate(ROWS)}
    for name in (row.name for row in ROWS if row.trained_at):
        parts = [f"{_rates(results, indexes[name])} at lags 0 to {LAGS[-1]}"]
        if f"{name}, no weights" in indexes:
            bare = _rates(results, indexes[f"{name}, no weights"])
            parts.append(f"without weights {bare} at lags 1 to {LAGS[-1]}")
        if f"{name}, lag control" in indexes:
            parts.append(f"with lag control {_rates(results, indexes[f'{name}, lag control'])} at lags 4 to {LAGS[-1]}")
        yield f"- `{name}` learns at {'; '.join(parts)}."


def _rates(results: Mapping[str, Result], row: int) -> str:
    found = [results.get(Task(row, lag, False).key) for lag in ROWS[row].lags]
    return ", ".join("?" if each is None else f"{each['rate']:g}" if each["rate"] else "none" for each in found)


def _rate(results: Mapping[str, Result], row: int, lag: int) -> str:
    found = results.get(Task(row, lag, False).key)
    if found is None:
        return "-"
    tried = {float(rate): accuracies for rate, accuracies in found["tried"].items()}
    above = [rate for rate in sorted(tried) if not is_stable(tried[rate])]
    then = f" -> {tried[above[0]][-1]:.2f}" if above else ""
    if found["rate"] is None:
        return f"none{then}"
    return f"{found['rate']:g} ({tried[found['rate']][-1]:.2f}{then})"


def _shipped(results: Mapping[str, Result], row: int, lag: int) -> str:
    found = results.get(Task(row, lag, True).key)
    if found is None:
        return "-"
    return f"{found['greedy']:.3f} / {found['sampled']:.3f}, ESS {found['ess_lowest']:.2f}"


def line(results: Mapping[str, Result]) -> dict[str, dict[str, float | None]]:
    """Return the JSON line: row -> `rate_lagL` and, for rows with default settings, greedy `accuracy_lagL`."""
    found: dict[str, dict[str, float | None]] = {}
    for i, row in enumerate(ROWS):
        for lag in LAGS:
            for as_shipped, name, key in ((False, "rate", "rate"), (True, "accuracy", "greedy")):
                result = results.get(Task(i, lag, as_shipped).key)
                if result is not None:
                    found.setdefault(row.name, {})[f"{name}_lag{lag}"] = result[key]
    return found


if __name__ == "__main__":
    main()
