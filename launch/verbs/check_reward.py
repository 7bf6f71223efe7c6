"""`leeway check-reward`: tries a task's reward functions on completions whose worth is known."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.exit_status import ExitStatus

if TYPE_CHECKING:
    from launch.reward_check import Result, RewardCheck

_SHOWN_CHARACTERS = 40


def add_parser(verbs: Any) -> None:  # noqa: ANN401 -- argparse has no public type for it
    """Add `check-reward` to the command's parser."""
    parser = verbs.add_parser(
        "check-reward",
        help="try a task's reward functions on right, wrong and odd answers",
        description="Load the task of CONFIG as a run does, score right, wrong, empty, odd and very long answers to a "
        "few of its problems, and judge the rewards. Starts no engine and no Ray. Exit status 1: something is wrong.",
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG.toml")
    parser.add_argument("--num", type=_positive, default=4, metavar="N", help="how many problems (default: 4)")
    parser.add_argument(
        "--completion", action="append", default=[], metavar="TEXT", help="score this too; may be given several times"
    )
    parser.set_defaults(run_verb=run, takes_overrides=True)


def run(parsed: argparse.Namespace) -> int:
    """Check, print, judge."""
    from actors.tasks import TaskError, load_task
    from launch.errors import ConfigError
    from launch.load import load_config
    from launch.reward_check import check_rewards

    try:
        config = load_config(parsed.config, parsed.overrides)
        task = load_task(config.task)
    except ConfigError as error:
        print(f"leeway: {error}", file=sys.stderr)
        return ExitStatus.WRONG_INPUT
    except TaskError as error:
        print(f"leeway: [task] {error}", file=sys.stderr)
        return ExitStatus.WRONG_INPUT
    checked = check_rewards(
        task,
        config.task,
        num_problems=parsed.num,
        given=parsed.completion,
        timeout_s=config.actors.reward_timeout_s,
    )
    _show(checked)
    found = checked.problems_found()
    for sentence in found:
        print(f"PROBLEM  {sentence}")
    if not found:
        print(f"The rewards of {len(checked.problems)} problems are as they should be.")
    return ExitStatus.FAILED if found else ExitStatus.OK


def _show(checked: RewardCheck) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    for number, problem in enumerate(checked.problems):
        table = Table(title=Text(f"prompt: {_shortened(problem.text, 90)}"), title_justify="left")
        for name in ("completion", "text", "function", "reward", "ms", "error"):
            table.add_column(name, justify="right" if name in ("reward", "ms") else "left", overflow="fold")
        for result in checked.results:
            if result.problem == number:
                table.add_row(*_cells(result))
        console.print(table)


def _cells(result: Result) -> list[str]:
    reward = "" if result.error else "None" if result.reward is None else f"{result.reward:.4g}"
    text = _shortened(result.completion.text, _SHOWN_CHARACTERS)
    milliseconds = f"{1000 * result.took_s:.1f}"
    return [result.completion.kind, text, result.function, reward, milliseconds, result.error]


def _shortened(text: str, most: int) -> str:
    """At most so many characters, with what does not print escaped."""
    shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[:most])
    return f"{shown}..." if len(text) > most else shown


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number
