"""Measure the gain of fused policy and critic passes over sequential passes. Prints one JSON line last.

    python benchmarks/fusion.py [--quick] [--page [FILE]]

In fused passes, the pipelines of policy and critic run at the same time in opposite directions.

    sleeping  passes of both networks on stages that sleep, so that only schedule and communication take time:
              sequential with 1F1B, sequential with zero bubble, and fused, for each bound on held micro-batches
    real      a step of PPO with a critic model on two stages with one core each

The compared variants take turns, and gains are medians over rounds. The bound of a gain is the gain of the schedule
without communication cost. `--quick` is for development; its figures are meaningless. `--page` writes
docs/results/fusion.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.learner_parts.spot import Figures, run_measurement
from benchmarks.lib.machine import RESULTS, describe_machine
from benchmarks.lib.page import bars_table, judged, origin, parsed, table, write_page
from benchmarks.lib.processes import MeasurementFailed, end_at_sigterm

from leeway.learner.config import default_most_held

PAGE = RESULTS / "fusion.md"
SHAPES = ((2, 8), (4, 4), (4, 8))
"""Pairs of the number of stages and the number of micro-batches."""
MUCH = 2.25
"""Bound on held micro-batches at which targets apply, over the number of stages; 1F1B of one network has 1."""
BARS = {"p4_m8": 1.24, "p4_m4": 1.48, "p2_m8": 1.08, "forward_pair": 1.17, "over_zero_bubble": 1.0, "real_ppo": 1.05}


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run fewer and shorter rounds, for development")
    args = parsed(parser, PAGE)
    end_at_sigterm()
    machine = describe_machine()
    try:
        shapes = {f"p{stages}_m{batches}": measure(stages, batches, args.quick) for stages, batches in SHAPES}
        result = {"quick": args.quick, **compared(shapes)}
        result |= run_measurement("fused:real", {"quick": args.quick}, worlds=(2,))
    except MeasurementFailed as error:
        sys.exit(f"benchmarks/fusion.py: {error}")
    result |= {"machine": machine, "wanted": judged(result, BARS, "at least", at_full_size=not args.quick)}
    if args.page:
        write_page(args.page, page(result))
    print(json.dumps(result))


def measure(num_stages: int, num_micro_batches: int, quick: bool) -> Figures:
    """Measure sleeping stages with each bound on held micro-batches, from two to more than schedules use."""
    helds = sorted({*range(2, default_most_held(num_stages) + 2), int(MUCH * num_stages)})
    options = {"num_micro_batches": num_micro_batches, "helds": helds, "quick": quick}
    return run_measurement("fused:sleeping", options, worlds=(num_stages,))


def compared(shapes: dict[str, Figures]) -> Figures:
    """Return the figures of the JSON line."""
    found: Figures = {"shapes": shapes, "forward_pair": shapes["p4_m8"]["forward_pair"]}
    over_zero_bubble = []
    for name, shape in shapes.items():
        *_, most = shape["by_held"].values()
        found[name] = most["gain"]
        over_zero_bubble.append(shape["zero_bubble_s"] / most["seconds"])
    return found | {"over_zero_bubble": min(over_zero_bubble)}


def page(result: Figures) -> list[str]:
    """Return the paragraphs of the page."""
    machine = result["machine"]
    head = (
        f"{origin('python benchmarks/fusion.py --page', machine, machine['commit'])} The benchmark runs the passes of "
        "the learner over gloo. The benchmark compares sequential 1F1B passes of policy and critic model with "
        "`learner.schedule = 'fused'`, in which the critic's pipeline runs in the opposite direction. The two variants "
        "take turns, and figures are medians over rounds."
    )
    real = (
        f"A full step of PPO with a critic model of the policy's size, {result['real_micro_batches']} micro-batches, "
        f"two stages on one core each: {result['real_1f1b_s']:.2f} s with 1F1B, {result['real_fused_s']:.2f} s fused."
    )
    sleeping = (
        "If stages sleep instead of computing, only schedule and communication take time. A forward pass takes one "
        "unit, a backward pass two units. `held at most` is the bound on the micro-batches of both networks that a "
        "stage holds at once; `held` is the largest number that a stage held. The gain is over 1F1B; `possible` is the "
        "gain that the schedule allows without communication time."
    )
    forward = (
        f"Forward passes on 4 stages with 8 micro-batches gain {result['forward_pair']:.3f}. The maximum is "
        "19 / 18 = 1.056. Sequential passes already overlap, because a rank that has finished the first pass starts "
        "the second pass. Sequential passes therefore take 2 M + P - 1 = 19 units instead of 2 (M + P - 1) = 22. Fused "
        "passes take 18 units."
    )
    rows = []
    for name, shape in result["shapes"].items():
        stages, batches = name.removeprefix("p").split("_m")
        for allowed, one in shape["by_held"].items():
            over = shape["zero_bubble_s"] / one["seconds"]
            figures = (f"{one['gain']:.3f}", f"{one['bound']:.3f}", f"{over:.3f}")
            rows.append([stages, batches, allowed, str(one["held"]), *figures])
    columns = ["stages", "micro-batches", "held at most", "held", "gain", "possible", "over zero bubble"]
    return [
        "# Fused policy and critic passes",
        head,
        bars_table(result["wanted"], "at least"),
        real,
        sleeping,
        table(columns, rows),
        forward,
    ]


if __name__ == "__main__":
    main()
