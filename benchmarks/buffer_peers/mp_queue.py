"""Pickle over `multiprocessing.Queue`: what a user without a store would pick first.

Settings: 32 trajectories per `put`; the consumer unpickles and keeps them in a list. The time ends
when the consumer has the last one. Objects as they are (`Trajectory`), or as plain dicts, whichever
is faster on this machine.
"""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import fields
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

from benchmarks.buffer_peers.workload import PATIENCE_S, Figures, Workload, calls, rates
from buffer.trajectory import Trajectory

_NAMES = [field.name for field in fields(Trajectory)]


def measure(work: Workload, folder: Path) -> Figures:
    """Hand the workload to another process, in both forms; the faster one counts."""
    rows = work.trajectories()
    found = {"objects": _hand_over(rows, as_dicts=False), "dicts": _hand_over(rows, as_dicts=True)}
    fastest = min(found, key=lambda form: found[form])
    return rates(work, found[fastest]) | {"form": fastest}


def as_dict(row: Trajectory) -> dict[str, Any]:
    """A trajectory as plain values: pickles without looking classes up."""
    values = {name: getattr(row, name) for name in _NAMES}
    values["spans"] = [(span.version.incarnation, span.version.version, span.start, span.end) for span in row.spans]
    return values


def _hand_over(rows: list[Trajectory], *, as_dicts: bool) -> float:
    context = multiprocessing.get_context("spawn")
    queue: Queue[list[Any] | None] = context.Queue()
    ours, theirs = context.Pipe()
    consumer = context.Process(target=_consume, args=(queue, theirs), daemon=True)
    consumer.start()
    try:
        expect(ours)  # it is up
        started = time.perf_counter()
        for call in calls(rows):
            queue.put([as_dict(row) for row in call] if as_dicts else call)
        queue.put(None)
        received = expect(ours)
        seconds = time.perf_counter() - started
    finally:
        queue.cancel_join_thread()
        consumer.terminate()
        consumer.join(PATIENCE_S)
    if received != len(rows):
        raise RuntimeError(f"the consumer got {received} of {len(rows)} trajectories")
    return seconds


def _consume(queue: Queue[list[Any] | None], done: Connection) -> None:
    kept: list[Any] = []
    done.send(0)
    while (call := queue.get(timeout=PATIENCE_S)) is not None:
        kept += call
    done.send(len(kept))


def expect(connection: Connection) -> Any:  # noqa: ANN401 -- whatever the other side says
    """What the other process says, within the limit.

    Raises:
        TimeoutError: it said nothing.
    """
    if not connection.poll(PATIENCE_S):
        raise TimeoutError(f"the other process said nothing for {PATIENCE_S:g} s")
    return connection.recv()
