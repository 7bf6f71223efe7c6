"""The `leeway` command and its verbs. A verb imports what it needs when it runs, so that `--help` is quick.

Exit status: 0 done; 1 the run failed; 2 the input is wrong, and nothing was started; 130 interrupted. A `ConfigError`
that leaves a verb ends the command with status 2.
"""

from __future__ import annotations

import sys

from launch.errors import ConfigError, ExitStatus, failed, hiding_module, open_streams, refuse

if hidden := hiding_module(names={*sys.stdlib_module_names, "typer"}):  # before anything that it may hide is imported
    sys.exit(refuse(hidden, ExitStatus.WRONG_INPUT))

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from launch.arguments import ConfigPath, ConfigVerb, DryRun, Json, NewestRun, RunPath, integer

if TYPE_CHECKING:
    from typer._click import Command, Context

    from launch.observe.status import StatusView

RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",  # Ray's default; set explicitly it prints no banner
    "RAY_USAGE_STATS_ENABLED": "0",
    # the supervisor inspects every call itself, and reports which role died
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's own is 15: beside anything else that computes a start takes minutes
    "RAY_worker_niceness": "0",
    # one for each core, which no role would take: each starts its own
    "RAY_prestart_worker_first_driver": "0",
}
"""Read when Ray is imported, so it is set before."""
SCALE_TIMEOUT_S = 30.0
"""A launcher that evaluates or exports answers afterwards."""
MAX_COUNT = 1024
"""An actor is a process with an engine: a larger pool is a typing error."""
LAZY_VERBS = {
    "buffer": ("launch.buffer_cli:app", "Inspect, verify or export the buffer of a run."),
    "profile": ("planning.verbs:app", "Measure what a run costs on this machine."),
    "plan": ("planning.verbs:app", "Find the fastest configuration by a profile."),
}
"""Verb -> its app, and its line in `leeway --help`."""
READ_PLAN = "planning.plans:read_plan"
READ_CONFIGS = ("train", "resume", "check-reward", "profile", "plan")
"""Verbs that start processes, which look for modules in the current folder first."""


class Verbs(TyperGroup):
    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 -- as Typer gives them
        """Add the lazy verbs, each by its name and help alone."""
        super().__init__(**settings)
        for name, (_, text) in LAZY_VERBS.items():
            self.add_command(TyperCommand(name, help=text))

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        """Return the verb that is asked for, with its module imported."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in LAZY_VERBS:
            command = get_command(resolve_name(LAZY_VERBS[name][0]))
            if isinstance(command, TyperGroup):
                command = command.commands.get(name, command)
        return name, command, rest


app = typer.Typer(cls=Verbs, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    open_streams()
    status: int = ExitStatus.OK
    try:
        try:
            command = get_command(app)
            if "_LEEWAY_COMPLETE" in os.environ:  # as the shell sets it to complete a word
                command.main(prog_name="leeway")
            words = [*(sys.argv[1:] if arguments is None else arguments)]
            with command.make_context("leeway", words) as context:
                status = int(command.invoke(context))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = refuse("interrupted", ExitStatus.INTERRUPTED)
    except typer.Exit as done:
        status = done.exit_code
    except typer.TyperException as error:
        status = refuse(_sentence(error), ExitStatus.WRONG_INPUT)
    except Exception as error:
        status = failed(error, status)
    return status


def _sentence(error: typer.TyperException) -> str:
    """Return what is wrong with the arguments, and the command that explains them."""
    text = error.format_message().replace("Value error, ", "").strip()
    context = getattr(error, "ctx", None)
    end = "" if text.endswith((".", "?")) else "."
    return text if context is None else f"{text}{end} See `{context.command_path} --help`"


@app.callback()
def prepare(context: typer.Context) -> None:
    """Asynchronous off-policy reinforcement learning for language models."""
    from launch.host import check_folder, settle_home

    settle_home()
    if context.invoked_subcommand in READ_CONFIGS:
        check_folder()


# --- runs ---------------------------------------------------------------------------------------------


@app.command(cls=ConfigVerb)
def train(
    context: typer.Context,
    config: ConfigPath,
    dry_run: DryRun = False,
    plan: Annotated[
        Path | None, typer.Option(metavar="PLAN.toml", help="A plan of `leeway plan`; overrides win over it.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="SOURCE", help="Train on the recorded samples of a run, an export or a .jsonl file."
        ),
    ] = None,
) -> int:
    """Train a model as CONFIG says.

    Any key can be overridden after CONFIG: --learner.num_steps 20. The first Ctrl-C finishes the step, writes a
    checkpoint and ends the run; the second ends it at once.
    """
    from common.process import uncollected

    with uncollected():  # most of a check is imports
        from launch.checks import check, with_limits
        from launch.config import load_config
        from launch.run_folder import choose_root, named_run

        chosen: list[str] = []
        if source is not None:
            chosen.append(f"--buffer.source={json.dumps(str(named_run(source)))}")
        if plan is not None:
            chosen += resolve_name(READ_PLAN)(plan)
        found = load_config(config, [*chosen, *context.args])
        checked = with_limits(check(found, choose_root(found, config)))
        if dry_run:
            print(checked.describe())
            return ExitStatus.OK
        from launch.train import train
    return train(checked)


@app.command(cls=ConfigVerb)
def resume(context: typer.Context, run: RunPath, dry_run: DryRun = False) -> int:
    """Resume a run from its latest checkpoint.

    Nothing that its buffer acknowledged is lost. Keys that may change can be overridden: --learner.num_steps 200.
    """
    from launch.checks import with_limits
    from launch.resume import resume
    from launch.run_folder import claimed, open_run

    with ExitStack() as stack:
        try:
            folder = open_run(run)
            stack.enter_context(claimed(folder))
            found = resume(folder, context.args, lambda text: print(text, flush=True))
        except OSError as error:
            return refuse(error, ExitStatus.WRONG_INPUT)
        if dry_run:
            print(found.plan.describe())
            print(found.describe())
            return ExitStatus.OK
        from launch.train import train

        return train(with_limits(found.plan), found.history)


@app.command()
def scale(
    run: RunPath,
    count: Annotated[int, typer.Option(metavar="N", help="Actors of the pool.", parser=integer(0, MAX_COUNT))],
    pool: Annotated[str, typer.Option(metavar="NAME", help="Name of the pool, as in [pools.NAME].")] = "actors",
) -> int:
    """Scale an actor pool of a running job.

    Actors that leave requeue their leased prompts; new ones start when a host has room. Exit status: 1 if the launcher
    is gone or does not answer, 2 if the run refuses the count.
    """
    from launch.observe.status import why_nobody_works
    from launch.run_folder import NoAnswer, ask, open_run

    folder = open_run(run)
    if why := why_nobody_works(folder):
        return refuse(why)
    try:
        print(ask(folder.control, {"verb": "scale", "pool": pool, "count": count}, SCALE_TIMEOUT_S))
    except NoAnswer as error:
        return refuse(error)
    return ExitStatus.OK


@app.command()
def export(
    run: RunPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Step of the checkpoint; default: the newest whole one.")
    ] = None,
) -> int:
    """Export the model of a run as a Hugging Face folder.

    The run may be running. Starts neither Ray nor an engine.
    """
    from launch.model_folder import export
    from launch.run_folder import open_run

    try:
        progress, size_bytes = export(open_run(run), out.expanduser(), step, refuse)
    except OSError as error:
        return refuse(error, ExitStatus.WRONG_INPUT)
    print(f"version {progress.version}, of step {progress.step}, is in {out} ({size_bytes / 2**20:.1f} MiB)")
    return ExitStatus.OK


# --- views of a run, running or ended, which do not wait for torch ---------------------------------------


@app.command()
def status(run: NewestRun = None, as_json: Json = False) -> int:
    """Print the status of a run.

    Exit status: 0 if it is running or done; 1 if it failed, was stopped, or its launcher is gone; 2 if there is none.
    """
    import msgspec

    from launch.observe.status import find_run, look

    seen = look(find_run(run))
    if as_json:
        document = {**msgspec.to_builtins(seen.status, str_keys=True), "gone": seen.gone, "resuming": seen.resuming}
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


@app.command()
def top(
    run: NewestRun = None, once: Annotated[bool, typer.Option("--once", help="Print one view and exit.")] = False
) -> int:
    """Show a live view of a run.

    It has rates, lags, waits, the ledger and the last events. Reads files only, so it also works after the run.
    The key q quits.
    """
    from rich.console import Console

    from launch.observe.status import StatusError, find_run, look
    from launch.observe.view import View, show

    console = Console(highlight=False, markup=False)
    folder = find_run(run)
    seen = look(folder)
    if once or not console.is_terminal or console.is_dumb_terminal or not sys.stdin.isatty():
        console.print(View(seen.status, seen.now_s, gone=seen.gone, note=seen.resuming), end="")
        return ExitStatus.OK

    def view() -> View:
        nonlocal seen
        try:
            seen = look(folder)
            note = seen.resuming
        except StatusError:  # the folder is being removed, say; what was seen stays
            note = "cannot be read any more"
        return View(seen.status, seen.now_s, gone=seen.gone, note=note)

    with suppress(KeyboardInterrupt):
        show(view, console)
    return ExitStatus.OK


@app.command()
def report(
    run: RunPath,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write here instead of into RUN.")] = None,
) -> int:
    """Write one HTML page that shows a run.

    It has learning, health, waits and the effect of lag. The run may be running, ended or broken; the page names what
    is missing.
    """
    from launch.report.data import collect
    from launch.report.page import write
    from launch.run_folder import open_run

    folder = open_run(run)
    out = out or folder.report
    if out.is_dir():
        raise ConfigError(f"{out} is a folder; give --out the name of a file")
    found = collect(folder)
    try:
        size = write(found, out)
    except OSError as error:
        return refuse(f"{out} cannot be written: {error.strerror}; give another --out FILE")
    for sentence in found.missing:
        print(f"{found.name}: {sentence}")
    print(f"{out} ({size / 2**20:.1f} MiB)")
    return ExitStatus.OK


# --- checks ---------------------------------------------------------------------------------------------


@app.command(cls=ConfigVerb)
def doctor(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.toml", help="Check also a run of this config.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Check this machine's environment.

    Checks versions, GPUs, disk, memory, ports, Ray, W&B and processes of dead runs, and prints what to do. Takes up to
    half a minute and changes nothing. Exit status 1: there is a problem.
    """
    from launch.doctor import run_checks, show
    from launch.text import progress_line

    with progress_line() as progress:
        progress("checking this machine; loading vLLM alone takes ten seconds", None)
        findings = run_checks(config, context.args)
    return ExitStatus.FAILED if show(findings, as_json=as_json) else ExitStatus.OK


@app.command(cls=ConfigVerb)
def check_reward(
    context: typer.Context,
    config: ConfigPath,
    num: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of problems; default: 64, or what fits a minute.", min=1),
    ] = None,
    completion: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Score this completion too; may be repeated.")
    ] = None,
) -> int:
    """Test rewards on correct, wrong and malformed completions.

    Each function runs in a process of its own; neither an engine nor Ray starts. Exit status 1: there is a problem.
    """
    from launch.config import load_config
    from launch.reward_check import check_rewards

    return check_rewards(load_config(config, context.args), num, completion or [])


if __name__ == "__main__":
    sys.exit(main())
