"""Outbox: batches trajectories into messages within the client's credit, and resolves a future for each."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar, cast

from leeway.buffer import protocol as p
from leeway.buffer import schema
from leeway.buffer.config import MAX_MESSAGE_MIB
from leeway.buffer.errors import BufferUnavailable
from leeway.buffer.schema import Trajectory
from leeway.common.rpc.client import Answer, RpcClient, resolve

R = TypeVar("R")

COALESCE_S = 0.005
"""Seconds for which trajectories are collected into one message."""
MAX_ROWS_PER_MESSAGE = 256
MAX_BYTES_PER_MESSAGE = 2**20
"""Size above which trajectories are split into several messages, so that no message occupies a slow link for long."""
ROW_OVERHEAD_BYTES = 256
"""Estimated bytes of a trajectory in a message in addition to its arrays."""


class FutureGroup(Generic[R]):
    """A future of several results, in order. After all results, the future completes or fails with the first error."""

    def __init__(self, number: int) -> None:
        self.future: Future[list[R]] = Future()
        self._outcomes: dict[int, R | BaseException] = {}
        self._number = number
        self._lock = threading.Lock()
        if not number:
            resolve(self.future, [])

    def settle(self, place: int, outcome: R | BaseException) -> None:
        with self._lock:
            self._outcomes[place] = outcome
            is_last = len(self._outcomes) == self._number
        if is_last:
            results = [self._outcomes[place] for place in range(self._number)]
            errors = [each for each in results if isinstance(each, BaseException)]
            resolve(self.future, errors[0] if errors else cast("list[R]", results))

    def follow(self, futures: Iterable[Future[R]]) -> Future[list[R]]:
        def done(place: int, future: Future[R]) -> None:
            self.settle(place, future.exception() or future.result())

        for place, future in enumerate(futures):
            future.add_done_callback(partial(done, place))
        return self.future


@dataclass(slots=True, eq=False)
class _Row:
    trajectory: Trajectory
    settle: Callable[[p.RowResult | BaseException], None]
    size_bytes: int
    pushed_at: float


class Outbox:
    """Queue of trajectories. Any thread may push; the IO thread of the transport sends."""

    def __init__(self, name: str, run_id: str, give_up_s: float, transport: Callable[[], RpcClient]) -> None:
        """Start empty. `give_up_s` is the timeout; `transport` returns the RpcClient, which is created later."""
        self._name = name
        self._run_id = run_id
        self._give_up_s = give_up_s
        self._transport = transport
        self._epoch = 0
        self._credit = p.Credit()
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._rows: deque[_Row] = deque()
        self._waiting_bytes = 0
        self._outstanding_rows = 0
        self._outstanding_bytes = 0
        self._next_seq = 0
        self._closing = False

    def open(self, epoch: int, credit: p.Credit) -> None:
        self._epoch, self._credit = epoch, credit

    def close(self) -> None:
        """Accept no more trajectories, and send the queued ones immediately."""
        with self._lock:
            self._closing = True
            self._freed.notify_all()

    def push(self, trajectory: Trajectory) -> Future[p.RowResult]:
        future: Future[p.RowResult] = Future()
        self._enter([(trajectory, partial(resolve, future))])
        return future

    def push_many(self, trajectories: Sequence[Trajectory]) -> Future[list[p.RowResult]]:
        group = FutureGroup[p.RowResult](len(trajectories))
        self._enter((each, partial(group.settle, place)) for place, each in enumerate(trajectories))
        return group.future

    def _enter(self, rows: Iterable[tuple[Trajectory, Callable[[p.RowResult | BaseException], None]]]) -> None:
        """Queue rows with their callbacks; block while there is no credit for the next row."""
        now, wake = time.monotonic(), False
        with self._lock:
            for trajectory, on_result in rows:
                size = size_bytes(trajectory)
                while not self._has_room(size):
                    self._transport().wake()
                    self._wait_for_credit()
                    now = time.monotonic()
                self._refuse_if_closed()
                self._outstanding_rows += 1
                self._outstanding_bytes += size
                was_full = self._is_full()
                self._rows.append(_Row(trajectory, on_result, size, now))
                self._waiting_bytes += size
                wake = wake or len(self._rows) == 1 or (self._is_full() and not was_full)
        if wake:
            self._transport().wake()

    def has_room(self, trajectory: Trajectory) -> bool:
        with self._lock:
            return self._has_room(size_bytes(trajectory))

    def pump(self) -> float | None:
        """Send rows that are due or fill a message; return the seconds until the next is due. Runs in the IO thread."""
        while True:
            with self._lock:
                if not self._rows:
                    return None
                due_in_s = self._rows[0].pushed_at + COALESCE_S - time.monotonic()
                if due_in_s > 0 and not self._is_full() and not self._closing:
                    return due_in_s
                rows = self._take_rows()
            self._send(rows)

    def fail(self, error: Exception) -> None:
        """Fail the queued rows; called when the transport has ended."""
        with self._lock:
            rows, self._rows, self._waiting_bytes = list(self._rows), deque(), 0
        self._settle(rows, [error] * len(rows))

    def _has_room(self, size_bytes: int) -> bool:
        """Return whether there is credit for `size_bytes` more; a single outstanding row is always allowed."""
        return not self._outstanding_rows or (
            self._outstanding_rows < self._credit.rows
            and self._outstanding_bytes + size_bytes <= self._credit.size_bytes
        )

    def _wait_for_credit(self) -> None:
        """Block until an acknowledgement arrives; raise BufferUnavailable if the service is silent for `give_up_s`."""
        since, was_silent = time.monotonic(), False
        while not self._freed.wait(1.0):
            silent_s = time.monotonic() - max(since, self._transport().last_seen_s)
            is_silent = silent_s > self._give_up_s
            if is_silent and was_silent:  # the first silence may be a stall of this process, not of the service
                raise BufferUnavailable(
                    f"the buffer service at {self._transport().address} acknowledged none of "
                    f"{self._outstanding_rows} trajectories for {silent_s:.0f} s"
                )
            was_silent = is_silent
            self._refuse_if_closed()

    def _refuse_if_closed(self) -> None:
        if self._closing or self._transport().has_ended:
            raise BufferUnavailable(f"the client of the buffer service at {self._transport().address} is closed")

    def _is_full(self) -> bool:
        """Return whether the waiting rows fill a message."""
        return len(self._rows) >= MAX_ROWS_PER_MESSAGE or self._waiting_bytes >= MAX_BYTES_PER_MESSAGE

    def _take_rows(self) -> list[_Row]:
        """Remove and return as many rows as fit into one message."""
        waiting = itertools.islice(self._rows, MAX_ROWS_PER_MESSAGE)
        limit = min(message_room(), MAX_BYTES_PER_MESSAGE)
        rows = [self._rows.popleft() for _ in range(num_fitting((row.size_bytes for row in waiting), limit))]
        self._waiting_bytes -= sum(row.size_bytes for row in rows)
        return rows

    def _send(self, rows: list[_Row]) -> None:
        try:
            seqs = range(self._next_seq, self._next_seq + len(rows))
            sender = schema.Sender(self._name, self._epoch, seqs)
            body = checked(schema.encode([row.trajectory for row in rows], self._run_id, sender))
        except Exception as error:  # caller-supplied values of a trajectory may raise anything
            if len(rows) == 1:
                self._settle(rows, [error])
                return
            # One row cannot be encoded: send the rows one by one, so that only this row fails.
            for row in rows:
                self._send([row])
            return

        # Advance only after encoding succeeds: the service would keep waiting for a number that is never sent.
        self._next_seq += len(rows)

        def answered(push: Future[Answer]) -> None:
            failure = push.exception()
            reply = None if failure is not None else push.result().reply
            if isinstance(reply, p.PushReply):
                missing = TypeError(f"the buffer service at {self._transport().address} omitted a trajectory's result")
                results = {result.seq: result for result in reply.results}
                self._settle(rows, [results.get(seq, missing) for seq in seqs], reply.credit)
            else:
                error = failure or TypeError(f"the buffer service answered Push with {type(reply).__name__}")
                self._settle(rows, [error] * len(rows))

        self._transport().submit(p.Push(self._name, self._epoch), body, closing=True).add_done_callback(answered)

    def _settle(
        self, rows: Sequence[_Row], outcomes: Sequence[p.RowResult | BaseException], credit: p.Credit | None = None
    ) -> None:
        with self._lock:
            self._outstanding_rows -= len(rows)
            self._outstanding_bytes -= sum(row.size_bytes for row in rows)
            self._credit = credit or self._credit
            self._freed.notify_all()
        for row, outcome in zip(rows, outcomes, strict=True):
            row.settle(outcome)


def size_bytes(trajectory: Trajectory) -> int:
    """Return the estimated bytes of a trajectory in a message."""
    arrays = trajectory.token_ids.nbytes + trajectory.logprobs.nbytes
    return arrays + schema.columns_size(trajectory) + ROW_OVERHEAD_BYTES


def message_room() -> int:
    """Return the payload bytes to put into a message: half of the limit, because estimates exclude Arrow's overhead."""
    return MAX_MESSAGE_MIB * 2**20 // 2


def parts_fitting(sizes: Sequence[int], limit: int, max_num: int | None = None) -> Iterator[slice]:
    """Yield consecutive slices that cover all items, each as large as `limit` bytes and `max_num` items allow."""
    start = 0
    while start < len(sizes):
        end = start + num_fitting(itertools.islice(sizes, start, None if max_num is None else start + max_num), limit)
        yield slice(start, end)
        start = end


def num_fitting(sizes: Iterable[int], limit: int) -> int:
    """Return how many of the first items fit; at least 1: `checked` refuses a single item that is too large."""
    totals = itertools.accumulate(sizes)
    return max(1, sum(1 for _ in itertools.takewhile(lambda total: total <= limit, totals)))


def checked(body: memoryview) -> memoryview:
    """Return the body; raise ValueError if it is too large, because every resend would break the connection."""
    if len(body) > MAX_MESSAGE_MIB * 2**20:
        raise ValueError(f"a message of {len(body)} bytes exceeds the limit of {MAX_MESSAGE_MIB} MiB per message")
    return body
