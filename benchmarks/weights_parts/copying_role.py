"""What a core can move: one buffer copied into another, both larger than every cache."""

from __future__ import annotations

import time

import numpy as np
import xxhash

NUM_BYTES = 256 * 2**20


class Role:
    """Copies and reads."""

    def __init__(self) -> None:
        """Touch both buffers, so that no page has to be made later."""
        self._source = np.ones(NUM_BYTES, np.uint8)
        self._target = np.zeros(NUM_BYTES, np.uint8)

    def rates(self, *, num_rounds: int) -> dict[str, list[float]]:
        """GB/s of every round: `copy` counts a byte once that is read and written; `checksum` is xxh3-64."""
        found: dict[str, list[float]] = {"copy": [], "checksum": []}
        for _ in range(num_rounds):
            start = time.perf_counter()
            np.copyto(self._target, self._source)
            copied = time.perf_counter()
            xxhash.xxh3_64_intdigest(self._source.data)
            found["copy"].append(NUM_BYTES / (copied - start) / 1e9)
            found["checksum"].append(NUM_BYTES / (time.perf_counter() - copied) / 1e9)
        return found

    def close(self) -> None:
        """Nothing is open."""
