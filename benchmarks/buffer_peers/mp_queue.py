"""Pickle over `multiprocessing.Queue`: what a user without a store would pick first.

Settings: 32 trajectories per `put`; the consumer unpickles and keeps them in a list. The time ends
when the consumer has the last one. Objects as they are (`Trajectory`), or as plain dicts, whichever
is faster on this machine.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import fields
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

from benchmarks.buffer_peers.workload import PATIENCE_S, Figures, Workload, calls, expect, rates
from buffer.schema import Trajectory

_NAMES = [field.name for field in fields(Trajectory)]


def measure(work: Workload, folder: Path) -> Figures:
    """Hand the workload to another process, in both forms; the faster one counts."""
    rows = work.trajectories()
    forms: dict[str, Callable[[list[Trajectory]], Any]] = {
        "objects": lambda call: call,
        "dicts": lambda call: [as_dict(row) for row in call],
    }
    found = {form: hand_over(rows, convert, _keep)[0] for form, convert in forms.items()}
    fastest = min(found, key=lambda form: found[form])
    return rates(work, found[fastest]) | {"form": fastest}


def as_dict(row: Trajectory) -> dict[str, Any]:
    """A trajectory as plain values: pickles without looking classes up."""
    values = {name: getattr(row, name) for name in _NAMES}
    values["spans"] = [(span.version.incarnation, span.version.version, span.start, span.end) for span in row.spans]
    return values


def hand_over(
    rows: list[Trajectory], convert: Callable[[list[Trajectory]], Any], consume: Callable[..., None], *arguments: object
) -> tuple[float, Any]:
    """Put everything into a queue, which another process empties.

    Args:
        rows: what.
        convert: what is put of the trajectories that travel together.
        consume: called there with the queue, a pipe and the arguments. Says 0 once it is up, how many trajectories it
            has after the None that comes last, and one thing more.
        arguments: for it.

    Returns:
        Seconds until it had all, and the one thing more.

    Raises:
        RuntimeError: it has not all.
    """
    context = multiprocessing.get_context("spawn")
    queue: Queue[Any] = context.Queue()
    ours, theirs = context.Pipe()
    consumer = context.Process(target=consume, args=(queue, theirs, *arguments), daemon=True)
    consumer.start()
    try:
        expect(ours)  # it is up
        started = time.perf_counter()
        for call in calls(rows):
            queue.put(convert(call))
        queue.put(None)
        num_held = expect(ours)
        seconds = time.perf_counter() - started
        more = expect(ours)
    finally:
        queue.cancel_join_thread()
        consumer.terminate()
        consumer.join(PATIENCE_S)
    if num_held != len(rows):
        raise RuntimeError(f"the consumer holds {num_held} of {len(rows)} trajectories")
    return seconds, more


def _keep(queue: Queue[Any], done: Connection) -> None:
    kept: list[Any] = []
    done.send(0)
    while (call := queue.get(timeout=PATIENCE_S)) is not None:
        kept += call
    done.send(len(kept))
    done.send(None)
