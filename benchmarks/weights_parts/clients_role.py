"""Light clients of the weight service: each fetches a whole version over a connection of its own, and keeps nothing."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.weights_parts.service_role import RUN_ID
from common.staleness import PolicyVersion
from weight_sync.client import WeightClient


class Role:
    """Several clients in one process, a thread each."""

    def __init__(self, *, address: str, num_clients: int) -> None:
        """Connect all of them.

        Args:
            address: of the weight service.
            num_clients: in this process.
        """
        self._clients = [WeightClient(address, RUN_ID, f"light-{i}") for i in range(num_clients)]
        self._pool = ThreadPoolExecutor(num_clients)
        list(self._pool.map(lambda client: client.store(), self._clients))

    def fetch(self, *, version: int, start: float) -> list[float]:
        """Fetch a version with all clients at once; returns the seconds that each took from the start.

        Args:
            version: which.
            start: a moment of the clock that all processes share.
        """
        return list(self._pool.map(lambda client: _fetch(client, PolicyVersion(0, version), start), self._clients))

    def ready(self) -> None:
        """Returns once this process has taken its role."""

    def close(self) -> None:
        """End the connections."""
        self._pool.shutdown()
        for client in self._clients:
            client.close()


def _fetch(client: WeightClient, version: PolicyVersion, start: float) -> float:
    time.sleep(max(0.0, start - time.perf_counter()))
    manifest, _ = client.manifest(version)
    for file in {entry.file for entry in manifest.tensors}:
        found = 0

        def count(piece: memoryview) -> None:
            nonlocal found
            found += len(piece)

        client.read(version, file, manifest.size_of(file), 0, count)
        if found != manifest.size_of(file):
            raise RuntimeError(f"{file}: {found} bytes of {manifest.size_of(file)}")
    return time.perf_counter() - start
