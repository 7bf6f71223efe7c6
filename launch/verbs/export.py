"""`leeway export`: writes a checkpoint of a run as an ordinary Hugging Face folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from launch.exit_status import ExitStatus


def add_parser(verbs: Any) -> None:  # noqa: ANN401 -- argparse has no public type for it
    """Add `export` to the command's parser."""
    parser = verbs.add_parser(
        "export",
        help="write the model of a run as a Hugging Face folder",
        description="Write the newest whole checkpoint of a run, which may be running, as an ordinary Hugging Face "
        "folder. Starts neither Ray nor an engine.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, or its name within runs/")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    parser.add_argument("--step", type=int, metavar="N", help="of the checkpoint; by default the newest that is whole")
    parser.set_defaults(run_verb=run)


def run(parsed: argparse.Namespace) -> int:
    """Export, or say why not."""
    from launch.errors import ConfigError
    from launch.exporting import export
    from launch.run_folder import open_run

    def warn(text: str) -> None:
        print(f"leeway: {text}", file=sys.stderr)

    try:
        done = export(open_run(parsed.run), parsed.out.expanduser(), parsed.step, warn)
    except (ConfigError, OSError) as error:
        warn(str(error))
        return ExitStatus.WRONG_INPUT
    print(f"version {done.version}, of step {done.step}, is in {parsed.out} ({done.size_bytes / 2**20:.1f} MiB)")
    return ExitStatus.OK
