"""The `leeway` command and its subcommands. Each subcommand imports its modules when it runs, so `--help` is fast.

Exit status: 0: success; 1: the run failed; 2: the input is invalid, and nothing was started; 130: interrupted. If a
subcommand raises `ConfigError`, the command ends with status 2.
"""

from __future__ import annotations

import sys

from leeway.launch.errors import ConfigError, ExitStatus, hiding_module, open_streams, print_error, report_failure

if hidden := hiding_module(names={*sys.stdlib_module_names, "typer"}):  # before imports that a file may shadow
    sys.exit(print_error(hidden, ExitStatus.WRONG_INPUT))

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

from leeway.launch.arguments import ConfigPath, ConfigVerb, DryRun, Json, NewestRun, RunPath, integer

if TYPE_CHECKING:
    from typer._click import Command, Context

    from leeway.launch.observe.status import StatusView

RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",  # Ray's default; if it is set explicitly, Ray prints no banner
    "RAY_USAGE_STATS_ENABLED": "0",
    # the supervisor inspects every call itself, and reports which role died
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # with Ray's default of 15, startup on a busy machine takes minutes
    "RAY_worker_niceness": "0",
    # by default, Ray starts one worker per core in advance; the processes of a run do not use these workers
    "RAY_prestart_worker_first_driver": "0",
}
"""Environment variables that must be set before Ray is imported, because the import reads them."""
SCALE_TIMEOUT_S = 30.0
"""Seconds that `scale` waits for an answer; a launcher that evaluates or exports answers only afterwards."""
MAX_COUNT = 1024
"""Maximum pool size that `scale` accepts; a larger count is probably a typing error: each actor runs an engine."""
LAZY_VERBS = {
    "ls": ("leeway.launch.run_verbs:app", "List the runs of a folder."),
    "logs": ("leeway.launch.run_verbs:app", "Print the last lines of the logs of a run."),
    "stop": ("leeway.launch.run_verbs:app", "End a run after its current step and a checkpoint."),
    "buffer": ("leeway.launch.buffer_cli:app", "Inspect, verify or export the buffer of a run."),
    "profile": ("leeway.planning.verbs:app", "Measure the costs of a run on this machine."),
    "plan": ("leeway.planning.verbs:app", "Find the fastest configuration, using a profile."),
}
"""Subcommand -> its app, which is imported on use, and its line in `leeway --help`."""
READ_PLAN = "leeway.planning.plans:read_plan"
READ_CONFIGS = ("train", "resume", "check-reward", "profile", "plan")
"""Subcommands whose child processes search the current folder first when they import modules."""


class Verbs(TyperGroup):
    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 -- passed by Typer
        """Add the lazy subcommands with only their names and help texts."""
        super().__init__(**settings)
        for name, (_, text) in LAZY_VERBS.items():
            self.add_command(TyperCommand(name, help=text))

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        """Return the requested subcommand, after importing its module."""
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
            if "_LEEWAY_COMPLETE" in os.environ:  # set by the shell for completion
                command.main(prog_name="leeway")
            words = [*(sys.argv[1:] if arguments is None else arguments)]
            with command.make_context("leeway", words) as context:
                status = int(command.invoke(context))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = print_error("interrupted", ExitStatus.INTERRUPTED)
    except typer.Exit as finished:
        status = finished.exit_code
    except typer.TyperException as error:
        status = print_error(_sentence(error), ExitStatus.WRONG_INPUT)
    except Exception as error:
        status = report_failure(error, status)
    return status


def _sentence(error: typer.TyperException) -> str:
    """Return the message of an argument error, with the `--help` command that explains the arguments."""
    text = error.format_message().replace("Value error, ", "").strip()
    context = getattr(error, "ctx", None)
    end = "" if text.endswith((".", "?")) else "."
    return text if context is None else f"{text}{end} See `{context.command_path} --help`"


def print_version(is_given: bool) -> None:
    if is_given:
        from importlib.metadata import version

        print(f"leeway {version('leeway-rl')}")
        raise typer.Exit


@app.callback()
def prepare(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True)] = False,
) -> None:
    """Asynchronous off-policy reinforcement learning for language models."""
    from leeway.launch.host import ensure_home

    ensure_home()
    if context.invoked_subcommand in READ_CONFIGS and (hidden := hiding_module(os.getcwd())):
        raise ConfigError(hidden)


# --- runs ---------------------------------------------------------------------------------------------


@app.command(cls=ConfigVerb)
def train(
    context: typer.Context,
    config: ConfigPath,
    dry_run: DryRun = False,
    plan: Annotated[
        Path | None, typer.Option(metavar="PLAN.toml", help="Plan file of `leeway plan`; overrides take precedence.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="SOURCE", help="Train on the recorded samples of a run, an export or a .jsonl file."
        ),
    ] = None,
) -> int:
    """Train a model with the settings in CONFIG.

    Any key can be overridden after CONFIG: --learner.num_steps 20. The first Ctrl-C finishes the step, writes a
    checkpoint and ends the run; the second Ctrl-C ends the run immediately.
    """
    from leeway.common.process import fast_imports

    with fast_imports():  # speeds up the imports, which take most of the time of a check
        from leeway.launch.checks import check, with_limits
        from leeway.launch.config import load_config
        from leeway.launch.run_folder import choose_root, named_run

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
        from leeway.launch.train import train
    return train(checked)


@app.command(cls=ConfigVerb)
def resume(context: typer.Context, run: RunPath, dry_run: DryRun = False) -> int:
    """Resume a run from its latest checkpoint.

    Samples that the buffer acknowledged are kept. Keys that may change can be overridden: --learner.num_steps 200.
    """
    from leeway.launch.checks import with_limits
    from leeway.launch.resume import resume
    from leeway.launch.run_folder import claimed, open_run

    with ExitStack() as stack:
        try:
            folder = open_run(run)
            stack.enter_context(claimed(folder))
            found = resume(folder, context.args, lambda text: print(text, flush=True))
        except OSError as error:
            return print_error(error, ExitStatus.WRONG_INPUT)
        if dry_run:
            print(found.plan.describe())
            print(found.describe())
            return ExitStatus.OK
        from leeway.launch.train import train

        return train(with_limits(found.plan), found.history)


@app.command()
def scale(
    run: RunPath,
    count: Annotated[int, typer.Option(metavar="N", help="Number of actors.", parser=integer(0, MAX_COUNT))],
    pool: Annotated[str, typer.Option(metavar="NAME", help="Name of the pool, as in [pools.NAME].")] = "actors",
) -> int:
    """Scale an actor pool of a running job.

    Removed actors requeue their leased prompts; new actors start when a host has room. Exit status: 1 if the launcher
    has exited or does not answer, 2 if the run rejects the count.
    """
    from leeway.launch.observe.status import why_stopped
    from leeway.launch.run_folder import NoAnswer, open_run, send_request

    folder = open_run(run)
    if why := why_stopped(folder):
        return print_error(why)
    try:
        print(send_request(folder.control, {"verb": "scale", "pool": pool, "count": count}, SCALE_TIMEOUT_S))
    except NoAnswer as error:
        return print_error(error)
    return ExitStatus.OK


@app.command()
def export(
    run: RunPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Step of the checkpoint; default: the newest intact checkpoint.")
    ] = None,
) -> int:
    """Export the model of a run as a Hugging Face folder.

    The run may be active. The command starts neither Ray nor an engine.
    """
    from leeway.launch.model_folder import export
    from leeway.launch.run_folder import open_run

    try:
        progress, size_bytes = export(open_run(run), out.expanduser(), step, print_error)
    except OSError as error:
        return print_error(error, ExitStatus.WRONG_INPUT)
    print(f"exported version {progress.version} of step {progress.step} to {out} ({size_bytes / 2**20:.1f} MiB)")
    return ExitStatus.OK


# --- views of an active or ended run; these subcommands do not import torch ------------------------------------


@app.command()
def status(run: NewestRun = None, as_json: Json = False) -> int:
    """Print the status of a run.

    Exit status: 0 if the run is active or done; 1 if it failed, was stopped or lost its launcher; 2 if not found.
    """
    import msgspec

    import leeway
    from leeway.launch.observe.status import find_run

    view = leeway.load_run(find_run(run).root).view()
    if as_json:
        document = {**msgspec.to_builtins(view.status, str_keys=True), "gone": view.gone, "resuming": view.resuming}
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    else:
        for line in _status_lines(view):
            print(line)
    return ExitStatus.OK if view.is_healthy else ExitStatus.FAILED


def _status_lines(view: StatusView) -> Iterator[str]:
    from leeway.buffer.ledger import COUNTS
    from leeway.launch.observe.status import SILENT_S
    from leeway.launch.observe.view import failures, line
    from leeway.launch.text import duration, printable

    status = view.status
    yield f"{status.run}  {status.folder}"
    if view.resuming:
        yield f"{view.resuming}; the lines below are from the earlier launch"
    elif status.ended is not None:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.ended.at_s))
        yield f"ended at {moment} with exit status {status.ended.exit_status}: {status.ended.text}"
    elif view.gone:
        yield view.gone
    else:
        since = duration(view.now_s - status.phase_since_s)
        yield f"{status.phase}, for {since}; process {status.pid} on {status.host}"
        silent_s = view.now_s - (status.polled_s or status.written_s)
        if silent_s > SILENT_S and status.polled_s is not None:
            yield f"the values below are {silent_s:.0f} s old"
    yield line(status)
    for pool in status.pools:
        yield (
            f"pool {pool.name}: {pool.working} of {pool.wanted} actors running, {pool.running} samples in flight, "
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

    The view has rates, lags, waits, the ledger and the last events. The command reads only files, so it also works
    after the run. Press q to quit.
    """
    from rich.console import Console

    from leeway.launch.observe.status import StatusError, find_run, view_run
    from leeway.launch.observe.view import View, show

    console = Console(highlight=False, markup=False)
    folder = find_run(run)
    latest = view_run(folder)
    if once or not console.is_terminal or console.is_dumb_terminal or not sys.stdin.isatty():
        console.print(View(latest.status, latest.now_s, gone=latest.gone, note=latest.resuming), end="")
        return ExitStatus.OK

    def view() -> View:
        nonlocal latest
        try:
            latest = view_run(folder)
            note = latest.resuming
        except StatusError:  # for example, the folder was removed; the view keeps the last status
            note = "can no longer be read"
        return View(latest.status, latest.now_s, gone=latest.gone, note=note)

    with suppress(KeyboardInterrupt):
        show(view, console)
    return ExitStatus.OK


@app.command()
def report(
    run: NewestRun = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Output file; default: report.html in RUN.")] = None,
) -> int:
    """Write a report of a run as one HTML page.

    The page shows learning, health, waits and the effect of lag. The run may be active, ended or damaged; the page
    lists missing data.
    """
    from leeway.launch.observe.status import find_run
    from leeway.launch.report.data import collect
    from leeway.launch.report.page import write

    folder = find_run(run)
    out = out or folder.report
    if out.is_dir():
        raise ConfigError(f"{out} is a folder; give the name of a file as --out FILE")
    found = collect(folder)
    try:
        size = write(found, out)
    except OSError as error:
        return print_error(f"{out} cannot be written: {error.strerror}; give another --out FILE")
    for sentence in found.missing:
        print(f"{found.name}: {sentence}")
    print(f"{out} ({size / 2**20:.1f} MiB)")
    return ExitStatus.OK


# --- checks ---------------------------------------------------------------------------------------------


@app.command(cls=ConfigVerb)
def doctor(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.toml", help="Also check a run of this config.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Check this machine's environment.

    The checks cover versions, GPUs, disk, memory, ports, Ray, W&B and leftover processes of runs. The checks change
    nothing, print fixes, and take up to half a minute, or two minutes with CUDA. Exit status: 1 if a problem is found.
    """
    from leeway.launch.doctor import run_checks, show
    from leeway.launch.text import progress_line

    with progress_line() as progress:
        progress("checking this machine; the import of vLLM takes ten seconds", None)
        results = run_checks(config, context.args)
    return ExitStatus.FAILED if show(results, as_json=as_json) else ExitStatus.OK


@app.command(cls=ConfigVerb)
def check_reward(
    context: typer.Context,
    config: ConfigPath,
    num: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of problems; default: 64, or as many as fit in a minute.", min=1),
    ] = None,
    completion: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Score this completion too; may be repeated.")
    ] = None,
) -> int:
    """Test rewards on correct, wrong and malformed completions.

    Each function runs in its own process; neither an engine nor Ray is started. Exit status: 1 if there is a problem.
    """
    from leeway.launch.config import load_config
    from leeway.launch.reward_check import check_rewards

    return check_rewards(load_config(config, context.args), num, completion or [])


if __name__ == "__main__":
    sys.exit(main())
