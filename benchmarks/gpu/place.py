"""Where a step of the rehearsal stands: its device, a folder that the steps share, and how it tells what it found."""

from __future__ import annotations

import gc
import json
import math
import socket
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.shapes import SHAPES, TINY, Shape, fresh_rows, random_weights
from benchmarks.learner_parts.sides import configured
from benchmarks.lib.learner import TEMPERATURE, Learner
from buffer.schema import Trajectory
from learner.mesh import Mesh, MeshPlace, join_group
from learner.model import StageModule
from learner.networks import load_chunks

TIMEOUT_S = 60.0
"""Of every wait for another process."""


class Place:
    """One step, in a process of its own."""

    def __init__(
        self,
        step: str,
        folder: Path,
        *,
        on_cpu: bool,
        beside: Path | None = None,
        limit_s: float = math.inf,
        engine_args: dict[str, Any] | None = None,
    ) -> None:
        """Take a place.

        Args:
            step: its name.
            folder: shared by the steps of a call; models are made in it once.
            on_cpu: tiny shapes, to see that the code runs.
            beside: a folder for what is too long for a line; None: it is not kept.
            limit_s: after which the process is ended.
            engine_args: further arguments of every vLLM engine.

        Raises:
            RuntimeError: no GPU is there, and `on_cpu` does not say that none is wanted.
        """
        self.step = step
        self.folder = folder
        self.beside = beside
        self.limit_s = limit_s
        self.engine_args = engine_args or {}
        self.on_gpu = not on_cpu
        if self.on_gpu and not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU; --cpu runs everything on the CPU at a tiny shape")
        self.device = torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.set_device(self.device)

    def tell(self, case: str, **figures: object) -> None:
        """One result, as a JSON line; it is out before the next begins."""
        print(json.dumps({"step": self.step, "case": case, "cpu": not self.on_gpu, **figures}, default=str), flush=True)

    def sync(self) -> None:
        """Wait until the GPU has done what it was told."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, action: Callable[[], object], repeat: int = 5) -> float:
        """The median time of an action, after one that warms up."""
        taken = []
        for _ in range(repeat + 1):
            self.sync()
            start = time.perf_counter()
            action()
            self.sync()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[1:])

    @cached_property
    def mesh(self) -> Mesh:
        """Of this process alone, met as the ranks of a learner meet."""
        join_group(rendezvous(), self.device, rank=0, num_ranks=1, timeout=timedelta(seconds=TIMEOUT_S))
        return Mesh.build(MeshPlace(0), timedelta(seconds=TIMEOUT_S))

    def shape(self, wanted: str) -> tuple[str, Shape]:
        """A shape by its name, or on the CPU a tiny one."""
        name = wanted if self.on_gpu else TINY.get(wanted, "tiny")
        return name, SHAPES[name]

    def model(self, wanted: str) -> Path:
        """A checkpoint folder with random weights of a shape."""
        name, _ = self.shape(wanted)
        return random_weights(name, self.folder / name, self.device)

    def learner(self, wanted: str, **config: Any) -> Learner:  # noqa: ANN401 -- keys of the section
        """The learner's own step on this device, in bfloat16 where `config` says no other."""
        defaults: dict[str, Any] = {"precision": "bfloat16", "token_budget": 8192}
        gc.collect()  # a learner of before holds its memory until its cycles are found
        if not self.on_gpu:
            config = {**config, "token_budget": min(256, config.get("token_budget", 256))}
        learner = Learner(self.model(wanted), self.mesh, configured(self.mesh, **{**defaults, **config}), self.device)
        self.forget_peak()
        return learner

    def reference(self, wanted: str) -> StageModule:
        """The frozen weights of a shape, as a learner keeps them to score with."""
        config = configured(self.mesh, precision="bfloat16")
        (stage,) = load_chunks(self.model(wanted), "token", config, TEMPERATURE, self.mesh, self.device, frozen=True)
        return stage

    def rows(self, wanted: str, num: int, seed: int) -> list[Trajectory]:
        """Samples for a step that no other step has had."""
        _, shape = self.shape(wanted)
        if self.on_gpu:
            return fresh_rows(num, shape["vocab_size"], seed)
        return fresh_rows(min(num, 16), shape["vocab_size"], seed, median=40, longest=128)

    def keep(self, name: str, content: bytes) -> None:
        """Leave a file beside the results."""
        if self.beside is not None:
            self.beside.mkdir(parents=True, exist_ok=True)
            (self.beside / name).write_bytes(content)

    def forget_peak(self) -> None:
        """Memory is counted from here on."""
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> dict[str, float | None]:
        """GiB that were allocated and reserved at most."""
        if not self.on_gpu:
            return {"allocated_gib": None, "reserved_gib": None}
        return {
            "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        }

    def close(self) -> None:
        """Part from the process group, if there is one."""
        with suppress(Exception):
            torch.distributed.destroy_process_group()


def rendezvous() -> str:
    """A free address of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"
