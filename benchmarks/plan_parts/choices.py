"""Comparison of the planner's choice with the config and the best plan, in small spaces whose plans are all run.

A space is the set of permitted values of a few keys. All other keys are set on the command line, and plans do not
change such keys. Most spaces run fleets, whose engines sleep according to a token-time model (`benchmarks/fleet.py`).
This model is also the profile of the fleet. Three spaces run vLLM, in rounds (`predictions`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.fleet import BASE, CONFIG, EVEN, LAW, LONG, STEEP, TAIL, TWO_POOLS, Fleet
from benchmarks.fleet import run as run_fleet
from benchmarks.fleet_parts.prompts import FleetPrompts
from benchmarks.fleet_parts.setting import FleetSetting
from benchmarks.overlap import figures_of
from benchmarks.plan_parts.predictions import ROUNDS, WARM_UP, Case, config_in, measured

from leeway.common.hf_folder import model_identity
from leeway.launch.config import Config, load_config, to_toml
from leeway.launch.pools import actor_pools
from leeway.planning.costs import TokenTime
from leeway.planning.lengths import LengthDistribution
from leeway.planning.planner import Planner
from leeway.planning.plans import Host, Keys, as_overrides, settings_of, settings_of_engine
from leeway.planning.profile import EngineCosts, LearnerCosts, Profile, SampleFacts, WeightCosts
from leeway.planning.profiling import local_machine
from leeway.planning.world import Costs

STEPS = 18
FIXED = ("learner.num_stages", "learner.num_replicas", "learner.num_chunks", "learner.schedule", "learner.token_budget")
"""Keys that no plan changes, because the cost model of a fleet does not cover other shapes of the learner."""
FREE = ("actors.num_actors", "actors.max_running_samples", "weight_sync.max_lag", "weight_sync.publish_every")
COUNTS = ("count", "num_actors")
SLOW = TokenTime(2 * LAW.base, 2 * LAW.per_sample)

Figures = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """A space of plans, and the setting in which its plans run."""

    name: str
    free: Mapping[str, Sequence[int]]
    """Key -> permitted values; the first value is that of the config."""
    fixed: Mapping[str, object]
    """Further keys that the command line sets, and that differ between spaces."""
    setting: FleetSetting | None = None
    """Setting of the fleet; None for real engines."""
    cores: float = 2.0
    prices: Mapping[str, float] = field(default_factory=dict)

    @property
    def plans(self) -> list[dict[str, int]]:
        """All plans that fit on the cores together with a learner stage; the first plan is that of the config."""
        found = [dict(zip(self.free, values, strict=True)) for values in product(*self.free.values())]
        return [plan for plan in found if sum(n for key, n in plan.items() if key.endswith(COUNTS)) < self.cores]

    def overrides(self, plan: Keys) -> list[str]:
        """Return the overrides of `leeway train` for a plan."""
        total = sum(value for key, value in plan.items() if key.startswith("pools."))
        return as_overrides({**({ACTORS: total} if total else {}), **self.fixed, **plan})


def _fleet(name: str, law: TokenTime, lengths: LengthDistribution, step_s: float, free: Mapping[str, Sequence[int]],
           pause_s: float = 0.05, prices: Mapping[str, float] | None = None, **values: int) -> Choice:  # fmt: skip
    """Return a space for a fleet of identical engines. `values` sets keys of FREE, which are named without sections."""
    fixed = {key: values[key.rpartition(".")[2]] for key in FREE if key.rpartition(".")[2] in values}
    cores = 1.0 + max(free.get(FREE[0], [values.get("num_actors", 1)]))
    return Choice(name, free, fixed, FleetSetting({"actors": law}, lengths, step_s, 1e-4, pause_s), cores, prices or {})


ACTORS, SLOTS, LAG, EVERY = FREE
CHOICES = (
    _fleet("actors", LAW, TAIL, 0.6, {ACTORS: (1, 2, 3, 4)}, max_running_samples=12, max_lag=4, publish_every=1),
    _fleet("actors, priced", LAW, TAIL, 0.8, {ACTORS: (1, 2, 3, 4, 5)}, prices={"actors": 1.0, "learner": 2.0},
           max_running_samples=12, max_lag=4, publish_every=1),
    _fleet("actors, priced, long tail", LAW, LONG, 1.2, {ACTORS: (1, 2, 3, 4)}, prices={"actors": 1.0, "learner": 1.0},
           max_running_samples=12, max_lag=4, publish_every=1),
    _fleet("slots of steep engines", STEEP, TAIL, 0.5, {SLOTS: (8, 2, 4, 16)}, num_actors=3, max_lag=4,
           publish_every=1),
    _fleet("slots at lag 1", LAW, TAIL, 0.5, {SLOTS: (8, 2, 4, 16)}, num_actors=4, max_lag=1, publish_every=1),
    _fleet("lag", LAW, EVEN, 0.5, {LAG: (4, 0, 1, 2, 3)}, num_actors=4, max_running_samples=16, publish_every=1),
    _fleet("publish_every, long pauses", LAW, TAIL, 0.4, {EVERY: (1, 2, 4)}, 0.5, num_actors=3,
           max_running_samples=16, max_lag=6),
    _fleet("actors and lag", SLOW, TAIL, 0.6, {ACTORS: (1, 2), LAG: (2, 0, 1)}, max_running_samples=12,
           publish_every=1),
    Choice("unlike engines, priced", {"pools.slow.count": (1, 2, 3), "pools.fast.count": (1, 2, 3)},
           {SLOTS: 12, LAG: 4, EVERY: 1},
           FleetSetting({"slow": SLOW, "fast": replace(LAW, base=LAW.base / 2)}, TAIL, 0.6, 1e-4), 5.0,
           {"slow": 1.0, "fast": 2.85, "learner": 2.0}),
    Choice("vLLM: slots", {SLOTS: (12, 3, 6, 24)}, {ACTORS: 1, LAG: 4, EVERY: 1}),
    Choice("vLLM: budget", {"learner.token_budget": (256, 512, 1024)}, {ACTORS: 1, LAG: 4, EVERY: 1, SLOTS: 48}),
    Choice("vLLM: lag", {LAG: (3, 0, 1, 2)}, {ACTORS: 1, SLOTS: 32, EVERY: 1}),
)  # fmt: skip


def chosen(folder: Path, choice: Choice, costs: Costs, profile: Profile | None) -> Figures:
    """Choose a plan in a space, run all plans of the space, and return the comparison.

    Args:
        folder: folder of the runs.
        choice: space of plans.
        costs: measured costs of fleets.
        profile: profile of the real engines, for spaces with real engines.

    Raises:
        MeasurementFailed: a run failed.
    """
    place = folder / "".join(letter if letter.isalnum() else "-" for letter in choice.name)
    place.mkdir(parents=True, exist_ok=True)
    base = CONFIG if choice.setting else config_in(place)
    known = list(BASE) if choice.setting else Case(48).overrides
    if len(choice.setting.pools if choice.setting else ()) > 1:
        known += TWO_POOLS
    config = load_config(base, [*known, *choice.overrides(choice.plans[0])])
    if choice.setting is not None:
        profile = profile_of_fleet(config, choice.setting, costs)
    assert profile is not None
    path = place / "config.toml"
    path.write_text(to_toml(config))
    fixed = {key: _value(config, key) for key in (*FIXED, *FREE) if key not in choice.free and _has(config, key)}
    began_s = time.perf_counter()
    here = Host("here", frozenset(), choice.cores, 0.0, is_here=True)
    planner = Planner(path, as_overrides(fixed), profile, [here], choice.prices)
    best = planner.find(lambda text, share: None)[0].keys
    took_s = time.perf_counter() - began_s
    taken = {key: best.get(key, _value(config, key)) for key in choice.free}
    plans = {_text(plan): plan for plan in [*choice.plans, taken]}
    rounds = [
        {name: _worth(place, choice, plan, known) for name, plan in plans.items()}
        for _ in range(1 if choice.setting else ROUNDS)
    ]
    rates = {name: median(each[name] for each in rounds) for name in plans}
    return {
        "choice": choice.name,
        "config": _text(choice.plans[0]),
        "plan": _text(taken),
        "best": max(rates, key=lambda text: rates[text]),
        "rates": rates,
        "plan_over_best": rates[_text(taken)] / max(rates.values()),
        "plan_over_default": rates[_text(taken)] / rates[_text(choice.plans[0])],
        "plan_s": took_s,
    }


def profile_of_fleet(config: Config, setting: FleetSetting, costs: Costs) -> Profile:
    """Return the token times of a fleet as a profile."""
    engines = {
        pool.name: EngineCosts(
            terms=(law.base, law.per_sample, law.per_kv_token, law.per_prompt_token),
            num_steps=1,
            relative_error=0.0,
            most_running=64,
            kv_tokens=0,
            settings=settings_of_engine(pool.config),
        )
        for pool in actor_pools(config)
        for law in [setting.pools[pool.name]]
    }
    return Profile(
        taken_s=time.time(),
        machine=local_machine(),
        model=model_identity(Path(config.model.path)),
        engines=engines,
        learner=LearnerCosts(
            terms=(setting.step_s, 0.0, setting.step_token_s, 0.0),
            num_steps=1,
            relative_error=0.0,
            between_steps_s=costs.between_steps_s,
        ),
        weights=WeightCosts(behind_s=costs.publish_s + costs.fetch_s, pause_s=setting.pause_s),
        samples=SampleFacts(
            prompt_tokens=FleetPrompts(config, setting.lengths).mean_prompt_tokens,
            quantiles=setting.lengths.quantiles,
            explained=setting.lengths.explained,
            settled_s=costs.reward_s,
        ),
        settings=settings_of(config),
    )


def _worth(folder: Path, choice: Choice, plan: Keys, known: Sequence[str]) -> float:
    """Run a plan; return its samples per second, divided by its price if the space has prices."""
    overrides = choice.overrides(plan)
    if choice.setting is None:
        number = 200 + len(list(folder.glob("case-*.log")))
        return figures_of(measured(folder, number, Case(48), overrides), WARM_UP)["samples_per_s"]
    name = f"{len(list(folder.glob('*.log')))}"
    pools = known[len(BASE) :]
    rows = run_fleet(folder, Fleet(name, choice.setting, (*pools, *overrides), STEPS)).updates
    counted = rows[WARM_UP:]
    rate = sum(row["batch/trajectories"] for row in counted) / (
        counted[-1]["finished_s"] - rows[WARM_UP - 1]["finished_s"]
    )
    if not choice.prices:
        return rate
    counts = {key.split(".")[1]: value for key, value in plan.items() if key.startswith("pools.")}
    counts = counts or {"actors": plan[ACTORS]}
    return rate / (sum(choice.prices[pool] * count for pool, count in counts.items()) + choice.prices["learner"])


def _value(config: Config, key: str) -> Any:  # noqa: ANN401 -- a value of the config
    found: Any = config
    for name in key.split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    return found


def _has(config: Config, key: str) -> bool:
    return not (config.pools and key == ACTORS)


def _text(plan: Keys) -> str:
    return ", ".join(f"{key.removeprefix('pools.').removeprefix('actors.')} = {value}" for key, value in plan.items())
