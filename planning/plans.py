"""Plans: what of a config may be chosen, and what it would do by a profile.

Chosen are the number of actors of each pool and their slots, the shape of the learner, how often it publishes and how
old samples may be, up to the config's own bound. Everything that learning depends on stays as it is.
"""

from __future__ import annotations

import json
import math
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import msgspec

from common.process import usable_cpus
from common.staleness import StalenessContract
from launch.config import Config
from launch.errors import ConfigError
from launch.pools import ActorPool, WorkerPool, actor_pools, stage_pools
from launch.resources import gpus_here
from planning.profile import EngineCosts, Profile
from planning.profiling import settings_of, settings_of_engine, shape_of
from planning.simulator import Simulation
from planning.world import EnginePool, World

NUM_SHOWN = 4
SAMPLES = 30_000
"""Samples that a prediction simulates in all: less than a second."""
LEAST_STEPS = 12
NUM_SEEDS = 3
_T = 4.30
"""Student's t, 95 %, of so many."""

Key = str
Keys = Mapping[Key, Any]
"""Keys of a config, dotted, and the values that a plan gives them."""


class Host(NamedTuple):
    """A machine that a run may use."""

    name: str
    pools: frozenset[str]
    cpus: float
    gpus: float
    is_here: bool = False
    """Is it this machine? Ray starts itself here as a host of every pool."""
    cores: float | None = None
    """That processes may use, where they are fewer than Ray counts as CPUs."""

    def takes(self, pool: WorkerPool) -> bool:
        return self.is_here or pool.bundle.keys() <= {"CPU", "GPU", *(f"pool_{name}" for name in self.pools)}


@dataclass(frozen=True)
class Candidate:
    """A plan that was looked at closely."""

    keys: Keys
    prediction: Prediction


# --- hosts --------------------------------------------------------------------------------------------


def host_here() -> Host:
    cpus = float(usable_cpus())
    return Host("this machine", frozenset(), cpus, float(len(gpus_here())), is_here=True, cores=cpus)


def read_hosts(path: Path, cpus: float, gpus: float) -> list[Host]:
    """Return the hosts of a file as `launch/cluster.sh` takes it; ConfigError if it cannot be read, or names none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give a file with a line per host") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; give a file with a line per host") from None
    hosts = []
    for line in lines:
        words = line.partition("#")[0].split()
        if words:
            pools = frozenset(words[1].split(",")) - {"-"} if len(words) > 1 else frozenset()
            hosts.append(Host(words[0], pools, cpus, gpus))
    if not hosts:
        raise ConfigError(f"{path} names no host: a line is HOST [POOL[,POOL...] [ADDRESS]]")
    return hosts


# --- what a config would do ---------------------------------------------------------------------------


def world_of(config: Config, profile: Profile, prices: Mapping[str, float] | None = None) -> World:
    """Return the run of a config, at the costs of a profile; ConfigError if the profile is of other engines or keys."""
    learner, here = profile.learner, settings_of(config)
    for key, value in profile.settings.items():
        if here.get(key) != value:
            raise ConfigError(
                f"the profile was taken with {key} = {value!r}, and the config has {here.get(key)!r}: what it measured "
                "costs another time there. Take one with this config: `leeway profile CONFIG.toml`"
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
        costs=profile.costs(),
        score_token_s=learner.score_token_s_of(shape),
        learner_price=sum(prices.get(pool.name, 0.0) * pool.count for pool in stage_pools(config)),
    )


def engines_like(profile: Profile, pool: ActorPool) -> EngineCosts:
    """Return those of the profile's engines that are of this pool, or of its kind; ConfigError if there are none."""
    here, named, why = settings_of_engine(pool.config), profile.engines.get(pool.name), ""
    for costs in (*([named] if named else []), *profile.engines.values()):
        there = costs.settings
        if not (differs := [key for key, value in there.items() if here.get(key) != value]):
            return costs
        why = why or f"it has one in which {differs[0]} is {there[differs[0]]!r}, and not {here.get(differs[0])!r}"
    raise ConfigError(
        f"the profile has no engine like those of pool '{pool.name}': {why}. Take one with this config: `leeway "
        "profile CONFIG.toml`"
    )


# --- simulated ---------------------------------------------------------------------------------------


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Figures that `leeway plan` predicts of a run; means over the seeds that were simulated."""

    samples_per_s: float
    low: float
    high: float
    """Of samples_per_s, 95 % by the seeds that were simulated; what the profile does not know is not in it."""
    step_s: float
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


def predict(world: World, *, samples: int = SAMPLES) -> Prediction:
    """Simulate a world under several seeds, for this number of samples each."""
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
    """Write a TOML patch with the prediction that it was chosen for; ConfigError if it cannot be written."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in candidate.keys.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    lines = [
        f"# {candidate.prediction.describe()}",
        "# leeway train CONFIG.toml --plan THIS; the command line wins",
        "",
    ]
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items()), ""]
    told = msgspec.to_builtins(candidate.prediction) | {"profile": str(profile.resolve())}
    lines += ["[plan]", *(f"{name} = {json.dumps(value)}" for name, value in told.items() if value is not None), ""]
    try:
        path.write_text("\n".join(lines), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; give another place as --out") from None


def read_plan(path: Path) -> list[str]:
    """Return the keys of a plan as overrides; ConfigError if it is not there, or is not a plan."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        told = tree.pop("plan", None)
        if not isinstance(told, dict):
            raise ValueError("it has no section [plan]")  # noqa: TRY004, TRY301 -- one sentence for all
        msgspec.convert({**told, "profile": None}, Prediction)
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, no TOML, or another TOML
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--plan {path} is not a plan ({why}): give a file that `leeway plan` wrote") from None
    return as_overrides(dict(_flat(tree)))


def _flat(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[Key, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


# --- for people ---------------------------------------------------------------------------------------


def prices_of(words: Sequence[str]) -> dict[str, float]:
    """Return the prices of words POOL=PER_HOUR; ConfigError if one has another form, or is no price."""
    prices = {}
    for word in words:
        pool, equals, text = word.partition("=")
        try:
            prices[pool] = float(text)
        except ValueError:
            prices[pool] = -1.0
        if not equals or not pool or not 0.0 < prices[pool] < math.inf:
            raise ConfigError(f"--price {word}: write POOL=PER_HOUR with a price above 0, as in --price actors=2.5")
    return prices


def show(candidates: Sequence[Candidate], as_it_is: Prediction, own: Keys) -> None:
    """Print the best plan, the next best three and the config as it is, and what each changes of it."""
    from rich.console import Console
    from rich.table import Table

    has_price = as_it_is.price_per_1000 is not None
    heads = ["plan", "samples/s", "binds", "learner busy", "slots used", "lag", "dropped", *["per 1,000"] * has_price]
    table = Table(*heads, box=None, pad_edge=False)
    names = ["best", *(f"{place}." for place in range(2, NUM_SHOWN + 1))]
    different = {each.prediction.samples_per_s: each for each in reversed(candidates)}
    candidates = [each for each in candidates if different[each.prediction.samples_per_s] is each]
    shown = [(name, each.prediction) for name, each in zip(names, candidates, strict=False)]
    for name, prediction in [*shown, ("as it is", as_it_is)]:
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
        changed = [f"{key} {own[key]} -> {value}" for key, value in each.keys.items() if own[key] != value]
        print(f"{name}: {', '.join(changed) or 'as the config says'}")
