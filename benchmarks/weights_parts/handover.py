"""Processes without torch that serve weights, receive them, or measure the cost of copying."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from leeway.common.rpc.server import Request
from leeway.common.staleness import PolicyVersion
from leeway.weight_sync import delta, host_folder, manifest, store
from leeway.weight_sync.client import StoreAccess, WeightClient
from leeway.weight_sync.config import WeightSyncConfig
from leeway.weight_sync.protocol import ReadRequest
from leeway.weight_sync.puller import open_puller
from leeway.weight_sync.service import Answer, WeightService

RUN_ID = "benchmark"
END_WITHIN_S = 10.0
POLL_S = 0.001
WAIT_S = 60.0
NUM_COPIED_BYTES = 256 * 2**20


class CountingService(WeightService):
    """Weight service that counts the bytes sent for each version."""

    def __init__(self, run_id: str, folder: Path) -> None:
        """Initialize the service with zero counts."""
        super().__init__(run_id, folder)
        self.sent_bytes: Counter[str] = Counter()

    def _answer(self, request: Request) -> Answer | None:
        answer = super()._answer(request)
        if isinstance(request.message, ReadRequest) and answer is not None:
            self.sent_bytes[request.message.version] += len(answer[1])
        return answer


class Service:
    """Weight service of a folder, which serves in a thread until it is closed."""

    def __init__(self, *, folder: str) -> None:
        """Bind a free loopback port and serve a weight store."""
        self._service = CountingService(RUN_ID, Path(folder))
        self._address = self._service.bind()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._service.serve, args=(self._stop,), name="service", daemon=True)
        self._thread.start()

    def address(self) -> str:
        """Return the address to which clients connect."""
        return self._address

    def sent_bytes(self) -> dict[str, int]:
        """Return version -> bytes of its files that the service has sent."""
        return dict(self._service.sent_bytes)

    def close(self) -> None:
        """Stop serving."""
        self._stop.set()
        self._thread.join(END_WITHIN_S)


class Receiver:
    """Receiving side of weight transfer without an engine, which uses a Puller or torch.load."""

    def __init__(self, *, name: str, transport: str, folder: str, address: str, staging: str, dtype: str) -> None:
        """Open a puller. Transport "folder" reads the store; "network" fetches from the service and stages files."""
        self._read_bytes = 0
        self._count_verified_bytes()
        knobs = WeightSyncConfig.model_validate({"transport": transport})
        if staging:
            host_folder._SHM = Path(staging)
        self._dtype = dtype
        self._is_checked = transport == "network"
        """Whether the transport verifies files. "network" verifies files; with "folder", each engine does."""
        self._puller = open_puller(StoreAccess(knobs, Path(folder), address, RUN_ID), name, dtype)

    def pull(self, *, version: int) -> dict[str, Any]:
        """Wait for a version, then stage the version.

        Returns:
            `seen` and `staged` are times of the clock that all processes share. `verified_bytes` is the number of bytes
            that this process verified against a checksum of the manifest between these times.
        """
        desired = PolicyVersion(0, version)
        deadline = time.monotonic() + WAIT_S
        while (newest := self._puller.newest()) is None or newest < desired:
            if time.monotonic() > deadline:
                raise TimeoutError(f"timed out after {WAIT_S:g} s waiting for version {desired}; newest is {newest}")
            time.sleep(POLL_S)
        seen, before = time.perf_counter(), self._read_bytes
        with self._puller.fetch(desired) as version_here:
            if not self._is_checked:
                for _ in store.WeightStore(version_here.folder).tensors(version_here.manifest, self._dtype):
                    pass
            staged = time.perf_counter()
        return {"seen": seen, "staged": staged, "verified_bytes": self._read_bytes - before}

    def load(self, *, path: str) -> float:
        """Load a file onto the heap with the defaults of torch.load; return the seconds."""
        import torch

        torch.set_num_threads(1)
        began = time.perf_counter()
        torch.load(path)
        return time.perf_counter() - began

    def ready(self) -> None:
        """Return as soon as the process is initialized; used to wait for the initialization."""

    def close(self) -> None:
        """Close the puller."""
        self._puller.close()

    def _count_verified_bytes(self) -> None:
        original = manifest.checksum_of

        def counted(data: bytes | memoryview) -> str:
            self._read_bytes += len(data)
            return original(data)

        for module in (store, delta):  # both modules look up the function at each call
            module.checksum_of = counted  # type: ignore[attr-defined]


class Clients:
    """Clients of the service that fetch whole versions without engines; each client has a thread and a connection."""

    def __init__(self, *, address: str, num_clients: int) -> None:
        """Connect all clients."""
        self._clients = [WeightClient(address, RUN_ID, f"light-{i}", role="actor") for i in range(num_clients)]
        self._pool = ThreadPoolExecutor(num_clients)
        list(self._pool.map(lambda client: client.store(), self._clients))

    def fetch(self, *, version: int, start: float) -> list[float]:
        """Fetch a version with all clients at once; return the seconds of each client since `start` (shared clock)."""
        return list(self._pool.map(lambda client: _fetch(client, PolicyVersion(0, version), start), self._clients))

    def ready(self) -> None:
        """Return as soon as the process is initialized; used to wait for the initialization."""

    def close(self) -> None:
        """Close the connections."""
        self._pool.shutdown()
        for client in self._clients:
            client.close()


def _fetch(client: WeightClient, version: PolicyVersion, start: float) -> float:
    time.sleep(max(0.0, start - time.perf_counter()))
    contents, _ = client.manifest(version)
    for file in {entry.file for entry in contents.tensors}:
        found = 0

        def count(piece: memoryview) -> None:
            nonlocal found
            found += len(piece)

        client.read(version, file, contents.size_of(file), 0, count)
        if found != contents.size_of(file):
            raise RuntimeError(f"received {found} of {contents.size_of(file)} bytes of {file}")
    return time.perf_counter() - start


class Copying:
    """Measurement of the copy bandwidth of a core, between two buffers that are larger than every cache."""

    def __init__(self) -> None:
        """Touch both buffers, so that their pages exist before the measurement."""
        self._source = np.ones(NUM_COPIED_BYTES, np.uint8)
        self._target = np.zeros(NUM_COPIED_BYTES, np.uint8)

    def rates(self, *, num_rounds: int) -> dict[str, list[float]]:
        """Return GB/s of every round for `copy`, which counts each copied byte once, and for `checksum` (xxh3-64)."""
        found: dict[str, list[float]] = {"copy": [], "checksum": []}
        for _ in range(num_rounds):
            start = time.perf_counter()
            np.copyto(self._target, self._source)
            copied = time.perf_counter()
            xxhash.xxh3_64_intdigest(self._source.data)
            found["copy"].append(NUM_COPIED_BYTES / (copied - start) / 1e9)
            found["checksum"].append(NUM_COPIED_BYTES / (time.perf_counter() - copied) / 1e9)
        return found

    def close(self) -> None:
        """Do nothing, because this object has no open resources."""
