"""HostStaging: what a machine fetched from the weight service, once for all of its actors.

    leeway-1000-RUN-STORE/
      users.lock                            held by everybody who uses the folder
      locks/0.17                            held by the process that fetches version 17, and touched as it proceeds
      0.17/                                 laid out as in the weight store, so that a `WeightStore` reads it
        .part-0.bfloat16.safetensors.1a2b.partial   so far; its size says how far
        part-0.bfloat16.safetensors                 complete, every tensor checked
        .staged.bfloat16                            all files of this dtype are
        manifest.json

A file gets its name once all its tensors have passed their checksums. The name of a partial file ends in the inode of
the lock. A killed process leaves both, and the next holder of the lock continues with the file. The lock of a process
that is stopped for `patience_s` is removed with its partial files; another one makes its own and fetches anew. The
stopped one may continue too: it writes to files of its own, and what it names has passed the same checksums.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from common.files import FULL, discard, write_whole
from common.staleness import PolicyVersion
from weight_sync.client import WeightClient
from weight_sync.delta import rebuild_file
from weight_sync.host_folder import HostFolder, is_at, lock_within, locked
from weight_sync.manifest import (
    MANIFEST_NAME,
    Manifest,
    TensorEntry,
    TransferFailed,
    WeightsCorrupt,
    WeightsGone,
    delta_name,
)
from weight_sync.store import READERS_LOCK, WeightStore, check_file, remove_unless_read

log = logging.getLogger(__name__)

_KEEP_VERSIONS = 2
"""The newest, and its parent for the next delta."""
_MAX_DELTAS = 8
"""Versions in a row that are made from deltas, before whole files are fetched."""


GetOn = Callable[[], None]
"""Called at every piece and tensor, to show waiting processes that this one proceeds."""


class HostStaging(HostFolder):
    """The folder of a machine. Any number of processes and threads use it."""

    def __init__(self, folder: Path, *, who: str, patience_s: float = 30.0) -> None:
        """Join the users of a folder of `host_folder.folder_for`; locks name this process as `who`.

        Another process that fetches and does not proceed for `patience_s` is replaced.

        Raises:
            TransferFailed: the folder cannot be used.
        """
        super().__init__(folder)
        self.store = WeightStore(folder)
        self._locks = folder / "locks"
        self._locks.mkdir(exist_ok=True)
        self._who = who
        self._patience_s = patience_s

    def stage(self, client: WeightClient, manifest: Manifest, document: bytes, dtype: str) -> BinaryIO:
        """Have a version here, in one dtype, every tensor checked; closing the returned lock lets it go.

        `document` is the manifest as the service gave it.

        Raises:
            WeightsCorrupt: the version is not as published, or another one of this name is here.
            WeightsGone: the service has it no longer.
            TransferFailed: the service, or another process that fetches, does not proceed; or the disk is full. What
                came stays for the next try.
        """
        try:
            try:
                lock = self._stage(client, manifest, document, dtype)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                parent = () if manifest.parent is None else (PolicyVersion.parse(manifest.parent),)
                log.warning("%s is full; older versions that nobody reads are removed", self.store.folder)
                self._remove_all_but({manifest.policy, *parent}, up_to=manifest.policy)
                lock = self._stage(client, manifest, document, dtype)
            self._retain()
        except OSError as error:
            raise self._unusable(manifest.policy, error) from error
        return lock

    def distrust(self, version: PolicyVersion, dtype: str) -> None:
        """What is here of a version may no longer be as published: whatever stages it next reads all of it again."""
        with contextlib.suppress(OSError):
            _marker(self.store, version, dtype).unlink()

    def _stage(self, client: WeightClient, manifest: Manifest, document: bytes, dtype: str) -> BinaryIO:
        for older, older_document in self._way_to(client, manifest, dtype):
            with self._fetching(older.policy) as held:
                if not self._fill(client, older, older_document, dtype, held):
                    break
            self._retain()
        version = manifest.policy
        with self._fetching(version) as held:
            if not self._fill(client, manifest, document, dtype, held):
                fetch(client, manifest, dtype, self.store.version_folder(version), held)
                self._admit(manifest, document, dtype, held)
            return self.store.lock_for_reading(version)

    def _unusable(self, version: PolicyVersion, error: OSError) -> TransferFailed:
        if not self.is_there():
            return TransferFailed(
                f"version {version} cannot be kept in {self.store.folder}: somebody else has removed that folder "
                f"({error}). It is made anew with the next try; see that nothing cleans up there"
            )
        hint = f"{error}. Set TMPDIR in [launch.env] to a folder that can be written"
        if error.errno in FULL:
            hint = "it is full. Make room for four versions there"
        return TransferFailed(f"version {version} cannot be kept in {self.store.folder}: {hint}")

    def _fetching(self, version: PolicyVersion) -> BinaryIO:
        """Be the one that fetches a version, also in the place of a process that does not proceed."""
        path = self._locks / version.key
        what = f"version {version} in {self.store.folder}"
        for is_last in (False, False, True):
            waited_for = _stat(path)
            try:
                held = lock_within(path, self._patience_s, who=self._who, what=what, progress=lambda: _touched_ns(path))
            except TransferFailed as error:
                if is_last:
                    raise
                # one of those that wait: another would take the lock of the one that fetches by now
                if (ousting := locked(self._locks / "oust")) is not None:
                    with ousting:
                        if waited_for is not None and (now := _stat(path)) and now.st_ino == waited_for.st_ino:
                            log.warning("%s. Going on without it", error)
                            # the disk has their room again once that process ends
                            for left in self.store.version_folder(version).glob(".*.partial"):
                                left.unlink(missing_ok=True)
                            path.unlink(missing_ok=True)
            else:
                return held
        raise AssertionError("unreachable")

    def _way_to(self, client: WeightClient, manifest: Manifest, dtype: str) -> list[tuple[Manifest, bytes]]:
        """Return the versions from one that is here to the parent of this one, if their deltas are smaller than it."""
        if self._is_staged(manifest, dtype):
            return []
        way: list[tuple[Manifest, bytes]] = []
        cost, limit = 0, manifest.whole_bytes(dtype)
        youngest_here = max(self.store.committed(), default=manifest.policy)
        while True:
            change = manifest.change_bytes(dtype)
            cost += limit if change is None else change
            if cost >= limit or len(way) >= _MAX_DELTAS:
                return []
            parent = PolicyVersion.parse(str(manifest.parent))
            if self._parent_folder(manifest, dtype) is not None:
                return way[::-1]
            if parent <= youngest_here:
                return []
            try:
                manifest, document = client.manifest(parent)
            except (WeightsGone, WeightsCorrupt):
                return []
            way.append((manifest, document))

    def _parent_folder(self, manifest: Manifest, dtype: str) -> Path | None:
        if manifest.parent is None:
            return None
        parent = PolicyVersion.parse(manifest.parent)
        try:
            here = self.store.manifest(parent)
        except (WeightsGone, WeightsCorrupt):
            return None
        is_parent = here.chain == manifest.parent_chain and _marker(self.store, parent, dtype).exists()
        return self.store.version_folder(parent) if is_parent else None

    def _is_staged(self, manifest: Manifest, dtype: str) -> bool:
        """Is it here? WeightsCorrupt if another version of the same name is."""
        try:
            here = self.store.manifest(manifest.policy)
        except (WeightsGone, WeightsCorrupt):
            return False
        if here.checksum != manifest.checksum:
            raise WeightsCorrupt(
                f"version {manifest.policy} of the weight service (chain {manifest.chain}) is not the version of this "
                f"name that {self.store.folder} holds (chain {here.chain}): two learners publish under one number"
            )
        return _marker(self.store, manifest.policy, dtype).exists()

    def _fill(self, client: WeightClient, manifest: Manifest, document: bytes, dtype: str, held: BinaryIO) -> bool:
        """Make the files from the parent's if they are not here; False if whole ones are needed. The lock is held."""
        if self._is_staged(manifest, dtype):
            return True
        folder = self.store.version_folder(manifest.policy)
        folder.mkdir(exist_ok=True)
        cost, parent_folder = manifest.change_bytes(dtype), self._parent_folder(manifest, dtype)
        if cost is None or cost >= manifest.whole_bytes(dtype) or parent_folder is None:
            return False
        try:
            with self.store.lock_for_reading(PolicyVersion.parse(str(manifest.parent))):
                fetch(client, manifest, dtype, folder, held, parent_folder)
        except (WeightsGone, WeightsCorrupt) as error:
            log.warning("version %s is fetched whole: %s", manifest.policy, error)
            return False
        self._admit(manifest, document, dtype, held)
        return True

    def _admit(self, manifest: Manifest, document: bytes, dtype: str, held: BinaryIO) -> None:
        """All files of a dtype are here and checked."""
        folder = self.store.version_folder(manifest.policy)
        if is_at(held, self._locks / manifest.policy.key):  # else another process writes such files
            for left in folder.glob(".part-*"):  # of files that are fetched or rebuilt no further
                left.unlink(missing_ok=True)
        if not (folder / READERS_LOCK).exists():
            write_whole(folder / READERS_LOCK, [])
        write_whole(_marker(self.store, manifest.policy, dtype), [])
        write_whole(folder / MANIFEST_NAME, [document])

    def _retain(self) -> None:
        keep = self.store.committed()[-_KEEP_VERSIONS:]
        if keep:
            self._remove_all_but(set(keep), up_to=keep[0])

    def _remove_all_but(self, keep: set[PolicyVersion], *, up_to: PolicyVersion) -> None:
        """Remove what is older than a version, but nothing that is read or fetched."""
        for path in self.store.folder.iterdir():
            try:
                version = PolicyVersion.parse(path.name)
            except ValueError:
                continue
            if version in keep or version >= up_to:
                continue
            lock = locked(self._locks / path.name)
            if lock is None:
                continue
            with lock:
                if (path / MANIFEST_NAME).exists():
                    remove_unless_read(path)
                else:
                    discard(path)
                if not path.exists():
                    (self._locks / path.name).unlink(missing_ok=True)


def _marker(store: WeightStore, version: PolicyVersion, dtype: str) -> Path:
    return store.version_folder(version) / f".staged.{dtype}"


def _stat(path: Path) -> os.stat_result | None:
    with contextlib.suppress(FileNotFoundError):
        return path.stat()
    return None


def _touched_ns(path: Path) -> int:
    """When the holder of a lock last proceeded; 0 if it has just given the lock back."""
    found = _stat(path)
    return 0 if found is None else found.st_mtime_ns


def fetch(
    client: WeightClient,
    manifest: Manifest,
    dtype: str,
    folder: Path,
    held: BinaryIO,
    parent_folder: Path | None = None,
) -> None:
    """Fetch the files of a version that are not in its folder yet, from a parent's folder and changes if it is given.

    A whole file that fails its checksums is fetched once more. `held` is the lock of the version.

    Raises:
        WeightsCorrupt: it failed again, or the changes do not lead to what was published; nothing of it stays.
        WeightsGone, TransferFailed: what came stays.
        OSError: the disk is full.
    """
    get_on = partial(os.utime, held.fileno())
    for name, entries in manifest.files_of(dtype).items():
        sent = name if parent_folder is None else delta_name(name)
        came = folder / f".{sent}.{os.fstat(held.fileno()).st_ino:x}.partial"
        for may_fail in (parent_folder is None, False):
            if _is_whole(folder / name, entries, get_on):
                break
            try:
                _fetch_bytes(client, manifest, sent, came, get_on)
                try:
                    if parent_folder is None:
                        check_file(came, entries, get_on)
                        came.replace(folder / name)
                    else:
                        rebuild_file(entries, came, parent_folder / name, folder / name, get_on)
                        came.unlink(missing_ok=True)
                except WeightsCorrupt:
                    came.unlink(missing_ok=True)
                    raise
                break
            except WeightsCorrupt as error:
                if not may_fail:
                    raise
                log.warning("fetching %s of version %s once more: %s", name, manifest.policy, error)


def _is_whole(path: Path, entries: list[TensorEntry], get_on: GetOn) -> bool:
    """Is the file there, and as published? One that is not is removed: its name alone proves nothing."""
    if not path.exists():
        return False
    try:
        check_file(path, entries, get_on)
    except WeightsCorrupt as error:
        log.warning("%s. It is removed and fetched again", error)
        path.unlink(missing_ok=True)
        return False
    return True


def _fetch_bytes(client: WeightClient, manifest: Manifest, name: str, came: Path, get_on: GetOn) -> None:
    """Have all bytes of a file, unchecked, under a name that no reader looks for."""
    total = manifest.size_of(name)
    with came.open("ab", buffering=0) as file:
        if file.tell() > total:
            file.truncate(0)

        def append(data: memoryview) -> None:
            get_on()
            while len(data):
                data = data[file.write(data) :]

        start = file.seek(0, 2)
        if start:
            log.info("going on with %s of version %s behind %d of %d bytes", name, manifest.policy, start, total)
        client.read(manifest.policy, name, total, start, append)
