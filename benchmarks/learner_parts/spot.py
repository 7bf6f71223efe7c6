"""Where one process of a measurement stands: worlds that are compared, one clock, and a common start."""

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
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # which its stub does not re-export

from benchmarks.lib.processes import call_in_processes
from common.process import keep_freed_memory
from learner.mesh import Mesh, MeshPlace

Figures = dict[str, Any]

TIMEOUT_S = 300.0
"""Of every wait for another process."""
HEAD_START_S = 0.02
"""Between the last process's arrival and the common start."""
POLL_S = 0.1


def run_measurement(name: str, options: Figures, *, worlds: Sequence[int] = (1,), limit_s: float = 600.0) -> Figures:
    """The figures that the first process of a measurement finds.

    Args:
        name: "module:function" in `learner_parts`; called with a Spot and the options.
        options: for it; JSON.
        worlds: processes of each process group.
        limit_s: no measurement may take longer.

    Raises:
        MeasurementFailed: a process failed, or time is up.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-learner-") as folder:
        shared = {"name": name, "worlds": worlds, "folder": folder, "options": options}
        calls = [{"number": number, **shared} for number in range(sum(worlds))]
        found: Figures = call_in_processes(name, f"{__name__}:take_part", calls, limit_s=limit_s)[0]
    return found


def take_part(number: int, name: str, worlds: Sequence[int], folder: str, options: Figures) -> Figures:
    """One process of a measurement."""
    module, _, function = name.partition(":")
    with Spot(number, worlds, Path(folder)) as spot:
        found: Figures = getattr(importlib.import_module(f"{__package__}.{module}"), function)(spot, **options)
    return found


class Spot:
    """Where one process of a measurement stands.

    The processes form worlds, each a process group of its own: sides that are compared know nothing of each other. A
    store that all reach lets them start at one moment, and tells when the last of them is through.
    """

    def __init__(self, number: int, worlds: Sequence[int], folder: Path) -> None:
        """Take a place; groups are made on entering.

        Args:
            number: of this process, 0-based over all worlds.
            worlds: processes of each world.
            folder: shared by the processes of this measurement alone.
        """
        self.number = number
        self.folder = folder
        self.worlds = worlds
        self._num_processes = sum(worlds)
        edges = [0, *itertools.accumulate(worlds)]
        self.world = bisect_right(edges, number) - 1
        self.size = worlds[self.world]
        """Processes of this world."""
        self._rank = number - edges[self.world]
        self._count = 0

    def __enter__(self) -> Spot:
        torch.set_num_threads(1)
        keep_freed_memory()  # on every side, as the learner does on a CPU
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
            self.meet()  # the first process keeps the store
        dist.destroy_process_group()

    def mesh(self) -> Mesh:
        """The processes of this world as the stages of one pipeline; all of them call it together."""
        return Mesh.build(MeshPlace(self._rank, num_stages=self.size))

    def meet(self) -> None:
        """Wait until all processes of all worlds are here."""
        self.gather(0.0)

    def seconds(self, action: Callable[[], object], *, worlds: Sequence[int] = (0,)) -> float:
        """Time from the common start of an action until the last process is through; all processes call it.

        Args:
            action: what to do; not called in other worlds, which wait without computing.
            worlds: that take part.
        """
        start = max(self.gather(time.perf_counter())) + HEAD_START_S  # one clock for all processes of a machine
        time.sleep(max(0.0, start - time.perf_counter()))
        if self.world in worlds:
            action()
        return max(self.gather(time.perf_counter() if self.world in worlds else 0.0)) - start

    def take_turns(
        self, worlds: Mapping[str, int], steps: Mapping[str, Callable[[], float]], num_rounds: int
    ) -> tuple[dict[str, list[float]], dict[str, float]]:
        """Seconds of each side's steps in so many rounds, and the gradient norm of its last; all processes call it.

        Args:
            worlds: side -> the world that takes its steps.
            steps: of the sides of this world: a step, which gives its gradient norm.
            num_rounds: with the first, which warms up and does not count.
        """
        seconds: dict[str, list[float]] = {name: [] for name in worlds}
        norms: dict[str, float] = {}

        def run(name: str) -> None:
            norms[name] = steps[name]()

        for number in range(num_rounds):
            taken = {name: self.seconds(partial(run, name), worlds=[world]) for name, world in worlds.items()}
            self.say(f"round {number}: {taken}")
            if number > 0:
                for name, each in taken.items():
                    seconds[name].append(each)
        return seconds, {name: max(self.gather(norms.get(name, 0.0))) for name in worlds}

    def pin(self) -> None:
        """Keep this process on one core: each world takes the cores in turn."""
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(self._rank if self.size > 1 else self.number) % len(cores)]})

    def say(self, text: str) -> None:
        """Progress, from the first process alone."""
        if self.number == 0:
            print(text, file=sys.stderr, flush=True)

    def gather(self, value: float) -> list[float]:
        """Hand in a value, and get those of all processes when they are there."""
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
                raise TimeoutError(f"process {self.number} waited {TIMEOUT_S:g} s for the store of process 0")
            time.sleep(POLL_S)
        port = int(port_file.read_text(encoding="ascii"))
        return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)
