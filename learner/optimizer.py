"""AdamW on float32 master weights, with one verdict over all stages and all that is trained together.

An update of the learner is an optimizer step of the policy and, where there is one, of the critic: both are taken
or none is. Each is clipped to the gradient norm of its own stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from learner.config import LearnerConfig
from learner.model import EMBEDDING, HEAD, StageModule, is_value_head


def learning_rate(config: LearnerConfig, update: int) -> float:
    """The learning rate of an update: linear warm-up, then the configured decay until the last step.

    Args:
        config: schedule, peak, and how many updates a step has.
        update: 0-based, counted over all steps as if none were skipped.
    """
    warmup = config.warmup_steps * config.updates_per_step
    if update < warmup:
        return config.learning_rate * (update + 1) / warmup
    if config.lr_schedule == "constant":
        return config.learning_rate
    progress = min(1.0, (update - warmup) / max(1, config.num_steps * config.updates_per_step - warmup))
    share = 1 - progress if config.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)


@dataclass(frozen=True)
class Verdict:
    """What the rank that evaluated the loss says of an update."""

    healthy: bool = True
    """False where loss or coefficients were not finite."""
    drop: bool = False
    """Take no optimizer step, although it could be taken."""
    lr_scale: float = 1.0
    """Factor of the learning rate."""


@dataclass(frozen=True)
class UpdateResult:
    """What an update did; the same on all ranks. Where it was not taken, no weight of any stage changed."""

    sick: bool
    """A non-finite loss or gradient somewhere."""
    dropped: bool
    grad_norms: tuple[float, ...]
    """Of each optimizer over all its stages, before clipping."""
    learning_rate: float
    """Of the policy, scaled."""
    lr_scale: float

    @property
    def taken(self) -> bool:
        """Is there a new version?"""
        return not (self.sick or self.dropped)


class StageOptimizer:
    """Updates one stage's weights, when `update_together` says so."""

    def __init__(self, module: StageModule, config: LearnerConfig, tied: dist.ProcessGroup | None) -> None:
        """Create AdamW over the stage's parameters.

        Args:
            module: the stage.
            config: learning rates, betas, decay and clipping.
            tied: of the first and last stage, where embedding and head are one tensor on two ranks; else None.
        """
        self.module = module
        self._config = config
        self._tied = tied
        self._groups = _parameter_groups(module, config)
        self.adam = torch.optim.AdamW(
            [{"params": group.parameters, "weight_decay": group.weight_decay} for group in self._groups],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )

    def squared_norm(self) -> Tensor:
        """This stage's share of the squared gradient norm, float64. Sums tied gradients first, so all ranks call it."""
        self._sum_tied_gradients()
        counted = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        if self._tied is not None and self.module.share.is_last:
            # the first stage counts the tied tensor: its gradient is the same sum there
            counted = [p.grad for name, p in self.module.named_parameters() if p.grad is not None and name != HEAD]
        if not counted:
            return torch.zeros((), dtype=torch.float64, device=self.module.device)
        return nn.utils.get_total_norm(counted).double().square()

    def apply(self, norm: float, rate: float) -> None:
        """Clip and step.

        Args:
            norm: of the gradient over all stages.
            rate: learning rate of the policy; a critic's is as much greater or smaller as its peak is.
        """
        norm_tensor = torch.tensor(norm, dtype=torch.float64, device=self.module.device)
        nn.utils.clip_grads_with_norm_(self.module.parameters(), self._config.max_grad_norm, norm_tensor)
        for ours, group in zip(self._groups, self.adam.param_groups, strict=True):
            group["lr"] = rate * ours.rate_factor
        self.adam.step()

    def clear(self) -> None:
        """Forget the gradients."""
        self.adam.zero_grad(set_to_none=True)

    def _sum_tied_gradients(self) -> None:
        if self._tied is None:
            return
        weight = tied_weight(self.module)
        if weight is not None:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            dist.all_reduce(weight.grad, group=self._tied)

    def state(self) -> dict[str, Tensor]:
        """Moments by `exp_avg.NAME` and `exp_avg_sq.NAME`, and how many updates each parameter had.

        Before the first update the moments are created as zeros, so that a checkpoint can be read into them.
        """
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            entry: dict[str, Any] = self.adam.state[parameter]
            if not entry:
                entry["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                entry["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
                entry["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
            tensors.update({f"{key}.{name}": value for key, value in entry.items()})
        return tensors


@dataclass(frozen=True)
class _ParameterGroup:
    parameters: list[nn.Parameter]
    weight_decay: float
    rate_factor: float


def _parameter_groups(module: StageModule, config: LearnerConfig) -> list[_ParameterGroup]:
    """Matrices decay, vectors do not; what belongs to a critic has its own learning rate."""
    critic_factor = (config.critic_learning_rate or config.learning_rate) / config.learning_rate
    groups = []
    for of_critic in (False, True):
        chosen = [
            parameter
            for name, parameter in module.named_parameters()
            if (module.heads == "value" or is_value_head(name)) == of_critic
        ]
        factor = critic_factor if of_critic else 1.0
        groups += [
            _ParameterGroup([p for p in chosen if p.ndim >= 2], config.weight_decay, factor),
            _ParameterGroup([p for p in chosen if p.ndim < 2], 0.0, factor),
        ]
    return [group for group in groups if group.parameters]


def update_together(
    optimizers: Sequence[StageOptimizer],
    rate: float,
    verdict: Verdict | None,
    group: dist.ProcessGroup | None = None,
) -> UpdateResult:
    """Step all optimizers or none, and clear the gradients; all ranks call it.

    Args:
        optimizers: of this rank, in the same order everywhere.
        rate: learning rate of the policy, before scaling.
        verdict: of the one rank that evaluated the loss; None on the others.
        group: of all stages; None: the default one.
    """
    said = [0.0, 0.0, 0.0] if verdict is None else [float(not verdict.healthy), float(verdict.drop), verdict.lr_scale]
    # one reduction carries everything: a NaN of one stage's norm makes the sum NaN on all
    total = torch.tensor(said + [0.0] * len(optimizers), dtype=torch.float64, device=optimizers[0].module.device)
    for i, optimizer in enumerate(optimizers):
        total[len(said) + i] = optimizer.squared_norm()
    dist.all_reduce(total, group=group)
    num_sick, num_dropping, lr_scale, *squares = total.tolist()
    norms = tuple(math.sqrt(square) if square >= 0 else math.nan for square in squares)
    result = UpdateResult(
        sick=num_sick > 0 or not all(math.isfinite(norm) for norm in norms),
        dropped=num_dropping > 0,
        grad_norms=norms,
        learning_rate=rate * lr_scale,
        lr_scale=lr_scale,
    )
    for norm, optimizer in zip(norms, optimizers, strict=True):
        if result.taken:
            optimizer.apply(norm, result.learning_rate)
        optimizer.clear()
    return result


def tied_weight(module: StageModule) -> nn.Parameter | None:
    """This stage's copy of a weight that embedding and head share; None where it has none."""
    name = EMBEDDING if module.share.is_first else HEAD
    for own, parameter in module.named_parameters():
        if module.tied and own == name:
            return parameter
    return None


def tied_group(module: StageModule) -> dist.ProcessGroup | None:
    """The group of first and last stage where they share a weight, else None. All ranks must call it together."""
    if not module.tied or module.share.num_stages == 1:
        return None
    group = dist.new_group([0, module.share.num_stages - 1])
    edge = module.share.is_first or module.share.is_last
    return group if edge and isinstance(group, dist.ProcessGroup) else None
