"""What `leeway plan` foretells and chooses, against what runs do. Prints one JSON line last.

    python benchmarks/plan.py [--parts errors choices search] [--only N ...] [--after FILE ...] [--keep FOLDER]
                              [--page [FILE]]

    errors    a profile of two configs with vLLM, what it says of eight others, and what these do, in three rounds
    choices   twelve small spaces, three of them with vLLM: the plan chosen, and every plan of the space, run
    search    chains against enumeration on 100 made-up settings

`--only` takes some of the spaces, counted from 1. All of it takes two hours; `--after` adds what earlier calls
on this machine printed. `--page` writes docs/results/plan.md and the figure beside it, of all parts and spaces.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.fleet import CALIBRATION
from benchmarks.fleet import run as run_fleet
from benchmarks.lib.figure import drawn
from benchmarks.lib.machine import RESULTS, describe_machine
from benchmarks.lib.page import bars_table, judged, origin, table, write_page
from benchmarks.lib.processes import MeasurementFailed, end_at_sigterm
from benchmarks.plan_parts.choices import CHOICES, Choice, chosen
from benchmarks.plan_parts.predictions import PREDICTED, compared, errors, run_all
from benchmarks.plan_parts.searches import LIMIT_S, searched
from launch.config import load_config
from launch.run_folder import RunFolder
from planning.profiling import costs_of

PAGE = RESULTS / "plan.md"
CONFIG = Path(__file__).resolve().parent.parent / "examples" / "demo.toml"
PARTS = ("errors", "choices", "search")
AT_MOST = {
    "error_median": 0.05,
    "error_worst": 0.10,
    "enumerated_over_metropolis_worst": 1.01,
    "metropolis_s_worst": LIMIT_S,
    "plan_s_worst": 15.0,
}
AT_LEAST = {"plan_over_best_measured": 0.95, "plan_over_default": 1.25}

Figures = dict[str, Any]


def main() -> None:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="of the spaces, counted from 1")
    parser.add_argument("--after", type=Path, nargs="+", default=[], metavar="FILE", help="what other calls printed")
    parser.add_argument("--keep", type=Path, help="keeps the folders of the runs (default: keeps none)")
    parser.add_argument(
        "--page", type=Path, nargs="?", const=PAGE, metavar="FILE", help="write it; by default to docs/results/"
    )
    args = parser.parse_args()
    machine = describe_machine()
    rows: Figures = {part: {} for part in PARTS}
    for path in args.after:
        earlier = json.loads(path.read_text().splitlines()[-1])
        if earlier["machine"]["processor"] != machine["processor"]:
            parser.error(f"{path} is of another machine ({earlier['machine']['processor']})")
        for part in PARTS:
            rows[part] |= earlier["rows"][part]
    wanted = [CHOICES[number - 1] for number in args.only] if args.only else list(CHOICES)
    will_have = {*rows["choices"], *(choice.name for choice in wanted if "choices" in args.parts)}
    is_whole = len(will_have) == len(CHOICES) and all(rows[part] or part in args.parts for part in PARTS)
    if args.page and not is_whole:
        parser.error("a page has all parts and spaces; leave --parts and --only out, or say --after")
    end_at_sigterm()
    with tempfile.TemporaryDirectory(prefix="benchmark-plan-") as fresh:
        folder = (args.keep or Path(fresh)).resolve()
        try:
            measure(folder, args.parts, wanted, rows)
        except MeasurementFailed as error:
            sys.exit(f"benchmarks/plan.py: {error}")
    result = {**figures_of(rows), "rows": rows, "machine": machine}
    result["wanted_at_most"] = judged(result, AT_MOST, "at most", at_full_size=is_whole)
    result["wanted_at_least"] = judged(result, AT_LEAST, "at least", at_full_size=is_whole)
    if args.page:
        draw(args.page.with_suffix(".svg"), [*rows["errors"].values()])
        write_page(args.page, page(result))
    print(json.dumps(result))


def measure(folder: Path, parts: Sequence[str], spaces: Sequence[Choice], rows: Figures) -> None:
    """These parts, into `rows`: part -> name -> figures.

    Raises:
        MeasurementFailed: a run did not end well.
    """

    def found(part: str, name: str, figures: Figures) -> None:
        rows[part][name] = figures
        print(json.dumps(figures), file=sys.stderr, flush=True)

    if "search" in parts:
        found("search", "all", searched(load_config(CONFIG, [])))
    profile = None
    if "errors" in parts or any(space.setting is None for space in spaces if "choices" in parts):
        runs = run_all(folder, PREDICTED if "errors" in parts else ())
        profile = runs.profile
        print(profile.describe(), file=sys.stderr, flush=True)
        for case in runs.figures:
            found("errors", case.name, compared(folder, case, runs))
    if "choices" in parts:
        costs = costs_of([RunFolder(run_fleet(folder, CALIBRATION).folder)])
        for space in spaces:
            found("choices", space.name, chosen(folder, space, costs, profile))


def figures_of(rows: Figures) -> Figures:
    """Over all rows of each part that there are."""
    choices = [*rows["choices"].values()]
    found: Figures = {}
    if rows["errors"]:
        found |= errors([*rows["errors"].values()])
    if choices:
        found |= {
            "plan_over_best_measured": min(each["plan_over_best"] for each in choices),
            "plan_over_default": fmean(each["plan_over_default"] for each in choices),
            "plan_s_worst": max(each["plan_s"] for each in choices),
        }
    return {**found, **rows["search"].get("all", {})}


def page(result: Figures) -> list[str]:
    """The paragraphs of the page."""
    origin_ = origin("python benchmarks/plan.py --page", result["machine"], result["machine"]["commit"])
    head = (
        f"{origin_} Errors are of trained samples per second: real runs with vLLM on the model and the cores of "
        "[overlap.md](overlap.md), predicted by a profile of two configs that are not among the eight below. All ten "
        "are run in turn, three times; a rate is the median, with the least and the greatest beside it. A space of "
        "choices is what some keys may be; every plan of it was run, with sleeping engines and a sleeping learner "
        "([fleet.md](fleet.md)) or with vLLM, three times too. Chains and enumeration search "
        f"{result['instances']} made-up settings of {result['plans_of_an_instance']:,} plans."
    )
    predictions = [
        [row["case"], row["binds"], f"{row['measured']:.1f} ({row['least']:.1f} to {row['most']:.1f})",
         f"{row['predicted']:.1f}", f"{100 * row['error']:+.1f} %", f"{row['step_s']:.2f}",
         f"{row['predicted_step_s']:.2f}"]
        for row in result["rows"]["errors"].values()
    ]  # fmt: skip
    choices = [
        [row["choice"], row["config"], row["plan"], row["best"], f"{row['plan_over_best']:.3f}",
         f"{row['plan_over_default']:.2f}", f"{len(row['rates'])}", f"{row['plan_s']:.1f}"]
        for row in result["rows"]["choices"].values()
    ]  # fmt: skip
    return [
        "# Plans, predicted and measured",
        head,
        bars_table(result["wanted_at_most"], "at most"),
        bars_table(result["wanted_at_least"], "at least"),
        "## Predictions",
        table(["config", "binds", "samples/s", "predicted", "error", "step, s", "predicted"], predictions),
        "![predicted against measured](plan.svg)",
        "## Choices",
        table(["space", "config", "plan", "best", "plan over best", "over config", "plans", "seconds"], choices),
    ]


def draw(path: Path, rows: Sequence[Figures]) -> None:
    """Predicted against measured."""
    measured, predicted = [row["measured"] for row in rows], [row["predicted"] for row in rows]
    most = 1.1 * max(*measured, *predicted)
    with drawn(path, 4.2, 4.0, font_size=9) as figure:
        axes = figure.add_subplot()
        axes.fill_between([0, most], [0, 0.9 * most], [0, 1.1 * most], alpha=0.15, label="within 10 %")
        axes.plot([0, most], [0, most], linewidth=0.8)
        axes.scatter(measured, predicted, s=18, zorder=3)
        axes.set(xlabel="measured, samples/s", ylabel="predicted, samples/s", xlim=(0, most), ylim=(0, most))
        axes.legend(frameon=False)


if __name__ == "__main__":
    main()
