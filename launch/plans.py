"""Plans: what of a config may be chosen, what a run takes of a machine, and what it would do by a profile.

Chosen are the number of actors of each pool and their slots, the shape of the learner, how often it publishes and how
old samples may be, up to the config's own bound. Everything that learning depends on stays as it is.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from actors.tasks.config import FileTask, TaskConfig
from common.hf_folder import EMBEDDING_SUFFIX, HEAD, tensors_in
from common.process import memory_left, usable_cpus
from common.staleness import StalenessContract
from launch.checks import Plan
from launch.config import Config
from launch.errors import ConfigError
from launch.gpus import gpus_here
from launch.host import low_limits
from launch.pools import ActorPool, WorkerPool, actor_pools, scorer_pools, serving_dtypes, stage_pools
from launch.profiling import settings_of, settings_of_engine, shape_of
from launch.text import GIB, gib
from planning.prediction import Prediction
from planning.profile import EngineCosts, Profile
from planning.world import EnginePool, World

NUM_SHOWN = 4
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# Measured with the demo (PSS): engine with actor 1.3 GiB, stage 0.4 GiB, the rest 1.0 GiB on one host.
ENGINE_BYTES = int(1.3 * GIB)
"""A vLLM engine and its actor without a model, on CPU; taken for one on a GPU as well."""
STAGE_BYTES = int(0.5 * GIB)
"""A stage without a model: torch and Transformers loaded."""
REST_BYTES = int(1.1 * GIB)
PROMPT_BYTES = 4
"""Per byte of a file of prompts, in each process that loads it: as if a token were a character."""
LARGE_BYTES = GIB // 4
"""Of prompts in a process; fewer are not worth a mention."""
_SURE_SHARE = 0.8
"""Of the memory that is foretold; the demo took more."""
TRAINED_BYTES = 16
"""Per parameter: float32 weight, gradient and two moments."""
REFERENCE_BYTES = 4
CHECKPOINT_BYTES = 12
"""Per parameter: weight and two moments, in a checkpoint and in the host copy that it is written from."""
HOST_COPIES = 3
"""Of the weights that are published, in each dtype: two, and a third where deltas are made."""
TOKEN_BYTES = 12
"""Of a stored token: id, log-probability, reference log-probability."""
SAMPLE_BYTES = 1536
"""Of a stored sample besides, with its place in the indexes."""
BROADCAST_BYTES = 160 * 2**20
"""What vLLM sends to the workers of an engine of several GPUs: ten messages of its largest."""
ANSWERS_BYTES = 240 * 2**20
NCCL_BYTES = 64 * 2**20
"""Of a rank among others on its host, where GPUs do not reach each other directly."""

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
        """May workers of the pool be on it?"""
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
    """The hosts of a file as `launch/cluster.sh` takes it, each with so many CPUs and GPUs.

    Raises:
        ConfigError: it cannot be read, or names no host.
    """
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


# --- what a run takes of a machine ---------------------------------------------------------------------


class Need(NamedTuple):
    """Room that a run takes."""

    size_bytes: int
    parts: str
    """What it is made of, in words."""

    @classmethod
    def of(cls, parts: Mapping[str, int]) -> Need:
        """Bytes of each part, by its name."""
        return cls(sum(parts.values()), ", ".join(f"{name} {gib(size)}" for name, size in parts.items()))


@dataclass(frozen=True)
class MachineNeeds:
    """Rough figures, on the safe side, but that activations are not in them."""

    disk: Need
    memory: Need
    """On this machine, where it is the only one."""
    staging_bytes: int
    """In /dev/shm, for weights that came over the network."""
    queues_bytes: int = 0
    """In /dev/shm, between the processes of an engine of several GPUs, and between stages on GPUs; nowhere else."""

    @classmethod
    def of(cls, config: Config) -> MachineNeeds | None:
        """None where the model is not here yet, so that its size is not known."""
        sizes = _sizes(Path(config.model.path)) if config.model.path is not None else {}
        if not sizes:
            return None
        num_parameters, num_served = sum(sizes.values()), _num_served(sizes)
        learner = config.learner
        num_trained = 2 if config.algorithm.needs.critic == "model" else 1
        served = [_BYTES[dtype] * num_served for dtype in serving_dtypes(config)]
        engines = [(pool, pool.count * pool.config.tensor_parallel_size) for pool in actor_pools(config)]
        on_cpu = sum(
            num * (pool.config.kv_cache_bytes_on_cpu + _BYTES[pool.config.dtype] * num_served)
            for pool, num in engines
            if not pool.config.gpus
        )
        num_stages = learner.num_stages * learner.num_replicas
        stages = num_stages * STAGE_BYTES + HOST_COPIES * sum(served) + _in_stages(config, num_trained) * num_served
        stages += _frozen_bytes(config, num_served)
        disk = {
            "buffer": _buffer_bytes(config),
            "checkpoints": (learner.keep_checkpoints + 1) * CHECKPOINT_BYTES * num_trained * num_parameters,
            "weights": (config.weight_sync.keep_versions + 1) * sum(served) + 4 * num_parameters,
        }
        memory = {
            f"{sum(pool.count for pool, _ in engines)} engines": on_cpu + ENGINE_BYTES * sum(num for _, num in engines),
            f"{num_stages} stages": stages,
            **_of_scorers(config, num_served),
            **_of_prompts(config.task, sum(pool.count for pool, _ in engines)),
            "the rest": REST_BYTES,
        }
        staging_bytes = 0 if config.weight_sync.transport == "folder" else 3 * max(served, default=0)
        return cls(Need.of(disk), Need.of(memory), staging_bytes, _queues_bytes(config))


def with_limits(plan: Plan) -> Plan:
    """Return the plan, with the limit of this process that the run would exceed at its start, if any, as `lacking`."""
    config, left = plan.config, memory_left()
    if plan.lacking or config.launch.ray_address is not None:
        return plan
    workers = [pool.count for pool in (*stage_pools(config), *scorer_pools(config), *actor_pools(config))]
    lacking, needs = low_limits(sum(workers)), MachineNeeds.of(config)
    if not lacking and needs is not None and left < _SURE_SHARE * needs.memory.size_bytes:
        lacking = (
            f"its control group leaves {gib(left)} of memory, and the run takes about {gib(needs.memory.size_bytes)} "
            f"({needs.memory.parts}): raise the group's limit, or lower actors.num_actors or actors.kv_cache_gib"
        )
    return replace(plan, lacking=lacking)


def _sizes(folder: Path) -> dict[str, int]:
    """Parameters of each tensor of a model; empty where it is not here."""
    return {name: math.prod(tensor.shape) for name, tensor in tensors_in(folder).items()}


def _num_served(sizes: Mapping[str, int]) -> int:
    """Parameters, with a head that is the embedding: it is served, and held by the first and the last stage, apart."""
    return sum(sizes.values()) + sum(
        size for name, size in sizes.items() if name.endswith(EMBEDDING_SUFFIX) and HEAD not in sizes
    )


def _in_stages(config: Config, num_trained: int) -> int:
    """Bytes of host memory per parameter that all stages hold together, without what they publish."""
    return config.learner.num_replicas * num_trained * (CHECKPOINT_BYTES + TRAINED_BYTES * _trains_on_cpu(config))


def _trains_on_cpu(config: Config) -> bool:
    learner = config.learner
    pools = [pool.gpus for pool in config.pools.values() if pool.role == "learner" and pool.gpus is not None]
    return learner.device == "cpu" or (learner.device == "auto" and not max([learner.gpus, *pools]))


def _frozen_bytes(config: Config, num_served: int) -> int:
    """Host memory that all stages hold together of the models that score; without any of its own it is the model."""
    kept_in = ("cpu", "none") if _trains_on_cpu(config) else ("cpu",)
    if not config.algorithm.needs.reference or config.learner.reference_offload not in kept_in:
        return 0
    return config.learner.num_replicas * REFERENCE_BYTES * _num_frozen(config, num_served)


def _num_frozen(config: Config, num_served: int) -> int:
    return sum([_num_served(_sizes(path)) for path in config.model.frozen.values()] or [num_served])


def _of_scorers(config: Config, num_served: int) -> dict[str, int]:
    """Bytes of host memory that scorers hold, where there are some: each has the whole of what scores."""
    if not (pools := scorer_pools(config)):
        return {}
    on_cpu = REFERENCE_BYTES * _num_frozen(config, num_served)
    held = sum(pool.count * (STAGE_BYTES + (0 if pool.bundle.get("GPU") else on_cpu)) for pool in pools)
    return {f"{sum(pool.count for pool in pools)} scorers": held}


def _of_prompts(task: TaskConfig, num_actors: int) -> dict[str, int]:
    """Return the bytes that this command and all actors hold of a large file of prompts; nothing for a small one."""
    files = [task.path, task.heldout_path] if isinstance(task, FileTask) else []
    size_bytes = PROMPT_BYTES * sum(os.path.getsize(file) for file in files if file and os.path.exists(file))
    return {"prompts": (1 + num_actors) * size_bytes} if size_bytes > LARGE_BYTES else {}


def _queues_bytes(config: Config) -> int:
    """At most, where all of them are on this machine."""
    split = [pool for pool in actor_pools(config) if pool.config.tensor_parallel_size > 1]
    queues = sum(pool.count * (BROADCAST_BYTES + pool.config.tensor_parallel_size * ANSWERS_BYTES) for pool in split)
    num_ranks = sum(pool.count for pool in stage_pools(config) if pool.bundle.get("GPU"))
    return queues + (num_ranks * NCCL_BYTES if num_ranks > 1 else 0)


def _buffer_bytes(config: Config) -> int:
    """At most: all samples of the run, as long as they may be, or what the buffer may hold."""
    learner, buffer = config.learner, config.buffer
    num_samples = learner.num_steps * learner.groups_per_step * config.actors.group_size
    longest = TOKEN_BYTES * config.actors.max_model_tokens + SAMPLE_BYTES
    most = min(num_samples * 5 // 4, buffer.capacity_trajectories) * longest
    return min(most, int(buffer.capacity_gib * GIB)) if buffer.capacity_gib else most


def weights_of_engines(config: Config) -> dict[str, int]:
    """Bytes on each GPU of an engine, by pool; of pools with GPUs, where the model is here."""
    num = _num_served(_sizes(Path(config.model.path))) if config.model.path is not None else 0
    with_gpus = [pool for pool in actor_pools(config) if pool.config.gpus] if num else []
    return {pool.name: _BYTES[pool.config.dtype] * num // pool.config.tensor_parallel_size for pool in with_gpus}


# --- what a config would do ---------------------------------------------------------------------------


def world_of(config: Config, profile: Profile, prices: Mapping[str, float] | None = None) -> World:
    """The run of a config, at the costs of a profile.

    Raises:
        ConfigError: the profile has no engines like those of a pool, or is of another learner.
    """
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
    pools, scorers = [], scorer_pools(config)
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
        scores=None if scorers else learner.scores(shape, ahead=config.learner.score_while_waiting),
        learner_price=sum(prices.get(pool.name, 0.0) * pool.count for pool in [*stage_pools(config), *scorers]),
    )


def engines_like(profile: Profile, pool: ActorPool) -> EngineCosts:
    """Of the profile's engines those of this pool, or else of its kind.

    Raises:
        ConfigError: there are none.
    """
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


# --- the patch ----------------------------------------------------------------------------------------


def as_overrides(keys: Keys) -> list[str]:
    """Keys as the command line gives them."""
    return [word for key, value in keys.items() for word in (f"--{key}", json.dumps(value))]


def write_plan(path: Path, candidate: Candidate, profile: Path) -> None:
    """A TOML patch, with the prediction that it was chosen for.

    Raises:
        ConfigError: it cannot be written.
    """
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


def read_plan(path: Path) -> tuple[list[str], Prediction]:
    """The keys of a plan as overrides, and what was predicted of it.

    Raises:
        ConfigError: it is not there, or is not a plan.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        told = tree.pop("plan", None)
        if not isinstance(told, dict):
            raise ValueError("it has no section [plan]")  # noqa: TRY004, TRY301 -- one sentence for all
        prediction = msgspec.convert({**told, "profile": None}, Prediction)
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, no TOML, or another TOML
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--plan {path} is not a plan ({why}): give a file that `leeway plan` wrote") from None
    return as_overrides(dict(_flat(tree))), prediction


def _flat(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[Key, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


# --- for people ---------------------------------------------------------------------------------------


def prices_of(words: Sequence[str]) -> dict[str, float]:
    """POOL=PER_HOUR, each.

    Raises:
        ConfigError: one has another form, or is no price.
    """
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
