"""The page at the end of a run: written by a process of its own, so that nothing about it can hurt the run.

A damaged buffer that kills its reader, a page that takes too long or too much memory: the run has ended as it did, and
says that it has no page.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from launch.run_folder import RunFolder

LIMIT_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """Whether there is a page."""

    text: str
    """The last line of a run: where the page is, or why there is none."""
    is_written: bool


def report_at_end(folder: RunFolder, event: Callable[[str, str], None], say: Callable[[str], None]) -> None:
    """Write the page of a run that is over, and say where it is, or why there is none.

    Args:
        folder: of the run.
        event: called with (kind, text) where there is none.
        say: called with the last line of the run.
    """
    outcome = write_at_end(folder)
    if not outcome.is_written:
        event("report", outcome.text)
    say(outcome.text)


def write_at_end(folder: RunFolder, limit_s: float = LIMIT_S) -> Outcome:
    """Write `report.html` of a run that is over. Never raises, and takes no longer than the limit.

    Args:
        folder: of the run.
        limit_s: then the process is ended.
    """
    command = [sys.executable, "-m", "launch.cli", "report", str(folder.root), "--out", str(folder.report)]
    again = f"`leeway report {folder.root}` tries again"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return Outcome(f"no report: it was not written within {limit_s:g} s; {again}", False)
    except OSError as error:
        return Outcome(f"no report: its process does not start: {error}; {again}", False)
    except KeyboardInterrupt:
        return Outcome(f"no report: interrupted; {again}", False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"its process ended with status {done.returncode}"]
        return Outcome(f"no report: {said[-1].removeprefix('leeway: ')}; {again}", False)
    return Outcome(f"report: {folder.report}", True)
