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
        sight = look(find_run(parsed.run))
    except (ConfigError, StatusError) as error:
        print(f"leeway: {error}", file=sys.stderr)
        return ExitStatus.WRONG_INPUT
    if parsed.json:
        document = {
            **msgspec.to_builtins(sight.snapshot, str_keys=True),
            "gone": sight.gone,
            "resuming": sight.resuming,
        }
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    else:
        for line in _lines(sight):
            print(line)
    return ExitStatus.OK if sight.is_well else ExitStatus.FAILED


def _lines(sight: Any) -> Iterator[str]:  # noqa: ANN401 -- launch.observe.status.Sight, imported late
    from launch.observe.display import line
    from launch.observe.status import SILENT_S
    from launch.words import duration

    snapshot = sight.snapshot
    yield f"{snapshot.run}  {snapshot.folder}"
    if sight.resuming:
        yield f"{sight.resuming}; what follows is of before"
    elif snapshot.ended is not None:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(snapshot.ended.at_s))
        yield f"ended at {moment} with exit status {snapshot.ended.exit_status}: {snapshot.ended.text}"
    elif sight.gone:
        yield sight.gone
    else:
        since = duration(sight.now_s - snapshot.phase_since_s)
        yield f"{snapshot.phase}, for {since}; process {snapshot.pid} on {snapshot.host}"
        silent_s = sight.now_s - (snapshot.polled_s or snapshot.written_s)
        if silent_s > SILENT_S and snapshot.polled_s is not None:
            yield f"the figures are {silent_s:.0f} s old"
    yield line(snapshot).strip()
    for pool in snapshot.pools:
        yield (
            f"pool {pool.name}: {pool.working} of {pool.wanted} actors work, {pool.running} samples running, "
            f"{pool.tokens_per_s:,.0f} tokens/s"
        )
    lost = [each for each in snapshot.actors if each.state.startswith("lost")]
    for actor in lost:
        yield f"{actor.name} is {actor.state}; see {actor.log}"
    if snapshot.buffer is not None:
        ledger = snapshot.buffer.ledger
        yield (
            f"buffer: {snapshot.buffer.ready_groups} groups ready, {ledger.get('in_flight', 0)} samples in flight, "
            f"{ledger.get('trained', 0)} trained, ledger gap {ledger.get('gap', 0)}"
        )
    for each in snapshot.evaluations[-1:]:
        yield f"accuracy at version {each.versions}: greedy {each.greedy}, sampled {each.sampled}"
    for event in snapshot.events[-3:]:
        yield f"{time.strftime('%H:%M:%S', time.localtime(event.time_s))}  {event.text}"
