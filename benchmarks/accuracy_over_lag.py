"""What does age cost? Accuracy by algorithm and `max_lag`, over the real system. Prints one JSON line last.

    python benchmarks/accuracy_over_lag.py [--on sums] [--lags 0 1 4 16] [--algorithms NAME ...] [--seeds 0 1 2]
        [--control off on] [--steps N] [--work FOLDER] [--section.key VALUE ...]

Every cell is one `leeway train`, one after the other on the same machine; cells of an algorithm and a seed differ in
`weight_sync.max_lag` alone. `--on sums` trains an ordinary model (examples/sums.toml) with nothing but the name of the
algorithm, so at the shipped defaults; `--on demo` the demos, whose model was taught the answer first. `--on steady`,
`sorting` and `adding` train at a constant rate of 1e-4 on 128 samples a step, where nothing brings the last versions
close together: the same sums, and the models of `lib/small_tasks.py`. `--control off on` adds cells with lag control.
Accuracy and the lag that was really trained on are read from the files of the run; where a run evaluates on its way,
accuracy is the mean of its last five evaluations. `--work` keeps finished cells: called again with the same overrides,
only the missing ones run. Any other key is an override that every cell gets. A step is one update in every cell, also
of PPO: with several, synchronous training (`max_lag = 0`) does not exist.

Writes docs/results/accuracy_over_lag.md (accuracy_over_lag_NAME.md for `--on NAME`), or the page that `--page` names,
and beside it a figure, .svg, and the figures of every cell, .json. The JSON line has, for each algorithm, means over
seeds: `accuracy_lagL`, `accuracy_lagL_minus_lag0` and `accuracy_lagL_minus_start`, greedy, for every bound L.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib import small_tasks
from benchmarks.lib.figure import drawn
from benchmarks.lib.machine import RESULTS, describe_commit
from benchmarks.lib.page import table, write_page
from benchmarks.lib.processes import MeasurementFailed, end_at_sigterm
from benchmarks.lib.rounds import spread
from benchmarks.lib.runs import FinishedRun, KeptResults, RunFailed, by_token, train

STYLES = {
    "trajectory_balance": ("#0072B2", "o", -0.12),
    "online_dpo": ("#D55E00", "s", -0.04),
    "off_policy_ppo": ("#009E73", "^", 0.04),
    "oapl": ("#CC79A7", "D", 0.12),
}
"""Algorithm -> colour (told apart by the colour-blind), marker, and a shift to the side, for the lines lie close."""
WRONG_INPUT = 2
"""Exit status of `leeway` where the config refuses a cell, and nothing was started."""
COLUMNS = {
    "greedy before": ("greedy_before", "{:.3f}"),
    "greedy after": ("greedy", "{:.3f}"),
    "sampled before": ("sampled_before", "{:.3f}"),
    "sampled after": ("sampled", "{:.3f}"),
    "lag mean": ("lag_mean", "{:.2f}"),
    "lag mean, second half": ("lag_late", "{:.2f}"),
    "lag max": ("lag_max", "{:.0f}"),
    "drift": ("drift", "{:.2f}"),
    "share of the rate": ("lr_scale", "{:.2f}"),
    "lowest ESS": ("ess_lowest", "{:.2f}"),
    "dropped as stale": ("dropped_stale", "{:.0f}"),
    "wall s": ("seconds", "{:.0f}"),
}
"""Column -> figure of a run, and how it reads."""

Figures = dict[str, float]
"""Of one run, by name."""


@dataclass(frozen=True)
class Ground:
    """What is trained on."""

    arguments: dict[str, list[str]]
    """Algorithm -> what `leeway train` is given."""
    page: Path
    what: str
    """The examples, as the page names them."""
    limits: str
    """What the figures do not show."""
    wanted: dict[str, float] = field(default_factory=dict)
    """Figure of the JSON line -> what it is to be at least."""
    makes: str = ""
    """The task of `lib/small_tasks.py` whose config comes first."""


STEADILY = ["--actors.eval_every", "10", "--learner.num_steps", "200", "--learner.lr_schedule", "constant"]
NUM_LATE = 5
"""Evaluations at the end of a run whose mean is its accuracy, where it evaluates on its way."""
NO_WORSE = {"accuracy_lag4_minus_lag0": -0.05, "accuracy_lag16_minus_lag0": -0.05, "accuracy_lag64_minus_lag0": -0.05}
STEADY = "One model and one task, at one learning rate, which stays constant."


def _small(name: str, what: str) -> Ground:
    arguments = {each: ["--algorithm.type", each, *STEADILY] for each in STYLES}
    return Ground(arguments, RESULTS / f"accuracy_over_lag_{name}.md", what, STEADY, NO_WORSE, makes=name)


ONE_UPDATE = ["--learner.num_minibatches", "1", "--learner.num_epochs", "1"]
GROUNDS = {
    "sums": Ground(
        {name: ["examples/sums.toml", "--algorithm.type", name] for name in STYLES},
        RESULTS / "accuracy_over_lag.md",
        "`examples/sums.toml` with `--algorithm.type` and no other key, so every algorithm at its shipped defaults,",
        "The model is small, answers have two to four tokens, and a sum is right or wrong. The learning rate falls to "
        "0, which brings the last versions close together; how an algorithm does while it does not is in "
        "[stability.md](stability.md). Long answers and large steps make the same lag worth more.",
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
            for name in STYLES
        },
        RESULTS / "accuracy_over_lag_steady.md",
        "`examples/sums.toml` at a constant rate of 1e-4 after its warm-up, on 128 samples a step,",
        STEADY,
        NO_WORSE,
    ),
    "sorting": _small("sorting", "A model of 0.9 M parameters that sorts five digits half of the time,"),
    "adding": _small("adding", "A model of 0.9 M parameters that adds two numbers with 20 to 52 tokens of work shown,"),
    "demo": Ground(
        {
            "trajectory_balance": ["examples/demo.toml"],
            "online_dpo": ["examples/demo-dpo.toml"],
            "off_policy_ppo": ["examples/demo-ppo.toml", *ONE_UPDATE],
        },
        RESULTS / "accuracy_over_lag_demo.md",
        f"The demos (`examples/demo.toml`, `demo-dpo.toml`, `demo-ppo.toml`, PPO with `{' '.join(ONE_UPDATE)}`)",
        "The task is easy: the right rule is in the starting model ([demo.md](demo.md)), answers have three or four "
        "tokens, and with enough steps greedy accuracy nears its ceiling whatever the lag. The learning rate falls to "
        "0, which brings the last versions close together.",
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
        """Of its files."""
        return f"{self.algorithm}-lag{self.max_lag}-seed{self.seed}{'-on' if self.control == 'on' else ''}"

    @property
    def row(self) -> str:
        """What it is held against the same of, at other lags and seeds."""
        return f"{self.algorithm}, lag control" if self.control == "on" else self.algorithm


def main() -> None:
    """Run what is missing, write the page and the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--on", choices=GROUNDS, default="sums")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 4, 16])
    parser.add_argument("--algorithms", nargs="+", choices=STYLES, help="default: all of them")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--control", nargs="+", choices=("on", "off"), default=["off"], help="of lag; default: off")
    parser.add_argument("--steps", type=int, help="learner.num_steps of every cell; default: as the configs say")
    parser.add_argument("--work", type=Path, help="keeps finished cells; a new one for new code (default: keeps none)")
    parser.add_argument("--page", type=Path, help="what is written; the figure and the cells lie beside it")
    args, overrides = parser.parse_known_args()
    ground = GROUNDS[args.on]
    args.algorithms = args.algorithms or list(ground.arguments)
    if unknown := set(args.algorithms) - set(ground.arguments):
        parser.error(f"--on {args.on} has no {', '.join(sorted(unknown))}")
    cells = [
        Cell(name, lag, seed, control)
        for seed in args.seeds
        for lag in args.lags
        for name in args.algorithms
        for control in (args.control if lag else ["off"])  # at lag 0 there is nothing to control
    ]
    if args.steps is not None:
        overrides = ["--learner.num_steps", str(args.steps), *overrides]
    end_at_sigterm()
    with tempfile.TemporaryDirectory() as fresh:
        kept = KeptResults(args.work or Path(fresh), "overrides.json", overrides)
        done, missing = run_all(kept, ground, overrides, cells)
    if not done:
        sys.exit("no cell has figures: " + "; ".join(f"{cell.name}: {why}" for cell, why in missing.items()))
    path: Path = args.page or ground.page
    path.parent.mkdir(parents=True, exist_ok=True)
    results = {cell: result["figures"] for cell, result in done.items()}
    commits = ", ".join(sorted({result["commit"] for result in done.values()}))
    origin = f"Written by `{invocation(args, overrides)}`, commit {commits},"
    draw(results, path.with_suffix(".svg"))
    path.with_suffix(".json").write_text(
        json.dumps({cell.name: result for cell, result in done.items()}, indent=1) + "\n", encoding="utf-8"
    )
    write_page(path, page(ground, results, missing, origin, f"{path.stem}.svg"))
    print(json.dumps(by_algorithm(results)))


def run_all(
    kept: KeptResults, ground: Ground, overrides: list[str], cells: list[Cell]
) -> tuple[dict[Cell, dict[str, Any]], dict[Cell, str]]:
    """The result of every cell that has one, and why the others have none."""
    done: dict[Cell, dict[str, Any]] = {}
    missing: dict[Cell, str] = {}
    for number, cell in enumerate(cells, 1):
        try:
            done[cell] = run(kept, ground, overrides, cell)
        except MeasurementFailed as error:
            missing[cell] = str(error)
        shown = missing.get(cell) or {key: round(value, 3) for key, value in done[cell]["figures"].items()}
        print(f"{number} of {len(cells)}, {cell.name}: {shown}", flush=True)
    return done, missing


def run(kept: KeptResults, ground: Ground, overrides: list[str], cell: Cell) -> dict[str, Any]:
    """The figures and the commit of a cell, which is run where it was not before; its metrics are kept as well.

    Raises:
        MeasurementFailed: the config refuses it, or the run failed or took too long.
    """
    config, *arguments = [*ground.arguments[cell.algorithm], *overrides]
    if ground.makes:
        config, arguments = str(small_tasks.make(ground.makes, kept.folder / ground.makes)), [config, *arguments]
    arguments += ["--weight_sync.max_lag", str(cell.max_lag), "--run.seed", str(cell.seed)]
    arguments += ["--weight_sync.lag_control", cell.control]
    log = kept.folder / f"{cell.name}.log"

    def make(folder: Path) -> dict[str, Any]:
        commit = describe_commit()
        found = figures(train(config, folder, arguments, log=log))
        shutil.copy(folder / "metrics.jsonl", kept.folder / f"{cell.name}.metrics.jsonl")
        return {"figures": found, "commit": commit}

    try:
        result: dict[str, Any] = kept.result(cell.name, make)
    except RunFailed as error:
        if error.status == WRONG_INPUT:
            raise MeasurementFailed(f"refused: {' '.join(' '.join(error.said).split())}") from error
        says = "how far it came" if error.status is None else "why"
        raise MeasurementFailed(f"{error.why}; {log.name} in --work says {says}") from error
    return result


def figures(run: FinishedRun) -> Figures:
    """What is reported of a run.

    Returns:
        Accuracies in [0, 1]; `lag_*` in policy versions, `lag_mean` over all trained tokens and `lag_late` over the
        second half of the steps; `ess_lowest`: the smallest effective sample share of a step, over sequences, on raw
        weights; `seconds` from the command to the last evaluation.

    Raises:
        MeasurementFailed: the run was ended before its last evaluation.
    """
    summary, updates = run.summary, run.updates
    late = [accuracy for _, accuracy in run.evaluations()[-NUM_LATE:]]
    return {
        "greedy_before": summary["accuracy_before"],
        "sampled_before": summary["accuracy_before_sampled"],
        "greedy": fmean(late) if len(late) == NUM_LATE else summary["accuracy_after"],
        "sampled": summary["accuracy_after_sampled"],
        "lag_mean": summary["lag_mean"],
        "lag_late": by_token(updates[len(updates) // 2 :], "lag/token_mean"),
        "lag_max": summary["lag_max"],
        "drift": by_token(updates, "lag/drift"),
        "lr_scale": fmean(1.0 if row["brake/lr_scale"] is None else row["brake/lr_scale"] for row in updates),
        "ess_lowest": min(row["off_policy/ess_sequence"] for row in updates),
        "dropped_stale": summary["ledger"]["dropped_stale"],
        "ledger_gap": summary["ledger_gap"],
        "num_steps": summary["num_steps"],
        "num_heldout": summary["num_heldout"],
        "seconds": summary["wall_s"],
    }


def invocation(args: argparse.Namespace, overrides: list[str]) -> str:
    """The command in full, without the folders, which only this machine has."""
    lists = {"--lags": args.lags, "--algorithms": args.algorithms, "--seeds": args.seeds, "--control": args.control}
    words = ["--on", args.on, *(word for key, values in lists.items() for word in (key, *map(str, values)))]
    return shlex.join(["python", "benchmarks/accuracy_over_lag.py", *words, *overrides])


def over_seeds(results: dict[Cell, Figures]) -> dict[tuple[str, int], dict[str, list[float]]]:
    """Algorithm and max_lag, sorted -> figure -> its values, one for every seed that has one."""
    cells: dict[tuple[str, int], dict[str, list[float]]] = {}
    for cell in sorted(results, key=lambda cell: (cell.row, cell.max_lag, cell.seed)):
        values = cells.setdefault((cell.row, cell.max_lag), {})
        for name, value in results[cell].items():
            values.setdefault(name, []).append(value)
    return cells


def by_algorithm(results: dict[Cell, Figures]) -> dict[str, Figures]:
    """The JSON line: algorithm -> greedy accuracies, means over seeds, and their differences."""
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


# --- what people read -------------------------------------------------------------------------------


def page(ground: Ground, results: dict[Cell, Figures], missing: dict[Cell, str], origin: str, figure: str) -> list[str]:
    """The paragraphs of the page."""
    num_seeds = len({cell.seed for cell in results})
    num_heldout = int(next(iter(results.values()))["num_heldout"])
    steps = " or ".join(str(int(n)) for n in sorted({found["num_steps"] for found in results.values()}))
    seeds = "One seed." if num_seeds == 1 else f"Means over {num_seeds} seeds, in brackets the lowest and the highest."
    return [
        "# Accuracy against `max_lag`, measured",
        f"{origin} on {len(os.sched_getaffinity(0))} cores ({platform.machine()}), no GPU, Python "
        f"{platform.python_version()}. {ground.what} over the real system, {steps} steps each, one after the "
        "other; runs of an algorithm and a seed differ in `weight_sync.max_lag` alone. Accuracy is over "
        f"{num_heldout} held-out problems. {seeds}",
        f"![Held-out accuracy and realised lag against max_lag]({figure})",
        cells_table(results),
        *[
            f"No figures ({why}): {', '.join(cell.name for cell in missing if missing[cell] == why)}"
            for why in dict.fromkeys(missing.values())
        ],
        "Lag is in policy versions, over trained tokens; it grows only as far as the actors run ahead, and from 0 "
        "at the first step, hence the second half. ESS is the effective sample share of whole completions, "
        "1 / mean((w / mean w)^2) with w = pi_prox / mu, at the step where it is lowest: what the lag did to the "
        "data, where 1 is on-policy. The wall time ends with the last evaluation.",
        *([wanted_table(ground, results)] if ground.wanted else []),
        *shows(ground, results, num_heldout),
    ]


def wanted_table(ground: Ground, results: dict[Cell, Figures]) -> str:
    """What was asked for, and what came of it."""
    head = ["algorithm", *[f"{name}, at least {bar:g}" for name, bar in ground.wanted.items()]]
    found = by_algorithm(results)
    return table(
        head, [[name, *[_met(found[name].get(key), bar) for key, bar in ground.wanted.items()]] for name in found]
    )


def _met(value: float | None, bar: float) -> str:
    if value is None:
        return "not measured"
    return f"{value:+.3f}, {'met' if value >= bar else 'missed'}"


def cells_table(results: dict[Cell, Figures]) -> str:
    """One row per algorithm and max_lag."""
    head = ["algorithm", "max_lag", *COLUMNS]
    rows = [
        [algorithm, str(max_lag), *[spread(values[figure], form) for figure, form in COLUMNS.values()]]
        for (algorithm, max_lag), values in over_seeds(results).items()
    ]
    return table(head, rows)


def shows(ground: Ground, results: dict[Cell, Figures], num_heldout: int) -> list[str]:
    """What the figure shows and what it does not."""
    cells = over_seeds(results)
    changes = []
    num_lags = Counter(algorithm for algorithm, _ in cells)
    for name in (algorithm for algorithm, number in num_lags.items() if number > 1):
        lags = [lag for algorithm, lag in cells if algorithm == name]
        first, last = cells[name, min(lags)], cells[name, max(lags)]
        greedy, sampled = (fmean(last[key]) - fmean(first[key]) for key in ("greedy", "sampled"))
        changes.append(f"- {name}, `max_lag` {min(lags)} to {max(lags)}: greedy {greedy:+.3f}, sampled {sampled:+.3f}.")
    error = math.sqrt(0.9 * 0.1 / num_heldout)
    return [
        "What it shows: the price of age on this task, from the smallest bound to the greatest of each algorithm.",
        *(["\n".join(changes)] if changes else []),
        f"What it does not: on {num_heldout} problems an accuracy of 0.90 has a standard error of {error:.3f}, and "
        f"seeds differ beside that; smaller changes say nothing. {ground.limits}",
    ]


def draw(results: dict[Cell, Figures], path: Path) -> None:
    """The figure: accuracy on the left, on the right the lag that the bound led to."""
    cells = over_seeds(results)
    lags = sorted({lag for _, lag in cells})
    places = {lag: float(index) for index, lag in enumerate(lags)}  # 0 has no place on a logarithmic axis
    with drawn(path, 10, 4.2, font_size=10) as figure:
        left, right = figure.subplots(1, 2)
        for name in dict.fromkeys(algorithm for algorithm, _ in cells):
            mine = {places[lag]: values for (algorithm, lag), values in cells.items() if algorithm == name}
            for axis, key, line in ((left, "greedy", "-"), (left, "sampled", "--"), (right, "lag_mean", "-")):
                _line(axis, name, mine, key, line)
            _line(right, name, mine, "lag_max", "none")
        first = next(iter(results.values()))
        for key in ("greedy", "sampled"):
            height = first[f"{key}_before"]
            left.axhline(height, color="0.6", linewidth=1)
            left.annotate(f"{key}, before", (0, height), (0, 3), textcoords="offset points", color="0.4", fontsize=8)
        right.plot(list(places.values()), lags, color="0.6", linewidth=1, label="the bound")
        left.set_ylabel("held-out accuracy")
        left.set_ylim(top=1.0)
        right.set_ylabel("lag of trained tokens, versions")
        for axis in (left, right):
            axis.set_xticks(list(places.values()), [str(lag) for lag in lags])
            axis.set_xlabel("weight_sync.max_lag")
            axis.legend(fontsize=8, handlelength=3)
            axis.grid(axis="y", color="0.92")


def _line(axis: Any, algorithm: str, cells: dict[float, dict[str, list[float]]], key: str, line: str) -> None:  # noqa: ANN401 -- matplotlib's own
    """Means over seeds, by place; the bars reach from the lowest to the highest."""
    spreads = [(fmean(values[key]), min(values[key]), max(values[key])) for values in cells.values()]
    bars = [[middle - low for middle, low, _ in spreads], [high - middle for middle, _, high in spreads]]
    name, is_controlled, _ = algorithm.partition(",")
    colour, marker, shift = STYLES[name]
    line = ":" if is_controlled and line != "none" else line
    style = {"color": colour, "marker": marker, "markersize": 4, "linestyle": line, "capsize": 3}
    label = f"{algorithm}, {key.replace('_', ' ')}"
    axis.errorbar([place + shift for place in cells], [middle for middle, _, _ in spreads], bars, label=label, **style)


if __name__ == "__main__":
    main()
