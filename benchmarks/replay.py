"""Measure accuracy over generated tokens with and without replay, in real runs. Prints one JSON line last.

    python benchmarks/replay.py [--parts uses lags laws] [--algorithms NAME ...] [--seeds 0 1 2] [--work FOLDER]
        [--after FILE.json] [--kept] [--page [FILE]] [--quick]

Each run is `leeway train examples/sums.toml` with one actor and one stage; runs are sequential. The learner takes
`STEPS` steps in each run, so runs differ in the number of generated tokens:

    uses    max_uses = 2, 4 and 8 at max_lag = 16, drawn uniformly
    lags    max_uses = 4 at max_lag = 4, 16 and without a bound, drawn uniformly
    laws    max_uses = 4 at max_lag = 16, drawn by different laws: the oldest first, uniform, prioritised with decay by
            age, softmax of rewards, half of the newest

All of these runs store at most two steps' worth of groups (replay_steps = 2), so that actors replace used-up groups.
The baselines run without replay (max_uses = 1, at the default max_lag), for all `STEPS`, half of them, and a quarter.

`tokens_saved_at_equal_accuracy` of a setting is the number of tokens that a run without replay generates to reach the
same held-out accuracy, divided by the number of tokens that the setting generates. The first number is interpolated on
the curve of the runs without replay, each of which has a learning rate that decays to 0. Some settings are better than
the longest of these runs, or worse by at most the standard error over seeds. Such settings are compared with the
longest run. The figure of an algorithm is that of its best setting. There is one figure for answers sampled at
temperature 1, whose accuracy is the training reward, and one for greedy answers.

`--work` stores finished runs; a later call runs only the missing runs. With `--kept`, no run is started. The figures of
a page's runs are stored next to the page as .json. `--after` reads the figures of an earlier page, so that parts,
algorithms and seeds can be added. `--quick` is for development: it takes few steps with one seed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib.axes import Axes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.figure import drawn
from benchmarks.lib.machine import RESULTS, describe_commit, describe_machine
from benchmarks.lib.page import number, origin, parsed, table, write_page
from benchmarks.lib.processes import MeasurementFailed, end_at_sigterm
from benchmarks.lib.rounds import spread
from benchmarks.lib.runs import FEW_PROCESSES, FinishedRun, KeptResults, train

CONFIG = "examples/sums.toml"
STEPS = 120
QUICK_STEPS = 6
WANTED = 1.4
TIMES = "{:.2f} times"
REPLAY_STEPS = 2
ACCURACIES = ("sampled", "greedy")
"""Ways of answering held-out problems; training uses the first way."""
ALGORITHMS = {
    "trajectory_balance": "#0072B2",
    "oapl": "#CC79A7",
    "online_dpo": "#D55E00",
    "off_policy_ppo": "#009E73",
}
"""Algorithm -> colour, from a colour-blind-safe palette."""

Figures = Mapping[str, float]
"""Figures of one run by name."""


@dataclass(frozen=True)
class Setting:
    """Buffer settings of a run."""

    max_uses: int = 1
    max_lag: str = "4"
    law: str = "fifo"
    share: float = 1.0
    """Fraction of `STEPS` that the run takes."""

    @property
    def name(self) -> str:
        """Name of the setting on the page and in file names."""
        if self.max_uses == 1:
            return f"no replay, lag {self.max_lag}" + (f", {self.share:g} of the steps" if self.share < 1 else "")
        return f"{self.max_uses} uses, lag {self.max_lag}, {self.law}"

    def overrides(self, num_steps: int) -> list[str]:
        """Return the arguments of `leeway train`."""
        keys = {
            "learner.num_steps": round(num_steps * self.share),
            "buffer.max_uses": self.max_uses,
            "buffer.sampler": self.law,
            "weight_sync.max_lag": self.max_lag,
        }
        if self.max_uses > 1:
            keys["buffer.replay_steps"] = REPLAY_STEPS
        return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


FRESH = (Setting(), Setting(share=0.5), Setting(share=0.25))
"""Baselines without replay."""
REPLAY = Setting(max_uses=4, max_lag="16", law="uniform")
PARTS: dict[str, tuple[Setting, ...]] = {
    "uses": tuple(replace(REPLAY, max_uses=uses) for uses in (2, 4, 8)),
    "lags": tuple(replace(REPLAY, max_lag=lag) for lag in ("4", "16", "unbounded")),
    "laws": tuple(
        replace(REPLAY, law=law) for law in ("fifo", "uniform", "prioritised", "reward_softmax", "on_policy_share")
    ),
}
"""Part -> settings to run in addition to `FRESH`, which every part needs."""
COLUMNS = {
    "greedy": ("greedy", "{:.3f}"),
    "sampled": ("sampled", "{:.3f}"),
    "generated tokens": ("generated", "{:,.0f}"),
    "trained tokens": ("trained", "{:,.0f}"),
    "uses per sample": ("uses", "{:.2f}"),
    "lag mean": ("lag", "{:.1f}"),
    "lowest ESS": ("ess", "{:.2f}"),
    "wall s": ("seconds", "{:.0f}"),
}
"""Column of the table -> figure of a run, and the format of this figure."""


@dataclass(frozen=True)
class Cell:
    """Parameters of one run."""

    algorithm: str
    setting: Setting
    seed: int

    @property
    def name(self) -> str:
        """Stem of the file names of this cell."""
        setting = self.setting.name.replace(", ", "-").replace(" ", "_")
        return f"{self.algorithm}-{setting}-seed{self.seed}"


Results = dict[tuple[str, Setting], list[Figures]]
"""Algorithm and setting -> figures of each seed."""


def main() -> None:
    """Run the missing cells, print the result and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=[*ALGORITHMS], help="algorithms to run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the runs")
    parser.add_argument("--work", type=Path, help="folder for results; use a new one for new code (default: none)")
    parser.add_argument("--after", type=Path, metavar="FILE", help="add figures (.json) of an earlier page")
    parser.add_argument("--kept", action="store_true", help="start no run, and report only stored results")
    parser.add_argument("--quick", action="store_true", help="take few steps with one seed, for development")
    args = parsed(parser, RESULTS / "replay.md")
    num_steps, seeds = (QUICK_STEPS, args.seeds[:1]) if args.quick else (STEPS, args.seeds)
    settings = list(dict.fromkeys([*FRESH, *(setting for part in args.parts for setting in PARTS[part])]))
    # the seed is the outer loop, so that an interrupted call has complete rounds
    cells = [Cell(name, setting, seed) for seed in seeds for name in args.algorithms for setting in settings]
    before = describe_machine()
    end_at_sigterm()
    known: dict[str, Figures] = json.loads(args.after.read_text()) if args.after else {}
    results: Results = {}
    with tempfile.TemporaryDirectory() as fresh:
        kept = KeptResults(args.work or Path(fresh), "replay.json", {"num_steps": num_steps})
        if args.kept:
            cells = [cell for cell in cells if cell.name in known or kept.has(cell.name)]
        for number, cell in enumerate(cells, 1):
            try:
                found = known[cell.name] = known.get(cell.name) or run(kept, cell, num_steps)
            except MeasurementFailed as error:
                print(f"{number} of {len(cells)}, {cell.name}: {error}", file=sys.stderr, flush=True)
                continue
            results.setdefault((cell.algorithm, cell.setting), []).append(found)
            print(f"{number} of {len(cells)}, {cell.name}: {found}", file=sys.stderr, flush=True)
    line = summarised(results)
    if args.page:
        draw(results, args.page.with_suffix(".svg"))
        args.page.with_suffix(".json").write_text(json.dumps(known, indent=0) + "\n")
        command = f"python benchmarks/replay.py --parts {' '.join(args.parts)} --page"
        write_page(args.page, page(results, line, origin(command, before, describe_commit()), args.page.stem))
    print(json.dumps(line))


def run(kept: KeptResults, cell: Cell, num_steps: int) -> Figures:
    """Return the figures of a cell from the stored result, or from a new run if no result is stored.

    Raises:
        MeasurementFailed: the run failed, timed out, or ended before its last evaluation.
    """
    overrides = ["--algorithm.type", cell.algorithm, "--run.seed", str(cell.seed), *FEW_PROCESSES]
    overrides += cell.setting.overrides(num_steps)
    log = kept.folder / f"{cell.name}.log"
    found: Figures = kept.result(cell.name, lambda folder: figures(train(CONFIG, folder, overrides, log=log)))
    return found


def figures(run: FinishedRun) -> Figures:
    """Return the figures of a run: accuracies in [0, 1], numbers of completion tokens, lag in versions, and seconds."""
    summary = run.summary
    return {
        "greedy": summary["accuracy_after"],
        "sampled": summary["accuracy_after_sampled"],
        "generated": summary["generated_tokens"],
        "trained": summary["trained_tokens"],
        "uses": run.updates[-1]["buffer/uses_per_sample"],
        "lag": summary["lag_mean"],
        "ess": min(row["off_policy/ess_sequence"] for row in run.updates),
        "ledger_gap": summary["ledger_gap"],
        "seconds": summary["wall_s"],
    }


def mean(found: Sequence[Figures], name: str) -> float:
    """Return the mean of a figure over seeds."""
    return fmean(each[name] for each in found)


def standard_error(name: str, *samples: Sequence[Figures]) -> float:
    """Return the standard error of the difference of two means over seeds, or 0 if a mean has only one seed."""
    if min(map(len, samples)) < 2:
        return 0.0
    return math.sqrt(sum(stdev(each[name] for each in found) ** 2 / len(found) for found in samples))


def tokens_saved(results: Results, algorithm: str, setting: Setting, by: str) -> float | None:
    """Return the generated tokens without replay over the generated tokens of a setting, at equal accuracy.

    The curve without replay interpolates linearly in accuracy and the logarithm of tokens. Returns None if the setting
    is worse than all runs without replay.
    """
    fresh = [found for (name, each), found in results.items() if name == algorithm and each in FRESH]
    own = results.get((algorithm, setting))
    if not fresh or own is None:
        return None
    points = sorted((math.log(mean(found, "generated")), mean(found, by)) for found in fresh)
    longest = max(fresh, key=lambda found: mean(found, "generated"))
    accuracy, generated = mean(own, by), mean(own, "generated")
    if accuracy >= mean(longest, by) - standard_error(by, own, longest):
        return mean(longest, "generated") / generated
    for (tokens, below), (more, above) in pairwise(points):
        if below <= accuracy < above:
            return math.exp(tokens + (more - tokens) * (accuracy - below) / (above - below)) / generated
    return None


def summarised(results: Results) -> dict[str, Any]:
    """Return the JSON line: the best setting of each algorithm and the saved tokens, for both kinds of accuracy."""
    line: dict[str, Any] = {}
    for name in dict.fromkeys(algorithm for algorithm, _ in results):
        line[name] = {by: best(results, name, by) for by in ACCURACIES}
        line[name]["num_seeds"] = min(len(found) for (algorithm, _), found in results.items() if algorithm == name)
    for by in ACCURACIES:
        known = [each[by]["tokens_saved"] or 0.0 for each in line.values() if isinstance(each, dict)]
        line[_key(by)] = max(known, default=None)
    return line


def _key(by: str) -> str:
    return "tokens_saved_at_equal_accuracy" + ("" if by == ACCURACIES[0] else f"_{by}")


def best(results: Results, algorithm: str, by: str) -> dict[str, Any]:
    """Return the best setting of an algorithm among settings with the most seeds, and its savings; None without one."""
    most = max(len(found) for (name, _), found in results.items() if name == algorithm)
    saved = {
        setting: value
        for (name, setting), found in results.items()
        if name == algorithm
        and len(found) == most
        and setting.max_uses > 1
        and (value := tokens_saved(results, algorithm, setting, by)) is not None
    }
    if not saved:
        return {"tokens_saved": None, "setting": None}
    setting = max(saved, key=lambda each: saved[each])
    return {"tokens_saved": round(saved[setting], 3), "setting": setting.name}


# --- the page ---------------------------------------------------------------------------------------


def page(results: Results, line: Mapping[str, Any], made: str, figure: str) -> list[str]:
    """Return the paragraphs of the page."""
    num_seeds = max(map(len, results.values()))
    rows = []
    for (algorithm, setting), found in results.items():
        shown = [spread([each[key] for each in found], form) for key, form in COLUMNS.values()]
        is_replay = setting.max_uses > 1
        saved = [tokens_saved(results, algorithm, setting, by) if is_replay else None for by in ACCURACIES]
        rows.append([algorithm, setting.name, str(len(found)), *shown, *(number(each, TIMES) for each in saved)])
    gains = [
        [
            name,
            *(
                cell
                for by in ACCURACIES
                for cell in (number(each[by]["tokens_saved"], TIMES), each[by]["setting"] or "-")
            ),
        ]
        for name, each in line.items()
        if isinstance(each, dict)
    ]
    bars = {by: line[_key(by)] or 0.0 for by in ACCURACIES}
    met = [f"{'met' if value >= WANTED else '**missed**'} for {by} answers ({value:.2f})" for by, value in bars.items()]
    return [
        "# Replay: accuracy over generated tokens",
        f"{made} Runs train `{CONFIG}` with one actor and one stage on one core. The learner takes {STEPS} steps; only "
        f"some runs without replay are shorter. Runs with replay have `buffer.replay_steps = {REPLAY_STEPS}`. Figures "
        f"are means over up to {num_seeds} seeds, with minimum and maximum in brackets.",
        f"![Held-out accuracy over generated tokens]({figure}.svg)",
        "Generated tokens saved at equal accuracy by the best setting, for answers sampled at temperature 1, whose "
        "accuracy is the trained reward, and for greedy answers:",
        table(["algorithm", "sampled", "setting", "greedy", "setting"], gains),
        f"Target: at least {WANTED:g} for sampled or greedy answers: {', '.join(met)}.",
        table(["algorithm", "setting", "seeds", *COLUMNS, *(f"tokens saved, {by}" for by in ACCURACIES)], rows),
        "Tokens saved is the number of tokens that a run without replay generates to reach the same held-out accuracy, "
        "over the number of tokens that this setting generates. The value is `-` if all runs without replay are "
        "better. The curve consists of the runs without replay of all lengths, each with a learning rate that decays "
        "to 0. A setting is compared with the longest of these runs if the setting is better, or worse by at most the "
        "standard error over seeds.",
        "Interpretation: with replay, a run takes the same number of steps on fewer samples. More steps make the "
        "policy more confident on the samples, which improves sampled answers. Greedy answers do not benefit from "
        "confidence, and improve only if the steps teach something. Less generation also saves time, because "
        "generation and training share one core.",
        "The runs do not cover answers of hundreds of tokens, for which generation dominates and time is proportional "
        "to the tokens. The runs cover neither many epochs of the same prompts nor learning rates tuned to the age of "
        "samples.",
    ]


def draw(results: Results, path: Path) -> None:
    """Plot accuracies over generated tokens: a line without replay, and a point for each setting with replay."""
    with drawn(path, 10, 4.5, font_size=10) as figure:
        for axis, by in zip(figure.subplots(1, len(ACCURACIES)), ACCURACIES, strict=True):
            _draw_one(axis, results, by)


def _draw_one(axis: Axes, results: Results, by: str) -> None:
    for name, colour in ALGORITHMS.items():
        mine = {setting: found for (algorithm, setting), found in results.items() if algorithm == name}
        fresh = sorted((mean(mine[each], "generated"), mean(mine[each], by)) for each in FRESH if each in mine)
        axis.plot(*zip(*fresh, strict=True) if fresh else ([], []), "-", color=colour, label=name)
        replayed = [found for setting, found in mine.items() if setting.max_uses > 1]
        tokens, accuracies = ([mean(found, key) for found in replayed] for key in ("generated", by))
        axis.plot(tokens, accuracies, "o", color=colour, markersize=5)
    axis.set_xscale("log")
    axis.set_xlabel("generated tokens (line: no replay; points: replay)")
    axis.set_ylabel(f"held-out accuracy, {by}")
    axis.grid(axis="y", color="0.92")
    axis.legend(fontsize=8)


if __name__ == "__main__":
    main()
