"""The `[buffer]` section."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, model_validator

from leeway.common.user_input import Knob, Reference

PolicyName = Literal["in_order", "longest_first", "by_deadline"]
LawName = Literal["epoch", "uniform", "posterior"]
RestSampler = Literal["fifo", "uniform", "reward_softmax", "prioritised"] | Reference
SamplerName = Literal["on_policy_share"] | RestSampler

MAX_MESSAGE_MIB = 64
"""Largest message in MiB; ZeroMQ holds it in memory. The longest trajectory that fits has about 8 million tokens."""
MAX_GROUP_SIZE = 2**16


class BufferConfig(BaseModel):
    """Settings of the replay buffer."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    source: str | None = Knob(
        None, "Train only on recorded samples: a run's folder, its export (.parquet) or a .jsonl file."
    )
    sampler: SamplerName = Knob(
        "fifo",
        "Sampler of a step's groups: 'fifo' (oldest tokens first), 'uniform', 'reward_softmax', 'prioritised' "
        "(docs/buffer.md), 'on_policy_share' (a fraction of newest groups), or your FILE.py:NAME.",
        basic=True,
    )
    on_policy_share: float = Knob(0.5, "With sampler = 'on_policy_share': mean fraction of newest groups.", ge=0, le=1)
    replay_sampler: RestSampler = Knob("uniform", "With sampler = 'on_policy_share': sampler of the other groups.")
    max_uses: PositiveInt | Literal["unlimited"] = Knob(
        1, "Maximum number of steps that use a group: 1, a larger number (replay) or 'unlimited'.", basic=True
    )
    replay_steps: float | None = Knob(
        None,
        "Lease no new group while open and ready groups fill this number of steps; unset: only the staleness "
        "bound applies.",
        fixed="",
        ge=1.0,
    )
    refill_uninformative: float = Knob(
        0.0,
        "Maximum number of equal-reward groups replaced per step, as a multiple of groups_per_step; 0: none.",
        fixed="",
        ge=0.0,
    )
    dispatch: PolicyName = Knob(
        "in_order",
        "Which prompt an actor gets next: 'in_order', 'longest_first' (by predicted length) or 'by_deadline' (prompts "
        "whose answers slower actors would finish too late).",
        fixed="",
    )
    prompt_law: LawName = Knob(
        "epoch",
        "Choice of prompts: 'epoch' (each once per epoch), 'uniform' (at random) or 'posterior' (mostly prompts "
        "with correct and wrong answers; task.correct_at).",
        fixed="",
    )
    durability: Literal["commit", "interval", "os"] = Knob(
        "commit",
        "'commit' syncs before acknowledging and survives power loss; 'interval' syncs every 0.1 s, 'os' leaves "
        "it to the system. All survive kill -9.",
        basic=True,
        fixed="",
    )
    capacity_trajectories: PositiveInt = Knob(
        1_000_000,
        "Trajectories above which groups that no step needs again are evicted; if max_uses = 1, unused groups stay.",
        fixed="",
    )

    @model_validator(mode="after")
    def _knobs_must_agree(self) -> BufferConfig:
        chosen = self.replay_sampler if self.sampler == "on_policy_share" else self.sampler
        where = f"replay_sampler = '{chosen}'" if self.sampler == "on_policy_share" else f"sampler = '{chosen}'"
        if self.replay_steps is not None and self.max_uses in (1, "unlimited"):
            raise ValueError(
                f"replay_steps leases replacements for used-up groups, but with max_uses = {self.max_uses} no group "
                f"is {'used twice' if self.max_uses == 1 else 'ever used up'}: set max_uses to a number above 1, or "
                "remove replay_steps"
            )
        if self.max_uses == "unlimited" and chosen == "fifo":
            raise ValueError(
                f"max_uses = 'unlimited' with {where} would draw the same oldest groups at every step: set max_uses to "
                "a number, or choose 'uniform', 'reward_softmax' or 'prioritised'"
            )
        return self

    def check_capacity(self, group_size: int, num_groups: int) -> None:
        """Raise ValueError if `num_groups` groups exceed the capacity."""
        num_samples = num_groups * group_size
        if self.capacity_trajectories < num_samples:
            raise ValueError(
                f"buffer.capacity_trajectories = {self.capacity_trajectories} is below the {num_samples} samples "
                "that may be outstanding at once, including those of the previous step: raise the capacity, or lower "
                "weight_sync.max_lag, learner.groups_per_step or actors.group_size"
            )

    @property
    def replays(self) -> bool:
        return self.max_uses != 1

    def max_live_groups(self, groups_per_step: int) -> float:
        """Return the number of groups in flight or ready at which `replay_steps` stops leasing; at least 1."""
        return math.inf if self.replay_steps is None else max(1.0, self.replay_steps * groups_per_step)
