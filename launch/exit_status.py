"""What the command's exit status means."""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    """Of `leeway`."""

    OK = 0
    FAILED = 1
    """The run failed; what it had is in its folder."""
    WRONG_INPUT = 2
    """The input is wrong, and nothing was started."""
    INTERRUPTED = 130
