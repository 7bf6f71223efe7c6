"""Networks: what a run trains, as one thing: the policy, and a critic that is its second head or a model of its own.

The step asks for log-probabilities and values and hands back their gradients. Which network and which replica computes
them is known here alone. Reference: the frozen models, which score what no earlier step has scored.
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

from algorithms.base import CriticKind
from common.run import RunContext
from learner.batch import Leaves, StepBatch
from learner.config import LearnerConfig, LearnerSections, stage_of
from learner.device import most_kept_mib
from learner.mesh import Mesh
from learner.model import DeviceBatch, Heads, StageModule, is_value_head, load_stage
from learner.optimizer import StageOptimizer, UpdateResult, learning_rate, update_together
from learner.packing import IntArray, PackedBatch
from learner.pipeline import Coefficients, Pipeline
from learner.products import COMPUTED

FUSED = "planning.fused:fused_passes"
"""Makes the passes of `learner.schedule = "fused"`."""
Gradient = Callable[[Tensor, Tensor], Tensor]
"""(which of the T tokens, their log-probabilities) -> dL / d(log-probability) of them, float32 or wider."""
Scores = dict[int, npt.NDArray[np.float32]]
"""Log-probabilities of a completion's tokens, by index of the trajectory in the batch."""


@dataclass(frozen=True)
class Network:
    """One model that is trained: this rank's chunks of it, its pipeline and its optimizers."""

    modules: tuple[StageModule, ...]
    pipeline: Pipeline
    optimizers: tuple[StageOptimizer, ...]
    """Of the model, and one of a policy's value head."""

    @classmethod
    def build(cls, modules: Sequence[StageModule], config: LearnerConfig, mesh: Mesh) -> Network:
        """Make this rank's chunks, in the order of their layers, trainable; all ranks call it together."""
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
        """Yield what is trained of all chunks, under the names of the whole model."""
        for module in self.modules:
            yield from module.weights().items()

    def stored_name(self, name: str) -> str:
        return self.modules[0].stored_name(name)

    def published_tensors(self, *, rounded: bool = False) -> dict[str, Tensor]:
        found = (module.published_tensors(rounded=rounded) for module in self.modules)
        return {name: tensor for each in found for name, tensor in each.items()}

    def exported_tensors(self) -> dict[str, Tensor]:
        return {name: tensor for module in self.modules for name, tensor in module.exported_tensors().items()}


class PassesOfBoth(Protocol):
    """Runs a pass of the policy and one of a critic model at once; the critic's stages count from the other end."""

    modules: tuple[StageModule, ...]
    """This rank's stage of each; set before the first pass."""

    def forward_only(self, batch: DeviceBatch) -> list[Tensor | None]: ...

    def train(self, batch: DeviceBatch, coefficients: Sequence[Coefficients | None]) -> list[Tensor | None]: ...


@dataclass(eq=False)
class Networks:
    """The policy and perhaps a critic; every method is called by all ranks."""

    policy: Network
    critic: Network | None
    config: LearnerConfig
    mesh: Mesh
    fused: PassesOfBoth | None = None
    """With these the critic's stages are counted from the other end."""
    rate: float = 0.0
    """That the schedule had for the last update; 0 before the first."""

    @property
    def all(self) -> tuple[Network, ...]:
        """The policy, and a critic model after it."""
        return (self.policy,) if self.critic is None else (self.policy, self.critic)

    @property
    def optimizers(self) -> list[StageOptimizer]:
        """Of the policy, then of a critic of either kind."""
        return [optimizer for network in self.all for optimizer in network.optimizers]

    def on_device(self, packed: PackedBatch) -> DeviceBatch:
        """Return this replica's share of a batch, on the policy's device."""
        return share_of(packed, self.mesh, self.policy.device)

    def forward_only(self, batch: DeviceBatch) -> Leaves | None:
        """Return log-probabilities, and a critic's values, of all T completion tokens; None but on the last stages."""
        if self.fused is not None:
            said = [gather_tokens(outputs, batch, self.mesh) for outputs in self.fused.forward_only(batch)]
            said[1] = self._carry(said[1], batch, to_last=True)
        else:
            said = [gather_tokens(network.pipeline.forward_only(batch), batch, self.mesh) for network in self.all]
        by_token = [found for found in said if found is not None]
        if not by_token:
            return None
        logprobs_T, *values = torch.cat(by_token).unbind()
        return Leaves(logprobs_T, values[0] if values else None)

    def train(self, batch: DeviceBatch, gradient: Leaves | None) -> None:
        """Add the gradient of the loss to the parameters' gradients.

        `gradient` is dL / d(leaf) of all T tokens, read on the coordinator alone. None there changes nothing, but
        passes through the pipeline, for the other stages wait in it.
        """
        place = self.mesh.place
        rows = self._rows(batch, gradient) if place.is_last else None
        if self.fused is not None:
            of_values = self._carry(None if rows is None else rows[1:], batch, to_last=False)
            own = (None if rows is None else rows[:1], of_values)
            self.fused.train(batch, [None if each is None else _spread(each, batch) for each in own])
            return
        for network in self.all:
            module, coefficients = network.modules[-1], None
            if rows is not None:
                coefficients = _spread(rows[: module.num_heads], batch)
                rows = rows[module.num_heads :]
            network.pipeline.train(batch, coefficients)

    def _carry(self, values_1T: Tensor | None, batch: DeviceBatch, *, to_last: bool) -> Tensor | None:
        """Send values from one end of the pipeline to the other: [1, T] there, None elsewhere."""
        place = self.mesh.place
        if self.mesh.ends is None:
            return None
        if is_sender := place.is_last != to_last:
            assert values_1T is not None, "the sender has them"
            values_1T = values_1T.contiguous()
        else:
            wide = torch.promote_types(self.policy.dtype, torch.float32)
            values_1T = torch.empty(1, len(batch.packed.output_T), dtype=wide, device=self.policy.device)
        first = place.rank - place.stage
        dist.broadcast(values_1T, src=first if to_last else first + place.num_stages - 1, group=self.mesh.ends)
        return None if is_sender else values_1T

    def _rows(self, batch: DeviceBatch, gradient: Leaves | None) -> Tensor:
        """Return the gradient as [heads, T], on the last stages of all replicas."""
        columns = [] if gradient is None else [gradient.logprobs_T, gradient.values_T]
        wide = torch.promote_types(self.policy.dtype, torch.float32)
        num_heads = sum(network.modules[-1].num_heads for network in self.all)
        rows = torch.zeros(num_heads, len(batch.packed.output_T), dtype=wide, device=self.policy.device)
        for row, column_T in zip(rows, columns, strict=False):
            if column_T is not None:
                row.copy_(column_T)
        if self.mesh.place.num_replicas > 1:
            # one rank evaluates the loss: another might round otherwise, and replicas must not come apart
            dist.broadcast(rows, src=self.mesh.place.coordinator, group=self.mesh.replicas)
        return rows

    def train_in_one_pass(self, batch: DeviceBatch, gradient: Gradient | None) -> Tensor | None:
        """As `train`, for a loss whose gradient for a sequence depends on its unit alone (`Needs.separable`).

        The gradient is asked for the tokens of each micro-batch. Returns the log-probabilities of all T tokens; None,
        as `gradient`, but on the last stages.
        """
        assert self.critic is None, "values are leaves of the whole batch"
        coefficients = None if gradient is None else _asked(gradient, batch)
        found = gather_tokens(self.policy.pipeline.train(batch, coefficients), batch, self.mesh)
        return None if found is None else found[0]

    def next_rate(self, number: int) -> float:
        """Return the learning rate that the schedule has for the next update, 0-based over all steps."""
        return learning_rate(self.config, number, self.rate)

    def update(self, number: int, lr_scale: float | None) -> UpdateResult:
        """Take the optimizer step of the next update; `lr_scale` as for `update_together`."""
        self.rate = self.next_rate(number)
        return update_together(self.optimizers, self.rate, lr_scale, self.mesh)


def share_of(packed: PackedBatch, mesh: Mesh, device: torch.device) -> DeviceBatch:
    return DeviceBatch(packed.of_replica(mesh.place.replica, mesh.place.num_replicas), device)


def gather_tokens(outputs: Tensor | None, batch: DeviceBatch, mesh: Mesh) -> Tensor | None:
    """Map a replica's outputs to the tokens they speak of, over all replicas.

    [M, L] or [M, heads, L] -> [heads, T], alike on all last stages; None on the others.
    """
    if outputs is None:
        return None
    packed, output_T = batch.packed, batch.output_T
    by_head = outputs.reshape(packed.num_micro_batches, -1, packed.width).transpose(0, 1).flatten(1)
    tokens = by_head[:, output_T.clamp_min(0)]
    if mesh.place.num_replicas > 1:
        # each token is of one replica and zero in the others: adding zeros is exact
        tokens = tokens.masked_fill(output_T < 0, 0.0)
        dist.all_reduce(tokens, group=mesh.replicas)
    return tokens


def _spread(rows: Tensor, batch: DeviceBatch) -> Coefficients:
    """Split coefficients [heads, T] of the whole batch by micro-batch of this replica."""
    packed, output_T = batch.packed, batch.output_T
    own_T = output_T >= 0
    flat = rows.new_zeros(len(rows), packed.num_micro_batches * packed.width)
    flat[:, output_T[own_T]] = rows[:, own_T]
    by_micro_batch = flat.view(len(rows), packed.num_micro_batches, packed.width)
    return lambda micro_batch, outputs: by_micro_batch[:, micro_batch].reshape(outputs.shape)


def _asked(gradient: Gradient, batch: DeviceBatch) -> Coefficients:
    """Ask for coefficients of log-probabilities when the outputs of a micro-batch are there."""

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
    """Load this rank's chunks of a checkpoint folder: stage p of P has p, p + P, p + 2P, ... of P * learner.num_chunks.

    What is frozen needs no float32 to be rounded from. `backwards` counts stages from the other end.
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
        if config.precision == "bfloat16":
            splits = config.schedule == "zero_bubble" and num_stages > 1
            chunk.compute_in_bfloat16(splits_backward=splits)
    return chunks


def load_networks(
    path: Path, config: LearnerConfig, critic: CriticKind | None, temperature: float, mesh: Mesh, device: torch.device
) -> Networks:
    """Load this rank's share of a checkpoint as policy, and as a critic of this kind; all ranks call it together."""
    is_fused = critic == "model" and config.schedule == "fused" and mesh.place.num_stages > 1

    def loaded(heads: Heads, *, backwards: bool = False) -> Network:
        chunks = load_chunks(path, heads, config, temperature, mesh, device, backwards=backwards)
        return Network.build(chunks, config, mesh)

    fused: PassesOfBoth | None = resolve_name(FUSED)(path, config, mesh, device) if is_fused else None
    policy = loaded("token_and_value" if critic == "head" else "token")
    values = loaded("value", backwards=is_fused) if critic == "model" else None
    if fused is not None and values is not None:
        fused.modules = (policy.modules[0], values.modules[0])
    return Networks(policy, values, config, mesh, fused)


@dataclass(eq=False)
class Reference:
    """Frozen models that score every sample once: one for all, or several teachers, each for its own prompts."""

    pipelines: Sequence[Pipeline]
    """This rank's chunks; empty if the algorithm needs no reference."""
    mesh: Mesh
    device: torch.device
    dtype: torch.dtype
    """Of the log-probabilities which a loss reads."""
    teachers: bytes = b""
    """The number of the model of each prompt, by its id; empty if one scores all."""

    def score(self, batch: StepBatch, on_device: DeviceBatch) -> tuple[Tensor | None, Scores]:
        """Return reference log-probabilities, and those computed anew. All ranks call it together.

        On the last stages [T], to float32 in any precision, NaN without a reference, and the new ones; None and nothing
        on the others. Off-loaded models leave the device after it.
        """
        reference_T = self._stored(batch) if self.mesh.place.is_last else None
        unscored = batch.unscored()
        scores: Scores = {}
        for pipeline, found in self._by_model(batch.prompt_B[unscored]):
            own = unscored[found]
            is_all = len(own) == batch.rows.num_rows
            packed = on_device if is_all else share_of(batch.pack(own), self.mesh, self.device)
            self._release(but=pipeline)
            logprobs = gather_tokens(pipeline.forward_only(packed), packed, self.mesh)
            if logprobs is None or reference_T is None:
                continue
            # as stored, so that a step taken again reads the same numbers also in float64
            new_T = logprobs[0].to(torch.float32)
            where_T = torch.from_numpy(batch.tokens_of(own)).to(reference_T.device)
            reference_T[where_T] = new_T.to(reference_T.dtype)
            by_sequence = np.split(new_T.cpu().numpy(), np.cumsum(np.diff(batch.bounds_T())[own])[:-1])
            scores |= dict(zip(own.tolist(), by_sequence, strict=True))
        self._release()
        return reference_T, scores

    def _by_model(self, prompt_B: IntArray) -> Iterator[tuple[Pipeline, IntArray]]:
        """Yield the models that have some of these sequences, in the same order on all ranks, and which each has."""
        if not self.pipelines:
            return
        number_B = np.frombuffer(self.teachers, np.uint8)[prompt_B] if self.teachers else np.zeros_like(prompt_B)
        for number in np.unique(number_B):
            yield self.pipelines[number], np.flatnonzero(number_B == number)

    def _release(self, but: Pipeline | None = None) -> None:
        for pipeline in self.pipelines:
            for module in pipeline.modules if pipeline is not but else ():
                module.release()

    def _stored(self, batch: StepBatch) -> Tensor:
        """Return what earlier steps have scored, NaN elsewhere: [T]."""
        column = batch.rows.column("reference_logprobs")
        known_T = np.full(len(batch.sequence_T), np.nan)
        known_T[np.asarray(column.is_valid())[batch.sequence_T]] = column.flatten()
        return torch.from_numpy(known_T).to(self.device, self.dtype)


def build_reference(context: RunContext[LearnerSections], mesh: Mesh, device: torch.device) -> Reference:
    """Load the frozen models, each split like the policy, if the algorithm needs some; all ranks call it together."""
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
