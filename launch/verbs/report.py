"""`leeway report`: one page that shows a run, or two side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from launch.exit_status import ExitStatus


def add_parser(verbs: Any) -> None:  # noqa: ANN401 -- argparse has no public type for it
    """Add `report` to the command's parser."""
    report = verbs.add_parser(
        "report",
        help="write one HTML page that shows a run, or two side by side",
        description="Write one HTML page that shows a run: curves, timeline, distributions, samples, ledger, config. "
        "It needs nothing but itself. The run may be live, over or broken: the page says what is missing.",
    )
    report.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or its name within runs/")
    report.add_argument("against", type=Path, nargs="?", metavar="RUN2", help="a run to compare it with")
    default = "default: report.html in RUN; of two runs, report-RUN2.html there"
    report.add_argument("--out", type=Path, metavar="FILE", help=default)
    report.set_defaults(run_verb=run)


def run(parsed: argparse.Namespace) -> int:
    """Write the page and say where it is."""
    from launch.privacy import private_files

    with private_files():
        return _write(parsed)


def _write(parsed: argparse.Namespace) -> int:
    from launch.errors import ConfigError
    from launch.report.data import collect
    from launch.report.page import write
    from launch.run_folder import open_run

    try:
        folders = [open_run(path) for path in (parsed.run, parsed.against) if path is not None]
    except ConfigError as error:
        print(f"leeway: {error}", file=sys.stderr)
        return ExitStatus.WRONG_INPUT
    out = parsed.out or (folders[0].report if len(folders) == 1 else folders[0].root / f"report-{folders[1].name}.html")
    if out.is_dir():
        print(f"leeway: {out} is a folder; give --out the name of a file, as in report.html", file=sys.stderr)
        return ExitStatus.WRONG_INPUT
    runs = [collect(folder) for folder in folders]
    try:
        size = write(runs, out)
    except OSError as error:
        print(f"leeway: {out} cannot be written: {error.strerror}; give another --out FILE", file=sys.stderr)
        return ExitStatus.FAILED
    for each in runs:
        for sentence in each.missing:
            print(f"{each.name}: {sentence}")
    print(f"{out} ({size / 2**20:.1f} MiB)")
    return ExitStatus.OK
