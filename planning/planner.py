"""Planner: the best plan of a config on its hosts, first by what the bounds allow, then by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import psutil

from common.hf_folder import read_object
from common.process import threads_of
from common.staleness import StalenessConfig, StalenessContract
from launch.config import Config, load_config
from launch.errors import ConfigError, as_config_error
from launch.pools import WorkerPool, actor_pools, stage_pools
from launch.resources import Gpu, MachineNeeds, check_gpus, gpus_here, stage_need, too_small
from planning.costs import SHAPE_KEYS, LearnerShape
from planning.plans import SAMPLES, Candidate, Host, Keys, Prediction, as_overrides, engines_like, predict, world_of
from planning.profile import Profile
from planning.profiling import check_generates, shape_of
from planning.search import Plan, Space, bounds_of, search
from planning.world import EnginePool

NUM_SIMULATED = 20
NUM_CLOSER = 5
"""Of these, that are looked at once more."""
FEW_SAMPLES = 8_000
CLOSE = 0.01
"""Plans whose rates differ by less than this are as good as each other: the one with the younger data is taken."""
BEYOND = 2
"""Times the samples that engines were measured with: further out their law is a guess."""
MOST_ACTORS = 64
"""Of a pool, that are looked at."""
FOR_A_CHANGE = 1e-6
"""Of its rate, that a plan must gain for each key that it changes."""
MOST_RANKS = 64
SCHEDULES = ("1f1b", "interleaved_1f1b", "zero_bubble")
TOTAL = "actors.num_actors"
"""Which a config with pools need not say; where it does, it is the sum of their counts."""


class Planner:
    """Looks for the best plan of a config."""

    def __init__(
        self, path: Path, overrides: Sequence[str], profile: Profile, hosts: Sequence[Host], prices: Mapping[str, float]
    ) -> None:
        """Load a config; no plan changes the keys of `overrides`, which are of the command line.

        ConfigError if the config is wrong, or the profile or the prices are not of it.
        """
        self._path, self._overrides = path, list(overrides)
        self.config = load_config(path, overrides)
        self._profile, self._hosts, self._prices = profile, list(hosts), dict(prices)
        self._fixed = {word[2:].partition("=")[0] for word in overrides if word.startswith("--")}
        self._actors = {pool.name: pool for pool in actor_pools(self.config)}
        self._stages = stage_pools(self.config)
        self._gpus_of_stage = max(pool.bundle.get("GPU", 0.0) for pool in self._stages)
        check_generates(self.config)
        _check(self.config)
        self._says_total = "num_actors" in self.config.actors.model_fields_set and not self._actors.keys().isdisjoint(
            self.config.pools
        )
        names = [*self._actors, *(pool.name for pool in self._stages)]
        if prices and (missing := [name for name in names if name not in prices]):
            raise ConfigError(
                f"the price of {', '.join(missing)} is missing: give every pool one, --price POOL=PER_HOUR of one of "
                f"its workers; the pools are {', '.join(names)}"
            )
        if unknown := [name for name in prices if name not in names]:
            raise ConfigError(f"--price {unknown[0]}: there is no such pool; the pools are {', '.join(names)}")
        self._as_it_is = world_of(self.config, profile, prices)
        counts = [(pool.name, pool.count) for pool in self._actors.values()]
        num_ranks = sum(pool.count for pool in self._stages)
        taken = self._share(counts, num_ranks) if self._have_places(counts, num_ranks) else 1.0
        self._slack = max(1.0, taken) if taken < math.inf else 1.0
        """Processes on CPUs may share cores as much as those of the config do, for so the profile was taken."""

    @cached_property
    def space(self) -> Space:
        """All choices, with the config's own values among them."""
        dimensions: dict[str, Sequence[object]] = {}
        for name, pool in self._actors.items():
            count, slots = (self._key(name, each) for each in ("count", "max_running_samples"))
            dimensions[count] = self._choices(count, pool.count, range(1, self._most_actors(name) + 1))
            own, costs = pool.config.max_running_samples, engines_like(self._profile, pool)
            most = BEYOND * costs.most_running
            dimensions[slots] = self._choices(
                slots, own, [each for each in (own // 4, own // 2, own, 2 * own) if 1 <= each <= most]
            )
        dimensions["learner"] = self._shapes()
        sync = self.config.weight_sync
        every = "weight_sync.publish_every"
        dimensions[every] = self._choices(every, sync.publish_every, [1, 2, 4, 8])
        lag = "weight_sync.max_lag"
        lags: list[object] = [sync.max_lag]
        if isinstance(sync.max_lag, int):
            lags = [each for each in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if each < sync.max_lag] + lags
        dimensions[lag] = self._choices(lag, sync.max_lag, lags)
        return Space(dimensions)

    @cached_property
    def own(self) -> Keys:
        """The config's own values of the keys that may be chosen."""
        sync = self.config.weight_sync
        keys: dict[str, Any] = {}
        for name, pool in self._actors.items():
            keys[self._key(name, "count")] = pool.count
            keys[self._key(name, "max_running_samples")] = pool.config.max_running_samples
        if self._says_total:
            keys[TOTAL] = self.config.actors.num_actors
        return {
            **keys,
            **_keys_of_shape(shape_of(self.config)),
            "weight_sync.publish_every": sync.publish_every,
            "weight_sync.max_lag": sync.max_lag,
        }

    def keys_of(self, plan: Plan) -> Keys:
        keys: dict[str, Any] = {}
        for name, choice in self.space.choices(plan).items():
            if isinstance(choice, LearnerShape):
                keys |= {key: value for key, value in _keys_of_shape(choice).items() if key not in self._fixed}
            else:
                keys[name] = choice
        if self._says_total:
            keys[TOTAL] = sum(keys[self._key(name, "count")] for name in self._actors)
        return {key: value for key, value in keys.items() if key not in self._fixed}

    def find(self, say: Callable[[str, float | None], None]) -> list[Candidate]:
        """Return the best plans, best first; ConfigError if none fits."""
        say("weighing plans", None)
        found = [plan for plan, _ in search(self.space, self.score, NUM_SIMULATED)]
        own = tuple(0 if key == "learner" else each.index(self.own[key]) for key, each in self.space.dimensions.items())
        found += [own] if own not in found and self.score(own) > -math.inf else []  # so that no plan is worse
        if not found:
            lacks = "" if self._room is None else f" with {self._room / 2**30:.1f} GiB of memory"
            raise ConfigError(
                "no plan fits: not even an actor of each pool and one stage of a learner have a place on "
                f"{', '.join(host.name for host in self._hosts)}{lacks}. Give it more hosts, or smaller workers"
            )
        plans = [self.keys_of(plan) for plan in found]
        candidates = [each.keys for each in self._in_order(self._simulated(plans, FEW_SAMPLES, say))]
        closer = [keys for place, keys in enumerate(candidates) if place < NUM_CLOSER or keys == self.keys_of(own)]
        return self._in_order(self._simulated(closer, SAMPLES, say))

    def _simulated(
        self, plans: Sequence[Keys], samples: int, say: Callable[[str, float | None], None]
    ) -> list[Candidate]:
        found = []
        for number, keys in enumerate(plans):
            say(f"simulating plan {number + 1} of {len(plans)}", number / len(plans))
            world = world_of(self._with(keys), self._profile, self._prices)
            found.append(Candidate(keys, predict(world, samples=samples)))
        return found

    def as_it_is(self) -> Prediction:
        return predict(self._as_it_is)

    # --- scores -----------------------------------------------------------------------------------

    def score(self, plan: Plan) -> float:
        """Return the bound on samples per second, or per price; -inf if the plan is impossible."""
        choices = self.space.choices(plan)
        shape = choices["learner"]
        assert isinstance(shape, LearnerShape)
        counts = {name: int(choices[self._key(name, "count")]) for name in self._actors}  # type: ignore[call-overload]
        if self._says_total and TOTAL in self._fixed and sum(counts.values()) != self.config.actors.num_actors:
            return -math.inf
        if not self._has_room(tuple(counts.items()), self._num_ranks(shape)) or self._lacks_memory(counts, shape):
            return -math.inf
        if self.config.launch.colocate and sum(counts.values()) > 1:
            return -math.inf
        contract = self._contract(choices["weight_sync.publish_every"], choices["weight_sync.max_lag"])
        if contract is None:
            return -math.inf
        pools = tuple(
            self._engine_pool(name, counts[name], choices[self._key(name, "max_running_samples")])
            for name in self._actors
        )
        world = replace(self._as_it_is, pools=pools, contract=contract)
        worth = bounds_of(world, self._mean_step_s(shape)).rate
        if self._prices:
            worth /= sum(pool.count * pool.price for pool in pools) + self._price_of_learner(self._num_ranks(shape))
        # of plans that are as good the one that changes least
        num_changes = sum(self.own[key] != value for key, value in self.keys_of(plan).items())
        return worth * (1.0 - FOR_A_CHANGE * num_changes)

    def _in_order(self, candidates: list[Candidate]) -> list[Candidate]:
        """Sort candidates, best first; of those as good as the best, the one with the youngest data first."""

        def worth(each: Candidate) -> float:
            price = each.prediction.price_per_1000
            return each.prediction.samples_per_s if price is None else 1.0 / price

        candidates = sorted(candidates, key=worth, reverse=True)
        close = [each for each in candidates if worth(each) >= (1.0 - CLOSE) * worth(candidates[0])]
        first = min(close, key=lambda each: (_lag_of(each.keys), -worth(each)))
        return [first, *(each for each in candidates if each is not first)]

    @lru_cache(maxsize=4096)  # noqa: B019 -- a planner lives as long as its command
    def _engine_pool(self, name: str, count: int, slots: int) -> EnginePool:
        before = next(pool for pool in self._as_it_is.pools if pool.name == name)
        return replace(before, count=count, config=before.config.model_copy(update={"max_running_samples": slots}))

    @lru_cache(maxsize=256)  # noqa: B019 -- as above
    def _contract(self, publish_every: int, max_lag: int | str) -> StalenessContract | None:
        said, learner = self.config.weight_sync.staleness(), self.config.learner
        try:
            asked = StalenessConfig(**{**said.model_dump(), "publish_every": publish_every, "max_lag": max_lag})
            contract = StalenessContract(asked, learner.groups_per_step, learner.updates_per_step)
            self.config.buffer.check_capacity(self._group_size, contract.capacity() + learner.groups_per_step)
        except ValueError:
            return None
        return contract

    @lru_cache(maxsize=4096)  # noqa: B019 -- as above
    def _mean_step_s(self, shape: LearnerShape) -> float:
        return self._profile.learner.law.seconds(self._typical, self._as_it_is.prompt_tokens, self._group_size, shape)

    @cached_property
    def _typical(self) -> list[int]:
        """Return the tokens of the samples of a typical step, drawn by the law of lengths."""
        shape, random = (self.config.learner.groups_per_step, self._group_size), np.random.default_rng(0)
        law = self._profile.samples.lengths
        drawn = law.lengths(random.standard_normal((shape[0], 1)), random.standard_normal(shape))
        scores = [NormalDist().inv_cdf((place + 0.5) / drawn.size) for place in range(drawn.size)]
        lengths = law.at(np.array(scores))[drawn.reshape(-1).argsort().argsort()]
        return [self._as_it_is.prompt_tokens + int(length) for length in lengths]

    @property
    def _group_size(self) -> int:
        return self.config.actors.group_size

    # --- what fits --------------------------------------------------------------------------------

    def _key(self, pool: str, what: str) -> str:
        """Return a key of a pool, or of `[actors]` if the config has no pools."""
        if pool in self.config.pools:
            return f"pools.{pool}.{what}"
        return TOTAL if what == "count" else f"actors.{what}"

    def _choices(self, key: str, own: object, choices: Iterable[object]) -> list[object]:
        """Return these choices and the config's own; that alone if the command line sets the key."""
        return [own] if key in self._fixed else sorted({own, *choices}, key=_in_order)

    def _most_actors(self, name: str) -> int:
        """Return the most actors that have a place if there is nothing else."""
        count = 1
        while count < MOST_ACTORS and self._has_room(((name, count + 1),), 0):
            count += 1
        return max(count, self._actors[name].count)

    def _shapes(self) -> list[object]:
        """Return the shapes of the learner that the config allows, its own first."""
        own = shape_of(self.config)
        budgets = sorted({own.token_budget // 2, own.token_budget, 2 * own.token_budget, 4 * own.token_budget})
        ranks = [n for n in range(1, MOST_RANKS + 1) if self._has_room((), n)]
        found: dict[LearnerShape, None] = {own: None}
        for num_ranks, schedule, budget in product(ranks, SCHEDULES, budgets):
            for stages in (n for n in range(1, num_ranks + 1) if num_ranks % n == 0):
                if stages == 1 and schedule != "1f1b":
                    continue  # without a pipeline all schedules are one
                for chunks in (1,) if schedule == "1f1b" else (2,) if schedule == "interleaved_1f1b" else (1, 2):
                    shape = replace(
                        own, num_stages=stages, num_replicas=num_ranks // stages, num_chunks=chunks,
                        schedule=schedule, token_budget=budget,
                    )  # fmt: skip
                    if shape not in found and self._is_possible(shape):
                        found[shape] = None
        return list(found)

    def _is_possible(self, shape: LearnerShape) -> bool:
        if shape.num_stages * shape.num_chunks > self._num_layers:
            return False
        keys = _keys_of_shape(shape)
        own = _keys_of_shape(shape_of(self.config))
        if any(keys[key] != own[key] for key in keys if key in self._fixed):
            return False
        try:
            config = self._with(keys)
            _check(config)
        except ConfigError:
            return False
        if config.learner.token_budget < config.actors.max_model_tokens:
            return False
        need = stage_need(config) if self._gpus else None
        return need is None or not too_small(config, need, self._gpus)

    @cached_property
    def _gpus(self) -> list[Gpu]:
        """Return the GPUs of this machine, if it is a host; those of others are not known."""
        return gpus_here() if any(host.is_here for host in self._hosts) else []

    @cached_property
    def _num_layers(self) -> int:
        path, own = self.config.model.folder, shape_of(self.config)
        layers = read_object(path / "config.json").get("num_hidden_layers") if path and path.is_dir() else 0
        return layers if layers and isinstance(layers, int) else own.num_stages * own.num_chunks

    def _with(self, keys: Keys) -> Config:
        """Return the config with these keys; ConfigError if it would be wrong."""
        total = {}
        if self._says_total:  # so that it is true of any counts; `score` sees to it where the command line says it
            counts = {name: pool.count for name, pool in self._actors.items()}
            total[TOTAL] = sum(keys.get(self._key(name, "count"), count) for name, count in counts.items())
        return load_config(self._path, [*as_overrides(keys), *self._overrides, *as_overrides(total)])

    @staticmethod
    def _num_ranks(shape: LearnerShape) -> int:
        return shape.num_stages * shape.num_replicas

    @lru_cache(maxsize=4096)  # noqa: B019 -- as above
    def _has_room(self, counts: tuple[tuple[str, int], ...], num_ranks: int) -> bool:
        """Return whether each of these workers has a place, and cores are not shared beyond the limit."""
        return self._share(counts, num_ranks) <= self._slack + 1e-9 and self._have_places(counts, num_ranks)

    def _share(self, counts: Iterable[tuple[str, int]], num_ranks: int) -> float:
        """Return the greatest load of the cores that workers on CPUs may use; above 1 they share them.

        Pools that may use some of the same hosts are counted together on all of theirs.
        """
        workers, shares = self._workers(counts, num_ranks), []
        for cores, names in self._sites:
            on_cpus = [(num, each.bundle) for each, num in workers if each.name in names and not each.bundle.get("GPU")]
            on_cpu = sum(num * threads_of(bundle.get("CPU", 0.0)) for num, bundle in on_cpus)
            shares.append(0.0 if not on_cpu else on_cpu / cores if cores else math.inf)
        return max(shares)

    def _have_places(self, counts: Iterable[tuple[str, int]], num_ranks: int) -> bool:
        """Return whether each of these workers finds a host with all that it reserves.

        A greedy assignment, fewest possible hosts first, then the largest: it may miss a place that exists.
        """
        workers = [(pool, pool.bundle.get("GPU", 0.0), num) for pool, num in self._workers(counts, num_ranks)]
        workers.sort(key=lambda each: (len(self._may_use[each[0].name]), -each[1], -each[0].bundle.get("CPU", 0.0)))
        held: dict[Host, tuple[float, float]] = dict.fromkeys(self._hosts, (0.0, 0.0))
        for pool, gpus, left in workers:
            cpus = pool.bundle.get("CPU", 0.0)
            for host in self._may_use[pool.name]:
                if not left:
                    break
                cpus_held, gpus_held = held[host]
                rooms = (host.cpus - cpus_held, cpus), (host.gpus - gpus_held, gpus)
                most = min([left, *(int((room + 1e-9) / each) for room, each in rooms if each)])
                held[host], left = (cpus_held + most * cpus, gpus_held + most * gpus), left - most
            if left:
                return False
        return True

    def _workers(self, counts: Iterable[tuple[str, int]], num_ranks: int) -> list[tuple[WorkerPool, int]]:
        """Return all pools with these counts of actors and of stages."""
        said = {name: section.count for name, section in self.config.pools.items() if section.count}
        rest = max(0, num_ranks - sum(said.get(pool.name, 0) for pool in self._stages))
        stages = [(pool, said.get(pool.name, rest)) for pool in self._stages]
        actors = [(self._actors[name], count) for name, count in counts]
        return [*stages, *actors]

    @cached_property
    def _may_use(self) -> dict[str, list[Host]]:
        """Return the hosts of each pool; first those that fewest pools may use."""
        pools = [*self._actors.values(), *self._stages]
        hosts = sorted(self._hosts, key=lambda host: sum(map(host.takes, pools)))
        return {pool.name: [host for host in hosts if host.takes(pool)] for pool in pools}

    @cached_property
    def _sites(self) -> list[tuple[float, set[str]]]:
        """Return cores of the hosts of some pools, and all pools that have no other hosts."""
        unions: set[frozenset[Host]] = {frozenset()}
        for mine in self._may_use.values():
            unions |= {each.union(mine) for each in unions}
        cores = [sum(host.cores or host.cpus for host in hosts) for hosts in unions]
        names = [{name for name, mine in self._may_use.items() if hosts.issuperset(mine)} for hosts in unions]
        return list(zip(cores, names, strict=True))

    @cached_property
    def _room(self) -> int | None:
        """Return the bytes of memory, if this machine is the host; None for other hosts, which are not known."""
        return psutil.virtual_memory().total if any(host.is_here for host in self._hosts) else None

    def _lacks_memory(self, counts: Mapping[str, int], shape: LearnerShape) -> bool:
        """Return whether these workers do not fit into the memory of this machine, if it is the host."""
        if self._room is None or self._bytes is None:
            return False
        per_actor, per_rank, per_replica, rest = self._bytes
        actors = sum(count * per_actor[name] for name, count in counts.items())
        learner = self._num_ranks(shape) * per_rank + shape.num_replicas * per_replica
        return actors + learner + rest > self._room

    @cached_property
    def _bytes(self) -> tuple[Mapping[str, int], int, int, int] | None:
        """Return the bytes of an actor of each pool, a rank, a replica besides, and the rest; None if not known.

        `MachineNeeds` is linear in them, so that differences tell.
        """
        actors = {name: section for name, section in self.config.pools.items() if section.role == "actors"}
        ones = dict.fromkeys(self._actors, 1)

        def needed(counts: Mapping[str, int], num_stages: int = 1, num_replicas: int = 1) -> int:
            # not by keys: the command line would win over them, and pools of stages hold as many as they say
            shape = {"num_stages": num_stages, "num_replicas": num_replicas, "gpus": self._gpus_of_stage}
            update = {
                "learner": self.config.learner.model_copy(update=shape),
                "actors": self.config.actors.model_copy(update={"num_actors": sum(counts.values())}),
                "pools": {name: each.model_copy(update={"count": counts[name]}) for name, each in actors.items()},
            }
            found = MachineNeeds.of(self.config.model_copy(update=update))
            return found.memory.size_bytes if found is not None else 0

        if not (one := needed(ones)):
            return None
        per_actor = {name: needed({**ones, name: 2}) - one for name in ones}
        per_rank = needed(ones, num_stages=2) - one
        per_replica = needed(ones, num_replicas=2) - one - per_rank
        return per_actor, per_rank, per_replica, one - sum(per_actor.values()) - per_rank - per_replica

    def _price_of_learner(self, num_ranks: int) -> float:
        return num_ranks * max(self._prices.get(pool.name, 0.0) for pool in self._stages)


def _check(config: Config) -> None:
    """Raise ConfigError if a run would refuse the learner's shape, as far as the config alone decides it."""
    with as_config_error():
        config.learner.check(config.algorithm.needs.critic)
    check_gpus(config)


def _keys_of_shape(shape: LearnerShape) -> dict[str, Any]:
    return {f"learner.{name}": getattr(shape, name) for name in SHAPE_KEYS}


def _in_order(choice: object) -> float:
    return float(choice) if isinstance(choice, int | float) else math.inf


def _lag_of(keys: Keys) -> float:
    return _in_order(keys.get("weight_sync.max_lag", "unbounded"))
