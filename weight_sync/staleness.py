"""The staleness contract: one object that actors, buffer and learner share.

A version counts optimizer steps, here called updates: a step trains one draw in one or several of
them. For a token sampled at version u and trained at version v its lag is v - u. `StalenessContract`
holds the rules of lag:

    bound           what lag the knobs imply
    capacity        how many groups may be leased and not yet trained on?
    min_version     which version may start a request of a lease?
    latest_version  how far can the learner be after some steps?
    usable          may a group enter the step that begins at version v?
    steps_left      how many more steps could use it after that one?
    holds           must that step wait for an admitted group first? (on_stale = "wait")

Who knows what is outstanding applies them: `buffer.leases` divides the capacity among shards and closes
admission, `buffer.draws` drops, draws and waits; for a step of several shards `buffer.shards` decides the wait.

This module uses the standard library and pydantic only: the buffer service imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

Unbounded = Literal["unbounded"]


class PolicyVersion(NamedTuple):
    """A published policy: ordered first by learner incarnation, then by optimizer steps taken."""

    incarnation: int
    version: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.version}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Read the form that `str` writes, for example "0.17".

        Raises:
            ValueError: the text has another form.
        """
        incarnation, dot, version = text.partition(".")
        if not dot or not incarnation.isdigit() or not version.isdigit():
            raise ValueError(f"'{text}' is not a policy version: expected INCARNATION.VERSION, as in 0.17")
        return cls(int(incarnation), int(version))


def effective_version(sampled: PolicyVersion, resumed_at: Mapping[int, int]) -> int:
    """The version u that a token counts with after learner restarts.

    A restart resumes from a checkpoint and abandons every later version, so a token of an
    earlier incarnation counts at most as the version that each later incarnation resumed from.

    Args:
        sampled: the version that sampled the token.
        resumed_at: for every incarnation, the version that it started from.
    """
    later = (start for incarnation, start in resumed_at.items() if incarnation > sampled.incarnation)
    return min(sampled.version, min(later, default=sampled.version))


class StalenessConfig(BaseModel):
    """The knobs of staleness, counted in policy versions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_lag: int | Unbounded = Field(
        default=4,
        description="No token with a greater lag enters a step. 0 is synchronous training; 'unbounded' is for replay.",
    )
    max_actor_lag: int | None = Field(
        default=None,
        ge=0,
        description="An actor further behind the newest published version pulls before it starts another request. "
        "Unset: 1, or 0 where max_lag leaves no room.",
    )
    publish_every: int = Field(default=1, ge=1, description="Publish weights every so many optimizer steps.")
    on_stale: Literal["drop", "wait"] = Field(
        default="drop",
        description="A group about to pass the bound is dropped and its prompt leased again, or the step waits for it.",
    )

    @property
    def actor_lag(self) -> int:
        """`max_actor_lag`, or its default where it is unset and a step is one update."""
        return self.actor_lag_for(1)

    def actor_lag_for(self, updates_per_step: int) -> int:
        """`max_actor_lag`, or its default where it is unset and a step is so many updates."""
        if self.max_actor_lag is not None:
            return self.max_actor_lag
        if self.max_lag == "unbounded":
            return 1
        return max(0, min(1, self.max_lag - (self.publish_every - 1) - (updates_per_step - 1)))

    @model_validator(mode="after")
    def _the_bound_must_be_reachable(self) -> StalenessConfig:
        if self.max_lag == "unbounded":
            return self
        if self.max_lag < 0:
            raise ValueError(f"max_lag = {self.max_lag} is negative; use 0 for synchronous training")
        if self.publish_every - 1 > self.max_lag:
            raise ValueError(
                f"max_lag = {self.max_lag} can never be met with publish_every = {self.publish_every}: weights are "
                f"up to {self.publish_every - 1} versions old when they are published. "
                f"Raise max_lag to {self.publish_every - 1} or more, or publish more often"
            )
        need = self.actor_lag + self.publish_every - 1
        if need > self.max_lag:
            raise ValueError(
                f"max_lag = {self.max_lag} contradicts max_actor_lag = {self.actor_lag} with publish_every = "
                f"{self.publish_every}: a fresh sample may already be {need} versions old. "
                f"Raise max_lag to {need}, or lower max_actor_lag"
            )
        return self


class StalenessContract:
    """The rules of admission and use of groups by which no trained token passes `max_lag`.

    Why the bound is rarely hit: let G groups enter each step, let a step be M updates, and let
    S = floor((max_lag - max_actor_lag - (publish_every - 1) + 1) / M) - 1. A group is admitted only while
    fewer than (S + 1) * G groups are outstanding (in flight, waiting, or drawn for an unfinished step).
    Drawn oldest first, its step begins at most S steps, so S * M versions, after its admission and ends with an
    update M - 1 versions later; its tokens were sampled at most max_actor_lag + publish_every - 1 versions
    behind the learner's. So its lag is at most max_lag. Only a group overtaken by later ones can become
    older, and `usable` and `holds` catch exactly that. The proof is in docs/staleness.md.
    """

    def __init__(self, config: StalenessConfig, groups_per_step: int, updates_per_step: int = 1) -> None:
        """Args:
            config: the knobs.
            groups_per_step: G, how many groups one step consumes.
            updates_per_step: M, the optimizer steps that a step takes on its groups: minibatches times epochs.

        Raises:
            ValueError: no group, however fresh, could be used within the bound.
        """
        for name, value in (("groups_per_step", groups_per_step), ("updates_per_step", updates_per_step)):
            if value < 1:
                raise ValueError(f"{name} = {value}: a step needs at least one")
        self.config = config
        self.groups_per_step = groups_per_step
        self.updates_per_step = updates_per_step
        self.actor_lag = config.actor_lag_for(updates_per_step)
        """A: how many versions behind the newest published one a request of a lease may start."""
        fresh = self.actor_lag + config.publish_every - 1
        need = fresh + updates_per_step - 1
        if config.max_lag != "unbounded" and config.max_lag < need:
            raise ValueError(
                f"weight_sync.max_lag = {config.max_lag} can never be met with {updates_per_step} updates per step "
                f"(learner.num_minibatches * learner.num_epochs): the last of them trains {updates_per_step - 1} "
                f"versions after the first, on samples that may be {fresh} versions old by then. "
                f"Raise weight_sync.max_lag to {need} or more, or lower learner.num_minibatches or learner.num_epochs"
            )

    def bound(self) -> int | None:
        """The greatest lag of a trained token, in versions; None where it is unbounded."""
        return None if self.config.max_lag == "unbounded" else self.config.max_lag

    def capacity(self, unbounded_steps: int = 4) -> int:
        """How many groups may be outstanding at once: in flight, waiting, or drawn for an unfinished step.

        Args:
            unbounded_steps: how many steps' groups to allow where `max_lag` is unbounded.
        """
        bound = self.bound()
        if bound is None:
            return unbounded_steps * self.groups_per_step
        room = bound - self.actor_lag - (self.config.publish_every - 1) + 1
        return room // self.updates_per_step * self.groups_per_step

    def min_version(self, published: int) -> int:
        """The oldest version that may start a request of a lease granted while `published` is the newest."""
        return max(0, published - self.actor_lag)

    def latest_version(self, version: int, num_steps: int) -> int:
        """The newest version that the learner can be at `num_steps` steps after `version`; skipped updates add none."""
        return version + num_steps * self.updates_per_step

    def usable(self, oldest: int, step_version: int) -> bool:
        """May a group whose oldest token has version `oldest` enter the step that begins at `step_version`?

        Checked for the last update of the step.
        """
        left = self.steps_left(oldest, step_version)
        return left is None or left >= 0

    def steps_left(self, oldest: int, step_version: int) -> int | None:
        """How many steps after the one that begins at `step_version` could still use the group.

        Returns:
            The number, if no update is skipped; negative where not even that step may use it; None without a bound.
        """
        bound = self.bound()
        if bound is None:
            return None
        latest_start = oldest + bound - (self.updates_per_step - 1)
        return (latest_start - step_version) // self.updates_per_step

    def holds(self, oldest: int, step_version: int) -> bool:
        """Must the step at `step_version` wait for an admitted group that it would leave behind?

        True under on_stale = "wait" where the group, unused by this step, could not be used by the next.
        """
        return self.config.on_stale == "wait" and not self.usable(oldest, self.latest_version(step_version, 1))
