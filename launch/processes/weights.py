"""Weights: the weight service of a run, which holds the published versions and outlives the learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from launch.checks import Plan
from launch.keys import host_of_service
from launch.processes.placement import here
from launch.processes.role_process import RoleProcess
from launch.processes.roles import WeightsRole
from launch.processes.services import Services
from launch.processes.spawn import spawn


class Weights:
    """Starts the service where weights may travel over the network, and starts it again on its folder and port."""

    def __init__(
        self,
        plan: Plan,
        notify: Callable[[str, str], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Nothing is started yet.

        Args:
            plan: the checked config and the run's folder.
            notify: called with (kind, text) whenever something worth an event happens.
            check: raises where nothing can be started any more.
        """
        self._plan = plan
        self._config = plan.config.weight_sync
        self._services = Services(
            self._spawn, lambda _: "the weight service", notify, plan.config.launch.startup_timeout_s, check
        )

    @property
    def address(self) -> str:
        """tcp://HOST:PORT; empty where every weight travels through the folder."""
        return next(iter(self._services.addresses), "")

    @property
    def processes(self) -> Sequence[RoleProcess]:
        """Of the services."""
        return self._services.processes

    def start(self, deadline: float) -> None:
        """Start the service, if the run has one.

        Args:
            deadline: on the monotonic clock.

        Raises:
            RunFailed: it did not start.
        """
        if self._config.transport != "folder":
            self._services.start([0], deadline)

    def watch(self) -> None:
        """Start it again where it has ended; the versions are in its folder.

        Raises:
            RunFailed: it ended too often.
        """
        self._services.watch()

    def ask_to_stop(self) -> list[Any]:
        """Let it end after the message at hand; the pending calls that end with it."""
        return self._services.ask_to_stop()

    def kill(self) -> None:
        """End what is left."""
        self._services.kill()

    def _spawn(self, number: int) -> RoleProcess:
        log = self._plan.folder.log("weights", number)
        host = host_of_service(self._config.host, self._plan.config)
        handle = spawn(
            WeightsRole,
            log,
            self._config.model_copy(update={"host": host}),
            self._plan.run_id,
            self._plan.weights_folder,
            self._plan.service_keys,
            place=here(),
            threads=1,
            concurrency=3,
        )
        return RoleProcess("weights", number, handle, log)
