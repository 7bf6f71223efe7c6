"""Reproducible SVG files: equal figures give equal bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure


@contextmanager
def drawn(path: Path, width: float, height: float, *, font_size: float, **settings: Any) -> Iterator[Figure]:  # noqa: ANN401 -- matplotlib API
    """Yield a matplotlib figure, and write this figure to a file when the `with` block ends.

    Args:
        path: SVG file to write.
        width: width in inches.
        height: height in inches.
        font_size: font size in points.
        settings: further matplotlib settings, with `_` in place of each dot.
    """
    more: dict[Any, Any] = {name.replace("_", "."): value for name, value in settings.items()}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "leeway", "font.size": font_size, **more}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.savefig(path, format="svg", metadata={"Date": None})
