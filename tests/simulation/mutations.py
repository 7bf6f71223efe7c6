"""Each check of the policy, switched off, and what then breaks.

A mutation is worth a test only where one invariant shows it: the name of that invariant is beside it. "bound",
"last line", "wait", "room", "actor_lag", "min_version", "abandoned", "spans", "engine" and "progress" are those of
`witness`, and of `world` where the run gets stuck.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

from buffer import tables
from common.staleness import StalenessContract
from tests.simulation import book
from tests.simulation.actor import SimActor
from tests.simulation.core import Environment
from tests.simulation.knobs import NO_FAULTS, Faults, Knobs
from tests.simulation.seeds import Outcome, SimulationFailed, simulate, simulate_with
from tests.simulation.world import World


class Mutation(NamedTuple):
    """A check that is taken out."""

    patches: tuple[tuple[object, str, Any], ...]
    """Whose attribute, which, and what takes its place."""
    breaks: str
    """The invariant that it breaks."""
    seeds: range = range(20_000)
    """The first of these that shows it is enough."""
    knobs: Knobs | None = None
    """Where it takes a rare meeting of faults: knobs that make it likely, with `faults`."""
    faults: Faults = NO_FAULTS

    def run(self, seed: int, env: Environment | None = None) -> Outcome:
        """One of its seeds."""
        if self.knobs is None:
            return simulate(seed, env)
        return simulate_with(seed, self.knobs, self.faults, env)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The policy without the check."""
        with contextlib.ExitStack() as stack:
            for owner, name, replacement in self.patches:
                stack.enter_context(mock.patch.object(owner, name, replacement))
            yield

    def shown_by(self, env: Environment | None = None) -> SimulationFailed:
        """The failure of its first seed that fails without the check.

        Raises:
            AssertionError: none does: the check guards nothing that the simulation looks at.
        """
        with self.applied():
            for seed in self.seeds:
                try:
                    self.run(seed, env)
                except SimulationFailed as failed:
                    return failed
        raise AssertionError(f"{len(self.seeds)} seeds pass without this check")


_admit = StalenessContract.admit


def _without_room(self: Any, outstanding: int, *, version: int, published: int, allowed: int | None) -> str:
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


def _for_ever(self: Any, served: Any, newest: Any, min_version: int) -> bool:
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
    "admission has no room check": Mutation(((StalenessContract, "admit", _without_room),), "room"),
    "admission does not look at what is published": Mutation(
        ((StalenessContract, "admit", _without_publication),), "wait"
    ),
    "an allowance above max_lag counts": Mutation(
        ((StalenessContract, "admitted_lag", lambda self, allowed: max(self.bound(), allowed or 0)),), "room"
    ),
    "an allowance below the least bound counts": Mutation(
        (
            (
                StalenessContract,
                "admitted_lag",
                lambda self, allowed: self.bound() if allowed is None else min(self.bound(), allowed),
            ),
        ),
        "progress",
    ),
    "leases name version 0 as the oldest": Mutation(
        (
            (StalenessContract, "min_version", lambda self, published: 0),
            (StalenessContract, "admit", _admit_by_published),
        ),
        "actor_lag",
    ),
    "any request may start": Mutation(((StalenessContract, "may_start", _always),), "min_version"),
    "no actor is ever behind": Mutation(((StalenessContract, "is_behind", _never),), "abandoned"),
    "an abandoned incarnation is not behind": Mutation(
        ((StalenessContract, "is_behind", _behind_without_incarnations),), "abandoned"
    ),
    "an actor waits for a version of an abandoned incarnation": Mutation(
        ((StalenessContract, "may_start", _for_ever),),
        "progress",
        # A step is skipped when it is redone, so no version as new as the lease asks for comes.
        seeds=range(1700, 4000),
        knobs=Knobs(0, 0, 1, 1, 1, 1, "drop", 1, 0),
        faults=NO_FAULTS._replace(skips=0.5, learner_deaths=1.0),
    ),
    "nothing is evicted": Mutation(((StalenessContract, "evict", _nothing),), _TOO_OLD),
    "nothing is evicted, and the learner does not look": Mutation(
        ((StalenessContract, "evict", _nothing), (StalenessContract, "check_trained", _no_last_line)), "bound"
    ),
    "only the first update of a step counts": Mutation(((StalenessContract, "usable", _first_update_only),), _TOO_OLD),
    "recorded draws are used whatever their age": Mutation(((StalenessContract, "select", _everything),), _TOO_OLD),
    "no step waits for an open group": Mutation(((StalenessContract, "held_back", _nothing),), "wait"),
    "tokens of abandoned versions count as they were sampled": Mutation(
        ((tables, "effective_version", _as_sampled), (book, "effective_version", _as_sampled)), _TOO_OLD
    ),
    "an engine applies whatever arrives": Mutation(((World, "is_newer", staticmethod(_always)),), "engine"),
    "a sample goes on whatever the engine serves": Mutation(((SimActor, "may_go_on", _always),), "spans"),
    "a publication that was skipped is not made up for": Mutation(((World, "makes_up", False),), "progress"),
}
