"""Where a publisher puts its part of a version: a folder of this machine, or the weight service of another.

Both do the same: `upload.UploadSink` is the one over ZeroMQ.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from common.files import write_whole
from common.staleness import PolicyVersion
from weight_sync.manifest import Manifest, Part, encode, part_name
from weight_sync.store import WeightStore

Buffers = Sequence[bytes | memoryview]

_REMOTE_READER = "REMOTE_READER"
"""A file that the weight service touches whenever somebody reads over the network."""
_REMOTE_READER_AGE_S = 300.0


class PartSink(Protocol):
    """Takes parts and commits versions. Used by one thread; every call is bounded."""

    place: str
    """For people: the folder or the address."""

    def newest(self) -> Manifest | None:
        """The manifest of the newest version, which becomes the parent of the next; None before the first."""
        ...

    def wants_deltas(self) -> bool:
        """Does anybody fetch over a network, so that a delta would save something?"""
        ...

    def write_part(self, part: Part, files: Mapping[str, Buffers]) -> None:
        """Write the files of a part, then its document.

        Args:
            part: describes them.
            files: name -> the buffers of its content, in order.

        Raises:
            OSError: no space, or not writable (`errno` says which): try again.
            TransferFailed: the service does not answer: try again.
        """
        ...

    def part(self, version: PolicyVersion, rank: int) -> Part | None:
        """What another stage contributed; None until it has."""
        ...

    def commit(self, manifest: Manifest, keep_versions: int) -> None:
        """Make a version whose parts are all written exist; as `WeightStore.commit`."""
        ...

    def close(self) -> None:
        """Let go of files and sockets."""
        ...


class FolderSink:
    """Writes directly into the store's folder."""

    def __init__(self, folder: Path) -> None:
        """Args:
        folder: of the weight store.
        """
        self._store = WeightStore(folder)
        self.place = str(folder)

    def newest(self) -> Manifest | None:
        """As in `PartSink`."""
        newest = self._store.newest()
        return None if newest is None else self._store.manifest(newest)

    def wants_deltas(self) -> bool:
        """As in `PartSink`."""
        return seen_remote_reader(self._store.folder)

    def write_part(self, part: Part, files: Mapping[str, Buffers]) -> None:
        """As in `PartSink`."""
        folder = self._store.begin(PolicyVersion.parse(part.version))
        for name, buffers in files.items():
            write_whole(folder / name, buffers, sum(memoryview(buffer).nbytes for buffer in buffers))
        write_whole(folder / part_name(part.rank), [encode(part)])

    def part(self, version: PolicyVersion, rank: int) -> Part | None:
        """As in `PartSink`."""
        return self._store.part(version, rank)

    def commit(self, manifest: Manifest, keep_versions: int) -> None:
        """As in `PartSink`."""
        self._store.commit(manifest, keep_versions)

    def close(self) -> None:
        """Nothing is open."""


def note_remote_reader(folder: Path) -> None:
    """Somebody reads over the network."""
    (folder / _REMOTE_READER).touch()


def seen_remote_reader(folder: Path) -> bool:
    """Did somebody read over the network lately?"""
    try:
        return time.time() - (folder / _REMOTE_READER).stat().st_mtime < _REMOTE_READER_AGE_S
    except FileNotFoundError:
        return False
