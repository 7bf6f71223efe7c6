"""Names that were mistyped."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable


def did_you_mean(name: str, known: Iterable[str], shown: Callable[[str], object] = repr) -> str:
    """A clause that says which name was probably meant, as `shown` gives it; '' where none is close."""
    close = difflib.get_close_matches(name, sorted(set(known)), n=1)
    return f"; did you mean {shown(close[0])}?" if close else ""
