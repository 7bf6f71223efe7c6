"""The coordinator rank, which alone talks to the buffer service, and hands each batch to the other ranks.

    Channel       one direction, from the coordinator to all others: a header of two integers (kind, length) and
                  `length` bytes, both broadcast
    Coordinator   the conversation with the buffer, every wait bounded

While it waits for a batch the coordinator sends a heartbeat every second, so that its death is noticed soon.
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

from buffer.client import REQUEST_TIMEOUT_S, BufferClient, Draw
from common.run import RunContext
from common.staleness import PolicyVersion
from learner.batch import counted_versions
from learner.config import LearnerSections
from learner.mesh import MeshPlace
from learner.report import MetricsFile

R = TypeVar("R")

HEARTBEAT_S = 1.0
BATCH_TIMEOUT_S = 7200.0
"""Seconds without a batch after which the learner raises and names what is missing. A sample may take half of it
(`actors.sample.GENERATE_TIMEOUT_S`); actors that die are started again long before."""


class Kind(IntEnum):
    WAITING = 0
    BATCH = 1
    STOP = 2
    FAILED = 3
    PUBLISH = 4
    """Publish the present version: it was left out while earlier ones were being written."""


class CoordinatorFailed(RuntimeError):
    """The coordinator gave up; the text is its error."""


class Channel:
    """One direction: `send` on the coordinator, `receive` on every other rank, in the same order.

    It uses the default process group, whose timeout bounds every wait.
    """

    def __init__(self, place: MeshPlace) -> None:
        self._coordinator = place.coordinator
        self._is_coordinator = place.is_coordinator
        self._alone = place.num_ranks == 1

    def send(self, kind: Kind, payload: bytes | memoryview = b"") -> None:
        assert self._is_coordinator, "only the coordinator stage speaks"
        if self._alone:
            return
        dist.broadcast(torch.tensor([int(kind), len(payload)]), src=self._coordinator)
        if payload:
            # a copy, for torch warns of a tensor over read-only memory
            dist.broadcast(torch.from_numpy(np.frombuffer(payload, np.uint8).copy()), src=self._coordinator)

    def receive(self) -> tuple[Kind, bytes]:
        """Return the next batch, or a request to stop or publish; heartbeats are passed over.

        CoordinatorFailed if the coordinator gave up.
        """
        while True:
            header = torch.zeros(2, dtype=torch.int64)
            dist.broadcast(header, src=self._coordinator)
            kind, length = Kind(int(header[0])), int(header[1])
            payload = torch.zeros(length, dtype=torch.uint8)
            if length:
                dist.broadcast(payload, src=self._coordinator)
            if kind is Kind.FAILED:
                raise CoordinatorFailed(
                    f"the coordinator, rank {self._coordinator}, gave up: {payload.numpy().tobytes().decode()}"
                )
            if kind is not Kind.WAITING:
                return kind, payload.numpy().tobytes()


class NoBatch(TimeoutError):
    """No batch came for `BATCH_TIMEOUT_S`; the text names who owes it."""


class Coordinator:
    """Draws batches and reports progress; exists on the coordinator rank alone."""

    def __init__(self, context: RunContext[LearnerSections], channel: Channel, deadline: float | None = None) -> None:
        """Connect to the buffer service by the deadline; errors as `BufferClient.connect`."""
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
        """None until weights of this process are committed."""
        self.waiting_for = ""
        """Empty while the learner computes."""

    def begin(self, version: int, step: int, deadline: float) -> None:
        """Cut the metrics to this step, and open this learner's incarnation; the other stages do not listen yet.

        Errors as `MetricsFile.go_back`; TimeoutError if the service lets it wait beyond the deadline (monotonic).
        """
        self.metrics.go_back(step)
        future = self._client.begin_incarnation(version, step)
        reply = self._answer(future, "begin an incarnation", heartbeats=False, deadline=deadline)
        self.incarnation = reply.incarnation
        self.resumed_at = dict(reply.resumed_at)

    def draw(
        self,
        step: int,
        version: int,
        stop: threading.Event,
        while_waiting: Callable[[], None],
        allowed_lag: int | None = None,
    ) -> Draw | None:
        """Return the batch of step `step` (from 1), which begins at `version`; None once `stop` is set.

        Meanwhile new groups are leased up to `allowed_lag`. `while_waiting` is called, and a heartbeat sent, about
        every second. NoBatch if none came within
        `BATCH_TIMEOUT_S`, TimeoutError if no answer did, as of a service whose disk is full.
        """
        self.settle()
        config = self._config
        deadline_s = time.monotonic() + BATCH_TIMEOUT_S
        self.waiting_for = f"the batch of step {step}"
        while not stop.is_set():
            while_waiting()
            future = self._client.draw(
                step, version, self.incarnation, config.groups_per_step, HEARTBEAT_S, allowed_lag
            )
            draw = self._answer(future, f"draw step {step}", deadline=deadline_s + REQUEST_TIMEOUT_S)
            if draw.ready:
                self.waiting_for = ""
                return draw
            self._channel.send(Kind.WAITING)
            self.waiting_for = f"the batch of step {step}: {draw.waiting_for}"
            if time.monotonic() > deadline_s:
                raise NoBatch(
                    f"no batch for step {step} within {BATCH_TIMEOUT_S:g} s; "
                    f"waiting for {draw.waiting_for or 'the buffer service to say what is missing'}"
                )
        return None

    def check_age(self, draw: Draw, version: int) -> None:
        """Raise StaleTokens if the last update of the step would train a token past the bound."""
        last_update = version + self._config.updates_per_step - 1
        oldest = counted_versions(draw.rows, self.resumed_at).min()
        self._contract.check_trained(last_update, last_update - int(oldest))

    def settle(self, *, heartbeats: bool = True) -> None:
        """Wait until the service confirmed all reports; without heartbeats while the other ranks do not listen."""
        with self._lock:
            pending, self._pending = self._pending, []
        for what, future in pending:
            self._answer(future, what, heartbeats=heartbeats)

    def write_scores(self, record_ids: list[int], logprobs: list[npt.NDArray[np.float32]]) -> None:
        """Store reference log-probabilities, so that no sample is scored twice."""
        self._expect("store reference scores", self._client.write_scores(record_ids, logprobs))

    def step_finished(self, step: int, version: int, *, skipped: bool) -> None:
        self._expect(f"record step {step}", self._client.step_finished(step, version, skipped))

    def published(self, version: PolicyVersion) -> None:
        """Report committed weights; called by the publisher's thread."""
        self.newest_published = version.version
        self._expect(f"record version {version}", self._client.published(version.incarnation, version.version))

    def release_draws(self, step: int, *, heartbeats: bool = True) -> None:
        """Report that draws up to a step are used for good, after they are recorded."""
        self.settle(heartbeats=heartbeats)
        self._expect(f"release the draws up to step {step}", self._client.checkpoint_durable(step))

    def close(self) -> None:
        self._client.close()

    def _expect(self, what: str, future: Future[R]) -> None:
        with self._lock:
            self._pending.append((what, future))  # type: ignore[arg-type]  # a Future is read-only to us

    def _answer(self, future: Future[R], what: str, *, heartbeats: bool = True, deadline: float = inf) -> R:
        """Return the reply; the client itself gives up on a silent service."""
        asked_at = time.monotonic()
        while True:
            try:
                return future.result(HEARTBEAT_S)
            except FutureTimeout:
                if future.done():
                    return future.result()  # its own error, or an answer that came just now
                if heartbeats:
                    self._channel.send(Kind.WAITING)
                if (now := time.monotonic()) > deadline:
                    why = self._client.put_off_because or "its log in the run folder says why"
                    raise TimeoutError(
                        f"the buffer service at {self._address} was asked to {what} and has let that wait "
                        f"for {now - asked_at:.0f} s: {why}"
                    ) from None
