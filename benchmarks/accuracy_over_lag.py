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
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.accuracy_parts.cells import ALGORITHMS, GROUNDS, Cell, Figures, Ground, by_algorithm, parse
from benchmarks.accuracy_parts.page import draw, draw_control, page
from benchmarks.lib import small_tasks
from benchmarks.lib.machine import RESULTS, describe_commit
from benchmarks.lib.page import write_page
from benchmarks.lib.processes import MeasurementFailed, end_at_sigterm
from benchmarks.lib.runs import FinishedRun, KeptResults, RunFailed, by_token, train

NUM_LATE = 5
"""Number of final evaluations whose mean is the accuracy of a run that evaluates during training."""
WRONG_INPUT = 2
"""Exit status of `leeway` if config validation rejects the config of a cell, before a process starts."""


def main() -> None:
    """Run the missing cells, and write the page and the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--on", choices=GROUNDS, default="sums")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 4, 16])
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, help="default: all")
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


if __name__ == "__main__":
    main()
