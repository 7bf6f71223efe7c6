"""The learner's side of weight transfer: one publisher per pipeline stage, all writing to one sink.

    stage 0      part-0.DTYPE.safetensors, part-0.json
    stage 1      part-1.DTYPE.safetensors, part-1.json
    last stage   writes its own part, waits for all part-*.json, then commits

`publish` blocks only for the copy to host memory; a background thread does the rest. One version is written while the
next is copied; for a third version, `publish` blocks until the first is written. If the disk is full or the weight
service is unavailable, the thread retries for `timeout_s`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from torch import Tensor

from leeway.common.files import FULL
from leeway.common.staleness import PolicyVersion
from leeway.weight_sync.client import WeightClient
from leeway.weight_sync.delta import encode_delta
from leeway.weight_sync.manifest import (
    ITEM_BYTES,
    DeltaEntry,
    Encoding,
    FileEntry,
    Manifest,
    Part,
    PublishFailed,
    TensorEntry,
    TransferFailed,
    WeightsCorrupt,
    WeightsGone,
    build_manifest,
    checksum_of,
    delta_name,
    file_name,
)
from leeway.weight_sync.store import Buffers, WeightStore
from leeway.weight_sync.tensors import DTYPES, HostCopy, TensorSlot

DELTA_BELOW = 0.8
"""Maximum size of the deltas of a file, as a fraction of the size of its tensors; larger deltas are not written."""
_TRY_AGAIN_EVERY = 10
"""Number of versions after which tensors without a smaller delta are encoded again, as updates may become smaller."""
NUM_COPIES = 2
"""Number of host copies of a stage's weights: one is written while another is filled. Deltas need a third copy."""
_RETRIED = FULL | {errno.EIO, errno.EROFS, errno.EACCES}
FULL_EVERY = 50
"""Every n-th version has no deltas, which bounds how long an undetected error persists. A full version
takes as many bytes as about fifty deltas."""
_POLL_S = 0.005
_LONGEST_POLL_S = 0.05
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0
_REPORT_AFTER_S = 1.0
"""Seconds after which the last stage reports that it waits for the part of another stage."""
_WARN_EVERY_S = 60.0

_log = logging.getLogger(__name__)

Sink = WeightStore | WeightClient
"""Destination of parts: the store's folder or the service. Every call returns in bounded time."""
OnCommitted = Callable[[PolicyVersion], None]
Result = TypeVar("Result")


class Publisher:
    """Publishes the tensors of one stage; on the last stage also commits the version."""

    def __init__(
        self,
        sink: Sink,
        rank: int,
        num_stages: int,
        dtypes: Sequence[str],
        *,
        keep_versions: int,
        full_every: int = FULL_EVERY,
        timeout_s: float = 600.0,
        parts_timeout_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the writer thread of stage `rank`. The publisher owns the sink and closes it.

        Every `full_every`-th version has no deltas; 1 disables deltas. `timeout_s` bounds the writing of a version,
        `parts_timeout_s` the wait for the part of another stage.

        Raises:
            ValueError: `rank` is not a stage, or a dtype is unsupported.
        """
        if not 0 <= rank < num_stages:
            raise ValueError(f"rank = {rank} is not one of the {num_stages} pipeline stages 0..{num_stages - 1}")
        if not dtypes or not set(dtypes) <= DTYPES.keys():
            raise ValueError(f"weights cannot be published in {list(dtypes)}; supported dtypes: {', '.join(DTYPES)}")
        self._sink = sink
        self._rank = rank
        self._num_stages = num_stages
        self._dtypes = tuple(dict.fromkeys(dtypes))
        self._keep_versions = keep_versions
        self._full_every = full_every
        self._timeout_s = timeout_s
        self._parts_timeout_s = parts_timeout_s
        self._clock = clock
        self._changed = threading.Condition()
        # fields guarded by the condition
        self._jobs: deque[tuple[PolicyVersion, HostCopy, OnCommitted | None]] = deque()
        self._free: list[HostCopy] = []
        self._unfinished = 0
        self._closed = False
        self._error: Exception | None = None
        # field written by the writer thread and read by other threads
        self._waiting: tuple[str, float] | None = None
        # field used only by `publish`
        self._last: PolicyVersion | None = None
        # fields used only by the writer thread, except for the first copies
        self._num_copies = NUM_COPIES
        self._maker = PartMaker(rank, full_every)
        self._thread = threading.Thread(target=self._run, name=f"publisher-{rank}", daemon=True)
        self._thread.start()

    @property
    def commits(self) -> bool:
        return self._rank == self._num_stages - 1

    @property
    def is_full(self) -> bool:
        """Return whether `publish` would block until an earlier version is written; False if it would raise."""
        with self._changed:
            return self._error is None and self._last is not None and not self._free

    @property
    def waiting_for(self) -> str:
        """Return what the version in progress is waiting for, and for how long; '' if it is not waiting."""
        what, since_s = self._waiting or ("", 0.0)
        return f"{what}, for {self._clock() - since_s:.0f} s" if what else ""

    def publish(
        self, version: PolicyVersion, tensors: Mapping[str, Tensor], on_committed: OnCommitted | None = None
    ) -> None:
        """Copy the tensors to host memory and publish them in the background; they may change once `publish` returns.

        Args:
            version: a version newer than all versions published before.
            tensors: tensors of this stage by their names in a Hugging Face checkpoint; names and shapes never change.
            on_committed: called in the publisher's thread once the version is the newest. Last stage only.

        Raises:
            PublishFailed: an earlier version failed, or takes longer than `timeout_s`.
            ValueError: the version is not newer than the last, or names or shapes of tensors changed.
        """
        if self._last is not None and version <= self._last:
            raise ValueError(f"version {version} was published after {self._last}: versions must increase")
        if self._last is None:
            self._free = [HostCopy.like(tensors, self._dtypes) for _ in range(NUM_COPIES)]
        with self._changed:
            self._wait(
                lambda: bool(self._free) and not self._closed,
                self._timeout_s,
                f"to accept version {version}: stage {self._rank} is still writing earlier ones",
            )
            copy = self._free.pop()
        try:
            copy.fill(tensors)
        except BaseException:
            with self._changed:
                self._free.append(copy)
            raise
        with self._changed:
            self._jobs.append((version, copy, on_committed))
            self._unfinished += 1
            self._last = version
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Block until all versions are on disk (last stage: committed); raise PublishFailed on failure or timeout."""
        with self._changed:
            self._wait(lambda: self._unfinished == 0, timeout_s, f"for stage {self._rank} to finish publishing")

    def close(self, timeout_s: float = 30.0) -> None:
        """Finish queued versions as `flush` does, and stop the thread. Idempotent."""
        try:
            self.flush(timeout_s)
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            self._thread.join(timeout_s)

    def _wait(self, ready: Callable[[], bool], timeout_s: float, what: str) -> None:
        done = self._changed.wait_for(lambda: ready() or self._error is not None or self._closed, timeout_s)
        if self._error is not None:
            raise PublishFailed(f"publishing to {self._sink.place} failed: {self._error}") from self._error
        if self._closed:
            if ready():
                return
            raise PublishFailed(f"the publisher of stage {self._rank} is closed")
        if not done:
            why = f", waiting for {self.waiting_for}" if self.waiting_for else ""
            raise PublishFailed(f"waited {timeout_s:g} s {what}{why}; check the disk of {self._sink.place}")

    # --- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: bool(self._jobs) or self._closed)
                    if not self._jobs or self._closed:
                        return
                    job = self._jobs.popleft()
                self._publish_one(*job)
        except Exception as error:  # raised by the next publish, flush or close
            with self._changed:
                self._error, self._waiting = error, None
                self._changed.notify_all()
        finally:
            self._sink.close()

    def _publish_one(self, version: PolicyVersion, copy: HostCopy, on_committed: OnCommitted | None) -> None:
        part, files = self._maker.make(version, copy)
        self._retry(version, lambda: self._sink.write_part(part, files))
        as_parent = self._full_every > 1 and self._retry(version, self._sink.wants_deltas)
        if self.commits:
            self._commit(version, [*self._other_parts(version), part])
            if on_committed is not None:
                on_committed(version)
        free = self._maker.keep(version, copy, part, as_parent=as_parent)
        if as_parent and self._num_copies == NUM_COPIES:
            with contextlib.suppress(OSError):  # optional: without this copy, a version waits for the previous write
                free.append(copy.another())
            self._num_copies += 1
        with self._changed:
            self._free += free
            self._unfinished -= 1
            self._changed.notify_all()

    def _commit(self, version: PolicyVersion, parts: Sequence[Part]) -> None:
        was_sent = False

        def commit() -> None:
            nonlocal was_sent
            newest = self._newest()
            if was_sent and newest is not None and newest.policy == version:
                return  # the reply was lost, not the request
            was_sent = True
            self._sink.commit(build_manifest(version, parts, newest, time.time()), self._keep_versions)

        self._retry(version, commit)

    def _newest(self) -> Manifest | None:
        """Return the newest manifest, the parent of the next version; None if there is none or it is damaged."""
        try:
            return self._sink.newest_manifest()
        except (WeightsCorrupt, WeightsGone) as error:
            _log.warning(
                "cannot read the newest version in %s, so the next version has no parent: %s", self._sink.place, error
            )
            return None

    def _other_parts(self, version: PolicyVersion) -> list[Part]:
        parts: list[Part] = []
        for rank in range(self._num_stages - 1):
            since_s, poll_s = self._clock(), _POLL_S
            while (part := self._retry(version, functools.partial(self._part, version, rank))) is None:
                waited_s = self._clock() - since_s
                if waited_s > self._parts_timeout_s:
                    raise PublishFailed(
                        f"version {version}: the part of stage {rank} did not arrive within "
                        f"{self._parts_timeout_s:g} s; check the log of learner stage {rank}"
                    )
                if waited_s > _REPORT_AFTER_S:
                    self._waiting = f"the part of stage {rank} for version {version}", since_s
                self._pause(poll_s)
                poll_s = min(1.2 * poll_s, _LONGEST_POLL_S)
            parts.append(part)
        self._waiting = None
        return parts

    def _part(self, version: PolicyVersion, rank: int) -> Part | None:
        try:
            return self._sink.part(version, rank)
        except WeightsCorrupt as error:
            # the part may be damaged only in transit: retry, as for a missing part
            _log.warning("cannot read the part of stage %d for version %s: %s", rank, version, error)
            return None

    def _retry(self, version: PolicyVersion, act: Callable[[], Result]) -> Result:
        """Call the sink; retry while the disk is full or unwritable, or the service does not reply."""
        since_s, pause_s, warned_s = None, _FIRST_PAUSE_S, -math.inf
        while True:
            try:
                result = act()
            except (OSError, TransferFailed) as error:
                if isinstance(error, OSError) and error.errno not in _RETRIED:
                    raise
                now_s = self._clock()
                since_s = now_s if since_s is None else since_s
                what, advice = _explain(error, self._sink.place)
                self._waiting = what, since_s
                if now_s - since_s >= self._timeout_s:
                    raise PublishFailed(
                        f"version {version} waited {now_s - since_s:.0f} s for {what}; {advice}"
                    ) from error
                if now_s - warned_s >= _WARN_EVERY_S:
                    _log.warning("version %s waits for %s; retrying. %s", version, self.waiting_for, advice)
                    warned_s = now_s
            else:
                if since_s is not None:
                    self._waiting = None
                return result
            self._pause(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _pause(self, pause_s: float) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: self._closed, pause_s):
                raise PublishFailed(
                    f"the publisher of stage {self._rank} was closed while waiting for {self.waiting_for}"
                )


@dataclass(frozen=True)
class _Parent:
    version: PolicyVersion
    copy: HostCopy
    checksums: dict[tuple[str, str], str]


class PartMaker:
    """Builds the files of one stage: whole files, and deltas against the previous version."""

    def __init__(self, rank: int, full_every: int) -> None:
        self._rank = rank
        self._full_every = full_every
        self._num_made = 0
        self._parent: _Parent | None = None
        self._not_smaller: set[tuple[str, str]] = set()
        """Tensors, as (dtype, name), whose delta was not smaller than the tensor."""

    def make(self, version: PolicyVersion, copy: HostCopy) -> tuple[Part, dict[str, Buffers]]:
        """Return the document of a part and its files, name -> content. The content aliases `copy`."""
        parent = self._parent
        if parent is None or self._num_made % _TRY_AGAIN_EVERY == 0:
            self._not_smaller.clear()
        self._num_made += 1
        entries: list[TensorEntry] = []
        files: dict[str, Buffers] = {}
        for dtype in copy.dtypes:
            name = file_name(self._rank, dtype)
            file_entries = [
                TensorEntry(place.name, dtype, place.shape, name, checksum_of(copy.tensor_bytes(place, dtype)))
                for place in copy.places
            ]
            files[name] = [copy.header(dtype), copy.bytes_of(dtype)]
            deltas = self._deltas(copy, parent, file_entries) if parent is not None else None
            if deltas is not None:
                file_entries, files[delta_name(name)] = deltas
            entries += file_entries
        part = Part(
            rank=self._rank,
            version=version.key,
            parent=parent.version.key if parent is not None and any(entry.delta for entry in entries) else None,
            tensors=tuple(entries),
            files=tuple(FileEntry(name, sum(map(len, content))) for name, content in files.items()),
        )
        return part, files

    def keep(self, version: PolicyVersion, copy: HostCopy, part: Part, *, as_parent: bool) -> list[HostCopy]:
        """Return the copies that are free once a version is written; `as_parent` keeps `copy` for the next deltas."""
        free = [] if self._parent is None else [self._parent.copy]
        self._parent = None
        if as_parent and self._num_made % self._full_every:
            self._parent = _Parent(version, copy, {(e.dtype, e.name): e.checksum for e in part.tensors})
        else:
            free.append(copy)
        return free

    def _deltas(
        self, copy: HostCopy, parent: _Parent, entries: Sequence[TensorEntry]
    ) -> tuple[list[TensorEntry], list[bytes | memoryview]] | None:
        limit = DELTA_BELOW * sum(entry.size_bytes for entry in entries)
        found: list[TensorEntry] = []
        blobs: list[bytes | memoryview] = []
        offset = 0
        for place, entry in zip(copy.places, entries, strict=True):
            encoding, blob = self._delta(copy, parent, place, entry)
            delta = DeltaEntry(encoding, offset, len(blob))
            found.append(msgspec.structs.replace(entry, delta=delta))
            blobs.append(blob)
            offset += len(blob)
            if offset >= limit:
                self._not_smaller |= {(entry.dtype, entry.name) for entry in entries}
                return None
        return found, blobs

    def _delta(
        self, copy: HostCopy, parent: _Parent, place: TensorSlot, entry: TensorEntry
    ) -> tuple[Encoding, bytes | memoryview]:
        key = (entry.dtype, entry.name)
        if entry.checksum == parent.checksums[key]:
            return "same", b""
        new, old = copy.tensor_bytes(place, entry.dtype), parent.copy.tensor_bytes(place, entry.dtype)
        if key in self._not_smaller:
            return "raw", new
        encoding, blob = encode_delta(new, old, ITEM_BYTES[entry.dtype])
        if encoding == "raw":
            self._not_smaller.add(key)
        return encoding, blob


def _explain(error: OSError | TransferFailed, place: str) -> tuple[str, str]:
    if isinstance(error, TransferFailed):
        return f"the weight service at {place} ({error})", "check its log and the network between the two machines"
    if error.errno in FULL:
        return f"space in {place} ({error.strerror})", "free some space, or set weight_sync.folder to a larger disk"
    return f"{place} to become writable ({error.strerror})", "check that disk and its permissions"
