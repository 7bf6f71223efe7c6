"""`leeway top`: a live view of a run, from its files alone."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from launch.exit_status import ExitStatus


def add_parser(verbs: Any) -> None:  # noqa: ANN401 -- argparse has no public type for it
    """Add `top` to the command's parser."""
    top = verbs.add_parser(
        "top",
        help="a live view of a run",
        description="Show a run as it goes on: rates, lags, who waits for whom, the ledger, the last events. It reads "
        "files only, so it may run beside the command, or after it. Keys: q quits, p pauses.",
        epilog="Exit status: 0; 2 no such run.",
    )
    top.add_argument(
        "run", type=Path, nargs="?", metavar="RUN", help="a run's folder, or its name within runs/; default: the newest"
    )
    top.add_argument("--once", action="store_true", help="print one view and end")
    top.set_defaults(run_verb=run)


def run(parsed: argparse.Namespace) -> int:
    """Show it until somebody presses q."""
    from rich.console import Console

    from launch.errors import ConfigError
    from launch.observe.display import show
    from launch.observe.status import StatusError, find_run, look
    from launch.observe.view import View

    console = Console(highlight=False, markup=False)
    try:
        folder = find_run(parsed.run)
        seen = look(folder)
    except (ConfigError, StatusError) as error:
        print(f"leeway: {error}", file=sys.stderr)
        return ExitStatus.WRONG_INPUT
    if parsed.once or not console.is_terminal:
        console.print(View(seen.status, seen.now_s, gone=seen.gone, note=seen.resuming), end="")
        return ExitStatus.OK

    def view(is_paused: bool) -> View:
        nonlocal seen
        note = "paused"
        if not is_paused:
            try:
                seen = look(folder)
                note = seen.resuming
            except StatusError:  # the folder is being removed, say; what was seen stays
                note = "cannot be read any more"
        return View(seen.status, seen.now_s, gone=seen.gone, note=note)

    try:
        show(view, console)
    except KeyboardInterrupt:
        return ExitStatus.OK
    return ExitStatus.OK
