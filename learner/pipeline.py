"""Pipeline: forward-only and training schedules over torch.distributed.pipelining.

Each schedule object serves one mode (forward-only or training) and one shape [M, L], because a change of mode triggers
shape inference. Shapes are always given, never inferred, so nothing is pickled between stages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from leeway.learner.config import ScheduleName
from leeway.learner.mesh import Mesh, MeshPlace
from leeway.learner.model import DeviceBatch, StageModule
from leeway.learner.packing import PackedBatch

KEPT_BYTES = 256 * 2**20
"""Maximum bytes of receive buffers of the schedules that a pipeline caches between passes."""

_WRAPPED = re.compile(r"failed to run (forward|stage backward)", re.IGNORECASE)
"""Prefix of torch's wrapper around errors of a chunk; a long list of arguments and shapes follows."""

Coefficients = Callable[[int, Tensor], Tensor]
"""(micro-batch, its outputs without their graph) -> dL / d(outputs), of the same shape."""

Schedule = PipelineScheduleSingle | PipelineScheduleMulti
ScheduleKey = tuple[bool, int, int]


class OutOfMemory(RuntimeError):
    """A pass exceeded the device memory; the message names the pass and the keys to change."""


class Pipeline:
    """Pipeline over the chunks of this rank and its neighbours; all ranks of a replica must make the same calls."""

    def __init__(self, modules: Sequence[StageModule], mesh: Mesh, schedule: ScheduleName) -> None:
        self.modules = tuple(modules)
        self._mesh = mesh
        self._schedule_name = schedule
        self._schedules: dict[ScheduleKey, tuple[Schedule, list[PipelineStage]]] = {}
        self._coefficients: Coefficients | None = None

    @torch.no_grad()
    def forward_only(self, batch: DeviceBatch) -> Tensor | None:
        """Return the outputs on the last stage, [M, L] or [M, 2, L], and None elsewhere; may raise OutOfMemory."""
        return self._run(batch, train=False)

    def train(self, batch: DeviceBatch, coefficients: Coefficients | None) -> Tensor | None:
        """Accumulate the gradient of sum(coefficients * outputs) in the parameters; the result is as in `forward_only`.

        On the last stage, `coefficients` is called for each micro-batch; the other stages ignore it.
        """
        self._coefficients = coefficients
        try:
            outputs = self._run(batch, train=True)
        finally:
            self._coefficients = None
        return None if outputs is None else outputs.detach()

    def _run(self, batch: DeviceBatch, *, train: bool) -> Tensor | None:
        key = (train, batch.packed.num_micro_batches, batch.packed.width)
        if key not in self._schedules:
            if sum(map(self._buffer_bytes, (*self._schedules, key))) > KEPT_BYTES:
                self._schedules.clear()
            self._schedules[key] = self._build(*key)
        schedule, stages = self._schedules[key]
        for module in self.modules:
            module.batch = batch
        try:
            outputs = self._step(key, schedule, batch)
        finally:
            for module in self.modules:
                module.batch = None
        # release outputs and received tensors: other pipelines of this rank need the memory
        for stage in stages:
            stage.clear_runtime_states()
        if self._buffer_bytes(key) > KEPT_BYTES:
            del self._schedules[key]
        return outputs

    def _step(self, key: ScheduleKey, schedule: Schedule, batch: DeviceBatch) -> Tensor | None:
        index_M = torch.arange(batch.packed.num_micro_batches)
        holds_first, holds_last = self.modules[0].share.is_first, self.modules[-1].share.is_last
        arguments = (batch.tokens_ML,) if holds_first else ()
        target = index_M if key[0] and holds_last else None
        try:
            outputs = schedule.step(*arguments, target=target, micro_batch=index_M)
        except RuntimeError as error:
            failed = _cause(error)
        else:
            assert outputs is None or isinstance(outputs, Tensor)
            return outputs
        # raised outside the except block, so that torch's long wrapper is not chained to the original error
        if isinstance(failed, torch.OutOfMemoryError):
            message = explain_out_of_memory(self._mesh.place, self.modules[0], batch.packed, failed, train=key[0])
            raise OutOfMemory(message) from failed
        raise failed

    def _weighted_sum(self, outputs: Tensor, micro_batch: Tensor) -> Tensor:
        """Return the scalar whose gradient equals that of the loss of the whole batch: sum(coefficient * output)."""
        assert self._coefficients is not None, "training needs coefficients on the last stage"
        return (outputs * self._coefficients(int(micro_batch), outputs.detach())).sum()

    def _buffer_bytes(self, key: ScheduleKey) -> int:
        """Return the bytes of the receive buffers for states and, if training, gradients.

        The first and last chunks receive less, but all ranks must get the same number. All ranks must evict a schedule
        together, because a new schedule communicates with its neighbours before its first pass.
        """
        train, num_micro_batches, width = key
        per_micro_batch = width * self.modules[0].hidden_size * self.modules[0].states_dtype.itemsize
        return (2 if train else 1) * num_micro_batches * per_micro_batch * len(self.modules)

    def _build(self, train: bool, num_micro_batches: int, width: int) -> tuple[Schedule, list[PipelineStage]]:
        stages = [self._stage(module, width, train=train) for module in self.modules]
        # the denominators of the loss are global: gradients are summed over micro-batches, not averaged
        loss = self._weighted_sum if train else None
        return build_schedule(self._schedule_name, stages, num_micro_batches, loss), stages

    def _stage(self, module: StageModule, width: int, *, train: bool) -> PipelineStage:
        share, device = module.share, module.device
        tokens = torch.zeros(1, width, dtype=torch.int64, device=device)
        outputs = torch.zeros(module.output_shape(width), dtype=torch.promote_types(module.dtype, torch.float32))
        hidden = torch.zeros(
            1, width, module.hidden_size, dtype=module.states_dtype, device=device, requires_grad=train
        )
        return PipelineStage(
            module,
            share.chunk,
            share.num_chunks,
            device,
            input_args=tokens if share.is_first else hidden,
            output_args=outputs.to(device).requires_grad_(train) if share.is_last else hidden,
            group=self._mesh.pipeline,
        )


def explain_out_of_memory(
    place: MeshPlace, module: StageModule, packed: PackedBatch, error: torch.OutOfMemoryError, *, train: bool
) -> str:
    """Return a one-line message with the failed pass and the keys to change."""
    remedy = "lower learner.token_budget"
    if train and not module.activation_checkpointing:
        remedy += ", set learner.activation_checkpointing = true"
    return (
        f"{place.name} ran out of memory in a {'training' if train else 'forward-only'} pass of "
        f"{packed.num_micro_batches} micro-batches of {packed.width} tokens: {remedy}, or split the model over more "
        f"stages. Original error: {' '.join(str(error).split())}"
    )


def build_schedule(
    name: ScheduleName,
    stages: Sequence[PipelineStage],
    num_micro_batches: int,
    loss: Callable[[Tensor, Tensor], Tensor] | None,
) -> Schedule:
    """Build a schedule over the stages of this rank; several stages require an interleaved schedule.

    `loss` maps (outputs, target) of a micro-batch to a scalar; None builds a forward-only schedule.
    """
    several = len(stages) > 1
    if loss is None:
        if several:
            return ScheduleLoopedBFS(list(stages), num_micro_batches, None, scale_grads=False)
        return ScheduleGPipe(stages[0], num_micro_batches, None, scale_grads=False)
    if name in ("1f1b", "fused") or stages[0].num_stages == 1:
        assert not several, f"schedule {name} supports one chunk per stage"
        return Schedule1F1B(stages[0], num_micro_batches, loss, scale_grads=False)
    multi = ScheduleInterleaved1F1B if name == "interleaved_1f1b" else ScheduleInterleavedZeroBubble
    return multi(list(stages), num_micro_batches, loss, scale_grads=False)


def _cause(error: RuntimeError) -> BaseException:
    """Return the original error inside torch's wrapper "failed to run forward: args ..." or "... backward: ..."."""
    found: BaseException = error
    while isinstance(found, RuntimeError) and _WRAPPED.search(str(found)) and found.__cause__ is not None:
        found = found.__cause__
    return found
