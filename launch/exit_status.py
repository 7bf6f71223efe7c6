"""What the command's exit status means."""

from __future__ import annotations

import sys
from enum import IntEnum


class ExitStatus(IntEnum):
    """Of `leeway`."""

    OK = 0
    FAILED = 1
    """The run failed; what it had is in its folder."""
    WRONG_INPUT = 2
    """The input is wrong, and nothing was started."""
    INTERRUPTED = 130


def refuse(why: object, status: ExitStatus = ExitStatus.FAILED) -> ExitStatus:
    """Say on the standard error why something cannot be done."""
    print(f"leeway: {why}", file=sys.stderr)
    return status
