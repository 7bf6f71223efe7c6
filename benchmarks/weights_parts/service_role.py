"""The weight service of a folder, in a process of its own as in a run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from weight_sync.config import WeightSyncConfig
from weight_sync.service import WeightService

RUN_ID = "benchmark"
END_WITHIN_S = 10.0


class Role:
    """Serves until told to end."""

    def __init__(self, *, folder: str) -> None:
        """Bind a free port of loopback and serve.

        Args:
            folder: of the weight store.
        """
        self._service = WeightService(WeightSyncConfig(), RUN_ID, Path(folder))
        self._address = self._service.bind()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._service.serve, args=(self._stop,), name="service", daemon=True)
        self._thread.start()

    def address(self) -> str:
        """For clients."""
        return self._address

    def stats(self) -> dict[str, Any]:
        """As `WeightService.stats`."""
        return self._service.stats()

    def close(self) -> None:
        """Stop serving."""
        self._stop.set()
        self._thread.join(END_WITHIN_S)
