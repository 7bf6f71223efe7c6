"""Cells of benchmarks/accuracy_over_lag.py: training setups, runs of the matrix, and means over seeds."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from benchmarks.lib.machine import RESULTS

ALGORITHMS = ("trajectory_balance", "online_dpo", "off_policy_ppo", "oapl")

Figures = dict[str, float]
"""Figures of one run, by name."""


@dataclass(frozen=True)
class Ground:
    """A set of training setups, one per algorithm."""

    arguments: dict[str, list[str]]
    """Algorithm -> arguments of `leeway train`."""
    page: Path
    what: str
    """Description of the training setups, for a sentence of the page."""
    limits: str
    """Sentences of the page on the limits of the figures."""
    wanted: dict[str, float] = field(default_factory=dict)
    """Figure of the JSON line -> its required minimum."""
    makes: str = ""
    """Task of `lib/small_tasks.py` whose config is the first argument; empty if `arguments` name a config."""


STEADILY = ["--actors.eval_every", "10", "--learner.num_steps", "200", "--learner.lr_schedule", "constant"]
NO_WORSE = {
    f"accuracy_lag{lag}_minus_{of}": bar for lag in (4, 16, 64) for of, bar in (("lag0", -0.05), ("start", 0.0))
}
STEADY = "One model and one task, at one constant learning rate."


def _small(name: str, what: str) -> Ground:
    arguments = {each: ["--algorithm.type", each, *STEADILY] for each in ALGORITHMS}
    return Ground(arguments, RESULTS / f"accuracy_over_lag_{name}.md", what, STEADY, NO_WORSE, makes=name)


ONE_UPDATE = ["--learner.num_minibatches", "1", "--learner.num_epochs", "1"]
GROUNDS = {
    "sums": Ground(
        {name: ["examples/sums.toml", "--algorithm.type", name] for name in ALGORITHMS},
        RESULTS / "accuracy_over_lag.md",
        "`examples/sums.toml` with `--algorithm.type` and no other override, so that each algorithm has its defaults",
        "The model is small, answers have two to four tokens, and a sum is right or wrong. The learning rate decays to "
        "0, so the last policy versions differ little; [stability.md](stability.md) measures constant learning rates. "
        "The same lag has a larger effect with long answers and large steps.",
        {"accuracy_lag4": 0.85, "accuracy_lag4_minus_lag0": -0.03, "accuracy_lag16_minus_start": 0.15},
    ),
    "steady": Ground(
        {
            name: [
                "examples/sums.toml",
                "--algorithm.type",
                name,
                *STEADILY,
                "--learner.groups_per_step",
                "16",
                "--task.num_heldout",
                "512",
            ]
            for name in ALGORITHMS
        },
        RESULTS / "accuracy_over_lag_steady.md",
        "`examples/sums.toml` with 128 samples per step and a constant learning rate of 1e-4 after its warm-up",
        STEADY,
        NO_WORSE,
    ),
    "sorting": _small("sorting", "a model of 0.9 M parameters that sorts five digits correctly half of the time"),
    "adding": _small("adding", "a model of 0.9 M parameters that adds two numbers and shows 20 to 52 tokens of work"),
    "demo": Ground(
        {
            "trajectory_balance": ["examples/demo.toml"],
            "online_dpo": ["examples/demo-dpo.toml"],
            "off_policy_ppo": ["examples/demo-ppo.toml", *ONE_UPDATE],
        },
        RESULTS / "accuracy_over_lag_demo.md",
        f"the demos (`examples/demo.toml`, `demo-dpo.toml`, and `demo-ppo.toml` with `{' '.join(ONE_UPDATE)}`)",
        "The task is easy: the samples of the initial model already follow the right rule in a minority of cases "
        "([demo.md](demo.md)), and answers have three or four tokens. With enough steps, greedy accuracy approaches "
        "its maximum at any lag. The learning rate decays to 0, so the last policy versions differ little.",
    ),
}


@dataclass(frozen=True)
class Cell:
    """One run of the matrix."""

    algorithm: str
    max_lag: int
    seed: int
    control: str = "off"

    @property
    def name(self) -> str:
        """Return the stem of the file names of the cell."""
        return f"{self.algorithm}-lag{self.max_lag}-seed{self.seed}{'-on' if self.control == 'on' else ''}"

    @property
    def row(self) -> str:
        """Return the name of the table row, which groups cells of different lags and seeds."""
        return f"{self.algorithm}, lag control" if self.control == "on" else self.algorithm


def parse(name: str) -> Cell:
    """Return the cell of a name that `Cell.name` returned."""
    found = re.fullmatch(r"(\w+)-lag(\d+)-seed(\d+)(-on)?", name)
    assert found is not None, name
    return Cell(found[1], int(found[2]), int(found[3]), "on" if found[4] else "off")


def over_seeds(results: dict[Cell, Figures]) -> dict[tuple[str, int], dict[str, list[float]]]:
    """Return a sorted table: (algorithm, max_lag) -> figure -> values, one per finished seed."""
    cells: dict[tuple[str, int], dict[str, list[float]]] = {}
    for cell in sorted(results, key=lambda cell: (cell.row, cell.max_lag, cell.seed)):
        values = cells.setdefault((cell.row, cell.max_lag), {})
        for name, value in results[cell].items():
            values.setdefault(name, []).append(value)
    return cells


def by_algorithm(results: dict[Cell, Figures]) -> dict[str, Figures]:
    """Return the JSON line: algorithm -> greedy accuracies as means over seeds, and differences of accuracies."""
    line: dict[str, Figures] = {}
    greedy = {key: fmean(values["greedy"]) for key, values in over_seeds(results).items()}
    start = {key: fmean(values["greedy_before"]) for key, values in over_seeds(results).items()}
    for (algorithm, max_lag), after in greedy.items():
        found = line.setdefault(algorithm, {})
        name = f"accuracy_lag{max_lag}"
        found[name] = after
        found[f"{name}_minus_start"] = after - start[algorithm, max_lag]
        synchronous = algorithm.partition(",")[0], 0
        if max_lag and synchronous in greedy:
            found[f"{name}_minus_lag0"] = after - greedy[synchronous]
        found["num_seeds"] = len({cell.seed for cell in results if cell.row == algorithm})
    return {name: {key: round(value, 4) for key, value in found.items()} for name, found in line.items()}
