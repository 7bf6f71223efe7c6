"""Environment of a step: device, models, batches, results, and a folder shared by all steps."""

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

from leeway.buffer.schema import Trajectory
from leeway.learner.mesh import Mesh, MeshPlace, join_group
from leeway.learner.model import StageModule
from leeway.learner.networks import load_chunks

TIMEOUT_S = 60.0
"""Timeout in seconds of each collective operation."""


class Place:
    """Environment of one step, which runs in its own process."""

    def __init__(
        self,
        step: str,
        folder: Path,
        *,
        on_cpu: bool,
        output_folder: Path | None = None,
        limit_s: float = math.inf,
        engine_args: dict[str, Any] | None = None,
    ) -> None:
        """Select the device and the folders of the step.

        Args:
            step: name of the step, for its results.
            folder: temporary folder shared by all steps of a command, in which each model is created once.
            on_cpu: use the CPU and tiny shapes, to test the code.
            output_folder: folder for results that are too long for a line; None discards them.
            limit_s: time limit of the process, in seconds.
            engine_args: additional arguments of every vLLM engine.

        Raises:
            RuntimeError: there is no GPU, and `on_cpu` is false.
        """
        self.step = step
        self.folder = folder
        self.output_folder = output_folder
        self.limit_s = limit_s
        self.engine_args = engine_args or {}
        self.on_gpu = not on_cpu
        if self.on_gpu and not torch.cuda.is_available():
            raise RuntimeError("torch finds no GPU: pass --cpu to run on the CPU at a tiny shape")
        self.device = torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.set_device(self.device)

    def report(self, case: str, **figures: object) -> None:
        """Print one result as a JSON line, and flush it."""
        print(json.dumps({"step": self.step, "case": case, "cpu": not self.on_gpu, **figures}, default=str), flush=True)

    def sync(self) -> None:
        """Block until the GPU has finished all queued operations."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, action: Callable[[], object], repeat: int = 5) -> float:
        """Return the median seconds of an action, after one warm-up."""
        times_s = []
        for _ in range(repeat + 1):
            self.sync()
            start = time.perf_counter()
            action()
            self.sync()
            times_s.append(time.perf_counter() - start)
        return statistics.median(times_s[1:])

    @cached_property
    def mesh(self) -> Mesh:
        """Mesh that contains only this process, initialized like the mesh of a learner."""
        join_group(rendezvous(), self.device, rank=0, num_ranks=1, timeout=timedelta(seconds=TIMEOUT_S))
        return Mesh.build(MeshPlace(0), timedelta(seconds=TIMEOUT_S))

    def shape(self, name: str) -> tuple[str, Shape]:
        """Return the name and the config keys of a shape; on the CPU, those of a tiny shape."""
        used = name if self.on_gpu else TINY.get(name, "tiny")
        return used, SHAPES[used]

    def model(self, shape: str) -> Path:
        """Return a checkpoint folder with random weights of a shape."""
        name, _ = self.shape(shape)
        return random_weights(name, self.folder / name, self.device)

    def learner(self, shape: str, **config: Any) -> Learner:  # noqa: ANN401 -- keys of the section
        """Return the training step of the learner on this device, in bfloat16 unless `config` sets a precision."""
        defaults: dict[str, Any] = {"precision": "bfloat16", "token_budget": 8192}
        gc.collect()  # an earlier learner has reference cycles: free its memory
        if not self.on_gpu:
            config = {**config, "token_budget": min(256, config.get("token_budget", 256))}
        learner = Learner(self.model(shape), self.mesh, configured(self.mesh, **{**defaults, **config}), self.device)
        self.reset_peak()
        return learner

    def reference(self, shape: str) -> StageModule:
        """Return the frozen reference model of a shape, loaded like the reference of a learner."""
        config = configured(self.mesh, precision="bfloat16")
        (stage,) = load_chunks(self.model(shape), "token", config, TEMPERATURE, self.mesh, self.device, frozen=True)
        return stage

    def rows(self, shape: str, num: int, seed: int) -> list[Trajectory]:
        """Return random samples for a step; the seed determines the samples."""
        _, known = self.shape(shape)
        if self.on_gpu:
            return fresh_rows(num, known["vocab_size"], seed)
        return fresh_rows(min(num, 16), known["vocab_size"], seed, median=40, longest=128)

    def save_file(self, name: str, content: bytes) -> None:
        """Write a file into the folder of the results, if there is one."""
        if self.output_folder is not None:
            self.output_folder.mkdir(parents=True, exist_ok=True)
            (self.output_folder / name).write_bytes(content)

    def reset_peak(self) -> None:
        """Reset the counter of peak GPU memory."""
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> dict[str, float | None]:
        """Return the peak of allocated and of reserved GPU memory, in GiB."""
        if not self.on_gpu:
            return {"allocated_gib": None, "reserved_gib": None}
        return {
            "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        }

    def close(self) -> None:
        """Destroy the process group, if there is one."""
        with suppress(Exception):
            torch.distributed.destroy_process_group()


def rendezvous() -> str:
    """Return an address of this machine with a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"
