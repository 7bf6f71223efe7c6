"""The page on runs across hosts, which a full run writes beside the fault matrix."""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.faults.results import _machine

HEADER = (
    *("setting", "steps", "held-out accuracy", "against one host", "lag mean", "lag max", "lag-0 mismatch by pool"),
    *("samples/s", "stored by actor", "acknowledged lost", "ledger gap", "events"),
)


@dataclass(frozen=True)
class Outcome:
    """Result of a run."""

    summary: dict[str, Any]
    """Contents of summary.json."""
    rows: list[dict[str, Any]]
    """Rows of metrics.jsonl, one per step."""
    events: list[dict[str, Any]]
    by_actor: dict[str, int]
    """Distinct stored samples, by actor."""
    acknowledged: dict[str, int]
    """Samples that each actor counted as acknowledged."""

    @property
    def num_lost(self) -> int:
        """Return how many acknowledged samples are not stored; these short runs evict no samples."""
        return sum(max(0, count - self.by_actor.get(actor, 0)) for actor, count in self.acknowledged.items())

    @property
    def accuracy(self) -> float:
        """Return the greedy accuracy on the held-out problems after training."""
        return float(self.summary["accuracy_after"])

    def mismatch(self) -> dict[str, float]:
        """Return each pool's mean |difference| of log-probabilities at lag 0, over the steps with tokens at lag 0.

        A single step is not meaningful: a pool may have only a few tokens at lag 0.
        """
        found: dict[str, list[float]] = {}
        for row in self.rows:
            for key, value in row.items():
                if key.startswith("pool/") and key.endswith("/mismatch_lag0_abs") and value is not None:
                    found.setdefault(key.split("/")[1], []).append(value)
        return {pool: fmean(values) for pool, values in found.items()}


class Page:
    """The rows of the page."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, ...]] = []

    def add(self, setting: str, outcome: Outcome, against: Outcome | None, note: str) -> None:
        """Add the row of a run.

        Args:
            setting: short description of the run.
            outcome: result of the run.
            against: outcome of the run on one host; None if `outcome` is the outcome of that run.
            note: further remarks.
        """
        summary = outcome.summary
        took_s = outcome.rows[-1]["finished_s"] - outcome.rows[0]["started_s"]
        self._lines.append(
            (
                setting,
                str(summary["num_steps"]),
                f"{summary['accuracy_before']:.3f} to {outcome.accuracy:.3f}",
                "-" if against is None else f"{outcome.accuracy - against.accuracy:+.3f}",
                f"{summary['lag_mean']:.2f}",
                f"{summary['lag_max']} of {summary['max_lag']}",
                ", ".join(f"{pool} {value:.1e}" for pool, value in sorted(outcome.mismatch().items())) or "-",
                f"{summary['trained_trajectories'] / took_s:.0f}",
                ", ".join(f"{actor} {count}" for actor, count in sorted(outcome.by_actor.items())),
                str(outcome.num_lost),
                str(summary["ledger_gap"]),
                note or "-",
            )
        )

    def write(self, path: Path) -> None:
        """Write the page."""
        lines = [
            "# A run across three hosts, measured",
            "",
            f"Written by `make faults` on {time.strftime('%Y-%m-%d')}, {_machine()}. The hosts are network "
            "namespaces of that machine, each with its own address, process table, /tmp and /dev/shm, joined by "
            "`launch/cluster.sh`; they share its cores, so samples/s compare settings, not machine "
            "sizes. The config is `examples/pools.toml`: pool `exact` serves in float32, `fast` in bfloat16 with twice "
            "the samples in flight. Accuracy is greedy over the held-out problems. Acknowledged lost: number "
            "of samples that actors counted as acknowledged, minus the number stored.",
            "",
            "| " + " | ".join(HEADER) + " |",
            "|" + "---|" * len(HEADER),
        ]
        lines += ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in self._lines]
        path.write_text("\n".join(lines) + "\n")
