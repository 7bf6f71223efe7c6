"""The Ray actors that host buffer, stages and actors: one process and one log file each.

A role is the thinnest possible shell. Ray places the process, carries these few calls, and ends the
process with the run; data and weights never pass through it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from common.rpc.auth import is_loopback
from launch.host import configure_logging, keep_files_private

if TYPE_CHECKING:  # each role imports what it hosts inside its own process only
    from actors.config import ActorSections
    from actors.report import ActorReport
    from actors.sample import EvalRequest, EvalResult
    from buffer.config import BufferConfig
    from common.rpc.auth import ServiceKeys
    from common.run import RunContext, RunFacts
    from learner.config import LearnerSections
    from learner.report import Report
    from weight_sync.config import WeightSyncConfig


def redirect_output(log: Path) -> None:
    """Send everything this process prints, also from C, to its log; what it writes is its owner's alone."""
    keep_files_private()
    log.parent.mkdir(parents=True, exist_ok=True)  # another host need not see the run's folder
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    configure_logging()
    faulthandler.enable()


def _address_here() -> str:
    """Of this machine in the Ray cluster."""
    import ray

    return str(ray.util.get_node_ip_address())


def interface(host: str | None, keys: ServiceKeys | None) -> str:
    """The address that a service of a run binds; None is that of this machine in the Ray cluster.

    Raises:
        RuntimeError: it could be reached from other machines, and is not locked.
    """
    host = _address_here() if host is None else host
    if keys is None and not is_loopback(host):
        raise RuntimeError(
            f"{host} can be reached from other machines, and launch.encryption = 'off' leaves the service open: "
            "use 'auto'"
        )
    return host


@dataclass(frozen=True)
class StagePoll:
    """What a stage has to tell."""

    reports: list[Report]
    """Of the steps since the last question."""
    waiting_for: str
    """Whom training waits for now; empty while it computes."""
    publishing: str
    """What keeps published weights from being on disk; empty where nothing does."""


class _Service(Protocol):
    """What serves at an address."""

    def bind(self) -> str: ...

    def serve(self, stop: threading.Event) -> None: ...


class _Role:
    """Whatever a process hosts."""

    def whereabouts(self) -> tuple[str, int]:
        """The address of its host in the Ray cluster, and its process id there."""
        return _address_here(), os.getpid()


class _ServiceRole(_Role):
    """Hosts a service."""

    def __init__(self, service: _Service) -> None:
        self._service = service
        self._stop = threading.Event()

    def bind(self) -> str:
        """Open the store and the socket; returns the address."""
        return self._service.bind()

    def serve(self) -> None:
        """Serve until `stop`."""
        self._service.serve(self._stop)

    def stop(self) -> None:
        """End `serve` after the request at hand."""
        self._stop.set()


class BufferRole(_ServiceRole):
    """Hosts the buffer service."""

    def __init__(
        self, log: Path, config: BufferConfig, facts: RunFacts, folder: Path, keys: ServiceKeys | None
    ) -> None:
        redirect_output(log)
        from buffer.service import BufferService, keep_memory

        keep_memory()
        host = interface(config.host, keys)
        super().__init__(BufferService(config.model_copy(update={"host": host}), facts, folder, keys=keys))


class WeightsRole(_ServiceRole):
    """Hosts the weight service. It moves bytes, and loads nothing that computes."""

    def __init__(
        self, log: Path, config: WeightSyncConfig, run_id: str, folder: Path, keys: ServiceKeys | None
    ) -> None:
        redirect_output(log)
        from weight_sync.service import WeightService

        host = interface(config.host, keys)
        super().__init__(WeightService(config.model_copy(update={"host": host}), run_id, folder, keys=keys))


class StageRole(_Role):
    """Hosts one pipeline stage."""

    def __init__(self, log: Path) -> None:
        redirect_output(log)

    def rendezvous(self, host: str | None) -> str:
        """A free address on this machine, by default as the Ray cluster knows it, at which the stages can meet."""
        host = _address_here() if host is None else host
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def setup(self, context: RunContext[LearnerSections], rank: int, rendezvous: str) -> None:
        """Build the stage; every stage must be in this call at the same time."""
        from learner.stage import Stage

        self._stage = Stage(context, rank, rendezvous)
        self._stage.setup()

    def run(self) -> None:
        """Train until the last step or `request_stop`."""
        self._stage.run()

    def poll(self) -> StagePoll:
        """What happened since the last call."""
        return StagePoll(self._stage.poll(), self._stage.waiting_for, self._stage.publishing)

    def request_stop(self) -> None:
        """End `run` after the step at hand, with a checkpoint."""
        self._stage.request_stop()

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder; every stage must be in this call at the same time."""
        self._stage.export(folder)


class ActorRole(_Role):
    """Hosts one actor and its engine. Its calls are coroutines, so that they interleave."""

    def __init__(self, log: Path, context: RunContext[ActorSections], number: int, pool: str) -> None:
        redirect_output(log)
        from actors.loop import ActorLoop

        self._loop = ActorLoop(context, number, pool)
        self._work: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engine and meet the buffer service."""
        await self._loop.start()

    async def run(self) -> None:
        """Generate until the run drains. Who calls again, because the way here was cut, waits for the same work."""
        if self._work is None:
            self._work = asyncio.create_task(self._loop.run())
        await asyncio.shield(self._work)

    async def report(self) -> ActorReport:
        """What happened since the last call."""
        return self._loop.report()

    async def evaluate(self, request: EvalRequest) -> EvalResult:
        """Held-out accuracy of a share of the problems at one version."""
        return await self._loop.evaluate(request)

    async def stop(self) -> None:
        """End the engine."""
        await self._loop.stop()
