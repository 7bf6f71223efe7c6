"""Processes that host the services of a run; a service that exits is restarted at the same address."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar

from leeway.buffer.client import GIVE_UP_S, BufferClient
from leeway.buffer.errors import BufferError
from leeway.buffer.store import PORT as BUFFER_PORT
from leeway.common.rpc.auth import ServiceKeys
from leeway.common.rpc.server import forget_port
from leeway.common.run import STARTUP_S, RunFacts
from leeway.launch.processes.placement import here, spawn
from leeway.launch.processes.role_process import (
    MAX_RESTARTS,
    Check,
    Notify,
    Restarts,
    Role,
    RoleProcess,
    RunFailed,
    address_here,
    done,
    outcome,
    results,
)
from leeway.weight_sync.store import PORT as WEIGHTS_PORT

if TYPE_CHECKING:  # service processes import this module and must not load compute libraries
    from leeway.launch.checks import Plan

R = TypeVar("R")


class ServiceRole(Role):
    """Hosts a service at the address that the run assigns."""

    def __init__(
        self,
        log: Path,
        service: str,
        arguments: tuple[object, ...],
        host: str | None,
        keys: ServiceKeys | None,
        is_cluster: bool,
    ) -> None:
        """Import the factory named `service` in this process only, and call the factory with `arguments`."""
        super().__init__(log)
        self._stop = threading.Event()
        host = address_here() if host is None and is_cluster else host
        self._service = resolve_name(service)(*arguments, host=host, keys=keys)

    def bind(self) -> str:
        """Open the store and the socket; return the address."""
        return str(self._service.bind())

    def serve(self) -> None:
        self._service.serve(self._stop)

    def stop(self) -> None:
        self._stop.set()


class ServiceHost:
    """Starts the process of a service, and restarts an exited service on the same store."""

    name = title = ""
    """`name` is the name of the process and its log; `title` names the service in messages."""

    def __init__(self, service: str, arguments: tuple[object, ...], plan: Plan, notify: Notify, check: Check) -> None:
        """`service` is the dotted name of a class or function; calling it with `arguments` constructs the service."""
        self._service = service, arguments
        self._plan = plan
        self.log = plan.folder.log(self.name, 0)
        self._notify = notify
        self._check = check
        self.processes: list[RoleProcess] = []
        """List with the process of the service; empty before the start, or if the run does not need the service."""
        self.address = ""
        """Address of the service; restarts keep the address, because the store's folder has the socket or the port."""

    def watch(self) -> None:
        """Restart the service if it has exited; raise RunFailed if it exited too often."""
        self._check()
        for process in self.processes:
            if not done(process.running):
                continue
            why = outcome(process.running)
            if process.restarts.are_exhausted:
                times = process.restarts.in_a_row + 1
                raise RunFailed(f"{self.title} exited {times} times in a row, most recently: {why}; {process.log_hint}")
            self._notify("restart", f"{self.title} exited ({why}) and is restarted on the same store")
            self._restart(process)

    def request_stop(self) -> list[Any]:
        """Stop the service after its current request; return the calls that end when the service stops."""
        started = [process for process in self.processes if process.handle is not None]
        calls = [[process.handle.stop.remote(), process.running] for process in started]
        return [call for pair in calls for call in pair if call is not None]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        self.processes = []

    def _serve(self, deadline: float) -> None:
        process = RoleProcess(self.name, 0, self._spawn(), self.log, Restarts(MAX_RESTARTS))
        self._bind(process, deadline)
        self.processes.append(process)

    def _spawn(self) -> Any:  # noqa: ANN401 -- a Ray handle
        plan = self._plan
        arguments = (*self._service, plan.config.launch.host, plan.service_keys, plan.is_cluster)
        return spawn(ServiceRole, self.log, *arguments, on=here(), concurrency=3, variables=plan.config.launch.env)

    def _restart(self, process: RoleProcess) -> None:
        """Restart the service; a failed start is retried until the restarts are exhausted."""
        while True:
            process.forget()
            process.restarts.count()
            process.handle = self._spawn()
            try:
                self._bind(process, time.monotonic() + STARTUP_S)
            except RunFailed as error:
                self._check()
                process.kill()
                if process.restarts.are_exhausted:
                    raise
                self._notify("restart", f"the restart of {self.title} failed and is retried: {error}")
            else:
                return

    def _bind(self, process: RoleProcess, deadline: float) -> None:
        call = process.handle.bind.remote()
        (self.address,) = results([(process, call)], "to open its store", deadline, self._check)
        process.begin_work(process.handle.serve.remote())


class BufferHost(ServiceHost):
    """Hosts the buffer service, and has a client that sends requests to the service."""

    name, title = "buffer", "the buffer service"

    def __init__(self, plan: Plan, facts: RunFacts, notify: Notify, check: Check = lambda: None) -> None:
        arguments = (plan.config.buffer, facts, plan.folder.buffer)
        super().__init__("leeway.buffer.service:in_own_process", arguments, plan, notify, check)
        self._client: BufferClient | None = None

    def start(self, deadline: float) -> None:
        """Start the service and connect to it; raise RunFailed if it does not start or respond."""
        forget_port(self._plan.folder.buffer / BUFFER_PORT)
        self._serve(deadline)
        self._client = BufferClient(
            self.address, run_id=self._plan.run_id, role="launch", name="launch", keys=self._plan.client_keys
        )
        try:
            self._client.connect(deadline)
        except BufferError as error:
            raise RunFailed(f"the buffer service does not respond: {error}; see {self.log}") from error

    def ask(self, request: Callable[[BufferClient], Future[R]]) -> R:
        """Return the result of a request; restart an exited service. Raise RunFailed after `GIVE_UP_S`."""
        assert self._client is not None, "start() comes first"
        deadline = time.monotonic() + GIVE_UP_S
        future = request(self._client)
        while True:
            try:
                return future.result(timeout=1.0)
            except BufferError as error:
                raise RunFailed(f"the buffer service failed: {error}; see {self.log}") from error
            except TimeoutError:
                self.watch()
                if time.monotonic() > deadline:
                    raise RunFailed(
                        f"the buffer service at {self.address} did not respond for {GIVE_UP_S:g} s; see {self.log}"
                    ) from None

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


class WeightsHost(ServiceHost):
    """Hosts the weight service; if weights are transferred through a folder, no service starts and `address` is ''."""

    name, title = "weights", "the weight service"

    def __init__(self, plan: Plan, notify: Notify, check: Check = lambda: None) -> None:
        arguments = (plan.run_id, plan.weights_folder)
        super().__init__("leeway.weight_sync.service:WeightService", arguments, plan, notify, check)

    def start(self, deadline: float) -> None:
        """Start the service if the run transfers weights over the network; raise RunFailed if the start fails."""
        if self._plan.config.weight_sync.transport != "folder":
            forget_port(self._plan.weights_folder / WEIGHTS_PORT)
            self._serve(deadline)
