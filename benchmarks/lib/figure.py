"""Reproducible SVG files: the same figures give the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure


@contextmanager
def drawn(path: Path, width: float, height: float, *, font_size: float, **settings: Any) -> Iterator[Figure]:  # noqa: ANN401 -- matplotlib API
    """Yield a figure to draw on, and write it to a file when the block ends.

    Args:
        path: SVG file to write.
        width: width in inches.
        height: height in inches.
        font_size: font size in points.
        settings: further matplotlib settings, with `_` for each dot.
    """
    more: dict[Any, Any] = {name.replace("_", "."): value for name, value in settings.items()}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "leeway", "font.size": font_size, **more}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.savefig(path, format="svg", metadata={"Date": None})
