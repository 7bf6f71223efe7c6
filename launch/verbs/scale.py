"""`leeway scale`: lets a pool of a run that lives have more actors, or fewer.

Exit status: 0 the run is at it; 1 its command is gone or does not answer; 2 it cannot be so, and nothing was changed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.exit_status import ExitStatus

if TYPE_CHECKING:
    from launch.run_folder import RunFolder

PATIENCE_S = 30.0
"""A command that evaluates or exports answers after it, and says nothing before."""
MAX_COUNT = 1024
"""An actor is a process with an engine: more of them in one pool is a slip of the hand."""


def add_parser(verbs: Any) -> None:  # noqa: ANN401 -- argparse has no public type for it
    """Add `scale` to the command's parser."""
    scale = verbs.add_parser(
        "scale",
        help="let a pool of a living run have more actors, or fewer",
        description="Let a pool of a run that lives have another number of actors. Those that leave hand back what "
        "they have leased; those that come start when a host has room for them.",
    )
    scale.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or its name within runs/")
    scale.add_argument("--pool", default="actors", metavar="NAME", help="as in [pools.NAME]; default: actors")
    scale.add_argument("--count", type=_count, required=True, metavar="N", help="how many actors it is to have")
    scale.set_defaults(run_verb=run)


def run(parsed: argparse.Namespace) -> int:
    """Ask the run, and print what it says."""
    from launch.control import NoAnswer, Refused, ask
    from launch.errors import ConfigError
    from launch.privacy import private_files
    from launch.run_folder import open_run

    try:
        folder = open_run(parsed.run)
        if gone := _why_gone(folder):
            print(f"leeway: {gone}", file=sys.stderr)
            return ExitStatus.FAILED
        with private_files():
            said = ask(folder.control, {"verb": "scale", "pool": parsed.pool, "count": parsed.count}, PATIENCE_S)
    except (ConfigError, Refused) as error:
        print(f"leeway: {error}", file=sys.stderr)
        return ExitStatus.WRONG_INPUT
    except NoAnswer as error:
        print(f"leeway: {error}", file=sys.stderr)
        return ExitStatus.FAILED
    print(said)
    return ExitStatus.OK


def _count(text: str) -> int:
    if text.isdecimal() and int(text) <= MAX_COUNT:
        return int(text)
    raise argparse.ArgumentTypeError(f"'{text[:20]}' is not from 0 to {MAX_COUNT:,}: say how many actors it needs")


def _why_gone(folder: RunFolder) -> str:
    """Why nobody would answer; empty where the run's command lives, here or on another host."""
    from launch.observe.status import StatusError, look
    from launch.run_folder import owner_of

    if owner_of(folder) is not None:
        return ""
    try:
        seen = look(folder)
    except StatusError:
        return f"no command works on the run {folder.root}; `leeway resume {folder.root}` goes on with it"
    if (ended := seen.status.ended) is not None:
        return f"the run {folder.root} is over ({ended.text}); `leeway resume {folder.root}` goes on with it"
    return seen.gone
