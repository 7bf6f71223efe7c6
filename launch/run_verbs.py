"""`leeway ls`, `logs` and `stop`: list runs, print their logs, and end a run."""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from leeway.common.errors import LeewayError
from leeway.launch.api import load_run
from leeway.launch.arguments import RunPath, integer
from leeway.launch.errors import ConfigError, ExitStatus, print_error
from leeway.launch.observe.status import StatusError, view_run
from leeway.launch.observe.view import line
from leeway.launch.run_folder import RunFolder, open_run
from leeway.launch.text import number, shortened

STOP_S = 600
"""Seconds that `stop` waits by default: the launcher gives the learner as long to finish its step."""
POLL_S, REPORT_S = 0.5, 10.0
"""Seconds between polls of `stop`, and between two of its lines in one phase of the run."""

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def ls(folder: Annotated[Path, typer.Argument(help="Folder that contains the runs.")] = Path("runs")) -> int:
    """List the runs of a folder.

    The oldest run is first.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: pass the parent folder of the runs")
    runs = sorted(folder.glob("*/config.toml"), key=lambda config: config.stat().st_mtime)
    width = max((len(config.parent.name) for config in runs), default=3)
    print(f"{'run':<{width}}  {'state':<19} {'steps':>11} {'reward':>8} {'accuracy':>8}")
    for config in runs:
        try:
            view = view_run(RunFolder(config.parent))
            status = view.status
            accuracy = number(status.evaluations[-1].greedy if status.evaluations else None)
            steps, reward = f"{status.step}/{status.num_steps}", number(status.row.get("reward/mean"))
            values = f"{shortened(view.outcome, 16):<19} {steps:>11} {reward:>8} {accuracy:>8}"
        except StatusError:
            values = "no status"
        print(f"{config.parent.name:<{width}}  {values}")
    return ExitStatus.OK


@app.command()
def logs(
    run: RunPath,
    role: Annotated[str | None, typer.Argument(help="A role such as actor, or actor.1.")] = None,
    lines: Annotated[int, typer.Option(metavar="N", help="Number of last lines.", parser=integer(1, 10**6))] = 50,
) -> int:
    """Print the last lines of the logs of a run.

    Without ROLE, print the paths of all logs.
    """
    found = {path.name.removesuffix(".log"): path for path in sorted(open_run(run).logs.glob("*.log"))}
    chosen = [path for name, path in found.items() if role in (None, name, name.partition(".")[0])]
    if not chosen:
        raise ConfigError(f"the run {run} has no log of '{role}'; it has {', '.join(found) or 'no logs'}")
    for path in chosen:
        print(path if role is None else f"==> {path} <==")
        if role is not None:
            with path.open(encoding="utf-8", errors="replace") as file:
                sys.stdout.writelines(deque(file, lines))
    return ExitStatus.OK


@app.command()
def stop(
    run: RunPath,
    timeout_s: Annotated[
        int, typer.Option("--timeout", metavar="S", help="Maximum seconds to wait.", parser=integer(0, 86_400))
    ] = STOP_S,
) -> int:
    """End a run after its current step and a checkpoint.

    The command waits for the end. Before and after training, the run ends at once. Exit status: 1 if the run is still
    active after the timeout.
    """
    found, deadline, shown, shown_s = load_run(run), time.monotonic() + timeout_s, "", 0.0
    try:
        with suppress(TimeoutError):
            found.stop(timeout_s=0.0)
        while (view := found.view()).is_active:
            now_s, phase = time.monotonic(), view.status.phase
            if now_s > deadline:
                return print_error(f"{found.path} has not ended within {timeout_s} s: {line(view.status)}")
            if phase != shown or now_s - shown_s > REPORT_S:
                print(f"waiting for {found.name} to end: {line(view.status)}", flush=True)
                shown, shown_s = phase, now_s
            time.sleep(POLL_S)
        found.wait(timeout_s=0.0)
    except LeewayError as error:
        return print_error(error)
    print(f"{found.name}: {view.outcome}")
    return ExitStatus.OK
