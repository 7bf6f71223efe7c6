"""Train a config and write the reward curve to docs/results/NAME.md. Prints one JSON line last.

    python benchmarks/reward_curve.py [CONFIG] [--section.key VALUE ...]

CONFIG defaults to examples/smollm2.toml.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.machine import RESULTS
from benchmarks.lib.page import table, write_page
from benchmarks.lib.runs import Row, train

RUN_LIMIT_S = 7200.0
NUM_ROWS = 20
SAMPLE_EVERY_S = 5.0
HEAD = ["steps", "reward", "lag mean", "lag max", "lag-0 mismatch", "tokens per completion", "seconds per step"]
FACTS = ("accuracy_before", "accuracy_after", "num_heldout", "wall_s", "lag_mean", "overlap_frac", "ledger_gap")


def main() -> None:
    """Run the config, write the page and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config", type=Path, nargs="?", default=Path("examples/smollm2.toml"), metavar="CONFIG")
    args, overrides = parser.parse_known_args()
    config: Path = args.config
    memory = Memory()
    with tempfile.TemporaryDirectory() as folder:
        run = train(config, Path(folder) / "run", overrides, limit_s=RUN_LIMIT_S, look=memory.look)
        rows, summary = run.steps, run.summary
    write_page(RESULTS / f"{config.stem}.md", page(config, overrides, rows, summary, memory.peak_gib))
    print(json.dumps({"peak_gib": round(memory.peak_gib, 2), "num_steps": len(rows), **summary}))


class Memory:
    """Peak of the total proportional set size of the processes of a run, which counts shared pages once."""

    def __init__(self) -> None:
        self.peak_gib = 0.0
        self._next_s = 0.0

    def look(self, folder: Path) -> None:
        """Measure the current total, if the last measurement is old enough."""
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + SAMPLE_EVERY_S
            self.peak_gib = max(self.peak_gib, self._present_gib())

    @staticmethod
    def _present_gib() -> float:
        total = 0
        for member in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # the process may exit during the measurement
                total += member.memory_full_info().pss
        return total / 2**30


def page(
    config: Path,
    overrides: list[str],
    rows: Sequence[Row],
    summary: Mapping[str, Any],
    peak_gib: float,
) -> list[str]:
    """Return the paragraphs of the page, with means over equally long intervals of steps."""
    stretch = max(1, -(-len(rows) // NUM_ROWS))
    return [
        f"# Results of {config.stem}",
        f"Written by `benchmarks/reward_curve.py {config} {' '.join(overrides)}`. "
        f"Peak total memory of all processes: {peak_gib:.1f} GiB (proportional set size).",
        table(HEAD, [_cells(rows[first : first + stretch]) for first in range(0, len(rows), stretch)]),
        "\n".join(f"- {name}: {summary[name]}" for name in FACTS),
    ]


def _cells(part: Sequence[Row]) -> list[str]:
    fresh = [row["mismatch/lag0_abs"] for row in part if row["mismatch/lag0_abs"] is not None]
    return [
        f"{part[0]['step']}-{part[-1]['step']}",
        f"{fmean(row['reward/mean'] for row in part):.3f}",
        f"{fmean(row['lag/token_mean'] for row in part):.2f}",
        f"{max(row['lag/token_max'] for row in part):.0f}",
        f"{fmean(fresh):.1e}" if fresh else "-",
        f"{fmean(row['length/trained_mean'] for row in part):.1f}",
        f"{fmean(row['time/step'] + row['time/wait_for_batch'] for row in part):.1f}",
    ]


if __name__ == "__main__":
    main()
