"""Shard: what a `ShardedClient` knows of one shard, and what the shard has not answered yet. Shards: all of them.

All of it lives in one event loop, so nothing but `Shard.push` is locked against threads.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from buffer import protocol as p
from buffer.client import BufferClient, Draw
from buffer.errors import BufferRefused, BufferUnavailable
from buffer.length_model import LengthFidelity
from buffer.schema import Trajectory
from common.rpc.client import settle

_CREDIT_POLL_S = 0.02

R = TypeVar("R")
N = TypeVar("N", int, float)

Request = Callable[[BufferClient], Future[R]]


class Shard:
    """One shard, as its client knows it."""

    def __init__(self, client: BufferClient, patience_s: float) -> None:
        """The shard is silent once something is unanswered for `patience_s`."""
        self.client = client
        self.number = client.shard
        self._waiting: deque[tuple[Trajectory, Future[p.RowResult]]] = deque()
        """Trajectories that the shard has no credit for yet, so that their sender need not wait. There are at most as
        many as were leased from the shard."""
        self._pushing = threading.Lock()
        self.is_connected = False
        self.status: p.Status | None = None
        """As it was last known."""
        self.ledger: dict[str, int] = {}
        """The newest counts that were heard."""
        self.fidelity = LengthFidelity()
        self.waiting_for = ""
        """What its part of a step waits for."""
        self._patience_s = patience_s
        self._order = asyncio.Lock()
        self._unanswered: dict[asyncio.Task[Any], float] = {}
        """Request -> when it was made, or is to be answered where the service may let it wait."""
        self._told: set[asyncio.Task[Any]] = set()
        self._single: dict[str, asyncio.Task[Any]] = {}

    @property
    def patience_left_s(self) -> float:
        """After so long the shard counts as silent; not above 0 where it does."""
        oldest = min(self._unanswered.values(), default=None)
        return self._patience_s if oldest is None else oldest + self._patience_s - time.monotonic()

    @property
    def is_silent(self) -> bool:
        """Something has been unanswered for too long."""
        return self.patience_left_s <= 0

    @property
    def silent_s(self) -> float:
        """For how long the oldest request is unanswered."""
        return self._patience_s - self.patience_left_s

    @property
    def untold(self) -> list[asyncio.Task[Any]]:
        """What was said in turn and is not answered."""
        return list(self._told)

    def tell(self, request: Request[R]) -> asyncio.Task[R]:
        """Make a request once all earlier ones made by `tell` are answered."""
        task = self._start(self._in_turn(request))
        self._told.add(task)
        task.add_done_callback(self._told.discard)
        return task

    def greet(self) -> asyncio.Task[p.Welcome]:
        """Say hello; the shard is connected once it has answered."""

        def greeted(task: asyncio.Task[p.Welcome]) -> None:
            self.is_connected = not task.cancelled() and task.exception() is None

        task = self.tell(lambda client: client.hello())
        task.add_done_callback(greeted)
        return task

    def ask(self, request: Request[R]) -> asyncio.Task[R]:
        return self._start(self._answer(request))

    def ask_one(self, kind: str, request: Request[R], *, even_late: bool = False) -> asyncio.Task[R]:
        """Make a request, unless one of its kind is not answered yet: then that one.

        With `even_late` an answer that came when its caller had gone is not asked for again, but `taken`.
        """
        task = self._single.get(kind)
        if task is None or (task.done() and not even_late):
            task = self._single[kind] = self.ask(request)
        return task

    def taken(self, kind: str) -> None:
        self._single.pop(kind, None)

    def push(self, trajectory: Trajectory, loop: asyncio.AbstractEventLoop) -> Future[p.RowResult]:
        """Push now or, from the thread of this loop, once there is credit. For any thread; never blocks."""
        with self._pushing:  # else another thread takes the room, or both wait and neither starts to push
            if not self._waiting and self.client.has_room(trajectory):
                return self.client.push(trajectory)
            future: Future[p.RowResult] = Future()
            self._waiting.append((trajectory, future))
            if len(self._waiting) == 1:
                asyncio.run_coroutine_threadsafe(self._push_waiting(), loop)
        return future

    async def _push_waiting(self) -> None:
        try:
            while self._waiting:
                trajectory, future = self._waiting[0]  # as long as it is there, no other thread pushes
                try:
                    if not self.client.has_room(trajectory):
                        await asyncio.sleep(_CREDIT_POLL_S)
                        continue
                    self.client.push(trajectory).add_done_callback(partial(_pass_on, future))
                except Exception as error:  # whatever a caller has put into a trajectory
                    settle(future, error)
                self._waiting.popleft()
        except asyncio.CancelledError:
            while self._waiting:
                closed = BufferUnavailable(f"the client of {self.client.address} was closed")
                settle(self._waiting.popleft()[1], closed)

    async def draw(self, step: int, version: int, incarnation: int, plan: dict[int, int], wait_s: float) -> Draw:
        """This shard's part of a step, however long it takes."""
        async with self._order:
            pass  # it may have to learn first what it missed
        num_groups, self.waiting_for = plan[self.number], ""
        while True:
            asked = self._answer(lambda client: client.draw(step, version, incarnation, num_groups, wait_s, plan))
            draw = await self._start(asked, due_in_s=wait_s)
            self.hear(draw.ledger, draw.fidelity)
            if draw.ready:
                return draw
            self.waiting_for = draw.waiting_for

    def hear(self, ledger: dict[str, int], fidelity: LengthFidelity) -> None:
        if ledger:
            self.ledger, self.fidelity = ledger, fidelity

    async def _in_turn(self, request: Request[R]) -> R:
        async with self._order:
            return await self._answer(request)

    async def _answer(self, request: Request[R]) -> R:
        try:
            return await asyncio.wrap_future(request(self.client))
        except BufferUnavailable as error:
            raise BufferUnavailable(f"shard {self.number}: {error}") from error
        except BufferRefused as error:
            raise BufferRefused(f"shard {self.number}: {error}") from error

    def _start(self, answer: Any, *, due_in_s: float = 0.0) -> asyncio.Task[Any]:  # noqa: ANN401 -- a coroutine
        task = asyncio.get_running_loop().create_task(answer)
        self._unanswered[task] = time.monotonic() + due_in_s
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._unanswered[task]
        if not task.cancelled():
            task.exception()  # its caller gets it; here it is only marked as seen


class Shards(list[Shard]):
    """All shards, in their order."""

    def __init__(self, shards: Iterable[Shard], patience_s: float) -> None:
        """Take all shards in their order, with the patience that each of them has."""
        super().__init__(shards)
        self._patience_s = patience_s
        self.late_error: BaseException | None = None
        """The first error of an answer that nobody waited for any more."""

    def owner(self, number: int) -> Shard:
        """The shard of a lease, group or record."""
        return self[number % len(self)]

    @property
    def ledger(self) -> dict[str, int]:
        """The newest counts of all shards together."""
        return _added([shard.ledger for shard in self])

    @property
    def fidelity(self) -> LengthFidelity:
        return LengthFidelity.worst(shard.fidelity for shard in self)

    async def answered(self, tasks: Mapping[int, asyncio.Task[R]]) -> dict[int, R]:
        """The answers of the shards that are not silent; while all shards are, wait for them.

        What comes later is not lost: an error of it is raised by the next call.
        """
        while pending := [number for number, task in tasks.items() if not task.done()]:
            lefts = [left for number in pending if (left := self[number].patience_left_s) > 0]
            if not lefts and not all(shard.is_silent for shard in self):
                break
            await asyncio.wait(
                [tasks[number] for number in pending],
                timeout=min(lefts, default=self._patience_s),
                return_when=asyncio.FIRST_COMPLETED,
            )
        for task in tasks.values():
            if not task.done():
                task.add_done_callback(self._came_late)
        return {number: task.result() for number, task in tasks.items() if task.done()}

    def _came_late(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.late_error = self.late_error or error


def _pass_on(future: Future[R], answered: Future[R]) -> None:
    settle(future, answered.exception() or answered.result())


def sum_of(parts: Sequence[p.Status], silent: list[int]) -> p.Status:
    tables = ("ledger", "quarantined_by_reason", "failed_by_reason", "spent_s")
    counts = ("num_ready_groups", "num_drawn_groups", "num_records", "size_bytes", "num_damaged")
    sums: dict[str, Any] = {name: _added([getattr(part, name) for part in parts]) for name in tables}
    nonsense: dict[str, p.Nonsense] = {}
    for sender, told in ((sender, told) for part in parts for sender, told in part.nonsense.items()):
        known = nonsense.get(sender, p.Nonsense(0, told.first))
        nonsense[sender] = p.Nonsense(known.count + told.count, known.first)
    sums |= {name: sum(getattr(part, name) for part in parts) for name in counts}
    return p.Status(
        **sums,
        newest=max(part.newest for part in parts),
        version=max(part.version for part in parts),
        draining=any(part.draining for part in parts),
        fidelity=LengthFidelity.worst(part.fidelity for part in parts),
        fidelity_alarm=any(part.fidelity_alarm for part in parts),
        nonsense=nonsense,
        silent_shards=silent,
    )


def _added(counts: Sequence[Mapping[str, N]]) -> dict[str, N]:
    names = dict.fromkeys(name for each in counts for name in each)
    return {name: sum(each[name] for each in counts if name in each) for name in names}
