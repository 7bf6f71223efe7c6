"""Trajectories on their way: collected into messages, bounded by credit, settled one by one."""

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

from buffer import protocol as p
from buffer import schema
from buffer.config import MAX_MESSAGE_MIB
from buffer.errors import BufferUnavailable
from buffer.schema import Trajectory
from common.rpc.client import Answer, RpcClient, settle

R = TypeVar("R")

COALESCE_S = 0.005
"""How long trajectories are collected for one message."""
MAX_ROWS_PER_MESSAGE = 256
MAX_BYTES_PER_MESSAGE = 2**20
"""More is sent in several messages: a slow link must not be busy with one for long."""
ROW_OVERHEAD_BYTES = 256
"""What a trajectory takes in a message beside its arrays, about."""


class Together(Generic[R]):
    """A future of several outcomes, in their order. It fails with the first error, once all are known."""

    def __init__(self, number: int) -> None:
        self.future: Future[list[R]] = Future()
        self._outcomes: dict[int, R | BaseException] = {}
        self._number = number
        self._lock = threading.Lock()
        if not number:
            settle(self.future, [])

    def settle(self, place: int, outcome: R | BaseException) -> None:
        with self._lock:
            self._outcomes[place] = outcome
            is_last = len(self._outcomes) == self._number
        if is_last:
            results = [self._outcomes[place] for place in range(self._number)]
            errors = [each for each in results if isinstance(each, BaseException)]
            settle(self.future, errors[0] if errors else cast("list[R]", results))

    def follow(self, futures: Iterable[Future[R]]) -> Future[list[R]]:
        def told(place: int, future: Future[R]) -> None:
            self.settle(place, future.exception() or future.result())

        for place, future in enumerate(futures):
            future.add_done_callback(partial(told, place))
        return self.future


@dataclass(slots=True, eq=False)
class _Row:
    trajectory: Trajectory
    settle: Callable[[p.RowResult | BaseException], None]
    size_bytes: int
    pushed_at: float


class Outbox:
    """Takes trajectories from any thread; the IO thread of the transport sends them."""

    def __init__(self, name: str, run_id: str, give_up_s: float, transport: Callable[[], RpcClient]) -> None:
        """Start empty. `give_up_s` is the timeout; `transport` gives the client's, which is made after the outbox."""
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
        """Take no more; what is there is sent without waiting for company."""
        with self._lock:
            self._closing = True
            self._freed.notify_all()

    def push(self, trajectory: Trajectory) -> Future[p.RowResult]:
        future: Future[p.RowResult] = Future()
        self._enter([(trajectory, partial(settle, future))])
        return future

    def push_many(self, trajectories: Sequence[Trajectory]) -> Future[list[p.RowResult]]:
        together = Together[p.RowResult](len(trajectories))
        self._enter((each, partial(together.settle, place)) for place, each in enumerate(trajectories))
        return together.future

    def _enter(self, many: Iterable[tuple[Trajectory, Callable[[p.RowResult | BaseException], None]]]) -> None:
        """Let some rows wait to be sent, as credit comes for them."""
        now, wake = time.monotonic(), False
        with self._lock:
            for trajectory, told in many:
                size = size_bytes(trajectory)
                while not self._has_room(size):
                    self._transport().wake()
                    self._wait_for_credit()
                    now = time.monotonic()
                self._refuse_if_closed()
                self._outstanding_rows += 1
                self._outstanding_bytes += size
                was_full = self._is_full()
                self._rows.append(_Row(trajectory, told, size, now))
                self._waiting_bytes += size
                wake = wake or len(self._rows) == 1 or (self._is_full() and not was_full)
        if wake:
            self._transport().wake()

    def has_room(self, trajectory: Trajectory) -> bool:
        with self._lock:
            return self._has_room(size_bytes(trajectory))

    def pump(self) -> float | None:
        """Send the rows that are due or fill a message; return the seconds to the next one. Runs in the IO thread."""
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
        """There is no transport any more: what was not handed to it will not be sent."""
        with self._lock:
            rows, self._rows, self._waiting_bytes = list(self._rows), deque(), 0
        self._settle(rows, [error] * len(rows))

    def _has_room(self, size_bytes: int) -> bool:
        """Is there credit for so much more? One row always has it."""
        return not self._outstanding_rows or (
            self._outstanding_rows < self._credit.rows
            and self._outstanding_bytes + size_bytes <= self._credit.size_bytes
        )

    def _wait_for_credit(self) -> None:
        """Wait for an acknowledgement, as long as the service gives signs of life."""
        since, was_silent = time.monotonic(), False
        while not self._freed.wait(1.0):
            silent_s = time.monotonic() - max(since, self._transport().heard_at)
            is_silent = silent_s > self._give_up_s
            if is_silent and was_silent:  # once may be this process, stopped: its IO thread passes over that
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
        """Do the waiting rows fill a message?"""
        return len(self._rows) >= MAX_ROWS_PER_MESSAGE or self._waiting_bytes >= MAX_BYTES_PER_MESSAGE

    def _take_rows(self) -> list[_Row]:
        """As many rows as fit into one message."""
        waiting = itertools.islice(self._rows, MAX_ROWS_PER_MESSAGE)
        room = min(message_room(), MAX_BYTES_PER_MESSAGE)
        taken = [self._rows.popleft() for _ in range(num_fitting((row.size_bytes for row in waiting), room))]
        self._waiting_bytes -= sum(row.size_bytes for row in taken)
        return taken

    def _send(self, rows: list[_Row]) -> None:
        try:
            seqs = range(self._next_seq, self._next_seq + len(rows))
            sender = schema.Sender(self._name, self._epoch, seqs)
            body = checked(schema.encode([row.trajectory for row in rows], self._run_id, sender))
        except Exception as error:  # whatever a caller has put into a trajectory
            if len(rows) == 1:
                self._settle(rows, [error])
                return
            # One row cannot be sent: find it, and let the others pass.
            for row in rows:
                self._send([row])
            return

        # Only now: a number that is never sent would be waited for as long as this client lives.
        self._next_seq += len(rows)

        def answered(push: Future[Answer]) -> None:
            failure = push.exception()
            reply = None if failure is not None else push.result().reply
            if isinstance(reply, p.PushReply):
                missing = TypeError(f"the buffer service at {self._transport().address} left out a trajectory")
                results = {result.seq: result for result in reply.results}
                self._settle(rows, [results.get(seq, missing) for seq in seqs], reply.credit)
            else:
                error = failure or TypeError(f"the buffer service answered a push with {type(reply).__name__}")
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
    """About what it takes in a message."""
    arrays = trajectory.token_ids.nbytes + trajectory.logprobs.nbytes
    return arrays + schema.columns_size(trajectory) + ROW_OVERHEAD_BYTES


def message_room() -> int:
    """Bytes of payload to put into a message: half of the limit, for an estimate leaves out Arrow's part."""
    return MAX_MESSAGE_MIB * 2**20 // 2


def parts_fitting(sizes: Sequence[int], room: int, most: int | None = None) -> Iterator[slice]:
    """All of these in as many parts as they need, each as large as fits, and of at most so many."""
    start = 0
    while start < len(sizes):
        end = start + num_fitting(itertools.islice(sizes, start, None if most is None else start + most), room)
        yield slice(start, end)
        start = end


def num_fitting(sizes: Iterable[int], room: int) -> int:
    """How many of the first sizes fit; at least one, for one alone is refused by its true size."""
    totals = itertools.accumulate(sizes)
    return max(1, sum(1 for _ in itertools.takewhile(lambda total: total <= room, totals)))


def checked(body: memoryview) -> memoryview:
    """Return the body; ValueError if it is too large: it would cost the connection, and be sent again."""
    if len(body) > MAX_MESSAGE_MIB * 2**20:
        raise ValueError(
            f"a message of {len(body)} bytes exceeds the {MAX_MESSAGE_MIB} MiB that the buffer takes in one"
        )
    return body
