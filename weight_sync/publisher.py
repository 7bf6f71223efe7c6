"""The learner's side: one publisher per pipeline stage, all writing into one store.

    stage 0      part-0.safetensors, part-0.json
    stage 1      part-1.safetensors, part-1.json
    lead (last)  its own part, then waits for all part-*.json, then commits

Publishing waits for nobody but the copy to host memory: a thread of each stage does the rest.
Versions queue up at most `QUEUE_LENGTH` deep; beyond that `publish` waits for the disk.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from weight_sync.files import replace_durably, write_durably
from weight_sync.manifest import Part, PublishFailed, TensorEntry, build_manifest, decode, encode, entry_of
from weight_sync.staleness import PolicyVersion
from weight_sync.store import WeightStore

QUEUE_LENGTH = 2
_POLL_S = 0.005

OnCommitted = Callable[[PolicyVersion], None]


@dataclass(frozen=True)
class _Job:
    version: PolicyVersion
    tensors: dict[str, torch.Tensor]
    on_committed: OnCommitted | None


class Publisher:
    """Publishes this stage's tensors; on the lead stage also commits the version."""

    def __init__(
        self, folder: Path, rank: int, num_stages: int, keep_versions: int, *, parts_timeout_s: float = 120.0
    ) -> None:
        """Start the thread that writes.

        Args:
            folder: of the weight store.
            rank: this stage, 0..num_stages-1; the last one leads.
            num_stages: how many parts make a version.
            keep_versions: how many versions stay in the store.
            parts_timeout_s: how long the lead waits for the parts of other stages, and `publish` for the disk.
        """
        if not 0 <= rank < num_stages:
            raise ValueError(f"rank = {rank} is not one of the {num_stages} pipeline stages 0..{num_stages - 1}")
        self._store = WeightStore(folder)
        self._rank = rank
        self._num_stages = num_stages
        self._keep_versions = keep_versions
        self._parts_timeout_s = parts_timeout_s
        self._queue: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._unfinished = 0
        self._closed = False
        self._error: Exception | None = None
        self._last: PolicyVersion | None = None
        self._thread = threading.Thread(target=self._run, name=f"publisher-{rank}", daemon=True)
        self._thread.start()

    @property
    def is_lead(self) -> bool:
        """Does this stage commit the versions?"""
        return self._rank == self._num_stages - 1

    def publish(
        self, version: PolicyVersion, tensors: Mapping[str, torch.Tensor], on_committed: OnCommitted | None = None
    ) -> None:
        """Copy the tensors to host memory and publish them in the background.

        Args:
            version: newer than any published before.
            tensors: this stage's share, by the names of a Hugging Face checkpoint; may be changed once this returns.
            on_committed: called with the version, in the publisher's thread, once it is the newest. Lead stage only.

        Raises:
            PublishFailed: an earlier version failed, or the disk is slower than the learner for too long.
            ValueError: the version is not newer than the last.
        """
        if self._last is not None and version <= self._last:
            raise ValueError(f"version {version} was published after {self._last}: versions only grow")
        with self._changed:
            self._wait(
                lambda: len(self._queue) < QUEUE_LENGTH,
                self._parts_timeout_s,
                f"to take version {version}: the thread of stage {self._rank} is still busy with earlier ones",
            )
        # a copy even of host tensors: the learner goes on changing them
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        with self._changed:
            self._queue.append(_Job(version, copies, on_committed))
            self._unfinished += 1
            self._last = version
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Wait until every published version is on disk (on the lead: committed).

        Raises:
            PublishFailed: one of them failed, or it took longer than `timeout_s`.
        """
        with self._changed:
            self._wait(lambda: self._unfinished == 0, timeout_s, f"for stage {self._rank} to finish publishing")

    def close(self, timeout_s: float = 30.0) -> None:
        """Finish what is queued and stop the thread. May be called twice.

        Raises:
            PublishFailed: a version failed, or it took longer than `timeout_s`.
        """
        try:
            self.flush(timeout_s)
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
        self._thread.join(timeout_s)

    def _wait(self, ready: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait under the condition; an error of the thread ends every wait."""
        done = self._changed.wait_for(lambda: ready() or self._error is not None or self._closed, timeout_s)
        if self._error is not None:
            raise PublishFailed(f"publishing to {self._store.folder} failed: {self._error}") from self._error
        if self._closed:
            if ready():
                return
            raise PublishFailed(f"the publisher of stage {self._rank} is closed")
        if not done:
            raise PublishFailed(f"waited {timeout_s:g} s {what}; look at the disk of {self._store.folder}")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._closed)
                if not self._queue:
                    return
                job = self._queue.popleft()
                self._changed.notify_all()
            try:
                self._publish_one(job)
            except Exception as error:  # surfaces at the next publish, flush or close
                with self._changed:
                    self._error = error
                    self._queue.clear()
                    self._changed.notify_all()
                return
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()

    def _publish_one(self, job: _Job) -> None:
        own = self._write_part(job)
        if not self.is_lead:
            return
        entries = list(own.tensors)
        deadline_s = time.monotonic() + self._parts_timeout_s
        for rank in range(self._num_stages - 1):
            entries += self._wait_for_part(job.version, rank, deadline_s)
        newest = self._store.newest()
        parent = self._store.manifest(newest) if newest is not None else None
        self._store.commit(build_manifest(job.version, entries, parent, time.time()), self._keep_versions)
        if job.on_committed is not None:
            job.on_committed(job.version)

    def _write_part(self, job: _Job) -> Part:
        folder = self._store.version_folder(job.version)
        folder.mkdir(exist_ok=True)
        name = f"part-{self._rank}.safetensors"
        # checksums of the memory that the learner handed over, so damage on the way to disk shows as well
        entries = tuple(entry_of(key, tensor, name) for key, tensor in job.tensors.items())
        temporary = folder / f".{name}.tmp"
        save_file(job.tensors, temporary)
        replace_durably(temporary, folder / name)
        part = Part(rank=self._rank, version=str(job.version), tensors=entries)
        write_durably(folder / f"part-{self._rank}.json", encode(part))
        return part

    def _wait_for_part(self, version: PolicyVersion, rank: int, deadline_s: float) -> tuple[TensorEntry, ...]:
        path = self._store.version_folder(version) / f"part-{rank}.json"
        while not path.exists():
            if time.monotonic() > deadline_s:
                raise PublishFailed(
                    f"version {version}: the part of stage {rank} did not come within {self._parts_timeout_s:g} s; "
                    f"look at the log of learner stage {rank}"
                )
            time.sleep(_POLL_S)
        return decode(path.read_bytes(), Part, path).tensors
