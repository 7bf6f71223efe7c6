"""The folder of published versions.

    weights/
      STORE                               a random name, by which a program recognises the store
      NEWEST                              the newest committed version, in one small file
      REMOTE_READER                       touched when versions are read over the network
      PORT                                of the service, for the next one
      0.17/                               version 17 of learner incarnation 0
        part-0.bfloat16.safetensors       one file per pipeline stage and dtype
        part-0.bfloat16.delta             the same, as changes of the parent version; where that is smaller
        part-0.json                       what the files hold, with checksums
        readers.lock                      held shared while somebody reads the version
        manifest.json                     written last: without it the version does not exist

Nothing is synced: what a power cut spoils fails its checksum, and the next learner publishes anew.
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

from common.files import discard, temporary_beside, try_lock, write_whole
from common.staleness import PolicyVersion
from weight_sync.manifest import (
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
    copied,
    decode,
    encode,
    part_name,
)

_NEWEST_NAME = "NEWEST"
_STORE_NAME = "STORE"
PORT = "PORT"
KEPT_VERSIONS = 3
"""How many stay beside those being read: an actor that begins to read one is through before three more are there."""
READERS_LOCK = "readers.lock"
_REMOTE_READER = "REMOTE_READER"
_REMOTE_READER_AGE_S = 300.0

Buffers = Sequence[bytes | memoryview]


@dataclass(frozen=True)
class StagedVersion(contextlib.AbstractContextManager["StagedVersion"]):
    """A version on this machine that is kept from removal until its lock is closed."""

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
    """Reads and commits versions. Any number of readers, on any machine that mounts the folder; one committer."""

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
                os.link(named, path)  # unlike a rename it leaves the name that another process was quicker to give
            named.unlink()
        return path.read_text(encoding="ascii")

    def version_folder(self, version: PolicyVersion) -> Path:
        return self.folder / version.key

    def newest(self) -> PolicyVersion | None:
        """The newest committed version, or None before the first. One small read: cheap enough to poll."""
        try:
            text = (self.folder / _NEWEST_NAME).read_text(encoding="ascii", errors="replace")
            return PolicyVersion.parse(text.strip())
        except FileNotFoundError:
            return None
        except ValueError:
            # the pointer saves a search and is nothing more: after a power cut it may hold anything
            return next(reversed(self.committed()), None)

    def newest_manifest(self) -> Manifest | None:
        newest = self.newest()
        return None if newest is None else self.manifest(newest)

    def committed(self) -> list[PolicyVersion]:
        return sorted(version for version, folder in self._folders() if (folder / MANIFEST_NAME).exists())

    def manifest_bytes(self, version: PolicyVersion) -> bytes:
        """The manifest of a version as it was written, unchecked; WeightsGone if there is none."""
        path = self.version_folder(version) / MANIFEST_NAME
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise WeightsGone(f"version {version} is not in {self.folder}: {path.name} is missing") from error

    def manifest(self, version: PolicyVersion) -> Manifest:
        """The manifest of a version; WeightsGone if there is none, WeightsCorrupt if it was changed or is another's."""
        return read_manifest(self.manifest_bytes(version), version, str(self.version_folder(version) / MANIFEST_NAME))

    def part(self, version: PolicyVersion, rank: int) -> Part | None:
        """What a stage contributed to a version, None until it has; WeightsCorrupt if its document was changed."""
        path = self.version_folder(version) / part_name(rank)
        try:
            return decode(path.read_bytes(), Part, path)
        except FileNotFoundError:
            return None

    def tensors(
        self, manifest: Manifest, dtype: str, into: memoryview | None = None
    ) -> Iterator[tuple[TensorEntry, memoryview]]:
        """Yield the bytes of every tensor of a variant, memory-mapped and `checked`.

        With `into`, which has room for all of them, they are copied there, back to back.
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
        """Keep retention from removing a version until the returned file is closed, or its process ends.

        WeightsGone if the version does not exist, or is being removed.
        """
        folder = self.version_folder(version)
        try:
            # closed by the caller: the lock lives as long as the file is open
            lock = (folder / READERS_LOCK).open("rb")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise WeightsGone(f"version {version} is not in {self.folder}; retention may have removed it") from error
        if not try_lock(lock, shared=True):
            lock.close()
            raise WeightsGone(f"version {version} is being removed from {self.folder} by retention")
        # between open and lock retention may have come first
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

    def distrust(self, version: PolicyVersion, dtype: str) -> None:
        """The store's own files have no other source, and engines read all of them every time."""

    def close(self) -> None:
        """Nothing is open."""

    def begin(self, version: PolicyVersion) -> Path:
        """Make the folder to write a version into.

        What learners of earlier incarnations never finished is removed to make room. Other stages of this incarnation
        write at the same time.
        """
        folder = self.version_folder(version)
        if not folder.exists():
            for other, unfinished in self._folders():
                if other.incarnation < version.incarnation and not (unfinished / MANIFEST_NAME).exists():
                    discard(unfinished)
            folder.mkdir(exist_ok=True)
        return folder

    def write_part(self, part: Part, files: Mapping[str, Buffers]) -> None:
        """Write the files of a part, then its document; OSError if there is no space, or it is not writable."""
        folder = self.begin(PolicyVersion.parse(part.version))
        for name, buffers in files.items():
            write_whole(folder / name, buffers, sum(memoryview(buffer).nbytes for buffer in buffers))
        write_whole(folder / part_name(part.rank), [encode(part)])

    def refuse_old(self, version: PolicyVersion) -> None:
        newest = self.newest()
        if newest is not None and version <= newest:
            raise PublishFailed(
                f"version {version} cannot follow {newest} in {self.folder}: versions only grow. "
                "A restarted learner begins a new incarnation; an old learner that still runs must be stopped"
            )

    def commit(self, manifest: Manifest, keep_versions: int) -> None:
        """Make a version, whose parts are on disk, the newest; remove all but `keep_versions` and those being read.

        Raises:
            PublishFailed: the version is not newer than the newest.
            OSError: the disk is full; the version is not the newest, so ask again.
        """
        self.refuse_old(manifest.policy)
        folder = self.version_folder(manifest.policy)
        write_whole(folder / READERS_LOCK, [])
        write_whole(folder / MANIFEST_NAME, [encode(manifest)])
        write_whole(self.folder / _NEWEST_NAME, [f"{manifest.policy.key}\n".encode()])
        self.retain(manifest.policy, keep_versions)

    def retain(self, newest: PolicyVersion, keep_versions: int) -> None:
        """Remove all but the newest versions, those that are being read, and what is written after `newest`."""
        keep = set(self.committed()[-keep_versions:])
        for version, folder in self._folders():
            if version in keep or version >= newest:
                continue
            if (folder / MANIFEST_NAME).exists():
                remove_unless_read(folder)
            else:
                # a publish that never finished; later versions are being written, earlier ones never will be
                discard(folder)

    def note_remote_reader(self) -> None:
        (self.folder / _REMOTE_READER).touch()

    def wants_deltas(self) -> bool:
        """Did somebody read over the network in the last minutes, so that a delta would save something?"""
        try:
            return time.time() - (self.folder / _REMOTE_READER).stat().st_mtime < _REMOTE_READER_AGE_S
        except FileNotFoundError:
            return False

    def _folders(self) -> Iterator[tuple[PolicyVersion, Path]]:
        for path in list(self.folder.iterdir()):
            with contextlib.suppress(ValueError):
                yield PolicyVersion.parse(path.name), path


def store_id_of(folder: Path) -> str | None:
    """The name of the store in a folder, None where there is none; OSError if it cannot be read."""
    try:
        return (folder / _STORE_NAME).read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_manifest(data: bytes | memoryview, version: PolicyVersion, source: str) -> Manifest:
    manifest = decode(data, Manifest, source)
    if manifest.policy != version:
        raise WeightsCorrupt(f"{source}: describes version {manifest.policy}, not {version}")
    return manifest


def checked(file: TensorFile, entry: TensorEntry, into: memoryview | None = None) -> memoryview:
    """Return the bytes of a tensor as published, copied `into` if it is given; WeightsCorrupt names what is not."""
    view = file.view(entry.name)
    stored = file.tensors[entry.name]
    if (stored.code, stored.shape) != (CODES[entry.dtype], entry.shape):
        raise WeightsCorrupt(
            f"{file.path}: tensor '{entry.name}' is {stored.code}{list(stored.shape)}, "
            f"the manifest says {CODES[entry.dtype]}{list(entry.shape)}"
        )
    found = checksum_of(view) if into is None else copied(view, into)
    if found != entry.checksum:
        raise WeightsCorrupt(
            f"{file.path}: tensor '{entry.name}' has checksum {found}, the manifest says {entry.checksum}; "
            "the file was changed after it was published"
        )
    return view if into is None else into


def check_file(path: Path, entries: Iterable[TensorEntry], next_tensor: Callable[[], None] = lambda: None) -> None:
    """Check every tensor of a file, as `checked`; `next_tensor` is called before each."""
    file = TensorFile(path)
    for entry in entries:
        next_tensor()
        checked(file, entry)


def remove_unless_read(folder: Path) -> None:
    """Remove a version's folder, unless somebody reads the version or it is gone already."""
    with contextlib.suppress(FileNotFoundError, PermissionError), (folder / READERS_LOCK).open("r+b") as lock:
        if try_lock(lock):
            # first the manifest: a reader that comes from here on finds no version
            discard(folder / MANIFEST_NAME)
            if not (folder / MANIFEST_NAME).exists():
                discard(folder)
