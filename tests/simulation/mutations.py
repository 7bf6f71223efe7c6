"""Mutations of the policy: each check disabled in turn, with the invariant that then breaks.

Each mutation breaks exactly one invariant and names this invariant: "bound", "wait", "room", "actor_lag",
"min_version", "abandoned", "spans" or "engine" of `witness`, "progress" of `world`, or "last line", the check by which
the learner itself refuses stale tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

from leeway.buffer import tables
from leeway.common.staleness import StalenessContract
from tests.simulation import book
from tests.simulation.actor import SimActor
from tests.simulation.core import Environment
from tests.simulation.knobs import NO_FAULTS, Faults, Knobs
from tests.simulation.seeds import Outcome, SimulationFailed, simulate, simulate_with
from tests.simulation.world import World


class Mutation(NamedTuple):
    """A disabled check."""

    patches: tuple[tuple[object, str, Any], ...]
    """(owner, attribute, replacement) of each patch."""
    breaks: str
    """Name of the invariant that breaks."""
    seeds: range = range(20_000)
    """Seeds to try until one seed fails."""
    knobs: Knobs | None = None
    """Settings that make a rare combination of faults likely, together with `faults`; None to use those of the seed."""
    faults: Faults = NO_FAULTS

    def run(self, seed: int, env: Environment | None = None) -> Outcome:
        """Run one seed with the settings and faults of the mutation."""
        if self.knobs is None:
            return simulate(seed, env)
        return simulate_with(seed, self.knobs, self.faults, env)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the patches."""
        with contextlib.ExitStack() as stack:
            for owner, name, replacement in self.patches:
                stack.enter_context(mock.patch.object(owner, name, replacement))
            yield

    def first_failure(self, env: Environment | None = None) -> SimulationFailed:
        """Return the failure of the first seed that fails without the check.

        Raises:
            AssertionError: no seed fails, so the simulation does not cover the check.
        """
        with self.applied():
            for seed in self.seeds:
                try:
                    self.run(seed, env)
                except SimulationFailed as failed:
                    return failed
        raise AssertionError(f"all {len(self.seeds)} seeds pass without this check")


_admit = StalenessContract.admit


def _without_capacity(self: Any, outstanding: int, *, version: int, published: int, allowed: int | None) -> str:
    if outstanding < self.capacity():
        return _admit(self, outstanding, version=version, published=published)
    begins_at = self.latest_version(version, outstanding // self.groups_per_step)
    return "" if self.usable(self.min_version(published), begins_at) else "publication is behind"


def _without_publication(self: Any, outstanding: int, *, version: int, published: int, allowed: int | None) -> str:
    return "all of the room" if outstanding >= self.capacity() else ""


def _admit_by_published(self: Any, outstanding: int, *, version: int, published: int, allowed: int | None) -> str:
    begins_at = self.latest_version(version, outstanding // self.groups_per_step)
    return (
        "" if outstanding < self.capacity() and self.usable(max(0, published - self.actor_lag), begins_at) else "full"
    )


def _behind_without_incarnations(self: Any, served: Any, newest: Any) -> bool:
    return newest.version - served.version > self.actor_lag


def _wait_forever(self: Any, served: Any, newest: Any, min_version: int) -> bool:
    return served.version >= min_version and not self.is_behind(served, newest)


def _first_update_only(self: Any, oldest: int, version: int) -> bool:
    return version - oldest <= self.bound()


def _never(*arguments: Any, **more: Any) -> bool:
    return False


def _always(*arguments: Any, **more: Any) -> bool:
    return True


def _nothing(*arguments: Any, **more: Any) -> list[Any]:
    return []


def _everything(self: Any, groups: Any, version: int) -> list[Any]:
    return [group for _, group in groups]


def _no_last_line(self: Any, version: int, lag: int) -> None:
    return None


def _as_sampled(sampled: Any, resumed_at: Any) -> int:
    return int(sampled.version)


_TOO_OLD = "last line"

MUTATIONS = {
    "admission ignores the capacity": Mutation(((StalenessContract, "admit", _without_capacity),), "room"),
    "admission ignores the published version": Mutation(((StalenessContract, "admit", _without_publication),), "wait"),
    "an allowed lag above max_lag is accepted": Mutation(
        ((StalenessContract, "admitted_lag", lambda self, allowed: max(self.bound(), allowed or 0)),), "room"
    ),
    "an allowed lag below the least bound is accepted": Mutation(
        (
            (
                StalenessContract,
                "admitted_lag",
                lambda self, allowed: self.bound() if allowed is None else min(self.bound(), allowed),
            ),
        ),
        "progress",
    ),
    "leases allow version 0 as the oldest": Mutation(
        (
            (StalenessContract, "min_version", lambda self, published: 0),
            (StalenessContract, "admit", _admit_by_published),
        ),
        "actor_lag",
    ),
    "any request may start": Mutation(((StalenessContract, "may_start", _always),), "min_version"),
    "no actor is ever behind": Mutation(((StalenessContract, "is_behind", _never),), "abandoned"),
    "an actor on an abandoned incarnation is not behind": Mutation(
        ((StalenessContract, "is_behind", _behind_without_incarnations),), "abandoned"
    ),
    "an actor waits for a version of an abandoned incarnation": Mutation(
        ((StalenessContract, "may_start", _wait_forever),),
        "progress",
        # A redone step may be skipped; then no version is published that is as new as the lease requires.
        seeds=range(1700, 4000),
        knobs=Knobs(0, 0, 1, 1, 1, 1, "drop", 1, 0),
        faults=NO_FAULTS._replace(skips=0.5, learner_deaths=1.0),
    ),
    "nothing is evicted": Mutation(((StalenessContract, "evict", _nothing),), _TOO_OLD),
    "nothing is evicted, and the learner does not check": Mutation(
        ((StalenessContract, "evict", _nothing), (StalenessContract, "check_trained", _no_last_line)), "bound"
    ),
    "only the first update of a step counts": Mutation(((StalenessContract, "usable", _first_update_only),), _TOO_OLD),
    "recorded draws are reused at any age": Mutation(((StalenessContract, "select", _everything),), _TOO_OLD),
    "no step waits for an open group": Mutation(((StalenessContract, "held_back", _nothing),), "wait"),
    "tokens of abandoned versions keep their sampled version": Mutation(
        ((tables, "effective_version", _as_sampled), (book, "effective_version", _as_sampled)), _TOO_OLD
    ),
    "an engine applies any version": Mutation(((World, "is_newer", staticmethod(_always)),), "engine"),
    "a sample resumes on any served version": Mutation(((SimActor, "may_resume", _always),), "spans"),
    "a skipped publication is not repeated": Mutation(((World, "publishes_skipped", False),), "progress"),
}
