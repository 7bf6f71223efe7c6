"""The settings and fault rates that a seed determines."""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from random import Random
from typing import Literal, NamedTuple

from leeway.common.staleness import StalenessConfig, StalenessContract


class Knobs(NamedTuple):
    """The settings that determine lag, with their letters in docs/staleness.md."""

    max_lag: int
    """L: maximum lag of a token, in versions."""
    max_actor_lag: int
    """A: maximum number of versions that an actor is behind the published weights."""
    publish_every: int
    """P: number of versions from one publication to the next."""
    updates_per_step: int
    """M: number of updates per step."""
    groups_per_step: int
    """G: number of groups per step."""
    group_size: int
    """K: number of samples per group."""
    on_stale: Literal["drop", "wait"]
    num_actors: int
    own_actor_lag: int
    """A as the actors compute it, which is larger if their config does not set A and a step has several updates."""
    refill: float = 0.0
    """`buffer.refill_uninformative`; ignored at depth "policy", which has no rewards."""

    @property
    def actors_contract(self) -> StalenessContract:
        """Return the policy that the actors apply."""
        return _actors_contract(self)

    @property
    def contract(self) -> StalenessContract:
        """Return the policy of a run with these settings."""
        return _contract(self)


class Faults(NamedTuple):
    """Fault rates: the chance of each fault per occasion; 0 disables the fault."""

    deaths: float = 0.0
    """A process is killed and restarted."""
    stalls: float = 0.0
    """A process is stopped for a while; a process that is replaced meanwhile continues as a zombie."""
    copies: float = 0.0
    """A message arrives twice, or its reply is lost and the message is sent again."""
    late_weights: float = 0.0
    """An actor receives a version that is not the newest, or one that fails its checksum."""
    skips: float = 0.0
    """An update is skipped."""
    full_disk: float = 0.0
    """A publication is skipped, because the weights folder is full or slow."""
    learner_deaths: float = 0.0
    restarts: float = 0.0
    """The buffer service restarts."""
    given_up: float = 0.0
    """A sample fails."""
    requeued: float = 0.0
    """An actor requeues samples, or saves their tokens."""


NO_FAULTS = Faults()
_RATES = Faults(
    deaths=0.2, stalls=0.5, copies=0.3, late_weights=0.3, skips=0.2, full_disk=0.4, learner_deaths=0.4, restarts=0.7,
    given_up=0.05, requeued=0.5,
)  # fmt: skip


def choose_knobs(random: Random) -> Knobs:
    """Choose valid settings, with small values, so that the lag bound is often reached."""
    updates, actor_lag = random.choice((1, 1, 1, 2, 3)), random.choice((0, 0, 1, 2))
    publish_every = random.choice((1, 1, 2, 3))
    least = actor_lag + publish_every - 1 + updates - 1
    return Knobs(
        max_lag=least + random.choice((0, 0, 1, 1, 2, 3)),
        max_actor_lag=actor_lag,
        publish_every=publish_every,
        updates_per_step=updates,
        groups_per_step=random.choice((1, 1, 1, 2, 3)),
        group_size=random.choice((1, 1, 1, 2)),
        on_stale=random.choice(("drop", "wait")),
        num_actors=random.choice((1, 2, 3)),
        own_actor_lag=actor_lag + random.choice((0, 0, 0, 1)),
    )


def choose_faults(random: Random) -> Faults:
    """Enable each fault in half of the runs, so that no fault hides the effect of another."""
    return Faults(*[rate if random.random() < 0.5 else 0.0 for rate in _RATES])


@lru_cache(maxsize=4096)
def _contract(knobs: Knobs) -> StalenessContract:
    config = StalenessConfig(
        max_lag=knobs.max_lag,
        max_actor_lag=knobs.max_actor_lag,
        publish_every=knobs.publish_every,
        on_stale=knobs.on_stale,
    )
    return StalenessContract(config, knobs.groups_per_step, knobs.updates_per_step)


@lru_cache(maxsize=4096)
def _actors_contract(knobs: Knobs) -> StalenessContract:
    contract = copy(knobs.contract)
    contract.actor_lag = knobs.own_actor_lag
    return contract
