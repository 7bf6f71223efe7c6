"""How much faster is the demo when actors need not wait? Prints one JSON line last.

Runs the demo twice, one after the other on the same machine: synchronous (max_lag = 0) and asynchronous
(its own max_lag). Compares samples trained per second between the first and the last step, so that
starting and evaluating do not count. Both runs share the cores with everything else they start, so on
two cores generation and training compete: the ratio says what a user of this machine gains, not what
the method can gain where actors have machines of their own.

    python benchmarks/async_over_sync.py [--num-steps 60]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN_TIMEOUT_S = 900


def main() -> None:
    """Run both and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-steps", type=int, default=60)
    num_steps = parser.parse_args().num_steps
    with tempfile.TemporaryDirectory() as folder:
        sync = measure(Path(folder), "sync", num_steps, "--weight_sync.max_lag", "0")
        asynchronous = measure(Path(folder), "async", num_steps)
    result = {
        "async_over_sync": asynchronous["samples_per_s"] / sync["samples_per_s"],
        "async": asynchronous,
        "sync": sync,
        "num_steps": num_steps,
    }
    print(json.dumps(result))


def measure(folder: Path, name: str, num_steps: int, *overrides: str) -> dict[str, float]:
    """One run: samples per second, and where the learner's time went."""
    command = [sys.executable, "-m", "launch.cli", "train", "examples/demo.toml", "--run.dir", str(folder)]
    command += ["--run.name", name, "--learner.num_steps", str(num_steps), "--task.num_heldout", "64", *overrides]
    subprocess.run(command, cwd=ROOT, check=True, timeout=RUN_TIMEOUT_S)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    elapsed_s = rows[-1]["finished_s"] - rows[0]["finished_s"]
    summary = json.loads((folder / name / "summary.json").read_text())
    return {
        "samples_per_s": sum(row["batch/trajectories"] for row in rows[1:]) / elapsed_s,
        "learner_idle_frac": sum(row["time/wait_for_batch"] for row in rows[1:]) / elapsed_s,
        "overlap_frac": summary["overlap_frac"],
        "lag_mean": summary["lag_mean"],
    }


if __name__ == "__main__":
    main()
