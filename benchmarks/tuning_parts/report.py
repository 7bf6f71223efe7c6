"""The page docs/results/tuning.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from training_runs.machine import Machine
from training_runs.page import origin, table

from tuning_parts.charts import draw
from tuning_parts.figures import ENDS, Figures
from tuning_parts.sweeps import EVERY_RUN, GROUP_SIZE, GROUPS_PER_STEP, SAMPLES_PER_STEP, SWEEPS, Sweep

COLUMNS = {
    "samples/s": ("samples_per_s", "{:.0f}"),
    "tokens/s generated": ("generated_tokens_per_s", "{:.0f}"),
    "tokens/s trained": ("trained_tokens_per_s", "{:.0f}"),
    "reward per minute": ("reward_per_min", "{:+.2f}"),
    "held-out accuracy": ("accuracy", "{:.3f}"),
    "lag mean": ("lag_mean", "{:.2f}"),
    "p95": ("lag_p95", "{:.1f}"),
    "max": ("lag_max", "{:.0f}"),
    "learner idle": ("learner_idle_frac", "{:.0%}"),
    "actors idle": ("actor_idle_frac", "{:.0%}"),
    "dropped as stale": ("dropped_stale", "{:.1%}"),
}
"""Column -> figure, and how it reads."""

Results = Mapping[str, Mapping[int, Figures]]
"""Key of a sweep -> value of the knob -> figures."""


def write_page(path: Path, results: Results, machine: Machine, command: str, seeds: list[int]) -> None:
    """Write the page and, beside it, the figure of every sweep.

    Args:
        path: of the page.
        results: of all sweeps that were measured.
        machine: that they were measured on.
        command: that writes it.
        seeds: of the runs.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    measured = [sweep for sweep in SWEEPS if sweep.key in results]
    parts = ["# Turning knobs, measured", _head(results, machine, command, seeds)]
    for sweep in measured:
        figure = path.with_name(f"{path.stem}_{sweep.name}.svg")
        draw(sweep, results[sweep.key], figure)
        parts += _section(sweep, results[sweep.key], figure.name)
    path.write_text("\n\n".join([*parts, _reading()]) + "\n", encoding="utf-8")


def _head(results: Results, machine: Machine, command: str, seeds: list[int]) -> str:
    runs = [figures for found in results.values() for figures in found.values()]
    num_steps = max(int(figures["num_steps"] or 0) for figures in runs)
    over = f"Means over seeds {', '.join(map(str, seeds))}." if len(seeds) > 1 else f"One seed ({seeds[0]})."
    return (
        f"{origin(command, machine)} `examples/demo.toml` over the real system, {num_steps} steps of "
        f"{SAMPLES_PER_STEP} samples each, one run after the other; a run differs from the demo in the knob that its "
        f"row names, and in `{' '.join(EVERY_RUN)}`, which change no speed. {over} What to make of "
        "it: [tuning.md](../tuning.md)."
    )


def _section(sweep: Sweep, found: Mapping[int, Figures], figure: str) -> list[str]:
    name = f"`{sweep.key}`"
    if sweep.name == "group_size":
        name += f", with `learner.groups_per_step` {SAMPLES_PER_STEP} over it"
    rows = []
    for value, figures in sorted(found.items()):
        cells = [_cell(figures[key], form) for key, form in COLUMNS.values()]
        rows.append([f"**{value}** (the demo)" if value == sweep.default else str(value), *cells])
    return [f"## {name}", f"![{sweep.key} against rates, lag and idle shares]({figure})", table([name, *COLUMNS], rows)]


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _reading() -> str:
    return (
        "Rates are per second of wall time between the first step and the last, so that start-up and evaluations "
        f"do not count. Reward per minute: the mean reward of the last {ENDS:.0%} of the steps less that of the first, "
        "over the minutes between them. Accuracy: greedy, on the held-out problems, after the last step; all runs have "
        "then trained the same number of samples. Lag in policy versions, over trained tokens. The learner is idle "
        "while it waits for a batch, an actor while it has no training request running.\n\n"
        "What it does not show: all processes share the cores of this machine, so actors and learner slow each other, "
        "and a third actor takes from the learner what it generates. Where they have machines of their own, the lags "
        f"and the idle shares move the same way, the rates do not. The demo has groups of {GROUP_SIZE}, "
        f"{GROUPS_PER_STEP} of them in a step, and answers of three or four tokens: what the long tail of real answers "
        "does is measured in [overlap.md](overlap.md)."
    )
