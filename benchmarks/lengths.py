"""Measure the accuracy of predicted completion lengths. Prints one JSON line last.

    python benchmarks/lengths.py [--quick] [--only history features costs smollm2] [--page [FILE]]

Recall is the fraction of the longest fifth of groups that is in the fifth with the longest predictions.

    history     repeated prompts that explain 65 % of the variance: recall after two epochs, over the recall of a
                predictor with each prompt's true mean (Bayes) and over the recall of the exact posterior
    features    unseen prompts of 16 classes that are encoded in their tokens: recall over the recall of Bayes
    costs       seconds to predict a million prompts, microseconds to choose a prompt for a lease
    smollm2     recall on unseen prompts of SmolLM2-135M with real vLLM, on four tasks of reasoning-gym

The length of a group of 8 is the sum over its samples. `covered` is the fraction of groups whose longest sample was at
most as long as predicted; its ideal value is 0.9. `--quick` is for development; `--page` writes
docs/results/lengths.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lengths_parts.made_up import costs, features, history
from benchmarks.lengths_parts.tasks import smollm2_tasks
from benchmarks.lib.machine import RESULTS, describe_machine
from benchmarks.lib.page import bars_table, judged, origin, table, write_page

PAGE = RESULTS / "lengths.md"
PARTS = ("history", "features", "costs", "smollm2")
NUM_PROMPTS = 640
AT_LEAST = {"recall_over_bayes_history": 0.97, "recall_over_bayes_features": 0.95, "smollm2_recall": 0.6,
            "smollm2_over_simpler": 1.01}  # fmt: skip
AT_MOST = {"million_s": 30.0, "choice_us": 5.0, "covered_off": 0.03}

Figures = dict[str, Any]


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="use few prompts of SmolLM2, for development")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="run only these parts")
    parser.add_argument(
        "--page", type=Path, nargs="?", const=PAGE, metavar="FILE", help="write the page (default: in docs/results/)"
    )
    args = parser.parse_args()
    if args.page and (args.quick or args.only):
        parser.error("--page needs all parts at full size: omit --quick and --only, or omit --page")
    machine = describe_machine()
    result: Figures = {"quick": args.quick}
    for part, measure in (("history", history), ("features", features), ("costs", costs)):
        if part in (args.only or PARTS):
            result |= measure()
    if "smollm2" in (args.only or PARTS):
        with tempfile.TemporaryDirectory(prefix="benchmark-lengths-") as folder:
            result |= smollm2_tasks(40 if args.quick else NUM_PROMPTS, Path(folder))
        result["smollm2_over_simpler"] = result["smollm2_recall"] / max(
            result["recall_by_task"], result["recall_by_prompt_length"]
        )
    covered = [value for key, value in result.items() if key.endswith("_covered") and value is not None]
    result["covered_off"] = max((abs(each - 0.9) for each in covered), default=0.0)
    result["machine"] = machine
    is_full = not args.quick and not args.only
    result["wanted_at_least"] = judged(result, AT_LEAST, "at least", at_full_size=is_full)
    result["wanted_at_most"] = judged(result, AT_MOST, "at most", at_full_size=is_full)
    if args.page:
        write_page(args.page, page(result))
    print(json.dumps(result))


def page(result: Figures) -> list[str]:
    """Return the paragraphs of the page."""
    command = "python benchmarks/lengths.py --page"
    head = (
        f"{origin(command, result['machine'], result['machine']['commit'])} Recall is the fraction of the longest "
        "fifth of groups of 8 that is in the fifth predicted to be longest; the length of a group is the sum over its "
        "samples. Covered is the fraction of groups whose longest sample was at most as long as predicted; 0.9 is "
        "ideal."
    )
    epochs = [
        [str(number), *(f"{result[f'epochs_{number}'][key]:.3f}" for key in
                        ("recall", "recall_of_posterior", "recall_of_bayes", "covered"))]
        for number in (1, 2)
    ]  # fmt: skip
    real = [
        ["prompt tokens", f"{result['smollm2_recall']:.3f}"],
        ["mean of the task", f"{result['recall_by_task']:.3f}"],
        ["prompt length", f"{result['recall_by_prompt_length']:.3f}"],
        ["chance", f"{result['by_chance']:.3f}"],
    ]
    return [
        "# Predicted completion lengths",
        head,
        bars_table(result["wanted_at_least"], "at least"),
        bars_table(result["wanted_at_most"], "at most"),
        "## Repeated prompts",
        "There are 4,000 prompts, which explain 65 % of the variance of the logarithm of a length. The posterior uses "
        "the true distribution and the generated groups, so it ranks prompts by their mean log length. Bayes uses the "
        "true mean of each prompt.",
        table(["epochs", "recall", "recall of posterior", "recall of Bayes", "covered"], epochs),
        "## Unseen prompts",
        f"Prompts belong to 16 classes, which two of their tokens encode. After one group of each of 2,000 other "
        f"prompts, recall is {result['features_recall']:.3f}, recall of Bayes "
        f"{result['features_recall_of_bayes']:.3f}, and covered {result['features_covered']:.3f}.",
        "SmolLM2-135M-Instruct generates completions of up to 128 tokens on four tasks of reasoning-gym. Completions "
        f"have {result['mean_tokens']:.0f} tokens on average, and {result['cut']:.0%} of them are truncated. "
        f"{result['num_prompts'] // 2} prompts, each seen once, predict an equal number of unseen prompts. For "
        f"{result['num_shorter']} groups the prediction is below 128 tokens; covered for these groups: "
        f"{result['smollm2_covered'] or 'none to measure'}.",
        table(["ranked by", "recall"], real),
    ]


if __name__ == "__main__":
    main()
