"""Our side: the learner's own training step, on batches that are ready."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from algorithms.off_policy_ppo import OffPolicyPPOConfig
from buffer.trajectory import Trajectory
from learner.assembly import chunk_loader
from learner.batch import StepBatch
from learner.config import LearnerConfig
from learner.mesh import Mesh
from learner.networks import Network, Networks
from learner.packing import PackingRule
from learner.pipeline import micro_batch_rule
from learner.reference import Reference
from learner.step import TrainStep

TEMPERATURE = 1.0
ALGORITHM = OffPolicyPPOConfig(proximal="behaviour", baseline="rloo")
"""Plain PPO with a group baseline: separable, needs no reference, and short to write down a second time."""


def configured(mesh: Mesh, **changes: Any) -> LearnerConfig:  # noqa: ANN401 -- keys of the section
    """The `[learner]` section with this mesh's number of stages, and a learning rate that float32 weights do not feel.

    So all steps on all sides have one gradient, by which they are held to compute the same.
    """
    return LearnerConfig.model_validate({"num_stages": mesh.place.num_stages, "learning_rate": 1e-12, **changes})


class Learner:
    """This rank of a learner that trains on its own schedule, without buffer and actors."""

    def __init__(self, model_path: Path, mesh: Mesh, config: LearnerConfig, device: torch.device | None = None) -> None:
        """Load this rank's chunks; all ranks of the mesh call it together.

        Args:
            model_path: checkpoint folder.
            mesh: the pipeline.
            config: schedule, chunks, precision and optimizer.
            device: None: the CPU.
        """
        self.device = device or torch.device("cpu")
        chunks = chunk_loader(config, TEMPERATURE, mesh, self.device)(model_path, "token")
        networks = Networks(Network.build(chunks, config, mesh), None, config, mesh)
        self.num_parameters = sum(parameter.numel() for _, parameter in networks.policy.named_parameters())
        """Of this rank."""
        self._config = config
        self._mesh = mesh
        reference = Reference(None, networks)
        self._steps = {
            one_pass: TrainStep(networks, reference, ALGORITHM, config.model_copy(update={"one_pass": one_pass}))
            for one_pass in (True, False)
        }

    def batch(self, rows: Sequence[Trajectory], *, min_micro_batches: int = 1) -> StepBatch:
        """Samples as a step trains them, packed as the schedule asks."""
        wanted = micro_batch_rule(self._config.schedule, self._mesh.place.num_stages)
        rule = PackingRule(
            self._config.token_budget,
            min_micro_batches=max(wanted.least, min_micro_batches),
            multiple=wanted.multiple,
        )
        return StepBatch.build(rows, 0, {0: 0}, rule)

    def step(self, batch: StepBatch, *, one_pass: bool = True) -> float:
        """One step, in one pass or in two. Returns the gradient norm before clipping."""
        (update,) = self._steps[one_pass].run(batch, 0).updates
        if not update.result.taken:
            raise RuntimeError("the learner did not take the step: loss or gradient are not finite")
        return update.result.grad_norms[0]
