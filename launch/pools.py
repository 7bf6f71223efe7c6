"""Pools: which workers a run has, what each reserves, and on which hosts it may be.

    [pools.big]                           a host belongs to a pool by the Ray resource pool_big
    role = "actors"
    count = 2
    dtype = "bfloat16"

Without such sections there are two pools, "actors" and "learner", whose workers may be on any host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from actors.config import ActorsConfig
from launch.config import POOL_OVERRIDES, Config
from launch.errors import ConfigError

HOST_UNIT = 1e-3
"""Of the pool's resource, which a worker reserves; a host that carries 1 is never used up by it."""

PART_OF_GPU = 0.5
"""Of a GPU, for each of the two workers of `launch.colocate`."""

Bundle = Mapping[str, float]
"""What a worker reserves, by Ray resource; never with a 0."""


@dataclass(frozen=True)
class WorkerPool:
    """Workers of one kind on hosts of one kind."""

    name: str
    count: int
    bundle: Bundle
    """Of each worker; empty if it reserves nothing and may be on any host."""

    def describe(self) -> str:
        wanted = ", ".join(f"{kind}: {amount:g}" for kind, amount in self.bundle.items())
        return f"pool '{self.name}' asks for {self.count} x {{{wanted}}}"


@dataclass(frozen=True)
class ActorPool(WorkerPool):
    config: ActorsConfig
    """The `[actors]` section as it is for this pool."""


def actor_pools(config: Config) -> list[ActorPool]:
    """Return the pools of actors, in the order of the file; ConfigError if `[actors]` says another number."""
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
    total, said = sum(pool.count for pool in pools), common.num_actors
    if "num_actors" in common.model_fields_set and said != total:
        raise ConfigError(
            f"actors.num_actors = {said}, and the pools of actors hold {total} ({', '.join(sections)}): leave the "
            "first out, and give each pool its count"
        )
    return pools


def serving_dtypes(config: Config) -> tuple[str, ...]:
    """Return the precisions that actors serve in; the learner publishes the weights in all of them."""
    return tuple(sorted({pool.config.dtype for pool in actor_pools(config)}))


def stage_pools(config: Config) -> list[WorkerPool]:
    """Return the pools of the learner, with its ranks in this order; ConfigError if they hold more or fewer."""
    learner = config.learner
    num_ranks = learner.num_replicas * learner.num_stages
    sections = {name: section for name, section in config.pools.items() if section.role == "learner"}
    if not sections:
        gpus = PART_OF_GPU if config.launch.colocate else learner.gpus
        return [WorkerPool("learner", num_ranks, _bundle(learner.cpus, gpus))]
    left = num_ranks - sum(section.count or 0 for section in sections.values())
    pools = []
    for name, section in sections.items():  # its workers reserve what stages do, unless it says otherwise
        cpus = learner.cpus if section.cpus is None else section.cpus
        gpus = learner.gpus if section.gpus is None else section.gpus
        pools.append(WorkerPool(name, section.count or left, _bundle(cpus, gpus, name)))
    total = sum(pool.count for pool in pools)
    if total != num_ranks or any(pool.count < 1 for pool in pools):
        held = ", ".join(f"{pool.name} {pool.count}" for pool in pools)
        raise ConfigError(
            f"the pools of the learner hold {total} stages ({held}), and learner.num_replicas * learner.num_stages = "
            f"{num_ranks}: let their counts add up to that, or leave one of them out"
        )
    return pools


def resource_of(section: str) -> str:
    """Return the Ray resource that the hosts of `[pools.SECTION]` carry."""
    return f"pool_{section}"


def _bundle(cpus: float, gpus: float, section: str = "") -> Bundle:
    amounts = {"CPU": float(cpus), "GPU": float(gpus), resource_of(section): HOST_UNIT if section else 0.0}
    return {kind: amount for kind, amount in amounts.items() if amount}
