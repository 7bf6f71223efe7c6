"""An actor with a sleeping engine, and a learner that trains a tiny model and sleeps until its step time ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.fleet_parts.setting import FleetSetting

from leeway.actors.config import ActorsConfig, ActorSections
from leeway.common.run import RunContext
from leeway.launch.processes.actor_role import ActorRole
from leeway.launch.processes.learner_group import StageRole
from leeway.launch.processes.role_process import Role
from leeway.learner.config import LearnerSections


class SleepingActorRole(ActorRole):
    """An actor with a sleeping engine."""

    def __init__(self, log: Path, config: ActorsConfig) -> None:
        """Initialize the role without loading vLLM."""
        Role.__init__(self, log)

    async def start(self, context: RunContext[ActorSections], number: int, pool: str) -> None:
        """Start the real actor with a sleeping engine."""
        from benchmarks.fleet_parts.engine import SleepingEngine

        from leeway.actors import loop

        SleepingEngine.setting = FleetSetting.here().engine(pool)
        loop.Engine = SleepingEngine  # type: ignore[assignment,attr-defined]
        await super().start(context, number, pool)


class SleepingStageRole(StageRole):
    """The only stage of a learner whose steps have a set duration."""

    def setup(self, context: RunContext[LearnerSections], rank: int, rendezvous: str) -> None:
        """Set up the real stage, then extend each of its steps to the set duration."""
        super().setup(context, rank, rendezvous)
        setting, trains = FleetSetting.here(), self._stage._train_step
        run = trains.run

        def slow(batch: Any, *arguments: Any) -> Any:  # noqa: ANN401 -- passed through
            began_s = time.perf_counter()
            result = run(batch, *arguments)
            desired_s = setting.step_s + setting.step_token_s * batch.packed.num_tokens
            time.sleep(max(0.0, desired_s - (time.perf_counter() - began_s)))
            return result

        trains.run = slow  # type: ignore[assignment]
