"""An SVG file that is the same bytes for the same figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure


@contextmanager
def drawn(path: Path, width: float, height: float, *, font_size: float, **settings: Any) -> Iterator[Figure]:  # noqa: ANN401 -- matplotlib's own
    """A figure to draw on; it is written at the end.

    Args:
        path: of the SVG file.
        width: inches.
        height: inches.
        font_size: points.
        settings: matplotlib's further ones, `_` for each dot.
    """
    more: dict[Any, Any] = {name.replace("_", "."): value for name, value in settings.items()}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "leeway", "font.size": font_size, **more}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.savefig(path, format="svg", metadata={"Date": None})
