"""What the weight service does with its store, for those who do not see the folder.

ServedVersions: read, memory-mapped, and kept from removal until `expires_s` after their last request, but
no more than the `MAX_SERVED` that were requested last.

UploadReceiver: what stages upload. A file gets its name once it is complete and checked.

    0.17/.part-0.bfloat16.safetensors.26300416.upload     so far; its size says how far, after a restart too
    0.17/part-0.bfloat16.safetensors                      complete, every tensor checked

A part that comes as deltas is made whole here, from the parent's files.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from common.files import mapped, write_whole
from common.staleness import PolicyVersion
from weight_sync.delta import rebuild_file
from weight_sync.manifest import (
    Manifest,
    Part,
    TensorEntry,
    WeightsCorrupt,
    WeightsGone,
    by_file,
    chain_of,
    decode,
    delta_name,
    part_name,
)
from weight_sync.protocol import WholeFilesNeeded, upload_name, version_of
from weight_sync.store import WeightStore, check_file, read_manifest

log = logging.getLogger(__name__)

MAX_SERVED = 5
_NOTE_EVERY_S = 1.0


@dataclass
class _Served:
    document: bytes
    manifest: Manifest
    lock: BinaryIO
    asked_at: float
    sent_bytes: int = 0
    maps: dict[str, memoryview] = field(default_factory=dict)


class ServedVersions:
    """Versions that are read over the network."""

    def __init__(
        self,
        store: WeightStore,
        *,
        expires_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._expires_s = expires_s
        self._clock = clock
        self._served: dict[PolicyVersion, _Served] = {}
        self._note_at = self._expire_at = clock()

    def document(self, version: PolicyVersion) -> bytes:
        """Return the manifest of a version as it was written, and keep the version from now on; errors as `read`."""
        return self._of(version).document

    def read(self, version: PolicyVersion, file: str, offset: int, size: int) -> tuple[memoryview, int]:
        """Return bytes of a file, not copied, and the size of the file.

        Raises:
            WeightsGone: the version is not in the store.
            WeightsCorrupt: its manifest was changed or names no such file, or the file is cut.
            ValueError: the file has no such bytes.
        """
        served = self._of(version)
        total = served.manifest.size_of(file)
        if offset + size > total:
            raise ValueError(f"version {version}: {file} has {total} bytes, not {offset + size}")
        data = served.maps.get(file)
        if data is None:
            data = served.maps[file] = self._map(version, file, total)
        served.sent_bytes += size
        return data[offset : offset + size], total

    def note_reader(self) -> None:
        """Note that versions are read over the network, so that deltas are written."""
        now = self._clock()
        if now >= self._note_at:
            self._note_at = now + _NOTE_EVERY_S
            try:
                self._store.note_remote_reader()
            except OSError as error:  # it only saves bytes
                log.warning("%s: that somebody reads over the network cannot be noted: %s", self._store.folder, error)

    def expire(self) -> None:
        """Leave versions that are not read any more to retention. Cheap enough for every message."""
        now = self._clock()
        if now < self._expire_at:
            return
        self._expire_at = now + min(1.0, self._expires_s)
        last_first = sorted(self._served, key=lambda version: self._served[version].asked_at, reverse=True)
        for place, version in enumerate(last_first):
            if place >= MAX_SERVED or now - self._served[version].asked_at >= self._expires_s:
                self._let_go(version)

    def close(self) -> None:
        for version in list(self._served):
            self._let_go(version)

    def _of(self, version: PolicyVersion) -> _Served:
        now = self._clock()
        served = self._served.get(version)
        if served is None:
            lock = self._store.lock_for_reading(version)
            try:
                document = self._store.manifest_bytes(version)
                manifest = read_manifest(document, version, str(self._store.version_folder(version)))
                served = _Served(document, manifest, lock, now)
            except BaseException:
                lock.close()
                raise
            self._served[version] = served
        served.asked_at = now
        return served

    def _map(self, version: PolicyVersion, file: str, total: int) -> memoryview:
        path = self._store.version_folder(version) / file
        try:
            data = mapped(path)
        except OSError as error:
            raise WeightsCorrupt(f"{path}: cannot be read: {error}") from error
        if len(data) != total:
            raise WeightsCorrupt(f"{path}: has {len(data)} bytes, the manifest says {total}; it was cut or replaced")
        return data

    def _let_go(self, version: PolicyVersion) -> None:
        served = self._served.pop(version)
        log.info("version %s: %.1f MiB of %d files were sent", version, served.sent_bytes / 2**20, len(served.maps))
        # the maps end with the last message that is on its way
        served.lock.close()


class UploadReceiver:
    """Takes the parts of versions. All its state lies in the folder."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    def status(self, version: PolicyVersion, file: str, total_bytes: int) -> int:
        whole, partial = self._paths(version, file, total_bytes)
        if (size := _size(partial)) is not None:
            return min(size, total_bytes)
        return total_bytes if _size(whole) == total_bytes else 0

    def write(self, version: PolicyVersion, file: str, offset: int, total_bytes: int, data: memoryview) -> int:
        """Write bytes that continue those that are there, and no others; return the `status` afterwards."""
        if offset + len(data) > total_bytes:
            raise ValueError(f"{file}: {offset + len(data)} bytes of {total_bytes}")
        have = self.status(version, file, total_bytes)
        if offset > have or offset + len(data) <= have:
            return have
        self._store.refuse_old(version)
        self._store.begin(version)
        _, partial = self._paths(version, file, total_bytes)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            rest, at = data, offset
            while len(rest):
                written = os.pwrite(descriptor, rest, at)
                rest, at = rest[written:], at + written
        finally:
            os.close(descriptor)
        return max(have, offset + len(data))

    def finish_part(self, document: memoryview) -> None:
        """Check a part whose files are uploaded, make whole what came as a delta, and write its document.

        Raises:
            WholeFilesNeeded: its deltas do not serve.
            WeightsCorrupt: the document, or a file, is not as the stage had it; the file is to be sent again.
            PublishFailed: the version is older than the newest.
            OSError: the disk is full or not writable.
        """
        part = decode(document, Part, "an uploaded part")
        version = version_of(part.version)
        for entry in part.files:
            upload_name(entry.name)
        folder = self._store.version_folder(version)
        path = folder / part_name(part.rank)
        if path.exists() and path.read_bytes() == document:
            return
        self._store.refuse_old(version)
        self._store.begin(version)
        sizes = {file.name: file.size_bytes for file in part.files}
        whole = by_file(part.tensors)
        for name, size in sizes.items():
            if name not in whole:  # a delta
                self._name(version, name, size)
        for name, entries in whole.items():
            if not self._name(version, name, sizes[name], entries):
                self._rebuild(part, version, name, sizes[name], entries)
        write_whole(path, [document])

    def part(self, version: PolicyVersion, rank: int) -> bytes:
        try:
            return (self._store.version_folder(version) / part_name(rank)).read_bytes()
        except FileNotFoundError:
            return b""

    def commit(self, document: memoryview, keep_versions: int) -> None:
        """Make a version exist whose files are all there. Idempotent.

        Raises:
            WeightsCorrupt: the manifest was changed on its way, or a file that it names is missing.
            PublishFailed: the version is not newer than the newest.
            OSError: the disk is full; nothing has changed.
        """
        manifest = decode(document, Manifest, "an uploaded manifest")
        if self._is_committed(manifest):
            return
        folder = self._store.version_folder(manifest.policy)
        for file in manifest.files:
            if _size(folder / file.name) != file.size_bytes:
                raise WeightsCorrupt(f"version {manifest.policy} cannot be committed: {folder / file.name} is missing")
        self._store.commit(manifest, keep_versions)

    def _is_committed(self, manifest: Manifest) -> bool:
        """Return whether the same content exists under this version, and none is newer: the answer was lost."""
        if self._store.newest() != manifest.policy:
            return False
        there = self._store.manifest(manifest.policy)
        # asked again, the stage may have taken it for its own parent; its tensors are what counts
        return chain_of("", there.tensors) == chain_of("", manifest.tensors)

    def _name(self, version: PolicyVersion, name: str, size: int, entries: list[TensorEntry] | None = None) -> bool:
        """Give a complete upload its name, its tensors checked; False where there is none."""
        whole, partial = self._paths(version, name, size)
        found = partial if _size(partial) == size else whole
        if _size(found) != size:
            if size == 0 and entries is None:
                write_whole(whole, [])  # of nothing no byte was sent
                return True
            return False
        if entries is not None:
            try:
                check_file(found, entries)
            except WeightsCorrupt:
                found.unlink(missing_ok=True)
                raise
        if found == partial:
            partial.replace(whole)
        return True

    def _rebuild(self, part: Part, version: PolicyVersion, name: str, size: int, entries: list[TensorEntry]) -> None:
        folder = self._store.version_folder(version)
        if part.parent is None or any(entry.delta is None for entry in entries):
            raise WholeFilesNeeded(f"{folder / name} has not come whole, and no delta has")
        parent = version_of(part.parent)
        try:
            with self._store.lock_for_reading(parent):
                rebuild_file(
                    entries, folder / delta_name(name), self._store.version_folder(parent) / name, folder / name
                )
        except (WeightsGone, WeightsCorrupt, FileNotFoundError) as error:
            raise WholeFilesNeeded(f"{folder / name} cannot be made from its delta: {error}") from error
        if _size(folder / name) != size:
            (folder / name).unlink(missing_ok=True)
            raise WholeFilesNeeded(f"{folder / name}: what its delta makes has another size than the stage's file")

    def _paths(self, version: PolicyVersion, file: str, total_bytes: int) -> tuple[Path, Path]:
        folder = self._store.version_folder(version)
        return folder / upload_name(file), folder / f".{file}.{total_bytes}.upload"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None
