"""Runs one measurement in processes of its own, which are all over when one of them fails or time is up."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from learner.mesh import Mesh, Place

Figures = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT_S = 300.0
"""Of every wait for another process."""
HEAD_START_S = 0.02
"""Between the last process's arrival and the common start."""
POLL_S = 0.1
END_WITHIN_S = 10.0
SETTINGS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class MeasurementFailed(RuntimeError):
    """A measurement ended without figures; carries the end of what it said."""


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
        return Mesh.build(Place(self._rank, num_stages=self.size))

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

    def _connect(self) -> dist.TCPStore:
        port_file = self.folder / "port"
        timeout = timedelta(seconds=TIMEOUT_S)
        if self.number == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
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
        return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)


def end_with_parent() -> None:
    """End this process when its parent closes the pipe to it, however the parent came to its end."""

    def watch() -> None:
        while os.read(0, 1024):  # no buffered reader: its lock would be held when the interpreter ends
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_measurement(name: str, options: Figures, *, worlds: Sequence[int] = (1,), limit_s: float = 600.0) -> Figures:
    """The figures that the first process of `learner_parts.NAME` finds.

    Args:
        name: module of this package with a function `measure(spot, **options)`.
        options: for it; JSON.
        worlds: processes of each process group.
        limit_s: no measurement may take longer.

    Raises:
        MeasurementFailed: a process failed, or time is up.
    """
    paths = str(ROOT)
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": paths}
    with tempfile.TemporaryDirectory(prefix=f"learner-{name}-") as folder:
        command = [
            sys.executable,
            "-m",
            "benchmarks.learner_parts",
            name,
            json.dumps(worlds),
            folder,
            json.dumps(options),
        ]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for number in range(sum(worlds)):
                with (Path(folder) / f"figures-{number}").open("wb") as output:
                    processes.append(
                        subprocess.Popen(
                            [*command, str(number)], cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=output
                        )
                    )
            _wait(name, processes, limit_s)
        finally:
            _end(processes)
        said = (Path(folder) / "figures-0").read_text(encoding="utf-8").splitlines()
        figures: Figures = json.loads(said[-1])
        return figures


def _wait(name: str, processes: list[subprocess.Popen[bytes]], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            break
        if time.monotonic() > deadline:
            raise MeasurementFailed(f"{name} took longer than {limit_s:g} s")
        time.sleep(POLL_S)
    for number, process in enumerate(processes):
        if process.poll():
            raise MeasurementFailed(
                f"process {number} of {name} ended with status {process.returncode}; it said why above"
            )


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait(END_WITHIN_S)
        if process.stdin is not None:
            process.stdin.close()


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    """The median of the ratios of rounds."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))
