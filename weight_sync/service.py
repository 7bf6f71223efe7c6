"""WeightService: the process that serves and receives published weights over ZeroMQ.

One thread handles one message per turn, round-robin over all clients. Requests have a bounded size, so no client waits
while another fetches a whole version. The same thread writes uploaded chunks, so a slow disk delays readers; a worker
thread verifies uploads and rebuilds whole files from deltas. All state is in the folder: the service may be killed at
any time and restarts on the same port.

ServedVersions   versions being read: memory-mapped, and protected from removal until `expires_s` after the last
                 request; at most the `MAX_SERVED` most recently requested
UploadReceiver   uploads of the stages. A file gets its final name once it is complete and verified

    0.17/.part-0.bfloat16.safetensors.26300416.upload     partial; its size is the progress, also after a restart
    0.17/part-0.bfloat16.safetensors                      complete, every tensor verified
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

from leeway.common.files import mapped, write_whole
from leeway.common.rpc.auth import ServiceKeys
from leeway.common.rpc.messages import Done, Message, Refused, Working, checksum
from leeway.common.rpc.server import CannotBind, Rejected, Request, RpcServer
from leeway.common.staleness import PolicyVersion
from leeway.weight_sync import protocol as p
from leeway.weight_sync.delta import rebuild_file
from leeway.weight_sync.manifest import (
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
from leeway.weight_sync.store import PORT, WeightStore, check_file, read_manifest

log = logging.getLogger(__name__)

MAX_SERVED = 5
_NOTE_EVERY_S = 1.0
_IDLE_S = 0.2
"""Seconds that a turn waits for a message; bounds how late `stop` is noticed."""
_JOB_POLL_S = 0.005
_MAX_JOBS = 64
_WARN_EVERY_S = 10.0

Answer = tuple[Message, bytes | memoryview]


@dataclass
class _Job:
    """Work in progress, and the client that requested it last, which gets the reply."""

    identity: bytes
    request_id: int
    future: Future[None]


class WeightService:
    """Serves the weights of one run from one folder."""

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

        `host` is the address to bind; None for a Unix socket. With `keys`, only holders of the run's client key can
        connect. A version is protected from removal until `read_expires_s` after its last request.
        """
        self._host = host
        self._clock = clock
        self._store = WeightStore(folder)
        self._store_id = self._store.store_id
        self._served = ServedVersions(self._store, expires_s=read_expires_s, clock=clock)
        self._uploads = UploadReceiver(self._store)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="weight-uploads")
        self._jobs: dict[tuple[str, int], _Job] = {}
        self._warn_at = 0.0
        # outgoing messages are views of memory maps and take no memory, so their queue may be longer
        self._rpc = RpcServer(
            p.PROTOCOL, run_id, keys=keys, max_message_bytes=p.MAX_DOCUMENT_BYTES, incoming=16, outgoing=64
        )

    def bind(self) -> str:
        """Bind, and return the address for clients. Reuses the port of the folder's previous service.

        Raises:
            TransferFailed: the address is in use or does not exist, or the port file cannot be written.
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
        """Wait for a message and reply to it; send the replies for finished jobs."""
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
            self._warn(f"dropped an invalid or damaged message: {unreadable}", peer)
        elif reply is not None:
            self._warn(f"refused a request: {reply.reason}", peer)
        if reply is not None:
            self._rpc.answer(identity, request_id, reply)

    def _warn(self, what: str, peer: str) -> None:
        now = self._clock()
        if now >= self._warn_at:
            self._warn_at = now + _WARN_EVERY_S
            log.warning("%s, from %s", what, peer)

    def _answer(self, request: Request) -> Answer | None:
        """Return the reply; None if `turn` sends it once the worker has finished."""
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
                log.info("%s connected", name)
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
        """Submit work to the worker; repeated requests for the same work join its job."""
        key = type(request.message).__name__, checksum(request.body)
        job = self._jobs.get(key)
        if job is not None:
            job.identity, job.request_id = request.identity, request.request_id
            return Working(), b""
        if len(self._jobs) >= _MAX_JOBS:
            return Working(), b""  # the client resends the request
        # copy the body, because the message is freed after this turn
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
    requested_at: float
    sent_bytes: int = 0
    maps: dict[str, memoryview] = field(default_factory=dict)


class ServedVersions:
    """Versions that clients are reading over the network."""

    def __init__(self, store: WeightStore, *, expires_s: float, clock: Callable[[], float]) -> None:
        self._store = store
        self._expires_s = expires_s
        self._clock = clock
        self._served: dict[PolicyVersion, _Served] = {}
        self._note_at = self._expire_at = clock()

    def document(self, version: PolicyVersion) -> bytes:
        """Return the manifest of a version, as written, and protect it from removal; raise the errors of `read`."""
        return self._of(version).document

    def read(self, version: PolicyVersion, file: str, offset: int, size: int) -> tuple[memoryview, int]:
        """Return bytes of a file without copying, and the size of the file.

        Raises:
            WeightsGone: the version is not in the store.
            WeightsCorrupt: its manifest was changed or does not name the file, or the file is truncated.
            ValueError: the range exceeds the file.
        """
        served = self._of(version)
        total = served.manifest.size_of(file)
        if offset + size > total:
            raise ValueError(f"version {version}: {file} has {total} bytes, but {offset + size} were requested")
        if file not in served.maps:
            served.maps[file] = self._map(version, file, total)
        served.sent_bytes += size
        return served.maps[file][offset : offset + size], total

    def note_reader(self) -> None:
        """Record that versions are read over the network, so that the learner writes deltas."""
        now = self._clock()
        if now >= self._note_at:
            self._note_at = now + _NOTE_EVERY_S
            try:
                self._store.note_remote_reader()
            except OSError as error:  # harmless: without the record, the learner only sends more bytes
                log.warning("%s: cannot record that versions are read remotely: %s", self._store.folder, error)

    def expire(self) -> None:
        """Release versions that are no longer read, to allow their removal. Cheap enough to call at every message."""
        now = self._clock()
        if now < self._expire_at:
            return
        self._expire_at = now + min(1.0, self._expires_s)
        newest_first = sorted(self._served, key=lambda version: self._served[version].requested_at, reverse=True)
        for rank, version in enumerate(newest_first):
            if rank >= MAX_SERVED or now - self._served[version].requested_at >= self._expires_s:
                self._release(version)

    def close(self) -> None:
        for version in list(self._served):
            self._release(version)

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
        served.requested_at = now
        return served

    def _map(self, version: PolicyVersion, file: str, total: int) -> memoryview:
        path = self._store.version_folder(version) / file
        try:
            data = mapped(path)
        except OSError as error:
            raise WeightsCorrupt(f"cannot read {path}: {error}") from error
        if len(data) != total:
            raise WeightsCorrupt(f"{path} has {len(data)} bytes, but the manifest says {total}: the file was changed")
        return data

    def _release(self, version: PolicyVersion) -> None:
        served = self._served.pop(version)
        log.info("version %s: sent %.1f MiB of %d files", version, served.sent_bytes / 2**20, len(served.maps))
        # the maps are freed with the last message in flight
        served.lock.close()


class UploadReceiver:
    """Receives the parts of versions. All state of the receiver is in the folder."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    def status(self, version: PolicyVersion, file: str, total_bytes: int) -> int:
        whole, partial = self._paths(version, file, total_bytes)
        if (size := _size(partial)) is not None:
            return min(size, total_bytes)
        return total_bytes if _size(whole) == total_bytes else 0

    def write(self, version: PolicyVersion, file: str, offset: int, total_bytes: int, data: memoryview) -> int:
        """Append data that continue the stored bytes, ignore other data, and return the new `status`."""
        if offset + len(data) > total_bytes:
            raise ValueError(f"{file}: bytes up to {offset + len(data)} exceed its size of {total_bytes}")
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
        """Verify a part whose files are uploaded, rebuild whole files from deltas, and write its document.

        Raises:
            WholeFilesNeeded: its deltas cannot be applied.
            WeightsCorrupt: the document or a file differs from that of the stage; upload the file again.
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
        """Commit a version whose files are all uploaded. Idempotent.

        Raises:
            WeightsCorrupt: the manifest was changed in transit, or a file that it names is missing.
            PublishFailed: the version is not newer than the newest.
            OSError: the disk is full; nothing has changed.
        """
        manifest = decode(document, Manifest, "an uploaded manifest")
        if self._is_committed(manifest):
            return
        folder = self._store.version_folder(manifest.policy)
        for file in manifest.files:
            if _size(folder / file.name) != file.size_bytes:
                raise WeightsCorrupt(f"cannot commit version {manifest.policy}: {folder / file.name} is missing")
        self._store.commit(manifest, keep_versions)

    def _is_committed(self, manifest: Manifest) -> bool:
        """Return whether this content is already the newest version, because an earlier reply was lost."""
        if self._store.newest() != manifest.policy:
            return False
        existing = self._store.manifest(manifest.policy)
        # a retry may name the version itself as its parent, so compare only the tensors
        return chain_of("", existing.tensors) == chain_of("", manifest.tensors)

    def _name(self, version: PolicyVersion, name: str, size: int, entries: list[TensorEntry] | None = None) -> bool:
        """Verify a complete upload and give it its final name; return False if it is not complete."""
        whole, partial = self._paths(version, name, size)
        found = partial if _size(partial) == size else whole
        if _size(found) != size:
            if size == 0 and entries is None:
                write_whole(whole, [])  # an empty file has no chunks, so it was never uploaded
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
            raise p.WholeFilesNeeded(f"neither {folder / name} nor a delta for it was uploaded")
        parent = p.version_of(part.parent)
        try:
            with self._store.lock_for_reading(parent):
                rebuild_file(
                    entries, folder / delta_name(name), self._store.version_folder(parent) / name, folder / name
                )
        except (WeightsGone, WeightsCorrupt, FileNotFoundError) as error:
            raise p.WholeFilesNeeded(f"cannot rebuild {folder / name} from its delta: {error}") from error
        if _size(folder / name) != size:
            (folder / name).unlink(missing_ok=True)
            raise p.WholeFilesNeeded(f"{folder / name}: the size of the rebuilt file differs from the stage's file")

    def _paths(self, version: PolicyVersion, file: str, total_bytes: int) -> tuple[Path, Path]:
        folder = self._store.version_folder(version)
        return folder / p.upload_name(file), folder / f".{file}.{total_bytes}.upload"


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None
