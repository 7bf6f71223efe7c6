"""The ranker, which foretells how long answers to new prompts are. The run neither waits for it nor ends with it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from common.imports import uncollected
from common.run import RunContext
from launch.checks import Plan
from launch.config import Config
from launch.pools import actor_pools
from launch.processes.placement import here, spawn
from launch.processes.role_process import Notify, Restarts, Role, RoleProcess, done, outcome

if TYPE_CHECKING:
    from actors.config import ActorSections

_NICE = 10
"""It takes what time the others leave."""


class RankerRole(Role):
    """Hosts the ranker."""

    def __init__(self, log: Path) -> None:
        super().__init__(log)
        with contextlib.suppress(OSError):
            os.nice(_NICE)
        with uncollected():
            import actors.ranking  # noqa: F401 -- for `run`

    def run(self, context: RunContext[ActorSections]) -> None:
        """Load the prompts, and tell the buffer what to expect of them until it is killed."""
        from actors.ranking import Ranker

        Ranker(context).run()


class RankerService:
    """Starts the ranker where it is of use, and again where it died, up to launch.max_restarts times in a row."""

    def __init__(self, plan: Plan, notify: Notify) -> None:
        self._plan, self._notify = plan, notify
        self._context: RunContext[Config] | None = None
        self.processes: list[RoleProcess] = []
        """One, or none: it is not needed, or was given up."""

    def start(self, context: RunContext[Config]) -> None:
        """Start it where who gets which prompt may depend on lengths; returns at once."""
        self._context = context
        if is_needed(context.config):
            limit = self._plan.config.launch.max_restarts
            self.processes = [RoleProcess("ranker", 0, None, self._plan.folder.log("ranker", 0), Restarts(limit))]
            self._spawn(self.processes[0])

    def watch(self) -> None:
        """Start it again if it died."""
        for ranker in [each for each in self.processes if done(each.running)]:
            why = outcome(ranker.running) or "it ended"
            ray.kill(ranker.handle, no_restart=True)
            if ranker.restarts.are_spent:
                self.processes = []
                told = f"the ranker is given up ({why}), and new prompts are all alike; see {ranker.log}"
                self._notify("given_up", told)
                continue
            self._notify("restart", f"the ranker died ({why}) and is started again; new prompts are alike meanwhile")
            ranker.forget()
            ranker.restarts.count()
            self._spawn(ranker)

    def stop(self) -> None:
        """End it."""
        for ranker in self.processes:
            ray.kill(ranker.handle, no_restart=True)
        self.processes = []

    def _spawn(self, ranker: RoleProcess) -> None:
        assert self._context is not None, "start() comes first"
        variables = self._plan.config.launch.env
        ranker.handle = spawn(RankerRole, ranker.log, on=here(), threads=1, concurrency=2, variables=variables)
        ranker.begin_work(ranker.handle.run.remote(self._context))


def is_needed(config: Config) -> bool:
    """Are there actors that may be unlike in speed, or is the longest answer always first?"""
    dispatch = config.buffer.dispatch
    return dispatch == "longest_first" or (dispatch == "by_deadline" and len(actor_pools(config)) > 1)
