"""Networks: what a run trains, as one thing: the policy, and a critic that is its second head or a model of its own.

The step asks for log-probabilities and values and hands back their gradients; which network they come from is
known here alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from learner.batch import Leaves
from learner.config import LearnerConfig
from learner.model import DeviceBatch, StageModule
from learner.optimizer import StageOptimizer, UpdateResult, Verdict, learning_rate, tied_group, update_together
from learner.pipeline import Pipeline


@dataclass(frozen=True)
class Network:
    """One model that is trained: this rank's stage of it, its pipeline and its optimizer."""

    module: StageModule
    pipeline: Pipeline
    optimizer: StageOptimizer

    @classmethod
    def build(cls, module: StageModule, config: LearnerConfig, group: dist.ProcessGroup | None = None) -> Network:
        """Make a stage trainable; all ranks call it together.

        Args:
            module: this rank's stage.
            config: schedule and optimizer.
            group: of all stages; None: the default one.
        """
        return cls(module, Pipeline(module, config.schedule, group), StageOptimizer(module, config, tied_group(module)))


class Networks:
    """The policy and perhaps a critic; every method is called by all ranks."""

    def __init__(
        self,
        policy: Network,
        critic: Network | None,
        config: LearnerConfig,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Put them together.

        Args:
            policy: whose last stage may end in a value head too.
            critic: a model of its own, with as many stages; else None.
            config: the learning rates.
            group: of all stages; None: the default one.
        """
        self.policy = policy
        self.critic = critic
        self._config = config
        self._group = group

    def forward_only(self, batch: DeviceBatch) -> Leaves | None:
        """Log-probabilities, and a critic's values, of all T completion tokens; None but on the last rank."""
        said = [network.pipeline.forward_only(batch) for network in self._networks]
        by_token = [_gather(outputs, batch) for outputs in said if outputs is not None]
        if not by_token:
            return None
        logprobs_T, *values = torch.cat(by_token).unbind()
        return Leaves(logprobs_T, values[0] if values else None)

    def train(self, batch: DeviceBatch, gradient: Leaves | None) -> None:
        """Add the gradient of the loss to the parameters' gradients.

        Args:
            batch: packed; the same on all ranks.
            gradient: dL / d(leaf) of all T tokens; read on the last rank alone. None there: of a loss that is to
                change nothing. It takes the same way, for the other stages wait in it.
        """
        columns: list[Tensor | None] = [None, None]
        if gradient is not None:
            columns = [gradient.logprobs_T, gradient.values_T]
        for network in self._networks:
            module, coefficients = network.module, None
            if module.share.is_last:
                num_heads = 2 if module.heads == "token_and_value" else 1
                coefficients = _scatter(columns[:num_heads], batch, module)
                columns = columns[num_heads:]
            network.pipeline.train(batch, coefficients)

    def update(self, number: int, verdict: Verdict | None) -> UpdateResult:
        """Take the optimizer steps, or none.

        Args:
            number: of the update, 0-based and counted over all steps, for the learning-rate schedule.
            verdict: of the last rank; None on the others.
        """
        optimizers = [network.optimizer for network in self._networks]
        return update_together(optimizers, learning_rate(self._config, number), verdict, self._group)

    @property
    def _networks(self) -> list[Network]:
        return [self.policy] if self.critic is None else [self.policy, self.critic]


def _gather(outputs: Tensor, batch: DeviceBatch) -> Tensor:
    """From where the outputs stand to the tokens they speak of: [M, L] or [M, heads, L] -> [heads, T]."""
    num_micro_batches, width = batch.packed.num_micro_batches, batch.packed.width
    by_head = outputs.reshape(num_micro_batches, -1, width).transpose(0, 1).flatten(1)
    return by_head[:, torch.from_numpy(batch.packed.output_T).to(outputs.device)]


def _scatter(columns: Sequence[Tensor | None], batch: DeviceBatch, module: StageModule) -> Tensor:
    """The way back, for one column [T] per head; 0 where there is no token, and everywhere for None."""
    num_micro_batches, width = batch.packed.num_micro_batches, batch.packed.width
    dtype = torch.promote_types(module.dtype, torch.float32)
    by_head = torch.zeros(len(columns), num_micro_batches * width, dtype=dtype, device=module.device)
    output_T = torch.from_numpy(batch.packed.output_T).to(module.device)
    for head, column_T in zip(by_head, columns, strict=True):
        if column_T is not None:
            head[output_T] = column_T
    shape = (num_micro_batches, *module.output_shape(width)[1:])
    return by_head.view(len(columns), num_micro_batches, width).transpose(0, 1).reshape(shape)
