"""A learner and a scorer that compute with their tiny model as ever, and whose chunks then sleep for every layer."""

from __future__ import annotations

from benchmarks.scoring_parts.setting import LAYER_S
from common.run import RunContext
from launch.processes.helpers import ScorerRole
from launch.processes.learner_group import StageRole
from learner.config import LearnerSections


class SleepingChunksRole(StageRole):
    """A stage whose chunks sleep."""

    def setup(self, context: RunContext[LearnerSections], rank: int, rendezvous: str) -> None:
        """As the real one."""
        _let_chunks_sleep()
        super().setup(context, rank, rendezvous)


class SleepingScorerRole(ScorerRole):
    """A scorer whose chunk sleeps: it has all layers, and takes as long as all stages together."""

    def run(self, context: RunContext[LearnerSections], number: int) -> None:
        """As the real one."""
        _let_chunks_sleep()
        super().run(context, number)


def _let_chunks_sleep() -> None:
    """In this process alone: for each layer and micro-batch once on the way out, twice on the way back."""
    from torch import Tensor

    from benchmarks.learner_parts.sleeping import Sleep
    from learner.model import StageModule

    forward = StageModule.forward

    def slow(self: StageModule, states: Tensor, micro_batch: Tensor) -> Tensor:
        seconds = LAYER_S * (self.share.end_layer - self.share.first_layer)
        slept: Tensor = Sleep.apply(forward(self, states, micro_batch), seconds, 2 * seconds)
        return slept

    StageModule.forward = slow  # type: ignore[method-assign]
