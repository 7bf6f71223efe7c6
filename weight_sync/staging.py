"""HostStaging: what a machine fetched from the weight service, once for all of its actors.

    leeway-1000-RUN-STORE/
      users.lock                            held by everybody who uses the folder
      locks/0.17                            held by the process that fetches version 17
      0.17/                                 laid out as in the weight store, so that a `WeightStore` reads it
        .part-0.bfloat16.safetensors.partial   so far; its size says how far
        part-0.bfloat16.safetensors            complete, every tensor checked
        .staged.bfloat16                       all files of this dtype are
        manifest.json

A file gets its name once every tensor in it has passed its checksum. A process that is killed while it fetches leaves
what came; the next one goes on behind it. One that is stopped is not waited for longer than `patience_s`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Callable
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
    TensorFile,
    TransferFailed,
    WeightsCorrupt,
    WeightsGone,
    delta_name,
)
from weight_sync.store import READERS_LOCK, WeightStore, checked, remove_unless_read

log = logging.getLogger(__name__)

_KEEP_VERSIONS = 2
"""The newest, and its parent for the next delta."""
_MAX_DELTAS = 8
"""Versions in a row that are made from deltas, before whole files are fetched."""


GetOn = Callable[[], None]
"""Called at every piece and every tensor, and before a file is changed: tells those that wait that this process gets
on, or raises TransferFailed where another one has taken over."""


class _Ousted(TransferFailed):
    """This process was stopped while it fetched, and another one has taken over."""


class HostStaging(HostFolder):
    """The folder of a machine. Any number of processes and threads use it."""

    def __init__(self, folder: Path, *, who: str, patience_s: float = 30.0) -> None:
        """Join the users of a folder of `host_folder.folder_for`; those that wait for this process know it as `who`.

        Another process that fetches and does not get on is waited for `patience_s`, before this one does.

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
        """Have a version here, in one dtype, every tensor checked; closing the lock returned lets it go again.

        `document` is the manifest as the service gave it.

        Raises:
            WeightsCorrupt: the version is not as published, or is not the one of this name that is here already.
            WeightsGone: the service has it no longer.
            TransferFailed: the service, or another process that fetches the version, does not get on; or the disk is
                full. What came stays for the next try.
        """
        try:
            try:
                lock = self._stage(client, manifest, document, dtype)
            except _Ousted as error:
                log.warning("%s", error)
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
                if not self._is_staged(older, dtype) and not self._fill(client, older, older_document, dtype, held):
                    break
            self._retain()
        version = manifest.policy
        with self._fetching(version) as held:
            if not self._is_staged(manifest, dtype) and not self._fill(client, manifest, document, dtype, held):
                fetch(client, manifest, dtype, self.store.version_folder(version), lambda: self._get_on(held, version))
                self._admit(manifest, document, dtype, held)
            return self.store.lock_for_reading(version)

    def _unusable(self, version: PolicyVersion, error: OSError) -> TransferFailed:
        if not self.is_there():
            return TransferFailed(
                f"version {version} cannot be kept in {self.store.folder}: somebody else has removed that folder "
                f"({error}). It is made anew with the next try; set [weight_sync] staging_dir to a folder that nothing "
                "cleans up"
            )
        hint = "it is full" if error.errno in FULL else str(error)
        return TransferFailed(
            f"version {version} cannot be kept in {self.store.folder}: {hint}. Set [weight_sync] staging_dir to a "
            "folder of this machine with room for four versions"
        )

    def _get_on(self, held: BinaryIO, version: PolicyVersion) -> None:
        """Show those that wait for the version that this process is not stopped; refuse if it was taken for it."""
        self._refuse_if_ousted(held, version)
        os.utime(held.fileno())

    def _refuse_if_ousted(self, held: BinaryIO, version: PolicyVersion) -> None:
        if not is_at(held, self._locks / version.key):
            if not self.is_there():
                raise FileNotFoundError(errno.ENOENT, "No such folder any more", str(self.store.folder))
            raise _Ousted(
                f"version {version} in {self.store.folder}: {self._who} did not get on with it for longer than "
                f"{self._patience_s:g} s, and another process fetches it now. Ask again for what that one has"
            )

    def _fetching(self, version: PolicyVersion) -> BinaryIO:
        """Be the one that fetches a version, also in the place of a process that does not get on with it."""
        folder, path = self.store.version_folder(version), self._locks / version.key
        for is_last in (False, False, True):
            waited_for = _inode(path)
            try:
                return self._lock(path, lambda: _touched_ns(path))
            except TransferFailed as error:
                if is_last:
                    raise
                self._oust(path, waited_for, folder, error)
        raise AssertionError("unreachable")

    def _lock(self, path: Path, progress: Callable[[], int]) -> BinaryIO:
        return lock_within(
            path, self._patience_s, who=self._who, what=f"version {path.name} in {self.store.folder}", progress=progress
        )

    def _oust(self, path: Path, waited_for: int | None, folder: Path, error: TransferFailed) -> None:
        """Take the lock's file from a stopped process; one does so of all that wait."""
        with self._lock(self._locks / "oust", lambda: 0):
            if waited_for is None or _inode(path) != waited_for:
                return
            log.warning("%s. Going on without it", error)
            # should it be continued, it writes into files that have no name any more
            for partial in folder.glob(".*.partial"):
                copy = partial.with_name(f"{partial.name}.copy")
                shutil.copyfile(partial, copy)
                copy.replace(partial)
            path.unlink(missing_ok=True)

    def _way_to(self, client: WeightClient, manifest: Manifest, dtype: str) -> list[tuple[Manifest, bytes]]:
        """The versions between one that is here and the parent of this one, where their deltas cost less than it whole.

        Empty where the parent is here, where the version is, and where there is no such way.
        """
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
        """Where the version lies that the deltas are against; None where it is not here."""
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
        """Make the files from the parent's; False where whole ones are needed. The version's lock is held."""
        folder = self.store.version_folder(manifest.policy)
        folder.mkdir(exist_ok=True)
        cost, parent_folder = manifest.change_bytes(dtype), self._parent_folder(manifest, dtype)
        if cost is None or cost >= manifest.whole_bytes(dtype) or parent_folder is None:
            return False
        try:
            with self.store.lock_for_reading(PolicyVersion.parse(str(manifest.parent))):
                get_on = lambda: self._get_on(held, manifest.policy)  # noqa: E731
                fetch(client, manifest, dtype, folder, get_on, parent_folder)
        except (WeightsGone, WeightsCorrupt) as error:
            log.warning("version %s is fetched whole: %s", manifest.policy, error)
            return False
        self._admit(manifest, document, dtype, held)
        return True

    def _admit(self, manifest: Manifest, document: bytes, dtype: str, held: BinaryIO) -> None:
        """All files of a dtype are here and checked."""
        self._refuse_if_ousted(held, manifest.policy)
        folder = self.store.version_folder(manifest.policy)
        for partial in folder.glob(".part-*"):  # of files that are fetched or rebuilt no further
            partial.unlink(missing_ok=True)
        if not (folder / READERS_LOCK).exists():
            write_whole(folder / READERS_LOCK, [])
        write_whole(_marker(self.store, manifest.policy, dtype), [])
        write_whole(folder / MANIFEST_NAME, [document])

    def _retain(self) -> None:
        """Remove old versions, but none that is read or fetched."""
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


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _touched_ns(path: Path) -> int:
    """When the holder of a lock last got on."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # it has just given it back
        return 0


def fetch(
    client: WeightClient, manifest: Manifest, dtype: str, folder: Path, get_on: GetOn, parent_folder: Path | None = None
) -> None:
    """Fetch the files of a version that are not in its folder yet, with a parent's folder as changes of that.

    What came is not fetched twice. A whole file that fails its checksums is fetched once more.

    Raises:
        WeightsCorrupt: it failed again, or the changes do not lead to what was published; nothing of it stays.
        WeightsGone, TransferFailed: what came stays.
        OSError: the disk is full.
    """
    for name, entries in manifest.files_of(dtype).items():
        get_on()
        if _is_whole(folder / name, entries, get_on):
            continue
        try:
            _fetch_file(client, manifest, name, entries, folder, get_on, parent_folder)
        except WeightsCorrupt as error:
            if parent_folder is not None:
                raise
            log.warning("fetching %s of version %s once more: %s", name, manifest.policy, error)
            _fetch_file(client, manifest, name, entries, folder, get_on, None)


def _fetch_file(
    client: WeightClient,
    manifest: Manifest,
    name: str,
    entries: list[TensorEntry],
    folder: Path,
    get_on: GetOn,
    parent_folder: Path | None,
) -> None:
    came = _fetch_bytes(client, manifest, name if parent_folder is None else delta_name(name), folder, get_on)
    try:
        if parent_folder is None:
            _check(came, entries, get_on)
        else:
            get_on()
            rebuild_file(entries, came, parent_folder / name, folder / name, get_on)
    except WeightsCorrupt:
        get_on()
        came.unlink(missing_ok=True)
        raise
    get_on()
    if parent_folder is None:
        came.replace(folder / name)
    else:
        came.unlink(missing_ok=True)


def _check(path: Path, entries: list[TensorEntry], get_on: GetOn) -> None:
    with TensorFile(path) as file:
        for entry in entries:
            get_on()
            checked(file, entry)


def _is_whole(path: Path, entries: list[TensorEntry], get_on: GetOn) -> bool:
    """Is the file there, and as published? One that is not is removed: its name alone proves nothing."""
    if not path.exists():
        return False
    try:
        _check(path, entries, get_on)
    except WeightsCorrupt as error:
        log.warning("%s. It is removed and fetched again", error)
        path.unlink(missing_ok=True)
        return False
    return True


def _fetch_bytes(client: WeightClient, manifest: Manifest, name: str, folder: Path, get_on: GetOn) -> Path:
    """Have all bytes of a file in the folder, unchecked, under a name that no reader looks for."""
    partial = folder / f".{name}.partial"
    total = manifest.size_of(name)
    with partial.open("ab", buffering=0) as file:
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
    return partial
