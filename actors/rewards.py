"""Scoring completions: a reward function that fails is an error that is counted, never a reward of 0.

Functions have TRL's shape, f(prompts, completions, **columns) -> one number or None per sample. Several are summed; the
parts are kept by function name. None means that a function does not apply; a sample to which none applies has no reward
and is filtered. Each runs in processes of its own (`actors.reward_process`), of which there are several only if calls
wait. A function that raises, takes too long, ends its process or returns something else is logged with its prompt and
tried again; then the sample is given up as `RewardFailed`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from actors.reward_process import CallFailed, RewardProcess, Value
from actors.tasks.code import AT_ONCE
from actors.tasks.config import Classifier, CodeRule, Judge
from actors.tasks.task import Problem, RewardFunction, TaskError
from buffer.ledger import REWARD_FAILED

_log = logging.getLogger(__name__)

RETRIES = 1
"""Retries of what failed: one call for each sample of a failed call, so that one bad sample costs no other its
reward, and one for samples that failed by themselves."""
SLOW_S = 3.0
"""An actor reports that it waits for a call that is open for longer."""
_MAX_BATCH = 32
_GRACE_S = 10.0
"""Beyond the limit of a reward that keeps one of its own."""
_SHOWN_CHARACTERS = 200
_PATIENCE_S = 0.1
"""Seconds that calls wait for a busy process before another starts, so that a cheap function has one."""

Start = Callable[[RewardFunction, float], Awaitable[RewardProcess]]


class RewardFailed(Exception):
    """A reward function did not deliver. The ledger counts by the text, so it names no sample."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{REWARD_FAILED}: {name}: {why}")


@dataclass(frozen=True, slots=True)
class FailingReward:
    """A function that has scored no sample since it began to fail, each time by the same reason."""

    name: str
    why: str
    """The beginning of the last failure, with its details; so are the texts below."""
    num_samples: int
    for_s: float
    timeout_s: float
    """The limit of a call, if calls take longer; else 0."""
    prompt: str
    completion: str


@dataclass(frozen=True)
class ScorerLimits:
    num_processes: int
    """Most processes, and so calls at once."""
    timeout_s: float
    """A call that takes longer has failed, and its process is ended."""
    start_timeout_s: float
    """For loading the function."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The reward of one completion and each function's part."""

    reward: float | None
    parts: dict[str, float | None]


class Scorer:
    """Scores one completion at a time; those that complete together share a call."""

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        limits: ScorerLimits,
        *,
        retries: int = RETRIES,
        start: Start = RewardProcess.start,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert functions, "a task has at least one reward function"
        self._clock = clock
        self._lanes = [_Lane(function, limits, retries, start, clock) for function in functions]

    async def start(self) -> None:
        """Start a process of each function before anything is generated; TaskError if one cannot be loaded."""
        try:
            await asyncio.gather(*(lane.start() for lane in self._lanes))
        except BaseException:
            await self.close()
            raise

    @property
    def waits_for(self) -> tuple[str, float] | None:
        """The function whose call is open for longest, and its seconds; None if none is slow."""
        oldest = ((lane.function.name, self._clock() - lane.open_since_s) for lane in self._lanes)
        name, open_s = max(oldest, key=lambda each: each[1])
        return (name, open_s) if open_s >= SLOW_S else None

    @property
    def failing(self) -> list[FailingReward]:
        """The functions that gave up on their last sample."""
        return [failing for lane in self._lanes if (failing := lane.failing) is not None]

    async def score(self, problem: Problem, completion: str) -> Scored:
        """Return the reward of one completion; RewardFailed if a function failed on it, and again on every retry."""
        outcomes = await asyncio.gather(
            *(lane.value(problem, completion) for lane in self._lanes), return_exceptions=True
        )
        # all have ended before one failure is raised, so that none is left without a reader
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        values = cast("list[float | None]", outcomes)
        given = [value for value in values if value is not None]
        parts = {lane.function.name: value for lane, value in zip(self._lanes, values, strict=True)}
        try:
            return Scored(math.fsum(given) if given else None, parts)
        except OverflowError:
            raise RewardFailed(", ".join(parts), "their sum is not finite") from None

    async def close(self) -> None:
        await asyncio.gather(*(lane.close() for lane in self._lanes))


@dataclass(slots=True)
class _Waiting:
    problem: Problem
    completion: str
    value: asyncio.Future[float | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class _Lane:
    """The calls of one function: batches what arrives in one turn of the event loop, isolates what fails."""

    def __init__(
        self, function: RewardFunction, limits: ScorerLimits, retries: int, start: Start, clock: Callable[[], float]
    ) -> None:
        self.function = function
        self._limits = limits
        self._retries = retries
        self._start = start
        self._clock = clock
        self._waiting: list[_Waiting] = []
        self._num_new = 0
        """Of those, since the last turn of the event loop."""
        self._tasks: set[asyncio.Task[None]] = set()
        # a second process would hold the model a second time
        self._slots = asyncio.Semaphore(1 if isinstance(function.named, Classifier) else limits.num_processes)
        self._timeout_s = _call_limit_s(function, limits)
        self._callers: set[RewardProcess] = set()
        self._idle: asyncio.LifoQueue[RewardProcess] = asyncio.LifoQueue()
        self._open: dict[int, float] = {}
        """Calls -> since when, oldest first."""
        self._numbers = itertools.count()
        self._num_failures = 0
        self._failing: FailingReward | None = None
        self._failing_by, self._failing_since_s = "", 0.0
        self._is_starting = False
        self._is_closed = False

    async def start(self) -> None:
        try:
            self._idle.put_nowait(await self._another())
        except CallFailed as failure:
            raise TaskError(f"reward {self.function.name}: {failure}") from failure

    @property
    def open_since_s(self) -> float:
        """When the oldest open call began; now if none is open."""
        return next(iter(self._open.values()), self._clock())

    @property
    def failing(self) -> FailingReward | None:
        """How it fails, if it gave up on the last sample."""
        failing = self._failing
        return None if failing is None else replace(failing, for_s=self._clock() - self._failing_since_s)

    async def value(self, problem: Problem, completion: str) -> float | None:
        waiting = _Waiting(problem, completion)
        self._waiting.append(waiting)
        self._num_new += 1
        if self._num_new == 1:
            asyncio.get_running_loop().call_soon(self._flush)
        return await waiting.value

    async def close(self) -> None:
        self._is_closed = True
        for one in self._waiting:
            one.value.cancel()
        for task in self._tasks:
            task.cancel()
        callers, self._callers = self._callers, set()
        await asyncio.gather(*self._tasks, *(caller.end() for caller in callers), return_exceptions=True)

    def _flush(self) -> None:
        for _ in range(0, self._num_new, _MAX_BATCH):
            task = asyncio.create_task(self._score())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._num_new = 0

    async def _score(self) -> None:
        """Score what waits once a process is free: while all are busy, later samples join the call."""
        batch: list[_Waiting] = []
        try:
            async with self._slots:
                batch, self._waiting = self._waiting[:_MAX_BATCH], self._waiting[_MAX_BATCH:]
                if not batch:
                    return
                values = await self._tried(batch)
            await self._settle(batch, values, 0, self._retries)
        finally:
            # nothing may wait forever, and only `close` may look like a cancellation
            for one in batch:
                if self._is_closed:
                    one.value.cancel()
                elif not one.value.done():
                    one.value.set_exception(RewardFailed(self.function.name, "its scoring ended early"))

    async def _score_again(self, batch: Sequence[_Waiting], attempt: int, retries: int) -> None:
        async with self._slots:
            values = await self._tried(batch)
        await self._settle(batch, values, attempt, retries)

    async def _settle(
        self, batch: Sequence[_Waiting], values: list[Value] | CallFailed, attempt: int, retries: int
    ) -> None:
        """Hand out the values of a call; samples that have none by their own fault share the next one."""
        if isinstance(values, CallFailed) and len(batch) > 1:
            _log.warning("reward %s: %s; scoring %d samples one by one", self.function.name, values, len(batch))
            # what costs a process, and often a whole timeout, is tried alone only once
            retries = attempt if values.lost else retries
            await asyncio.gather(*(self._score_again([one], attempt, retries) for one in batch))
            return
        again = []
        for one, value in zip(batch, [values] if isinstance(values, CallFailed) else values, strict=True):
            if not isinstance(value, CallFailed):
                self._resolve(one, value)
                continue
            most = attempt if value.is_timeout else retries  # a whole limit of time that the next ones wait for
            self._report(one, value, attempt, most)
            if attempt < most:
                again.append(one)
            else:
                self._give_up(one, value)
        if again:
            await self._score_again(again, attempt + 1, retries)

    async def _tried(self, batch: Sequence[_Waiting]) -> list[Value] | CallFailed:
        """Return each sample's value, or why the whole call failed."""
        number = next(self._numbers)
        self._open[number] = self._clock()
        try:
            return await self._call_of(await self._caller(), batch)
        except CallFailed as failure:
            return failure
        finally:
            del self._open[number]

    async def _call_of(self, caller: RewardProcess, batch: Sequence[_Waiting]) -> list[Value]:
        is_lost = True  # also where the call is cancelled: it cannot be taken back
        limit_s = self._timeout_s
        try:
            async with asyncio.timeout(limit_s):
                values = await caller.call([one.problem for one in batch], [one.completion for one in batch])
            is_lost = False
        except TimeoutError:
            raise CallFailed(f"took longer than {limit_s:g} s", lost=True, is_timeout=True) from None
        except CallFailed as failure:
            is_lost = failure.lost
            raise
        else:
            return values
        finally:
            if is_lost:
                self._callers.discard(caller)
                await caller.end()
            else:
                self._idle.put_nowait(caller)

    async def _caller(self) -> RewardProcess:
        """Return an idle process, now or soon; else start another, one at a time, and take whichever is free first."""
        is_patient = bool(self._callers)
        while True:
            if self._idle.empty() and not (is_patient or self._is_starting):
                if not self._callers:
                    return await self._another()
                task = asyncio.create_task(self._one_more())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    caller = await self._idle.get()
            except TimeoutError:
                is_patient = False
                continue
            if caller.is_alive:
                return caller
            self._callers.discard(caller)
            await caller.end()

    async def _one_more(self) -> None:
        try:
            self._idle.put_nowait(await self._another())
        except CallFailed as failure:
            _log.warning("reward %s: one process more did not start: %s", self.function.name, failure)

    async def _another(self) -> RewardProcess:
        self._is_starting = True
        try:
            caller = await self._start(self.function, self._limits.start_timeout_s)
        finally:
            self._is_starting = False
        self._callers.add(caller)
        return caller

    def _resolve(self, one: _Waiting, value: float | None) -> None:
        self._failing = None
        if not one.value.done():  # the caller may have been cancelled
            one.value.set_result(value)

    def _give_up(self, one: _Waiting, failure: CallFailed) -> None:
        """Count a sample as failed, however often it was tried."""
        if not one.value.done():
            given_up = RewardFailed(self.function.name, failure.why)
            given_up.__cause__ = failure
            one.value.set_exception(given_up)
        before = self._failing
        if before is None or self._failing_by != failure.why:
            before, self._failing_by, self._failing_since_s = None, failure.why, self._clock()
        self._failing = FailingReward(
            name=self.function.name,
            why=str(failure)[:_SHOWN_CHARACTERS],
            num_samples=1 if before is None else before.num_samples + 1,
            for_s=0.0,
            timeout_s=self._timeout_s if failure.is_timeout else 0.0,
            prompt=one.problem.text[:_SHOWN_CHARACTERS],
            completion=one.completion[:_SHOWN_CHARACTERS],
        )

    def _report(self, one: _Waiting, failure: CallFailed, attempt: int, retries: int) -> None:
        self._num_failures += 1
        # A broken function fails on every sample: enough is logged to mend it, not one line per sample.
        if self._num_failures <= 20 or self._num_failures % 1000 == 0:
            _log.error(
                "reward %s failed (try %d of %d, failure %d): %s\n  prompt: %r\n  completion: %r\n%s",
                self.function.name,
                attempt + 1,
                retries + 1,
                self._num_failures,
                failure,
                one.problem.text[:500],
                one.completion[:500],
                failure.trace,
            )


def _call_limit_s(function: RewardFunction, limits: ScorerLimits) -> float:
    """Return the limit of a call: above what a reward itself allows each sample, so that a slow one costs no other."""
    named = function.named
    if isinstance(named, Judge):
        return named.timeout_s + _GRACE_S
    if isinstance(named, CodeRule):
        return _MAX_BATCH / AT_ONCE * named.timeout_s + _GRACE_S
    return limits.timeout_s
