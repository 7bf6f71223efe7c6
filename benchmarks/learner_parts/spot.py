"""Processes of a measurement, their process groups ("worlds"), and their common start."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.lib.processes import call_in_processes
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # the stub does not re-export it

from leeway.common.process import keep_freed_memory
from leeway.learner.mesh import Mesh, MeshPlace

Figures = dict[str, Any]

TIMEOUT_S = 300.0
"""Timeout in seconds of every wait for another process."""
HEAD_START_S = 0.02
"""Seconds between the arrival of the last process and the common start."""
POLL_S = 0.1


def run_measurement(name: str, options: Figures, *, worlds: Sequence[int] = (1,), limit_s: float = 600.0) -> Figures:
    """Run a measurement and return the figures of its first process.

    Args:
        name: function of `learner_parts`, as "module:function"; called with a Spot and the options.
        options: options of the function, as JSON values.
        worlds: number of processes of each process group.
        limit_s: timeout in seconds.

    Raises:
        MeasurementFailed: a process failed, or the timeout expired.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-learner-") as folder:
        shared = {"name": name, "worlds": worlds, "folder": folder, "options": options}
        calls = [{"number": number, **shared} for number in range(sum(worlds))]
        found: Figures = call_in_processes(name, f"{__name__}:take_part", calls, limit_s=limit_s)[0]
    return found


def take_part(number: int, name: str, worlds: Sequence[int], folder: str, options: Figures) -> Figures:
    """Run one process of a measurement."""
    module, _, function = name.partition(":")
    with Spot(number, worlds, Path(folder)) as spot:
        found: Figures = getattr(importlib.import_module(f"{__package__}.{module}"), function)(spot, **options)
    return found


class Spot:
    """Membership of one process in a measurement.

    The processes form worlds, each with its own process group, so that the compared sides are independent. A store
    shared by all processes synchronizes their start and records when the last process finishes.
    """

    def __init__(self, number: int, worlds: Sequence[int], folder: Path) -> None:
        """Store the settings; the `with` statement creates the process group.

        Args:
            number: 0-based number of this process over all worlds.
            worlds: number of processes of each world.
            folder: folder shared by the processes of this measurement only.
        """
        self.number = number
        self.folder = folder
        self.worlds = worlds
        self._num_processes = sum(worlds)
        edges = [0, *itertools.accumulate(worlds)]
        self.world = bisect_right(edges, number) - 1
        self.size = worlds[self.world]
        """Number of processes of this world."""
        self._rank = number - edges[self.world]
        self._count = 0

    def __enter__(self) -> Spot:
        torch.set_num_threads(1)
        keep_freed_memory()  # all sides keep freed memory, like the learner on a CPU
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"file://{self.folder}/world-{self.world}",
            rank=self._rank,
            world_size=self.size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        self._store = self._connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.barrier()  # the first process hosts the store, so it must exit last
        dist.destroy_process_group()

    def mesh(self) -> Mesh:
        """Build a mesh whose stages are the processes of this world, all of which must call this method together."""
        return Mesh.build(MeshPlace(self._rank, num_stages=self.size))

    def barrier(self) -> None:
        """Block until all processes of all worlds have called this method."""
        self.gather(0.0)

    def seconds(self, action: Callable[[], object], *, worlds: Sequence[int] = (0,)) -> float:
        """Return the seconds from the common start of an action to its last end; all processes must call this method.

        Args:
            action: action to time; worlds not in `worlds` wait without calling it.
            worlds: worlds that run the action.
        """
        start = max(self.gather(time.perf_counter())) + HEAD_START_S  # all processes of a machine share this clock
        time.sleep(max(0.0, start - time.perf_counter()))
        if self.world in worlds:
            action()
        return max(self.gather(time.perf_counter() if self.world in worlds else 0.0)) - start

    def take_turns(
        self, worlds: Mapping[str, int], steps: Mapping[str, Callable[[], float]], num_rounds: int
    ) -> tuple[dict[str, list[float]], dict[str, float]]:
        """Time the steps of the sides in turn; all processes must call this method.

        Args:
            worlds: side -> world that takes the steps of this side.
            steps: side of this world -> function that takes a step and returns its gradient norm.
            num_rounds: number of rounds; the first round warms up and does not count.

        Returns:
            Seconds of each side's steps, and the gradient norm of its last step.
        """
        seconds: dict[str, list[float]] = {name: [] for name in worlds}
        norms: dict[str, float] = {}

        def run(name: str) -> None:
            norms[name] = steps[name]()

        for number in range(num_rounds):
            taken = {name: self.seconds(partial(run, name), worlds=[world]) for name, world in worlds.items()}
            self.log(f"round {number}: {taken}")
            if number > 0:
                for name, each in taken.items():
                    seconds[name].append(each)
        return seconds, {name: max(self.gather(norms.get(name, 0.0))) for name in worlds}

    def pin(self) -> None:
        """Pin this process to one core; the processes of a world use successive cores."""
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(self._rank if self.size > 1 else self.number) % len(cores)]})

    def log(self, text: str) -> None:
        """Print progress from the first process only."""
        if self.number == 0:
            print(text, file=sys.stderr, flush=True)

    def gather(self, value: float) -> list[float]:
        """Store the value of this process, wait for the values of all processes, and return all values."""
        self._count += 1
        keys = [f"{self._count}/{number}" for number in range(self._num_processes)]
        self._store.set(keys[self.number], repr(value))
        self._store.wait(keys)
        return [float(self._store.get(key)) for key in keys]

    def _connect(self) -> TCPStore:
        port_file = self.folder / "port"
        timeout = timedelta(seconds=TIMEOUT_S)
        if self.number == 0:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
            written = self.folder / "port.new"
            written.write_text(str(store.port), encoding="ascii")
            written.rename(port_file)
            return store
        deadline = time.monotonic() + TIMEOUT_S
        while not port_file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.number} timed out after {TIMEOUT_S:g} s waiting for the store")
            time.sleep(POLL_S)
        port = int(port_file.read_text(encoding="ascii"))
        return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)
