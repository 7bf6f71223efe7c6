"""AdamW on float32 master weights, with one gradient norm and one verdict over all stages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from learner.config import LearnerConfig
from learner.model import EMBEDDING, HEAD, StageModule


def learning_rate(config: LearnerConfig, step: int) -> float:
    """The learning rate of step `step` (0-based): linear warm-up, then the configured decay until num_steps."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.learning_rate
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.num_steps - config.warmup_steps))
    share = 1 - progress if config.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)


@dataclass(frozen=True)
class UpdateResult:
    """What an update did."""

    skipped: bool
    """A non-finite loss or gradient somewhere: no weight of any stage changed."""
    grad_norm: float
    """Over all stages, before clipping."""
    learning_rate: float


class StageOptimizer:
    """Updates one stage's weights; every method that communicates is called by all ranks."""

    def __init__(
        self,
        module: StageModule,
        config: LearnerConfig,
        group: dist.ProcessGroup | None,
        tied: dist.ProcessGroup | None,
    ) -> None:
        """Create AdamW over the stage's parameters.

        Args:
            module: the stage.
            config: learning rate, betas, decay and clipping.
            group: of all stages; None: the default one.
            tied: of the first and last stage, where embedding and head are one tensor on two ranks; else None.
        """
        self._module = module
        self._config = config
        self._group = group
        self._tied = tied
        parameters = list(module.parameters())
        decayed = [parameter for parameter in parameters if parameter.ndim >= 2]
        others = [parameter for parameter in parameters if parameter.ndim < 2]
        self.adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )

    def update(self, step: int, *, healthy: bool) -> UpdateResult:
        """Clip, step and clear the gradients, or skip where a stage is not healthy or the norm is not finite.

        Args:
            step: 0-based, for the learning-rate schedule.
            healthy: False where this rank saw a non-finite loss.
        """
        share = self._module.share
        self._sum_tied_gradients()
        gradients = [p.grad for p in self._module.parameters() if p.grad is not None]
        counted = gradients
        if self._tied is not None and share.is_last:
            # the first stage counts the tied tensor: its gradient is the same sum there
            counted = [p.grad for name, p in self._module.named_parameters() if p.grad is not None and name != HEAD]
        device = self._module.device
        total = torch.zeros(2, dtype=torch.float64, device=device)
        if counted:
            total[0] = nn.utils.get_total_norm(counted).double().square()
        total[1] = 0.0 if healthy else 1.0
        dist.all_reduce(total, group=self._group)
        squares, num_unhealthy = total.tolist()
        rate = learning_rate(self._config, step)
        norm = math.sqrt(squares) if squares >= 0 else math.nan
        skipped = num_unhealthy > 0 or not math.isfinite(norm)
        if not skipped:
            norm_tensor = torch.tensor(norm, dtype=torch.float64, device=device)
            nn.utils.clip_grads_with_norm_(self._module.parameters(), self._config.max_grad_norm, norm_tensor)
            for group in self.adam.param_groups:
                group["lr"] = rate
            self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        return UpdateResult(skipped, norm, rate)

    def _sum_tied_gradients(self) -> None:
        if self._tied is None:
            return
        weight = tied_weight(self._module)
        if weight is not None:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            dist.all_reduce(weight.grad, group=self._tied)

    def state(self) -> dict[str, Tensor]:
        """Moments by `exp_avg.NAME` and `exp_avg_sq.NAME`, and how many updates each parameter had.

        Before the first update the moments are created as zeros, so that a checkpoint can be read into them.
        """
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._module.named_parameters():
            entry: dict[str, Any] = self.adam.state[parameter]
            if not entry:
                entry["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                entry["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
                entry["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
            tensors.update({f"{key}.{name}": value for key, value in entry.items()})
        return tensors


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
