"""The process of the ranker, which `launch.processes.supervisor` loads for a run that dispatches by lengths."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from common.process import uncollected
from common.run import RunContext
from launch.checks import Plan
from launch.config import Config
from launch.processes.placement import PlacedProcess, PlacementGroup, here, spawn
from launch.processes.role_process import MAX_RESTARTS, Notify, Restarts, Role, done, outcome

if TYPE_CHECKING:
    from actors.config import ActorSections

_NICE = 10
"""The ranker takes what time the others leave."""


class RankerRole(Role):
    """Hosts the ranker."""

    def __init__(self, log: Path) -> None:
        super().__init__(log)
        with contextlib.suppress(OSError):
            os.nice(_NICE)
        with uncollected():
            import planning.ranking  # noqa: F401 -- for `run`

    def run(self, context: RunContext[ActorSections]) -> None:
        """Load the prompts, and tell the buffer what to expect of them until it is killed."""
        from planning.ranking import Ranker

        Ranker(context).run()


class RankerService:
    """The ranker: one process beside the services, which a run neither waits for nor ends with."""

    def __init__(self, plan: Plan, notify: Notify) -> None:
        """Start nothing yet."""
        self._plan, self._notify = plan, notify
        self.processes: list[PlacedProcess] = []

    def start(self, context: RunContext[Config]) -> None:
        """Start it; returns at once."""
        self._context = context
        log, restarts = self._plan.folder.log("ranker", 0), Restarts(MAX_RESTARTS)
        process = PlacedProcess("ranker", 0, None, log, restarts, placement=PlacementGroup([], "the ranker"))
        self.processes.append(process)
        self._spawn(process)

    def watch(self) -> None:
        """Start it again if it died, up to `MAX_RESTARTS` times in a row."""
        for process in self.processes:
            if process.lost or not done(process.running):
                continue
            why = outcome(process.running) or "it ended"
            process.kill()  # it may have failed without dying
            if process.restarts.are_spent:
                why = f"{why}; {process.see}"
                process.lose(f"given up: {why}")
                self._notify(
                    "given_up", f"{process.name} is given up, and new prompts are all alike from now on: {why}"
                )
                continue
            text = f"{process.name} died ({why}) and is started again; new prompts are all alike meanwhile"
            self._notify("restart", text)
            process.forget()
            process.restarts.count()
            self._spawn(process)

    def stop(self) -> None:
        """End it."""
        for process in self.processes:
            process.end()
        self.processes = []

    def _spawn(self, process: PlacedProcess) -> None:
        variables = self._plan.config.launch.env
        process.handle = spawn(RankerRole, process.log, on=here(), concurrency=2, variables=variables)
        process.begin_work(process.handle.run.remote(self._context))
