"""HostStaging: versions fetched from the weight service, once per machine for all of its actors.

    leeway-1000-RUN-STORE/
      users.lock                            held shared by every process that uses the folder
      locks/0.17                            held by the process that fetches version 17; touched as its heartbeat
      0.17/                                 laid out as in the weight store, so that a `WeightStore` reads it
        .part-0.bfloat16.safetensors.1a2b.partial   partial; its size is the progress
        part-0.bfloat16.safetensors                 complete, every tensor verified
        .staged.bfloat16                            marks that all files of this dtype are complete
        manifest.json

A file gets its final name once all its tensors have passed their checksums. The name of a partial file ends in the
inode of the lock. A killed process leaves its lock file and partial file, and the next holder of the lock resumes the
file. If the holder shows no heartbeat for `stall_timeout_s`, its lock and partial files are removed; a waiting process
creates its own files and fetches again. A stalled process that resumes writes only to its own files and verifies them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from leeway.common.files import FULL, write_whole
from leeway.common.staleness import PolicyVersion
from leeway.weight_sync.client import WeightClient
from leeway.weight_sync.delta import rebuild_file
from leeway.weight_sync.host_folder import HostFolder, is_at, lock_within, locked
from leeway.weight_sync.manifest import (
    MANIFEST_NAME,
    Manifest,
    TensorEntry,
    TransferFailed,
    WeightsCorrupt,
    WeightsGone,
    delta_name,
)
from leeway.weight_sync.store import READERS_LOCK, WeightStore, check_file, remove_unless_read

log = logging.getLogger(__name__)

_KEEP_VERSIONS = 2
"""Number of versions kept: the newest, and the previous one as the parent of deltas."""
_MAX_DELTAS = 8
"""Maximum length of a chain of deltas; instead of a longer chain, whole files are fetched."""


Heartbeat = Callable[[], None]
"""Called at every chunk and tensor, so that waiting processes see progress."""


class HostStaging(HostFolder):
    """The staging folder of a machine. Safe for any number of processes and threads."""

    def __init__(self, folder: Path, *, owner: str, stall_timeout_s: float = 30.0) -> None:
        """Join the users of a folder returned by `folder_for`; locks name this process `owner`.

        A fetching process without progress for `stall_timeout_s` is replaced.

        Raises:
            TransferFailed: the folder cannot be used.
        """
        super().__init__(folder)
        self.store = WeightStore(folder)
        self._locks = folder / "locks"
        self._locks.mkdir(exist_ok=True)
        self._owner = owner
        self._stall_timeout_s = stall_timeout_s

    def stage(self, client: WeightClient, manifest: Manifest, document: bytes, dtype: str) -> BinaryIO:
        """Stage a version in one dtype, every tensor verified, and protect it until the returned lock is closed.

        `document` is the manifest as received from the service.

        Raises:
            WeightsCorrupt: the version differs from the published one, or from a staged version of the same name.
            WeightsGone: the service no longer has the version.
            TransferFailed: the service, or another fetching process, makes no progress; or the disk is full. A retry
                resumes the download.
        """
        try:
            try:
                lock = self._stage(client, manifest, document, dtype)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                parent = () if manifest.parent is None else (PolicyVersion.parse(manifest.parent),)
                log.warning("%s is full; removing older versions that are not being read", self.store.folder)
                self._remove_all_but({manifest.policy, *parent}, up_to=manifest.policy)
                lock = self._stage(client, manifest, document, dtype)
            self._retain()
        except OSError as error:
            raise self._unusable(manifest.policy, error) from error
        return lock

    def invalidate(self, version: PolicyVersion, dtype: str) -> None:
        """Remove the mark that a version is complete, so that the next `stage` verifies all its files again."""
        with contextlib.suppress(OSError):
            _marker(self.store, version, dtype).unlink()

    def _stage(self, client: WeightClient, manifest: Manifest, document: bytes, dtype: str) -> BinaryIO:
        for older, older_document in self._delta_chain(client, manifest, dtype):
            with self._fetch_lock(older.policy) as lock:
                if not self._rebuild(client, older, older_document, dtype, lock):
                    break
            self._retain()
        version = manifest.policy
        with self._fetch_lock(version) as lock:
            if not self._rebuild(client, manifest, document, dtype, lock):
                fetch(client, manifest, dtype, self.store.version_folder(version), lock)
                self._mark_staged(manifest, document, dtype, lock)
            return self.store.lock_for_reading(version)

    def _unusable(self, version: PolicyVersion, error: OSError) -> TransferFailed:
        if not self.is_there():
            return TransferFailed(
                f"cannot stage version {version} in {self.store.folder}: another program removed that folder "
                f"({error}). The next attempt creates the folder again; exclude it from cleanup jobs"
            )
        hint = f"{error}. Set TMPDIR in [launch.env] to a writable folder"
        if error.errno in FULL:
            hint = "the disk is full. Free space for four versions"
        return TransferFailed(f"cannot stage version {version} in {self.store.folder}: {hint}")

    def _fetch_lock(self, version: PolicyVersion) -> BinaryIO:
        """Acquire the lock for fetching a version; steal it if its holder makes no progress."""
        path = self._locks / version.key
        what = f"version {version} in {self.store.folder}"
        for is_last in (False, False, True):
            awaited = _stat(path)
            try:
                return lock_within(
                    path, self._stall_timeout_s, owner=self._owner, what=what, progress=lambda: _touched_ns(path)
                )
            except TransferFailed as error:
                if is_last:
                    raise
                # one waiting process at a time: a second process would steal the lock of the new holder
                if (stealing := locked(self._locks / "oust")) is not None:
                    with stealing:
                        if awaited is not None and (now := _stat(path)) and now.st_ino == awaited.st_ino:
                            log.warning("%s. Taking the lock from that process", error)
                            # the disk space of these files is freed once the stalled process exits
                            for partial_file in self.store.version_folder(version).glob(".*.partial"):
                                partial_file.unlink(missing_ok=True)
                            path.unlink(missing_ok=True)
        raise AssertionError("unreachable")

    def _delta_chain(self, client: WeightClient, manifest: Manifest, dtype: str) -> list[tuple[Manifest, bytes]]:
        """Return the versions between a staged version and this one; [] if deltas are not smaller than whole files."""
        if self._is_staged(manifest, dtype):
            return []
        chain: list[tuple[Manifest, bytes]] = []
        cost, limit = 0, manifest.whole_bytes(dtype)
        newest_staged = max(self.store.committed(), default=manifest.policy)
        while True:
            change = manifest.change_bytes(dtype)
            cost += limit if change is None else change
            if cost >= limit or len(chain) >= _MAX_DELTAS:
                return []
            parent = PolicyVersion.parse(str(manifest.parent))
            if self._parent_folder(manifest, dtype) is not None:
                return chain[::-1]
            if parent <= newest_staged:
                return []
            try:
                manifest, document = client.manifest(parent)
            except (WeightsGone, WeightsCorrupt):
                return []
            chain.append((manifest, document))

    def _parent_folder(self, manifest: Manifest, dtype: str) -> Path | None:
        if manifest.parent is None:
            return None
        parent = PolicyVersion.parse(manifest.parent)
        try:
            staged = self.store.manifest(parent)
        except (WeightsGone, WeightsCorrupt):
            return None
        is_parent = staged.chain == manifest.parent_chain and _marker(self.store, parent, dtype).exists()
        return self.store.version_folder(parent) if is_parent else None

    def _is_staged(self, manifest: Manifest, dtype: str) -> bool:
        """Return whether a version is staged in a dtype; raise WeightsCorrupt if another version of its name is."""
        try:
            staged = self.store.manifest(manifest.policy)
        except (WeightsGone, WeightsCorrupt):
            return False
        if staged.checksum != manifest.checksum:
            raise WeightsCorrupt(
                f"version {manifest.policy} of the weight service (chain {manifest.chain}) differs from that in "
                f"{self.store.folder} (chain {staged.chain}): two learners publish the same version; stop one learner"
            )
        return _marker(self.store, manifest.policy, dtype).exists()

    def _rebuild(self, client: WeightClient, manifest: Manifest, document: bytes, dtype: str, lock: BinaryIO) -> bool:
        """Rebuild unstaged files from the parent's files; False means whole files are needed. `lock` must be held."""
        if self._is_staged(manifest, dtype):
            return True
        folder = self.store.version_folder(manifest.policy)
        folder.mkdir(exist_ok=True)
        cost, parent_folder = manifest.change_bytes(dtype), self._parent_folder(manifest, dtype)
        if cost is None or cost >= manifest.whole_bytes(dtype) or parent_folder is None:
            return False
        try:
            with self.store.lock_for_reading(PolicyVersion.parse(str(manifest.parent))):
                fetch(client, manifest, dtype, folder, lock, parent_folder)
        except (WeightsGone, WeightsCorrupt) as error:
            log.warning("fetching whole files, not deltas, of version %s: %s", manifest.policy, error)
            return False
        self._mark_staged(manifest, document, dtype, lock)
        return True

    def _mark_staged(self, manifest: Manifest, document: bytes, dtype: str, lock: BinaryIO) -> None:
        """Mark a version as staged in a dtype, once all files of the dtype are complete and verified."""
        folder = self.store.version_folder(manifest.policy)
        if is_at(lock, self._locks / manifest.policy.key):  # otherwise partial files belong to the new holder
            for leftover in folder.glob(".part-*"):
                leftover.unlink(missing_ok=True)
        (folder / READERS_LOCK).touch()
        write_whole(_marker(self.store, manifest.policy, dtype), [])
        write_whole(folder / MANIFEST_NAME, [document])

    def _retain(self) -> None:
        keep = self.store.committed()[-_KEEP_VERSIONS:]
        if keep:
            self._remove_all_but(set(keep), up_to=keep[0])

    def _remove_all_but(self, keep: set[PolicyVersion], *, up_to: PolicyVersion) -> None:
        """Remove versions older than `up_to`, except those in `keep` or being read or fetched."""
        for version, path in self.store.folders():
            if version in keep or version >= up_to or (lock := locked(self._locks / path.name)) is None:
                continue
            with lock:
                remove_unless_read(path)
                if not path.exists():
                    (self._locks / path.name).unlink(missing_ok=True)


def _marker(store: WeightStore, version: PolicyVersion, dtype: str) -> Path:
    return store.version_folder(version) / f".staged.{dtype}"


def _stat(path: Path) -> os.stat_result | None:
    with contextlib.suppress(FileNotFoundError):
        return path.stat()
    return None


def _touched_ns(path: Path) -> int:
    """Return the time of the last heartbeat of a lock's holder, in ns; 0 if the lock was just released."""
    found = _stat(path)
    return 0 if found is None else found.st_mtime_ns


def fetch(
    client: WeightClient,
    manifest: Manifest,
    dtype: str,
    folder: Path,
    lock: BinaryIO,
    parent_folder: Path | None = None,
) -> None:
    """Fetch the missing files of a version: whole, or as deltas to the files in `parent_folder` if given.

    A whole file that fails its checksums is fetched a second time. `lock` is the lock of the version.

    Raises:
        WeightsCorrupt: the second attempt failed, or the deltas do not yield the published bytes; the file is removed.
        WeightsGone, TransferFailed: the fetch failed; partial files stay, for a retry.
        OSError: the disk is full.
    """
    heartbeat = partial(os.utime, lock.fileno())
    for name, entries in manifest.files_of(dtype).items():
        source = name if parent_folder is None else delta_name(name)
        download = folder / f".{source}.{os.fstat(lock.fileno()).st_ino:x}.partial"
        for may_fail in (parent_folder is None, False):
            if _is_valid(folder / name, entries, heartbeat):
                break
            try:
                _fetch_bytes(client, manifest, source, download, heartbeat)
                try:
                    if parent_folder is None:
                        check_file(download, entries, heartbeat)
                        download.replace(folder / name)
                    else:
                        rebuild_file(entries, download, parent_folder / name, folder / name, heartbeat)
                        download.unlink(missing_ok=True)
                except WeightsCorrupt:
                    download.unlink(missing_ok=True)
                    raise
                break
            except WeightsCorrupt as error:
                if not may_fail:
                    raise
                log.warning("fetching %s of version %s again: %s", name, manifest.policy, error)


def _is_valid(path: Path, entries: list[TensorEntry], heartbeat: Heartbeat) -> bool:
    """Return whether a file exists and is as published; remove it if it was changed."""
    if not path.exists():
        return False
    try:
        check_file(path, entries, heartbeat)
    except WeightsCorrupt as error:
        log.warning("%s. Removing the file and fetching it again", error)
        path.unlink(missing_ok=True)
        return False
    return True


def _fetch_bytes(client: WeightClient, manifest: Manifest, name: str, download: Path, heartbeat: Heartbeat) -> None:
    """Download all bytes of a file, unverified, under a name that readers ignore."""
    total = manifest.size_of(name)
    with download.open("ab", buffering=0) as file:
        if file.tell() > total:
            file.truncate(0)

        def append(data: memoryview) -> None:
            heartbeat()
            while len(data):
                data = data[file.write(data) :]

        start = file.seek(0, 2)
        if start:
            log.info("resuming %s of version %s after %d of %d bytes", name, manifest.policy, start, total)
        client.read(manifest.policy, name, total, start, append)
