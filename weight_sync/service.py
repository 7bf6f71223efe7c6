"""WeightService: the one process that hands published weights out, and takes them in, over ZeroMQ.

One thread answers one message a turn, from all clients in turn, and requests are bounded, so no client waits for
another's whole version. It also writes the pieces of uploads, so a slow disk delays readers meanwhile; a worker thread
checks uploads and makes them whole. All state lies in the folder: the service may be killed at any time, and starts
again on the same port.

ServedVersions   what is read: memory-mapped, and kept from removal until `expires_s` after the last request, but no
                 more than the `MAX_SERVED` that were requested last
UploadReceiver   what stages upload. A file gets its name once it is complete and checked; deltas are made whole

    0.17/.part-0.bfloat16.safetensors.26300416.upload     so far; its size says how far, after a restart too
    0.17/part-0.bfloat16.safetensors                      complete, every tensor checked
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from common.files import mapped, write_whole
from common.rpc.auth import ServiceKeys
from common.rpc.messages import Done, Message, Refused, Working, checksum
from common.rpc.server import CannotBind, Rejected, Request, RpcServer
from common.staleness import PolicyVersion
from weight_sync import protocol as p
from weight_sync.delta import rebuild_file
from weight_sync.manifest import (
    Manifest,
    Part,
    TensorEntry,
    TransferFailed,
    WeightsCorrupt,
    WeightsError,
    WeightsGone,
    by_file,
    chain_of,
    decode,
    delta_name,
    part_name,
)
from weight_sync.store import PORT, WeightStore, check_file, read_manifest

log = logging.getLogger(__name__)

MAX_SERVED = 5
_NOTE_EVERY_S = 1.0
_IDLE_S = 0.2
"""How long a turn may wait for a message, which bounds how late `stop` is noticed."""
_JOB_POLL_S = 0.005
_MAX_JOBS = 64
_COMPLAIN_EVERY_S = 10.0

Answer = tuple[Message, bytes | memoryview]


@dataclass
class _Job:
    """Work whose answer is still to come, and which client asked for it last."""

    identity: bytes
    request_id: int
    future: Future[None]


class WeightService:
    """Serves one run's weights from one folder."""

    def __init__(
        self,
        run_id: str,
        folder: Path,
        *,
        host: str | None = None,
        keys: ServiceKeys | None = None,
        read_expires_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the store in a folder, which is created if missing.

        `host`: the address to bind; None: a Unix socket.
        With keys, only holders of the run's client key connect. Retention gets a version `read_expires_s` after its
        last request.
        """
        self._host = host
        self._clock = clock
        self._store = WeightStore(folder)
        self._store_id = self._store.store_id
        self._served = ServedVersions(self._store, expires_s=read_expires_s, clock=clock)
        self._uploads = UploadReceiver(self._store)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="weight-uploads")
        self._jobs: dict[tuple[str, int], _Job] = {}
        self._complain_at = 0.0
        # messages that go out lie in a memory map
        self._rpc = RpcServer(
            p.PROTOCOL, run_id, keys=keys, max_message_bytes=p.MAX_DOCUMENT_BYTES, incoming=16, outgoing=64
        )

    def bind(self) -> str:
        """Bind, and return the address for clients. The port of the last service of this folder is kept.

        Raises:
            TransferFailed: the address is in use or does not exist, or the port cannot be written down.
        """
        try:
            return self._rpc.bind(self._host, self._store.folder / PORT)
        except CannotBind as error:
            raise TransferFailed(str(error)) from error

    def serve(self, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                self.turn()
        finally:
            self.close()

    def turn(self) -> None:
        """Wait for a message, and answer it; send what the worker has done."""
        if self._rpc.poll(_JOB_POLL_S if self._jobs else _IDLE_S) and (frames := self._rpc.receive()) is not None:
            self._take(self._rpc.open(frames))
        for key, job in list(self._jobs.items()):
            if job.future.done():
                del self._jobs[key]
                self._rpc.answer(job.identity, job.request_id, *_outcome(job.future.exception()))
        self._served.expire()

    def close(self) -> None:
        if not self._rpc.is_closed:
            self._worker.shutdown(wait=True, cancel_futures=True)
            self._served.close()
            self._rpc.close()

    def _take(self, arrival: Request | Rejected) -> None:
        if isinstance(arrival, Request):
            answer = self._answer(arrival)
            if answer is not None:
                self._rpc.answer(arrival.identity, arrival.request_id, *answer)
            return
        identity, request_id, reply, peer, unreadable = arrival
        if unreadable:
            self._complain(f"dropped a message that is none of ours, or was damaged on its way: {unreadable}", peer)
        elif reply is not None:
            self._complain(f"refused: {reply.reason}", peer)
        if reply is not None:
            self._rpc.answer(identity, request_id, reply)

    def _complain(self, what: str, peer: str) -> None:
        now = self._clock()
        if now >= self._complain_at:
            self._complain_at = now + _COMPLAIN_EVERY_S
            log.warning("%s, from %s", what, peer)

    def _answer(self, request: Request) -> Answer | None:
        """Return the answer; None: the worker will give it."""
        try:
            match request.message:
                case p.PartDone():
                    return self._start(request, self._uploads.finish_part)
                case p.CommitRequest(keep_versions=keep):
                    return self._start(request, lambda data: self._uploads.commit(data, keep))
                case message:
                    return self._answer_now(message, request.body)
        except (WeightsError, OSError, ValueError) as error:
            return p.refusal_of(error), b""

    def _answer_now(self, message: p.Question, body: memoryview) -> Answer:
        match message:
            case p.StoreRequest(name=name):
                log.info("%s says hello", name)
                return p.StoreFacts(self._store_id, str(self._store.folder)), b""
            case p.NewestRequest():
                self._served.note_reader()
                newest = self._store.newest()
                return p.Newest("" if newest is None else newest.key), b""
            case p.ManifestRequest(version=""):
                newest = self._store.newest()
                return p.Document(), b"" if newest is None else self._store.manifest_bytes(newest)
            case p.ManifestRequest(version):
                return p.Document(), self._served.document(p.version_of(version))
            case p.ReadRequest(version, file, offset, size):
                data, total = self._served.read(p.version_of(version), file, offset, size)
                self._served.note_reader()
                return p.Chunk(total), data
            case p.WriteRequest(version, file, offset, total):
                return p.WriteStatus(self._uploads.write(p.version_of(version), file, offset, total, body)), b""
            case p.PartRequest(version, rank):
                return p.Document(), self._uploads.part(p.version_of(version), rank)

    def _start(self, request: Request, work: Callable[[memoryview], None]) -> Answer | None:
        """Have the worker do it, once, however often it is asked."""
        key = type(request.message).__name__, checksum(request.body)
        job = self._jobs.get(key)
        if job is not None:
            job.identity, job.request_id = request.identity, request.request_id
            return Working(), b""
        if len(self._jobs) >= _MAX_JOBS:
            return Working(), b""  # it will ask again
        # a copy, for the message is given back with this turn
        future = self._worker.submit(work, memoryview(bytes(request.body)))
        self._jobs[key] = _Job(request.identity, request.request_id, future)
        return None


def _outcome(error: BaseException | None) -> Answer:
    if error is None:
        return Done(), b""
    if isinstance(error, (WeightsError, OSError, ValueError)):
        return p.refusal_of(error), b""
    log.warning("a request failed: %s", error, exc_info=error)
    return Refused(f"{type(error).__name__}: {error}"[: p.MAX_REASON]), b""


# --- the store ------------------------------------------------------------------------------------


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

    def __init__(self, store: WeightStore, *, expires_s: float, clock: Callable[[], float]) -> None:
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
        version = p.version_of(part.version)
        for entry in part.files:
            p.upload_name(entry.name)
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
            raise p.WholeFilesNeeded(f"{folder / name} has not come whole, and no delta has")
        parent = p.version_of(part.parent)
        try:
            with self._store.lock_for_reading(parent):
                rebuild_file(
                    entries, folder / delta_name(name), self._store.version_folder(parent) / name, folder / name
                )
        except (WeightsGone, WeightsCorrupt, FileNotFoundError) as error:
            raise p.WholeFilesNeeded(f"{folder / name} cannot be made from its delta: {error}") from error
        if _size(folder / name) != size:
            (folder / name).unlink(missing_ok=True)
            raise p.WholeFilesNeeded(f"{folder / name}: what its delta makes has another size than the stage's file")

    def _paths(self, version: PolicyVersion, file: str, total_bytes: int) -> tuple[Path, Path]:
        folder = self._store.version_folder(version)
        return folder / p.upload_name(file), folder / f".{file}.{total_bytes}.upload"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None
