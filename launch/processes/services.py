"""Services: processes that each serve at an address, and are started again there where they end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from launch.processes.role_process import RoleProcess, RunFailed, done, outcome

STARTUP_KEY = "launch.startup_timeout_s"
MAX_RESTARTS = 3
"""Of each service, in a row; an hour of work starts the count anew."""


class Services:
    """Starts services, and starts again on its own store whichever ends; the others go on meanwhile.

    The role of each has the methods `bind`, which gives its address, `serve`, which ends with the process, and `stop`.
    """

    def __init__(
        self,
        spawn: Callable[[int], RoleProcess],
        who: Callable[[int], str],
        notify: Callable[[str, str], None],
        startup_timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Nothing is started yet.

        Args:
            spawn: starts the process of a service, by its number; one that is started again is to find its store and
                its port.
            who: a service by its number, for people.
            notify: called with (kind, text) whenever something worth an event happens.
            startup_timeout_s: how long one that is started again may take.
            check: raises where nothing can be started any more.
        """
        self._spawn = spawn
        self._who = who
        self._notify = notify
        self._startup_timeout_s = startup_timeout_s
        self._check = check
        self._processes: list[RoleProcess] = []
        self.addresses: list[str] = []
        """By number; a service that is started again keeps its address."""

    @property
    def logs(self) -> str:
        """Where they say what went wrong."""
        return ", ".join(str(process.log) for process in self._processes)

    @property
    def processes(self) -> Sequence[RoleProcess]:
        """By number."""
        return self._processes

    def start(self, numbers: Sequence[int], deadline: float) -> None:
        """Start those with these numbers, which follow the ones that are there; returns when they serve.

        Args:
            numbers: from 0 on.
            deadline: on the monotonic clock.

        Raises:
            RunFailed: one did not start.
        """
        self._serve([self._spawn(number) for number in numbers], deadline)

    def watch(self) -> None:
        """Start again what has ended.

        Raises:
            RunFailed: it ended too often.
        """
        self._check()
        for process in list(self._processes):
            if not done(process.running):
                continue
            who, why = self._who(process.number), outcome(process.running)
            if (restarts := process.restarts_in_a_row) >= MAX_RESTARTS:
                raise RunFailed(f"{who} ended {restarts + 1} times in a row, last: {why}; see {process.log}")
            self._notify("restart", f"{who} ended ({why}) and is started again on the same store")
            self._start_again(process)

    def ask_to_stop(self) -> list[Any]:
        """Let them end after the request at hand; the pending calls that end with them."""
        calls = [[process.handle.stop.remote(), process.running] for process in self._processes]
        return [call for pair in calls for call in pair]

    def kill(self) -> None:
        """End what is left."""
        for process in self._processes:
            ray.kill(process.handle, no_restart=True)
        self._processes = []

    def _start_again(self, before: RoleProcess) -> None:
        """Until it serves; one that does not counts as a restart."""
        while True:
            fresh = self._spawn(before.number)
            fresh.count_restart(before)
            try:
                self._serve([fresh], time.monotonic() + self._startup_timeout_s)
            except RunFailed as error:
                self._check()
                ray.kill(fresh.handle, no_restart=True)
                if fresh.restarts_in_a_row >= MAX_RESTARTS:
                    raise
                self._notify("restart", f"{self._who(before.number)} is started once more: {error}")
                before = fresh
            else:
                return

    def _serve(self, processes: Sequence[RoleProcess], deadline: float) -> None:
        for process in processes:
            address = process.result(
                process.handle.bind.remote(), "to open its store", deadline, STARTUP_KEY, self._check
            )
            process.begin_work(process.handle.serve.remote())
            if process.number < len(self._processes):
                self._processes[process.number], self.addresses[process.number] = process, address
            else:
                self._processes.append(process)
                self.addresses.append(address)
