"""A small figure for each knob: what it does to speed, to learning and to lag."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from tuning_parts.figures import Figures
from tuning_parts.sweeps import Sweep

PANELS = (
    ("completion tokens per second", (("generated_tokens_per_s", "generated"), ("trained_tokens_per_s", "trained"))),
    ("gain of reward per minute", (("reward_per_min", ""),)),
    ("lag, versions", (("lag_mean", "mean"), ("lag_p95", "p95"), ("lag_max", "max"))),
    ("idle share", (("learner_idle_frac", "learner"), ("actor_idle_frac", "actors"))),
)
COLOURS = ("#0072B2", "#D55E00", "#009E73")
"""Told apart by the colour-blind."""
MARKERS = ("o", "s", "^")
INK = "#767676"
"""Of axes and words: readable on white and on black."""


def draw(sweep: Sweep, found: Mapping[int, Figures], path: Path) -> None:
    """Write the figure of a sweep.

    Args:
        sweep: the knob.
        found: its value -> figures.
        path: of the SVG file.
    """
    inks: dict[Any, Any] = {f"{part}.color": INK for part in ("text", "xtick", "ytick")}
    inks |= {f"axes.{part}": INK for part in ("edgecolor", "labelcolor", "titlecolor")}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "leeway", "font.size": 9, **inks}):
        figure = Figure(figsize=(11, 2.5), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots(1, len(PANELS))
        for axis, (title, lines) in zip(axes, PANELS, strict=True):
            _panel(axis, title, lines, found)
            axis.set_xlabel(sweep.key)
        figure.savefig(path, metadata={"Date": None})


def _panel(axis: Any, title: str, lines: tuple[tuple[str, str], ...], found: Mapping[int, Figures]) -> None:  # noqa: ANN401 -- matplotlib's own
    values = sorted(found)
    for (name, label), colour, marker in zip(lines, COLOURS, MARKERS, strict=False):
        known = [(place, y) for place, value in enumerate(values) if (y := found[value][name]) is not None]
        axis.plot(
            *zip(*known, strict=True), color=colour, marker=marker, markersize=4, linewidth=1.5, label=label or None
        )
    axis.patch.set_alpha(0)
    axis.set_title(title, fontsize=9)
    axis.set_xticks(range(len(values)), [str(value) for value in values])
    lowest = min(y for name, _ in lines for value in values if (y := found[value][name]) is not None)
    axis.set_ylim(bottom=0.0 if lowest >= 0 else None)
    axis.grid(axis="y", color=INK, alpha=0.2)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    if len(lines) > 1:
        axis.legend(fontsize=7, frameon=False)
