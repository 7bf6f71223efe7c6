"""Prediction: what simulated runs of a world come to, with an interval over their seeds."""

from __future__ import annotations

from collections import Counter
from statistics import fmean, stdev

import msgspec

from planning.simulator import Simulation
from planning.world import Outcome, World

MANY_SAMPLES = 30_000
"""Samples that a prediction simulates in all: less than a second."""
LEAST_STEPS = 12
NUM_SEEDS = 3
_T = 4.30
"""Student's t, 95 %, of so many."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Means over seeds."""

    samples_per_s: float
    low: float
    high: float
    """Of samples_per_s, 95 % by the seeds that were simulated; what the profile does not know is not in it."""
    step_s: float
    token_s: float
    """Of an engine, for one token of all its samples; of several pools the mean by slots."""
    learner_busy: float
    slots_used: float
    drop_share: float
    lag_mean: float
    """Of the oldest tokens of trained groups."""
    binds: str
    price_per_1000: float | None = None
    """Of a thousand trained samples; None without prices."""

    def describe(self) -> str:
        price = "" if self.price_per_1000 is None else f", {self.price_per_1000:.3g} per 1,000 samples"
        return f"{self.samples_per_s:.1f} samples/s ({self.low:.1f} to {self.high:.1f}), {self.binds} binds{price}"


def predict(world: World, *, samples: int = MANY_SAMPLES) -> Prediction:
    """Simulate a world under several seeds, as many steps as so many samples are."""
    contract = world.contract
    per_step = contract.groups_per_step * world.group_size
    steps = max(LEAST_STEPS, samples // (NUM_SEEDS * per_step))
    warm_up = max(4, contract.capacity() // contract.groups_per_step * 2)
    found = [Simulation(world, seed).run(steps + warm_up, warm_up) for seed in range(NUM_SEEDS)]
    rates = [each.samples_per_s for each in found]
    reach = _T * stdev(rates) / NUM_SEEDS**0.5
    rate = fmean(rates)
    return Prediction(
        samples_per_s=rate,
        low=max(0.0, rate - reach),
        high=rate + reach,
        step_s=fmean(each.busy_s / max(1, each.num_steps) for each in found),
        token_s=fmean(_token_s(world, each) for each in found),
        learner_busy=fmean(each.learner_busy for each in found),
        slots_used=fmean(each.slots_used for each in found),
        drop_share=fmean(each.drop_share for each in found),
        lag_mean=fmean(each.lag_mean for each in found),
        binds=Counter(each.binds for each in found).most_common(1)[0][0],
        price_per_1000=fmean(each.price_per_1000 for each in found) if found[0].price else None,
    )


def _token_s(world: World, found: Outcome) -> float:
    """What a step of an engine took on average, from how many samples it had and how many tokens it made."""
    slots = {pool.name: pool.count * pool.config.max_running_samples for pool in world.pools}
    used = sum(found.slots_used_by_pool.get(name, 0.0) * count for name, count in slots.items())
    return used * found.seconds / found.num_tokens if found.num_tokens else 0.0
