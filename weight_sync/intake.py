"""Intake: the service's side of an upload. What a stage uploads gets its name once it is complete and checked.

    0.17/.part-0.bfloat16.safetensors.26300416.upload     so far; its size says how far, after a restart too
    0.17/part-0.bfloat16.safetensors                      complete, every tensor checked

A part that comes as deltas is made whole here, from the parent's files.

The pieces of an upload are written on the service's one thread, each before the next message is taken: a slow disk
slows readers too while somebody uploads. Only checking, making whole and committing are the worker's.
"""

from __future__ import annotations

import os
from pathlib import Path

from common.files import write_whole
from common.staleness import PolicyVersion
from weight_sync.delta import rebuild_file
from weight_sync.errors import WeightsCorrupt, WeightsGone
from weight_sync.manifest import Manifest, Part, TensorEntry, by_file, chain_of, decode, delta_name, part_name
from weight_sync.protocol import WholeFilesNeeded, upload_name, version_of
from weight_sync.store import WeightStore, checked
from weight_sync.tensor_file import TensorFile


class Intake:
    """Takes the parts of versions. It remembers nothing but what lies in the folder."""

    def __init__(self, store: WeightStore) -> None:
        """Args:
        store: where versions are to lie.
        """
        self._store = store

    def status(self, version: PolicyVersion, file: str, total_bytes: int) -> int:
        """How many bytes of a file are there, from its start."""
        whole, partial = self._paths(version, file, total_bytes)
        for path in (partial, whole):
            size = _size(path)
            if size is not None and (path == partial or size == total_bytes):
                return min(size, total_bytes)
        return 0

    def write(self, version: PolicyVersion, file: str, offset: int, total_bytes: int, data: memoryview) -> int:
        """Write bytes that follow on those that are there, or lie among them; others are left out.

        Returns:
            As `status`, afterwards.

        Raises:
            PublishFailed: the version is older than the newest.
            OSError: the disk is full or not writable.
        """
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
        """The document of a part, unchecked; empty until it has come whole."""
        try:
            return (self._store.version_folder(version) / part_name(rank)).read_bytes()
        except FileNotFoundError:
            return b""

    def commit(self, document: memoryview, keep_versions: int) -> None:
        """Make a version exist whose files are all there; once more does nothing.

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
        """The answer was lost: the same content exists under this version, and none is newer."""
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
                with TensorFile(found) as file:
                    for entry in entries:
                        checked(file, entry)
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
