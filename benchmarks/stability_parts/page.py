"""The page of results."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.lib.page import table
from benchmarks.stability_parts.rows import ROWS
from benchmarks.stability_parts.search import (
    EVAL_EVERY,
    LAGS,
    LAGS_SEEN,
    MAY_FALL_BY,
    NUM_UPDATES,
    RATES,
    Result,
    Task,
    is_stable,
)

SETTING = f"""\
**What was run.** `examples/sums.toml`, an ordinary model, in a synchronous loop of one process and one thread: the \
updates are those of the config (loss, optimizer, clipping, schedule), and the samples of an update come from the \
policy of exactly so many updates before. So the lag is what a run with that `max_lag` has at most, and nothing else \
of the system takes part; [accuracy_over_lag.md](accuracy_over_lag.md) is the real one. One seed.

**The greatest stable rate.** At a constant learning rate (after the warm-up of the config), {NUM_UPDATES} updates, \
and at least {LAGS_SEEN} times the lag. Stable is a rate at which sampled accuracy on the held-out problems, taken \
every {EVAL_EVERY} updates, ends no more than {MAY_FALL_BY} below its best and its start. Rates go up and down by \
factors of 2 from 1e-4, between {RATES[0]:g} and {RATES[-1]:g}."""


def page(results: Mapping[str, Result], origin: str) -> str:
    """The page.

    Args:
        results: by the key of their task.
        origin: its first sentences.
    """
    head = ["", *[f"lag {lag}" for lag in LAGS]]
    rates = [[f"`{row.name}`", *[_rate(results, i, lag) for lag in LAGS]] for i, row in enumerate(ROWS)]
    shipped = [
        [f"`{row.name}`", *[_shipped(results, i, lag) for lag in LAGS]] for i, row in enumerate(ROWS) if row.ships
    ]
    return "\n\n".join(
        [
            "# How fast one may learn at which lag",
            origin,
            SETTING,
            "## The greatest stable rate",
            table(head, rates),
            "In brackets: sampled accuracy where it ended at that rate, and, behind the arrow, where it ended at the "
            "next greater one that was tried. At lag 0 every weight is 1; other candidates were "
            "searched at lags 4 and 16 alone; a dash is what was not run.",
            "## As shipped",
            "Held-out accuracy, greedy / sampled, after the whole run of `examples/sums.toml`, and the smallest "
            "effective sample share of a step.",
            table(head, shipped),
        ]
    )


def _rate(results: Mapping[str, Result], row: int, lag: int) -> str:
    found = results.get(Task(row, lag, False).key)
    if found is None:
        return "-"
    tried = {float(rate): accuracies for rate, accuracies in found["tried"].items()}
    above = [rate for rate in sorted(tried) if not is_stable(tried[rate])]
    then = f" -> {tried[above[0]][-1]:.2f}" if above else ""
    if found["rate"] is None:
        return f"none{then}"
    return f"{found['rate']:g} ({tried[found['rate']][-1]:.2f}{then})"


def _shipped(results: Mapping[str, Result], row: int, lag: int) -> str:
    found = results.get(Task(row, lag, True).key)
    if found is None:
        return "-"
    return f"{found['greedy']:.3f} / {found['sampled']:.3f}, ESS {found['ess_lowest']:.2f}"


def line(results: Mapping[str, Result]) -> dict[str, dict[str, float | None]]:
    """The JSON line: row -> `rate_lagL`, and of rows that ship `accuracy_lagL`, greedy."""
    found: dict[str, dict[str, float | None]] = {}
    for i, row in enumerate(ROWS):
        for lag in LAGS:
            for as_shipped, name, key in ((False, "rate", "rate"), (True, "accuracy", "greedy")):
                result = results.get(Task(i, lag, as_shipped).key)
                if result is not None:
                    found.setdefault(row.name, {})[f"{name}_lag{lag}"] = result[key]
    return found
