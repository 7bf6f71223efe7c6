"""Which prompts teach? Refilling and prompt laws, over the real system. Prints one JSON line last.

    python benchmarks/prompts.py [--seeds 0 1 2] [--work FOLDER] [--page [FILE]] [--quick]

Every run trains the ordinary model of examples/sums.toml with PPO and a baseline of the group, on `NUM_SUMS` sums of
the kind that it has half learned and half as many of three digits, which it never answers right: at least a third of
all groups have equal rewards. Prompts come again several times. Runs differ in these keys alone:

    uniform      buffer.prompt_law = "uniform"
    refill       the same, with buffer.refill_uninformative = 3
    posterior    buffer.prompt_law = "posterior"
    both         posterior, with refilling

    useful_per_token_NAME   groups of unequal rewards that were trained, per generated token, over those of `uniform`
    fewer_steps_NAME        steps until `TARGET` of the held-out sums are answered right, of `uniform` over these
    fewer_tokens_NAME       generated tokens until then, of `uniform` over these

Ratios are of means over seeds. Accuracy is greedy, every `EVAL_EVERY` steps, the mean of three evaluations in a row;
the learning rate is constant. `--work` keeps finished runs: called again, only the missing ones run. `--quick` is for
development: few steps, one seed.
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

from actors.tasks.prompts import held_out
from benchmarks.lib.machine import RESULTS, ROOT, describe_commit, describe_machine, make_model
from benchmarks.lib.page import bars_table, judged, number, origin, parsed, table, write_page
from benchmarks.lib.processes import MeasurementFailed, end_at_sigterm
from benchmarks.lib.rounds import means
from benchmarks.lib.runs import FEW_PROCESSES, FinishedRun, KeptResults, train

NUM_SUMS = 512
NUM_HELD_OUT = 256
STEPS, QUICK_STEPS = 120, 20
EVAL_EVERY = 12
GROUPS_PER_STEP = 32
SUMS = ROOT / "examples" / "sums.toml"
ALIKE = (
    *("--model.path", str(SUMS.with_name("sums_model"))),
    *("--algorithm.type", "off_policy_ppo", "--learner.lr_schedule", "constant"),
    *("--learner.groups_per_step", str(GROUPS_PER_STEP), *FEW_PROCESSES),
    *("--actors.eval_every", str(EVAL_EVERY)),
)
"""What all runs have beside the config."""
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
    "groups of equal rewards in a step": ("uninformative", "{:.2f}"),
    "useful groups per 1,000 generated tokens": ("useful_per_1000", "{:.2f}"),
    "generated tokens a step": ("tokens_per_step", "{:,.0f}"),
    "steps": ("steps", "{:.0f}"),
    "generated tokens until then": ("tokens", "{:,.0f}"),
    "greedy at the end": ("greedy", "{:.3f}"),
}
"""Column -> figure of a run, and how it reads."""

Figures = dict[str, float | None]
"""Of one run, by name; None where it never came so far."""


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, help="keeps finished runs; a new one for new code (default: keeps none)")
    parser.add_argument("--quick", action="store_true", help="few steps and one seed, for development")
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
        sys.exit("a setting has no run that went well, so nothing is compared")
    of = {name: over_seeds(each) for name, each in found.items()}
    line: dict[str, Any] = {"num_seeds": min(map(len, found.values())), **compared(of)}
    line["wanted"] = judged(line, AT_LEAST, "at least", at_full_size=not args.quick)
    if args.page:
        made = origin("python benchmarks/prompts.py --page", before, describe_commit())
        write_page(args.page, page(of, found, line, made))
    print(json.dumps(line))


# --- one run ----------------------------------------------------------------------------------------


def run(kept: KeptResults, config: Path, name: str, seed: int, num_steps: int) -> Figures:
    """The figures of a setting, which is run where it was not before.

    Raises:
        MeasurementFailed: the run failed, took too long, or was ended before its last evaluation.
    """
    cell = f"{name}-seed{seed}"
    overrides = [*ALIKE, *SETTINGS[name], "--learner.num_steps", str(num_steps), "--run.seed", str(seed)]
    log = kept.folder / f"{cell}.log"
    found = kept.result(cell, lambda folder: measured(train(config, folder, overrides, log=log)))
    steps = steps_until(TARGET, found.pop("accuracies"))
    return {**found, "steps": steps, "tokens": None if steps is None else steps * found["tokens_per_step"]}


def over_seeds(found: Sequence[Figures]) -> Figures:
    """Means; none of what a seed has not come to, for those that have would hide it."""
    return {name: None if any(each[name] is None for each in found) else value for name, value in means(found).items()}


def measured(run: FinishedRun) -> dict[str, Any]:
    """What is kept of a run."""
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
    """Step and greedy accuracy of every evaluation, the accuracy averaged with those before and after."""
    steps, values = zip(*run.evaluations(), strict=True)
    return [(step, fmean(values[max(0, place - 1) : place + 2])) for place, step in enumerate(steps)]


def steps_until(target: float, points: Sequence[tuple[int, float]]) -> float | None:
    """Where a line through the points first reaches it."""
    for (step, accuracy), (later, higher) in pairwise(points):
        if accuracy < target <= higher:
            return step + (later - step) * (target - accuracy) / (higher - accuracy)
    return None


def write_config(folder: Path) -> Path:
    """Write prompts, and the config of the model with them in the place of its task."""
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


# --- what people read -------------------------------------------------------------------------------


def compared(of: Mapping[str, Figures]) -> dict[str, float | None]:
    """The ratios to `uniform`."""
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
    """The paragraphs of the page, of means and of what they are of."""
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
        "# Which prompts teach, measured",
        f"{made} PPO with a baseline of the group on {NUM_SUMS} sums that the ordinary model of `examples/sums.toml` "
        f"has half learned, and {NUM_SUMS // 2} of three digits, which it never answers right; {STEPS} steps of "
        f"{GROUPS_PER_STEP} groups, one actor. Means over {line['num_seeds']} seeds.",
        table(["setting", *COLUMNS], rows),
        f"Steps, and tokens, until {TARGET:g} of {NUM_HELD_OUT} held-out sums are answered right. A group is useful "
        f"that has unequal rewards. Steps of each seed, which differ by more than most settings do: {steps}.",
        table(["over `uniform`", "useful groups per generated token", "fewer steps", "fewer generated tokens"], gains),
        bars_table(line["wanted"], "at least"),
        "What refilling can and cannot: it makes every step as large as it seems, and so takes fewer of them. It "
        "saves no tokens: the groups that it sets aside were generated, as they were without it, so useful groups "
        "per generated token stay what the prompts give. The posterior generates less of what is always or never "
        "solved: more groups are useful for their tokens. It takes no fewer steps than the seeds differ by: to the "
        "held-out sums that are asked here its choice of prompts is worth little more than chance.",
    ]


if __name__ == "__main__":
    main()
