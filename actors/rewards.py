"""Scoring of completions: a failure of a reward function is counted as an error, never scored 0.

Functions have TRL's signature, f(prompts, completions, **columns), and return one number or None per sample. The
weighted values of several functions are summed, and the values are kept by function name. None means that a function
does not apply. If no function applies, the sample has no reward and is filtered. Each function runs in its own
`RewardProcess`; another process starts only if calls wait. If a function raises, times out, ends its process or returns
an invalid value, the call is logged with its prompt and retried. If the retry fails too, `RewardFailed` is raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from leeway.actors.reward_process import CallFailed, RewardProcess, Value
from leeway.actors.tasks.code import MAX_CONCURRENT
from leeway.actors.tasks.config import Classifier, CodeRule, Judge
from leeway.actors.tasks.task import Problem, RewardFunction, Sampled, TaskError
from leeway.buffer.ledger import REWARD_FAILED
from leeway.common.run import LOGGED

_log = logging.getLogger(__name__)

RETRIES = 1
"""Number of retries of a failed sample. If a call with several samples fails, each sample is first scored in a separate
call, so that only bad samples fail. Samples that failed individually share the next call."""
SLOW_S = 3.0
"""Seconds after which an actor reports that it waits for a call of a reward function."""
_MAX_BATCH = 32
_GRACE_S = 10.0
"""Seconds added to the timeout of a reward that enforces its own timeout."""
SHOWN_CHARACTERS = 200
"""Maximum number of characters of a prompt, a completion or a reason in a report."""
_PATIENCE_S = 0.1
"""Seconds that calls wait for a busy process before another process starts. A fast function needs one process only."""

Start = Callable[[RewardFunction, float], Awaitable[RewardProcess]]


class RewardFailed(Exception):
    """A reward function failed. The ledger counts failures by the message, which must not name a sample."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{REWARD_FAILED}: {name}: {why}")


@dataclass(frozen=True, slots=True)
class FailingReward:
    """A function that has failed on every sample since its first failure, always for one reason.

    If all functions return None for a sample, they fail together.
    """

    name: str
    why: str
    """Reason and details of the last failure, truncated, like `prompt` and `completion`."""
    num_samples: int
    for_s: float
    timeout_s: float
    """Timeout of a call in seconds if the last failure is a timeout; else 0."""
    prompt: str
    completion: str


@dataclass(frozen=True)
class ScorerLimits:
    num_processes: int
    """Maximum processes of a function, and thus maximum concurrent calls."""
    timeout_s: float
    """Timeout of a call in seconds; the process of a call that exceeds the timeout is killed."""
    start_timeout_s: float
    """Timeout for loading the function."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The reward of one completion, which is the weighted sum, and each function's value and logged values."""

    reward: float | None
    parts: dict[str, float | None]


class Scorer:
    """Scores one completion at a time; completions that arrive together share a call."""

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
        self._weights = functions[0].task.weights(function.name for function in functions)
        self._unscored: FailingReward | None = None
        """The newest samples, if no function applied to them."""

    async def start(self) -> None:
        """Start one process per function before generation begins; raise TaskError if a function cannot be loaded."""
        try:
            await asyncio.gather(*(lane.start() for lane in self._lanes))
        except BaseException:
            await self.close()
            raise

    @property
    def waits_for(self) -> tuple[str, float] | None:
        """Return the function with the oldest open call, and the call's age in seconds; None if no call is slow."""
        oldest = ((lane.function.name, self._clock() - lane.open_since_s) for lane in self._lanes)
        name, open_s = max(oldest, key=lambda each: each[1])
        return (name, open_s) if open_s >= SLOW_S else None

    @property
    def failing(self) -> list[FailingReward]:
        """Return the functions that failed on their last sample, or returned None."""
        return [each for each in (*(lane.failing for lane in self._lanes), self._unscored) if each is not None]

    async def score(self, problem: Problem, completion: str, sampled: Sampled | None = None) -> Scored:
        """Return the reward of one completion; raise RewardFailed if a function still fails after its retries."""
        logged: dict[str, float | None] = {}
        outcomes = await asyncio.gather(
            *(lane.value(problem, completion, sampled, logged) for lane in self._lanes), return_exceptions=True
        )
        # wait until all calls have ended before raising a failure, so that asyncio logs no unretrieved exception
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        values = cast("list[float | None]", outcomes)
        parts = {lane.function.name: value for lane, value in zip(self._lanes, values, strict=True)}
        given = [self._weights[name] * value for name, value in parts.items() if value is not None]
        self._unscored = None if given else self._one_more_unscored(problem, completion)
        with contextlib.suppress(OverflowError, ValueError):  # ValueError: infinities of both signs
            if math.isfinite(total := math.fsum(given)):
                return Scored(total if given else None, parts | logged)
        raise RewardFailed(", ".join(parts), "the sum of the rewards is not finite")

    def _one_more_unscored(self, problem: Problem, completion: str) -> FailingReward:
        num = 1 + (self._unscored.num_samples if self._unscored else 0)
        shown = problem.text[:SHOWN_CHARACTERS], completion[:SHOWN_CHARACTERS]
        return FailingReward(", ".join(self._weights), "None instead of a reward", num, 0.0, 0.0, *shown)

    async def close(self) -> None:
        await asyncio.gather(*(lane.close() for lane in self._lanes))


@dataclass(slots=True)
class _Waiting:
    problem: Problem
    completion: str
    sampled: Sampled | None
    logged: dict[str, float | None]
    value: asyncio.Future[float | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class _Lane:
    """Calls one function: batches samples that arrive in one turn of the event loop, and isolates failing samples."""

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
        """Samples added since the last turn of the event loop."""
        self._tasks: set[asyncio.Task[None]] = set()
        # a second process would load a second copy of the model
        self._slots = asyncio.Semaphore(1 if isinstance(function.named, Classifier) else limits.num_processes)
        self._timeout_s = _call_limit_s(function, limits)
        self._processes: set[RewardProcess] = set()
        self._idle: asyncio.LifoQueue[RewardProcess] = asyncio.LifoQueue()
        self._open: dict[int, float] = {}
        """Maps the number of each open call to its start time, oldest call first."""
        self._numbers = itertools.count()
        self._num_failures = 0
        self._failing: FailingReward | None = None
        self._failing_by, self._failing_since_s = "", 0.0
        self._is_starting = False
        self._is_closed = False

    async def start(self) -> None:
        try:
            self._idle.put_nowait(await self._start_process())
        except CallFailed as failure:
            raise TaskError(f"reward {self.function.name}: {failure}") from failure

    @property
    def open_since_s(self) -> float:
        """Return the start time of the oldest open call; the present time if no call is open."""
        return next(iter(self._open.values()), self._clock())

    @property
    def failing(self) -> FailingReward | None:
        """Return the failure if the last sample failed, else None."""
        failing = self._failing
        return None if failing is None else replace(failing, for_s=self._clock() - self._failing_since_s)

    async def value(
        self, problem: Problem, completion: str, sampled: Sampled | None, logged: dict[str, float | None]
    ) -> float | None:
        if not self.function.applies_to(problem):
            return None
        waiting = _Waiting(problem, completion, sampled, logged)
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
        processes, self._processes = self._processes, set()
        await asyncio.gather(*self._tasks, *(process.end() for process in processes), return_exceptions=True)

    def _flush(self) -> None:
        for _ in range(0, self._num_new, _MAX_BATCH):
            task = asyncio.create_task(self._score())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._num_new = 0

    async def _score(self) -> None:
        """Score waiting samples once a process is free. Samples that arrive before that time join the call."""
        batch: list[_Waiting] = []
        try:
            async with self._slots:
                batch, self._waiting = self._waiting[:_MAX_BATCH], self._waiting[_MAX_BATCH:]
                if not batch:
                    return
                values = await self._try_call(batch)
            await self._deliver(batch, values, 0, self._retries)
        finally:
            # no caller may wait forever; `close` cancels the waiting callers, other exits raise an error in them
            for one in batch:
                if self._is_closed:
                    one.value.cancel()
                elif not one.value.done():
                    one.value.set_exception(RewardFailed(self.function.name, "its scoring ended early"))

    async def _score_again(self, batch: Sequence[_Waiting], attempt: int, retries: int) -> None:
        async with self._slots:
            values = await self._try_call(batch)
        await self._deliver(batch, values, attempt, retries)

    async def _deliver(
        self, batch: Sequence[_Waiting], values: list[Value] | CallFailed, attempt: int, retries: int
    ) -> None:
        """Deliver the values of a call; samples that failed individually share the next call."""
        if isinstance(values, CallFailed) and len(batch) > 1:
            _log.warning("reward %s: %s; retrying %d samples one by one", self.function.name, values, len(batch))
            # if the failure ended the process, often after a full timeout, samples are retried only once
            retries = attempt if values.lost else retries
            await asyncio.gather(*(self._score_again([one], attempt, retries) for one in batch))
            return
        again = []
        for one, value in zip(batch, [values] if isinstance(values, CallFailed) else values, strict=True):
            if not isinstance(value, CallFailed):
                self._resolve(one, value)
                continue
            last = attempt if value.is_timeout else retries  # a retry would delay later samples by a full timeout
            self._report(one, value, attempt, last)
            if attempt < last:
                again.append(one)
            else:
                self._fail(one, value)
        if again:
            await self._score_again(again, attempt + 1, retries)

    async def _try_call(self, batch: Sequence[_Waiting]) -> list[Value] | CallFailed:
        """Return each sample's value, or the failure of the whole call."""
        number = next(self._numbers)
        self._open[number] = self._clock()
        try:
            return await self._call(await self._free_process(), batch)
        except CallFailed as failure:
            return failure
        finally:
            del self._open[number]

    async def _call(self, process: RewardProcess, batch: Sequence[_Waiting]) -> list[Value]:
        is_lost = True  # also if this task is cancelled, because a running call cannot be stopped
        limit_s = self._timeout_s
        try:
            async with asyncio.timeout(limit_s):
                problems, sampled = [one.problem for one in batch], [one.sampled for one in batch]
                values = await process.call(problems, [one.completion for one in batch], sampled)
            is_lost = False
            for one in batch:
                one.logged.update({f"{LOGGED}{name}": value for name, value in process.logged.items()})
        except TimeoutError:
            raise CallFailed(f"took longer than {limit_s:g} s", lost=True, is_timeout=True) from None
        except CallFailed as failure:
            is_lost = failure.lost
            raise
        else:
            return values
        finally:
            if is_lost:
                self._processes.discard(process)
                await process.end()
            else:
                self._idle.put_nowait(process)

    async def _free_process(self) -> RewardProcess:
        """Return the first idle process; if no process is idle within `_PATIENCE_S`, start another process."""
        is_patient = bool(self._processes)
        while True:
            if self._idle.empty() and not (is_patient or self._is_starting):
                if not self._processes:
                    return await self._start_process()
                task = asyncio.create_task(self._add_process())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    process = await self._idle.get()
            except TimeoutError:
                is_patient = False
                continue
            if process.is_alive:
                return process
            self._processes.discard(process)
            await process.end()

    async def _add_process(self) -> None:
        try:
            self._idle.put_nowait(await self._start_process())
        except CallFailed as failure:
            _log.warning("reward %s: another process did not start: %s", self.function.name, failure)

    async def _start_process(self) -> RewardProcess:
        self._is_starting = True
        try:
            process = await self._start(self.function, self._limits.start_timeout_s)
        finally:
            self._is_starting = False
        self._processes.add(process)
        return process

    def _resolve(self, one: _Waiting, value: float | None) -> None:
        self._failing = None
        if not one.value.done():  # the caller may have been cancelled
            one.value.set_result(value)

    def _fail(self, one: _Waiting, failure: CallFailed) -> None:
        """Fail a sample, and count one failure regardless of the number of retries."""
        if not one.value.done():
            error = RewardFailed(self.function.name, failure.why)
            error.__cause__ = failure
            one.value.set_exception(error)
        before = self._failing
        if before is None or self._failing_by != failure.why:
            before, self._failing_by, self._failing_since_s = None, failure.why, self._clock()
        self._failing = FailingReward(
            name=self.function.name,
            why=str(failure)[:SHOWN_CHARACTERS],
            num_samples=1 if before is None else before.num_samples + 1,
            for_s=0.0,
            timeout_s=self._timeout_s if failure.is_timeout else 0.0,
            prompt=one.problem.text[:SHOWN_CHARACTERS],
            completion=one.completion[:SHOWN_CHARACTERS],
        )

    def _report(self, one: _Waiting, failure: CallFailed, attempt: int, retries: int) -> None:
        self._num_failures += 1
        # A broken function fails on every sample: log enough to fix it, not one line per sample.
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
    """Return a call's timeout, which exceeds the reward's own timeout per sample: only the slow sample then fails."""
    named = function.named
    if isinstance(named, Judge):
        return named.timeout_s + _GRACE_S
    if isinstance(named, CodeRule):
        return _MAX_BATCH / MAX_CONCURRENT * named.timeout_s + _GRACE_S
    return limits.timeout_s
