"""`leeway resume`: goes on with a run that was killed, interrupted, or has ended."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from launch.exit_status import ExitStatus


def add_parser(verbs: Any) -> None:  # noqa: ANN401 -- argparse has no public type for it
    """Add `resume` to the command's parser."""
    parser = verbs.add_parser(
        "resume",
        help="go on with a run where it was killed or has ended",
        description="Go on with a run in its own folder, from its newest checkpoint. Nothing that its buffer "
        "acknowledged is lost. Keys for which another value is sound can be overridden: --learner.num_steps 200.",
        epilog="Ctrl-C once: finish the step, write a checkpoint, end. Twice: stop now.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, or its name within runs/")
    parser.add_argument("--dry-run", action="store_true", help="say where it would go on; start nothing")
    parser.set_defaults(run_verb=run, takes_overrides=True)


def run(parsed: argparse.Namespace) -> int:
    """Go on, or say why not."""
    from launch.errors import ConfigError
    from launch.resume import resume
    from launch.run_folder import claimed, open_run

    with ExitStack() as stack:
        try:
            folder = open_run(parsed.run)
            stack.enter_context(claimed(folder))
            found = resume(folder, parsed.overrides, lambda text: print(text, flush=True))
        except (ConfigError, OSError) as error:
            print(f"leeway: {error}", file=sys.stderr)
            return ExitStatus.WRONG_INPUT
        if parsed.dry_run:
            print(found.plan.describe())
            print(found.describe())
            return ExitStatus.OK
        from launch.train import train

        return train(found.plan, found.history)
