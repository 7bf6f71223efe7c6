"""Measure the seconds of training to a held-out accuracy, compared with TRL. The last line of stdout is JSON.

    python benchmarks/time_to_reward.py [--on adding smollm2] [--seeds 0 1 2] [--work FOLDER] [--page [FILE]]
        [--section.key VALUE ...]

    adding    a model of 0.9 M parameters (`lib/small_tasks.py`) with answers of 20 to 52 tokens, with all seeds
    smollm2   SmolLM2-135M on sums of small numbers, with the first seed only

Three sides alternate for each seed: Leeway with `max_lag = 0` (`synchronous`), Leeway with the default `max_lag`
(`default`), and TRL's GRPOTrainer on both cores (`trl`). The target is `SHARE` of the final accuracy of `synchronous`,
as a mean over seeds. The time to the target is interpolated linearly between evaluations. TRL's clock stops during
evaluation; Leeway's clock does not. Ratios are medians over seeds. Any other `--section.key VALUE` is an override of
both sides of Leeway.

`--work` stores finished runs. `--page` writes docs/results/time_to_reward.md and its plot. The first call installs TRL
into an environment in the user's cache folder.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib import small_tasks
from benchmarks.lib.figure import drawn
from benchmarks.lib.machine import RESULTS, ROOT, describe_machine, make_model
from benchmarks.lib.page import bars_table, judged, number, origin, table, write_page
from benchmarks.lib.peers import PeersUnavailable, python_with
from benchmarks.lib.processes import MeasurementFailed, end_at_sigterm
from benchmarks.lib.rounds import median_ratio
from benchmarks.lib.runs import KeptResults
from benchmarks.lib.runs import train as train_ours
from benchmarks.trl import LIMIT_S, REQUIREMENTS, Case, accuracies_of, train_theirs

from leeway.weight_sync.config import WeightSyncConfig

PAGE = RESULTS / "time_to_reward.md"
SHARE = 0.9
NUM_LATE = 3
"""Number of final evaluations whose mean is the final accuracy of a run."""
STYLES = {"synchronous": ("#D55E00", "--"), "default": ("#0072B2", "-"), "trl": ("#009E73", ":")}
"""Side -> colour and line style."""
BARS = {"adding_over_synchronous": 0.65, "adding_over_trl": 0.6}

Line = Sequence[tuple[float, float]]
"""Pairs of the seconds of training and the accuracy at each evaluation."""


def main() -> None:
    """Run the missing measurements and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--on", nargs="+", choices=CASES, default=["adding"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, help="folder for finished runs; use a new one for new code")
    parser.add_argument(
        "--page", type=Path, nargs="?", const=PAGE, metavar="FILE", help="write the page (default: in docs/results/)"
    )
    args, overrides = parser.parse_known_args()
    end_at_sigterm()
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-time-") as fresh:
        kept = KeptResults(args.work or Path(fresh), "overrides.json", overrides)
        try:
            python = python_with(*REQUIREMENTS)
            lines = {name: measure(kept, name, args.seeds, overrides, python) for name in args.on}
        except (MeasurementFailed, PeersUnavailable, subprocess.SubprocessError) as error:
            sys.exit(f"benchmarks/time_to_reward.py: {error}")
    result: dict[str, Any] = {"trl": REQUIREMENTS[0], "cases": {name: compared(own) for name, own in lines.items()}}
    for name, case in result["cases"].items():
        result |= {f"{name}_over_{side}": case["ratios"][side] for side in ("synchronous", "trl")}
    result |= {"wanted": judged(result, BARS, "at most", at_full_size=True), "machine": machine}
    if path := args.page:
        draw(lines, result, path.with_suffix(".svg"))
        words = ["--on", *args.on, "--seeds", *map(str, args.seeds), *overrides]
        write_page(path, page(result, shlex.join(words), f"{path.stem}.svg"))
    print(json.dumps(result))


# --- the training runs -----------------------------------------------------------------------------


def adding(folder: Path) -> Case:
    """Return the case of a small model that learns long answers."""
    evaluated = ("--actors.eval_every", "10", "--task.num_heldout", "128")  # evaluations of Leeway count
    return Case(small_tasks.make("adding", folder / "adding"), evaluated, 120, 0)


def smollm2(folder: Path) -> Case:
    """Return the case of examples/smollm2.toml, with enough steps to show learning."""
    return Case(ROOT / "examples" / "smollm2.toml", ("--actors.eval_every", "5"), 40, 0)


CASES = {"adding": adding, "smollm2": smollm2}


def measure(
    kept: KeptResults, name: str, seeds: Sequence[int], overrides: Sequence[str], python: Path
) -> dict[str, list[Line]]:
    """Return side -> evaluations of each seed; raise MeasurementFailed if a run fails."""
    case = CASES[name](kept.folder)
    make_model(case.config)
    own = {
        "synchronous": ["--weight_sync.max_lag", "0", *overrides],
        "default": ["--weight_sync.max_lag", str(WeightSyncConfig().max_lag), *overrides],
        "trl": [],
    }
    found: dict[str, list[Line]] = {side: [] for side in own}
    for seed, side in itertools.product(seeds[:1] if name == "smollm2" else seeds, own):
        more = (*case.overrides, *own[side], "--run.seed", str(seed))
        sided = Case(case.config, more, case.num_steps, case.num_warmup)
        title = f"{name}-{side}-{seed}"

        def make(folder: Path, case: Case = sided, side: str = side, title: str = title) -> dict[str, Any]:
            if side == "trl":
                return {"line": train_theirs(case, python)["accuracies"]}
            log = kept.folder / f"{title}.log"
            return {"line": accuracies_of(train_ours(case.config, folder, case.arguments, log=log, limit_s=LIMIT_S))}

        line = kept.result(title, make)["line"]
        print(f"{title}: {[(round(s), round(a, 3)) for s, a in line]}", file=sys.stderr, flush=True)
        found[side].append([(s, a) for s, a in line])
    return found


# --- the results -----------------------------------------------------------------------------------


def reached_s(line: Line, target: float) -> float | None:
    """Return the seconds at which interpolated accuracy first reaches the target, or None if accuracy never does."""
    for (before_s, before), (then_s, then) in itertools.pairwise([(0.0, 0.0), *line]):
        if then >= target:
            share = (target - before) / (then - before) if before_s else 1.0  # do not interpolate before
            return before_s + share * (then_s - before_s)
    return None


def compared(lines: Mapping[str, Sequence[Line]]) -> dict[str, Any]:
    """Return the target, the ratios, and for each side and seed the final accuracy and the seconds to the target."""
    ends = {side: [fmean(a for _, a in line[-NUM_LATE:]) for line in own] for side, own in lines.items()}
    target = SHARE * fmean(ends["synchronous"])
    seconds = {side: [reached_s(line, target) for line in own] for side, own in lines.items()}
    ratios = {}
    for side in ("synchronous", "trl"):
        pairs = list(zip(seconds["default"], seconds[side], strict=True))
        whole = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
        ratios[side] = median_ratio(*zip(*whole, strict=True)) if len(whole) == len(pairs) else None
    whole_s = {side: [line[-1][0] for line in own] for side, own in lines.items()}
    return {"target": target, "ends": ends, "seconds": seconds, "whole": whole_s, "ratios": ratios}


def page(result: Mapping[str, Any], words: str, figure: str) -> list[str]:
    """Return the paragraphs of the page."""
    machine = result["machine"]
    rows = [
        [
            name,
            side,
            number(fmean(case["ends"][side]), "{:.3f}"),
            ", ".join(number(each, "{:.0f}") for each in case["seconds"][side]),
            number(fmean(case["whole"][side]), "{:.0f}"),
        ]
        for name, case in result["cases"].items()
        for side in case["seconds"]
    ]
    targets = ", ".join(f"{case['target']:.3f} for `{name}`" for name, case in result["cases"].items())
    return [
        "# Time to reward, measured",
        f"{origin(f'python benchmarks/time_to_reward.py {words} --page', machine, machine['commit'])} "
        f"The GRPOTrainer of {result['trl'].replace('==', ' ')} generates with Transformers, uses both cores, and has "
        "no KL term. Leeway trains with trajectory balance and a reference model; its engines, buffer and stages use "
        "the same cores. The sides alternate for each seed. All sides have the same model, task, samples per step, "
        "learning rate and optimizer.",
        f"![Held-out accuracy over seconds of training]({figure})",
        f"The target is {SHARE:g} of the final accuracy with `max_lag = 0`: {targets}. Accuracy is greedy, on 128 "
        f"problems every ten steps (`smollm2`: five); the final accuracy is the mean of the last {NUM_LATE}. TRL's "
        "clock stops during evaluation.",
        table(["task", "side", "final accuracy", "seconds to the target, by seed", "seconds to the end, mean"], rows),
        "Generation and training share the cores, so asynchronous training adds no capacity. "
        "[overlap.md](overlap.md) compares speeds with one core per role.",
        bars_table(result["wanted"], "at most"),
    ]


def draw(lines: Mapping[str, Mapping[str, Sequence[Line]]], result: Mapping[str, Any], path: Path) -> None:
    """Plot accuracy over seconds, with one panel per task and one line per run."""
    with drawn(path, 5 * len(lines), 3.6, font_size=10) as figure:
        for axis, (name, own) in zip(figure.subplots(1, len(lines), squeeze=False)[0], lines.items(), strict=True):
            for side, runs in own.items():
                colour, style = STYLES[side]
                for number_, line in enumerate(runs):
                    seconds, accuracies = zip(*line, strict=True)
                    label = None if number_ else side.replace("trl", "TRL").replace("synchronous", "max_lag = 0")
                    axis.plot(seconds, accuracies, style, color=colour, label=label, linewidth=1.4)
            axis.axhline(result["cases"][name]["target"], color="0.6", linewidth=1)
            axis.set_title(name)
            axis.set_xlabel("seconds of training")
            axis.set_ylabel("held-out accuracy")
            axis.legend(fontsize=8)
            axis.grid(axis="y", color="0.92")


if __name__ == "__main__":
    main()
