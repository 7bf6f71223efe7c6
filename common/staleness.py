"""The staleness contract: one object that actors, buffer and learner share.

A version counts optimizer steps, here called updates: a step trains one draw in one or several of
them. For a token sampled at version u and trained at version v its lag is v - u. The rules of lag, and who asks:

    StalenessContract (G groups to a step, M updates to a step)
        bound           what lag the knobs imply
        admit           may another group start?                                buffer.leases
        min_version     which version may start a request of a lease?           buffer.leases
        select          which groups may the step that begins at version v use? buffer.steps
        evict           which are past the bound there?                         buffer.steps, buffer.leases
        held_back       which open groups must the step wait for first?         buffer.steps
        may_start       may an actor start a request on the weights it serves?  actors.weights
        check_trained   the last look at what is about to be trained            learner.coordinator

They are made of `capacity`, `latest_version`, `usable` and `steps_left`. The caller knows what is outstanding; no rule
about lag is anywhere else. docs/staleness.md has the proof. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, model_validator

from common.user_input import Knob

_BOUND = "the buffer admitted prompts under it, and holds samples and recorded draws to it"
Unbounded = Literal["unbounded"]
UNBOUNDED_STEPS = 4
"""Steps whose groups may be outstanding if `max_lag` is unbounded."""

T = TypeVar("T")


class StaleTokens(ValueError):
    """Tokens past the bound were about to be trained on: a rule before the learner was broken."""


class PolicyVersion(NamedTuple):
    """A published policy: ordered first by learner incarnation, then by optimizer steps taken."""

    incarnation: int
    version: int

    def __str__(self) -> str:
        return f"{self.version} (start {self.incarnation})" if self.incarnation else str(self.version)

    @property
    def key(self) -> str:
        """Return the name in folders, manifests and engines, for example "0.17"."""
        return f"{self.incarnation}.{self.version}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Read a `key`; ValueError if the text has another form."""
        incarnation, dot, version = text.partition(".")
        if not dot or not incarnation.isdigit() or not version.isdigit():
            raise ValueError(f"'{text}' is not a policy version: expected INCARNATION.VERSION, as in 0.17")
        return cls(int(incarnation), int(version))


def effective_version(sampled: PolicyVersion, resumed_at: Mapping[int, int]) -> int:
    """Return the version u that a token counts with after learner restarts.

    A restart abandons every version after its checkpoint, so a token of an earlier incarnation counts at most as the
    version that each later incarnation resumed from, by `resumed_at`.
    """
    later = (start for incarnation, start in resumed_at.items() if incarnation > sampled.incarnation)
    return min(sampled.version, min(later, default=sampled.version))


class StalenessConfig(BaseModel):
    """The knobs of staleness, counted in policy versions; what they come to for a learner, `StalenessContract` says."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_lag: int | Unbounded = Knob(
        4,
        "No token with a greater lag enters a step. 0 is synchronous training; 'unbounded' is for replay.",
        basic=True,
        fixed=_BOUND,
    )
    max_actor_lag: int | None = Knob(
        None,
        "An actor further behind the newest published version pulls before it starts another request. "
        "Unset: 1, or 0 where max_lag leaves no room for it or nothing could overlap with it.",
        fixed=_BOUND,
        ge=0,
    )
    publish_every: int = Knob(1, "Optimizer steps between two publications of weights.", basic=True, fixed=_BOUND, ge=1)
    on_stale: Literal["drop", "wait"] = Knob(
        "drop",
        "A group about to pass the bound is dropped and its prompt leased again, or the step waits for it.",
        basic=True,
        fixed=_BOUND,
    )

    def actor_lag_for(self, updates_per_step: int) -> int:
        """`max_actor_lag`, or its default where it is unset and a step is so many updates."""
        if self.max_actor_lag is not None:
            return self.max_actor_lag
        if self.max_lag == "unbounded":
            return 1
        room = self.max_lag - (self.publish_every - 1) + 1  # in versions, of which a step takes updates_per_step
        # an actor one version behind must not cost the only step that can be in flight beside the one in progress
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
                f"max_lag = {self.max_lag} can never be met with publish_every = {self.publish_every}: weights are "
                f"up to {self.publish_every - 1} versions old when they are published. "
                f"Raise max_lag to {self.publish_every - 1} or more, or publish more often"
            )
        actor_lag = self.actor_lag_for(1)
        need = actor_lag + self.publish_every - 1
        if need > self.max_lag:
            raise ValueError(
                f"max_lag = {self.max_lag} contradicts max_actor_lag = {actor_lag} with publish_every = "
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
    older, and `evict` and `held_back` catch exactly that. The proof is in docs/staleness.md.
    """

    def __init__(self, config: StalenessConfig, groups_per_step: int, updates_per_step: int = 1) -> None:
        """Count with G groups and M optimizer steps (minibatches times epochs) per step.

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
        if config.max_lag != "unbounded" and config.max_lag < self.least:
            fresh = self.least - (updates_per_step - 1)
            raise ValueError(
                f"weight_sync.max_lag = {config.max_lag} can never be met with {updates_per_step} updates per step "
                f"(learner.num_minibatches * learner.num_epochs): the last of them trains {updates_per_step - 1} "
                f"versions after the first, on samples that may be {fresh} versions old by then. "
                f"Raise weight_sync.max_lag to {self.least} or more, or lower learner.num_minibatches or "
                "learner.num_epochs"
            )

    def bound(self) -> int | None:
        return None if self.config.max_lag == "unbounded" else self.config.max_lag

    # --- admission --------------------------------------------------------------------------------

    @property
    def least(self) -> int:
        """The least bound with these knobs and updates: by then the last update of a step has trained fresh samples."""
        return self.actor_lag + self.config.publish_every - 1 + self.updates_per_step - 1

    def admitted_lag(self, allowed: int | None) -> int | None:
        """The bound that admission counts with: `max_lag`, or what the learner allows, but never less than `least`."""
        bound = self.bound()
        return bound if bound is None or allowed is None else min(bound, max(self.least, allowed))

    def capacity(self, allowed: int | None = None) -> int:
        """How many groups may be outstanding at once: in flight, waiting, or drawn for an unfinished step."""
        bound = self.admitted_lag(allowed)
        if bound is None:
            return UNBOUNDED_STEPS * self.groups_per_step
        room = bound - self.actor_lag - (self.config.publish_every - 1) + 1
        return room // self.updates_per_step * self.groups_per_step

    def admit(self, outstanding: int, *, version: int, published: int, allowed: int | None = None) -> str:
        """Return why no other group may start; '' if one may.

        Two checks. The room counts on weights that are published when they are due. The other counts how far
        publication really is behind: the group would be used by the step after all outstanding ones, with tokens
        as old as `min_version`, and must be usable there. With max_lag = 0 it holds admission back
        between a finished step and its publication.

        Args:
            outstanding: groups in flight, waiting, or drawn for an unfinished step.
            version: the learner's, by its finished steps.
            published: the newest published version; what it counts with if it was abandoned.
            allowed: the lag that the learner allows new groups (`learner.lag_control`); None: `max_lag`.
        """
        bound = self.admitted_lag(allowed)
        if outstanding >= self.capacity(allowed):
            limit = "the staleness bound" if bound == self.bound() else f"a lag of {bound}, which lag control asks for,"
            return f"{outstanding} groups are outstanding, which is all that {limit} allows"
        begins_at = self.latest_version(version, outstanding // self.groups_per_step)
        if not self._is_within(bound, self.min_version(published), begins_at):
            return f"the learner is at version {version}, the newest published is {published}"
        return ""

    def min_version(self, published: int) -> int:
        """The oldest version that may start a request of a lease granted while `published` is the newest."""
        return max(0, published - self.actor_lag)

    # --- use --------------------------------------------------------------------------------------

    def select(self, groups: Iterable[tuple[int, T]], version: int) -> list[T]:
        """Those groups, each with the version of its oldest token, that the step which begins at `version` may use."""
        return [group for oldest, group in groups if self.usable(oldest, version)]

    def evict(self, oldest_first: Iterable[tuple[int, T]], version: int) -> Iterator[T]:
        """Yield those groups, in order of age, that neither the step which begins at `version` nor a later one may use.

        They are read no further than to the first usable one.
        """
        for oldest, group in oldest_first:
            if self.usable(oldest, version):
                return
            yield group

    def held_back(self, chosen: Iterable[int], left: Iterable[int], still_open: Iterable[int]) -> list[int]:
        """Which open groups must a step wait for (on_stale = "wait")? As `held_back`; none under "drop"."""
        if self.config.on_stale != "wait":
            return []
        return held_back(chosen, left, still_open, self.groups_per_step)

    def latest_version(self, version: int, num_steps: int) -> int:
        """The newest version that the learner can be at `num_steps` steps after `version`; skipped updates add none."""
        return version + num_steps * self.updates_per_step

    def usable(self, oldest: int, version: int) -> bool:
        """Return whether a group whose oldest token has version `oldest` may enter the step that begins at `version`.

        It must hold for the last update of the step.
        """
        return self._is_within(self.bound(), oldest, version)

    def _is_within(self, bound: int | None, oldest: int, version: int) -> bool:
        return bound is None or version + self.updates_per_step - 1 - oldest <= bound

    def steps_left(self, oldest: int, version: int) -> int | None:
        """Return how many steps after the one that begins at `version` could still use the group, if none is skipped.

        Negative if not even that step may use it; None without a bound.
        """
        bound = self.bound()
        if bound is None:
            return None
        latest_start = oldest + bound - (self.updates_per_step - 1)
        return (latest_start - version) // self.updates_per_step

    # --- actors, and the learner's last look ------------------------------------------------------

    def is_behind(self, served: PolicyVersion, newest: PolicyVersion) -> bool:
        """Return whether an actor that serves one version is too far behind the newest published one that it knows.

        An abandoned incarnation is behind whatever its versions are.
        """
        if served >= newest:
            return False
        return served.incarnation < newest.incarnation or newest.version - served.version > self.actor_lag

    def may_start(self, served: PolicyVersion, newest: PolicyVersion, min_version: int) -> bool:
        """Return whether a request of a lease may start on the weights that an actor serves.

        Args:
            served: what the engine samples with now.
            newest: the newest published version known; at least the one that came with the lease.
            min_version: of the lease. Above `newest` it is of an incarnation that was abandoned since, so then the
                newest weights are enough.
        """
        return served.version >= min(min_version, newest.version) and not self.is_behind(served, newest)

    def check_trained(self, version: int, lag: int) -> None:
        """Raise StaleTokens if the update that begins at `version` would train tokens with a lag above `max_lag`."""
        bound = self.bound()
        if bound is not None and lag > bound:
            raise StaleTokens(
                f"the update at version {version} was given tokens with a lag of {lag} versions, and max_lag = "
                f"{bound}: the buffer's draw should have dropped them. Nothing was trained on them. Check that "
                "the buffer service and the learner run with the same [weight_sync], then restart the learner"
            )


def held_back(chosen: Iterable[int], left: Iterable[int], still_open: Iterable[int], groups_per_step: int) -> list[int]:
    """Return the open groups that a step must wait for, so that none is left behind (on_stale = "wait").

    After this step the others are used at best G per step: the i-th of them 1 + i // G steps later. If one of them is
    due before that, an open group that is due no later than it must be in this very step instead of one that is due
    after it. What no step may use any more is not waited for.

    Args:
        chosen: `steps_left` of the complete groups that the step would use.
        left: the same of the complete groups that it would not use.
        still_open: the same of the groups that are not complete; the result are places in it.
        groups_per_step: G.
    """
    still_open = list(still_open)
    others = sorted(due for due in (*left, *still_open) if due >= 0)
    latest_at_risk = max((due for i, due in enumerate(others) if due < 1 + i // groups_per_step), default=-1)
    youngest_chosen = max(chosen, default=-1)
    return [i for i, due in enumerate(still_open) if 0 <= due <= latest_at_risk and due < youngest_chosen]
