"""The training step of the learner without buffer and actors, and samples for such steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from leeway.algorithms.base import AlgorithmSection
from leeway.algorithms.off_policy_ppo import OffPolicyPPOConfig
from leeway.buffer.schema import Trajectory, VersionSpan, to_batch
from leeway.common.staleness import PolicyVersion
from leeway.learner.batch import StepBatch
from leeway.learner.config import LearnerConfig
from leeway.learner.mesh import Mesh
from leeway.learner.networks import Reference, load_chunks, load_networks
from leeway.learner.packing import PackingRule, micro_batches_required
from leeway.learner.pipeline import Pipeline
from leeway.learner.step import StepResult, TrainStep

GROUP_SIZE = 8
TEMPERATURE = 1.0
ALGORITHM = OffPolicyPPOConfig(proximal="behaviour", baseline="rloo")
"""PPO with a group baseline, because this loss is separable, needs no reference model, and is easy to reimplement."""


def sample(
    number: int,
    token_ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    reward: float,
    finish_reason: Literal["stop", "length"],
) -> Trajectory:
    """Return a sample in the form in which the buffer passes samples to the learner.

    GROUP_SIZE consecutive samples form a group.

    Args:
        number: 0-based index of the sample.
        token_ids: tokens of prompt and completion.
        logprobs: log-probabilities of the completion tokens under the first version.
        reward: reward of the completion.
        finish_reason: reason why generation ended.
    """
    return Trajectory(
        lease_id=0,
        attempt=0,
        group_id=number // GROUP_SIZE,
        sample_index=number % GROUP_SIZE,
        prompt_id=number // GROUP_SIZE,
        token_ids=token_ids,
        prompt_length=len(token_ids) - len(logprobs),
        logprobs=logprobs,
        spans=(VersionSpan(PolicyVersion(0, 0), 0, len(logprobs)),),
        reward=reward,
        finish_reason=finish_reason,
    )


class Learner:
    """One rank of a learner that trains without buffer and actors."""

    def __init__(
        self,
        model_path: Path,
        mesh: Mesh,
        config: LearnerConfig,
        device: torch.device | None = None,
        algorithm: AlgorithmSection = ALGORITHM,
        *,
        scores: bool = False,
    ) -> None:
        """Load this rank's chunks of a checkpoint, by default on the CPU; all ranks must call this method together.

        With `scores`, a frozen copy of the model is loaded too, and a step scores the samples that have no scores.
        """
        self.device = device or torch.device("cpu")
        critic = algorithm.needs.critic
        self.networks = networks = load_networks(model_path, config, critic, TEMPERATURE, mesh, self.device)
        self.policy = networks.policy
        self._config = config
        self._mesh = mesh
        frozen = []
        if scores:
            chunks = load_chunks(model_path, "token", config, TEMPERATURE, mesh, self.device, frozen=True)
            frozen.append(Pipeline(chunks, mesh, config.schedule))
        reference = Reference(frozen, mesh, self.device, torch.float32)
        self._unit = algorithm.needs.separable or "sequence"
        self._steps = {
            one_pass: TrainStep(networks, reference, algorithm, config, one_pass=one_pass) for one_pass in (True, False)
        }

    def batch(self, rows: Sequence[Trajectory], *, min_micro_batches: int = 1) -> StepBatch:
        """Pack samples into the batch of one step, as the schedule requires."""
        least, multiple = micro_batches_required(self._config.schedule, self._mesh.place.num_stages)
        rule = PackingRule(
            self._config.token_budget,
            min_micro_batches=max(least, min_micro_batches),
            multiple=multiple,
            unit=self._unit,
            num_stages=self._mesh.place.num_stages,
        )
        return StepBatch.build(to_batch(rows, "benchmark"), 0, {0: 0}, rule.on_device(self.device.type))

    def step(self, batch: StepBatch, version: int = 0, *, one_pass: bool = True) -> float:
        """Take the step after a version, in one pass or in two; return the gradient norm before clipping."""
        (update,) = self.result(batch, version, one_pass=one_pass).updates
        if not update.result.taken:
            raise RuntimeError("the learner skipped the step, because loss or gradient is not finite")
        return update.result.grad_norms[0]

    def result(self, batch: StepBatch, version: int = 0, *, one_pass: bool = True) -> StepResult:
        """Take one step like `step`, and return everything that the learner reports about the step."""
        return self._steps[one_pass].run(batch, version)
