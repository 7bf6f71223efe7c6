"""The folder of published versions.

    weights/
      STORE                               a random name that identifies the store
      NEWEST                              the newest committed version
      REMOTE_READER                       touched when versions are read over the network
      PORT                                port of the service, reused by the next one
      0.17/                               version 17 of learner incarnation 0
        part-0.bfloat16.safetensors       one file per pipeline stage and dtype
        part-0.bfloat16.delta             the same tensors as changes since the parent version, if smaller
        part-0.json                       contents of the files, with checksums
        readers.lock                      held shared by readers of the version
        manifest.json                     written last: without it the version does not exist

Nothing is synced to disk: after a power cut, damaged files fail their checksums and the next learner publishes again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from leeway.common.files import discard, temporary_beside, try_lock, write_whole
from leeway.common.staleness import PolicyVersion
from leeway.weight_sync.manifest import (
    CODES,
    MANIFEST_NAME,
    Manifest,
    Part,
    PublishFailed,
    TensorEntry,
    TensorFile,
    WeightsCorrupt,
    WeightsGone,
    checksum_of,
    copy_and_hash,
    decode,
    encode,
    part_name,
)

_NEWEST_NAME = "NEWEST"
_STORE_NAME = "STORE"
PORT = "PORT"
KEPT_VERSIONS = 3
"""Number of versions kept besides those being read; an actor finishes reading before three newer versions exist."""
READERS_LOCK = "readers.lock"
_REMOTE_READER = "REMOTE_READER"
_REMOTE_READER_AGE_S = 300.0

Buffers = Sequence[bytes | memoryview]


@dataclass(frozen=True)
class StagedVersion(contextlib.AbstractContextManager["StagedVersion"]):
    """A version on this machine, protected from removal until its lock is closed."""

    folder: Path
    manifest: Manifest
    dtype: str
    lock: BinaryIO

    @property
    def version(self) -> PolicyVersion:
        return self.manifest.policy

    def close(self) -> None:
        self.lock.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class WeightStore:
    """Store of versions, with one committer, and any number of readers that mount the folder."""

    def __init__(self, folder: Path) -> None:
        """Open the store in a folder, which is created if missing."""
        self.folder = folder
        self.place = str(folder)
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def store_id(self) -> str:
        path = self.folder / _STORE_NAME
        if not path.exists():
            named = temporary_beside(path)
            named.write_text(secrets.token_hex(16), encoding="ascii")
            with contextlib.suppress(FileExistsError):
                os.link(named, path)  # unlike a rename, it does not replace a name that another process wrote first
            named.unlink()
        return path.read_text(encoding="ascii")

    def version_folder(self, version: PolicyVersion) -> Path:
        return self.folder / version.key

    def newest(self) -> PolicyVersion | None:
        """Return the newest committed version, or None before the first. The call reads only one small file."""
        try:
            text = (self.folder / _NEWEST_NAME).read_text(encoding="ascii", errors="replace")
            return PolicyVersion.parse(text.strip())
        except FileNotFoundError:
            return None
        except ValueError:
            # after a power cut, the file may hold anything, so search for the version instead
            return next(reversed(self.committed()), None)

    def newest_manifest(self) -> Manifest | None:
        newest = self.newest()
        return None if newest is None else self.manifest(newest)

    def committed(self) -> list[PolicyVersion]:
        return sorted(version for version, folder in self.folders() if (folder / MANIFEST_NAME).exists())

    def manifest_bytes(self, version: PolicyVersion) -> bytes:
        """Return the manifest of a version as written, unverified; raise WeightsGone if there is none."""
        path = self.version_folder(version) / MANIFEST_NAME
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise WeightsGone(f"version {version} is not in {self.folder}: {path.name} is missing") from error

    def manifest(self, version: PolicyVersion) -> Manifest:
        """Return a manifest; raise WeightsGone if it is missing, WeightsCorrupt if changed or of another version."""
        return read_manifest(self.manifest_bytes(version), version, str(self.version_folder(version) / MANIFEST_NAME))

    def part(self, version: PolicyVersion, rank: int) -> Part | None:
        """Return the part of a stage, or None if it is not written; raise WeightsCorrupt if the part was changed."""
        path = self.version_folder(version) / part_name(rank)
        try:
            return decode(path.read_bytes(), Part, path)
        except FileNotFoundError:
            return None

    def tensors(
        self, manifest: Manifest, dtype: str, into: memoryview | None = None
    ) -> Iterator[tuple[TensorEntry, memoryview]]:
        """Yield the bytes of every tensor of a variant, memory-mapped and `checked`.

        If `into` is given, all tensors are copied into `into` back to back; it must have room for all tensors.
        """
        folder = self.version_folder(manifest.policy)
        for name, entries in manifest.files_of(dtype).items():
            file = TensorFile(folder / name)
            for entry in entries:
                if into is None:
                    yield entry, checked(file, entry)
                else:
                    place, into = into[: entry.size_bytes], into[entry.size_bytes :]
                    yield entry, checked(file, entry, place)

    def lock_for_reading(self, version: PolicyVersion) -> BinaryIO:
        """Protect a version from removal until the returned file is closed or the process exits.

        Raise WeightsGone if the version does not exist or is being removed.
        """
        folder = self.version_folder(version)
        try:
            # closed by the caller: the lock is held while the file is open
            lock = (folder / READERS_LOCK).open("rb")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise WeightsGone(f"version {version} is not in {self.folder}; retention may have removed it") from error
        if not try_lock(lock, shared=True):
            lock.close()
            raise WeightsGone(f"version {version} is being removed from {self.folder} by retention")
        # retention may have removed the version between open and lock
        if not (folder / MANIFEST_NAME).exists():
            lock.close()
            raise WeightsGone(f"version {version} is not in {self.folder}; retention has removed it")
        return lock

    def take(self, version: PolicyVersion, dtype: str) -> StagedVersion:
        lock = self.lock_for_reading(version)
        try:
            manifest = self.manifest(version)
            manifest.files_of(dtype)
        except BaseException:
            lock.close()
            raise
        return StagedVersion(self.folder, manifest, dtype, lock)

    def invalidate(self, version: PolicyVersion, dtype: str) -> None:
        """Do nothing: the store's files have no other source, and engines verify all of them every time."""

    def close(self) -> None:
        """Do nothing: the store holds no open files."""

    def begin(self, version: PolicyVersion) -> Path:
        """Create the folder of a version.

        Unfinished versions of earlier incarnations are removed to free space. Other stages of this incarnation write
        concurrently.
        """
        folder = self.version_folder(version)
        if not folder.exists():
            for other, unfinished in self.folders():
                if other.incarnation < version.incarnation and not (unfinished / MANIFEST_NAME).exists():
                    discard(unfinished)
            folder.mkdir(exist_ok=True)
        return folder

    def write_part(self, part: Part, files: Mapping[str, Buffers]) -> None:
        """Write the files of a part, then its document; raise OSError if the disk is full or not writable."""
        folder = self.begin(PolicyVersion.parse(part.version))
        for name, buffers in files.items():
            write_whole(folder / name, buffers, sum(memoryview(buffer).nbytes for buffer in buffers))
        write_whole(folder / part_name(part.rank), [encode(part)])

    def refuse_old(self, version: PolicyVersion) -> None:
        newest = self.newest()
        if newest is not None and version <= newest:
            raise PublishFailed(
                f"version {version} cannot follow {newest} in {self.folder}: versions must increase. "
                "A restarted learner uses a new incarnation; stop the old learner if it is still running"
            )

    def commit(self, manifest: Manifest, keep_versions: int) -> None:
        """Commit a version whose parts are on disk; remove all but the newest `keep_versions` and those being read.

        Raises:
            PublishFailed: the version is not newer than the newest.
            OSError: the disk is full and the version is not committed; retry.
        """
        self.refuse_old(manifest.policy)
        folder = self.version_folder(manifest.policy)
        write_whole(folder / READERS_LOCK, [])
        write_whole(folder / MANIFEST_NAME, [encode(manifest)])
        write_whole(self.folder / _NEWEST_NAME, [f"{manifest.policy.key}\n".encode()])
        keep = self.committed()[-keep_versions:]
        for version, older in self.folders():
            if version not in keep and version < manifest.policy:  # only later versions are still being written
                remove_unless_read(older)

    def note_remote_reader(self) -> None:
        (self.folder / _REMOTE_READER).touch()

    def wants_deltas(self) -> bool:
        """Return whether versions were read over the network in the last 5 minutes, so that deltas save bytes."""
        try:
            return time.time() - (self.folder / _REMOTE_READER).stat().st_mtime < _REMOTE_READER_AGE_S
        except FileNotFoundError:
            return False

    def folders(self) -> Iterator[tuple[PolicyVersion, Path]]:
        """Yield the versions that have a folder, also unfinished ones."""
        for path in list(self.folder.iterdir()):
            with contextlib.suppress(ValueError):
                yield PolicyVersion.parse(path.name), path


def store_id_of(folder: Path) -> str | None:
    """Return the name of the store in a folder, or None if there is none; raise OSError if it cannot be read."""
    try:
        return (folder / _STORE_NAME).read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_manifest(data: bytes | memoryview, version: PolicyVersion, source: str) -> Manifest:
    manifest = decode(data, Manifest, source)
    if manifest.policy != version:
        raise WeightsCorrupt(f"{source} describes version {manifest.policy}, not {version}")
    return manifest


def checked(file: TensorFile, entry: TensorEntry, into: memoryview | None = None) -> memoryview:
    """Return the verified bytes of a tensor, copied `into` if given; raise WeightsCorrupt if the bytes were changed."""
    view = file.view(entry.name)
    stored = file.tensors[entry.name]
    if (stored.code, stored.shape) != (CODES[entry.dtype], entry.shape):
        raise WeightsCorrupt(
            f"{file.path}: tensor '{entry.name}' is {stored.code}{list(stored.shape)}, "
            f"but the manifest says {CODES[entry.dtype]}{list(entry.shape)}"
        )
    found = checksum_of(view) if into is None else copy_and_hash(view, into)
    if found != entry.checksum:
        raise WeightsCorrupt(
            f"{file.path}: tensor '{entry.name}' has checksum {found}, but the manifest says "
            f"{entry.checksum}; the file was changed after it was published"
        )
    return view if into is None else into


def check_file(path: Path, entries: Iterable[TensorEntry], next_tensor: Callable[[], None] = lambda: None) -> None:
    """Verify every tensor of a file, as `checked` does; call `next_tensor` before each."""
    file = TensorFile(path)
    for entry in entries:
        next_tensor()
        checked(file, entry)


def remove_unless_read(folder: Path) -> None:
    """Remove a version's folder, unless the version is being read. An unfinished version has no readers."""
    if not (folder / MANIFEST_NAME).exists():
        discard(folder)
        return
    with contextlib.suppress(FileNotFoundError, PermissionError), (folder / READERS_LOCK).open("r+b") as lock:
        if try_lock(lock):
            # remove the manifest first, so that new readers find no version
            discard(folder / MANIFEST_NAME)
            if not (folder / MANIFEST_NAME).exists():
                discard(folder)
