"""`leeway trace`: the timeline of a run for Perfetto."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from launch.exit_status import ExitStatus


def add_parser(verbs: Any) -> None:  # noqa: ANN401 -- argparse has no public type for it
    """Add `trace` to the command's parser."""
    trace = verbs.add_parser(
        "trace",
        help="write the timeline of a run as a trace for ui.perfetto.dev",
        description="Write the timeline of a run, live or over, as a trace for ui.perfetto.dev or chrome://tracing.",
    )
    trace.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or its name within runs/")
    trace.add_argument("--out", type=Path, metavar="FILE", help="default: trace.json in RUN")
    trace.set_defaults(run_verb=run)


def run(parsed: argparse.Namespace) -> int:
    """Write the trace and say where it is."""
    from launch.privacy import private_files

    with private_files():
        return _write(parsed)


def _write(parsed: argparse.Namespace) -> int:
    from launch.errors import ConfigError
    from launch.observe.trace import finish
    from launch.run_folder import open_run

    try:
        folder = open_run(parsed.run)
    except ConfigError as error:
        print(f"leeway: {error}", file=sys.stderr)
        return ExitStatus.WRONG_INPUT
    out = parsed.out or folder.root / "trace.json"
    if out.is_dir():
        print(f"leeway: {out} is a folder; give --out the name of a file, as in trace.json", file=sys.stderr)
        return ExitStatus.WRONG_INPUT
    if not folder.timeline.is_file():
        print(
            f"leeway: {folder.timeline} is not there: the run is of an older Leeway, or it ended before it began; "
            "a run that is started now has one",
            file=sys.stderr,
        )
        return ExitStatus.FAILED
    try:
        num_spans, num_counters = finish(folder.timeline, out)
    except (OSError, ValueError) as error:
        print(f"leeway: no trace: {error}", file=sys.stderr)
        return ExitStatus.FAILED
    print(
        f"{out} ({out.stat().st_size / 2**20:.1f} MiB): {num_spans} spans, {num_counters} values of counters; "
        "open it in ui.perfetto.dev"
    )
    return ExitStatus.OK
