"""SmolLM2-135M trained by the learner's own step: AdamW, float32 weights, bf16 autocast, one stage of one thread."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from algorithms.off_policy_ppo import OffPolicyPPOConfig
from benchmarks.weights_parts.samples_role import GROUP_SIZE, trajectories
from learner.assembly import chunk_loader
from learner.batch import StepBatch
from learner.config import LearnerConfig
from learner.mesh import Mesh, Place
from learner.networks import Network, Networks
from learner.packing import PackingRule
from learner.reference import Reference
from learner.step import TrainStep

TOKEN_BUDGET = 512


class Trainer:
    """Trains on samples that were made before, a few groups a step, and over again when they are through."""

    def __init__(
        self, model: Path, samples: Path, scratch: Path, *, learning_rate: float, groups_per_step: int
    ) -> None:
        """Load the model.

        Args:
            model: checkpoint folder.
            samples: file of `samples_role`.
            scratch: a folder of this process.
            learning_rate: constant.
            groups_per_step: prompts of a step.
        """
        torch.set_num_threads(1)
        torch.manual_seed(0)
        meeting = scratch / f"group-{os.getpid()}"
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=0, world_size=1, timeout=timedelta(seconds=60)
        )
        mesh = Mesh.build(Place(0))
        config = LearnerConfig(
            num_stages=1, learning_rate=learning_rate, token_budget=TOKEN_BUDGET, precision="bfloat16"
        )
        chunks = chunk_loader(config, 1.0, mesh, torch.device("cpu"))(model, "token")
        networks = Networks(Network.build(chunks, config, mesh), None, config, mesh)
        algorithm = OffPolicyPPOConfig(proximal="behaviour", baseline="rloo")
        self._policy = networks.policy
        self._step = TrainStep(networks, Reference(None, networks), algorithm, config)
        self._batches = self._in_turn(samples, groups_per_step)
        self.version = 0

    def step(self) -> float:
        """One optimizer step. Returns the gradient norm before clipping."""
        (update,) = self._step.run(next(self._batches), self.version).updates
        if not update.result.taken:
            raise RuntimeError("the learner did not take the step: loss or gradient are not finite")
        self.version += 1
        return float(update.result.grad_norms[0])

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a stage publishes: by checkpoint name, the live weights themselves."""
        return self._policy.published_tensors()

    def boundary_share(self) -> float:
        """Share of the weights that lie exactly between two values of bfloat16, and so round anew at any change."""
        bits = [tensor.view(torch.int32) & 0xFFFF for tensor in self.tensors().values()]
        return sum(int((each == 0x8000).sum()) for each in bits) / sum(each.numel() for each in bits)

    @torch.no_grad()
    def spread(self) -> None:
        """Move every weight to a random place among those that round to its value of bfloat16.

        There training leaves them; this checkpoint, made from four bits, has them on few of these places.
        """
        generator = torch.Generator().manual_seed(1)
        for _, parameter in self._policy.named_parameters():
            rounded = parameter.to(torch.bfloat16).float()
            bits = torch.randint(-0x7FFF, 0x7FFF, rounded.shape, generator=generator, dtype=torch.int32)
            moved = (rounded.view(torch.int32) + bits).view(torch.float32)
            parameter.copy_(torch.where(rounded == 0, rounded, moved))

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()

    def _in_turn(self, samples: Path, groups_per_step: int) -> Iterator[StepBatch]:
        rows = trajectories(samples)
        size = groups_per_step * GROUP_SIZE
        starts = range(0, len(rows) - size + 1, size)
        rule = PackingRule(TOKEN_BUDGET)
        return (StepBatch.build(rows[start : start + size], 0, {0: 0}, rule) for start in itertools.cycle(starts))
