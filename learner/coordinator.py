"""The coordinator rank: the only rank connected to the buffer service; it broadcasts each batch to the other ranks.

    Channel       one-way broadcast from the coordinator to all other ranks: a header of two integers (kind, length),
                  then `length` bytes
    Coordinator   requests to the buffer; every wait has a timeout

While it waits for a batch, the coordinator sends a heartbeat every second, so that its death is detected quickly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from enum import IntEnum
from math import inf
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from leeway.buffer.client import REQUEST_TIMEOUT_S, Batch, BufferClient
from leeway.common.run import RunContext
from leeway.common.staleness import PolicyVersion
from leeway.learner.batch import counted_versions
from leeway.learner.config import LearnerSections
from leeway.learner.mesh import MeshPlace
from leeway.learner.report import MetricsFile

R = TypeVar("R")

HEARTBEAT_S = 1.0
BATCH_TIMEOUT_S = 7200.0
"""Seconds without a batch before the learner raises `NoBatch`. Generating a sample may take half of this time
(`leeway.actors.sample.GENERATE_TIMEOUT_S`); dead actors are restarted much earlier."""


class Kind(IntEnum):
    WAITING = 0
    BATCH = 1
    STOP = 2
    FAILED = 3
    PUBLISH = 4
    """Publish the current version, which was skipped while earlier versions were being written."""


class CoordinatorFailed(RuntimeError):
    """The coordinator failed; the message contains its error."""


class Channel:
    """One-way channel: the coordinator sends, and every other rank receives the messages in the same order.

    The channel uses the default process group, whose timeout bounds every wait.
    """

    def __init__(self, place: MeshPlace) -> None:
        self._place = place

    def send(self, kind: Kind, payload: bytes | memoryview = b"") -> None:
        assert self._place.is_coordinator, "only the coordinator sends"
        if self._place.num_ranks == 1:
            return
        dist.broadcast(torch.tensor([int(kind), len(payload)]), src=self._place.coordinator)
        if payload:
            # copied because torch warns about tensors over read-only memory
            dist.broadcast(torch.from_numpy(np.frombuffer(payload, np.uint8).copy()), src=self._place.coordinator)

    def receive(self) -> tuple[Kind, bytes]:
        """Return the next batch, or a request to stop or publish; skip heartbeats.

        Raises CoordinatorFailed if the coordinator failed.
        """
        while True:
            header = torch.zeros(2, dtype=torch.int64)
            dist.broadcast(header, src=self._place.coordinator)
            kind, length = Kind(int(header[0])), int(header[1])
            payload = torch.zeros(length, dtype=torch.uint8)
            if length:
                dist.broadcast(payload, src=self._place.coordinator)
            if kind is Kind.FAILED:
                raise CoordinatorFailed(
                    f"the coordinator (rank {self._place.coordinator}) failed: {payload.numpy().tobytes().decode()}"
                )
            if kind is not Kind.WAITING:
                return kind, payload.numpy().tobytes()


class NoBatch(TimeoutError):
    """No batch arrived within `BATCH_TIMEOUT_S`; the message states what is missing."""


class Coordinator:
    """Buffer client that draws batches and reports progress; exists on the coordinator rank only."""

    def __init__(self, context: RunContext[LearnerSections], channel: Channel, deadline: float | None = None) -> None:
        """Connect to the buffer service before the deadline; raise the errors of `BufferClient.connect`."""
        self._address = context.buffer_address
        self._config = context.config.learner
        self._contract = context.facts.contract
        self._channel = channel
        self._client = BufferClient(
            context.buffer_address, run_id=context.facts.run_id, role="learner", name="learner", keys=context.keys
        )
        self._client.connect(deadline)
        self.metrics = MetricsFile(context.folder / "metrics.jsonl")
        self._lock = threading.Lock()
        self._pending: list[tuple[str, Future[object]]] = []
        self.resumed_at: dict[int, int] = {}
        self.incarnation = 0
        self.newest_published: int | None = None
        """Newest version with committed weights; None until this process commits its first weights."""
        self.waiting_for = ""
        """Reason that the learner is waiting; empty while it computes."""

    def begin(self, version: int, step: int, deadline: float) -> None:
        """Truncate the metrics to this step and begin an incarnation, without heartbeats, because no rank receives yet.

        Raises the errors of `MetricsFile.truncate`; TimeoutError if there is no answer by `deadline` (monotonic time).
        """
        self.metrics.truncate(step)
        future = self._client.begin_incarnation(version, step)
        reply = self._await(future, "begin an incarnation", heartbeats=False, deadline=deadline)
        self.incarnation = reply.incarnation
        self.resumed_at = dict(reply.resumed_at)

    def draw(
        self,
        step: int,
        version: int,
        stop: threading.Event,
        while_waiting: Callable[[], None],
        allowed_lag: int | None = None,
    ) -> Batch | None:
        """Return the batch of step `step` (from 1), which begins at `version`; None if `stop` is set.

        While the learner waits, groups are leased up to a lag of `allowed_lag`. Calls `while_waiting` and sends a
        heartbeat about every second. Raises NoBatch if no batch is ready within `BATCH_TIMEOUT_S`, and TimeoutError if
        the service does not answer, for example because its disk is full.
        """
        self.flush()
        config = self._config
        deadline_s = time.monotonic() + BATCH_TIMEOUT_S
        self.waiting_for = f"the batch of step {step}"
        while not stop.is_set():
            while_waiting()
            future = self._client.draw(
                step, version, self.incarnation, config.groups_per_step, HEARTBEAT_S, allowed_lag
            )
            batch = self._await(future, f"draw step {step}", deadline=deadline_s + REQUEST_TIMEOUT_S)
            if batch.ready:
                self.waiting_for = ""
                return batch
            self._channel.send(Kind.WAITING)
            self.waiting_for = f"the batch of step {step}: {batch.waiting_for}"
            if time.monotonic() > deadline_s:
                raise NoBatch(
                    f"no batch for step {step} within {BATCH_TIMEOUT_S:g} s; "
                    f"waiting for {batch.waiting_for or 'the buffer service, which reports no reason'}"
                )
        return None

    def check_age(self, batch: Batch, version: int) -> None:
        """Raise StaleTokens if the last update of the step would train on a token beyond the staleness bound."""
        last_update = version + self._config.updates_per_step - 1
        oldest = counted_versions(batch.rows, self.resumed_at).min()
        self._contract.check_trained(last_update, last_update - int(oldest))

    def flush(self, *, heartbeats: bool = True) -> None:
        """Block until the service confirms all reports; use `heartbeats=False` while the other ranks do not receive."""
        with self._lock:
            pending, self._pending = self._pending, []
        for what, future in pending:
            self._await(future, what, heartbeats=heartbeats)

    def write_scores(self, record_ids: list[int], logprobs: list[npt.NDArray[np.float32]]) -> None:
        """Store reference log-probabilities in the buffer, so that no sample is scored twice."""
        self._expect("store reference scores", self._client.write_scores(record_ids, logprobs))

    def step_finished(self, step: int, version: int, *, skipped: bool) -> None:
        self._expect(f"record step {step}", self._client.step_finished(step, version, skipped))

    def published(self, version: PolicyVersion) -> None:
        """Report committed weights; called from the publisher thread."""
        self.newest_published = version.version
        self._expect(f"record version {version}", self._client.published(version.incarnation, version.version))

    def release_draws(self, step: int, *, heartbeats: bool = True) -> None:
        """Report that batches up to a step are never requested again; flushes other reports first."""
        self.flush(heartbeats=heartbeats)
        self._expect(f"release the batches up to step {step}", self._client.checkpoint_durable(step))

    def close(self) -> None:
        self._client.close()

    def _expect(self, what: str, future: Future[R]) -> None:
        with self._lock:
            self._pending.append((what, future))  # type: ignore[arg-type]  # the futures are only read

    def _await(self, future: Future[R], what: str, *, heartbeats: bool = True, deadline: float = inf) -> R:
        """Return the reply; the client itself times out if the service is unreachable."""
        requested_at = time.monotonic()
        while True:
            try:
                return future.result(HEARTBEAT_S)
            except FutureTimeout:
                if future.done():
                    return future.result()  # a TimeoutError of the request itself, or a reply that just arrived
                if heartbeats:
                    self._channel.send(Kind.WAITING)
                if (now := time.monotonic()) > deadline:
                    why = self._client.retry_reason or "see its log in the run folder"
                    raise TimeoutError(
                        f"the buffer service at {self._address} did not {what} within {now - requested_at:.0f} s: {why}"
                    ) from None
