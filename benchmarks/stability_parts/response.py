"""Response of lag control to a tenfold learning rate, in the loop of `loop.py`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.lib import small_tasks
from benchmarks.lib.page import table
from benchmarks.stability_parts.loop import CONFIG, DelayedRun

from leeway.learner.lag_control import BRAKE_DRIFT

MODELS = ("sums", *small_tasks.TASKS)
MAX_LAG = 16
NUM_BEFORE, NUM_AFTER = 60, 60
MEAN_OVER = 5
"""Number of updates in a mean of the drift; one update has 128 samples."""
SETTLED_BY = MAX_LAG + 4
"""Number of updates after which the drift has to be at its target again."""


def respond(model: str, seed: int) -> dict[str, Any]:
    """Train a model, raise its learning rate tenfold midway, and return the curves of lag control around that."""
    keys = {"weight_sync.max_lag": MAX_LAG, "learner.lr_schedule": "constant", "learner.learning_rate": 1e-4}
    overrides = [each for key, value in keys.items() for each in (f"--{key}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        if model == "sums":
            config, overrides = CONFIG, [*overrides, "--learner.groups_per_step", "16"]
        else:
            config = small_tasks.make(model, Path(folder))
        curve = DelayedRun(overrides, seed, config).train(NUM_BEFORE + NUM_AFTER, tenfold_from=NUM_BEFORE)
    return {
        "drift": [round(each * root, 4) for each, root in zip(curve.drift, curve.root, strict=True)],
        "allowed": curve.allowed,
        "lr_scale": [round(each, 4) for each in curve.lr_scale],
        "reward": [round(each, 4) for each in curve.reward],
    }


def describe(found: Mapping[str, dict[str, Any]]) -> str:
    """Return the table of the page; `found` maps models to the results of `respond`."""
    head = [
        "",
        "drift before",
        "highest drift after",
        f"updates above {BRAKE_DRIFT}",
        f"mean drift of the last {NUM_AFTER - SETTLED_BY}",
        "allowed lag before, after",
        "lowest factor of the rate",
        "reward before, at the end",
    ]
    return table(head, [_row(model, result) for model, result in found.items()])


def _row(model: str, result: Mapping[str, Any]) -> list[str]:
    drift = _means(result["drift"])
    settled = result["drift"][NUM_BEFORE + SETTLED_BY :]
    rewards = _means(result["reward"])
    return [
        model,
        f"{drift[NUM_BEFORE - 1]:.2f}",
        f"{max(drift[NUM_BEFORE:]):.2f}",
        str(sum(each > BRAKE_DRIFT for each in drift[NUM_BEFORE:])),
        f"{sum(settled) / len(settled):.2f}",
        f"{result['allowed'][NUM_BEFORE - 1]}, {result['allowed'][-1]}",
        f"{min(result['lr_scale'][NUM_BEFORE:]):.2f}",
        f"{rewards[NUM_BEFORE - 1]:.2f}, {rewards[-1]:.2f}",
    ]


def _means(values: list[float]) -> list[float]:
    """Return the mean of each value and of up to `MEAN_OVER` - 1 values before it."""
    parts = [values[max(0, i + 1 - MEAN_OVER) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]
