"""Who takes weights: through a Puller, or with torch.load. A light process: torch is imported where it is used."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.weights_parts.service_role import RUN_ID
from common.staleness import PolicyVersion
from weight_sync import delta, manifest, store
from weight_sync.config import WeightSyncConfig
from weight_sync.puller import open_puller

POLL_S = 0.001
WAIT_S = 60.0


class Role:
    """One actor's side of the hand-over, without an engine."""

    def __init__(self, *, name: str, transport: str, folder: str, address: str, staging: str, dtype: str) -> None:
        """Open the puller.

        Args:
            name: of the actor.
            transport: "folder" or "network".
            folder: of the weight store; used by "folder".
            address: of the weight service; used by "network".
            staging: where the machine keeps what it fetched.
            dtype: to pull.
        """
        self._read_bytes = 0
        self._count_what_is_verified()
        knobs = WeightSyncConfig.model_validate({"transport": transport, "staging_dir": staging or None})
        self._dtype = dtype
        self._is_checked = transport == "network"
        """What comes over the network is checked on its way; in a folder that is seen each engine checks it."""
        self._puller = open_puller(knobs, folder=Path(folder), address=address, run_id=RUN_ID, name=name, dtype=dtype)

    def pull(self, *, version: int) -> dict[str, Any]:
        """Wait for a version, and stage it.

        Returns:
            `seen` and `staged`: moments of the clock that all processes share; `verified_bytes`: what this process
            read against a checksum of the manifest meanwhile.
        """
        wanted = PolicyVersion(0, version)
        deadline = time.monotonic() + WAIT_S
        while (newest := self._puller.newest()) is None or newest < wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"version {wanted} did not come within {WAIT_S:g} s; the newest is {newest}")
            time.sleep(POLL_S)
        seen, before = time.perf_counter(), self._read_bytes
        with self._puller.fetch(wanted) as version_here:
            if not self._is_checked:
                for _ in store.WeightStore(version_here.folder).tensors(version_here.manifest, self._dtype):
                    pass
            staged = time.perf_counter()
        return {"seen": seen, "staged": staged, "verified_bytes": self._read_bytes - before}

    def load(self, *, path: str) -> float:
        """torch.load of a file, onto the heap as it does unless told otherwise; returns seconds."""
        import torch

        torch.set_num_threads(1)
        began = time.perf_counter()
        torch.load(path)
        return time.perf_counter() - began

    def ready(self) -> None:
        """Returns once this process has taken its role."""

    def close(self) -> None:
        """Let go of the folder or the service."""
        self._puller.close()

    def _count_what_is_verified(self) -> None:
        original = manifest.checksum_of

        def counted(data: bytes | memoryview) -> str:
            self._read_bytes += len(data)
            return original(data)

        for module in (store, delta):  # both look the name up when they use it
            module.checksum_of = counted  # type: ignore[attr-defined]
