"""Worker pools: the workers of a run, the resources that they reserve, and the hosts where they can be placed.

    [pools.big]                           a host belongs to this pool if it has the Ray resource pool_big
    role = "actors"
    count = 2
    dtype = "bfloat16"

Without `[pools.NAME]` there are two pools, "actors" and "learner", whose workers can be placed on any host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from leeway.actors.config import ActorsConfig
from leeway.launch.config import POOL_OVERRIDES, Config
from leeway.launch.errors import ConfigError

HOST_UNIT = 1e-3
"""Amount of the pool resource that a worker reserves; small enough that a host with an amount of 1 never runs out."""

PART_OF_GPU = 0.5
"""Share of a GPU that each of the two workers of `launch.colocate` reserves."""

Bundle = Mapping[str, float]
"""Ray resource -> amount that a worker reserves; amounts of 0 are left out."""


@dataclass(frozen=True)
class WorkerPool:
    """Workers of one kind on hosts of one kind."""

    name: str
    count: int
    bundle: Bundle
    """Reservation of each worker; empty if a worker reserves nothing and can be placed on any host."""

    def describe(self) -> str:
        amounts = ", ".join(f"{kind}: {amount:g}" for kind, amount in self.bundle.items())
        return f"pool '{self.name}' requests {self.count} x {{{amounts}}}"


@dataclass(frozen=True)
class ActorPool(WorkerPool):
    config: ActorsConfig
    """The `[actors]` section with the overrides of this pool."""


def actor_pools(config: Config) -> list[ActorPool]:
    """Return the actor pools in file order; raise ConfigError if `actors.num_actors` is not their total."""
    common = config.actors
    sections = {name: section for name, section in config.pools.items() if section.role == "actors"}
    if not sections:
        if config.launch.colocate:
            common = common.model_copy(update={"gpus": PART_OF_GPU})
        return [ActorPool("actors", common.num_actors, _bundle(common.cpus, common.gpus), common)]
    pools = []
    for name, section in sections.items():
        own = {key: value for key in POOL_OVERRIDES if (value := getattr(section, key)) is not None}
        count = section.count or 1
        actors = common.model_copy(update={**own, "num_actors": count})
        pools.append(ActorPool(name, count, _bundle(actors.cpus, actors.gpus, name), actors))
    total, num_actors = sum(pool.count for pool in pools), common.num_actors
    if "num_actors" in common.model_fields_set and num_actors != total:
        raise ConfigError(
            f"actors.num_actors = {num_actors}, but the actor pools have {total} actors ({', '.join(sections)}): "
            "remove num_actors, and set the count of each pool"
        )
    return pools


def serving_dtypes(config: Config) -> tuple[str, ...]:
    """Return the dtypes that actors serve in; the learner publishes the weights in each of them."""
    return tuple(sorted({pool.config.dtype for pool in actor_pools(config)}))


def stage_pools(config: Config) -> list[WorkerPool]:
    """Return the learner pools in rank order; raise ConfigError if they do not have one worker per rank."""
    learner = config.learner
    num_ranks = learner.num_replicas * learner.num_stages
    sections = {name: section for name, section in config.pools.items() if section.role == "learner"}
    if not sections:
        gpus = PART_OF_GPU if config.launch.colocate else learner.gpus
        return [WorkerPool("learner", num_ranks, _bundle(learner.cpus, gpus))]
    left = num_ranks - sum(section.count or 0 for section in sections.values())
    pools = []
    for name, section in sections.items():  # unset keys default to [learner]
        cpus = learner.cpus if section.cpus is None else section.cpus
        gpus = learner.gpus if section.gpus is None else section.gpus
        pools.append(WorkerPool(name, section.count or left, _bundle(cpus, gpus, name)))
    total = sum(pool.count for pool in pools)
    if total != num_ranks or any(pool.count < 1 for pool in pools):
        held = ", ".join(f"{pool.name} {pool.count}" for pool in pools)
        raise ConfigError(
            f"the learner pools have {total} stages ({held}), but learner.num_replicas * learner.num_stages = "
            f"{num_ranks}: set counts that add up to this number, or leave one count unset"
        )
    return pools


def resource_of(section: str) -> str:
    """Return the name of the Ray resource that every host of `[pools.SECTION]` has."""
    return f"pool_{section}"


def _bundle(cpus: float, gpus: float, section: str = "") -> Bundle:
    amounts = {"CPU": float(cpus), "GPU": float(gpus), resource_of(section): HOST_UNIT if section else 0.0}
    return {kind: amount for kind, amount in amounts.items() if amount}
