"""Networks: the trained models behind one interface: the policy, and a critic (its second head or a separate model).

A training step reads log-probabilities and values, and returns their gradients. This module gathers the outputs of the
networks and replicas, and distributes the gradients. Reference: frozen models, which score each trajectory once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from leeway.algorithms.base import CriticKind
from leeway.common.run import RunContext
from leeway.learner.batch import Leaves, StepBatch
from leeway.learner.config import LearnerConfig, LearnerSections, stage_of
from leeway.learner.device import most_kept_mib
from leeway.learner.mesh import Mesh
from leeway.learner.model import DeviceBatch, Heads, StageModule, is_value_head, load_stage
from leeway.learner.optimizer import StageOptimizer, UpdateResult, learning_rate, update_together
from leeway.learner.packing import IntArray, PackedBatch
from leeway.learner.pipeline import Coefficients, Pipeline
from leeway.learner.products import COMPUTED

FUSED = "leeway.planning.fused:fused_passes"
"""Factory of the passes for `learner.schedule = "fused"`; imported by name."""
Gradient = Callable[[Tensor, Tensor], Tensor]
"""(indices into the T tokens, their log-probabilities) -> dL / d(log-probability), float32 or wider."""
Scores = dict[int, npt.NDArray[np.float32]]
"""Index of a trajectory in the batch -> log-probabilities of its completion tokens."""


@dataclass(frozen=True)
class Network:
    """One trained model: the chunks on this rank, their pipeline and optimizers."""

    modules: tuple[StageModule, ...]
    pipeline: Pipeline
    optimizers: tuple[StageOptimizer, ...]
    """One optimizer for the model, and a second one for the value head of a policy."""

    @classmethod
    def build(cls, modules: Sequence[StageModule], config: LearnerConfig, mesh: Mesh) -> Network:
        """Build the pipeline and optimizers of this rank's chunks, given in layer order; all ranks must take part."""
        heads, tied, device = modules[0].heads, modules[0].tied, modules[0].device
        named = {name: weight for module in modules for name, weight in module.weights().items()}
        computed = {name: parameter for module in modules for name, parameter in module.named_parameters()}
        if heads == "token_and_value":
            body = {name: weight for name, weight in named.items() if not is_value_head(name)}
            value_head = {name: weight for name, weight in named.items() if is_value_head(name)}
            optimizers: tuple[StageOptimizer, ...] = (
                StageOptimizer(body, computed, config, mesh, device, tied=tied),
                StageOptimizer(value_head, computed, config, mesh, device, of_critic=True),
            )
        else:
            of_critic = heads == "value"
            optimizers = (StageOptimizer(named, computed, config, mesh, device, of_critic=of_critic, tied=tied),)
        return cls(tuple(modules), Pipeline(modules, mesh, config.schedule), optimizers)

    @property
    def device(self) -> torch.device:
        return self.modules[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.modules[0].dtype

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the trained weights of all chunks, under names of the whole model."""
        for module in self.modules:
            yield from module.weights().items()

    def published_tensors(self, *, rounded: bool = False) -> dict[str, Tensor]:
        found = (module.published_tensors(rounded=rounded) for module in self.modules)
        return {name: tensor for each in found for name, tensor in each.items()}

    def exported_tensors(self) -> dict[str, Tensor]:
        return {name: tensor for module in self.modules for name, tensor in module.exported_tensors().items()}


class PolicyAndCriticPasses(Protocol):
    """Concurrent passes of the policy and a critic model; the stages of the critic are in reverse order."""

    modules: tuple[StageModule, ...]
    """The stage of each network on this rank; set before the first pass."""

    def forward_only(self, batch: DeviceBatch) -> list[Tensor | None]: ...

    def train(self, batch: DeviceBatch, coefficients: Sequence[Coefficients | None]) -> list[Tensor | None]: ...


@dataclass(eq=False)
class Networks:
    """The policy and an optional critic; all ranks must call every method."""

    policy: Network
    critic: Network | None
    config: LearnerConfig
    mesh: Mesh
    fused: PolicyAndCriticPasses | None = None
    """If set, passes of policy and critic run together, and the critic's stages are in reverse order."""
    rate: float = 0.0
    """Scheduled learning rate of the last update; 0 before the first."""

    @property
    def all(self) -> tuple[Network, ...]:
        """The policy, followed by the critic model, if any."""
        return (self.policy,) if self.critic is None else (self.policy, self.critic)

    @property
    def optimizers(self) -> list[StageOptimizer]:
        """Optimizers of the policy, followed by that of the critic, if any."""
        return [optimizer for network in self.all for optimizer in network.optimizers]

    def on_device(self, packed: PackedBatch) -> DeviceBatch:
        """Return this replica's part of a batch, on the policy's device."""
        return share_of(packed, self.mesh, self.policy.device)

    def forward_only(self, batch: DeviceBatch) -> Leaves | None:
        """Return log-probabilities and critic values of all T completion tokens on the last stages; None elsewhere."""
        if self.fused is not None:
            gathered = [gather_tokens(outputs, batch, self.mesh) for outputs in self.fused.forward_only(batch)]
            gathered[1] = self._carry(gathered[1], batch, to_last=True)
        else:
            gathered = [gather_tokens(network.pipeline.forward_only(batch), batch, self.mesh) for network in self.all]
        by_token = [found for found in gathered if found is not None]
        if not by_token:
            return None
        logprobs_T, *values = torch.cat(by_token).unbind()
        return Leaves(logprobs_T, values[0] if values else None)

    def train(self, batch: DeviceBatch, gradient: Leaves | None) -> None:
        """Add the gradient of the loss to the parameters' gradients.

        `gradient` is dL / d(leaf) of all T tokens, read only on the coordinator. If the coordinator passes None,
        the pass changes nothing but still runs, because the other stages take part in the pass.
        """
        place = self.mesh.place
        rows = self._rows(batch, gradient) if place.is_last else None
        if self.fused is not None:
            value_rows = self._carry(None if rows is None else rows[1:], batch, to_last=False)
            own = (None if rows is None else rows[:1], value_rows)
            self.fused.train(batch, [None if each is None else _spread(each, batch) for each in own])
            return
        for network in self.all:
            module, coefficients = network.modules[-1], None
            if rows is not None:
                coefficients = _spread(rows[: module.num_heads], batch)
                rows = rows[module.num_heads :]
            network.pipeline.train(batch, coefficients)

    def _carry(self, values_1T: Tensor | None, batch: DeviceBatch, *, to_last: bool) -> Tensor | None:
        """Send values from one end of the pipeline to the other; return [1, T] on the receiver, None elsewhere."""
        place = self.mesh.place
        if self.mesh.ends is None:
            return None
        if is_sender := place.is_last != to_last:
            assert values_1T is not None, "the sender has values"
            values_1T = values_1T.contiguous()
        else:
            wide = torch.promote_types(self.policy.dtype, torch.float32)
            values_1T = torch.empty(1, len(batch.packed.output_T), dtype=wide, device=self.policy.device)
        first = place.rank - place.stage
        dist.broadcast(values_1T, src=first if to_last else first + place.num_stages - 1, group=self.mesh.ends)
        return None if is_sender else values_1T

    def _rows(self, batch: DeviceBatch, gradient: Leaves | None) -> Tensor:
        """Return the gradient as [heads, T] on the last stages of all replicas."""
        columns = [] if gradient is None else [gradient.logprobs_T, gradient.values_T]
        wide = torch.promote_types(self.policy.dtype, torch.float32)
        num_heads = sum(network.modules[-1].num_heads for network in self.all)
        rows = torch.zeros(num_heads, len(batch.packed.output_T), dtype=wide, device=self.policy.device)
        for row, column_T in zip(rows, columns, strict=False):
            if column_T is not None:
                row.copy_(column_T)
        if self.mesh.place.num_replicas > 1:
            # one rank evaluates the loss: other ranks might round differently, and replicas must not diverge
            dist.broadcast(rows, src=self.mesh.place.coordinator, group=self.mesh.replicas)
        return rows

    def train_in_one_pass(self, batch: DeviceBatch, gradient: Gradient | None) -> Tensor | None:
        """Train like `train`, for a loss whose gradient for a sequence depends only on its unit (`Needs.separable`).

        `gradient` is called for the tokens of each micro-batch. Returns the log-probabilities of all T tokens, or
        None; `gradient` and the result are None except on the last stages.
        """
        assert self.critic is None, "a critic needs two passes"
        coefficients = None if gradient is None else _coefficients(gradient, batch)
        found = gather_tokens(self.policy.pipeline.train(batch, coefficients), batch, self.mesh)
        return None if found is None else found[0]

    def next_rate(self, number: int) -> float:
        """Return the scheduled learning rate of update `number`, 0-based over all steps."""
        return learning_rate(self.config, number, self.rate)

    def update(self, number: int, lr_scale: float | None) -> UpdateResult:
        """Take the optimizer step of update `number`; `lr_scale` is as in `update_together`."""
        self.rate = self.next_rate(number)
        return update_together(self.optimizers, self.rate, lr_scale, self.mesh)


def share_of(packed: PackedBatch, mesh: Mesh, device: torch.device) -> DeviceBatch:
    return DeviceBatch(packed.of_replica(mesh.place.replica, mesh.place.num_replicas), device)


def gather_tokens(outputs: Tensor | None, batch: DeviceBatch, mesh: Mesh) -> Tensor | None:
    """Gather the outputs of all replicas by token: [M, L] or [M, heads, L] -> [heads, T].

    The result is the same on all last stages; None on other stages.
    """
    if outputs is None:
        return None
    packed, output_T = batch.packed, batch.output_T
    by_head = outputs.reshape(packed.num_micro_batches, -1, packed.width).transpose(0, 1).flatten(1)
    tokens = by_head[:, output_T.clamp_min(0)]
    if mesh.place.num_replicas > 1:
        # each token belongs to one replica and is zero in the others: adding zeros is exact
        tokens = tokens.masked_fill(output_T < 0, 0.0)
        dist.all_reduce(tokens, group=mesh.replicas)
    return tokens


def _spread(rows: Tensor, batch: DeviceBatch) -> Coefficients:
    """Return a function that selects a micro-batch's coefficients from those of the whole batch, [heads, T]."""
    packed, output_T = batch.packed, batch.output_T
    own_T = output_T >= 0
    flat = rows.new_zeros(len(rows), packed.num_micro_batches * packed.width)
    flat[:, output_T[own_T]] = rows[:, own_T]
    by_micro_batch = flat.view(len(rows), packed.num_micro_batches, packed.width)
    return lambda micro_batch, outputs: by_micro_batch[:, micro_batch].reshape(outputs.shape)


def _coefficients(gradient: Gradient, batch: DeviceBatch) -> Coefficients:
    """Return a function that computes the coefficients of a micro-batch from its outputs."""

    def coefficients(micro_batch: int, outputs: Tensor) -> Tensor:
        where, at = batch.predicted[micro_batch], batch.completions[micro_batch]
        flat = outputs.flatten()
        found = gradient(where, flat[at])
        return torch.zeros_like(flat).index_copy(0, at, found.to(flat.dtype)).view(outputs.shape)

    return coefficients


def load_chunks(
    path: Path,
    heads: Heads,
    config: LearnerConfig,
    temperature: float,
    mesh: Mesh,
    device: torch.device,
    *,
    frozen: bool = False,
    backwards: bool = False,
) -> list[StageModule]:
    """Load this rank's chunks of a checkpoint: stage p of P has p, p + P, p + 2P, ... of P * learner.num_chunks.

    With bfloat16, `frozen` chunks keep no float32 masters. `backwards` reverses the order of the stages.
    """
    num_stages = mesh.place.num_stages
    stage = stage_of(int(backwards), mesh.place.stage, num_stages)
    widths = {"float32": torch.float32, "bfloat16": COMPUTED if frozen else torch.float32, "float64": torch.float64}
    chunks = [
        load_stage(
            path,
            chunk * num_stages + stage,
            num_stages * config.num_chunks,
            temperature=temperature,
            device=device,
            dtype=widths[config.precision],
            heads=heads,
            activation_checkpointing=config.activation_checkpointing,
        )
        for chunk in range(config.num_chunks)
    ]
    for chunk in chunks:
        chunk.requires_grad_(not frozen)
        chunk.rule = replace(chunk.rule, kept_mib=most_kept_mib(config, device.type))
        if config.schedule != "zero_bubble" or num_stages == 1:
            chunk.add_gradients_in_place()
        if config.precision == "bfloat16":
            chunk.compute_in_bfloat16()
    return chunks


def load_networks(
    path: Path, config: LearnerConfig, critic: CriticKind | None, temperature: float, mesh: Mesh, device: torch.device
) -> Networks:
    """Load this rank's chunks of the policy, and of a critic of this kind; all ranks must take part."""
    is_fused = critic == "model" and config.schedule == "fused" and mesh.place.num_stages > 1

    def loaded(heads: Heads, *, backwards: bool = False) -> Network:
        chunks = load_chunks(path, heads, config, temperature, mesh, device, backwards=backwards)
        return Network.build(chunks, config, mesh)

    fused: PolicyAndCriticPasses | None = resolve_name(FUSED)(path, config, mesh, device) if is_fused else None
    policy = loaded("token_and_value" if critic == "head" else "token")
    values = loaded("value", backwards=is_fused) if critic == "model" else None
    if fused is not None and values is not None:
        fused.modules = (policy.modules[0], values.modules[0])
    return Networks(policy, values, config, mesh, fused)


@dataclass(eq=False)
class Reference:
    """Frozen models that score every sample once: one for all prompts, or several teachers with their own prompts."""

    pipelines: Sequence[Pipeline]
    """One pipeline per model, over this rank's chunks; empty if the algorithm needs no reference."""
    mesh: Mesh
    device: torch.device
    dtype: torch.dtype
    """Dtype of the log-probabilities that a loss reads."""
    teachers: bytes = b""
    """Model index of each prompt, by prompt id; empty if one model scores all prompts."""

    def score(self, batch: StepBatch, on_device: DeviceBatch) -> tuple[Tensor | None, Scores]:
        """Return all reference log-probabilities [T], and the newly computed ones; all ranks must take part.

        Log-probabilities are rounded to float32 in any precision, and are NaN without a reference. Stages other than
        the last return None and an empty dict. Offloaded models are released afterwards.
        """
        reference_T = self._stored(batch) if self.mesh.place.is_last else None
        unscored = batch.unscored()
        scores: Scores = {}
        for pipeline, found in self._by_model(batch.prompt_B[unscored]):
            own = unscored[found]
            is_all = len(own) == batch.rows.num_rows
            packed = on_device if is_all else share_of(batch.pack(own), self.mesh, self.device)
            self._release(exclude=pipeline)
            logprobs = gather_tokens(pipeline.forward_only(packed), packed, self.mesh)
            if logprobs is None or reference_T is None:
                continue
            # rounded as in the buffer, so that a repeated step reads the same values even in float64
            new_T = logprobs[0].to(torch.float32)
            where_T = torch.from_numpy(batch.tokens_of(own)).to(reference_T.device)
            reference_T[where_T] = new_T.to(reference_T.dtype)
            by_sequence = np.split(new_T.cpu().numpy(), np.cumsum(np.diff(batch.bounds_T())[own])[:-1])
            scores |= dict(zip(own.tolist(), by_sequence, strict=True))
        self._release()
        return reference_T, scores

    def _by_model(self, prompt_B: IntArray) -> Iterator[tuple[Pipeline, IntArray]]:
        """Yield each model that scores some of these sequences, with their indices, in the same order on all ranks."""
        if not self.pipelines:
            return
        number_B = np.frombuffer(self.teachers, np.uint8)[prompt_B] if self.teachers else np.zeros_like(prompt_B)
        for number in np.unique(number_B):
            yield self.pipelines[number], np.flatnonzero(number_B == number)

    def _release(self, exclude: Pipeline | None = None) -> None:
        for pipeline in self.pipelines:
            for module in pipeline.modules if pipeline is not exclude else ():
                module.release()

    def _stored(self, batch: StepBatch) -> Tensor:
        """Return the log-probabilities scored by earlier steps: [T], NaN elsewhere."""
        column = batch.rows.column("reference_logprobs")
        known_T = np.full(len(batch.sequence_T), np.nan)
        known_T[np.asarray(column.is_valid())[batch.sequence_T]] = column.flatten()
        return torch.from_numpy(known_T).to(self.device, self.dtype)


def build_reference(context: RunContext[LearnerSections], mesh: Mesh, device: torch.device) -> Reference:
    """Load the frozen models that the algorithm needs, each split like the policy; all ranks must take part."""
    config = context.config.learner
    dtype = torch.float64 if config.precision == "float64" else torch.float32
    if not context.config.algorithm.needs.reference:
        return Reference((), mesh, device, dtype)
    pipelines = []
    for path in context.reference_paths:
        chunks = load_chunks(path, "token", config, context.temperature, mesh, device, frozen=True)
        if config.reference_offload == "cpu":
            for chunk in chunks:
                chunk.offload()
        pipelines.append(Pipeline(chunks, mesh, config.schedule))
    return Reference(pipelines, mesh, device, dtype, context.teacher_of_prompt)
