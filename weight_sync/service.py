"""WeightService: the one process that hands published weights out, and takes them in, over ZeroMQ.

One thread, one loop, one message a turn: the socket takes them from all clients in turn, and a request is bounded, so
no client waits for another's whole version. Files are sent from a memory map. The pieces of an upload are written to
disk on this one thread too, so a slow disk delays readers while somebody uploads. What takes long, checking an upload
or making it whole, is done by a worker thread. All that the service knows lies in the folder: it may be killed at any
moment and started again, on the same port.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from common.curve import LOOPBACK, Doorkeeper, ServiceKeys
from common.files import write_whole
from common.wire import MAX_FRAMES, CannotBind, bind, limit, port_in, receive_frames, send_frames
from weight_sync import protocol as p
from weight_sync.config import WeightSyncConfig
from weight_sync.errors import PublishFailed, TransferFailed, WeightsCorrupt, WeightsError, WeightsGone
from weight_sync.intake import Intake
from weight_sync.served import ServedVersions
from weight_sync.store import WeightStore

log = logging.getLogger(__name__)

_PORT_NAME = "PORT"
_IDLE_S = 0.2
"""How long a turn may wait for a message, which bounds how late `stop` is noticed."""
_JOB_POLL_S = 0.005
_MAX_JOBS = 64
_COMPLAIN_EVERY_S = 10.0

Answer = tuple[p.Reply, bytes | memoryview]


@dataclass
class _Job:
    """Work whose answer is still to come, and who asked for it last."""

    identity: bytes
    request_id: int
    future: Future[None]


class WeightService:
    """Serves one run's weights from one folder."""

    def __init__(
        self,
        config: WeightSyncConfig,
        run_id: str,
        folder: Path,
        *,
        keys: ServiceKeys | None = None,
        read_expires_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the store.

        Args:
            config: of the run.
            run_id: clients of another run are refused.
            folder: of the weight store; created if missing.
            keys: only the holders of the run's client key are let in; None: everybody who reaches the socket.
            read_expires_s: retention gets a version so long after the last request of a reader that has not got
                through; `served` says how many versions readers keep.
            clock: monotonic, in seconds.

        Raises:
            OSError: the folder cannot be made or written.
        """
        self._config = config
        self._run_id = run_id
        self._clock = clock
        self._store = WeightStore(folder)
        self._store_id = self._store.store_id
        self._served = ServedVersions(
            self._store, keep_versions=config.keep_versions, expires_s=read_expires_s, clock=clock
        )
        self._intake = Intake(self._store)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="weight-intake")
        self._jobs: dict[tuple[str, int], _Job] = {}
        self._requests: Counter[str] = Counter()
        self._complain_at = 0.0
        self._keys = keys
        self._door: Doorkeeper | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)

    def bind(self) -> str:
        """Bind, and return the address for clients. With port 0, the port of the last service of this folder is kept.

        Raises:
            TransferFailed: the address is in use or does not exist.
            OSError: the port cannot be written down.
        """
        # messages that go out lie in a memory map
        limit(self._socket, p.MAX_DOCUMENT_BYTES, incoming=16, outgoing=64)
        if self._keys is not None:
            self._door = Doorkeeper(self._socket, self._keys, "the weight service")
        remembered = self._store.folder / _PORT_NAME
        try:
            address, port = bind(self._socket, self._config.host or LOOPBACK, self._config.port, remembered)
        except CannotBind as error:
            raise TransferFailed(
                f"the weight service {error}. Set [weight_sync] host and port to a free address of this machine; the "
                f"port of the last run is kept in {remembered}"
            ) from error
        if port_in(remembered) != port:
            write_whole(remembered, [str(port).encode()])
        return address

    def serve(self, stop: threading.Event) -> None:
        """Answer until `stop` is set."""
        try:
            while not stop.is_set():
                self.turn()
        finally:
            self.close()

    def turn(self) -> None:
        """Wait for a message, and answer it; send what the worker has done."""
        if self._socket.poll(int(1000 * (_JOB_POLL_S if self._jobs else _IDLE_S))):
            self._take(receive_frames(self._socket))
        for key, job in list(self._jobs.items()):
            if job.future.done():
                del self._jobs[key]
                self._send(job.identity, job.request_id, _refusal_or_done(job.future.exception()))
        self._served.expire()

    def stats(self) -> dict[str, dict[str, int] | dict[str, dict[str, int]]]:
        """What was asked so far.

        Returns:
            "requests": name of a request -> how many; 'Damaged' ones are none of ours. "read_bytes": version -> file
            -> bytes sent, of the versions that were read last.
        """
        return {"requests": dict(self._requests), "read_bytes": self._served.read_bytes()}

    def close(self) -> None:
        """Give the address and the folder back. May be called twice."""
        if not self._socket.closed:
            self._worker.shutdown(wait=True, cancel_futures=True)
            self._served.close()
            self._socket.close()
            if self._door is not None:
                self._door.close()
            self._context.term()

    def _take(self, frames: list[memoryview]) -> None:
        identity = bytes(frames[0])
        try:
            if not 2 <= len(frames) <= MAX_FRAMES:
                raise msgspec.DecodeError(f"a message of {len(frames) - 1} frames")  # noqa: TRY301 -- one place counts
            envelope = p.decode(frames[1])
        except msgspec.DecodeError as error:
            self._requests["Damaged"] += 1
            now = self._clock()
            if now >= self._complain_at:
                self._complain_at = now + _COMPLAIN_EVERY_S
                log.warning("dropped a message that is none of ours, or was damaged on its way: %s", error)
            return
        body = frames[2] if len(frames) > 2 else memoryview(b"")
        self._requests[type(envelope.message).__name__] += 1
        answer = self._answer(identity, envelope, body)
        if answer is not None:
            self._send(identity, envelope.request_id, answer)

    def _answer(self, identity: bytes, envelope: p.Envelope, body: memoryview) -> Answer | None:
        """The answer, or None where the worker will give it."""
        if envelope.run_id != self._run_id:
            return _refused("failed", f"this is the weight service of run '{self._run_id}', not of '{envelope.run_id}'")
        if envelope.body_checksum != p.checksum(body):
            return _refused("damaged", f"a body of {len(body)} bytes does not match its checksum")
        message = envelope.message
        try:
            match message:
                case p.PartDone():
                    return self._start(identity, envelope, bytes(body), self._intake.finish_part)
                case p.CommitRequest(keep_versions=keep):
                    return self._start(identity, envelope, bytes(body), lambda data: self._intake.commit(data, keep))
                case p.WriteStatusRequest() | p.WriteRequest() | p.PartRequest():
                    return self._take_in(message, body)
                case p.Hello() | p.NewestRequest() | p.ManifestRequest() | p.ReadRequest():
                    return self._hand_out(identity, message)
                case _:
                    return _refused("failed", f"{type(message).__name__} is no request")
        except (WeightsError, OSError, ValueError) as error:
            return _refusal_or_done(error)

    def _hand_out(
        self, identity: bytes, message: p.Hello | p.NewestRequest | p.ManifestRequest | p.ReadRequest
    ) -> Answer:
        match message:
            case p.Hello(name=name, protocol_version=theirs):
                log.info("%s says hello", name)
                if theirs != p.PROTOCOL_VERSION:
                    return _refused(
                        "failed",
                        f"{name} speaks version {theirs} of the weight protocol, this service {p.PROTOCOL_VERSION}; "
                        "run learner and actors from the same release",
                    )
                return p.Welcome(self._store_id, str(self._store.folder)), b""
            case p.NewestRequest():
                self._served.note_reader()
                newest = self._store.newest()
                return p.Newest("" if newest is None else str(newest)), b""
            case p.ManifestRequest(version=""):
                newest = self._store.newest()
                return p.Document(), b"" if newest is None else self._store.manifest_bytes(newest)
            case p.ManifestRequest(version=version):
                return p.Document(), self._served.document(p.version_of(version), identity)
            case p.ReadRequest(version, file, offset, size):
                data, total = self._served.read(p.version_of(version), file, offset, size, identity)
                self._served.note_reader()
                return p.Chunk(total), data

    def _take_in(self, message: p.WriteStatusRequest | p.WriteRequest | p.PartRequest, body: memoryview) -> Answer:
        version = p.version_of(message.version)
        match message:
            case p.WriteStatusRequest(_, file, total):
                return p.WriteStatus(self._intake.status(version, file, total)), b""
            case p.WriteRequest(_, file, offset, total):
                return p.WriteStatus(self._intake.write(version, file, offset, total, body)), b""
            case p.PartRequest(_, rank):
                return p.Document(), self._intake.part(version, rank)

    def _start(
        self, identity: bytes, envelope: p.Envelope, body: bytes, work: Callable[[memoryview], None]
    ) -> Answer | None:
        """Have the worker do it, once however often it is asked."""
        key = type(envelope.message).__name__, envelope.body_checksum
        job = self._jobs.get(key)
        if job is not None:
            job.identity, job.request_id = identity, envelope.request_id
            return p.Working(), b""
        if len(self._jobs) >= _MAX_JOBS:
            return p.Working(), b""  # it will ask again
        self._jobs[key] = _Job(identity, envelope.request_id, self._worker.submit(work, memoryview(body)))
        return None

    def _send(self, identity: bytes, request_id: int, answer: Answer) -> None:
        reply, body = answer
        header = p.encode(p.Envelope(request_id, self._run_id, reply, p.checksum(body)))
        failure = send_frames(self._socket, identity, header, body)
        if failure is not None:
            log.info("an answer (%s) could not be delivered: %s", type(reply).__name__, failure)


def _refused(kind: p.Kind, reason: str, number: int = 0) -> Answer:
    return p.Refused(reason[:4000], kind, number), b""


def _refusal_or_done(error: BaseException | None) -> Answer:
    match error:
        case None:
            return p.Done(), b""
        case WeightsGone():
            return _refused("gone", str(error))
        case WeightsCorrupt():
            return _refused("corrupt", str(error))
        case p.WholeFilesNeeded():
            return _refused("whole", str(error))
        case PublishFailed():
            return _refused("publish", str(error))
        case OSError():
            return _refused("disk", str(error), error.errno or errno.EIO)
        case WeightsError() | ValueError():
            return _refused("failed", str(error))
        case _:
            log.warning("a request failed: %s", error, exc_info=error)
            return _refused("failed", f"{type(error).__name__}: {error}")
