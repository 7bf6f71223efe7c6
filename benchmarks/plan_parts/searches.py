"""Comparison of steepest ascent with enumeration, on synthetic settings."""

from __future__ import annotations

import random
import time
from typing import Any

from benchmarks.lib.lengths import lognormal

from leeway.common.staleness import StalenessConfig, StalenessContract
from leeway.launch.config import Config
from leeway.launch.pools import actor_pools
from leeway.planning.costs import LearnerShape, LearnerTime, TokenTime
from leeway.planning.search import Plan, Space, bounds_of, search
from leeway.planning.world import Costs, EnginePool, World

NUM_INSTANCES = 100
LIMIT_S = 10.0
COUNTS = (1, 2, 3, 4, 6, 8, 12)
SLOTS = (16, 64, 256)
STAGES, REPLICAS = (1, 2, 4), (1, 2, 3, 4)
SCHEDULES = ("1f1b", "interleaved_1f1b", "zero_bubble")
EVERY = (1, 2, 4, 8)


class Instance:
    """A random setting: two different pools of engines and a learner that share GPUs."""

    def __init__(self, config: Config, seed: int) -> None:
        """Draw the setting from a seed."""
        chance = random.Random(seed)
        self._group_size, self._groups = config.actors.group_size, chance.choice((64, 128, 256))
        self._gpus = chance.choice((12, 16, 24, 32))
        self._laws = [
            TokenTime(10 ** chance.uniform(-2.5, -1.3), 10 ** chance.uniform(-5, -3.5), 10 ** chance.uniform(-9, -7.5))
            for _ in range(2)
        ]
        self._lengths = lognormal(chance.choice((200, 1000, 4000)), chance.uniform(0.4, 1.0), 16_384, 0.6)
        self._learner = LearnerTime(
            chance.uniform(0.05, 1.0), chance.uniform(0.001, 0.05), 10 ** chance.uniform(-6, -4.5)
        )
        self._costs = Costs(publish_s=chance.uniform(0.1, 4.0), fetch_s=chance.uniform(0.1, 4.0), pause_s=0.2)
        self._pool, self._buffer = actor_pools(config)[0].config, config.buffer
        self.space = Space({
            "first": COUNTS, "first_slots": SLOTS, "second": COUNTS, "second_slots": SLOTS,
            "stages": STAGES, "replicas": REPLICAS, "schedule": SCHEDULES, "publish_every": EVERY,
        })  # fmt: skip
        self._step_s: dict[tuple[object, ...], float] = {}
        self._pools: dict[tuple[object, ...], EnginePool] = {}

    def score(self, plan: Plan) -> float:
        """Return the throughput that the bounds allow for a plan, or -inf if the plan needs too many GPUs."""
        first, first_slots, second, second_slots, stages, replicas, schedule, every = self.space.choices(plan).values()
        if first + second + stages * replicas > self._gpus:  # type: ignore[operator]
            return float("-inf")
        contract = StalenessContract(StalenessConfig(max_lag=8, publish_every=every), self._groups)  # type: ignore[arg-type]
        pools = (self._engines(0, first, first_slots), self._engines(1, second, second_slots))
        world = World(
            pools, contract, self._buffer, self._lengths, lambda tokens: 0.0, prompt_tokens=200, costs=self._costs
        )
        return bounds_of(world, self._mean_step_s(stages, replicas, schedule)).rate

    def _engines(self, number: int, count: object, slots: object) -> EnginePool:
        key = number, count, slots
        if key not in self._pools:
            config = self._pool.model_copy(update={"max_running_samples": slots})
            self._pools[key] = EnginePool(str(number), count, self._laws[number], config)  # type: ignore[arg-type]
        return self._pools[key]

    def _mean_step_s(self, stages: object, replicas: object, schedule: object) -> float:
        key = stages, replicas, schedule
        if key not in self._step_s:
            num = self._groups * self._group_size
            shape = LearnerShape(stages, replicas, 1, schedule, 32_768)  # type: ignore[arg-type]
            lengths = [200 + round(self._lengths.mean)] * num
            self._step_s[key] = self._learner.seconds(lengths, 200, self._group_size, shape)
        return self._step_s[key]


def searched(config: Config, num_instances: int = NUM_INSTANCES) -> dict[str, Any]:
    """Return the worst ratio of the best score to the score found by ascent, and its longest time."""
    ratios, seconds, sizes = [], [], []
    for seed in range(num_instances):
        instance = Instance(config, seed)
        best = enumerated(instance)
        began_s = time.perf_counter()
        start = tuple(len(choices) // 2 for choices in instance.space.dimensions.values())
        found = search(instance.space, instance.score, start, most_enumerated=0)
        seconds.append(time.perf_counter() - began_s)
        ratios.append(best / found[0][1] if found else float("inf"))
        sizes.append(instance.space.size)
    return {
        "enumerated_over_ascent_worst": max(ratios),
        "ascent_s_worst": max(seconds),
        "instances": num_instances,
        "plans_of_an_instance": max(sizes),
    }


def enumerated(instance: Instance) -> float:
    """Return the best score of all plans, by enumeration."""
    return max(map(instance.score, instance.space.all()))
