"""Scoring completions: a reward function that fails is an error that is counted, never a reward of 0.

Functions have TRL's shape, f(prompts, completions, **columns) -> one number or None per sample.
Several are summed; the parts are kept by function name. None means that a function does not
apply; a sample to which none applies has no reward and is filtered. A function that raises, takes
too long, or returns something else is logged with its prompt and tried again; then the sample is
given up as `RewardFailed`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import cast

from actors.tasks.task import Problem, RewardFunction, Scores
from buffer.ledger import REWARD_FAILED
from common.threads import DaemonThreads, ThreadsExhausted

_log = logging.getLogger(__name__)

RETRIES = 1
"""How often a call that failed is tried again, for each of its samples by itself: one bad sample then costs no other
its reward, and a function that fails twice on a sample is taken to fail always."""
_MAX_BATCH = 32
_MAX_CALLS = 4
"""Calls of one function at once."""
_MAX_STUCK_CALLS = 16
"""Timed-out calls of one sync function that may still hold a thread."""


class RewardFailed(Exception):
    """A reward function did not deliver. Its text is what the ledger counts by, so it names no sample."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{REWARD_FAILED}: {name}: {why}")


class _CallFailed(Exception):
    def __init__(self, why: str, detail: str = "") -> None:
        super().__init__(f"{why}: {detail}" if detail else why)
        self.why = why


@dataclass(frozen=True, slots=True)
class Scored:
    """The reward of one completion and what each function gave to it."""

    reward: float | None
    parts: dict[str, float | None]


class Scorer:
    """Scores one completion at a time; those that complete together share a call."""

    def __init__(self, functions: Sequence[RewardFunction], *, retries: int = RETRIES, timeout_s: float) -> None:
        """Prepare one lane per function; a call that takes longer than `timeout_s` has failed."""
        assert functions, "a task has at least one reward function"
        self._lanes = [_Lane(function, retries, timeout_s) for function in functions]

    async def score(self, problem: Problem, completion: str) -> Scored:
        """Reward of one completion.

        Raises:
            RewardFailed: a function failed on it, and again on every retry.
        """
        if len(self._lanes) == 1:
            values = [await self._lanes[0].value(problem, completion)]
        else:
            outcomes = await asyncio.gather(
                *(lane.value(problem, completion) for lane in self._lanes), return_exceptions=True
            )
            # All are waited for before one failure is raised, so that none is left without a reader.
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
            values = cast("list[float | None]", outcomes)
        given = [value for value in values if value is not None]
        parts = {lane.function.name: value for lane, value in zip(self._lanes, values, strict=True)}
        return Scored(math.fsum(given) if given else None, parts)

    def close(self) -> None:
        """Stop scoring. A call that blocks is left to its daemon thread."""
        for lane in self._lanes:
            lane.close()


@dataclass(slots=True)
class _Waiting:
    problem: Problem
    completion: str
    value: asyncio.Future[float | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class _Lane:
    """The calls of one function: batches what arrives in one turn of the event loop, isolates what fails."""

    def __init__(self, function: RewardFunction, retries: int, timeout_s: float) -> None:
        self.function = function
        self._retries = retries
        self._timeout_s = timeout_s
        self._waiting: list[_Waiting] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_MAX_CALLS)
        self._threads = DaemonThreads(f"reward-{function.name}", _MAX_CALLS + _MAX_STUCK_CALLS)
        self._num_failures = 0
        self._is_closed = False

    async def value(self, problem: Problem, completion: str) -> float | None:
        waiting = _Waiting(problem, completion)
        self._waiting.append(waiting)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._flush)
        return await waiting.value

    def close(self) -> None:
        self._is_closed = True
        for one in self._waiting:
            one.value.cancel()
        for task in self._tasks:
            task.cancel()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for first in range(0, len(waiting), _MAX_BATCH):
            task = asyncio.create_task(self._score(waiting[first : first + _MAX_BATCH]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _score(self, batch: Sequence[_Waiting]) -> None:
        try:
            await self._score_batch(batch)
        finally:
            # However it ended, nobody may go on waiting; and only `close` may look like being cancelled.
            for one in batch:
                if self._is_closed:
                    one.value.cancel()
                elif not one.value.done():
                    one.value.set_exception(RewardFailed(self.function.name, "its scoring ended early"))

    async def _score_batch(self, batch: Sequence[_Waiting]) -> None:
        if len(batch) == 1:
            await self._score_alone(batch[0])
            return
        try:
            values = await self._call(batch)
        except _CallFailed as failure:
            # Which sample is to blame is not known; alone, each only answers for itself.
            _log.warning("reward %s: %s; scoring %d samples one by one", self.function.name, failure, len(batch))
            await asyncio.gather(*(self._score_alone(one) for one in batch))
        else:
            for one, value in zip(batch, values, strict=True):
                _resolve(one.value, value)

    async def _score_alone(self, one: _Waiting) -> None:
        for attempt in range(self._retries + 1):
            try:
                (value,) = await self._call([one])
            except _CallFailed as failure:
                self._report(one, failure, attempt)
                given_up = RewardFailed(self.function.name, failure.why)
                given_up.__cause__ = failure
            else:
                _resolve(one.value, value)
                return
        if not one.value.done():
            one.value.set_exception(given_up)

    async def _call(self, batch: Sequence[_Waiting]) -> Scores:
        problems = [one.problem for one in batch]
        completions = [one.completion for one in batch]
        async with self._slots:
            deadline = asyncio.timeout(self._timeout_s)
            try:
                async with deadline:
                    if self.function.is_async:
                        values = await cast("Awaitable[Scores]", self.function.call(problems, completions))
                    else:
                        values = cast("Scores", await self._threads.run(self.function.call, problems, completions))
                return _checked(values, len(batch))  # calls methods of what the user's function returned
            except _CallFailed:
                raise
            except ThreadsExhausted as error:
                raise _CallFailed("earlier calls never returned", str(error)) from error
            except asyncio.CancelledError as error:
                if _is_cancelled():
                    raise
                raise _CallFailed("CancelledError", "of something that the function itself waits for") from error
            except (Exception, SystemExit) as error:  # the function is the user's: it may raise anything
                if deadline.expired():
                    raise _CallFailed(f"took longer than {self._timeout_s:g} s") from error
                raise _CallFailed(type(error).__name__, str(error)) from error

    def _report(self, one: _Waiting, failure: _CallFailed, attempt: int) -> None:
        self._num_failures += 1
        # A broken function fails on every sample: enough is logged to mend it, not one line per sample.
        if self._num_failures <= 20 or self._num_failures % 1000 == 0:
            _log.error(
                "reward %s failed (try %d of %d, failure %d): %s\n  prompt: %r\n  completion: %r",
                self.function.name,
                attempt + 1,
                self._retries + 1,
                self._num_failures,
                failure,
                one.problem.text[:500],
                one.completion[:500],
                exc_info=failure.__cause__,
            )


def _is_cancelled() -> bool:
    """Did somebody cancel this task, or does a CancelledError only pass through it?"""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _resolve(future: asyncio.Future[float | None], value: float | None) -> None:
    if not future.done():  # the caller may have been cancelled
        future.set_result(value)


def _checked(values: object, num_samples: int) -> list[float | None]:
    """Exactly one finite number or None per sample; anything else is a _CallFailed."""
    if hasattr(values, "tolist"):  # numpy arrays and torch tensors
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise _CallFailed("returned no list", f"but a {type(values).__name__}")
    if len(values) != num_samples:
        raise _CallFailed("wrong number of values", f"{len(values)} for {num_samples} samples")
    checked: list[float | None] = []
    for value in values:
        if value is None:
            checked.append(None)
            continue
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise _CallFailed("returned no number", repr(value)) from error
        if not math.isfinite(number):
            raise _CallFailed("returned a value that is not finite", repr(value))
        checked.append(number)
    return checked
