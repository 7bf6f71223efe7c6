"""AdamW on float32 master weights; an update is applied on all stages and networks, or on none.

An update is one optimizer step of the policy and of its critic (model or value head): both are taken, or neither.
Gradients of policy and critic are clipped separately, by their norms over all stages. With bfloat16, the weights that
modules compute with are rounded from the masters once per update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from leeway.common.hf_folder import HEAD
from leeway.learner.config import LearnerConfig
from leeway.learner.mesh import Mesh
from leeway.learner.model import EMBEDDING
from leeway.learner.products import gradient_of

ADAM_BETAS = (0.9, 0.99)
"""Decay rates of the two moments; an average over 100 updates follows rewards that change with the policy."""
ADAM_EPS = 1e-8

CLIP_EPS = 1e-6
"""Added to the norm before dividing by it, as in torch.nn.utils.clip_grad_norm_."""

BUCKET_ELEMENTS = 2**24
"""Gradient elements per all-reduce between replicas (64 MiB in float32); bounds the size of the temporary copy."""


def learning_rate(config: LearnerConfig, update: int, last: float) -> float:
    """Return the learning rate of an update: warm-up, then a decay that reaches 0 with the last step.

    With warm-up, the rate of an update exceeds `last`, the rate of the update before, by at most 1 / warmup of
    the peak. A resumed run thus enters a longer schedule without a jump. Updates are 0-based over all steps, including
    skipped ones; before the first update the rate is 0.
    """
    warmup = config.warmup_steps * config.updates_per_step
    progress = min(1.0, max(0, update - warmup) / max(1, config.num_steps * config.updates_per_step - warmup))
    decays = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    most = last + config.learning_rate / warmup if warmup else math.inf
    return min(most, config.learning_rate * decays[config.lr_schedule])


@dataclass(frozen=True)
class UpdateResult:
    """Result of an update, the same on all ranks. If an update is not applied, no weight of any stage changes."""

    taken: bool
    """False if the loss or gradient was not finite."""
    grad_norms: tuple[float, ...]
    """Gradient norm of each optimizer over all stages, before clipping."""
    learning_rate: float
    lr_scale: float


class StageOptimizer:
    """Optimizer of one rank's shard of a policy or critic; driven by `update_together`."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        computed: Mapping[str, nn.Parameter],
        config: LearnerConfig,
        mesh: Mesh,
        device: torch.device,
        *,
        of_critic: bool = False,
        tied: bool = False,
    ) -> None:
        """Create AdamW without weight decay.

        `parameters` uses the names of the whole model; it is empty if another stage has the value head. `computed` maps
        these names to the tensors that modules compute with: a rounded copy, or the parameter itself. `tied`: embedding
        and LM head are one tensor.
        """
        self.parameters = dict(parameters)
        rounded = [(computed[name], master) for name, master in self.parameters.items() if computed[name] is not master]
        self._roundings: list[Tensor] = [rounding for rounding, _ in rounded]
        self._masters: list[Tensor] = [master for _, master in rounded]
        self.device = device
        self._config = config
        self._mesh = mesh
        self._shares_embedding = tied and mesh.ends is not None
        peak = (of_critic and config.critic_learning_rate) or config.learning_rate
        self._rate_factor = peak / config.learning_rate
        self.adam: torch.optim.AdamW | None = None
        if self.parameters:
            self.adam = torch.optim.AdamW(
                self.parameters.values(),
                lr=config.learning_rate,
                betas=ADAM_BETAS,
                eps=ADAM_EPS,
                weight_decay=0.0,  # negligible at the learning rates of reinforcement learning
                fused=True,
            )

    def squared_norm(self) -> Tensor:
        """Return this rank's contribution to the squared gradient norm, float64.

        Sums gradients over replicas, and gradients of a tied weight over its two copies; all ranks must take part.
        """
        self._move_gradients()
        self._sum_over_replicas()
        self._sum_tied_gradients()
        # a tied weight has the same summed gradient on both stages: only the first stage counts it
        second_copy = HEAD if self._shares_embedding and self._mesh.place.is_last else None
        gradients = [
            each.grad for name, each in self.parameters.items() if name != second_copy and each.grad is not None
        ]
        if not gradients or not self._mesh.place.publishes:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return nn.utils.get_total_norm(gradients).double().square()

    def apply(self, norm: float, rate: float) -> None:
        """Clip by the norm over all stages and take a step; a critic's rate is scaled by the ratio of peak rates."""
        if self.adam is None:
            return
        coefficient = self._config.max_grad_norm / (norm + CLIP_EPS)
        if coefficient < 1:
            # a float, not a tensor: a float64 tensor has no foreach kernel
            torch._foreach_mul_([p.grad for p in self.parameters.values() if p.grad is not None], coefficient)
        for group in self.adam.param_groups:
            group["lr"] = rate * self._rate_factor
        self.adam.step()
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        """Copy the masters into the rounded copies that modules compute with."""
        if self._roundings:
            torch._foreach_copy_(self._roundings, self._masters)

    def _move_gradients(self) -> None:
        """Move the gradients of the rounded copies to their masters."""
        for rounding, master in zip(self._roundings, self._masters, strict=True):
            master.grad, rounding.grad = rounding.grad, None

    def clear(self) -> None:
        self._move_gradients()
        for parameter in self.parameters.values():
            parameter.grad = None

    def _sum_over_replicas(self) -> None:
        """All-reduce gradients in buckets, once per update; a missing gradient counts as zeros."""
        if self._mesh.place.num_replicas == 1:
            return
        for bucket in _buckets(list(self.parameters.values())):
            flat = torch.cat([gradient_of(parameter).flatten() for parameter in bucket])
            dist.all_reduce(flat, group=self._mesh.replicas)
            for parameter, summed in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
                parameter.grad = summed.view_as(parameter)

    def _sum_tied_gradients(self) -> None:
        if not self._shares_embedding:
            return
        weight = self.parameters[EMBEDDING if self._mesh.place.stage == 0 else HEAD]
        dist.all_reduce(gradient_of(weight), group=self._mesh.ends)

    def state(self) -> dict[str, Tensor]:
        """Return `exp_avg.NAME`, `exp_avg_sq.NAME` and `step.NAME` (number of updates) of each parameter.

        Before the first update, moments are created as zeros, so that a checkpoint can be loaded into them.
        """
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            assert self.adam is not None
            entry: dict[str, Any] = self.adam.state[parameter]
            if not entry:
                entry["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                entry["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
                entry["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
            tensors.update({f"{key}.{name}": value for key, value in entry.items()})
        return tensors


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield consecutive parameters of one dtype, up to `BUCKET_ELEMENTS` elements at a time."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        full = sum(p.numel() for p in bucket) + parameter.numel() > BUCKET_ELEMENTS
        if bucket and (full or bucket[0].dtype != parameter.dtype):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


def update_together(
    optimizers: Sequence[StageOptimizer], rate: float, lr_scale: float | None, mesh: Mesh
) -> UpdateResult:
    """Step all optimizers or none, then clear the gradients. All ranks must call this function in the same order.

    `rate` is the learning rate of the policy. `lr_scale` is its factor, from 0 to 1, or NaN to skip the update; it is
    None except on the coordinator.
    """
    assert (lr_scale is not None) == mesh.place.is_coordinator, "only the coordinator sets lr_scale"
    # a single reduction: a NaN norm on one stage makes the sum NaN on all
    shares = [torch.tensor([lr_scale or 0.0], dtype=torch.float64, device=optimizers[0].device)]
    shares.append(torch.stack([optimizer.squared_norm() for optimizer in optimizers]))
    total = torch.cat(shares)
    dist.all_reduce(total)
    scale, *squares = total.tolist()
    norms = tuple(math.sqrt(square) if square >= 0 else math.nan for square in squares)
    taken = all(map(math.isfinite, (scale, *norms)))
    scale = 1.0 if math.isnan(scale) else scale
    result = UpdateResult(taken, norms, rate * scale, scale)
    for norm, optimizer in zip(norms, optimizers, strict=True):
        if result.taken:
            optimizer.apply(norm, result.learning_rate)
        optimizer.clear()
    return result
