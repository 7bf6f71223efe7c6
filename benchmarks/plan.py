"""Compare predictions and choices of `leeway plan` with measured runs. Prints one JSON line last.

    python benchmarks/plan.py [--parts errors choices search] [--only N ...] [--after FILE ...] [--keep FOLDER]
                              [--page [FILE]]

    errors    predicted and measured rates of eight configs with vLLM, in three rounds. The predictions come from a
              profile of three other configs.
    choices   the chosen plan in twelve small spaces, compared with measurements of every plan. Three spaces have vLLM.
    search    steepest ascent, compared with enumeration on 100 synthetic settings

`--only` selects spaces, numbered from 1. A full run takes two hours; `--after` adds the output of earlier calls on this
machine. `--page` writes docs/results/plan.md with its figure; it needs all parts and spaces.
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

from leeway.launch.config import load_config
from leeway.launch.run_folder import RunFolder
from leeway.planning.profiling import costs_of

PAGE = RESULTS / "plan.md"
CONFIG = Path(__file__).resolve().parent.parent / "examples" / "demo.toml"
PARTS = ("errors", "choices", "search")
AT_MOST = {
    "error_median": 0.05,
    "error_worst": 0.10,
    "enumerated_over_ascent_worst": 1.01,
    "ascent_s_worst": LIMIT_S,
    "plan_s_worst": 15.0,
}
AT_LEAST = {"plan_over_best_measured": 0.95, "plan_over_default": 1.25}

Figures = dict[str, Any]


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (default: all)")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="run only these spaces, numbered from 1")
    parser.add_argument("--after", type=Path, nargs="+", default=[], metavar="FILE", help="outputs of earlier calls")
    parser.add_argument("--keep", type=Path, help="keep the run folders in this folder (default: remove them)")
    parser.add_argument(
        "--page", type=Path, nargs="?", const=PAGE, metavar="FILE", help="write the page (default: in docs/results/)"
    )
    args = parser.parse_args()
    machine = describe_machine()
    rows: Figures = {part: {} for part in PARTS}
    for path in args.after:
        earlier = json.loads(path.read_text().splitlines()[-1])
        if earlier["machine"]["processor"] != machine["processor"]:
            parser.error(f"{path} was measured on another machine ({earlier['machine']['processor']})")
        for part in PARTS:
            rows[part] |= earlier["rows"][part]
    spaces = [CHOICES[number - 1] for number in args.only] if args.only else list(CHOICES)
    will_have = {*rows["choices"], *(choice.name for choice in spaces if "choices" in args.parts)}
    is_whole = len(will_have) == len(CHOICES) and all(rows[part] or part in args.parts for part in PARTS)
    if args.page and not is_whole:
        parser.error("--page needs all parts and spaces: omit --parts and --only, or add the rest with --after")
    end_at_sigterm()
    with tempfile.TemporaryDirectory(prefix="benchmark-plan-") as fresh:
        folder = (args.keep or Path(fresh)).resolve()
        try:
            measure(folder, args.parts, spaces, rows)
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
    """Measure parts, and store their figures in `rows`, as part -> name -> figures.

    Raises:
        MeasurementFailed: a run failed.
    """

    def store(part: str, name: str, figures: Figures) -> None:
        rows[part][name] = figures
        print(json.dumps(figures), file=sys.stderr, flush=True)

    if "search" in parts:
        store("search", "all", searched(load_config(CONFIG, [])))
    profile = None
    if "errors" in parts or any(space.setting is None for space in spaces if "choices" in parts):
        runs = run_all(folder, PREDICTED if "errors" in parts else ())
        profile = runs.profile
        print(profile.describe(), file=sys.stderr, flush=True)
        for case in runs.figures:
            store("errors", case.name, compared(folder, case, runs))
    if "choices" in parts:
        costs = costs_of([RunFolder(run_fleet(folder, CALIBRATION).folder)])
        for space in spaces:
            store("choices", space.name, chosen(folder, space, costs, profile))


def figures_of(rows: Figures) -> Figures:
    """Return the figures over all rows of the measured parts."""
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
    """Return the paragraphs of the page."""
    origin_ = origin("python benchmarks/plan.py --page", result["machine"], result["machine"]["commit"])
    head = (
        f"{origin_} Errors compare predicted and measured trained samples per second. The runs use vLLM, and "
        "model and cores of [overlap.md](overlap.md). The predictions come from a profile of three configs that are "
        "not among the eight below. All eleven configs run in turn, three times. A rate is the median, with the range "
        "in brackets. A space is the set of permitted values of some keys. Every plan of a space was run once "
        "with engines and a learner that sleep ([fleet.md](fleet.md)), or three times with vLLM. Ascent and "
        f"enumeration search {result['instances']} synthetic settings of {result['plans_of_an_instance']:,} plans."
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
        "# Predicted and measured plans",
        head,
        bars_table(result["wanted_at_most"], "at most"),
        bars_table(result["wanted_at_least"], "at least"),
        "## Predictions",
        table(["config", "bottleneck", "samples/s", "predicted", "error", "step, s", "predicted"], predictions),
        "![predicted and measured rates](plan.svg)",
        "## Choices",
        table(["space", "config", "plan", "best", "plan over best", "over config", "plans", "seconds"], choices),
    ]


def draw(path: Path, rows: Sequence[Figures]) -> None:
    """Plot predicted over measured rates."""
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
