"""Who hands weights over, takes them or measures what that costs: light processes, which do not need torch."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from common.rpc.server import Request
from common.staleness import PolicyVersion
from weight_sync import delta, host_folder, manifest, store
from weight_sync.client import StoreAccess, WeightClient
from weight_sync.config import WeightSyncConfig
from weight_sync.protocol import ReadRequest
from weight_sync.puller import open_puller
from weight_sync.service import Answer, WeightService

RUN_ID = "benchmark"
END_WITHIN_S = 10.0
POLL_S = 0.001
WAIT_S = 60.0
NUM_COPIED_BYTES = 256 * 2**20


class CountingService(WeightService):
    """Counts the bytes that it sends of each version."""

    def __init__(self, run_id: str, folder: Path) -> None:
        """Nothing is sent yet."""
        super().__init__(run_id, folder)
        self.sent_bytes: Counter[str] = Counter()

    def _answer(self, request: Request) -> Answer | None:
        answer = super()._answer(request)
        if isinstance(request.message, ReadRequest) and answer is not None:
            self.sent_bytes[request.message.version] += len(answer[1])
        return answer


class Service:
    """The weight service of a folder, in a process of its own as in a run; it serves until told to end."""

    def __init__(self, *, folder: str) -> None:
        """Bind a free port of loopback and serve a weight store."""
        self._service = CountingService(RUN_ID, Path(folder))
        self._address = self._service.bind()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._service.serve, args=(self._stop,), name="service", daemon=True)
        self._thread.start()

    def address(self) -> str:
        """For clients."""
        return self._address

    def sent_bytes(self) -> dict[str, int]:
        """Of the files of each version."""
        return dict(self._service.sent_bytes)

    def close(self) -> None:
        """Stop serving."""
        self._stop.set()
        self._thread.join(END_WITHIN_S)


class Receiver:
    """One actor's side of the hand-over, without an engine: takes weights through a Puller, or with torch.load."""

    def __init__(self, *, name: str, transport: str, folder: str, address: str, staging: str, dtype: str) -> None:
        """Open a puller. The transport "folder" reads the store; "network" asks the service, and stages what comes."""
        self._read_bytes = 0
        self._count_what_is_verified()
        knobs = WeightSyncConfig.model_validate({"transport": transport})
        if staging:
            host_folder._SHM = Path(staging)
        self._dtype = dtype
        self._is_checked = transport == "network"
        """What comes over the network is checked on its way; in a folder that is seen each engine checks it."""
        self._puller = open_puller(StoreAccess(knobs, Path(folder), address, RUN_ID), name, dtype)

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


class Clients:
    """Light clients of the service, a thread each: each fetches whole versions over a connection of its own."""

    def __init__(self, *, address: str, num_clients: int) -> None:
        """Connect all of them."""
        self._clients = [WeightClient(address, RUN_ID, f"light-{i}", role="actor") for i in range(num_clients)]
        self._pool = ThreadPoolExecutor(num_clients)
        list(self._pool.map(lambda client: client.store(), self._clients))

    def fetch(self, *, version: int, start: float) -> list[float]:
        """All fetch a version at once; the seconds of each from `start`, a moment of the clock that processes share."""
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
    contents, _ = client.manifest(version)
    for file in {entry.file for entry in contents.tensors}:
        found = 0

        def count(piece: memoryview) -> None:
            nonlocal found
            found += len(piece)

        client.read(version, file, contents.size_of(file), 0, count)
        if found != contents.size_of(file):
            raise RuntimeError(f"{file}: {found} bytes of {contents.size_of(file)}")
    return time.perf_counter() - start


class Copying:
    """What a core can move: one buffer copied into another, both larger than every cache."""

    def __init__(self) -> None:
        """Touch both buffers, so that no page has to be made later."""
        self._source = np.ones(NUM_COPIED_BYTES, np.uint8)
        self._target = np.zeros(NUM_COPIED_BYTES, np.uint8)

    def rates(self, *, num_rounds: int) -> dict[str, list[float]]:
        """GB/s of every round: `copy` counts a byte once that is read and written; `checksum` is xxh3-64."""
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
        """Nothing is open."""
