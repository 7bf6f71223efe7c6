"""WeightClient: asks the weight service for versions, and hands it parts. Blocks; every wait is bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from common.curve import ClientKeys
from common.staleness import PolicyVersion
from weight_sync import protocol as p
from weight_sync.errors import TransferFailed, WeightsCorrupt
from weight_sync.link import SILENCE_S, Answer, Ask, Link
from weight_sync.manifest import Manifest
from weight_sync.store import read_manifest

_WINDOW = 4
"""Chunks on their way at once: enough to hide the way there and back, few enough to lose little."""


Kind = TypeVar("Kind", bound=p.Message)


class WeightClient:
    """Talks to the weight service of a run. For any thread, one at a time."""

    def __init__(
        self,
        address: str,
        run_id: str,
        name: str,
        *,
        timeout_s: float = 30.0,
        chunk_bytes: int = 2**20,
        window: int = _WINDOW,
        silence_s: float = SILENCE_S,
        keys: ClientKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connects with the first question.

        Args:
            address: of the service, tcp://HOST:PORT.
            run_id: of the run.
            name: of the caller, for the service's log and for errors.
            timeout_s: fail when the service was silent for so long.
            chunk_bytes: size of a message of weights, at most 64 MiB.
            window: chunks on their way at once.
            silence_s: connect anew when the service was silent for so long.
            keys: of the run's clients; None where the service takes everybody.
            clock: monotonic, in seconds.
        """
        self.address = address
        self.name = name
        self._chunk_bytes = min(chunk_bytes, p.MAX_CHUNK_BYTES)
        self._window = window
        self._lock = threading.Lock()
        self._link = Link(address, run_id, timeout_s, keys=keys, silence_s=silence_s, clock=clock)

    def hello(self) -> p.Welcome:
        """Who serves there?

        Raises:
            TransferFailed: nobody answers, or another run's service, or one of another release.
        """
        with self._lock:
            return _expect(self._link.ask(p.Hello(self.name)), p.Welcome)

    def newest(self) -> PolicyVersion | None:
        """The newest committed version, or None before the first.

        Raises:
            TransferFailed: the service does not answer.
        """
        with self._lock:
            text = _expect(self._link.ask(p.NewestRequest()), p.Newest).version
        return p.version_of(text) if text else None

    def manifest(self, version: PolicyVersion) -> tuple[Manifest, bytes]:
        """The manifest of a version, checked, and as it was written. The service keeps the version from now on.

        Raises:
            WeightsGone: the version does not exist, or no longer.
            WeightsCorrupt: what the service gave is another version's, or was changed.
            TransferFailed: the service does not answer.
        """
        with self._lock:
            document = bytes(self._document(p.ManifestRequest(str(version))))
        return read_manifest(document, version, f"the manifest from {self.address}"), document

    def newest_document(self) -> bytes:
        """The manifest of the newest version, unchecked; empty before the first."""
        with self._lock:
            return bytes(self._document(p.ManifestRequest("")))

    def read(
        self,
        version: PolicyVersion,
        file: str,
        total_bytes: int,
        start: int,
        write: Callable[[memoryview], None],
    ) -> None:
        """Fetch a file from `start` to its end.

        Args:
            version: which holds it.
            file: one that its manifest names.
            total_bytes: its size, by the manifest.
            start: how many bytes are there already.
            write: called with what follows, in order; each piece has passed its checksum.

        Raises:
            WeightsGone: the version was removed meanwhile.
            WeightsCorrupt: the service's file is not that of the manifest, or a piece came damaged again and again.
            TransferFailed: the service fell silent.
        """
        asks = (
            Ask(p.ReadRequest(str(version), file, offset, min(self._chunk_bytes, total_bytes - offset)))
            for offset in range(start, total_bytes, self._chunk_bytes)
        )
        with self._lock:
            for answer in self._link.stream(asks, window=self._window):
                chunk, asked = _expect(answer, p.Chunk), answer.ask.message
                if chunk.total_bytes != total_bytes or len(answer.body) != getattr(asked, "size", None):
                    raise WeightsCorrupt(
                        f"{self.address}: {asked} was answered with {len(answer.body)} bytes of {chunk.total_bytes}; "
                        f"the manifest says {total_bytes}"
                    )
                write(answer.body)

    def write(self, version: PolicyVersion, file: str, buffers: Sequence[bytes | memoryview]) -> int:
        """Upload a file, from where an earlier upload of it ended.

        Returns:
            How many bytes were sent.

        Raises:
            PublishFailed: the version is older than the newest.
            OSError: the service's disk is full or not writable.
            TransferFailed: the service fell silent.
        """
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        total = sum(len(view) for view in views)
        with self._lock:
            status = _expect(self._link.ask(p.WriteStatusRequest(str(version), file, total)), p.WriteStatus)
            have, num_sent, window = status.num_bytes, 0, self._window
            while have < total:
                began_at = have
                for answer in self._link.stream(self._pieces(version, file, views, have, total), window=window):
                    num_sent += len(answer.ask.body)
                    have = _expect(answer, p.WriteStatus).num_bytes
                    if have < getattr(answer.ask.message, "offset", 0) + len(answer.ask.body):
                        break  # the service takes nothing behind a gap: one was overtaken, or it has lost some
                if have <= began_at and window == 1:
                    raise TransferFailed(
                        f"the weight service at {self.address} has {have} of {total} bytes of {file} of version "
                        f"{version} and takes no more"
                    )
                window = 1
        return num_sent

    def part_done(self, document: bytes) -> None:
        """All files of a part are uploaded.

        Raises:
            WholeFilesNeeded: the deltas do not serve.
            WeightsCorrupt: a file did not come as it was sent; it has to be sent again.
            PublishFailed, OSError, TransferFailed: as `write`.
        """
        with self._lock:
            _expect(self._link.ask(p.PartDone(), document), p.Done)

    def part_document(self, version: PolicyVersion, rank: int) -> bytes:
        """What a stage contributed, unchecked; empty until it has."""
        with self._lock:
            return bytes(self._document(p.PartRequest(str(version), rank)))

    def commit(self, document: bytes, keep_versions: int) -> None:
        """Make a version exist.

        Raises:
            PublishFailed: it is not newer than the newest.
            WeightsCorrupt, OSError, TransferFailed: as `part_done`.
        """
        with self._lock:
            _expect(self._link.ask(p.CommitRequest(keep_versions), document), p.Done)

    def close(self) -> None:
        """Let go of the connection. May be called twice."""
        with self._lock:
            self._link.close()

    def _document(self, message: p.ManifestRequest | p.PartRequest) -> memoryview:
        answer = self._link.ask(message)
        _expect(answer, p.Document)
        return answer.body

    def _pieces(
        self, version: PolicyVersion, file: str, views: Sequence[memoryview], start: int, total: int
    ) -> Iterator[Ask]:
        for offset in range(start, total, self._chunk_bytes):
            size = min(self._chunk_bytes, total - offset)
            yield Ask(p.WriteRequest(str(version), file, offset, total), _slice(views, offset, size))


def _slice(views: Sequence[memoryview], offset: int, size: int) -> bytes | memoryview:
    """Bytes of buffers that follow one another; copied only where they lie in several."""
    found: list[memoryview] = []
    for view in views:
        if offset < len(view):
            found.append(view[offset : offset + size])
            size -= len(found[-1])
        if size == 0:
            break
        offset = max(0, offset - len(view))
    return found[0] if len(found) == 1 else b"".join(found)


def _expect(answer: Answer, kind: type[Kind]) -> Kind:
    if not isinstance(answer.reply, kind):
        raise WeightsCorrupt(f"the weight service answered {answer.ask.message} with {answer.reply}")
    return answer.reply
