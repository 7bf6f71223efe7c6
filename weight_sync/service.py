"""WeightService: the one process that hands published weights out, and takes them in, over ZeroMQ.

One thread answers one message a turn, from all clients in turn, and requests are bounded, so no client waits for
another's whole version. It also writes the pieces of uploads, so a slow disk delays readers meanwhile; a worker thread
checks uploads and makes them whole. All state lies in the folder: the service may be killed at any time, and starts
again on the same port.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from common.rpc.auth import ServiceKeys
from common.rpc.messages import Done, Message, Refused, Working, checksum
from common.rpc.server import CannotBind, Malformed, Request, RpcServer, Unserved
from weight_sync import protocol as p
from weight_sync.manifest import TransferFailed, WeightsError
from weight_sync.service_store import ServedVersions, UploadReceiver
from weight_sync.store import PORT, WeightStore

log = logging.getLogger(__name__)

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

    def _take(self, arrival: Request | Malformed | Unserved) -> None:
        match arrival:
            case Request():
                answer = self._answer(arrival)
                if answer is not None:
                    self._rpc.answer(arrival.identity, arrival.request_id, *answer)
            case Malformed(identity, request_id, reason, reply, peer):
                self._complain(f"dropped a message that is none of ours, or was damaged on its way: {reason}", peer)
                if reply is not None:
                    self._rpc.answer(identity, request_id, reply)
            case Unserved(identity, request_id, reply, peer):
                self._complain(f"refused: {reply.reason}", peer)
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
