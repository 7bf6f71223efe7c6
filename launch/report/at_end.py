"""The page at the end of a run: written by a process of its own, so that nothing about it can hurt the run.

A damaged buffer that kills its reader, a page that takes too long or too much memory: the run has ended as it did, and
says that it has no page.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from launch.host import ourselves
from launch.run_folder import RunFolder

LIMIT_S = 60.0
"""A page that takes longer is given up."""


def report_at_end(folder: RunFolder, event: Callable[[str, str], None], say: Callable[[str], None]) -> None:
    """Write the page of a run that is over, and say where it is; why there is none is an event too. Never raises."""
    command = ourselves("report", str(folder.root), "--out", str(folder.report))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        said = done.stderr.strip().splitlines() or [f"its process ended with status {done.returncode}"]
        why = said[-1].removeprefix("leeway: ") if done.returncode else ""
    except subprocess.TimeoutExpired:
        why = f"it was not written within {LIMIT_S:g} s"
    except OSError as error:
        why = f"its process does not start: {error}"
    except KeyboardInterrupt:
        why = "interrupted"
    if not why:
        say(f"report: {folder.report}")
        return
    text = f"no report: {why}; `leeway report {folder.root}` tries again"
    event("report", text)
    say(text)
