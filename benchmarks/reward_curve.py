"""Train from a config and write the reward curve to docs/results/NAME.md; prints one JSON line last.

python benchmarks/reward_curve.py examples/smollm2.toml [--section.key VALUE ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
RUN_TIMEOUT_S = 7200
NUM_ROWS = 20
SAMPLE_EVERY_S = 5.0


def main() -> None:
    """Run and write the page."""
    config, overrides = Path(sys.argv[1]), sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "launch.cli", "train", str(config), "--run.dir", folder, "--run.name", "run"]
        process = subprocess.Popen([*command, *overrides], cwd=ROOT)
        peak_gib = watch_memory(process)
        if process.returncode:
            sys.exit(f"{config} ended with status {process.returncode}")
        run = Path(folder) / "run"
        lines = (run / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if "loss" in row]
        summary = json.loads((run / "summary.json").read_text())
    result = ROOT / "docs" / "results" / f"{config.stem}.md"
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(page(config, overrides, rows, summary, peak_gib), encoding="utf-8")
    print(json.dumps({"peak_gib": round(peak_gib, 2), "num_steps": len(rows), **summary}))


def watch_memory(process: subprocess.Popen[bytes]) -> float:
    """The greatest proportional set size of the run's processes together, in GiB."""
    deadline = time.monotonic() + RUN_TIMEOUT_S
    peak = 0
    while process.poll() is None:
        if time.monotonic() > deadline:
            process.terminate()
            sys.exit(f"the run took longer than {RUN_TIMEOUT_S} s")
        peak = max(peak, family_bytes(process.pid))
        time.sleep(SAMPLE_EVERY_S)
    return peak / 2**30


def family_bytes(pid: int) -> int:
    """Memory of a process and its descendants; pages that they share count once."""
    total = 0
    try:
        parent = psutil.Process(pid)
        for member in [parent, *parent.children(recursive=True)]:
            total += member.memory_full_info().pss
    except psutil.Error:
        return total  # a process ended while it was looked at
    return total


def page(
    config: Path, overrides: list[str], rows: list[dict[str, Any]], summary: dict[str, Any], peak_gib: float
) -> str:
    """The page of results: means over equal stretches of steps."""
    stretch = max(1, -(-len(rows) // NUM_ROWS))
    table = ["| steps | reward | lag mean | lag max | lag-0 mismatch | tokens per completion | seconds per step |"]
    table.append("|---|---|---|---|---|---|---|")
    for first in range(0, len(rows), stretch):
        part = rows[first : first + stretch]
        fresh = [row["mismatch/lag0_abs"] for row in part if row["mismatch/lag0_abs"] is not None]
        cells = [
            f"{part[0]['step']}-{part[-1]['step']}",
            f"{mean(row['reward/mean'] for row in part):.3f}",
            f"{mean(row['lag/token_mean'] for row in part):.2f}",
            f"{max(row['lag/token_max'] for row in part):.0f}",
            f"{mean(fresh):.1e}" if fresh else "-",
            f"{mean(row['length/trained_mean'] for row in part):.1f}",
            f"{mean(row['time/step'] + row['time/wait_for_batch'] for row in part):.1f}",
        ]
        table.append("| " + " | ".join(cells) + " |")
    facts = ("accuracy_before", "accuracy_after", "num_heldout", "wall_s", "lag_mean", "overlap_frac", "ledger_gap")
    return "\n".join(
        [
            f"# {config.stem}, measured",
            "",
            f"Written by `benchmarks/reward_curve.py {config} {' '.join(overrides)}`. "
            f"Peak memory of all processes together: {peak_gib:.1f} GiB (proportional set size).",
            "",
            *table,
            "",
            *[f"- {name}: {summary[name]}" for name in facts],
            "",
        ]
    )


def mean(values: Any) -> float:  # noqa: ANN401 -- any iterable of numbers
    """Arithmetic mean of at least one value."""
    numbers = list(values)
    return float(sum(numbers) / len(numbers))


if __name__ == "__main__":
    main()
