"""Buffers: the buffer services of a run, one per shard, and the launcher's own client of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import ray

from buffer.client import BufferClient
from buffer.errors import BufferError, StoreError
from buffer.inspect import new_folders
from buffer.sharded import ShardedClient, open_client
from launch.checks import Plan
from launch.role_process import RoleProcess, RunFailed, done, outcome
from launch.roles import BufferRole
from launch.spawn import spawn
from weight_sync.serving import ModelFacts

R = TypeVar("R")

STARTUP_KEY = "launch.startup_timeout_s"
MAX_RESTARTS = 3
"""Of each service."""


class Buffers:
    """Starts the services, and starts again on its own store whichever ends; the others go on meanwhile."""

    def __init__(self, plan: Plan, model: ModelFacts, notify: Callable[[str, str], None]) -> None:
        """Nothing is started yet.

        Args:
            plan: the checked config and the run's folder.
            model: facts of the checkpoint.
            notify: called with (kind, text) whenever something worth an event happens.
        """
        self._plan = plan
        self._model = model
        self._notify = notify
        self._config = plan.config.buffer
        self._processes: list[RoleProcess] = []
        self._client: BufferClient | ShardedClient | None = None
        self.addresses: list[str] = []
        """Shard by shard; a service that is started again keeps its address."""

    # --- life -------------------------------------------------------------------------------------

    def start(self, deadline: float) -> None:
        """Start all services, and connect to them.

        Args:
            deadline: on the monotonic clock.

        Raises:
            RunFailed: one did not start or does not answer, or the folder has a buffer of other shards.
        """
        try:
            folders = new_folders(self._plan.folder.buffer, self._config.shards)
        except StoreError as error:
            raise RunFailed(str(error)) from error
        # The first one alone: where its store refuses the number of shards, no other is made.
        self._serve([self._spawn(0, folders[0])], deadline)
        self._serve([self._spawn(shard, folders[shard]) for shard in range(1, len(folders))], deadline)
        self._client = open_client(
            self.addresses, run_id=self._plan.run_id, role="launch", name="launch", config=self._config
        )
        try:
            self._client.connect()
        except BufferError as error:
            raise RunFailed(f"the buffer service does not answer: {error}; see {self._logs}") from error

    def watch(self) -> None:
        """Start again what has ended.

        Raises:
            RunFailed: it ended too often.
        """
        for process in list(self._processes):
            if not done(process.running):
                continue
            who = "the buffer service" + (f" of shard {process.number}" if self._config.shards > 1 else "")
            why = outcome(process.running)
            if process.restarts >= MAX_RESTARTS:
                raise RunFailed(f"{who} ended {process.restarts + 1} times, last: {why}; see {process.log}")
            self._notify("restart", f"{who} ended ({why}) and is started again on the same store")
            folder = new_folders(self._plan.folder.buffer, self._config.shards)[process.number]
            fresh = self._spawn(process.number, folder)
            fresh.restarts = process.restarts + 1
            self._serve([fresh], time.monotonic() + self._plan.config.launch.startup_timeout_s)

    def close(self) -> None:
        """Close the client."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def ask_to_stop(self) -> list[Any]:
        """Let the services end after the transaction at hand; the pending calls that end with them."""
        calls = [[process.handle.stop.remote(), process.running] for process in self._processes]
        return [call for pair in calls for call in pair]

    def kill(self) -> None:
        """End what is left."""
        for process in self._processes:
            ray.kill(process.handle, no_restart=True)
        self._processes = []

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
                raise RunFailed(f"the buffer service failed: {error}; see {self._logs}") from error
            except TimeoutError:
                self.watch()
                if time.monotonic() > deadline:
                    raise RunFailed(
                        f"the buffer service at {', '.join(self.addresses)} did not answer for "
                        f"buffer.give_up_after_s = {limit_s:g} s; see {self._logs}"
                    ) from None

    # --- parts ------------------------------------------------------------------------------------

    @property
    def _logs(self) -> str:
        return ", ".join(str(process.log) for process in self._processes)

    def _spawn(self, shard: int, folder: Path) -> RoleProcess:
        log = self._plan.folder.log("buffer", shard)
        port = self._config.port + shard if self._config.port else 0
        handle = spawn(
            BufferRole,
            log,
            self._config.model_copy(update={"port": port}),
            self._plan.run_facts(self._model, shard),
            folder,
            cpus=0.0,
            gpus=0.0,
            threads=1,
            concurrency=3,
        )
        return RoleProcess("buffer", shard, handle, log)

    def _serve(self, processes: list[RoleProcess], deadline: float) -> None:
        for process in processes:
            address = process.result(process.handle.bind.remote(), "to open its store", deadline, STARTUP_KEY)
            process.running = process.handle.serve.remote()
            if process.number < len(self._processes):
                self._processes[process.number], self.addresses[process.number] = process, address
            else:
                self._processes.append(process)
                self.addresses.append(address)
