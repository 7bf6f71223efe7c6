"""ServedVersions: what the weight service reads for others, mapped, and kept from removal while it is read.

How much that keeps: a version is let go `LINGER_S` after every reader of it has had the last byte of the last file, and
`expires_s` after the last request of one that has not. Of versions that retention would remove, at most `MAX_OLD` are
kept for readers; of more, those that were asked for least lately are let go. So the store holds at most
`keep_versions + MAX_OLD` versions, and those that are committed before the next look, a second later.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO

from common.staleness import PolicyVersion
from weight_sync.errors import WeightsCorrupt
from weight_sync.fetch import files_of
from weight_sync.manifest import Manifest, delta_name
from weight_sync.sinks import note_remote_reader
from weight_sync.store import WeightStore, read_manifest

log = logging.getLogger(__name__)

LINGER_S = 2.0
"""A reader that is through may still ask for a piece again that was lost."""
MAX_OLD = 4
_NOTE_EVERY_S = 1.0
_NUM_COUNTED = 64
"""Versions of which it is remembered how much was sent."""


@dataclass
class _Reader:
    asked_at: float
    has_read: bool = False
    is_through: bool = False


@dataclass
class _Served:
    document: bytes
    manifest: Manifest
    lock: IO[bytes]
    asked_at: float
    last_files: frozenset[str]
    """Of each dtype the file that is read last, whole or as its changes."""
    was_read: bool = False
    """Somebody got through."""
    maps: dict[str, memoryview] = field(default_factory=dict)
    readers: dict[bytes, _Reader] = field(default_factory=dict)


class ServedVersions:
    """Versions that somebody reads over the network."""

    def __init__(
        self,
        store: WeightStore,
        *,
        keep_versions: int = 1,
        expires_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nobody reads yet.

        Args:
            store: where the versions lie.
            keep_versions: how many of the newest retention leaves alone.
            expires_s: a reader in the middle of a version that does not ask for so long is given up.
            clock: monotonic, in seconds.
        """
        self._store = store
        self._keep_versions = keep_versions
        self._expires_s = expires_s
        self._clock = clock
        self._served: dict[PolicyVersion, _Served] = {}
        self._sent: dict[PolicyVersion, dict[str, int]] = {}
        self._note_at = self._expire_at = clock()

    def document(self, version: PolicyVersion, reader: bytes = b"") -> bytes:
        """The manifest of a version as it was written; the version is kept from now on.

        Args:
            version: which.
            reader: who asks.

        Raises:
            WeightsGone: it is not in the store.
            WeightsCorrupt: its manifest was changed.
        """
        return self._of(version, reader).document

    def read(
        self, version: PolicyVersion, file: str, offset: int, size: int, reader: bytes = b""
    ) -> tuple[memoryview, int]:
        """Bytes of a file, not copied, and how many it has in all.

        Args:
            version: which holds it.
            file: one that its manifest names.
            offset: of the first byte.
            size: how many bytes.
            reader: who asks. It reads the files of a dtype in the manifest's order, as `fetch.files_of` gives them.

        Raises:
            WeightsGone: the version is not in the store.
            WeightsCorrupt: the manifest names no such file, or the file is cut.
            ValueError: the file has no such bytes.
        """
        served = self._of(version, reader)
        total = served.manifest.size_of(file)
        if offset + size > total:
            raise ValueError(f"version {version}: {file} has {total} bytes, not {offset + size}")
        data = served.maps.get(file)
        if data is None:
            data = served.maps[file] = self._map(version, file, total)
        state = served.readers[reader]
        state.has_read = True
        state.is_through = file in served.last_files and offset + size == total
        served.was_read |= state.is_through
        self._count(version, file, size)
        return data[offset : offset + size], total

    def note_reader(self) -> None:
        """Somebody looks for versions over the network: deltas will be wanted."""
        now = self._clock()
        if now >= self._note_at:
            self._note_at = now + _NOTE_EVERY_S
            try:
                note_remote_reader(self._store.folder)
            except OSError as error:  # it saves bytes, and is nothing that a reader must wait for
                log.warning("%s: that somebody reads over the network cannot be noted: %s", self._store.folder, error)

    def expire(self) -> None:
        """Leave versions that nobody reads any more to retention. Cheap enough for every message."""
        now = self._clock()
        if now < self._expire_at:
            return
        self._expire_at = now + min(1.0, self._expires_s)
        for version, served in list(self._served.items()):
            for name, reader in list(served.readers.items()):
                # who asked for the manifest alone waits for one that reads for its whole machine
                is_done = reader.is_through or (served.was_read and not reader.has_read)
                if now - reader.asked_at >= (min(LINGER_S, self._expires_s) if is_done else self._expires_s):
                    del served.readers[name]
            if not served.readers:
                self._let_go(version)
        self._cap()

    def read_bytes(self) -> dict[str, dict[str, int]]:
        """Version -> file -> bytes sent, counting what was sent twice; of the versions that were read last."""
        return {str(version): dict(files) for version, files in self._sent.items()}

    def close(self) -> None:
        """Let go of all."""
        for version in list(self._served):
            self._let_go(version)

    def _cap(self) -> None:
        """Let go of the versions beyond the bound."""
        if len(self._served) <= MAX_OLD:
            return
        try:
            kept_anyway = set(self._store.committed()[-self._keep_versions :])
        except OSError as error:
            log.warning("%s cannot be read: %s", self._store.folder, error)
            return
        old = sorted(self._served.keys() - kept_anyway, key=lambda version: self._served[version].asked_at)
        for version in old[: max(0, len(old) - MAX_OLD)]:
            log.warning("version %s is left to retention: more than %d old versions are read", version, MAX_OLD)
            self._let_go(version)

    def _count(self, version: PolicyVersion, file: str, size: int) -> None:
        files = self._sent.setdefault(version, {})
        files[file] = files.get(file, 0) + size
        if len(self._sent) > _NUM_COUNTED:
            del self._sent[next(iter(self._sent))]

    def _of(self, version: PolicyVersion, reader: bytes) -> _Served:
        now = self._clock()
        served = self._served.get(version)
        if served is None:
            lock = self._store.lock_for_reading(version)
            try:
                document = self._store.manifest_bytes(version)
                manifest = read_manifest(document, version, str(self._store.version_folder(version)))
                served = _Served(document, manifest, lock, now, _last_files(manifest))
            except BaseException:
                lock.close()
                raise
            self._served[version] = served
        served.asked_at = now
        served.readers.setdefault(reader, _Reader(now)).asked_at = now
        return served

    def _map(self, version: PolicyVersion, file: str, total: int) -> memoryview:
        path = self._store.version_folder(version) / file
        try:
            with path.open("rb") as opened:
                data = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise WeightsCorrupt(f"{path}: cannot be read: {error}") from error
        if len(data) != total:
            raise WeightsCorrupt(f"{path}: has {len(data)} bytes, the manifest says {total}; it was cut or replaced")
        return data

    def _let_go(self, version: PolicyVersion) -> None:
        sent = self._sent.get(version, {})
        log.info("version %s: %.1f MiB of %d files were sent", version, sum(sent.values()) / 2**20, len(sent))
        # the maps end with the last message that is on its way
        self._served.pop(version).lock.close()


def _last_files(manifest: Manifest) -> frozenset[str]:
    last = [next(reversed(files_of(manifest, dtype))) for dtype in manifest.dtypes]
    return frozenset([*last, *map(delta_name, last)])
