"""Pickle over `multiprocessing.Queue`, the simplest transport without a store.

Settings: 32 trajectories per `put`; the consumer unpickles the trajectories and keeps them in a list. Timing ends when
the consumer has received the last trajectory. Trajectories are sent once as `Trajectory` objects and once as plain
dicts, and the faster form counts.
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

from leeway.buffer.schema import Trajectory

_NAMES = [field.name for field in fields(Trajectory)]


def measure(work: Workload, folder: Path) -> Figures:
    """Send the workload to another process as objects and as dicts; the faster form counts."""
    rows = work.trajectories()
    forms: dict[str, Callable[[list[Trajectory]], Any]] = {
        "objects": lambda call: call,
        "dicts": lambda call: [as_dict(row) for row in call],
    }
    found = {form: hand_over(rows, convert, _keep)[0] for form, convert in forms.items()}
    fastest = min(found, key=lambda form: found[form])
    return rates(work, found[fastest]) | {"form": fastest}


def as_dict(row: Trajectory) -> dict[str, Any]:
    """Return a trajectory as plain values, which pickle without class lookups."""
    values = {name: getattr(row, name) for name in _NAMES}
    values["spans"] = [(span.version.incarnation, span.version.version, span.start, span.end) for span in row.spans]
    return values


def hand_over(
    rows: list[Trajectory], convert: Callable[[list[Trajectory]], Any], consume: Callable[..., None], *arguments: object
) -> tuple[float, Any]:
    """Put all trajectories into a queue that a consumer process drains.

    Args:
        rows: trajectories to send.
        convert: conversion of the trajectories of one call to the object put into the queue.
        consume: function that the consumer runs with the queue, a pipe and the arguments. It sends 0 when ready; after
            the final None it sends the number of trajectories that it holds, and then one result.
        arguments: further arguments of `consume`.

    Returns:
        Seconds until the consumer holds all trajectories, and its result.

    Raises:
        RuntimeError: the consumer does not hold all trajectories.
    """
    context = multiprocessing.get_context("spawn")
    queue: Queue[Any] = context.Queue()
    ours, theirs = context.Pipe()
    consumer = context.Process(target=consume, args=(queue, theirs, *arguments), daemon=True)
    consumer.start()
    try:
        expect(ours)  # wait until the consumer is ready
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
