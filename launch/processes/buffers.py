"""Buffers: the buffer services of a run, one per shard, and the launcher's own client of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from buffer.client import BufferClient
from buffer.errors import BufferError, StoreError
from buffer.sharding.client import ShardedClient, open_client
from buffer.store import new_folders
from common.run import RunFacts
from launch.checks import Plan
from launch.keys import host_of_service
from launch.processes.placement import here
from launch.processes.role_process import RoleProcess, RunFailed
from launch.processes.roles import BufferRole
from launch.processes.services import Services
from launch.processes.spawn import spawn

R = TypeVar("R")


class Buffers:
    """Starts the services, and starts again on its own store whichever ends; the others go on meanwhile."""

    def __init__(
        self,
        plan: Plan,
        facts: RunFacts,
        notify: Callable[[str, str], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Nothing is started yet.

        Args:
            plan: the checked config and the run's folder.
            facts: of the run.
            notify: called with (kind, text) whenever something worth an event happens.
            check: raises where nothing can be started any more.
        """
        self._plan = plan
        self._facts = facts
        self._config = plan.config.buffer
        self._services = Services(self._spawn, self._who, notify, plan.config.launch.startup_timeout_s, check)
        self._client: BufferClient | ShardedClient | None = None

    @property
    def addresses(self) -> Sequence[str]:
        """Shard by shard; a service that is started again keeps its address."""
        return self._services.addresses

    @property
    def processes(self) -> Sequence[RoleProcess]:
        """Of the services."""
        return self._services.processes

    # --- life -------------------------------------------------------------------------------------

    def start(self, deadline: float) -> None:
        """Start all services, and connect to them.

        Args:
            deadline: on the monotonic clock.

        Raises:
            RunFailed: one did not start or does not answer, or the folder has a buffer of other shards.
        """
        try:
            new_folders(self._plan.folder.buffer, self._config.shards)
        except StoreError as error:
            raise RunFailed(str(error)) from error
        # The first one alone: where its store refuses the number of shards, no other is made.
        self._services.start([0], deadline)
        self._services.start(range(1, self._config.shards), deadline)
        self._client = open_client(
            self.addresses,
            run_id=self._plan.run_id,
            role="launch",
            name="launch",
            config=self._config,
            keys=self._plan.client_keys,
        )
        try:
            self._client.connect()
        except BufferError as error:
            raise RunFailed(f"the buffer service does not answer: {error}; see {self._services.logs}") from error

    def watch(self) -> None:
        """Start again what has ended.

        Raises:
            RunFailed: it ended too often.
        """
        self._services.watch()

    def close(self) -> None:
        """Close the client."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def ask_to_stop(self) -> list[Any]:
        """Let the services end after the transaction at hand; the pending calls that end with them."""
        return self._services.ask_to_stop()

    def kill(self) -> None:
        """End what is left."""
        self._services.kill()

    # --- questions --------------------------------------------------------------------------------

    def ask(self, request: Callable[[BufferClient | ShardedClient], Future[R]]) -> R:
        """Ask the buffer; a service that is down is started again, and the client sends again.

        Raises:
            RunFailed: it did not answer within buffer.give_up_after_s.
        """
        assert self._client is not None, "start() comes first"
        limit_s = self._config.give_up_after_s
        deadline = time.monotonic() + limit_s
        future = request(self._client)
        while True:
            try:
                return future.result(timeout=1.0)
            except BufferError as error:
                raise RunFailed(f"the buffer service failed: {error}; see {self._services.logs}") from error
            except TimeoutError:
                self.watch()
                if time.monotonic() > deadline:
                    raise RunFailed(
                        f"the buffer service at {', '.join(self.addresses)} did not answer for "
                        f"buffer.give_up_after_s = {limit_s:g} s; see {self._services.logs}"
                    ) from None

    # --- parts ------------------------------------------------------------------------------------

    def _who(self, shard: int) -> str:
        return "the buffer service" + (f" of shard {shard}" if self._config.shards > 1 else "")

    def _spawn(self, shard: int) -> RoleProcess:
        log = self._plan.folder.log("buffer", shard)
        port = self._config.port + shard if self._config.port else 0
        host = host_of_service(self._config.host, self._plan.config)
        handle = spawn(
            BufferRole,
            log,
            self._config.model_copy(update={"host": host, "port": port}),
            self._facts.model_copy(update={"shard": shard}),
            new_folders(self._plan.folder.buffer, self._config.shards)[shard],
            self._plan.service_keys,
            place=here(),
            threads=1,
            concurrency=3,
        )
        return RoleProcess("buffer", shard, handle, log)
