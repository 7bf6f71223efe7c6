"""Who has weights to hand over: through a Publisher, or with torch.save. Both from the same tensors in memory."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.weights_parts.service_role import RUN_ID
from common.staleness import PolicyVersion
from weight_sync.config import WeightSyncConfig
from weight_sync.publisher import Publisher
from weight_sync.upload import open_sink

FLUSH_S = 60.0


class Role:
    """Holds two versions of the weights, one optimizer step apart, and hands them over in turn."""

    def __init__(
        self, *, snapshots: list[str], dtype: str, folder: str, full_every: int = 1, num_values: int | None = None
    ) -> None:
        """Have the tensors ready in memory, in the dtype that is handed over.

        Args:
            snapshots: safetensors files of the versions.
            dtype: to hand over in.
            folder: of the weight store.
            full_every: 1 for no deltas.
            num_values: take only so many tensors' worth of values, for small versions; None: all.
        """
        torch.set_num_threads(1)
        self._versions = [
            {name: tensor.to(getattr(torch, dtype)).clone() for name, tensor in load_file(path).items()}
            for path in snapshots
        ]
        if num_values is not None:
            self._versions = [_first(tensors, num_values) for tensors in self._versions]
        self._turn = 0
        knobs = WeightSyncConfig(transport="folder", full_every=full_every)
        sink = open_sink(knobs, folder=Path(folder), address="", run_id=RUN_ID, name="sender")
        self._publisher = Publisher(sink, 0, 1, [dtype], keep_versions=knobs.keep_versions, full_every=knobs.full_every)

    def num_bytes(self) -> int:
        """Of a whole version."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._versions[0].values())

    def publish(self, *, version: int) -> dict[str, float]:
        """Publish the next version and wait until all of it is done.

        Returns:
            `began`: a moment of the clock that all processes share; `call`: seconds that the caller was held up.
        """
        tensors = self._next()
        began = time.perf_counter()
        self._publisher.publish(PolicyVersion(0, version), tensors)
        call_s = time.perf_counter() - began
        self._publisher.flush(FLUSH_S)
        return {"began": began, "call": call_s}

    def save(self, *, path: str) -> float:
        """torch.save of the next version; returns seconds."""
        tensors = self._next()
        began = time.perf_counter()
        torch.save(tensors, path)
        return time.perf_counter() - began

    def close(self) -> None:
        """End the publisher."""
        self._publisher.close()

    def _next(self) -> dict[str, torch.Tensor]:
        self._turn += 1
        return self._versions[self._turn % len(self._versions)]


def _first(tensors: dict[str, torch.Tensor], num_values: int) -> dict[str, torch.Tensor]:
    """The first tensors by name that hold so many values together."""
    chosen: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(tensors.items()):
        if tensor.numel() <= num_values:
            chosen[name] = tensor
            num_values -= tensor.numel()
    return chosen
