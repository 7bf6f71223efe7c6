"""ActorRole: an actor in its own process, which shuts down gracefully on SIGTERM.

    calls of the supervisor:  start -> run, report, evaluate -> stop
    SIGTERM, at any time:     runs `stop`; `start`, `run` and `evaluate` raise `Terminated`; the process exits

Python runs signal handlers only in the main thread, where Ray runs its own loop and handler. So the process starts with
SIGTERM blocked in all threads (`placement.spawn`), and one thread receives SIGTERM by `sigwait`.
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

from leeway.actors.config import ActorsConfig, ActorSections
from leeway.actors.report import ActorReport, EvalRequest, EvalResult, actor_name
from leeway.common.run import RunContext
from leeway.launch.processes.role_process import Role

SHUTDOWN_GRACE_S = 15.0
"""Seconds that an actor has to shut down before it is killed."""
_REPLY_GRACE_S = 1.0
"""Seconds between the final reply and the exit, so that the reply is sent."""

R = TypeVar("R")

_log = logging.getLogger(__name__)


class Terminated(RuntimeError):
    """An actor received SIGTERM, and has released its leases."""

    def __init__(self, num_requeued: int, num_tokens_lost: int) -> None:
        super().__init__(num_requeued, num_tokens_lost)
        self.num_requeued = num_requeued
        self.num_tokens_lost = num_tokens_lost

    def __str__(self) -> str:
        samples = f"{self.num_requeued} sample{'' if self.num_requeued == 1 else 's'}"
        lost = f", {self.num_tokens_lost:,} tokens lost" if self.num_tokens_lost else ""
        return f"exited on SIGTERM, {samples} requeued{lost}"


def terminated(error: Exception | None) -> Terminated | None:
    """Return the `Terminated` that ended a call to an actor; None for any other outcome."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, Terminated) else None


class ActorRole(Role):
    """Hosts one actor and its engine. Its methods are coroutines, so that calls interleave."""

    _work: asyncio.Task[None] | None = None
    _stopping: asyncio.Task[None] | None = None
    _shutdown: asyncio.Task[None] | None = None

    def __init__(self, log: Path, config: ActorsConfig) -> None:
        """Load the libraries of an engine with `config`; this import is the longest part of the startup."""
        super().__init__(log)
        _start_resource_tracker()
        import leeway.actors.loop  # noqa: F401 -- for `start`
        from leeway.actors.engine_setup import load_engine

        load_engine(config)

    async def start(self, context: RunContext[ActorSections], number: int, pool: str) -> None:
        """Start the engine and connect to the buffer; raise Terminated on SIGTERM, after the engine has started."""
        from leeway.actors.loop import ActorLoop

        self._name = actor_name(number)
        self._loop = ActorLoop(context, number, pool)
        self._events = asyncio.get_running_loop()
        self._terminated: asyncio.Future[Terminated] = self._events.create_future()
        threading.Thread(target=self._await_sigterm, name="sigterm", daemon=True).start()
        await self._unless_terminated(self._loop.start())

    async def run(self) -> None:
        """Generate until the run drains; a repeated call waits for the same task. Raise Terminated on SIGTERM."""
        if self._work is None:
            self._work = asyncio.create_task(self._loop.run())
        await self._unless_terminated(self._work)

    async def report(self) -> ActorReport:
        return self._loop.report()

    async def evaluate(self, request: EvalRequest) -> EvalResult:
        """Return held-out accuracy on a shard of the problems at one version; raise Terminated on SIGTERM."""
        return await self._unless_terminated(self._loop.evaluate(request))

    async def stop(self) -> None:
        """Requeue the leased samples, then stop the engine. Idempotent."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._loop.stop())
        await asyncio.shield(self._stopping)

    # --- SIGTERM ----------------------------------------------------------------------------------

    def _await_sigterm(self) -> None:
        signal.sigwait({signal.SIGTERM})
        self._events.call_soon_threadsafe(self._start_shutdown)

    def _start_shutdown(self) -> None:
        self._shutdown = asyncio.create_task(self._shut_down())

    async def _shut_down(self) -> None:
        _log.warning("%s received SIGTERM and shuts down", self._name)
        try:
            async with asyncio.timeout(SHUTDOWN_GRACE_S):
                await self.stop()
        except Exception as error:
            _log.exception("%s failed to shut down cleanly (%r); lost samples are generated again", self._name, error)
        result = Terminated(*self._loop.drain_result)
        _log.warning("%s %s", self._name, result)
        self._terminated.set_result(result)
        self._events.call_later(_REPLY_GRACE_S, os._exit, 0)

    async def _unless_terminated(self, work: Awaitable[R]) -> R:
        """Return the result of `work`. After SIGTERM, ignore that result and raise Terminated."""
        task = asyncio.ensure_future(work)
        either: list[asyncio.Future[Any]] = [task, self._terminated]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._shutdown is None:
            return await task
        raise await asyncio.shield(self._terminated)


def _start_resource_tracker() -> None:
    """Start multiprocessing's resource tracker in its own thread, because the start unblocks SIGTERM in that thread."""
    thread = threading.Thread(target=resource_tracker.ensure_running, name="resource-tracker")
    thread.start()
    thread.join()
