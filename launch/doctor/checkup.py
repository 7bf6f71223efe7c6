"""Which checks there are: of the machine alone, or of a config on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from launch.config import Config
from launch.doctor.finding import Check, Finding, examine, ok, problem
from launch.doctor.leftovers import check_leftovers
from launch.doctor.libraries import check_engine, check_import, check_python, check_versions
from launch.doctor.machine import check_clock, check_disk, check_memory, check_open_files, check_shm
from launch.doctor.needs import MachineNeeds
from launch.doctor.services import check_curve, check_ports, check_ray, check_wandb
from launch.errors import ConfigError

_STYLE = {"ok": "green", "warning": "yellow", "problem": "red"}


def checkup(config: Config | None, config_path: Path | None) -> Iterator[Finding]:
    """Everything that can be looked at without starting anything.

    Args:
        config: of the run that is meant; None: of the machine alone.
        config_path: its file.
    """
    runs = Path(config.run.dir if config is not None else "runs").expanduser()
    needs = None
    if config is not None:
        with suppress(ConfigError):  # which the check of the config says
            needs = MachineNeeds.of(config)
    checks: list[tuple[str, Check]] = [
        ("Python", check_python),
        ("versions", check_versions),
        ("vLLM", check_engine),
        ("import vllm", check_import),
        ("ZeroMQ", check_curve),
        ("runs", partial(check_disk, runs, needs)),
        ("/dev/shm", partial(check_shm, needs)),
        ("memory", partial(check_memory, needs)),
        ("open files", check_open_files),
        ("clock", partial(check_clock, runs)),
        ("Ray", partial(check_ray, config)),
        ("W&B", partial(check_wandb, config)),
        ("leftovers", check_leftovers),
    ]
    if config is not None and config_path is not None:
        checks += [("ports", partial(check_ports, config)), ("config", partial(_check_config, config, config_path))]
    return examine(checks)


def _check_config(config: Config, path: Path) -> list[Finding]:
    from launch.checks import check
    from launch.run_folder import choose_root

    try:
        plan = check(config, choose_root(config, path))
    except ConfigError as error:
        return problem("config", str(error), f"change {path}")
    return ok("config", f"{path}: {plan.task.num_train} prompts, all that can be checked is in order")


def as_document(findings: Sequence[Finding]) -> dict[str, Any]:
    """For `--json`."""
    return {
        "problems": sum(finding.state == "problem" for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }


def show(findings: Sequence[Finding]) -> None:
    """Print them as a table."""
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
