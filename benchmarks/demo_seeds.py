"""Run the demo with several seeds and measure its start-up time. Prints one JSON line last.

    python benchmarks/demo_seeds.py [--seeds 0 1 2] [--before CHECKOUT]

Writes docs/results/demo.md. CHECKOUT is another checkout, such as a worktree of an earlier commit; its start-up time is
measured for comparison. Measuring cold starts needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib import start_up
from benchmarks.lib.machine import RESULTS, ROOT
from benchmarks.lib.page import table, write_page
from benchmarks.lib.runs import train

NUM_STARTS = 2
"""Number of warm starts per checkout; their median is reported."""
COLUMNS = {
    "seed": "{seed}",
    "greedy before": "{accuracy_before:.3f}",
    "greedy after": "{accuracy_after:.3f}",
    "gain": "{gain:+.3f}",
    "sampled before": "{accuracy_before_sampled:.3f}",
    "sampled after": "{accuracy_after_sampled:.3f}",
    "wall s": "{wall_s:.0f}",
    "trajectories": "{trained_trajectories}",
    "lag mean": "{lag_mean:.2f}",
    "lag max": "{lag_max}",
    "max_lag": "{max_lag}",
    "overlap": "{overlap_frac:.2f}",
    "lag-0 mismatch": "{mismatch_lag0_abs:.1e}",
    "ledger gap": "{ledger_gap}",
}
"""Column of the table -> format string, filled from the summary of a run."""


def main() -> None:
    """Run every seed and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the runs")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="measure the start-up of this checkout too")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        starts = start_ups(Path(folder), parsed.before)
        summaries = [run(Path(folder), seed) for seed in parsed.seeds]
    write_page(RESULTS / "demo.md", [*page(summaries), *start_up.section(starts)])
    keys = ("seed", "accuracy_before", "accuracy_after", "gain", "wall_s", "lag_mean", "lag_max", "overlap_frac")
    print(
        json.dumps(
            {"runs": [{key: summary[key] for key in keys} for summary in summaries], "starts": start_up.figures(starts)}
        )
    )


def start_ups(folder: Path, before: Path | None) -> dict[str, list[dict[str, float]]]:
    """Measure starts by column: warm starts of the checkouts in turn, then cold starts if this user is root."""
    checkouts = {"before": before, "now": ROOT} if before is not None else {"now": ROOT}
    is_root = os.geteuid() == 0
    starts: dict[str, list[dict[str, float]]] = {}
    for number in range(NUM_STARTS):
        for head, checkout in checkouts.items():
            made = start_up.measure(folder / f"warm-{head}-{number}", checkout=checkout)
            starts.setdefault(f"{head}, warm", []).append(made)
    for head, checkout in checkouts.items() if is_root else ():
        starts[f"{head}, cold"] = [start_up.measure(folder / f"cold-{head}", checkout=checkout, cold=True)]
    return starts


def run(folder: Path, seed: int) -> dict[str, Any]:
    """Run one seed and return its summary."""
    summary = train("examples/demo.toml", folder / str(seed), ["--run.seed", str(seed)]).summary
    return {**summary, "seed": seed, "gain": summary["accuracy_after"] - summary["accuracy_before"]}


def page(summaries: list[dict[str, Any]]) -> list[str]:
    """Return the paragraphs of the page."""
    return [
        "# Results of the demo",
        f"Written by `benchmarks/demo_seeds.py` on {os.cpu_count()} cores ({platform.machine()}), no GPU, "
        f"Python {platform.python_version()}. Accuracy is over {summaries[0]['num_heldout']} held-out problems, "
        "split by question hash: no held-out problem is in the training data of the starting model or in a training "
        "prompt. Wall time runs from the start of the command to the end of the last evaluation.",
        table([*COLUMNS], [[form.format(**summary) for form in COLUMNS.values()] for summary in summaries]),
        "Scope of the demo: the starting model was trained on correct answers first, and then on answers that omit the "
        "carry, the borrow and the sign three times out of four (`examples/demo_model/make_checkpoint.py`). Its "
        "answers are well formed, its greedy answers follow the wrong rule, and its samples follow the correct rule in "
        "a minority of cases. The run learns from the verifier which rule is rewarded; it does not learn arithmetic "
        "from scratch. The demo therefore shows that the system learns, not how much it can learn. For that, see "
        "[accuracy_over_lag.md](accuracy_over_lag.md), with a model whose training was ordinary and stopped early.",
    ]


if __name__ == "__main__":
    main()
