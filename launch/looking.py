"""A verb of `leeway`, and those that look at a run, live or over: status, top, report, trace. None waits for torch.

A verb is a function that does it, whose docstring is what `--help` says of it, and its arguments.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from launch.errors import ConfigError, ExitStatus, refuse

if TYPE_CHECKING:
    from launch.observe.status import StatusView

Argument = tuple[tuple[str, ...], dict[str, Any]]
Run = Callable[[argparse.Namespace], int]
"""Takes the parsed arguments, returns the exit status; imports what it needs when it runs, so `--help` is quick.

What is left over of the arguments is in `overrides`: of a config, for the verbs that take them.
"""


class Verb(NamedTuple):
    """One verb, or a group of them."""

    name: str
    add_to: Callable[[Any], None]
    """Adds its parser to those of `leeway`, for which argparse has no public type."""


def verb(
    text: str, *arguments: Argument, epilog: str | None = None, takes_overrides: bool = False
) -> Callable[[Run], Verb]:
    """The verb that a function of its name does, with this help and these arguments.

    One that takes overrides of a config, as `--learner.num_steps 20`, has no option that can be abbreviated.
    """

    def make(run: Run) -> Verb:
        name = run.__name__.replace("_", "-")

        def add_to(parsers: Any) -> None:  # noqa: ANN401 -- as above
            described = " ".join((inspect.getdoc(run) or "").split())
            parser = parsers.add_parser(
                name, help=text, description=described, epilog=epilog, allow_abbrev=not takes_overrides
            )
            for names, options in arguments:
                parser.add_argument(*names, **options)
            parser.set_defaults(run_verb=run, takes_overrides=takes_overrides)

        return Verb(name, add_to)

    return make


def arg(*names: str, **options: Any) -> Argument:  # noqa: ANN401 -- as argparse takes them
    return names, options


def flag(name: str, text: str) -> Argument:
    return arg(name, action="store_true", help=text)


def of_run(text: str = "a run's folder, or its name within runs/", **options: Any) -> Argument:  # noqa: ANN401
    return arg("run", type=Path, metavar="RUN", help=text, **options)


# --- those that look at a run ----------------------------------------------------------------------

_NEWEST_RUN = of_run("a run's folder, or its name within runs/; default: the newest", nargs="?")


@verb(
    "how a run does",
    _NEWEST_RUN,
    flag("--json", "all of status.json, with 'gone' and 'resuming'"),
    epilog="Exit status: 0 it goes on or is done; 1 it failed, was stopped, or its command is gone; 2 no such run.",
)
def status(parsed: argparse.Namespace) -> int:
    """Say how a run does: one that lives, one that is over, or one whose command is gone."""
    import msgspec

    from launch.observe.status import find_run, look

    seen = look(find_run(parsed.run))
    if parsed.json:
        all_of_it = msgspec.to_builtins(seen.status, str_keys=True)
        document = {**all_of_it, "gone": seen.gone, "resuming": seen.resuming}
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    else:
        for line in _status_lines(seen):
            print(line)
    return ExitStatus.OK if seen.is_well else ExitStatus.FAILED


def _status_lines(seen: StatusView) -> Iterator[str]:
    from buffer.ledger import COUNTS
    from launch.observe.status import SILENT_S
    from launch.observe.view import failures, line
    from launch.text import duration, printable

    status = seen.status
    yield f"{status.run}  {status.folder}"
    if seen.resuming:
        yield f"{seen.resuming}; what follows is of before"
    elif status.ended is not None:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.ended.at_s))
        yield f"ended at {moment} with exit status {status.ended.exit_status}: {status.ended.text}"
    elif seen.gone:
        yield seen.gone
    else:
        since = duration(seen.now_s - status.phase_since_s)
        yield f"{status.phase}, for {since}; process {status.pid} on {status.host}"
        silent_s = seen.now_s - (status.polled_s or status.written_s)
        if silent_s > SILENT_S and status.polled_s is not None:
            yield f"the figures are {silent_s:.0f} s old"
    yield line(status).strip()
    for pool in status.pools:
        yield (
            f"pool {pool.name}: {pool.working} of {pool.wanted} actors work, {pool.running} samples running, "
            f"{pool.tokens_per_s:,.0f} tokens/s"
        )
    for actor in status.actors:
        if actor.state.startswith("lost"):
            yield f"{actor.name} is {actor.state}; see {actor.log}"
    if status.buffer is not None:
        ledger = status.buffer.ledger
        yield (
            f"buffer: {status.buffer.ready_groups} groups ready; samples: "
            f"{', '.join(f'{name} {ledger.get(name, 0)}' for name in (*COUNTS, 'gap'))}"
        )
        if failed := failures(ledger, status.buffer.failed_by_reason):
            yield failed
    for each in status.evaluations[-1:]:
        yield each.describe()
    for event in status.events[-3:]:
        yield f"{time.strftime('%H:%M:%S', time.localtime(event.time_s))}  {printable(event.text)}"


@verb(
    "a live view of a run",
    _NEWEST_RUN,
    flag("--once", "print one view and end"),
    epilog="Exit status: 0; 2 no such run.",
)
def top(parsed: argparse.Namespace) -> int:
    """Show a run as it goes on: rates, lags, who waits for whom, the ledger, the last events.

    It reads files only, so it may run beside the command, or after it. Keys: q quits, p pauses.
    """
    from rich.console import Console

    from launch.observe.display import show
    from launch.observe.status import StatusError, find_run, look
    from launch.observe.view import View

    console = Console(highlight=False, markup=False)
    folder = find_run(parsed.run)
    seen = look(folder)
    if parsed.once or not console.is_terminal or console.is_dumb_terminal:
        console.print(View(seen.status, seen.now_s, gone=seen.gone, note=seen.resuming), end="")
        return ExitStatus.OK

    def view(is_paused: bool) -> View:
        nonlocal seen
        note = "paused"
        if not is_paused:
            try:
                seen = look(folder)
                note = seen.resuming
            except StatusError:  # the folder is being removed, say; what was seen stays
                note = "cannot be read any more"
        return View(seen.status, seen.now_s, gone=seen.gone, note=note)

    try:
        show(view, console)
    except KeyboardInterrupt:
        return ExitStatus.OK
    return ExitStatus.OK


@verb(
    "write one HTML page that shows a run",
    of_run(),
    arg("--out", type=Path, metavar="FILE", help="default: report.html in RUN"),
)
def report(parsed: argparse.Namespace) -> int:
    """Write one HTML page that shows a run: is it learning, is it healthy, who waits for what, does the lag hurt.

    It needs nothing but itself. The run may be live, over or broken: the page says what is missing.
    """
    from launch.host import private_files
    from launch.report.data import collect
    from launch.report.page import write
    from launch.run_folder import open_run

    folder = open_run(parsed.run)
    out = parsed.out or folder.report
    if out.is_dir():
        raise ConfigError(f"{out} is a folder; give --out the name of a file, as in report.html")
    with private_files():
        run = collect(folder)
        try:
            size = write(run, out)
        except OSError as error:
            return refuse(f"{out} cannot be written: {error.strerror}; give another --out FILE")
    for sentence in run.missing:
        print(f"{run.name}: {sentence}")
    print(f"{out} ({size / 2**20:.1f} MiB)")
    return ExitStatus.OK


@verb(
    "write the timeline of a run as a trace for ui.perfetto.dev",
    of_run(),
    arg("--out", type=Path, metavar="FILE", help="default: trace.json in RUN"),
)
def trace(parsed: argparse.Namespace) -> int:
    """Write the timeline of a run, live or over, as a trace for ui.perfetto.dev or chrome://tracing."""
    from launch.host import private_files
    from launch.observe.trace import finish
    from launch.run_folder import open_run

    folder = open_run(parsed.run)
    out = parsed.out or folder.root / "trace.json"
    if out.is_dir():
        raise ConfigError(f"{out} is a folder; give --out the name of a file, as in trace.json")
    if not folder.timeline.is_file():
        return refuse(
            f"{folder.timeline} is not there: the run is of an older Leeway, or it ended before it began; a run that "
            "is started now has one"
        )
    try:
        with private_files():
            num_spans, num_counters = finish(folder.timeline, out)
    except (OSError, ValueError) as error:
        return refuse(f"no trace: {error}")
    print(
        f"{out} ({out.stat().st_size / 2**20:.1f} MiB): {num_spans} spans, {num_counters} values of counters; "
        "open it in ui.perfetto.dev"
    )
    return ExitStatus.OK
