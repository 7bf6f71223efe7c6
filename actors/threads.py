"""Threads for calls that may block for ever, such as a user's reward function or a hung file system."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class ThreadsExhausted(RuntimeError):
    """Every thread allowed is inside a call that has not returned."""


class DaemonThreads:
    """A pool whose threads never keep a process from ending.

    `ThreadPoolExecutor` joins its threads at exit, so one call that blocks would block shutdown.
    A call that is given up on (its caller stopped waiting) keeps its thread until it returns;
    the pool starts others meanwhile, up to its limit.
    """

    def __init__(self, name: str, max_threads: int) -> None:
        """Start empty; at most `max_threads` are busy, abandoned ones included."""
        self.name = name
        self.max_threads = max_threads
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_idle = 0
        self._num_alive = 0
        self._is_closed = False

    def submit(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run a call in a thread.

        Raises:
            ThreadsExhausted: `max_threads` calls are still running.
        """
        future: Future[R] = Future()
        with self._lock:
            # An idle thread is reserved here, so that a queued job always has a thread of its own.
            if self._num_idle:
                self._num_idle -= 1
            elif self._num_alive < self.max_threads:
                self._num_alive += 1
                name = f"{self.name}-{self._num_alive}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
            else:
                raise ThreadsExhausted(f"{self.max_threads} calls of {self.name} are still running")
        self._jobs.put((future, lambda: function(*args, **kwargs)))
        return future

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a call in a thread and wait for it; cancelling the wait abandons the call."""
        return await asyncio.wrap_future(self.submit(function, *args, **kwargs))

    def close(self) -> None:
        """Let idle threads end; busy ones end with their calls or with the process."""
        with self._lock:
            self._is_closed = True
            idle, self._num_idle = self._num_idle, 0
            self._num_alive -= idle
        for _ in range(idle):
            self._jobs.put(None)

    def _work(self) -> None:
        goes_on = True
        while goes_on and (job := self._jobs.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                goes_on = self._rest()
                continue
            try:
                result = call()
            except BaseException as error:  # belongs to the caller that waits for the future
                goes_on = self._rest()
                # SystemExit of a user's function must not end the event loop; StopIteration fits into no future of it
                is_carried = isinstance(error, Exception) and not isinstance(error, StopIteration)
                raised = error if is_carried else RuntimeError(f"raised {type(error).__name__}: {error}")
                future.set_exception(raised)
            else:
                goes_on = self._rest()
                future.set_result(result)

    def _rest(self) -> bool:
        """Be idle; false where the pool is closed, so that the thread is to end."""
        with self._lock:
            if self._is_closed:
                self._num_alive -= 1
            else:
                self._num_idle += 1
            return not self._is_closed
