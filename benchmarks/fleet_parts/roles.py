"""An actor whose engine sleeps, and a learner that trains its tiny model and then sleeps for the rest of its step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from actors.config import ActorsConfig, ActorSections
from benchmarks.fleet_parts.setting import FleetSetting
from common.run import RunContext
from launch.processes.actor_role import ActorRole
from launch.processes.learner_group import StageRole
from launch.processes.role_process import Role
from learner.config import LearnerSections


class SleepingActorRole(ActorRole):
    """An actor whose engine sleeps."""

    def __init__(self, log: Path, config: ActorsConfig) -> None:
        """Load nothing of vLLM."""
        Role.__init__(self, log)

    async def start(self, context: RunContext[ActorSections], number: int, pool: str) -> None:
        """As the real one, with the other engine."""
        from actors import loop
        from benchmarks.fleet_parts.engine import SleepingEngine

        SleepingEngine.setting = FleetSetting.here().engine(pool)
        loop.Engine = SleepingEngine  # type: ignore[assignment,attr-defined]
        await super().start(context, number, pool)


class SleepingStageRole(StageRole):
    """The only stage of a learner whose steps take a given time."""

    def setup(self, context: RunContext[LearnerSections], rank: int, rendezvous: str) -> None:
        """As the real one; then its step is slowed down."""
        super().setup(context, rank, rendezvous)
        setting, trains = FleetSetting.here(), self._stage._train_step
        run = trains.run

        def slow(batch: Any, *arguments: Any) -> Any:  # noqa: ANN401 -- as it came
            began_s = time.perf_counter()
            result = run(batch, *arguments)
            wanted_s = setting.step_s + setting.step_token_s * batch.packed.num_tokens
            time.sleep(max(0.0, wanted_s - (time.perf_counter() - began_s)))
            return result

        trains.run = slow  # type: ignore[assignment]
