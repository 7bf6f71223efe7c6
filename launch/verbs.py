"""What the verbs of `leeway` do: each takes the parsed arguments and returns the exit status.

What a verb needs it imports when it runs, so that `leeway --help` is quick and a look at a run does not wait for
torch. A `ConfigError` that leaves a verb ends the command with status 2 (`launch.cli`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

from launch.errors import ConfigError, ExitStatus, refuse

if TYPE_CHECKING:
    from launch.observe.status import StatusView
    from launch.run_folder import RunFolder

PATIENCE_S = 30.0
"""Of `leeway scale`: a command that evaluates or exports answers after it, and says nothing before."""


def train(parsed: argparse.Namespace) -> int:
    """Train, or say what is wrong with the config."""
    from launch.checks import check, check_prompts
    from launch.config import load_config
    from launch.run_folder import choose_root

    config = load_config(parsed.config, parsed.overrides)
    plan = check(config, choose_root(config, parsed.config))
    if parsed.dry_run:
        check_prompts(plan)  # a run has its actors look, at once with all else that they start with
        print(plan.describe())
        return ExitStatus.OK
    from launch.train import train

    return train(plan)


def resume(parsed: argparse.Namespace) -> int:
    """Go on, or say why not."""
    from launch.resume import resume
    from launch.run_folder import claimed, open_run

    with ExitStack() as stack:
        try:
            folder = open_run(parsed.run)
            stack.enter_context(claimed(folder))
            found = resume(folder, parsed.overrides, lambda text: print(text, flush=True))
        except OSError as error:
            return refuse(error, ExitStatus.WRONG_INPUT)
        if parsed.dry_run:
            print(found.plan.describe())
            print(found.describe())
            return ExitStatus.OK
        from launch.train import train

        return train(found.plan, found.history)


def scale(parsed: argparse.Namespace) -> int:
    """Ask the run's command for another number of actors, and print what it says."""
    from launch.control import Declined, NoAnswer, ask
    from launch.host import private_files
    from launch.run_folder import open_run

    folder = open_run(parsed.run)
    if gone := _why_gone(folder):
        return refuse(gone)
    try:
        with private_files():
            print(ask(folder.control, {"verb": "scale", "pool": parsed.pool, "count": parsed.count}, PATIENCE_S))
    except Declined as error:
        return refuse(error, ExitStatus.WRONG_INPUT)
    except NoAnswer as error:
        return refuse(error)
    return ExitStatus.OK


def _why_gone(folder: RunFolder) -> str:
    """Why nobody would answer; empty where the run's command lives, here or on another host."""
    from launch.observe.status import StatusError, look
    from launch.run_folder import owner_of

    if owner_of(folder) is not None:
        return ""
    try:
        seen = look(folder)
    except StatusError:
        return f"no command works on the run {folder.root}; `leeway resume {folder.root}` goes on with it"
    if (ended := seen.status.ended) is not None:
        return f"the run {folder.root} is over ({ended.text}); `leeway resume {folder.root}` goes on with it"
    return seen.gone


def status(parsed: argparse.Namespace) -> int:
    """Print how a run does, in a few lines or as JSON."""
    import msgspec

    from launch.observe.status import StatusError, find_run, look

    try:
        seen = look(find_run(parsed.run))
    except StatusError as error:
        return refuse(error, ExitStatus.WRONG_INPUT)
    if parsed.json:
        all_of_it = msgspec.to_builtins(seen.status, str_keys=True)
        document = {**all_of_it, "gone": seen.gone, "resuming": seen.resuming}
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    else:
        for line in _status_lines(seen):
            print(line)
    return ExitStatus.OK if seen.is_well else ExitStatus.FAILED


def _status_lines(seen: StatusView) -> Iterator[str]:
    from launch.observe.status import SILENT_S
    from launch.observe.view import line
    from launch.text import duration

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
            f"buffer: {status.buffer.ready_groups} groups ready, {ledger.get('in_flight', 0)} samples in flight, "
            f"{ledger.get('trained', 0)} trained, ledger gap {ledger.get('gap', 0)}"
        )
    for each in status.evaluations[-1:]:
        yield f"accuracy at version {each.versions}: greedy {each.greedy}, sampled {each.sampled}"
    for event in status.events[-3:]:
        yield f"{time.strftime('%H:%M:%S', time.localtime(event.time_s))}  {event.text}"


def top(parsed: argparse.Namespace) -> int:
    """Show a live view of a run until somebody presses q."""
    from rich.console import Console

    from launch.observe.display import show
    from launch.observe.status import StatusError, find_run, look
    from launch.observe.view import View

    console = Console(highlight=False, markup=False)
    try:
        folder = find_run(parsed.run)
        seen = look(folder)
    except StatusError as error:
        return refuse(error, ExitStatus.WRONG_INPUT)
    if parsed.once or not console.is_terminal:
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


def report(parsed: argparse.Namespace) -> int:
    """Write the page and say where it is."""
    from launch.host import private_files
    from launch.report.data import collect
    from launch.report.page import write
    from launch.run_folder import open_run

    folders = [open_run(path) for path in (parsed.run, parsed.against) if path is not None]
    out = parsed.out or (folders[0].report if len(folders) == 1 else folders[0].root / f"report-{folders[1].name}.html")
    if out.is_dir():
        raise ConfigError(f"{out} is a folder; give --out the name of a file, as in report.html")
    with private_files():
        runs = [collect(folder) for folder in folders]
        try:
            size = write(runs, out)
        except OSError as error:
            return refuse(f"{out} cannot be written: {error.strerror}; give another --out FILE")
    for each in runs:
        for sentence in each.missing:
            print(f"{each.name}: {sentence}")
    print(f"{out} ({size / 2**20:.1f} MiB)")
    return ExitStatus.OK


def trace(parsed: argparse.Namespace) -> int:
    """Write the trace and say where it is."""
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


def export(parsed: argparse.Namespace) -> int:
    """Write a checkpoint as a Hugging Face folder, or say why not."""
    from launch.model_folder import export
    from launch.run_folder import open_run

    try:
        done = export(open_run(parsed.run), parsed.out.expanduser(), parsed.step, refuse)
    except OSError as error:
        return refuse(error, ExitStatus.WRONG_INPUT)
    print(f"version {done.version}, of step {done.step}, is in {parsed.out} ({done.size_bytes / 2**20:.1f} MiB)")
    return ExitStatus.OK


def doctor(parsed: argparse.Namespace) -> int:
    """Look at this machine, print, judge."""
    from dataclasses import asdict

    from launch.config import load_config
    from launch.doctor.checkup import checkup
    from launch.doctor.findings import show

    if parsed.config is None and parsed.overrides:
        raise ConfigError("overrides are of a config; give it: leeway doctor CONFIG.toml ...")
    config = None if parsed.config is None else load_config(parsed.config, parsed.overrides)
    findings = list(checkup(config, parsed.config))
    num_problems = sum(finding.state == "problem" for finding in findings)
    if parsed.json:
        print(json.dumps({"problems": num_problems, "findings": [asdict(each) for each in findings]}, indent=2))
    else:
        show(findings)
    return ExitStatus.FAILED if num_problems else ExitStatus.OK


def check_reward(parsed: argparse.Namespace) -> int:
    """Try the reward functions, print, judge."""
    from actors.tasks import TaskError, load_task
    from launch.config import load_config
    from launch.reward_check import check_rewards, show

    config = load_config(parsed.config, parsed.overrides)
    try:
        task = load_task(config.task)
    except TaskError as error:
        raise ConfigError(f"[task] {error}") from None
    limit_s = config.actors.reward_timeout_s
    checked = check_rewards(task, config.task, num_problems=parsed.num, given=parsed.completion, timeout_s=limit_s)
    show(checked)
    found = checked.problems_found()
    for sentence in found:
        print(f"PROBLEM  {sentence}")
    if not found:
        print(f"The rewards of {len(checked.problems)} problems are as they should be.")
    return ExitStatus.FAILED if found else ExitStatus.OK


def buffer(parsed: argparse.Namespace) -> int:
    """Look at the buffer of a run."""
    from launch.buffer_cli import run

    return run(parsed)
