"""The Ray actors that host buffer, stages and actors: one process and one log file each.

A role is the thinnest possible shell. Ray places the process, carries these few calls, and ends the
process with the run; data and weights never pass through it.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from launch.logs import configure_logging

if TYPE_CHECKING:  # each role imports what it hosts inside its own process only
    from actors.evaluate import EvalRequest, EvalResult
    from actors.report import ActorReport
    from actors.spec import ActorSpec
    from buffer.config import BufferConfig, RunFacts
    from learner.report import Report
    from learner.spec import LearnerSpec


def redirect_output(log: Path) -> None:
    """Send everything this process prints, also from C, to its log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    configure_logging()
    faulthandler.enable()


class BufferRole:
    """Hosts the buffer service."""

    def __init__(self, log: Path, config: BufferConfig, facts: RunFacts, folder: Path) -> None:
        redirect_output(log)
        from buffer.process import keep_memory
        from buffer.service import BufferService

        keep_memory()
        self._service = BufferService(config, facts, folder)
        self._stop = threading.Event()

    def bind(self) -> str:
        """Open the store and the socket; returns the address."""
        return self._service.bind()

    def serve(self) -> None:
        """Serve until `stop`."""
        self._service.serve(self._stop)

    def stop(self) -> None:
        """End `serve` after the transaction at hand."""
        self._stop.set()


class StageRole:
    """Hosts one pipeline stage."""

    def __init__(self, log: Path) -> None:
        redirect_output(log)

    def rendezvous(self) -> str:
        """An address on this machine at which the stages can meet."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return f"tcp://{address}:{probe.getsockname()[1]}"

    def setup(self, spec: LearnerSpec) -> None:
        """Build the stage; every stage must be in this call at the same time."""
        from learner.stage import Stage

        self._stage = Stage(spec)
        self._stage.setup()

    def run(self) -> None:
        """Train until the last step or `request_stop`."""
        self._stage.run()

    def poll(self) -> tuple[list[Report], str]:
        """Reports of the steps since the last call, and what the stage waits for now."""
        return self._stage.poll(), self._stage.waiting_for

    def request_stop(self) -> None:
        """End `run` after the step at hand, with a checkpoint."""
        self._stage.request_stop()

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder; every stage must be in this call at the same time."""
        self._stage.export(folder)


class ActorRole:
    """Hosts one actor and its engine. Its calls are coroutines, so that they interleave."""

    def __init__(self, log: Path, spec: ActorSpec) -> None:
        redirect_output(log)
        from actors.loop import ActorLoop

        self._loop = ActorLoop(spec)

    async def start(self) -> None:
        """Start the engine and meet the buffer service."""
        await self._loop.start()

    async def run(self) -> None:
        """Generate until the run drains."""
        await self._loop.run()

    async def report(self) -> ActorReport:
        """What happened since the last call."""
        return self._loop.report()

    async def evaluate(self, request: EvalRequest) -> EvalResult:
        """Held-out accuracy of a share of the problems at one version."""
        return await self._loop.evaluate(request)

    async def stop(self) -> None:
        """End the engine."""
        await self._loop.stop()
