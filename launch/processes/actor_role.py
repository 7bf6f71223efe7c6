"""ActorRole: an actor in a process of its own, which leaves in order at SIGTERM.

    calls of the supervisor:  start -> run, report, evaluate -> stop
    SIGTERM, at any time:     as `stop`; `start`, `run` and `evaluate` raise `ToldToEnd`; the process ends

Python installs handlers in the main thread alone, where Ray's loop and its own handler are. So the process is born with
the signal blocked in all threads (`placement.spawn`), and one thread takes it from the kernel.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Awaitable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeVar

from ray.exceptions import RayTaskError

from actors.config import ActorsConfig, ActorSections
from actors.report import ActorReport, EvalRequest, EvalResult, actor_name
from common.process import uncollected
from common.run import RunContext
from launch.processes.role_process import Role

GOODBYE_S = 15.0
"""Grace period of an actor that leaves before it is killed."""
_ANSWER_S = 1.0
"""Grace period before exit, so that the final reply is sent."""

R = TypeVar("R")

_log = logging.getLogger(__name__)


class ToldToEnd(RuntimeError):
    """An actor got SIGTERM, and has let go of what it held."""

    def __init__(self, num_handed_on: int, num_tokens_lost: int) -> None:
        super().__init__(num_handed_on, num_tokens_lost)
        self.num_handed_on = num_handed_on
        self.num_tokens_lost = num_tokens_lost

    def __str__(self) -> str:
        samples = f"{self.num_handed_on} sample{'' if self.num_handed_on == 1 else 's'}"
        lost = f", {self.num_tokens_lost:,} tokens lost" if self.num_tokens_lost else ""
        return f"left by SIGTERM, {samples} handed on{lost}"


def told_to_end(error: Exception | None) -> ToldToEnd | None:
    """Return the order if a call to an actor ended because of one."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, ToldToEnd) else None


class ActorRole(Role):
    """Hosts one actor and its engine. Its calls are coroutines, so that they interleave."""

    _work: asyncio.Task[None] | None = None
    _stopping: asyncio.Task[None] | None = None
    _leaving: asyncio.Task[None] | None = None

    def __init__(self, log: Path, config: ActorsConfig) -> None:
        """Load what an engine of this config needs, the longest part of a start."""
        super().__init__(log)
        _start_resource_tracker()
        with uncollected():
            import actors.loop  # noqa: F401 -- for `start`
            from actors.engine_setup import load_engine

            load_engine(config)

    async def start(self, context: RunContext[ActorSections], number: int, pool: str) -> None:
        """Start the engine and greet the buffer; ToldToEnd on SIGTERM, once the engine is up."""
        from actors.loop import ActorLoop

        self._name = actor_name(number)
        self._loop = ActorLoop(context, number, pool)
        self._events = asyncio.get_running_loop()
        self._told: asyncio.Future[ToldToEnd] = self._events.create_future()
        threading.Thread(target=self._hear_sigterm, name="sigterm", daemon=True).start()
        await self._unless_told(self._loop.start())

    async def run(self) -> None:
        """Generate until the run drains; a second call waits for the same work. ToldToEnd on SIGTERM."""
        if self._work is None:
            self._work = asyncio.create_task(self._loop.run())
        await self._unless_told(self._work)

    async def report(self) -> ActorReport:
        return self._loop.report()

    async def evaluate(self, request: EvalRequest) -> EvalResult:
        """Return held-out accuracy of a share of the problems at one version; ToldToEnd on SIGTERM."""
        return await self._unless_told(self._loop.evaluate(request))

    async def stop(self) -> None:
        """End the engine, once what is held is handed on."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._loop.stop())
        await asyncio.shield(self._stopping)

    # --- SIGTERM ----------------------------------------------------------------------------------

    def _hear_sigterm(self) -> None:
        signal.sigwait({signal.SIGTERM})
        self._events.call_soon_threadsafe(self._begin_to_leave)

    def _begin_to_leave(self) -> None:
        self._leaving = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        _log.warning("%s is told to end by SIGTERM", self._name)
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self.stop()
        except Exception as error:
            _log.exception("%s did not end in order; what it has not handed on is made anew: %r", self._name, error)
        told = ToldToEnd(*self._loop.goodbye)
        _log.warning("%s %s", self._name, told)
        self._told.set_result(told)
        self._events.call_later(_ANSWER_S, os._exit, 0)

    async def _unless_told(self, work: Awaitable[R]) -> R:
        """Return the result of the work, unless SIGTERM came: then how it ends is no failure."""
        task = asyncio.ensure_future(work)
        either: list[asyncio.Future[Any]] = [task, self._told]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._leaving is None:
            return await task
        raise await asyncio.shield(self._told)


def _start_resource_tracker() -> None:
    """In a thread that ends: its starter receives SIGTERM from then on."""
    thread = threading.Thread(target=resource_tracker.ensure_running, name="resource-tracker")
    thread.start()
    thread.join()
