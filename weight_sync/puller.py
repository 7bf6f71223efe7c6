"""The actor's side: take a version from the store, verified before anyone pauses for it."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import IO

from weight_sync.manifest import Manifest
from weight_sync.staleness import PolicyVersion
from weight_sync.store import WeightStore


class StagedVersion:
    """A verified version that retention leaves alone until this is closed. Use it as a context manager."""

    def __init__(self, folder: Path, manifest: Manifest, lock: IO[bytes]) -> None:
        """Take over a lock.

        Args:
            folder: of the weight store.
            manifest: verified against the files.
            lock: the read lock; closed with this object.
        """
        self.folder = folder
        self.manifest = manifest
        self._lock = lock

    @property
    def version(self) -> PolicyVersion:
        """Which version is staged."""
        return self.manifest.policy

    def close(self) -> None:
        """Let retention have the version. May be called twice."""
        self._lock.close()

    def __enter__(self) -> StagedVersion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Puller:
    """Looks for newer versions and stages them."""

    def __init__(self, folder: Path) -> None:
        """Look into a store.

        Args:
            folder: of the weight store; may be empty still.
        """
        self._store = WeightStore(folder)

    def newest(self) -> PolicyVersion | None:
        """The newest committed version, or None before the first. Cheap enough to poll.

        Raises:
            WeightsCorrupt: the store's pointer is unreadable.
        """
        return self._store.newest()

    def fetch(self, version: PolicyVersion) -> StagedVersion:
        """Lock a version against removal and verify all of it. Blocks for the time it takes to read it.

        Raises:
            WeightsGone: the version does not exist, or no longer: ask for `newest` again.
            WeightsCorrupt: names file and tensor; keep serving the version you have.
        """
        lock = self._store.lock_for_reading(version)
        try:
            manifest = self._store.verify(version)
        except BaseException:
            lock.close()
            raise
        return StagedVersion(self._store.folder, manifest, lock)
