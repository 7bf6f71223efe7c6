"""Figures and texts for people."""

from __future__ import annotations

MAX_TEXT = 65_536
"""Characters of one text that are shown of a stored trajectory; an export has all of them."""


def number(value: float | None) -> str:
    """A figure; a dash where it does not apply."""
    if value is None:
        return "-"
    return f"{value:.2e}" if value and abs(value) < 1e-2 else f"{value:.3f}"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    whole = max(0, int(seconds))
    return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"


def printable(text: str, most: int = MAX_TEXT) -> str:
    """At most so many characters of the text, with what would move the cursor, or not show, escaped."""
    rest = f" ... and {len(text) - most} more characters" if len(text) > most else ""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[:most]) + rest
