"""Plans: hosts, simulated predictions from a profile, and the TOML patch of a plan.

A plan sets the number of actors of each pool and their slots, the shape of the learner, the publication interval, and
the staleness bound, up to that of the config. A plan changes no other setting that affects learning.
"""

from __future__ import annotations

import json
import math
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import msgspec

from leeway.actors.config import ActorsConfig
from leeway.common.process import usable_cpus
from leeway.common.staleness import StalenessContract
from leeway.launch.config import Config
from leeway.launch.errors import ConfigError
from leeway.launch.pools import ActorPool, WorkerPool, actor_pools, stage_pools
from leeway.launch.resources import list_gpus
from leeway.planning.costs import SHAPE_KEYS, LearnerShape
from leeway.planning.profile import EngineCosts, Profile
from leeway.planning.simulator import Simulation
from leeway.planning.world import EnginePool, World

NUM_SHOWN = 4
SAMPLES = 30_000
"""Total number of samples in the simulations of one prediction, which take less than a second."""
LEAST_STEPS = 12
NUM_SEEDS = 3
_T = 4.30
"""Student's t for a 95 % interval of the mean of `NUM_SEEDS` values."""

Key = str
Keys = Mapping[Key, Any]
"""Dotted config key -> value in a plan."""


class Host(NamedTuple):
    """Machine available to a run."""

    name: str
    pools: frozenset[str]
    cpus: float
    gpus: float
    is_here: bool = False
    """True for the local machine, which Ray starts as a host of every pool."""
    cores: float | None = None
    """Cores available to processes, if fewer than the CPUs that Ray counts."""

    def takes(self, pool: WorkerPool) -> bool:
        return self.is_here or pool.bundle.keys() <= {"CPU", "GPU", *(f"pool_{name}" for name in self.pools)}


@dataclass(frozen=True)
class Candidate:
    """Plan with a simulated prediction."""

    keys: Keys
    prediction: Prediction


# --- hosts --------------------------------------------------------------------------------------------


def local_host() -> Host:
    cpus = float(usable_cpus())
    return Host("this machine", frozenset(), cpus, float(len(list_gpus())), is_here=True, cores=cpus)


def read_hosts(path: Path, cpus: float, gpus: float) -> list[Host]:
    """Return the hosts of a `launch/cluster.sh` host file; raise ConfigError if it is unreadable or has no host."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; pass a file with one host per line") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text: pass a file with one host per line") from None
    hosts = []
    for line in lines:
        words = line.partition("#")[0].split()
        if words:
            pools = frozenset(words[1].split(",")) - {"-"} if len(words) > 1 else frozenset()
            hosts.append(Host(words[0], pools, cpus, gpus))
    if not hosts:
        raise ConfigError(f"{path} has no hosts: add lines of the form HOST [POOL[,POOL...] [ADDRESS]]")
    return hosts


# --- facts of a config that determine its costs ---------------------------------------------------------


def settings_of(config: Config) -> dict[str, Any]:
    """Return the config values that determine the costs of a profile and that no plan sets."""
    needs, names = config.algorithm.needs, ("precision", "num_minibatches", "num_epochs", "activation_checkpointing")
    return {
        "algorithm.type": config.algorithm.type,
        **{f"learner.{name}": getattr(config.learner, name) for name in names},
        "actors.max_new_tokens": config.actors.max_new_tokens,
        **{f"the algorithm's {name}": getattr(needs, name) for name in ("critic", "proximal", "reference")},
    }


def settings_of_engine(actors: ActorsConfig) -> dict[str, Any]:
    names = ["dtype", "tensor_parallel_size", "kv_cache_gib", "engine_args"]
    names += ["gpu_memory_share"] if actors.gpus and actors.kv_cache_gib is None else []  # sets the cache size
    return {name: getattr(actors, name) for name in names}


def shape_of(config: Config) -> LearnerShape:
    learner, needs = config.learner, config.algorithm.needs
    return LearnerShape(
        **{name: getattr(learner, name) for name in SHAPE_KEYS},
        unit=needs.separable or "sequence",
        num_minibatches=learner.num_minibatches,
        device="cuda" if any(pool.bundle.get("GPU") for pool in stage_pools(config)) else "cpu",
        saves_pass=needs.separable is not None and not (needs.proximal and learner.updates_per_step > 1),
    )


# --- the simulated run --------------------------------------------------------------------------------


def world_of(config: Config, profile: Profile, prices: Mapping[str, float] | None = None) -> World:
    """Return the simulation input of a config with the costs of a profile; raise ConfigError if they do not match."""
    learner, here = profile.learner, settings_of(config)
    for key, value in profile.settings.items():
        if here.get(key) != value:
            raise ConfigError(
                f"the profile was measured with {key} = {value!r}, but the config has {here.get(key)!r}, so its costs "
                "do not apply: run `leeway profile CONFIG.toml` for this config"
            )
    prices = prices or {}
    law, shape, group_size = learner.law, shape_of(config), config.actors.group_size
    prompt_tokens = round(profile.samples.prompt_tokens)
    pools = []
    for pool in actor_pools(config):
        costs = engines_like(profile, pool)
        kv_tokens = float(costs.kv_tokens or math.inf)
        pools.append(EnginePool(pool.name, pool.count, costs.law, pool.config, kv_tokens, prices.get(pool.name, 0.0)))
    return World(
        tuple(pools),
        StalenessContract(
            config.weight_sync.staleness(), config.learner.groups_per_step, config.learner.updates_per_step
        ),
        config.buffer,
        profile.samples.lengths,
        lambda tokens: law.seconds(tokens, prompt_tokens, group_size, shape),
        num_prompts=config.task.num_train or World.num_prompts,
        prompt_tokens=prompt_tokens,
        costs=profile.weights.as_costs(profile.samples.settled_s, learner.between_steps_s),
        score_token_s=learner.score_token_s / (shape.num_stages * shape.num_replicas),
        learner_price=sum(prices.get(pool.name, 0.0) * pool.count for pool in stage_pools(config)),
    )


def engines_like(profile: Profile, pool: ActorPool) -> EngineCosts:
    """Return a profile's costs of the engines of a pool, or of equal engines; raise ConfigError if there are none."""
    here, named, why = settings_of_engine(pool.config), profile.engines.get(pool.name), ""
    for costs in (*([named] if named else []), *profile.engines.values()):
        there = costs.settings
        if not (differs := [key for key, value in there.items() if here.get(key) != value]):
            return costs
        why = why or f"{differs[0]} = {there[differs[0]]!r} in the profile, but {here.get(differs[0])!r} in the config"
    raise ConfigError(
        f"the profile has no matching engine for pool '{pool.name}': {why}: run `leeway profile "
        "CONFIG.toml` for this config"
    )


# --- predictions --------------------------------------------------------------------------------------


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics that `leeway plan` predicts for a run; means over the simulated seeds."""

    samples_per_s: float
    low: float
    high: float
    """`low` and `high`: interval of samples_per_s, from the error of the profile and the simulated seeds."""
    step_s: float
    learner_busy: float
    slots_used: float
    drop_share: float
    lag_mean: float
    """Mean lag of the oldest token of the groups used for training, in versions."""
    binds: str
    """Bottleneck of the run."""
    price_per_1000: float | None = None
    """Price per thousand samples used for training; None without prices."""

    def describe(self) -> str:
        price = "" if self.price_per_1000 is None else f", {self.price_per_1000:.3g} per 1,000 samples"
        rate = f"{self.samples_per_s:.1f} samples/s ({self.low:.1f} to {self.high:.1f})"
        return f"{rate}, bottleneck: {self.binds}{price}"


def predict(world: World, *, samples: int = SAMPLES, error: float = 0.0) -> Prediction:
    """Simulate a world under `NUM_SEEDS` seeds, with about `samples` samples in total.

    `error` is the relative error of the costs; see `Profile.error`.
    """
    contract = world.contract
    per_step = contract.groups_per_step * world.group_size
    steps = max(LEAST_STEPS, samples // (NUM_SEEDS * per_step))
    warm_up = max(4, contract.capacity() // contract.groups_per_step * 2)
    found = [Simulation(world, seed).run(steps + warm_up, warm_up) for seed in range(NUM_SEEDS)]
    rates = [each.samples_per_s for each in found]
    rate = fmean(rates)
    reach = math.hypot(_T * stdev(rates) / NUM_SEEDS**0.5, error * rate)
    return Prediction(
        samples_per_s=rate,
        low=max(0.0, rate - reach),
        high=rate + reach,
        step_s=fmean(each.busy_s / max(1, each.num_steps) for each in found),
        learner_busy=fmean(each.learner_busy for each in found),
        slots_used=fmean(each.slots_used for each in found),
        drop_share=fmean(each.drop_share for each in found),
        lag_mean=fmean(each.lag_mean for each in found),
        binds=Counter(each.binds for each in found).most_common(1)[0][0],
        price_per_1000=fmean(each.price_per_1000 for each in found) if found[0].price else None,
    )


# --- the patch ----------------------------------------------------------------------------------------


def as_overrides(keys: Keys) -> list[str]:
    return [word for key, value in keys.items() for word in (f"--{key}", json.dumps(value))]


def write_plan(path: Path, candidate: Candidate, profile: Path) -> None:
    """Write a plan as a TOML patch with its prediction; raise ConfigError if the file cannot be written."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in candidate.keys.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    lines = [
        f"# {candidate.prediction.describe()}",
        "# leeway train CONFIG.toml --plan THIS; command-line options take precedence",
        "",
    ]
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items()), ""]
    prediction = msgspec.to_builtins(candidate.prediction) | {"profile": str(profile.resolve())}
    lines += ["[plan]", *(f"{key} = {json.dumps(value)}" for key, value in prediction.items() if value is not None), ""]
    try:
        path.write_text("\n".join(lines), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; pass another --out FILE") from None


def read_plan(path: Path) -> list[str]:
    """Return the keys of a plan as overrides; raise ConfigError if the file is missing or not a plan."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        prediction = tree.pop("plan", None)
        if not isinstance(prediction, dict):
            raise ValueError("the file has no section [plan]")  # noqa: TRY004, TRY301 -- handled as other errors
        msgspec.convert({**prediction, "profile": None}, Prediction)
    except (OSError, ValueError) as error:  # ValueError: invalid UTF-8, invalid TOML, or TOML of another kind
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--plan {path} is not a plan ({why}): pass a file written by `leeway plan`") from None
    return as_overrides(dict(_flat(tree)))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[Key, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# --- command line -------------------------------------------------------------------------------------


def prices_of(words: Sequence[str]) -> dict[str, float]:
    """Parse prices of the form POOL=PER_HOUR; raise ConfigError if a price is malformed or not above 0."""
    prices = {}
    for word in words:
        pool, equals, text = word.partition("=")
        try:
            prices[pool] = float(text)
        except ValueError:
            prices[pool] = -1.0
        if not equals or not pool or not 0.0 < prices[pool] < math.inf:
            raise ConfigError(f"--price {word}: expected POOL=PER_HOUR with a price above 0, as in --price actors=2.5")
    return prices


def show(candidates: Sequence[Candidate], error: float, changes: Callable[[Keys], Sequence[str]]) -> None:
    """Print the best plan, the next three and the unchanged config, and the changes of each plan.

    `error` is that of the profile; `changes` returns a text for each key that a plan changes.
    """
    from rich.console import Console
    from rich.table import Table

    has_price = candidates[0].prediction.price_per_1000 is not None
    heads = ["plan", "samples/s", "bottleneck", "learner busy", "slots used", "lag", "dropped"]
    table = Table(*heads, *["per 1,000"] * has_price, box=None, pad_edge=False)
    names = ["best", *(f"{place}." for place in range(2, NUM_SHOWN + 1))]
    unchanged = [("unchanged", each) for each in candidates if not changes(each.keys)]
    different = {each.prediction.samples_per_s: each for each in reversed(candidates)}
    candidates = [each for each in candidates if different[each.prediction.samples_per_s] is each]
    for name, each in [*zip(names, candidates, strict=False), *unchanged]:
        prediction = each.prediction
        cells = [
            f"{prediction.samples_per_s:.1f} ({prediction.low:.1f} to {prediction.high:.1f})",
            prediction.binds,
            f"{prediction.learner_busy:.0%}",
            f"{prediction.slots_used:.0%}",
            f"{prediction.lag_mean:.1f}",
            f"{prediction.drop_share:.1%}",
        ]
        if has_price:
            cells.append("-" if prediction.price_per_1000 is None else f"{prediction.price_per_1000:.3g}")
        table.add_row(name, *cells)
    for column in table.columns:
        column.no_wrap = True
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    for name, each in zip(names, candidates, strict=False):
        print(f"{name}: {', '.join(changes(each.keys)) or f'no changes; no plan is faster by more than {error:.0%}'}")
