"""Page and plots of benchmarks/accuracy_over_lag.py."""

from __future__ import annotations

import json
import math
import os
import platform
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.accuracy_parts.cells import Cell, Figures, Ground, by_algorithm, over_seeds, parse
from benchmarks.lib.figure import drawn
from benchmarks.lib.page import table
from benchmarks.lib.rounds import spread

STYLES = {
    "trajectory_balance": ("#0072B2", "o", -0.12),
    "online_dpo": ("#D55E00", "s", -0.04),
    "off_policy_ppo": ("#009E73", "^", 0.04),
    "oapl": ("#CC79A7", "D", 0.12),
}
"""Algorithm -> colour (safe for colour blindness), marker, and horizontal shift that separates close lines."""
COLUMNS = {
    "greedy before": ("greedy_before", "{:.3f}"),
    "greedy after": ("greedy", "{:.3f}"),
    "sampled before": ("sampled_before", "{:.3f}"),
    "sampled after": ("sampled", "{:.3f}"),
    "lag mean": ("lag_mean", "{:.2f}"),
    "lag mean, second half": ("lag_late", "{:.2f}"),
    "lag max": ("lag_max", "{:.0f}"),
    "drift": ("drift", "{:.2f}"),
    "share of the rate": ("lr_scale", "{:.2f}"),
    "lowest ESS": ("ess_lowest", "{:.2f}"),
    "dropped as stale": ("dropped_stale", "{:.0f}"),
    "wall s": ("seconds", "{:.0f}"),
}
"""Column of the table -> figure of a run, and the format of this figure."""

MAIN = "trajectory_balance"
CONTROLLED = {"steady": "sums", "sorting": "sorting", "adding": "adding, work shown"}
"""Tasks of the figure on lag control -> their titles."""


def page(ground: Ground, results: dict[Cell, Figures], missing: dict[Cell, str], origin: str, figure: str) -> list[str]:
    """Return the paragraphs of the page."""
    num_seeds = len({cell.seed for cell in results})
    num_heldout = int(next(iter(results.values()))["num_heldout"])
    steps = " or ".join(str(int(n)) for n in sorted({found["num_steps"] for found in results.values()}))
    seeds = "One seed." if num_seeds == 1 else f"Means over {num_seeds} seeds; brackets hold minimum and maximum."
    return [
        "# Accuracy against `max_lag`, measured",
        f"{origin} on {len(os.sched_getaffinity(0))} cores ({platform.machine()}), no GPU, Python "
        f"{platform.python_version()}. The real system trains {ground.what}. Each run has {steps} steps, and one run "
        "follows another. Runs of one algorithm and seed differ only in `weight_sync.max_lag`. Accuracy is over "
        f"{num_heldout} held-out problems. {seeds}",
        f"![Held-out accuracy and realised lag against max_lag]({figure})",
        cells_table(results),
        *[
            f"No figures ({why}): {', '.join(cell.name for cell in missing if missing[cell] == why)}"
            for why in dict.fromkeys(missing.values())
        ],
        "Lag is in policy versions, over trained tokens. The lag starts at 0 and grows while actors generate "
        "faster than the learner trains, so the table also has the mean over the second half of the steps. ESS is the "
        "effective sample share of whole completions, 1 / mean((w / mean w)^2) with w = pi_prox / mu, at the step with "
        "the lowest value. The ESS of on-policy data is 1, and lag lowers it. The wall time ends with the last "
        "evaluation.",
        *([wanted_table(ground, results)] if ground.wanted else []),
        *shows(ground, results, num_heldout),
    ]


def wanted_table(ground: Ground, results: dict[Cell, Figures]) -> str:
    """Return the table of required minimums and measured values."""
    head = ["algorithm", *[f"{name}, at least {bar:g}" for name, bar in ground.wanted.items()]]
    found = by_algorithm(results)
    return table(
        head, [[name, *[_met(found[name].get(key), bar) for key, bar in ground.wanted.items()]] for name in found]
    )


def _met(value: float | None, bar: float) -> str:
    if value is None:
        return "not measured"
    return f"{value:+.3f}, {'met' if value >= bar else 'missed'}"


def cells_table(results: dict[Cell, Figures]) -> str:
    """Return a table with one row per algorithm and max_lag."""
    head = ["algorithm", "max_lag", *COLUMNS]
    rows = [
        [algorithm, str(max_lag), *[spread(values[figure], form) for figure, form in COLUMNS.values()]]
        for (algorithm, max_lag), values in over_seeds(results).items()
    ]
    return table(head, rows)


def shows(ground: Ground, results: dict[Cell, Figures], num_heldout: int) -> list[str]:
    """Return the paragraphs on the findings and their limits."""
    cells = over_seeds(results)
    changes = []
    num_lags = Counter(algorithm for algorithm, _ in cells)
    for name in (algorithm for algorithm, number in num_lags.items() if number > 1):
        lags = [lag for algorithm, lag in cells if algorithm == name]
        first, last = cells[name, min(lags)], cells[name, max(lags)]
        greedy, sampled = (fmean(last[key]) - fmean(first[key]) for key in ("greedy", "sampled"))
        changes.append(f"- {name}, `max_lag` {min(lags)} to {max(lags)}: greedy {greedy:+.3f}, sampled {sampled:+.3f}.")
    error = math.sqrt(0.9 * 0.1 / num_heldout)
    return [
        "Findings: the change in accuracy from the lowest to the highest `max_lag` of each algorithm.",
        *(["\n".join(changes)] if changes else []),
        f"Limits: on {num_heldout} problems, an accuracy of 0.90 has a standard error of {error:.3f}, and seeds add "
        f"variance. Changes below this error are not significant. {ground.limits}",
    ]


def draw(results: dict[Cell, Figures], path: Path) -> None:
    """Plot accuracy on the left and the realised lag on the right."""
    cells = over_seeds(results)
    lags = sorted({lag for _, lag in cells})
    places = {lag: float(index) for index, lag in enumerate(lags)}  # a logarithmic axis cannot show 0
    with drawn(path, 10, 4.2, font_size=10) as figure:
        left, right = figure.subplots(1, 2)
        for name in dict.fromkeys(algorithm for algorithm, _ in cells):
            mine = {places[lag]: values for (algorithm, lag), values in cells.items() if algorithm == name}
            for axis, key, line in ((left, "greedy", "-"), (left, "sampled", "--"), (right, "lag_mean", "-")):
                _line(axis, name, mine, key, line)
            _line(right, name, mine, "lag_max", "none")
        first = next(iter(results.values()))
        for key in ("greedy", "sampled"):
            height = first[f"{key}_before"]
            left.axhline(height, color="0.6", linewidth=1)
            left.annotate(f"{key}, before", (0, height), (0, 3), textcoords="offset points", color="0.4", fontsize=8)
        right.plot(list(places.values()), lags, color="0.6", linewidth=1, label="the bound")
        left.set_ylabel("held-out accuracy")
        left.set_ylim(top=1.0)
        right.set_ylabel("lag of trained tokens, versions")
        for axis in (left, right):
            axis.set_xticks(list(places.values()), [str(lag) for lag in lags])
            axis.set_xlabel("weight_sync.max_lag")
            axis.legend(fontsize=8, handlelength=3)
            axis.grid(axis="y", color="0.92")


def draw_control(folder: Path) -> None:
    """Plot accuracy with and without lag control from the stored cells of `CONTROLLED`, one panel per task."""
    found = {name: folder / f"accuracy_over_lag_{name}.json" for name in CONTROLLED}
    panels = {name: json.loads(path.read_text()) for name, path in found.items() if path.exists()}
    if not panels:
        return
    with drawn(folder / "lag_control.svg", 3.3 * len(panels), 3.2, font_size=10) as figure:
        for axis, (name, cells) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
            mine = {cell: cells[cell.name]["figures"] for cell in map(parse, cells) if cell.algorithm == MAIN}
            lags = sorted({cell.max_lag for cell in mine})
            for control, colour, line in (("off", "#D55E00", "--"), ("on", "#0072B2", "-")):
                greedy = [
                    fmean(f["greedy"] for cell, f in mine.items() if cell.max_lag == lag and cell.control == each)
                    for lag in lags
                    for each in ([control] if lag else ["off"])
                ]
                axis.plot(range(len(lags)), greedy, line, marker="o", color=colour, label=f"lag control {control}")
            before = fmean(f["greedy_before"] for f in mine.values())
            axis.axhline(before, color="0.6", linewidth=1)
            axis.annotate("before training", (0, before), (0, 3), textcoords="offset points", color="0.4", fontsize=8)
            axis.set_xticks(range(len(lags)), [str(lag) for lag in lags])
            axis.set_title(CONTROLLED[name], fontsize=10)
            axis.set_xlabel("max_lag")
            axis.grid(axis="y", color="0.92")
        figure.axes[0].set_ylabel("held-out accuracy")
        figure.axes[0].legend(fontsize=8)


def _line(axis: Any, algorithm: str, cells: dict[float, dict[str, list[float]]], key: str, line: str) -> None:  # noqa: ANN401 -- matplotlib API
    """Plot the mean over seeds at each x position, with error bars from the lowest to the highest value."""
    spreads = [(fmean(values[key]), min(values[key]), max(values[key])) for values in cells.values()]
    bars = [[middle - low for middle, low, _ in spreads], [high - middle for middle, _, high in spreads]]
    name, is_controlled, _ = algorithm.partition(",")
    colour, marker, shift = STYLES[name]
    line = ":" if is_controlled and line != "none" else line
    style = {"color": colour, "marker": marker, "markersize": 4, "linestyle": line, "capsize": 3}
    label = f"{algorithm}, {key.replace('_', ' ')}"
    axis.errorbar([place + shift for place in cells], [middle for middle, _, _ in spreads], bars, label=label, **style)
