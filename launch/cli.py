"""The `leeway` command: its verbs and their arguments. What they do is in `launch.verbs`.

Exit status: 0 done; 1 the run failed; 2 the input is wrong, and nothing was started; 130 interrupted.
Those of `leeway buffer` are in `launch.buffer_cli`.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch import verbs
from launch.errors import ConfigError, ExitStatus, refuse

RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",  # Ray's default; said aloud it prints no banner
    "RAY_USAGE_STATS_ENABLED": "0",
    # the supervisor looks at every call itself, and says which role died
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Read when Ray is imported, so it is set before."""
MAX_COUNT = 1024
"""An actor is a process with an engine: more of them in one pool is a slip of the hand."""
PHASES = ("open", "ready", "drawn", "closed")
INDEXES = ("prompt", "version", "reward", "length")
_MAX_INTEGER = 2**63 - 1
_CTRL_C = "Ctrl-C once: finish the step, write a checkpoint, end. Twice: stop now."

_Entry = Callable[[Any], object]
"""Adds an argument, or a group of them, to a parser; argparse has no public type for what takes them."""


@dataclass(frozen=True)
class Verb:
    """A row of the table."""

    name: str
    help: str
    run: Callable[[argparse.Namespace], int] | None
    """Takes the parsed arguments, returns the exit status; imports what it needs when it runs, so `--help` is quick."""
    entries: Sequence[_Entry] = ()
    description: str | None = None
    epilog: str | None = None
    takes_overrides: bool = False
    """Of a config, as `--learner.num_steps 20`; then no option is abbreviated."""
    parts: Sequence[Verb] = ()

    def add_to(self, parsers: Any, dest: str = "") -> None:  # noqa: ANN401 -- as above
        """Add its parser, and those of its parts."""
        parser = parsers.add_parser(
            self.name,
            help=self.help,
            description=self.description,
            epilog=self.epilog,
            allow_abbrev=not self.takes_overrides,
        )
        for entry in self.entries:
            entry(parser)
        if self.run is not None:
            parser.set_defaults(run_verb=self.run, takes_overrides=self.takes_overrides)
        if self.parts:
            parts = parser.add_subparsers(dest=dest or f"{self.name}_verb", required=True, metavar="VERB")
            for part in self.parts:
                part.add_to(parts)


def _arg(*names: str, **options: Any) -> _Entry:  # noqa: ANN401 -- as argparse takes them
    return lambda into: into.add_argument(*names, **options)


def _flag(name: str, text: str) -> _Entry:
    return _arg(name, action="store_true", help=text)


def _run(text: str = "a run's folder, or its name within runs/", **options: Any) -> _Entry:  # noqa: ANN401
    return _arg("run", type=Path, metavar="RUN", help=text, **options)


def _one_of(*entries: _Entry, required: bool = False) -> _Entry:
    return lambda into: _add(into.add_mutually_exclusive_group(required=required), entries)


def _group(title: str, *entries: _Entry) -> _Entry:
    return lambda into: _add(into.add_argument_group(title), entries)


def _add(into: Any, entries: Sequence[_Entry]) -> None:  # noqa: ANN401 -- as above
    for entry in entries:
        entry(into)


def _integer(text: str, least: int = 0) -> int:
    """A number of the size that the store's keys have."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not least <= number <= _MAX_INTEGER:
        raise argparse.ArgumentTypeError(f"'{text[:40]}' is no whole number from {least} to {_MAX_INTEGER}")
    return number


def _count(text: str) -> int:
    return _integer(text, least=1)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def _num_actors(text: str) -> int:
    if text.isdecimal() and int(text) <= MAX_COUNT:
        return int(text)
    raise argparse.ArgumentTypeError(f"'{text[:20]}' is not from 0 to {MAX_COUNT:,}: say how many actors it needs")


_CONFIG = _arg("config", type=Path, metavar="CONFIG.toml")
_NEWEST_RUN = _run("a run's folder, or its name within runs/; default: the newest", nargs="?")
_BUFFER = _run("a run's folder, its buffer/, or its name within runs/")
_SELECTION = _group(
    "which groups",
    _arg("--prompt", type=_integer, metavar="N", help="of this prompt"),
    _one_of(
        _arg("--version", type=_integer, metavar="V", help="whose oldest token is of policy version V"),
        _arg("--since-version", type=_integer, metavar="V", help="whose oldest token is of version V or newer"),
    ),
    _arg("--min-reward", type=float, metavar="R", help="whose mean reward is at least R"),
    _arg("--max-length", type=_integer, metavar="N", help="none of whose samples has more tokens than N"),
    _arg("--phase", choices=PHASES, help="in this phase of their life"),
)


def _part(name: str, text: str, *entries: _Entry) -> Verb:
    return Verb(name, text, verbs.buffer, (_BUFFER, *entries), description=f"{text.capitalize()}.")


VERBS = (
    Verb(
        "train",
        "train a model as a TOML file says",
        verbs.train,
        (_CONFIG, _flag("--dry-run", "check everything that can be checked, start nothing")),
        description="Train a model as CONFIG says. Any key can be overridden: --learner.num_steps 20.",
        epilog=_CTRL_C,
        takes_overrides=True,
    ),
    Verb(
        "resume",
        "go on with a run where it was killed or has ended",
        verbs.resume,
        (
            _run("folder of the run, or its name within runs/"),
            _flag("--dry-run", "say where it would go on; start nothing"),
        ),
        description="Go on with a run in its own folder, from its newest checkpoint. Nothing that its buffer "
        "acknowledged is lost. Keys for which another value is sound can be overridden: --learner.num_steps 200.",
        epilog=_CTRL_C,
        takes_overrides=True,
    ),
    Verb(
        "scale",
        "let a pool of a living run have more actors, or fewer",
        verbs.scale,
        (
            _run(),
            _arg("--pool", default="actors", metavar="NAME", help="as in [pools.NAME]; default: actors"),
            _arg("--count", type=_num_actors, required=True, metavar="N", help="how many actors it is to have"),
        ),
        description="Let a pool of a run that lives have another number of actors. Those that leave hand back what "
        "they have leased; those that come start when a host has room for them.",
        epilog="Exit status: 0 the run is at it; 1 its command is gone or does not answer; 2 it cannot be so, and "
        "nothing was changed.",
    ),
    Verb(
        "status",
        "how a run does",
        verbs.status,
        (_NEWEST_RUN, _flag("--json", "all of status.json, with 'gone' and 'resuming'")),
        description="Say how a run does: one that lives, one that is over, or one whose command is gone.",
        epilog="Exit status: 0 it goes on or is done; 1 it failed, was stopped, or its command is gone; 2 no such run.",
    ),
    Verb(
        "top",
        "a live view of a run",
        verbs.top,
        (_NEWEST_RUN, _flag("--once", "print one view and end")),
        description="Show a run as it goes on: rates, lags, who waits for whom, the ledger, the last events. It reads "
        "files only, so it may run beside the command, or after it. Keys: q quits, p pauses.",
        epilog="Exit status: 0; 2 no such run.",
    ),
    Verb(
        "report",
        "write one HTML page that shows a run, or two side by side",
        verbs.report,
        (
            _run(),
            _arg("against", type=Path, nargs="?", metavar="RUN2", help="a run to compare it with"),
            _arg(
                "--out",
                type=Path,
                metavar="FILE",
                help="default: report.html in RUN; of two runs, report-RUN2.html there",
            ),
        ),
        description="Write one HTML page that shows a run: curves, timeline, distributions, samples, ledger, config. "
        "It needs nothing but itself. The run may be live, over or broken: the page says what is missing.",
    ),
    Verb(
        "trace",
        "write the timeline of a run as a trace for ui.perfetto.dev",
        verbs.trace,
        (_run(), _arg("--out", type=Path, metavar="FILE", help="default: trace.json in RUN")),
        description="Write the timeline of a run, live or over, as a trace for ui.perfetto.dev or chrome://tracing.",
    ),
    Verb(
        "export",
        "write the model of a run as a Hugging Face folder",
        verbs.export,
        (
            _run("folder of the run, or its name within runs/"),
            _arg("out", type=Path, metavar="OUT", help="the folder to make"),
            _arg("--step", type=int, metavar="N", help="of the checkpoint; by default the newest that is whole"),
        ),
        description="Write the newest whole checkpoint of a run, which may be running, as an ordinary Hugging Face "
        "folder. Starts neither Ray nor an engine.",
    ),
    Verb(
        "doctor",
        "is this machine fit for a run?",
        verbs.doctor,
        (
            _arg("config", type=Path, nargs="?", metavar="CONFIG.toml"),
            _flag("--json", "one JSON document instead of the table"),
        ),
        description="Look at versions, GPUs, disk, memory, ports, Ray, W&B and leftovers of dead runs, and say what to "
        "do; with CONFIG, also whether the run that it describes fits. Takes at most half a minute and changes "
        "nothing. Exit status 1: there is a problem.",
        takes_overrides=True,
    ),
    Verb(
        "check-reward",
        "try a task's reward functions on right, wrong and odd answers",
        verbs.check_reward,
        (
            _CONFIG,
            _arg("--num", type=_positive, default=4, metavar="N", help="how many problems (default: 4)"),
            _arg(
                "--completion",
                action="append",
                default=[],
                metavar="TEXT",
                help="score this too; may be given several times",
            ),
        ),
        description="Load the task of CONFIG as a run does, score right, wrong, empty, odd and very long answers to a "
        "few of its problems, and judge the rewards. Starts no engine and no Ray. Exit status 1: something is wrong.",
        takes_overrides=True,
    ),
    Verb(
        "buffer",
        "look at, verify, export or compact the replay buffer of a run",
        None,
        parts=(
            _part(
                "ls",
                "list the groups of samples",
                _SELECTION,
                _arg("--by", choices=INDEXES, help="complete groups only, in the order of this index"),
                _flag("--reverse", "descending order of --by"),
                _arg("--limit", type=_count, metavar="N", help="the first N only"),
                _flag("--quarantine", "list what failed validation instead, with its reason"),
            ),
            _part(
                "show",
                "show a group and its samples, with their text where the run has a tokenizer",
                _one_of(
                    _arg("group", nargs="?", type=_count, metavar="GROUP", help="the group's id"),
                    _arg("--record", type=_count, metavar="N", help="one stored trajectory, in full"),
                    _arg("--quarantined", type=_count, metavar="N", help="one quarantined row or message"),
                    required=True,
                ),
                _arg("--shard", type=_integer, metavar="S", help="whose --quarantined is meant; default: the first"),
            ),
            _part("verify", "prove every page, checksum and index, and recount the ledger"),
            _part(
                "export",
                "write the stored trajectories as a Parquet file",
                _arg("out", type=Path, metavar="OUT.parquet"),
                _SELECTION,
            ),
            _part("compact", "rewrite the file without its free pages; the run must be over"),
        ),
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parsed = parse(arguments)
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    status: int = ExitStatus.OK
    try:
        status = int(parsed.run_verb(parsed))
        sys.stdout.flush()
    except ConfigError as error:
        status = refuse(error, ExitStatus.WRONG_INPUT)
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
    return status


def _reader_is_gone() -> bool:
    """Has the reader of the standard output closed it, as `head` does? Then what is left to say goes nowhere."""
    out = select.poll()
    out.register(sys.stdout, 0)
    gone = any(events & select.POLLERR for _, events in out.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments, and as `overrides` what is left over: of a config, for the verbs that take them.

    Raises:
        SystemExit: they are wrong; status 2, and a sentence on the standard error.
    """
    parser = argparse.ArgumentParser(
        prog="leeway", description="Asynchronous off-policy reinforcement learning for language models."
    )
    parsers = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in VERBS:
        verb.add_to(parsers)
    parsed, overrides = parser.parse_known_args(arguments)
    if overrides and not parsed.takes_overrides:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    parsed.overrides = overrides
    return parsed


if __name__ == "__main__":
    sys.exit(main())
