"""The process of the ranker, which `launch.processes.helpers` loads for a run that dispatches by lengths."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.process import uncollected
from common.run import RunContext
from launch.checks import Plan
from launch.config import Config
from launch.pools import WorkerPool
from launch.processes.helpers import Helpers
from launch.processes.placement import PlacedProcess, here, spawn
from launch.processes.role_process import Notify, Role

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


class RankerService(Helpers):
    """The ranker: one process beside the services."""

    def __init__(self, plan: Plan, notify: Notify) -> None:
        super().__init__(plan, notify, "ranker", [WorkerPool("", 1, {})], "new prompts are all alike")

    def _spawn(self, helper: PlacedProcess, context: RunContext[Config]) -> tuple[Any, Any]:
        variables = self._plan.config.launch.env
        handle = spawn(RankerRole, helper.log, on=here(), concurrency=2, variables=variables)
        return handle, handle.run.remote(context)
