"""The `[buffer]` section."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, model_validator

from common.user_input import Knob, Reference

PolicyName = Literal["in_order", "longest_first", "by_deadline"]
LawName = Literal["epoch", "uniform", "posterior"]
RestSampler = Literal["fifo", "uniform", "reward_softmax", "prioritised"] | Reference
SamplerName = Literal["on_policy_share"] | RestSampler

MAX_MESSAGE_MIB = 64
"""Largest message, which ZeroMQ holds in memory. The longest trajectory that fits has some eight million tokens."""
MAX_GROUP_SIZE = 2**16


class BufferConfig(BaseModel):
    """Knobs of the replay buffer: its service, its store and its clients."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    source: str | None = Knob(
        None, "Train on these recorded samples alone: a run's folder, an export of one (.parquet), or a .jsonl file."
    )
    sampler: SamplerName = Knob(
        "fifo",
        "Which groups a step takes: 'fifo' the oldest tokens first, 'on_policy_share' partly the newest, "
        "'reward_softmax', 'uniform', 'prioritised' by spread of reward and age, "
        "or FILE.py:NAME: a sampler of yours, or a function that gives a group's log-weight.",
        basic=True,
    )
    on_policy_share: float = Knob(
        0.5, "sampler = 'on_policy_share': share of a step's groups, on average, that are the newest.", ge=0, le=1
    )
    replay_sampler: RestSampler = Knob("uniform", "sampler = 'on_policy_share': what chooses the rest.")
    max_uses: PositiveInt | Literal["unlimited"] = Knob(
        1, "How many steps may use a group; 1 is single use, more is replay.", basic=True
    )
    replay_steps: float | None = Knob(
        None,
        "No new group is leased while those in flight and those that may be used again would fill this number "
        "of steps, beside those of steps in progress, so that under replay actors generate what takes the place of "
        "what was used up; unset: as much as the staleness bound lets them.",
        fixed="",
        ge=1.0,
    )
    refill_uninformative: float = Knob(
        0.0,
        "Groups whose rewards are all equal are set aside and others take their place: before each step at "
        "most so many times groups_per_step of them, rounded up; what is more enters the step. 0 sets none aside.",
        fixed="",
        ge=0.0,
    )
    dispatch: PolicyName = Knob(
        "in_order",
        "Which prompt an actor gets: 'in_order' the next; 'by_deadline', if some actors are faster than "
        "others, one whose answers a slower actor would not make in time; 'longest_first' the one with the longest "
        "answers. None chooses what is trained.",
        fixed="",
    )
    prompt_law: LawName = Knob(
        "epoch",
        "Which prompts are leased next: 'epoch' the data's order, each prompt once in an epoch, 'uniform' "
        "by chance, 'posterior' by chance in proportion to E[p (1 - p)], p being the rate of rewards of at least "
        "task.correct_at.",
        fixed="",
    )
    durability: Literal["commit", "interval", "os"] = Knob(
        "commit",
        "'commit' syncs before it acknowledges: survives kill -9 and a power cut. 'interval' syncs every "
        "0.1 s, 'os' leaves it to the system: both survive kill -9, not a power cut.",
        basic=True,
        fixed="",
    )
    capacity_trajectories: PositiveInt = Knob(
        1_000_000,
        "Above this count trajectories that no recorded draw needs are evicted, but no unused ones with max_uses = 1.",
        fixed="",
    )

    @model_validator(mode="after")
    def _knobs_must_agree(self) -> BufferConfig:
        chosen = self.replay_sampler if self.sampler == "on_policy_share" else self.sampler
        where = f"replay_sampler = '{chosen}'" if self.sampler == "on_policy_share" else f"sampler = '{chosen}'"
        if self.replay_steps is not None and self.max_uses in (1, "unlimited"):
            raise ValueError(
                "replay_steps lets new groups take the place of those that were used up, and with max_uses = "
                f"{self.max_uses} {'none is used twice' if self.max_uses == 1 else 'none ever is'}: give max_uses a "
                "number above 1, or leave replay_steps out"
            )
        if self.max_uses == "unlimited" and chosen == "fifo":
            raise ValueError(
                f"max_uses = 'unlimited' with {where} would draw the same oldest groups at every step: give max_uses "
                "a number, or choose 'uniform', 'reward_softmax' or 'prioritised'"
            )
        return self

    def check_capacity(self, group_size: int, num_groups: int) -> None:
        """Check that `num_groups` groups have room; ValueError if they have not."""
        num_samples = num_groups * group_size
        if self.capacity_trajectories < num_samples:
            raise ValueError(
                f"buffer.capacity_trajectories = {self.capacity_trajectories} is below the {num_samples} "
                "samples that may be outstanding at once, those of the step before among them: raise it, or lower "
                "weight_sync.max_lag, learner.groups_per_step or actors.group_size"
            )

    @property
    def replays(self) -> bool:
        return self.max_uses != 1

    def most_alive(self, groups_per_step: int) -> float:
        """How many groups may be in flight or ready where another one is leased, by `replay_steps`; at least 1."""
        return math.inf if self.replay_steps is None else max(1.0, self.replay_steps * groups_per_step)
