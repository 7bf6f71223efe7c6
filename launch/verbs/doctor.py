"""`leeway doctor`: is this machine fit for a run?"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.exit_status import ExitStatus

if TYPE_CHECKING:
    from launch.doctor.finding import Finding

_STYLE = {"ok": "green", "warning": "yellow", "problem": "red"}


def add_parser(verbs: Any) -> None:  # noqa: ANN401 -- argparse has no public type for it
    """Add `doctor` to the command's parser."""
    parser = verbs.add_parser(
        "doctor",
        help="is this machine fit for a run?",
        description="Look at versions, GPUs, disk, memory, ports, Ray, W&B and leftovers of dead runs, and say what to "
        "do; with CONFIG, also whether the run that it describes fits. Takes at most half a minute and changes "
        "nothing. Exit status 1: there is a problem.",
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG.toml")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    parser.set_defaults(run_verb=run, takes_overrides=True)


def run(parsed: argparse.Namespace) -> int:
    """Look, print, judge."""
    from launch.doctor.checkup import checkup
    from launch.errors import ConfigError
    from launch.load import load_config

    config = None
    if parsed.config is not None:
        try:
            config = load_config(parsed.config, parsed.overrides)
        except ConfigError as error:
            print(f"leeway: {error}", file=sys.stderr)
            return ExitStatus.WRONG_INPUT
    elif parsed.overrides:
        print("leeway: overrides are of a config; give it: leeway doctor CONFIG.toml ...", file=sys.stderr)
        return ExitStatus.WRONG_INPUT
    findings = list(checkup(config, parsed.config))
    num_problems = sum(finding.state == "problem" for finding in findings)
    if parsed.json:
        print(json.dumps({"problems": num_problems, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _show(findings)
    return ExitStatus.FAILED if num_problems else ExitStatus.OK


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=False, pad_edge=False, box=None)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found, and what to do", overflow="fold")
    for finding in findings:
        what = Text(finding.found)
        if finding.remedy:
            what.append(f"\n-> {finding.remedy}", style="bold")
        table.add_row(finding.name, Text(finding.state, style=_STYLE[finding.state]), what)
    Console(highlight=False, markup=False).print(table)
    counts = {state: sum(finding.state == state for finding in findings) for state in _STYLE}
    print(f"{counts['problem']} problems, {counts['warning']} warnings, {counts['ok']} in order")
