"""TaskError, and the hint that goes with a mistyped name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TaskError(ValueError):
    """The `[task]` section asks for something that cannot be had; the text names the key and the file."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A clause that lists what is known and, where one is close, which name was probably meant."""
    names = sorted({str(one) for one in known})
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f"known: {shown or 'none'}{hint}"
