"""The staleness contract: one object shared by actors, buffer and learner.

A version counts optimizer steps, called updates. A training step uses one draw of groups in one or more updates. A
token that is sampled at version u and trained on at version v has lag v - u. The rules about lag, and their callers:

    StalenessContract (G groups per step, M updates per step)
        bound           maximum lag of a token used for training
        admit           whether another group may start                             buffer.leases
        min_version     oldest version that may start a request of a lease          buffer.leases
        select          groups that the step beginning at version v may use         buffer.steps
        evict           groups past the bound at version v                          buffer.steps
        held_back       open groups that the step must wait for                     buffer.steps
        may_start       whether an actor may start a request on its served weights  actors.weights
        check_trained   final check before an update uses tokens                    learner.coordinator

These rules use `capacity`, `latest_version`, `usable` and `steps_left`. The caller counts the outstanding groups; no
other module has rules about lag. docs/staleness.md has the proof. The module must not import torch: services import it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, model_validator

from leeway.common.user_input import Knob

_BOUND = "the buffer admitted prompts by these rules and applies them to stored samples and recorded draws"
Unbounded = Literal["unbounded"]
UNBOUNDED_STEPS = 4
"""Number of steps whose groups may be outstanding if `max_lag` is unbounded."""

T = TypeVar("T")


class StaleTokens(ValueError):
    """Tokens whose lag exceeds the bound reached the learner, so an earlier check has failed."""


class PolicyVersion(NamedTuple):
    """A published policy, ordered by learner incarnation, then by number of optimizer steps."""

    incarnation: int
    version: int

    def __str__(self) -> str:
        return f"{self.version} (start {self.incarnation})" if self.incarnation else str(self.version)

    @property
    def key(self) -> str:
        """Return the name used in folders, manifests and engines, for example "0.17"."""
        return f"{self.incarnation}.{self.version}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Parse a `key`; raise ValueError if the text has another form."""
        incarnation, dot, version = text.partition(".")
        if not dot or not incarnation.isdigit() or not version.isdigit():
            raise ValueError(f"'{text}' is not a policy version: expected INCARNATION.VERSION, for example 0.17")
        return cls(int(incarnation), int(version))


def effective_version(sampled: PolicyVersion, resumed_at: Mapping[int, int]) -> int:
    """Return the version u from which the lag of a token is computed, taking learner restarts into account.

    A restart abandons every version after its checkpoint. So u of a token from an earlier incarnation is at most the
    version from which each later incarnation resumed, given by `resumed_at`.
    """
    later = (start for incarnation, start in resumed_at.items() if incarnation > sampled.incarnation)
    return min(sampled.version, min(later, default=sampled.version))


class StalenessConfig(BaseModel):
    """Config keys of staleness, in policy versions; `StalenessContract` applies them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_lag: int | Unbounded = Knob(
        4,
        "Maximum lag of tokens used for training, in versions; 0 is synchronous, 'unbounded' is for replay.",
        basic=True,
        fixed=_BOUND,
    )
    max_actor_lag: int | None = Knob(
        None,
        "Maximum number of versions that an actor is behind the published weights when a request starts. Unset: 1, or "
        "0 if 1 exceeds max_lag or prevents overlap.",
        fixed=_BOUND,
        ge=0,
    )
    publish_every: int = Knob(1, "Optimizer steps between publications of weights.", basic=True, fixed=_BOUND, ge=1)
    on_stale: Literal["drop", "wait"] = Knob(
        "drop",
        "Before a group exceeds max_lag: 'drop' discards it and leases its prompt again; 'wait' waits for it.",
        basic=True,
        fixed=_BOUND,
    )

    def actor_lag_for(self, updates_per_step: int) -> int:
        """Return `max_actor_lag`, or its default for `updates_per_step` if it is unset."""
        if self.max_actor_lag is not None:
            return self.max_actor_lag
        if self.max_lag == "unbounded":
            return 1
        room = self.max_lag - (self.publish_every - 1) + 1  # number of versions; a step adds updates_per_step
        # if an actor lag of 1 leaves room for the groups of only one step, generation would stall during training
        costs_the_overlap = room // updates_per_step >= 2 > (room - 1) // updates_per_step
        return 0 if room <= updates_per_step or costs_the_overlap else 1

    @model_validator(mode="after")
    def _the_bound_must_be_reachable(self) -> StalenessConfig:
        if self.max_lag == "unbounded":
            return self
        if self.max_lag < 0:
            raise ValueError(f"max_lag = {self.max_lag} is negative; use 0 for synchronous training")
        if self.publish_every - 1 > self.max_lag:
            raise ValueError(
                f"max_lag = {self.max_lag} can never be met with publish_every = {self.publish_every}: the newest "
                f"published weights are up to {self.publish_every - 1} versions old. "
                f"Raise max_lag to {self.publish_every - 1} or more, or lower publish_every"
            )
        actor_lag = self.actor_lag_for(1)
        need = actor_lag + self.publish_every - 1
        if need > self.max_lag:
            raise ValueError(
                f"max_lag = {self.max_lag} contradicts max_actor_lag = {actor_lag} with publish_every = "
                f"{self.publish_every}: a fresh sample can already be {need} versions old. "
                f"Raise max_lag to {need}, or lower max_actor_lag"
            )
        return self


class StalenessContract:
    """Rules for the admission and use of groups; no token used for training has a lag above `max_lag`.

    Why groups rarely reach the bound: let G groups enter each step, let a step have M updates, and let
    S = floor((max_lag - max_actor_lag - (publish_every - 1) + 1) / M) - 1. A group is admitted only while
    fewer than (S + 1) * G groups are outstanding (in flight, waiting, or drawn for an unfinished step).
    If groups are drawn oldest first, the step of this group begins at most S steps, i.e. S * M versions, after its
    admission, and its last update begins M - 1 versions later. Its tokens were sampled at most
    max_actor_lag + publish_every - 1 versions behind the learner. So its lag is at most max_lag. Only a group overtaken
    by later groups can become older; `evict` and `held_back` handle this case. The proof is in docs/staleness.md.
    """

    def __init__(self, config: StalenessConfig, groups_per_step: int, updates_per_step: int = 1) -> None:
        """Create the contract for G groups and M optimizer steps (minibatches times epochs) per step.

        Raises:
            ValueError: even the freshest group would exceed the bound.
        """
        for name, value in (("groups_per_step", groups_per_step), ("updates_per_step", updates_per_step)):
            if value < 1:
                raise ValueError(f"{name} = {value}: expected at least 1")
        self.config = config
        self.groups_per_step = groups_per_step
        self.updates_per_step = updates_per_step
        self.actor_lag = config.actor_lag_for(updates_per_step)
        """A: maximum number of versions by which weights lag the published weights when a leased request starts."""
        if config.max_lag != "unbounded" and config.max_lag < self.least:
            fresh = self.least - (updates_per_step - 1)
            raise ValueError(
                f"weight_sync.max_lag = {config.max_lag} can never be met with {updates_per_step} updates per step "
                f"(learner.num_minibatches * learner.num_epochs): the last update begins {updates_per_step - 1} "
                f"versions after the first, whose samples can already be {fresh} versions old. "
                f"Raise weight_sync.max_lag to {self.least} or more, or lower learner.num_minibatches or "
                "learner.num_epochs"
            )

    def bound(self) -> int | None:
        return None if self.config.max_lag == "unbounded" else self.config.max_lag

    # --- admission --------------------------------------------------------------------------------

    @property
    def least(self) -> int:
        """Smallest valid bound: the maximum lag of fresh samples in the last update of a step."""
        return self.actor_lag + self.config.publish_every - 1 + self.updates_per_step - 1

    def admitted_lag(self, allowed: int | None) -> int | None:
        """Return the bound that admission applies: `max_lag`, or `allowed` if smaller, but at least `least`."""
        bound = self.bound()
        return bound if bound is None or allowed is None else min(bound, max(self.least, allowed))

    def capacity(self, allowed: int | None = None) -> int:
        """Return the maximum number of outstanding groups: in flight, waiting, or drawn for an unfinished step."""
        bound = self.admitted_lag(allowed)
        if bound is None:
            return UNBOUNDED_STEPS * self.groups_per_step
        room = bound - self.actor_lag - (self.config.publish_every - 1) + 1
        return room // self.updates_per_step * self.groups_per_step

    def admit(self, outstanding: int, *, version: int, published: int, allowed: int | None = None) -> str:
        """Return why another group may not start; '' if another group may start.

        There are two checks. The capacity assumes that weights are published when due. The second check accounts for
        late publication: the group would enter the step after all outstanding groups, with tokens as old as
        `min_version`, and must be usable in that step. With max_lag = 0, this blocks admission between the end of a
        step and its publication.

        Args:
            outstanding: groups in flight, waiting, or drawn for an unfinished step.
            version: version of the learner after its finished steps.
            published: the newest published version, or its `effective_version` if it was abandoned.
            allowed: lag that the learner allows for new groups (`leeway.learner.lag_control`); None uses `max_lag`.
        """
        bound = self.admitted_lag(allowed)
        if outstanding >= self.capacity(allowed):
            limit = "the staleness bound" if bound == self.bound() else f"the lag of {bound} set by lag control"
            return f"{outstanding} groups are outstanding, the maximum for {limit}"
        begins_at = self.latest_version(version, outstanding // self.groups_per_step)
        if not self._is_within(bound, self.min_version(published), begins_at):
            return f"the learner is at version {version}, but the newest published version is {published}"
        return ""

    def min_version(self, published: int) -> int:
        """Return the oldest version that may start a request of a lease granted while `published` is the newest."""
        return max(0, published - self.actor_lag)

    # --- use --------------------------------------------------------------------------------------

    def select(self, groups: Iterable[tuple[int, T]], version: int) -> list[T]:
        """Return the groups that the step beginning at `version` may use; a group comes with its oldest version."""
        return [group for oldest, group in groups if self.usable(oldest, version)]

    def evict(self, oldest_first: Iterable[tuple[int, T]], version: int) -> Iterator[T]:
        """Yield the groups, in order of age, that no step beginning at `version` or later may use.

        Stops at the first usable group.
        """
        for oldest, group in oldest_first:
            if self.usable(oldest, version):
                return
            yield group

    def held_back(self, chosen: Iterable[int], left: Iterable[int], still_open: Iterable[int]) -> list[int]:
        """Return the open groups that a step must wait for (see function `held_back`); none if on_stale = "drop"."""
        if self.config.on_stale != "wait":
            return []
        return held_back(chosen, left, still_open, self.groups_per_step)

    def latest_version(self, version: int, num_steps: int) -> int:
        """Return the newest version possible `num_steps` steps after `version`; skipped updates add no version."""
        return version + num_steps * self.updates_per_step

    def usable(self, oldest: int, version: int) -> bool:
        """Return whether a group whose oldest token has version `oldest` may enter the step beginning at `version`.

        The bound must hold at the last update of the step.
        """
        return self._is_within(self.bound(), oldest, version)

    def _is_within(self, bound: int | None, oldest: int, version: int) -> bool:
        return bound is None or version + self.updates_per_step - 1 - oldest <= bound

    def steps_left(self, oldest: int, version: int) -> int | None:
        """Return how many steps after the step beginning at `version` may use the group, if no update is skipped.

        The result is negative if the step beginning at `version` cannot use the group, and None without a bound.
        """
        bound = self.bound()
        if bound is None:
            return None
        latest_start = oldest + bound - (self.updates_per_step - 1)
        return (latest_start - version) // self.updates_per_step

    # --- checks by actors, and the final check by the learner ------------------------------------

    def is_behind(self, served: PolicyVersion, newest: PolicyVersion) -> bool:
        """Return whether an actor serving `served` is too far behind the newest published version it has received.

        An abandoned incarnation is always behind.
        """
        if served >= newest:
            return False
        return served.incarnation < newest.incarnation or newest.version - served.version > self.actor_lag

    def may_start(self, served: PolicyVersion, newest: PolicyVersion, min_version: int) -> bool:
        """Return whether a request of a lease may start on the weights that an actor serves.

        Args:
            served: the version that the engine samples with now.
            newest: the newest published version received; at least the version sent with the lease.
            min_version: minimum version of the lease. If it is above `newest`, the incarnation of that version has been
                abandoned, and the newest weights are sufficient.
        """
        return served.version >= min(min_version, newest.version) and not self.is_behind(served, newest)

    def check_trained(self, version: int, lag: int) -> None:
        """Raise StaleTokens if the update beginning at `version` would train on tokens with a lag above `max_lag`."""
        bound = self.bound()
        if bound is not None and lag > bound:
            raise StaleTokens(
                f"the update at version {version} received tokens with a lag of {lag} versions, but max_lag = "
                f"{bound}: the buffer should not have drawn them. The learner did not train on them. Check that "
                "the buffer service and the learner run with the same [weight_sync], then restart the learner"
            )


def held_back(chosen: Iterable[int], left: Iterable[int], still_open: Iterable[int], groups_per_step: int) -> list[int]:
    """Return the open groups that a step must wait for, so that no group passes the bound (on_stale = "wait").

    After this step, each step uses at most G of the remaining groups: the i-th group is used 1 + i // G steps later. If
    a group is due earlier, each open group that is due no later than that group must enter this step and replace a
    chosen group that is due later. Groups that no step may use any more are ignored.

    Args:
        chosen: `steps_left` of the complete groups that the step would use.
        left: `steps_left` of the complete groups that the step would not use.
        still_open: `steps_left` of the incomplete groups; the result contains indices into this sequence.
        groups_per_step: G.
    """
    still_open = list(still_open)
    others = sorted(due for due in (*left, *still_open) if due >= 0)
    latest_at_risk = max((due for i, due in enumerate(others) if due < 1 + i // groups_per_step), default=-1)
    youngest_chosen = max(chosen, default=-1)
    return [i for i, due in enumerate(still_open) if 0 <= due <= latest_at_risk and due < youngest_chosen]
