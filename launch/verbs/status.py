"""`leeway status`: how a run does, in a few lines or as JSON."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.exit_status import ExitStatus


def add_parser(verbs: Any) -> None:  # noqa: ANN401 -- argparse has no public type for it
    """Add `status` to the command's parser."""
    status = verbs.add_parser(
        "status",
        help="how a run does",
        description="Say how a run does: one that lives, one that is over, or one whose command is gone.",
        epilog="Exit status: 0 it goes on or is done; 1 it failed, was stopped, or its command is gone; 2 no such run.",
    )
    status.add_argument(
        "run", type=Path, nargs="?", metavar="RUN", help="a run's folder, or its name within runs/; default: the newest"
    )
    status.add_argument("--json", action="store_true", help="all of status.json, with 'gone' and 'resuming'")
    status.set_defaults(run_verb=run)


def run(parsed: argparse.Namespace) -> int:
    """Print it."""
    import msgspec

    from launch.errors import ConfigError
    from launch.observe.status import StatusError, find_run, look

    try:
        seen = look(find_run(parsed.run))
    except (ConfigError, StatusError) as error:
        print(f"leeway: {error}", file=sys.stderr)
        return ExitStatus.WRONG_INPUT
    if parsed.json:
        document = {
            **msgspec.to_builtins(seen.status, str_keys=True),
            "gone": seen.gone,
            "resuming": seen.resuming,
        }
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    else:
        for line in _lines(seen):
            print(line)
    return ExitStatus.OK if seen.is_well else ExitStatus.FAILED


def _lines(seen: Any) -> Iterator[str]:  # noqa: ANN401 -- launch.observe.status.StatusView, imported late
    from launch.observe.status import SILENT_S
    from launch.observe.view import line
    from launch.words import duration

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
    lost = [each for each in status.actors if each.state.startswith("lost")]
    for actor in lost:
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
