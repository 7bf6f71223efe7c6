"""Compare the speed of Leeway with that of TRL's GRPOTrainer on one machine. Prints one JSON line last.

    python benchmarks/trl.py [--quick] [--only NAME ...] [--rounds 3] [--keep FOLDER] [--page [FILE]]

    short    the demo: completions of three tokens by a model of half a million parameters, 256 samples per step
    long     the long-tailed model of `benchmarks/overlap.py`, completions of 48 tokens (median) and 240 (maximum)
    smollm2  SmolLM2-135M, completions of up to 128 tokens, 32 samples per step

All sides have the same model, task, number of samples, and cores. TRL generates with Transformers, computes on both
cores, and uses no KL term and therefore no reference model. Leeway runs with engines, buffer and stages in parallel:
as configured, which is trajectory balance with a reference model; and at equal work, which is PPO with a group baseline
and one update per step. The sides take turns. A ratio is the median over rounds of the ratio of samples per second,
from the end of the warm-up to the last step. Evaluation time does not count for TRL, but counts for Leeway.

`--quick` is for development: it runs one short round, whose figures are meaningless. `--page` writes
docs/results/trl.md. `--before` adds another checkout of Leeway, with its own .venv, at equal work. The first call
installs TRL into an environment in the user's cache folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.cpu import CpuTimes
from benchmarks.lib.machine import RESULTS, ROOT, describe_machine, make_model
from benchmarks.lib.page import bars_table, judged, number, origin, table, write_page
from benchmarks.lib.peers import PeersUnavailable, python_with
from benchmarks.lib.processes import MeasurementFailed, call_in_processes, end_at_sigterm
from benchmarks.lib.rounds import median_ratio
from benchmarks.lib.runs import FinishedRun
from benchmarks.lib.runs import train as train_ours
from benchmarks.overlap import GROUPS_PER_STEP
from benchmarks.overlap_parts.long_tail import Setting, write_setting

from leeway.launch.config import Config, load_config, to_toml

PAGE = RESULTS / "trl.md"
REQUIREMENTS = ("trl==1.16.0", "datasets", "accelerate")
LIMIT_S = 3000.0
BARS = {
    "short_over_trl": 0.45,
    "long_over_trl": 2.8,
    "smollm2_over_trl": 1.2,
    "short_same_loss_over_trl": 0.6,
    "long_same_loss_over_trl": 3.5,
    "smollm2_same_loss_over_trl": 2.0,
}
SAME_LOSS = {"type": "off_policy_ppo", "baseline": "rloo"}
ONE_UPDATE = ("--learner.num_minibatches", "1", "--learner.num_epochs", "1")
TARGET = 0.9
"""Held-out accuracy to reach; the page compares the times until the sides reach this accuracy."""

LEAST_SHARE = 0.005

Figures = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Config and size of the training runs, which both sides share."""

    config: Path
    overrides: tuple[str, ...]
    num_steps: int
    num_warmup: int
    """Number of steps at the beginning that do not count."""

    @property
    def arguments(self) -> list[str]:
        """Overrides of both sides."""
        return [*self.overrides, "--learner.num_steps", str(self.num_steps)]


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round, for development")
    parser.add_argument("--only", nargs="+", choices=[*CASES], metavar="NAME", help=" ".join(CASES))
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds, each with all cases")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="another checkout of Leeway to measure, too")
    parser.add_argument("--keep", type=Path, help="keep the run folders in this folder (default: remove them)")
    parser.add_argument(
        "--page", type=Path, nargs="?", const=PAGE, metavar="FILE", help="write the page (default: in docs/results/)"
    )
    args = parser.parse_args()
    if args.page and (args.quick or args.only):
        parser.error("--page needs all cases at full size: omit --quick and --only, or omit --page")
    end_at_sigterm()
    machine = describe_machine()
    num_rounds = 1 if args.quick else args.rounds
    with tempfile.TemporaryDirectory(prefix="benchmark-trl-") as fresh:
        folder = (args.keep or Path(fresh)).resolve()
        try:
            python = python_with(*REQUIREMENTS)
            cases = {name: CASES[name](folder, args.quick) for name in args.only or CASES}
            rounds = [measure_round(folder, number, cases, python, args.before) for number in range(num_rounds)]
        except (MeasurementFailed, PeersUnavailable, subprocess.SubprocessError) as error:
            sys.exit(f"benchmarks/trl.py: {error}")
    result = {"quick": args.quick, "trl": REQUIREMENTS[0], **compared(rounds), "machine": machine}
    result["wanted"] = judged(result, BARS, "at least", at_full_size=not args.quick)
    if args.page:
        write_page(args.page, page(result, num_rounds))
    print(json.dumps(result))


# --- cases -----------------------------------------------------------------------------------------


def short(folder: Path, quick: bool) -> Case:
    """Return the case of the demo."""
    evaluated = ("--actors.eval_every", "10")
    return Case(ROOT / "examples" / "demo.toml", evaluated, 20 if quick else 120, 5 if quick else 20)


def long(folder: Path, quick: bool) -> Case:
    """Return the case with the model of `benchmarks/overlap.py`, in which each side has both cores."""
    num_steps, num_warmup = (6, 2) if quick else (40, 5)
    setting = Setting(num_steps, num_warmup, GROUPS_PER_STEP)
    return Case(write_setting(folder / "setting", setting), (), num_steps, num_warmup)


def smollm2(folder: Path, quick: bool) -> Case:
    """Return the case of the SmolLM2 example with long completions."""
    sizes = (
        *("--actors.max_new_tokens", "128", "--learner.groups_per_step", "4", "--actors.max_running_samples", "32"),
        *("--task.num_heldout", "8"),  # accuracy is not compared, and evaluations of long answers take most time
    )
    return Case(ROOT / "examples" / "smollm2.toml", sizes, 2 if quick else 4, 1)


def same_loss(case: Case, path: Path) -> Case:
    """Return the case with the loss and the number of updates of TRL, and write its config to `path`."""
    config = load_config(case.config, [*case.overrides, *ONE_UPDATE])
    config = Config.model_validate({**config.model_dump(), "algorithm": SAME_LOSS})
    path.write_text(to_toml(config))
    return Case(path, (), case.num_steps, case.num_warmup)


CASES = {"short": short, "long": long, "smollm2": smollm2}


# --- sides -----------------------------------------------------------------------------------------


def measure_round(
    folder: Path, number: int, cases: dict[str, Case], python: Path, before: Path | None
) -> dict[str, dict[str, Figures]]:
    """Run all sides of every case; raise MeasurementFailed if a run fails.

    Args:
        folder: folder of the runs.
        number: number of the round.
        cases: cases by name.
        python: interpreter of the environment with TRL.
        before: another checkout of Leeway, or None.
    """
    found: dict[str, dict[str, Figures]] = {}
    for name, case in cases.items():
        make_model(case.config)
        same = same_loss(case, folder / f"{name}.toml")
        sides = {"trl": partial(_theirs, case, python), "leeway": partial(_ours, folder, case)}
        sides["leeway, same loss"] = partial(_ours, folder, same)
        if before is not None:
            sides["leeway before, same loss"] = partial(_ours, folder, same, before.resolve())
        found[name] = {}
        for side, measure in sides.items():
            figures = found[name][side] = measure()
            print(f"round {number + 1}, {name}, {side}: {json.dumps(figures)}", file=sys.stderr, flush=True)
    return found


def train_theirs(case: Case, python: Path) -> Figures:
    """Run `trl_parts.trainer.train` in an environment with TRL; raises the errors of `call_in_processes`."""
    call = {"config": str(case.config), "overrides": case.arguments, "num_threads": len(os.sched_getaffinity(0))}
    (found,) = call_in_processes("TRL", "benchmarks.trl_parts.trainer:train", [call], limit_s=LIMIT_S, python=python)
    return found


def _theirs(case: Case, python: Path) -> Figures:
    found = train_theirs(case, python)
    learner, actors = (getattr(load_config(case.config, case.arguments), name) for name in ("learner", "actors"))
    num_samples = learner.groups_per_step * actors.group_size * (case.num_steps - case.num_warmup)
    seconds, cpu_s = (found[key][-1] - found[key][case.num_warmup - 1] for key in ("steps_s", "steps_cpu_s"))
    return _figures(num_samples, seconds, {"trainer": cpu_s}, found["accuracies"])


def _ours(folder: Path, case: Case, checkout: Path = ROOT) -> Figures:
    place = Path(tempfile.mkdtemp(dir=folder))
    with CpuTimes() as times:
        run = train_ours(
            case.config, place / "run", case.arguments, log=place / "log", limit_s=LIMIT_S, checkout=checkout
        )
    steps = run.steps
    counted = steps[case.num_warmup :]
    num_samples = sum(row["batch/trajectories"] for row in counted)
    began_s, ended_s = steps[case.num_warmup - 1]["finished_s"], counted[-1]["finished_s"]
    return _figures(num_samples, ended_s - began_s, times.between(began_s, ended_s), accuracies_of(run))


def accuracies_of(run: FinishedRun) -> list[tuple[float, float]]:
    """Return (seconds, accuracy) pairs. As for TRL, seconds run from the first wait for a batch to the new weights."""
    first = run.steps[0]
    began_s = first["started_s"] - first["time/wait_for_batch"]
    there_s = {row["version"]: row["finished_s"] - began_s for row in run.steps}
    return [(there_s[version], accuracy) for version, accuracy in run.evaluations() if version in there_s]


def _figures(
    num_samples: int, seconds: float, cpu_s: Mapping[str, float], accuracies: Sequence[Sequence[float]]
) -> Figures:
    reached = [seconds for seconds, accuracy in accuracies if accuracy >= TARGET]
    return {
        "samples_per_s": num_samples / seconds,
        "cpu_ms": {role: 1000 * each / num_samples for role, each in cpu_s.items()},
        "accuracy": accuracies[-1][1] if accuracies else None,
        "target_s": min(reached) if reached else None,
    }


# --- figures and page ------------------------------------------------------------------------------


def compared(rounds: Sequence[dict[str, dict[str, Figures]]]) -> Figures:
    """Return the figures of the JSON line; ratios are medians of the rounds' ratios."""
    found: Figures = {"cases": {}}
    for name in rounds[0]:
        sides = {side: [each[name][side] for each in rounds] for side in rounds[0][name]}
        speeds = {side: [one["samples_per_s"] for one in own] for side, own in sides.items()}
        found[f"{name}_over_trl"] = median_ratio(speeds["leeway"], speeds["trl"])
        found[f"{name}_same_loss_over_trl"] = median_ratio(speeds["leeway, same loss"], speeds["trl"])
        found["cases"][name] = {
            side: {
                "samples_per_s": fmean(speeds[side]),
                "cpu_ms": {role: median(one["cpu_ms"].get(role, 0.0) for one in own) for role in own[0]["cpu_ms"]},
                "accuracy": _middle([one["accuracy"] for one in own]),
                "target_s": _middle([one["target_s"] for one in own]),
            }
            for side, own in sides.items()
        }
    return found


def _middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if len(known) == len(values) else None


def page(result: Figures, num_rounds: int) -> list[str]:
    """Return the paragraphs of the page."""
    machine = result["machine"]
    head = (
        f"{origin(f'python benchmarks/trl.py --rounds {num_rounds} --page', machine, machine['commit'])} "
        f"The GRPOTrainer of {result['trl'].replace('==', ' ')} generates with Transformers and computes on both cores "
        "in one process, without a KL term and therefore without a reference model. Leeway's engines, buffer and "
        "stages use the same two cores. `leeway` trains as configured, with trajectory balance and a reference model. "
        "`same loss` is the work of TRL: PPO with a group baseline, without a reference, and with one update per step. "
        f"There are {num_rounds} rounds, in which the sides take turns. Ratios compare samples per second after the "
        "warm-up."
    )
    cases = (
        "`short` is the demo, with completions of three tokens and 256 samples per step. `long` is the long-tailed "
        "model of [overlap.md](overlap.md), with a median of 48 tokens, a maximum of 240, and 48 samples per step. "
        "`smollm2` is SmolLM2-135M, with completions of up to 128 tokens and 32 samples per step. The last column is "
        f"the time to a held-out greedy accuracy of {TARGET:g}, evaluated every ten steps. Evaluation time does not "
        "count for TRL, but counts for Leeway. The models of `long` and `smollm2` do not improve in these few steps, "
        "so their accuracy is not compared. Both sides keep freed memory allocated."
    )
    rows, shares = [], []
    for name, sides in result["cases"].items():
        are_evaluated = all(one["accuracy"] is not None for one in sides.values())
        for side, one in sides.items():
            found = (one["accuracy"], one["target_s"]) if are_evaluated else (None, None)
            cells = zip((one["samples_per_s"], *found), ("{:.2f}", "{:.3f}", "{:.0f}"), strict=True)
            rows.append([name, side, *(number(*cell) for cell in cells)])
            parts = sorted(one["cpu_ms"].items(), key=lambda part: -part[1])
            shown = ", ".join(
                f"{role} {each:.2f}" for role, each in parts if each >= 0.005 * sum(one["cpu_ms"].values())
            )
            shares.append([name, side, f"{sum(one['cpu_ms'].values()):.2f}", shown])
    columns = ["case", "side", "samples per second", "final accuracy", f"seconds to accuracy {TARGET:g}"]
    accounts = (
        f"CPU milliseconds per sample of all processes, and of those with at least {LEAST_SHARE:.1%} of it. They vary "
        "less on a shared machine than samples per second. On a CPU, the engine is a thread of the actor."
    )
    return [
        "# Comparison with TRL",
        head,
        bars_table(result["wanted"], "at least"),
        cases,
        table(columns, rows),
        "## CPU time by process",
        accounts,
        table(["case", "side", "all", "by process"], shares),
    ]


if __name__ == "__main__":
    main()
