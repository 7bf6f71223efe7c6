"""Pipeline: forward-only and training schedules over torch.distributed.pipelining.

One schedule object serves one mode and one shape [M, L] of batch: switching a schedule between modes
would make it infer shapes anew. Shapes are given, never inferred, so nothing is pickled between stages.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from learner.model import DeviceBatch, StageModule

KEPT_SCHEDULES = 6
"""Each holds receive buffers for its micro-batches, so only the last used ones are kept."""


def weighted_sum(outputs: Tensor, coefficients: Tensor) -> Tensor:
    """The scalar whose gradient is that of the whole batch's loss: sum(coefficient * output) of a micro-batch."""
    return (outputs * coefficients).sum()


class Pipeline:
    """Runs packed batches through this process's stage and its neighbours. All ranks call the same methods."""

    def __init__(
        self,
        module: StageModule,
        schedule: Literal["gpipe", "1f1b"],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Prepare to run; schedules are built as shapes of batches come up.

        Args:
            module: this rank's stage.
            schedule: of the training pass; forward-only passes need no choice.
            group: the process group of the stages, rank by rank; None: the default one.
        """
        self.module = module
        self._train_class = Schedule1F1B if schedule == "1f1b" else ScheduleGPipe
        self._group = group
        self._schedules: OrderedDict[tuple[bool, int, int], PipelineScheduleSingle] = OrderedDict()

    @torch.no_grad()
    def forward_only(self, batch: DeviceBatch) -> Tensor | None:
        """The outputs on the last stage, [M, L] or with two heads [M, 2, L]; None on the others."""
        return self._run(batch, train=False, coefficients=None)

    def train(self, batch: DeviceBatch, coefficients: Tensor | None) -> None:
        """Add the gradient of sum(coefficients * outputs) to the parameters' gradients.

        Args:
            batch: packed; the same on all ranks.
            coefficients: dL / d(output), shaped like the outputs; needed on the last stage, ignored on the others.
        """
        self._run(batch, train=True, coefficients=coefficients)

    def _run(self, batch: DeviceBatch, *, train: bool, coefficients: Tensor | None) -> Tensor | None:
        share = self.module.share
        self.module.batch = batch
        index_M = torch.arange(batch.packed.num_micro_batches)
        schedule = self._schedule(batch, train=train)
        arguments = (batch.tokens_ML,) if share.is_first else ()
        target = coefficients if train and share.is_last else None
        try:
            outputs = schedule.step(*arguments, target=target, return_outputs=not train, micro_batch=index_M)
        finally:
            self.module.batch = None
        assert outputs is None or isinstance(outputs, Tensor)
        return outputs

    def _schedule(self, batch: DeviceBatch, *, train: bool) -> PipelineScheduleSingle:
        key = (train, batch.packed.num_micro_batches, batch.packed.width)
        schedule = self._schedules.get(key)
        if schedule is None:
            schedule = self._build(*key)
            self._schedules[key] = schedule
            if len(self._schedules) > KEPT_SCHEDULES:
                self._schedules.popitem(last=False)
        self._schedules.move_to_end(key)
        return schedule

    def _build(self, train: bool, num_micro_batches: int, width: int) -> PipelineScheduleSingle:
        module, share = self.module, self.module.share
        tokens = torch.zeros(1, width, dtype=torch.int64, device=module.device)
        outputs = torch.zeros(module.output_shape(width), dtype=torch.promote_types(module.dtype, torch.float32))
        hidden = torch.zeros(
            1, width, module.hidden_size, dtype=module.dtype, device=module.device, requires_grad=train
        )
        stage = PipelineStage(
            module,
            share.rank,
            share.num_stages,
            module.device,
            input_args=tokens if share.is_first else hidden,
            output_args=outputs.to(module.device).requires_grad_(train) if share.is_last else hidden,
            group=self._group,
        )
        if train:
            # the loss's denominators are global already: gradients are summed over micro-batches, not averaged
            return self._train_class(stage, num_micro_batches, loss_fn=weighted_sum, scale_grads=False)
        return ScheduleGPipe(stage, num_micro_batches, loss_fn=None, scale_grads=False)
