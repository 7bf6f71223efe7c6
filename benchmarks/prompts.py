"""Compare prompt samplers and refilling of uninformative groups in real runs. Prints one JSON line last.

    python benchmarks/prompts.py [--seeds 0 1 2] [--work FOLDER] [--page [FILE]] [--quick]

Every run trains the model of examples/sums.toml with PPO and a group baseline. The prompts are `NUM_SUMS` sums of the
kind that the model has partly learned, and half as many sums of three digits, which the model never answers correctly.
At least a third of all groups therefore have equal rewards. Prompts repeat several times. Runs differ only in these
keys:

    uniform      buffer.prompt_law = "uniform"
    refill       buffer.prompt_law = "uniform" and buffer.refill_uninformative = 3
    posterior    buffer.prompt_law = "posterior"
    both         buffer.prompt_law = "posterior" and buffer.refill_uninformative = 3

    useful_per_token_NAME   training groups with unequal rewards per generated token, over those of `uniform`
    fewer_steps_NAME        steps of `uniform` until `TARGET` of the held-out sums are correct, over steps of this run
    fewer_tokens_NAME       generated tokens of `uniform` until that accuracy, over generated tokens of this run

A ratio divides means over seeds. Accuracy is greedy, measured every `EVAL_EVERY` steps, and averaged over three
successive evaluations. The learning rate is constant. `--work` stores finished runs; a later call runs only the missing
runs. `--quick` is for development: it takes few steps with one seed.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.machine import RESULTS, ROOT, describe_commit, describe_machine, make_model
from benchmarks.lib.page import bars_table, judged, number, origin, parsed, table, write_page
from benchmarks.lib.processes import MeasurementFailed, end_at_sigterm
from benchmarks.lib.rounds import means
from benchmarks.lib.runs import FEW_PROCESSES, FinishedRun, KeptResults, train

from leeway.actors.tasks.prompts import held_out

NUM_SUMS = 512
NUM_HELD_OUT = 256
STEPS, QUICK_STEPS = 120, 20
EVAL_EVERY = 12
GROUPS_PER_STEP = 32
SUMS = ROOT / "examples" / "sums.toml"
COMMON = (
    *("--model.path", str(SUMS.with_name("sums_model"))),
    *("--algorithm.type", "off_policy_ppo", "--learner.lr_schedule", "constant"),
    *("--learner.groups_per_step", str(GROUPS_PER_STEP), *FEW_PROCESSES),
    *("--actors.eval_every", str(EVAL_EVERY)),
)
"""Overrides of all runs."""
TARGET = 0.75
REFILL = ("--buffer.refill_uninformative", "3")
SETTINGS: dict[str, tuple[str, ...]] = {
    "uniform": ("--buffer.prompt_law", "uniform"),
    "refill": ("--buffer.prompt_law", "uniform", *REFILL),
    "posterior": ("--buffer.prompt_law", "posterior"),
    "both": ("--buffer.prompt_law", "posterior", *REFILL),
}
AT_LEAST = {"useful_per_token_refill": 1.2, "fewer_steps_posterior": 1.1}
COLUMNS = {
    "fraction of groups with equal rewards": ("uninformative", "{:.2f}"),
    "useful groups per 1,000 generated tokens": ("useful_per_1000", "{:.2f}"),
    "generated tokens per step": ("tokens_per_step", "{:,.0f}"),
    "steps to target": ("steps", "{:.0f}"),
    "generated tokens to target": ("tokens", "{:,.0f}"),
    "final greedy accuracy": ("greedy", "{:.3f}"),
}
"""Column of the table -> figure of a run, and the format of this figure."""

Figures = dict[str, float | None]
"""Figures of one run by name; None if the run did not reach the target."""


def main() -> None:
    """Run the missing cells, print the result and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the runs")
    parser.add_argument("--work", type=Path, help="folder for results; use a new one for new code (default: none)")
    parser.add_argument("--quick", action="store_true", help="take few steps with one seed, for development")
    args = parsed(parser, RESULTS / "prompts.md")
    num_steps, seeds = (QUICK_STEPS, args.seeds[:1]) if args.quick else (STEPS, args.seeds)
    before = describe_machine()
    end_at_sigterm()
    found: dict[str, list[Figures]] = {name: [] for name in SETTINGS}
    with tempfile.TemporaryDirectory() as fresh:
        kept = KeptResults(args.work or Path(fresh), "prompts.json", {"num_steps": num_steps})
        config = write_config(kept.folder)
        for seed in seeds:
            for name in SETTINGS:
                try:
                    found[name].append(run(kept, config, name, seed, num_steps))
                except MeasurementFailed as error:
                    print(f"{name}, seed {seed}: {error}", file=sys.stderr, flush=True)
                    continue
                print(f"{name}, seed {seed}: {found[name][-1]}", file=sys.stderr, flush=True)
    if not all(found.values()):
        sys.exit("all runs of a setting failed, so there is nothing to compare: see the errors above")
    of = {name: over_seeds(each) for name, each in found.items()}
    line: dict[str, Any] = {"num_seeds": min(map(len, found.values())), **compared(of)}
    line["wanted"] = judged(line, AT_LEAST, "at least", at_full_size=not args.quick)
    if args.page:
        made = origin("python benchmarks/prompts.py --page", before, describe_commit())
        write_page(args.page, page(of, found, line, made))
    print(json.dumps(line))


# --- one run ----------------------------------------------------------------------------------------


def run(kept: KeptResults, config: Path, name: str, seed: int, num_steps: int) -> Figures:
    """Return the figures of a setting from the stored result, or from a new run if no result is stored.

    Raises:
        MeasurementFailed: the run failed, timed out, or ended before its last evaluation.
    """
    cell = f"{name}-seed{seed}"
    overrides = [*COMMON, *SETTINGS[name], "--learner.num_steps", str(num_steps), "--run.seed", str(seed)]
    log = kept.folder / f"{cell}.log"
    found = kept.result(cell, lambda folder: measured(train(config, folder, overrides, log=log)))
    steps = steps_until(TARGET, found.pop("accuracies"))
    return {**found, "steps": steps, "tokens": None if steps is None else steps * found["tokens_per_step"]}


def over_seeds(found: Sequence[Figures]) -> Figures:
    """Return means over seeds. If a seed lacks a figure, its mean is None, since a mean of other seeds is biased."""
    return {name: None if any(each[name] is None for each in found) else value for name, value in means(found).items()}


def measured(run: FinishedRun) -> dict[str, Any]:
    """Return the figures of a run to store."""
    num_useful = GROUPS_PER_STEP * sum(1 - row["buffer/uninformative_frac"] for row in run.updates)
    generated = run.summary["generated_tokens"]
    return {
        "uninformative": fmean(row["buffer/uninformative_frac"] for row in run.updates),
        "useful_per_1000": 1000 * num_useful / generated,
        "tokens_per_step": generated / len(run.updates),
        "greedy": run.summary["accuracy_after"],
        "accuracies": accuracies(run),
    }


def accuracies(run: FinishedRun) -> list[tuple[int, float]]:
    """Return the step of every evaluation, and the mean greedy accuracy of this and the two adjacent evaluations."""
    steps, values = zip(*run.evaluations(), strict=True)
    return [(step, fmean(values[max(0, place - 1) : place + 2])) for place, step in enumerate(steps)]


def steps_until(target: float, points: Sequence[tuple[int, float]]) -> float | None:
    """Return the interpolated step at which accuracy first reaches the target, or None if it never does."""
    for (step, accuracy), (later, higher) in pairwise(points):
        if accuracy < target <= higher:
            return step + (later - step) * (target - accuracy) / (higher - accuracy)
    return None


def write_config(folder: Path) -> Path:
    """Write the prompts, and a config with these prompts as its task; return the path of the config."""
    make_model(SUMS)
    chance = random.Random(0)
    sums = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    chance.shuffle(sums)
    apart = dict.fromkeys(each for each in sums if held_out("Calculate {} + {}.".format(*each)))
    known = [each for each in sums if each not in apart][:NUM_SUMS]
    hard = [(chance.randrange(100, 1000), chance.randrange(100, 1000)) for _ in range(NUM_SUMS // 2)]
    for name, pairs in (("train", [*known, *hard]), ("held_out", list(apart)[:NUM_HELD_OUT])):
        (folder / f"{name}.jsonl").write_text("\n".join(_rows(pairs)) + "\n")
    path = folder / "prompts.toml"
    task = f"""\
[task]
type = "file"
path = "{folder / "train.jsonl"}"
heldout_path = "{folder / "held_out.jsonl"}"
rewards = ["exact"]

"""
    path.write_text(re.sub(r"\[task\].*?(?=\[algorithm\])", lambda _: task, SUMS.read_text(), flags=re.DOTALL))
    return path


def _rows(pairs: Sequence[tuple[int, int]]) -> Iterator[str]:
    for a, b in pairs:
        yield json.dumps({"question": f"{a}+{b}=", "answer": str(a + b)})


# --- the page ---------------------------------------------------------------------------------------


def compared(of: Mapping[str, Figures]) -> dict[str, float | None]:
    """Return the ratios to `uniform`."""
    plain = of["uniform"]
    line: dict[str, float | None] = {}
    for name, found in of.items():
        if name != "uniform":
            line[f"useful_per_token_{name}"] = _ratio(found["useful_per_1000"], plain["useful_per_1000"])
            line[f"fewer_steps_{name}"] = _ratio(plain["steps"], found["steps"])
            line[f"fewer_tokens_{name}"] = _ratio(plain["tokens"], found["tokens"])
    return line


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else round(above / below, 3)


def page(
    of: Mapping[str, Figures], each: Mapping[str, Sequence[Figures]], line: Mapping[str, Any], made: str
) -> list[str]:
    """Return the paragraphs of the page from the means over seeds and the figures of each run."""
    rows = [[name, *(number(found[key], form) for key, form in COLUMNS.values())] for name, found in of.items()]
    gains = [
        [
            name,
            *(number(line[f"{what}_{name}"], "{:.2f}") for what in ("useful_per_token", "fewer_steps", "fewer_tokens")),
        ]
        for name in of
        if name != "uniform"
    ]
    steps = "; ".join(
        f"{name} {', '.join(number(run['steps'], '{:.0f}') for run in runs)}" for name, runs in each.items()
    )
    return [
        "# Prompt samplers and refilling",
        f"{made} The runs train the model of `examples/sums.toml` with PPO and a group baseline, with one actor. The "
        f"prompts are {NUM_SUMS} sums that the model has partly learned, and {NUM_SUMS // 2} sums of three digits, "
        f"which the model never answers correctly. A run has {STEPS} steps of {GROUPS_PER_STEP} groups. Figures are "
        f"means over {line['num_seeds']} seeds.",
        table(["setting", *COLUMNS], rows),
        f"The target is {TARGET:g} of {NUM_HELD_OUT} held-out sums answered correctly. A group is useful if its "
        f"rewards are unequal. Steps of each seed, which vary more between seeds than between most settings: {steps}.",
        table(["over `uniform`", "useful groups per generated token", "fewer steps", "fewer generated tokens"], gains),
        bars_table(line["wanted"], "at least"),
        "Refilling fills every step with informative groups, and therefore takes fewer steps. Refilling saves no "
        "tokens, because the groups that a step skips are generated nevertheless. The number of useful groups per "
        "generated token depends only on the prompts. The posterior generates fewer groups of prompts that are always "
        "or never solved, so more groups are useful per token. The saved steps are within the variation between seeds: "
        "on these held-out sums, the prompts chosen by the posterior are hardly better than random prompts.",
    ]


if __name__ == "__main__":
    main()
