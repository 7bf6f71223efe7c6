"""How fast may one learn at which lag? The greatest stable learning rate of every algorithm, by simulated lag.

    python benchmarks/stability.py [--anew] [--workers 2]

A loop trains the model of examples/sums.toml on samples of the policy of exactly so many updates before, or, with lag
control, of up to so many (`stability_parts/loop.py`), every algorithm with its weights and with its protection taken
off. Takes about three hours on two cores. What is finished is kept beside the page, in stability.jsonl, with the commit
that it was run at: a call that was ended goes on from there, and `--anew` forgets it.

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
from benchmarks.stability_parts.loop import CONFIG, DelayedRun
from launch.config import load_config

PAGE = RESULTS / "stability.md"
LAGS = (0, 1, 4, 16, 64)
RATES = (1.25e-5, 2.5e-5, 5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3)
FIRST_RATE = {0: 2e-4, 1: 2e-4, 4: 1e-4, 16: 1e-4, 64: 5e-5}
"""By lag, where a search begins: near its end, which costs the fewest runs."""
NUM_UPDATES = 120
LAGS_SEEN = 3
"""A run has at least so many times its lag of updates: what comes back late has to have come back."""
EVAL_EVERY = 20
MAY_FALL_BY = 0.05
"""Sampled accuracy below the best that is still no fall: three standard errors on 1,024 problems."""
SEED = 0

Result = dict[str, Any]


def main() -> None:
    """Run what is missing, and write the page."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anew", action="store_true", help="forget what was measured before")
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    args = parser.parse_args()
    machine = describe_machine()
    kept = PAGE.with_suffix(".jsonl")
    if args.anew:
        kept.unlink(missing_ok=True)
    text = origin("python benchmarks/stability.py", machine, machine["commit"])
    make_model(CONFIG)  # once, before processes ask for it all at once
    try:
        run_all(kept, args.workers, machine["commit"])
    finally:  # of a call that is ended too: the page has what there is
        results = dict(kept_in(kept))
        write_page(PAGE, page(results, text))
    print(json.dumps(line(results)))


# --- the rows of the page: every algorithm as it ships, and with what protects it taken off ------


@dataclass(frozen=True)
class Row:
    """One loss."""

    name: str
    overrides: tuple[str, ...]
    """Of examples/sums.toml."""
    lags: tuple[int, ...]
    """At which its greatest rate is searched for."""
    trained_at: tuple[int, ...] = ()
    """At which it is trained whole, as it ships: a row that a user gets by `algorithm.type` (and `variant`) alone."""


def _row(
    name: str, *overrides: str, lags: tuple[int, ...], trained_at: tuple[int, ...] = (), control: str = "off"
) -> Row:
    kind = name.split(",")[0]
    controlled = ("--weight_sync.lag_control", control)
    row = Row(name, ("--algorithm.type", kind, *controlled, *overrides), lags, trained_at)
    load_config(CONFIG, row.overrides)  # a typo is an error before anything runs
    return row


def _ships(name: str, *overrides: str, trained_at: tuple[int, ...] = (64,)) -> Row:
    # accuracy_over_lag.py trains them at smaller lags, and over the real system
    return _row(name, *overrides, lags=LAGS, trained_at=trained_at)


def _unweighted(name: str, *overrides: str) -> Row:
    # at lag 0 every weight is 1
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


# --- the greatest rate at which a row still learns, and what it comes to as it ships -------------


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
    shipped = [Task(i, lag, True) for i, row in enumerate(ROWS) for lag in row.trained_at]
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
    delayed = DelayedRun([*row.overrides, "--weight_sync.max_lag", str(lag)], SEED)
    curve = delayed.train(delayed.config.learner.num_steps)
    return {
        "greedy": delayed.accuracy(greedy=True),
        "sampled": list(curve.sampled.values())[-1],
        "ess_lowest": min(curve.ess),
        "k3_greatest": max(curve.k3),
    }


def greatest_rate(row: Row, lag: int) -> Result:
    """Go up while it is stable, or down until it is.

    Returns:
        `rate`, None where even the smallest is not stable; and of each rate that was tried the sampled accuracies.
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
    """Has it not fallen? The last two, of which each is noisy, are held against the best."""
    return max(accuracies[-2:]) >= max(accuracies) - MAY_FALL_BY and min(accuracies[-2:]) >= accuracies[0] - MAY_FALL_BY


# --- the page ------------------------------------------------------------------------------------


SETTING = f"""\
**What was run.** `examples/sums.toml`, an ordinary model, in a synchronous loop of one process and one thread: the \
updates are those of the config (loss, optimizer, clipping, schedule), and the samples of an update come from the \
policy of exactly so many updates before. So the lag is what a run with that `max_lag` has at most, and nothing else \
of the system takes part; [accuracy_over_lag.md](accuracy_over_lag.md) is the real one. In rows with lag control that \
is the bound, and samples are generated twice as fast as they are trained, as admission lets them. One seed.

**The greatest stable rate.** At a constant learning rate (after the warm-up of the config), {NUM_UPDATES} updates, \
and at least {LAGS_SEEN} times the lag. Stable is a rate at which sampled accuracy on the held-out problems, taken \
every {EVAL_EVERY} updates, ends no more than {MAY_FALL_BY} below its best and its start. Rates are {RATES[0]:g} to \
{RATES[-1]:g}, by factors of 2; the search goes up while it is stable, or down until it is."""


def page(results: Mapping[str, Result], origin: str) -> list[str]:
    """The paragraphs of the page, from results by the key of their task."""
    head = ["", *[f"lag {lag}" for lag in LAGS]]
    rates = [[f"`{row.name}`", *[_rate(results, i, lag) for lag in LAGS]] for i, row in enumerate(ROWS)]
    shipped = [
        [f"`{row.name}`", *[_shipped(results, i, lag) for lag in LAGS]] for i, row in enumerate(ROWS) if row.trained_at
    ]
    return [
        "# How fast one may learn at which lag",
        origin,
        SETTING,
        "## The greatest stable rate",
        table(head, rates),
        "In brackets: sampled accuracy where it ended at that rate, and, behind the arrow, where it ended at the "
        "next greater one that was tried. At lag 0 every weight is 1; what is no algorithm as it ships was mostly "
        "searched at lag 16 alone; a dash is what was not run.",
        "## As shipped",
        "Held-out accuracy, greedy / sampled, after the whole run of `examples/sums.toml`, and the smallest "
        "effective sample share of a step. What [accuracy_over_lag.md](accuracy_over_lag.md) has over the real system "
        "is not simulated again.",
        table(head, shipped),
        "## What it shows",
        "\n".join(shown(results)),
        "Of one seed and one small model: the factors of 2 are its resolution. The commit that a result was taken at "
        "stands with it in stability.jsonl.",
    ]


def shown(results: Mapping[str, Result]) -> Iterator[str]:
    """Of each algorithm: what a lag costs it in rate, and what it would cost it without its weights."""
    indexes = {row.name: i for i, row in enumerate(ROWS)}
    for name in (row.name for row in ROWS if row.trained_at):
        parts = [f"{_rates(results, indexes[name])} at lags 0 to {LAGS[-1]}"]
        if f"{name}, no weights" in indexes:
            bare = _rates(results, indexes[f"{name}, no weights"])
            parts.append(f"without weights {bare} at lags 1 to {LAGS[-1]}")
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
    """The JSON line: row -> `rate_lagL`, and of rows that ship `accuracy_lagL`, greedy."""
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
