"""The `leeway` command: its verbs, of which those that look at a run are in `launch.looking`.

Exit status: 0 done; 1 the run failed; 2 the input is wrong, and nothing was started; 130 interrupted. A `ConfigError`
that leaves a verb ends the command with status 2.
"""

from __future__ import annotations

import sys

from launch.errors import ConfigError, ExitStatus, as_config_error, failed, hiding_module, open_streams, refuse

if hidden := hiding_module(names=sys.stdlib_module_names):  # before anything that it may hide is imported
    sys.exit(refuse(hidden, ExitStatus.WRONG_INPUT))

import argparse
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from common.process import uncollected
from launch.host import check_folder, settle_home
from launch.looking import Verb, arg, flag, of_run, report, status, top, trace, verb

RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",  # Ray's default; said aloud it prints no banner
    "RAY_USAGE_STATS_ENABLED": "0",
    # the supervisor looks at every call itself, and says which role died
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's own is 15: beside anything else that computes a start takes minutes
    "RAY_worker_niceness": "0",
    # one for each core, which no role would take: each starts its own
    "RAY_prestart_worker_first_driver": "0",
}
"""Read when Ray is imported, so it is set before."""
SCALE_PATIENCE_S = 30.0
"""A command that evaluates or exports answers after it, and says nothing before."""
MAX_COUNT = 1024
"""An actor is a process with an engine: more of them in one pool is a slip of the hand."""
PHASES = ("open", "ready", "drawn", "closed")
_MAX_INTEGER = 2**63 - 1
_CTRL_C = "Ctrl-C once: finish the step, write a checkpoint, end. Twice: stop now."


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


def _num_actors(text: str) -> int:
    if text.isdecimal() and int(text) <= MAX_COUNT:
        return int(text)
    raise argparse.ArgumentTypeError(f"'{text[:20]}' is not from 0 to {MAX_COUNT:,}: say how many actors it needs")


_CONFIG = arg("config", type=Path, metavar="CONFIG.toml")


@verb(
    "train a model as a TOML file says",
    _CONFIG,
    flag("--dry-run", "check everything that can be checked, start nothing"),
    arg("--plan", type=Path, metavar="PLAN.toml", help="as `leeway plan` wrote it; the command line wins over it"),
    arg(
        "--from",
        type=Path,
        metavar="SOURCE",
        dest="source",
        help="on the recorded samples of a run, or of a .jsonl or .parquet file, alone",
    ),
    epilog=_CTRL_C,
    takes_overrides=True,
)
def train(parsed: argparse.Namespace) -> int:
    """Train a model as CONFIG says. Any key can be overridden: --learner.num_steps 20."""
    with uncollected():  # to check is to import, mostly
        from launch.checks import check
        from launch.config import load_config
        from launch.needs import with_limits
        from launch.run_folder import choose_root, named_run

        chosen: list[str] = []
        if parsed.source is not None:
            chosen.append(f"--buffer.source={json.dumps(str(named_run(parsed.source)))}")
        if parsed.plan is not None:
            chosen += resolve_name(READ_PLAN)(parsed.plan)
        config = load_config(parsed.config, [*chosen, *parsed.overrides])
        plan = with_limits(check(config, choose_root(config, parsed.config)))
        if parsed.dry_run:
            print(plan.describe())
            return ExitStatus.OK
        from launch.train import train
    return train(plan)


@verb(
    "go on with a run where it was killed or has ended",
    of_run("folder of the run, or its name within runs/"),
    flag("--dry-run", "say where it would go on; start nothing"),
    epilog=_CTRL_C,
    takes_overrides=True,
)
def resume(parsed: argparse.Namespace) -> int:
    """Go on with a run in its own folder, from its newest checkpoint.

    Nothing that its buffer acknowledged is lost. Keys for which another value is sound can be overridden:
    --learner.num_steps 200.
    """
    from launch.needs import with_limits
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

        return train(with_limits(found.plan), found.history)


@verb(
    "let a pool of a living run have more actors, or fewer",
    of_run(),
    arg("--pool", default="actors", metavar="NAME", help="as in [pools.NAME]; default: actors"),
    arg("--count", type=_num_actors, required=True, metavar="N", help="how many actors it is to have"),
    epilog="Exit status: 0 the run is at it; 1 its command is gone or does not answer; 2 it cannot be so, and nothing "
    "was changed.",
)
def scale(parsed: argparse.Namespace) -> int:
    """Let a pool of a run that lives have another number of actors.

    Those that leave hand back what they have leased; those that come start when a host has room for them.
    """
    from launch.control import Declined, NoAnswer, ask
    from launch.host import private_files
    from launch.observe.status import why_nobody_works
    from launch.run_folder import open_run

    folder = open_run(parsed.run)
    if why := why_nobody_works(folder):
        return refuse(why)
    try:
        with private_files():
            print(ask(folder.control, {"verb": "scale", "pool": parsed.pool, "count": parsed.count}, SCALE_PATIENCE_S))
    except Declined as error:
        return refuse(error, ExitStatus.WRONG_INPUT)
    except NoAnswer as error:
        return refuse(error)
    return ExitStatus.OK


@verb(
    "write the model of a run as a Hugging Face folder",
    of_run("folder of the run, or its name within runs/"),
    arg("out", type=Path, metavar="OUT", help="the folder to make"),
    arg("--step", type=int, metavar="N", help="of the checkpoint; by default the newest that is whole"),
)
def export(parsed: argparse.Namespace) -> int:
    """Write the newest whole checkpoint of a run, which may be running, as an ordinary Hugging Face folder.

    Starts neither Ray nor an engine.
    """
    from launch.model_folder import export
    from launch.run_folder import open_run

    try:
        done = export(open_run(parsed.run), parsed.out.expanduser(), parsed.step, refuse)
    except OSError as error:
        return refuse(error, ExitStatus.WRONG_INPUT)
    print(f"version {done.version}, of step {done.step}, is in {parsed.out} ({done.size_bytes / 2**20:.1f} MiB)")
    return ExitStatus.OK


@verb(
    "is this machine fit for a run?",
    arg("config", type=Path, nargs="?", metavar="CONFIG.toml"),
    flag("--json", "one JSON document instead of the table"),
    takes_overrides=True,
)
def doctor(parsed: argparse.Namespace) -> int:
    """Look at versions, GPUs, disk, memory, ports, Ray, W&B and leftovers of dead runs, and say what to do.

    With CONFIG, also whether the run that it describes fits. Takes at most half a minute and changes nothing. Exit
    status 1: there is a problem.
    """
    from dataclasses import asdict

    from launch.doctor import run_checks, show
    from launch.text import progress_line

    if parsed.config is None and parsed.overrides:
        raise ConfigError("overrides are of a config; give it: leeway doctor CONFIG.toml ...")
    with progress_line() as progress:
        progress("looking at this machine; vLLM alone takes ten seconds to load", None)
        findings = run_checks(parsed.config, parsed.overrides)
    num_problems = sum(finding.state == "problem" for finding in findings)
    if parsed.json:
        print(json.dumps({"problems": num_problems, "findings": [asdict(each) for each in findings]}, indent=2))
    else:
        show(findings)
    return ExitStatus.FAILED if num_problems else ExitStatus.OK


@verb(
    "try a task's reward functions on right, wrong and odd answers",
    _CONFIG,
    arg("--num", type=_count, metavar="N", help="how many problems (default: 64, or as many as a minute allows)"),
    arg("--completion", action="append", default=[], metavar="TEXT", help="score this too; may be given several times"),
    takes_overrides=True,
)
def check_reward(parsed: argparse.Namespace) -> int:
    """Load the task of CONFIG as a run does, and judge the rewards of its functions.

    They score right, wrong, empty, odd and very long answers to its problems, each in a process of its own. Starts no
    engine and no Ray. Exit status 1: something is wrong.
    """
    from actors.tasks import TaskError, load_task
    from launch.config import load_config
    from launch.reward_check import BUDGET_S, NUM_PROBLEMS, RewardCheck, check_rewards, show, spread, start_note
    from launch.text import progress_line

    config = load_config(parsed.config, parsed.overrides)
    with as_config_error("[task] ", TaskError):
        task = load_task(config.task)
        problems = spread(task, parsed.num or NUM_PROBLEMS)
        found = RewardCheck(problems, config.actors.reward_timeout_s, config.task.correct_at)
        note = start_note(config, problems[0].text)
        budget_s = None if parsed.num else BUDGET_S
        is_whole = True
        try:
            with progress_line() as progress:
                check_rewards(task, found, given=parsed.completion, budget_s=budget_s, progress=progress)
        except KeyboardInterrupt:
            is_whole = False
    show(found)
    if note:
        print(f"NOTE     {note}")
    sentences = found.problems_found()
    for sentence in sentences:
        print(f"PROBLEM  {sentence}")
    if not is_whole:
        return refuse(f"interrupted after {len(found.results)} completions", ExitStatus.INTERRUPTED)
    if not sentences:
        print(f"The rewards of {len(problems)} problems are as they should be.")
    return ExitStatus.FAILED if sentences else ExitStatus.OK


BUFFER_VERBS = {
    "ls": "list the groups of samples",
    "show": "show a group and its samples, with their text where the run has a tokenizer",
    "verify": "prove every page, checksum and index, and recount the ledger",
    "export": "write the stored trajectories as a Parquet file",
    "compact": "rewrite the file without its free pages; the run must be over",
}


def _buffer(parsed: argparse.Namespace) -> int:
    from launch.buffer_cli import run

    return run(parsed)


def _add_buffer(parsers: Any) -> None:  # noqa: ANN401 -- as in `Verb`
    buffer = parsers.add_parser("buffer", help="look at, verify, export or compact the replay buffer of a run")
    parts = buffer.add_subparsers(dest="buffer_verb", required=True, metavar="VERB")
    added = {}
    for name, text in BUFFER_VERBS.items():
        added[name] = parser = parts.add_parser(name, help=text, description=f"{text.capitalize()}.")
        where = "a run's folder, its buffer/, or its name within runs/"
        parser.add_argument("run", type=Path, metavar="RUN", help=where)
        parser.set_defaults(run_verb=_buffer, takes_overrides=False)
    ls, show, export = added["ls"], added["show"], added["export"]
    ls.add_argument("--prompt", type=_integer, metavar="N", help="groups of this prompt")
    ls.add_argument("--phase", choices=PHASES, help="groups in this phase of their life")
    ls.add_argument("--limit", type=_count, metavar="N", help="the first N only")
    ls.add_argument("--quarantine", action="store_true", help="list what failed validation instead, with its reason")
    what = show.add_mutually_exclusive_group(required=True)
    what.add_argument("group", nargs="?", type=_count, metavar="GROUP", help="the group's id")
    what.add_argument("--record", type=_count, metavar="N", help="one stored trajectory, in full")
    what.add_argument("--quarantined", type=_count, metavar="N", help="one quarantined row or message")
    export.add_argument("out", type=Path, metavar="OUT.parquet")


VERBS = (
    *(train, resume, scale, status, top, report, trace, export, doctor, check_reward),
    Verb("buffer", _add_buffer),
)
PLUGIN_VERBS = {
    "profile": ("planning.verbs:profile", "measure what a run costs on this machine"),
    "plan": ("planning.verbs:plan", "choose actors, learner and bound for a config, and predict what it will do"),
}
"""Verb -> where it is, and what `leeway --help` says of it; loaded when it is used."""
READ_PLAN = "planning.plans:read_plan"
"""Of `leeway train --plan`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    open_streams()
    status: int = ExitStatus.OK
    try:
        try:
            parsed = parse(arguments)
            settle_home()
            if parsed.takes_overrides and parsed.verb != "doctor":  # those that read a config start processes
                check_folder()
            status = int(parsed.run_verb(parsed))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = refuse("interrupted", ExitStatus.INTERRUPTED)
    except Exception as error:
        status = failed(error, status)
    return status


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments, and as `overrides` what is left over: of a config, for the verbs that take them.

    Raises:
        SystemExit: they are wrong; status 2, and a sentence on the standard error.
        ConfigError: an override stands before the config or the run.
    """
    parser = argparse.ArgumentParser(
        prog="leeway", description="Asynchronous off-policy reinforcement learning for language models."
    )
    parsers = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    for each in VERBS:
        each.add_to(parsers)
    for name, (where, text) in PLUGIN_VERBS.items():
        if name in words:
            resolve_name(where).add_to(parsers)
        else:
            parsers.add_parser(name, help=text)
    parsed, overrides = parser.parse_known_args(arguments)
    if overrides and not parsed.takes_overrides:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    taken = getattr(parsed, "config", None) or getattr(parsed, "run", None)
    if overrides and taken is not None:
        before = words[[Path(word) for word in words].index(taken) - 1]
        # argparse does not know that an override has a value
        if before in overrides and before.startswith("--") and "=" not in before:
            what = "CONFIG" if "config" in parsed else "RUN"
            raise ConfigError(f"give {what} first, and {before} after it: '{taken}' is taken for {what}")
    parsed.overrides = overrides
    return parsed


if __name__ == "__main__":
    sys.exit(main())
