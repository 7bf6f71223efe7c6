"""Planner: find the best plan for a config on its hosts, first by closed-form bounds, then by simulation."""

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

from leeway.common.hf_folder import read_object
from leeway.common.process import threads_of
from leeway.common.staleness import StalenessConfig, StalenessContract
from leeway.launch.config import Config, load_config
from leeway.launch.errors import ConfigError, as_config_error
from leeway.launch.pools import WorkerPool, actor_pools, stage_pools
from leeway.launch.resources import Gpu, MachineNeeds, check_gpus, list_gpus, stage_need, too_small
from leeway.planning.costs import SHAPE_KEYS, LearnerShape
from leeway.planning.plans import (
    SAMPLES,
    Candidate,
    Host,
    Keys,
    as_overrides,
    engines_like,
    predict,
    shape_of,
    world_of,
)
from leeway.planning.profile import Profile
from leeway.planning.profiling import check_generates
from leeway.planning.search import Plan, Space, bounds_of, search
from leeway.planning.world import EnginePool

NUM_SIMULATED = 20
NUM_CLOSER = 5
"""Number of best plans of the first round that are simulated again, with more samples."""
FEW_SAMPLES = 8_000
TIE_TOLERANCE = 0.01
"""Relative difference in throughput up to which plans tie; the plan with the smallest lag wins."""
MAX_EXTRAPOLATION = 2
"""Maximum slots, in multiples of the measured number of running samples: beyond it the cost model is unreliable."""
MOST_ACTORS = 64
"""Maximum number of actors per pool in the search."""
CHANGE_PENALTY = 1e-6
"""Minimum relative gain in throughput of a plan for each key that it changes."""
MOST_RANKS = 64
SCHEDULES = ("1f1b", "interleaved_1f1b", "zero_bubble")
TOTAL = "actors.num_actors"
"""Key that is optional in a config with pools; if set, it equals the sum of their counts."""
Progress = Callable[[str, float | None], None]
"""Callback with a text and the completed fraction, which is None if unknown."""


class Planner:
    """Search for the best plan of a config."""

    def __init__(
        self, path: Path, overrides: Sequence[str], profile: Profile, hosts: Sequence[Host], prices: Mapping[str, float]
    ) -> None:
        """Load a config; no plan changes the keys of `overrides`, which come from the command line.

        Raise ConfigError if the config is invalid, or if the profile or the prices do not match it.
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
        self._sets_total = "num_actors" in self.config.actors.model_fields_set and not self._actors.keys().isdisjoint(
            self.config.pools
        )
        names = [*self._actors, *(pool.name for pool in self._stages)]
        if prices and (missing := [name for name in names if name not in prices]):
            raise ConfigError(
                f"no price for {', '.join(missing)}: pass --price POOL=PER_HOUR, the price of one worker, for every "
                f"pool ({', '.join(names)})"
            )
        if unknown := [name for name in prices if name not in names]:
            raise ConfigError(f"--price {unknown[0]}: unknown pool; use one of {', '.join(names)}")
        self._current = world_of(self.config, profile, prices)
        counts = [(pool.name, pool.count) for pool in self._actors.values()]
        num_ranks = sum(pool.count for pool in self._stages)
        load = self._load(counts, num_ranks) if self._can_place(counts, num_ranks) else 1.0
        self._max_load = max(1.0, load) if load < math.inf else 1.0
        """Maximum load per core for CPU processes: 1, or the higher load of the config, which the profile includes."""

    @cached_property
    def space(self) -> Space:
        """Return all choices, including the current values of the config."""
        dimensions: dict[str, Sequence[object]] = {}
        for name, pool in self._actors.items():
            count, slots = (self._key(name, each) for each in ("count", "max_running_samples"))
            dimensions[count] = self._choices(count, pool.count, range(1, self._most_actors(name) + 1))
            own, costs = pool.config.max_running_samples, engines_like(self._profile, pool)
            most = MAX_EXTRAPOLATION * costs.most_running
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
        """Return the current values of the keys that a plan may set."""
        sync = self.config.weight_sync
        keys: dict[str, Any] = {}
        for name, pool in self._actors.items():
            keys[self._key(name, "count")] = pool.count
            keys[self._key(name, "max_running_samples")] = pool.config.max_running_samples
        if self._sets_total:
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
        if self._sets_total:
            keys[TOTAL] = sum(keys[self._key(name, "count")] for name in self._actors)
        return {key: value for key, value in keys.items() if key not in self._fixed}

    def changes(self, keys: Keys) -> list[str]:
        """Return a text for each key whose value differs from that of the config."""
        return [f"{key} {self.own[key]} -> {value}" for key, value in keys.items() if self.own[key] != value]

    def find(self, progress: Progress) -> list[Candidate]:
        """Return the best plans, best first; raise ConfigError if no plan fits."""
        progress("computing bounds of plans", None)
        own = tuple(0 if key == "learner" else each.index(self.own[key]) for key, each in self.space.dimensions.items())
        found = [plan for plan, _ in search(self.space, self.score, own, NUM_SIMULATED)]
        found += [own] if own not in found and self.score(own) > -math.inf else []  # include the config itself
        if not found:
            memory = "" if self._memory is None else f" with {self._memory / 2**30:.1f} GiB of memory"
            raise ConfigError(
                "no plan fits: one actor per pool and one learner stage exceed the resources of "
                f"{', '.join(host.name for host in self._hosts)}{memory}. Add hosts or use smaller workers"
            )
        plans = [self.keys_of(plan) for plan in found]
        candidates = [each.keys for each in self._ranked(self._simulate(plans, FEW_SAMPLES, progress))]
        finalists = [keys for place, keys in enumerate(candidates) if place < NUM_CLOSER or keys == self.keys_of(own)]
        return self._ranked(self._simulate(finalists, SAMPLES, progress))

    def _simulate(self, plans: Sequence[Keys], samples: int, progress: Progress) -> list[Candidate]:
        found = []
        for number, keys in enumerate(plans):
            progress(f"simulating plan {number + 1} of {len(plans)}", number / len(plans))
            world = world_of(self._with(keys), self._profile, self._prices)
            found.append(Candidate(keys, predict(world, samples=samples, error=self._profile.error)))
        return found

    # --- scores -----------------------------------------------------------------------------------

    def score(self, plan: Plan) -> float:
        """Return the bound on samples per second, or per price; -inf if the plan is infeasible."""
        choices = self.space.choices(plan)
        shape = choices["learner"]
        assert isinstance(shape, LearnerShape)
        counts = {name: int(choices[self._key(name, "count")]) for name in self._actors}  # type: ignore[call-overload]
        if self._sets_total and TOTAL in self._fixed and sum(counts.values()) != self.config.actors.num_actors:
            return -math.inf
        workers = tuple(counts.items())
        if not self._fits(workers, self._num_ranks(shape)):
            return -math.inf
        if self._lacks_memory(workers, shape.num_stages, shape.num_replicas):
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
        world = replace(self._current, pools=pools, contract=contract)
        worth = bounds_of(world, self._mean_step_s(shape)).rate
        if self._prices:
            worth /= sum(pool.count * pool.price for pool in pools) + self._price_of_learner(self._num_ranks(shape))
        # ties go to the plan with the fewest changes
        return worth * (1.0 - CHANGE_PENALTY * len(self.changes(self.keys_of(plan))))

    def _ranked(self, candidates: list[Candidate]) -> list[Candidate]:
        """Sort candidates, best first; ties for the first place go to the smallest lag.

        The config itself is first if no plan exceeds it by more than the error of the profile.
        """

        def worth(each: Candidate) -> float:
            price = each.prediction.price_per_1000
            return each.prediction.samples_per_s if price is None else 1.0 / price

        candidates = sorted(candidates, key=worth, reverse=True)
        close = [each for each in candidates if worth(each) >= (1.0 - TIE_TOLERANCE) * worth(candidates[0])]
        first = min(close, key=lambda each: (_lag_of(each.keys), -worth(each)))
        unchanged = next((each for each in candidates if not self.changes(each.keys)), first)
        first = unchanged if worth(first) <= (1.0 + self._profile.error) * worth(unchanged) else first
        return [first, *(each for each in candidates if each is not first)]

    @lru_cache(maxsize=4096)  # noqa: B019 -- a planner exists until its command exits
    def _engine_pool(self, name: str, count: int, slots: int) -> EnginePool:
        before = next(pool for pool in self._current.pools if pool.name == name)
        return replace(before, count=count, config=before.config.model_copy(update={"max_running_samples": slots}))

    @lru_cache(maxsize=256)  # noqa: B019 -- as above
    def _contract(self, publish_every: int, max_lag: int | str) -> StalenessContract | None:
        current, learner = self.config.weight_sync.staleness(), self.config.learner
        try:
            config = StalenessConfig(**{**current.model_dump(), "publish_every": publish_every, "max_lag": max_lag})
            contract = StalenessContract(config, learner.groups_per_step, learner.updates_per_step)
            self.config.buffer.check_capacity(self._group_size, contract.capacity() + learner.groups_per_step)
        except ValueError:
            return None
        return contract

    @lru_cache(maxsize=4096)  # noqa: B019 -- as above
    def _mean_step_s(self, shape: LearnerShape) -> float:
        return self._profile.learner.law.seconds(self._typical, self._current.prompt_tokens, self._group_size, shape)

    @cached_property
    def _typical(self) -> list[int]:
        """Return the tokens of the samples of a typical step, drawn from the length distribution."""
        shape, random = (self.config.learner.groups_per_step, self._group_size), np.random.default_rng(0)
        distribution = self._profile.samples.lengths
        drawn = distribution.lengths(random.standard_normal((shape[0], 1)), random.standard_normal(shape))
        scores = [NormalDist().inv_cdf((place + 0.5) / drawn.size) for place in range(drawn.size)]
        lengths = distribution.at(np.array(scores))[drawn.reshape(-1).argsort().argsort()]
        return [self._current.prompt_tokens + int(length) for length in lengths]

    @property
    def _group_size(self) -> int:
        return self.config.actors.group_size

    # --- resources --------------------------------------------------------------------------------

    def _key(self, pool: str, name: str) -> str:
        """Return a key of a pool, or of `[actors]` if the config has no pools."""
        if pool in self.config.pools:
            return f"pools.{pool}.{name}"
        return TOTAL if name == "count" else f"actors.{name}"

    def _choices(self, key: str, own: object, choices: Iterable[object]) -> list[object]:
        """Return these choices and the current choice; only the current choice if the command line sets the key."""
        return [own] if key in self._fixed else sorted({own, *choices}, key=_as_number)

    def _most_actors(self, name: str) -> int:
        """Return the maximum number of actors of a pool that fit on hosts without other workers."""
        count = 1
        while count < MOST_ACTORS and self._fits(((name, count + 1),), 0):
            count += 1
        return max(count, self._actors[name].count)

    def _shapes(self) -> list[object]:
        """Return the learner shapes that the config allows, the current shape first."""
        own = shape_of(self.config)
        budgets = sorted({own.token_budget // 2, own.token_budget, 2 * own.token_budget, 4 * own.token_budget})
        ranks = [n for n in range(1, MOST_RANKS + 1) if self._fits((), n)]
        found: dict[LearnerShape, None] = {own: None}
        for num_ranks, schedule, budget in product(ranks, SCHEDULES, budgets):
            for stages in (n for n in range(1, num_ranks + 1) if num_ranks % n == 0):
                if stages == 1 and schedule != "1f1b":
                    continue  # without a pipeline all schedules are equal
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
        """Return the GPUs of this machine if it is a host; those of other hosts are unknown."""
        return list_gpus() if any(host.is_here for host in self._hosts) else []

    @cached_property
    def _num_layers(self) -> int:
        path, own = self.config.model.folder, shape_of(self.config)
        layers = read_object(path / "config.json").get("num_hidden_layers") if path and path.is_dir() else 0
        return layers if layers and isinstance(layers, int) else own.num_stages * own.num_chunks

    def _with(self, keys: Keys) -> Config:
        """Return the config with these keys; raise ConfigError if it is invalid."""
        total = {}
        if self._sets_total:  # num_actors must equal the sum; `score` checks a total set on the command line
            counts = {name: pool.count for name, pool in self._actors.items()}
            total[TOTAL] = sum(keys.get(self._key(name, "count"), count) for name, count in counts.items())
        return load_config(self._path, [*as_overrides(keys), *self._overrides, *as_overrides(total)])

    @staticmethod
    def _num_ranks(shape: LearnerShape) -> int:
        return shape.num_stages * shape.num_replicas

    @lru_cache(maxsize=4096)  # noqa: B019 -- as above
    def _fits(self, counts: tuple[tuple[str, int], ...], num_ranks: int) -> bool:
        """Return whether all workers fit on the hosts and cores are not shared beyond the limit."""
        return self._load(counts, num_ranks) <= self._max_load + 1e-9 and self._can_place(counts, num_ranks)

    def _load(self, counts: Iterable[tuple[str, int]], num_ranks: int) -> float:
        """Return the maximum load of the cores that CPU workers may use; above 1, workers share cores.

        Pools with common hosts are counted together, on all hosts of these pools.
        """
        workers, loads = self._workers(counts, num_ranks), []
        for cores, names in self._sites:
            on_cpus = [(num, each.bundle) for each, num in workers if each.name in names and not each.bundle.get("GPU")]
            on_cpu = sum(num * threads_of(bundle.get("CPU", 0.0)) for num, bundle in on_cpus)
            loads.append(0.0 if not on_cpu else on_cpu / cores if cores else math.inf)
        return max(loads)

    def _can_place(self, counts: Iterable[tuple[str, int]], num_ranks: int) -> bool:
        """Return whether each worker fits on a host with all the resources that it reserves.

        Assign workers greedily (fewest possible hosts first, then largest), which may miss a feasible assignment.
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
                free = (host.cpus - cpus_held, cpus), (host.gpus - gpus_held, gpus)
                most = min([left, *(int((amount + 1e-9) / each) for amount, each in free if each)])
                held[host], left = (cpus_held + most * cpus, gpus_held + most * gpus), left - most
            if left:
                return False
        return True

    def _workers(self, counts: Iterable[tuple[str, int]], num_ranks: int) -> list[tuple[WorkerPool, int]]:
        """Return all pools with these counts of actors and of stages."""
        fixed = {name: section.count for name, section in self.config.pools.items() if section.count}
        rest = max(0, num_ranks - sum(fixed.get(pool.name, 0) for pool in self._stages))
        stages = [(pool, fixed.get(pool.name, rest)) for pool in self._stages]
        actors = [(self._actors[name], count) for name, count in counts]
        return [*stages, *actors]

    @cached_property
    def _may_use(self) -> dict[str, list[Host]]:
        """Return the hosts of each pool, ordered by the number of pools that may use them."""
        pools = [*self._actors.values(), *self._stages]
        hosts = sorted(self._hosts, key=lambda host: sum(map(host.takes, pools)))
        return {pool.name: [host for host in hosts if host.takes(pool)] for pool in pools}

    @cached_property
    def _sites(self) -> list[tuple[float, set[str]]]:
        """Return the cores of each union of host sets of pools, and the pools whose hosts are all in the union."""
        unions: set[frozenset[Host]] = {frozenset()}
        for own in self._may_use.values():
            unions |= {each.union(own) for each in unions}
        cores = [sum(host.cores or host.cpus for host in hosts) for hosts in unions]
        names = [{name for name, own in self._may_use.items() if hosts.issuperset(own)} for hosts in unions]
        return list(zip(cores, names, strict=True))

    @cached_property
    def _memory(self) -> int | None:
        """Return the bytes of memory if this machine is a host; None for other hosts, whose memory is unknown."""
        return psutil.virtual_memory().total if any(host.is_here for host in self._hosts) else None

    @lru_cache(maxsize=4096)  # noqa: B019 -- as above
    def _lacks_memory(self, counts: tuple[tuple[str, int], ...], num_stages: int, num_replicas: int) -> bool:
        """Return whether these workers exceed the memory of this machine, if it is a host."""
        if self._memory is None:
            return False
        # not `_with`: command-line options would override these values, and stage pools have fixed counts
        count = dict(counts)
        sections = {name: section for name, section in self.config.pools.items() if name in count}
        shape = {"num_stages": num_stages, "num_replicas": num_replicas, "gpus": self._gpus_of_stage}
        update = {
            "learner": self.config.learner.model_copy(update=shape),
            "actors": self.config.actors.model_copy(update={"num_actors": sum(count.values())}),
            "pools": {name: each.model_copy(update={"count": count[name]}) for name, each in sections.items()},
        }
        needs = MachineNeeds.of(self.config.model_copy(update=update))
        return needs is not None and needs.memory.size_bytes > self._memory

    def _price_of_learner(self, num_ranks: int) -> float:
        return num_ranks * max(self._prices.get(pool.name, 0.0) for pool in self._stages)


def _check(config: Config) -> None:
    """Raise ConfigError if a run would reject the learner shape, as far as the config alone determines it."""
    with as_config_error():
        config.learner.check(config.algorithm.needs.critic)
    check_gpus(config)


def _keys_of_shape(shape: LearnerShape) -> dict[str, Any]:
    return {f"learner.{name}": getattr(shape, name) for name in SHAPE_KEYS}


def _as_number(choice: object) -> float:
    return float(choice) if isinstance(choice, int | float) else math.inf


def _lag_of(keys: Keys) -> float:
    return _as_number(keys.get("weight_sync.max_lag", "unbounded"))
