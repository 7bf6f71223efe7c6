"""How well the lengths of answers are foretold. Prints one JSON line last.

    python benchmarks/lengths.py [--quick] [--only history features costs smollm2] [--page [FILE]]

    history     prompts that come again, 65 % of the variance theirs: recall of the longest fifth after two epochs, over
                that of whoever knows each prompt's own part (Bayes), and of whoever knows the law and saw the same
    features    prompts that were never seen, of 16 classes that their tokens tell, over Bayes
    costs       seconds to foretell a million prompts, microseconds to choose a prompt for a lease
    smollm2     SmolLM2-135M on four tasks of reasoning-gym, real vLLM: prompts that were never seen

A group of 8 is as long as its samples together. `covered` is the share of groups whose longest sample was no longer
than foretold, where 0.9 is right. `--quick` is for development; `--page` writes docs/results/lengths.md.
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
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few real prompts, for development")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="some parts")
    parser.add_argument(
        "--page", type=Path, nargs="?", const=PAGE, metavar="FILE", help="write it; by default to docs/results/"
    )
    args = parser.parse_args()
    if args.page and (args.quick or args.only):
        parser.error("a page has all parts at full size; leave --quick and --only out, or --page")
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
    """The paragraphs of the page."""
    command = "python benchmarks/lengths.py --page"
    head = (
        f"{origin(command, result['machine'], result['machine']['commit'])} Recall is the share of the longest fifth "
        "of groups of 8 that is among the fifth that was foretold to be longest; a group is as long as its samples "
        "together. Covered is the share of groups whose longest sample was no longer than foretold: 0.9 is right."
    )
    epochs = [
        [str(number), *(f"{result[f'epochs_{number}'][key]:.3f}" for key in
                        ("recall", "recall_of_posterior", "recall_of_bayes", "covered"))]
        for number in (1, 2)
    ]  # fmt: skip
    real = [
        ["their tokens", f"{result['smollm2_recall']:.3f}"],
        ["their task's mean", f"{result['recall_by_task']:.3f}"],
        ["their own length", f"{result['recall_by_prompt_length']:.3f}"],
        ["chance", f"{result['by_chance']:.3f}"],
    ]
    return [
        "# Lengths foretold",
        head,
        bars_table(result["wanted_at_least"], "at least"),
        bars_table(result["wanted_at_most"], "at most"),
        "## Prompts that come again",
        "4,000 prompts; 65 % of the variance of the logarithm of a length is the prompt's. Whoever knows the law but "
        "not the prompts, and saw the same groups, ranks by their means; Bayes knows what is each prompt's own.",
        table(["epochs", "recall", "of who knows the law", "of Bayes", "covered"], epochs),
        "## Prompts that were never seen",
        f"Of 16 classes told by two tokens among others, after one group of each of 2,000 others: recall "
        f"{result['features_recall']:.3f}, of Bayes {result['features_recall_of_bayes']:.3f}, covered "
        f"{result['features_covered']:.3f}.",
        f"SmolLM2-135M-Instruct on four tasks of reasoning-gym, answers of up to 128 tokens, "
        f"{result['mean_tokens']:.0f} on average, {result['cut']:.0%} of them cut; {result['num_prompts'] // 2} "
        f"prompts that were seen once foretell as many others. Of {result['num_shorter']} groups less than 128 tokens "
        f"were foretold; covered, of these: {result['smollm2_covered'] or 'none to measure'}.",
        table(["ranked by", "recall"], real),
    ]


if __name__ == "__main__":
    main()
