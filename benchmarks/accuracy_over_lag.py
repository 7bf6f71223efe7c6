"""Measure accuracy by algorithm and `max_lag` on the real system. The last line of stdout is JSON.

    python benchmarks/accuracy_over_lag.py [--on sums] [--lags 0 1 4 16] [--algorithms NAME ...] [--seeds 0 1 2]
        [--control off on] [--steps N] [--work FOLDER] [--section.key VALUE ...]

Each cell is one `leeway train`; cells run one after another on the same machine. Cells of one algorithm and seed differ
only in `weight_sync.max_lag`. `--on sums` trains an ordinary model (examples/sums.toml) and sets only the algorithm, so
all other keys have their defaults. `--on demo` runs the demos, whose model was first trained on the right answer.
`--on steady`, `--on sorting` and `--on adding` train at a constant learning rate of 1e-4 on 128 samples per step. At a
constant rate, the last policy versions differ as much as earlier versions. `steady` trains on the sums; `sorting` and
`adding` train the models of `lib/small_tasks.py`. `--control off on` adds cells with lag control.

Accuracy and the realised lag are read from the files of the run. If a run evaluates during training, its accuracy is
the mean of its last five evaluations. `--work` stores finished cells. A later call with the same overrides runs only
the missing cells, and its page has the stored cells too. Any other `--section.key VALUE` is an override for every cell.
A step has one update in every cell, because PPO with several updates per step does not permit synchronous training
(`max_lag = 0`).

Writes docs/results/accuracy_over_lag.md (accuracy_over_lag_NAME.md for `--on NAME`) or the file given by `--page`, and
beside it a plot (.svg) and the figures of every cell (.json). lag_control.svg compares the tasks with a constant rate.
For each algorithm and each value L of `max_lag`, the JSON line has greedy accuracies as means over seeds:
`accuracy_lagL`, `accuracy_lagL_minus_lag0` and `accuracy_lagL_minus_start`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
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
"""Algorithm -> colour (safe for colour blindness), marker, and horizontal shift that separates close lines."""
WRONG_INPUT = 2
"""Exit status of `leeway` if config validation rejects the config of a cell, before a process starts."""
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
"""Column of the table -> figure of a run, and the format of this figure."""

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


MAIN = "trajectory_balance"
CONTROLLED = {"steady": "sums", "sorting": "sorting", "adding": "adding, work shown"}
"""Tasks of the figure on lag control -> their titles."""
STEADILY = ["--actors.eval_every", "10", "--learner.num_steps", "200", "--learner.lr_schedule", "constant"]
NUM_LATE = 5
"""Number of final evaluations whose mean is the accuracy of a run that evaluates during training."""
NO_WORSE = {
    f"accuracy_lag{lag}_minus_{of}": bar for lag in (4, 16, 64) for of, bar in (("lag0", -0.05), ("start", 0.0))
}
STEADY = "One model and one task, at one constant learning rate."


def _small(name: str, what: str) -> Ground:
    arguments = {each: ["--algorithm.type", each, *STEADILY] for each in STYLES}
    return Ground(arguments, RESULTS / f"accuracy_over_lag_{name}.md", what, STEADY, NO_WORSE, makes=name)


ONE_UPDATE = ["--learner.num_minibatches", "1", "--learner.num_epochs", "1"]
GROUNDS = {
    "sums": Ground(
        {name: ["examples/sums.toml", "--algorithm.type", name] for name in STYLES},
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
            for name in STYLES
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


def main() -> None:
    """Run the missing cells, and write the page and the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--on", choices=GROUNDS, default="sums")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 4, 16])
    parser.add_argument("--algorithms", nargs="+", choices=STYLES, help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--control", nargs="+", choices=("on", "off"), default=["off"], help="lag control, default off")
    parser.add_argument("--steps", type=int, help="learner.num_steps of every cell (default: the value in its config)")
    parser.add_argument("--work", type=Path, help="folder for finished cells; after a code change, use a new one")
    parser.add_argument(
        "--page", type=Path, help="page to write; plot and figures (.json) are written next to the page"
    )
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
        for control in (args.control if lag else ["off"])  # lag 0 needs no lag control
    ]
    if args.steps is not None:
        overrides = ["--learner.num_steps", str(args.steps), *overrides]
    end_at_sigterm()
    with tempfile.TemporaryDirectory() as fresh:
        kept = KeptResults(args.work or Path(fresh), "overrides.json", overrides)
        done, missing = run_all(kept, ground, overrides, cells)
        done |= {cell: kept.load(cell.name) for cell in stored(kept.folder) if cell not in done}
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
    if path.parent == RESULTS:
        draw_control(RESULTS)
    print(json.dumps(by_algorithm(results)))


def stored(folder: Path) -> list[Cell]:
    """Return the finished cells in the folder of `--work`."""
    return [parse(path.stem) for path in folder.glob("*-lag*-seed*.json")]


def parse(name: str) -> Cell:
    """Return the cell of a name that `Cell.name` returned."""
    found = re.fullmatch(r"(\w+)-lag(\d+)-seed(\d+)(-on)?", name)
    assert found is not None, name
    return Cell(found[1], int(found[2]), int(found[3]), "on" if found[4] else "off")


def run_all(
    kept: KeptResults, ground: Ground, overrides: list[str], cells: list[Cell]
) -> tuple[dict[Cell, dict[str, Any]], dict[Cell, str]]:
    """Run all cells; return the results of finished cells and the failure reasons of failed cells."""
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
    """Return the figures and the commit of a cell. If no figures are stored, run the cell and store its metrics too.

    Raises:
        MeasurementFailed: the config was rejected, or the run failed or timed out.
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
            raise MeasurementFailed(f"refused: {' '.join(' '.join(error.printed).split())}") from error
        shown = "the progress" if error.status is None else "the reason"
        raise MeasurementFailed(f"{error.why}; {log.name} in --work shows {shown}") from error
    return result


def figures(run: FinishedRun) -> Figures:
    """Return the reported figures of a run.

    Returns:
        Accuracies are in [0, 1]. `lag_*` are in policy versions: `lag_mean` is the mean over all training tokens,
        `lag_late` the mean over the second half of the steps. `ess_lowest` is the lowest effective sample share of a
        step, computed from the raw importance weights of sequences. `seconds` is the time from the command to the last
        evaluation.

    Raises:
        MeasurementFailed: the run ended before its last evaluation.
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
    """Return the full command without `--work` and `--page`, whose paths are specific to this machine."""
    lists = {"--lags": args.lags, "--algorithms": args.algorithms, "--seeds": args.seeds, "--control": args.control}
    words = ["--on", args.on, *(word for key, values in lists.items() for word in (key, *map(str, values)))]
    return shlex.join(["python", "benchmarks/accuracy_over_lag.py", *words, *overrides])


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


# --- the page ---------------------------------------------------------------------------------------


def page(ground: Ground, results: dict[Cell, Figures], missing: dict[Cell, str], origin: str, figure: str) -> list[str]:
    """Return the paragraphs of the page."""
    num_seeds = len({cell.seed for cell in results})
    num_heldout = int(next(iter(results.values()))["num_heldout"])
    steps = " or ".join(str(int(n)) for n in sorted({found["num_steps"] for found in results.values()}))
    seeds = "One seed." if num_seeds == 1 else f"Means over {num_seeds} seeds; brackets hold minimum and maximum."
    return [
        "# Accuracy against `max_lag`, measured",
        f"{origin} on {len(os.sched_getaffinity(0))} cores ({platform.machine()}), no GPU, Python "
        f"{platform.python_version()}. The real system trains {ground.what}. Each run has {steps} steps, and one run "
        "follows another. Runs of one algorithm and seed differ only in `weight_sync.max_lag`. Accuracy is over "
        f"{num_heldout} held-out problems. {seeds}",
        f"![Held-out accuracy and realised lag against max_lag]({figure})",
        cells_table(results),
        *[
            f"No figures ({why}): {', '.join(cell.name for cell in missing if missing[cell] == why)}"
            for why in dict.fromkeys(missing.values())
        ],
        "Lag is in policy versions, over trained tokens. The lag starts at 0 and grows while actors generate "
        "faster than the learner trains, so the table also has the mean over the second half of the steps. ESS is the "
        "effective sample share of whole completions, 1 / mean((w / mean w)^2) with w = pi_prox / mu, at the step with "
        "the lowest value. The ESS of on-policy data is 1, and lag lowers it. The wall time ends with the last "
        "evaluation.",
        *([wanted_table(ground, results)] if ground.wanted else []),
        *shows(ground, results, num_heldout),
    ]


def wanted_table(ground: Ground, results: dict[Cell, Figures]) -> str:
    """Return the table of required minimums and measured values."""
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
    """Return a table with one row per algorithm and max_lag."""
    head = ["algorithm", "max_lag", *COLUMNS]
    rows = [
        [algorithm, str(max_lag), *[spread(values[figure], form) for figure, form in COLUMNS.values()]]
        for (algorithm, max_lag), values in over_seeds(results).items()
    ]
    return table(head, rows)


def shows(ground: Ground, results: dict[Cell, Figures], num_heldout: int) -> list[str]:
    """Return the paragraphs on the findings and their limits."""
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
        "Findings: the change in accuracy from the lowest to the highest `max_lag` of each algorithm.",
        *(["\n".join(changes)] if changes else []),
        f"Limits: on {num_heldout} problems, an accuracy of 0.90 has a standard error of {error:.3f}, and seeds add "
        f"variance. Changes below this error are not significant. {ground.limits}",
    ]


def draw(results: dict[Cell, Figures], path: Path) -> None:
    """Plot accuracy on the left and the realised lag on the right."""
    cells = over_seeds(results)
    lags = sorted({lag for _, lag in cells})
    places = {lag: float(index) for index, lag in enumerate(lags)}  # a logarithmic axis cannot show 0
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


def draw_control(folder: Path) -> None:
    """Plot accuracy with and without lag control from the stored cells of `CONTROLLED`, one panel per task."""
    found = {name: folder / f"accuracy_over_lag_{name}.json" for name in CONTROLLED}
    panels = {name: json.loads(path.read_text()) for name, path in found.items() if path.exists()}
    if not panels:
        return
    with drawn(folder / "lag_control.svg", 3.3 * len(panels), 3.2, font_size=10) as figure:
        for axis, (name, cells) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
            mine = {cell: cells[cell.name]["figures"] for cell in map(parse, cells) if cell.algorithm == MAIN}
            lags = sorted({cell.max_lag for cell in mine})
            for control, colour, line in (("off", "#D55E00", "--"), ("on", "#0072B2", "-")):
                greedy = [
                    fmean(f["greedy"] for cell, f in mine.items() if cell.max_lag == lag and cell.control == each)
                    for lag in lags
                    for each in ([control] if lag else ["off"])
                ]
                axis.plot(range(len(lags)), greedy, line, marker="o", color=colour, label=f"lag control {control}")
            before = fmean(f["greedy_before"] for f in mine.values())
            axis.axhline(before, color="0.6", linewidth=1)
            axis.annotate("before training", (0, before), (0, 3), textcoords="offset points", color="0.4", fontsize=8)
            axis.set_xticks(range(len(lags)), [str(lag) for lag in lags])
            axis.set_title(CONTROLLED[name], fontsize=10)
            axis.set_xlabel("max_lag")
            axis.grid(axis="y", color="0.92")
        figure.axes[0].set_ylabel("held-out accuracy")
        figure.axes[0].legend(fontsize=8)


def _line(axis: Any, algorithm: str, cells: dict[float, dict[str, list[float]]], key: str, line: str) -> None:  # noqa: ANN401 -- matplotlib API
    """Plot the mean over seeds at each x position, with error bars from the lowest to the highest value."""
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
