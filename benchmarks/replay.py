"""Does replay pay? Accuracy against generated tokens, over the real system. Prints one JSON line last.

    python benchmarks/replay.py [--parts uses lags laws] [--algorithms NAME ...] [--seeds 0 1 2] [--work FOLDER]
        [--after FILE.json] [--kept] [--page [FILE]] [--quick]

Every run is one `leeway train examples/sums.toml`, an ordinary model, with one actor and one stage, one run after the
other. The learner takes `STEPS` steps, so what differs is how many tokens are generated:

    uses    max_uses = 2, 4 and 8 at max_lag = 16, drawn uniformly
    lags    max_uses = 4 at max_lag = 4, 16 and without a bound, drawn uniformly
    laws    max_uses = 4 at max_lag = 16: the oldest first, uniform, prioritised with decay by age, softmax of rewards,
            half of the newest

All of these keep no more than two steps' worth of groups (replay_steps = 2), so that actors generate what takes the
place of what was used up. Beside them run those without replay (max_uses = 1, at the default max_lag): all steps, a
half and a quarter.

`tokens_saved_at_equal_accuracy` of a setting is how many tokens a run without replay generates until it answers as many
held-out problems right, over what this one generated. Runs without replay of all lengths, each with a learning rate
that falls to 0, make the curve that it is read from; a setting that is better than the longest of them, or worse by no
more than the standard error over seeds, is held against that. The figure of an algorithm is that of its best setting.
It is given twice: for answers that are sampled at temperature 1, whose accuracy is the reward that is trained, and for
greedy ones.

`--work` keeps finished runs: called again, only the missing ones run, and with `--kept` none. A page has the figures of
its runs beside it, .json: `--after` takes those of an earlier one, so that parts, algorithms and seeds can be added.
`--quick` is for development: few steps, one seed.
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
"""How held-out problems are answered; the first is the one that a run is trained for."""
ALGORITHMS = {
    "trajectory_balance": "#0072B2",
    "oapl": "#CC79A7",
    "online_dpo": "#D55E00",
    "off_policy_ppo": "#009E73",
}
"""Algorithm -> colour, told apart by the colour-blind."""

Figures = Mapping[str, float]
"""Of one run, by name."""


@dataclass(frozen=True)
class Setting:
    """How the buffer is used."""

    max_uses: int = 1
    max_lag: str = "4"
    law: str = "fifo"
    share: float = 1.0
    """Of the steps."""

    @property
    def name(self) -> str:
        """For people, and for files."""
        if self.max_uses == 1:
            return f"no replay, lag {self.max_lag}" + (f", {self.share:g} of the steps" if self.share < 1 else "")
        return f"{self.max_uses} uses, lag {self.max_lag}, {self.law}"

    def overrides(self, num_steps: int) -> list[str]:
        """Arguments of `leeway train`."""
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
"""Without replay: what the others are held against."""
REPLAY = Setting(max_uses=4, max_lag="16", law="uniform")
PARTS: dict[str, tuple[Setting, ...]] = {
    "uses": tuple(replace(REPLAY, max_uses=uses) for uses in (2, 4, 8)),
    "lags": tuple(replace(REPLAY, max_lag=lag) for lag in ("4", "16", "unbounded")),
    "laws": tuple(
        replace(REPLAY, law=law) for law in ("fifo", "uniform", "prioritised", "reward_softmax", "on_policy_share")
    ),
}
"""Beside `FRESH`, which every part needs."""
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
"""Column -> figure of a run, and how it reads."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    algorithm: str
    setting: Setting
    seed: int

    @property
    def name(self) -> str:
        """Of its files."""
        setting = self.setting.name.replace(", ", "-").replace(" ", "_")
        return f"{self.algorithm}-{setting}-seed{self.seed}"


Results = dict[tuple[str, Setting], list[Figures]]
"""Algorithm and setting -> the figures of each seed."""


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, help="keeps finished runs; a new one for new code (default: keeps none)")
    parser.add_argument(
        "--after", type=Path, metavar="FILE", help="figures of an earlier page, which are not run again"
    )
    parser.add_argument("--kept", action="store_true", help="run nothing, and tell of what there is")
    parser.add_argument("--quick", action="store_true", help="few steps and one seed, for development")
    args = parsed(parser, RESULTS / "replay.md")
    num_steps, seeds = (QUICK_STEPS, args.seeds[:1]) if args.quick else (STEPS, args.seeds)
    settings = list(dict.fromkeys([*FRESH, *(setting for part in args.parts for setting in PARTS[part])]))
    # seeds come last in the order of what changes, so that a call that is ended has whole rounds
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
    """The figures of a cell, which is run where it was not before.

    Raises:
        MeasurementFailed: the run failed, took too long, or was ended before its last evaluation.
    """
    overrides = ["--algorithm.type", cell.algorithm, "--run.seed", str(cell.seed), *FEW_PROCESSES]
    overrides += cell.setting.overrides(num_steps)
    log = kept.folder / f"{cell.name}.log"
    found: Figures = kept.result(cell.name, lambda folder: figures(train(CONFIG, folder, overrides, log=log)))
    return found


def figures(run: FinishedRun) -> Figures:
    """What is reported of a run: accuracies in [0, 1], tokens of completions, lag in versions, seconds."""
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
    """Over seeds."""
    return fmean(each[name] for each in found)


def standard_error(name: str, *samples: Sequence[Figures]) -> float:
    """Of the difference of two means of a figure over seeds; 0 where one seed says nothing of it."""
    if min(map(len, samples)) < 2:
        return 0.0
    return math.sqrt(sum(stdev(each[name] for each in found) ** 2 / len(found) for found in samples))


def tokens_saved(results: Results, algorithm: str, setting: Setting, by: str) -> float | None:
    """Generated tokens without replay over those of a setting, at equal accuracy; None where it does worse than all.

    The curve without replay is a line through its points in accuracy and the logarithm of tokens.
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
    """The JSON line: of each algorithm its best setting and what it saves, by both accuracies."""
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
    """What the best setting of an algorithm saves, of those with the most seeds; None where none saves anything."""
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


# --- what people read -------------------------------------------------------------------------------


def page(results: Results, line: Mapping[str, Any], made: str, figure: str) -> list[str]:
    """The paragraphs of the page."""
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
        "# Replay: accuracy against generated tokens, measured",
        f"{made} `{CONFIG}` over the real system with one actor and one stage on one core, {STEPS} steps of the "
        f"learner but for the shorter runs, which are all without replay; with replay `buffer.replay_steps = "
        f"{REPLAY_STEPS}`. Means over up to {num_seeds} seeds, in brackets the lowest and the highest.",
        f"![Held-out accuracy against generated tokens]({figure}.svg)",
        "Generated tokens saved at equal accuracy, of answers sampled at temperature 1, whose accuracy is the reward "
        "that is trained, and of greedy ones, each by the best setting:",
        table(["algorithm", "sampled", "by", "greedy", "by"], gains),
        f"Wanted: at least {WANTED:g} for one of them: {', '.join(met)}.",
        table(["algorithm", "setting", "seeds", *COLUMNS, *(f"tokens saved, {by}" for by in ACCURACIES)], rows),
        "Tokens saved: what a run without replay generates until it answers as many held-out problems right, over what "
        "this one generated; `-` where no run without replay is as bad. Runs without replay of all lengths, each with "
        "a learning rate that falls to 0, make the curve; a setting that is better than the longest of them, or worse "
        "by no more than the standard error over seeds, is held against that.",
        "How to read it: with replay a run takes as many steps on fewer samples. Steps make the policy surer of what "
        "it has seen, and that is what sampled answers gain by; greedy answers hear nothing of it, and gain where the "
        "steps teach something. What is not generated is time saved too, for both sides share a core here.",
        "What it does not show: answers of hundreds of tokens, where generating takes most of the time and seconds "
        "follow the tokens; runs that see the same prompts for many epochs; learning rates tuned to the age of the "
        "samples.",
    ]


def draw(results: Results, path: Path) -> None:
    """Accuracies over generated tokens: a line without replay, and a point for each setting with it."""
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
