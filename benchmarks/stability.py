"""How fast may one learn at which lag? The greatest stable learning rate of every algorithm, by simulated lag.

    python benchmarks/stability.py [--anew] [--workers 2]

A synchronous loop trains the model of examples/sums.toml on samples of the policy of exactly so many updates before
(`stability_parts/loop.py`), every algorithm as it ships and with its protection taken off. Takes about two hours on
two cores. What is finished is kept beside the page, in stability.jsonl, with the commit that it was run at: a call that
was ended goes on from there, and `--anew` forgets it.

Writes docs/results/stability.md; the last line of stdout is {row: {"rate_lagL": ..., "accuracy_lagL": ...}}.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.machine import ROOT, describe_machine
from benchmarks.lib.page import origin
from benchmarks.stability_parts.page import line, page
from benchmarks.stability_parts.search import kept_in, run_all

PAGE = ROOT / "docs" / "results" / "stability.md"


def main() -> None:
    """Run what is missing, and write the page."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anew", action="store_true", help="forget what was measured before")
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    args = parser.parse_args()
    machine = describe_machine()
    kept = PAGE.with_suffix(".jsonl")
    if args.anew:
        kept.unlink(missing_ok=True)
    text = origin("python benchmarks/stability.py", machine, machine["commit"])
    try:
        run_all(kept, args.workers, machine["commit"])
    finally:  # of a call that is ended too: the page has what there is
        results = dict(kept_in(kept))
        PAGE.write_text(page(results, text) + "\n", encoding="utf-8")
    print(json.dumps(line(results)))


if __name__ == "__main__":
    main()
