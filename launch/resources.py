"""What the workers of a run take of machines, estimated before anything starts, and which GPUs this machine has.

`nvidia-smi` lists the GPUs: the command of a run must not open one, whose context takes half a gigabyte.

    check_gpus     what the config alone says wrong
    lacking_here   what the config reserves, of CPUs too, and this machine lacks
    stage_need     what training takes of a stage's GPU
    MachineNeeds   memory, disk and shared memory of the whole run
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from actors.config import ON_GPU_BYTES
from actors.tasks.config import FileTask, TaskConfig
from common.hf_folder import EMBEDDING_SUFFIX, HEAD, tensors_in
from common.process import usable_cpus
from launch.config import Config
from launch.errors import ConfigError
from launch.pools import PART_OF_GPU, WorkerPool, actor_pools, serving_dtypes, stage_pools
from launch.text import GIB, gib
from learner.checkpoint_files import KEPT_CHECKPOINTS
from weight_sync.store import KEPT_VERSIONS

if TYPE_CHECKING:  # with torch
    from learner.device import MemoryNeed

USABLE_SHARE = 0.95
"""Of a GPU that an actor and the learner share, for both: contexts and libraries are in neither share."""
SPIKE_BYTES = int(1.5 * GIB)
"""What an engine takes for a moment beside its share as a layer's new weights come."""
FIRST_WITH_BFLOAT16 = 8.0
MIN_DRIVER = 580
"""Of the CUDA 13 wheels, which the pinned torch and vLLM are."""
SMALL_BUDGET = 1024
"""Tokens of a micro-batch; the default, which suits a CPU."""
SMI_LIMIT_S = 10.0


class Gpu(NamedTuple):
    """One GPU of this machine, as its driver reports it."""

    number: int
    uuid: str
    name: str
    driver: str
    total_bytes: int
    used_bytes: int
    capability: float
    """Compute capability, as 9.0; 0 if an old driver does not say."""

    def __str__(self) -> str:
        return f"GPU {self.number} ({self.name}, {self.total_bytes / GIB:.0f} GiB)"


def gpus_here(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Return those that CUDA_VISIBLE_DEVICES leaves; none if the driver does not answer."""
    query = "--query-gpu=index,uuid,name,driver_version,memory.total,memory.used"
    found = []
    for row in _ask(f"{query},compute_cap") or _ask(query):  # an old driver refuses all for a field that it has not
        with suppress(ValueError, IndexError):  # a part of a GPU (MIG) has no figures of its own
            number, uuid, name, driver, total, used = int(row[0]), *row[1:4], int(row[4]) * 2**20, int(row[5]) * 2**20
            told = "".join(row[6:])
            capability = float(told) if told.replace(".", "").isdigit() else 0.0
            found.append(Gpu(number, uuid, name, driver, total, used, capability))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    chosen = [each.strip() for each in visible.split(",") if each.strip()]
    return [gpu for gpu in found if any(each == str(gpu.number) or gpu.uuid.startswith(each) for each in chosen)]


def _ask(query: str) -> list[list[str]]:
    """Return the rows of an answer; none without a driver or an answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, query, "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SMI_LIMIT_S, check=True
        )
        return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return []


# --- what the config says ----------------------------------------------------------------------------


def check_gpus(config: Config) -> None:
    """Refuse parts of a GPU, GPUs that a worker leaves idle, and a `launch.colocate` that is no pair: ConfigError."""
    engines = [(pool, pool.config.tensor_parallel_size) for pool in actor_pools(config)]
    for pool, most in [*((pool, 1) for pool in stage_pools(config)), *engines]:
        if (gpus := pool.bundle.get("GPU", 0.0)) > most:
            raise ConfigError(
                f"pool '{pool.name}' reserves {gpus:g} GPUs for each worker, and it computes on {most}: a stage "
                "does on one, an engine on actors.tensor_parallel_size; more GPUs are for more of them"
            )
        if gpus % 1 and not config.launch.colocate:
            raise ConfigError(
                f"pool '{pool.name}' reserves {gpus:g} GPUs for each worker: use whole ones, or launch.colocate = true "
                "for one actor and one stage on the same GPU"
            )
    if config.launch.colocate:
        _check_colocated(config)
    _check_stages(stage_pools(config))


def _check_colocated(config: Config) -> None:
    actors, learner = config.actors, config.learner
    ones = {"actors.num_actors": actors.num_actors, "actors.gpus": actors.gpus, "learner.gpus": learner.gpus}
    ones |= {"learner.num_stages": learner.num_stages, "learner.num_replicas": learner.num_replicas}
    wrong = [f"{key} = {value:g}" for key, value in ones.items() if value != 1]
    wrong += ["[pools]"] * bool(config.pools)
    if wrong:
        raise ConfigError(
            f"launch.colocate = true is for one actor and one stage on a GPU, and the config has {', '.join(wrong)}: "
            f"set {', '.join(ones)} to 1, and leave out [pools]"
        )
    if (share := colocated_share(config)) > USABLE_SHARE + 1e-9:
        raise ConfigError(
            f"actors.gpu_memory_share and learner.gpu_memory_share (unset: {PART_OF_GPU:g}) add up to {share:g} of a "
            f"GPU, of which launch.colocate leaves {USABLE_SHARE:g}: lower one of them"
        )


def colocated_share(config: Config) -> float:
    """Return how much of a GPU's memory the pair of `launch.colocate` takes together; 0 without it."""
    if not config.launch.colocate:
        return 0.0
    return round(config.actors.gpu_memory_share + (config.learner.gpu_memory_share or PART_OF_GPU), 6)


def _check_stages(pools: Sequence[WorkerPool]) -> None:
    """All of them have GPUs, or none has."""
    per_stage = {pool.name: pool.bundle.get("GPU", 0.0) for pool in pools}
    without = [name for name, gpus in per_stage.items() if not gpus]
    said = ", ".join(f"{name} {gpus:g}" for name, gpus in per_stage.items())
    if 0 < len(without) < len(per_stage):
        raise ConfigError(
            f"GPUs of a stage, by pool: {said}: stages on GPUs and stages on CPUs do not train together; give each "
            "pool of the learner GPUs, or none"
        )


# --- what this machine has ---------------------------------------------------------------------------


def lacking_here(config: Config) -> str:
    """Return what the workers reserve and this machine has not, if Ray starts here and no host joins it."""
    if config.launch.ray_address is not None:
        return ""
    import torch

    pools = [*stage_pools(config), *actor_pools(config)]
    for kind, there in (("GPU", torch.cuda.device_count()), ("CPU", usable_cpus())):
        asking = [pool for pool in pools if pool.bundle.get(kind)]
        wanted, key = sum(pool.count * pool.bundle[kind] for pool in asking), f"{kind.lower()}s"
        if wanted > there:
            return (
                f"{key} of the workers add up to {wanted:g} ({'; '.join(pool.describe() for pool in asking)}), and "
                f"this machine has {there}: lower {key} or the number of workers, or join a cluster with "
                "launch.ray_address; leeway doctor says what is seen here"
            )
    if not any(pool.bundle.get("GPU") for pool in pools):
        return ""
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} (built for CUDA {torch.version.cuda or 'not at all'}) cannot use the GPUs that "
            f"the driver shows: the CUDA 13 wheels need a driver of {MIN_DRIVER} or newer; leeway doctor says more"
        )
    return unfit(config, gpus_here())


def unfit(config: Config, gpus: Sequence[Gpu]) -> str:
    """Return why one of these GPUs cannot serve a worker that may get it; '' if all can."""
    old = [gpu for gpu in gpus if 0 < gpu.capability < FIRST_WITH_BFLOAT16]
    if old and (key := _asks_for_bfloat16(config)):
        return (
            f"{key} = 'bfloat16', and {old[0]}, compute capability {old[0].capability:g}, has no bfloat16, which "
            f"begins at {FIRST_WITH_BFLOAT16:g}: use 'float32' (actors also take 'float16'), or hide that GPU "
            "with CUDA_VISIBLE_DEVICES"
        )
    for gpu in gpus if config.launch.colocate else ():
        if (left := (1 - colocated_share(config)) * gpu.total_bytes) < SPIKE_BYTES:
            return (
                f"an actor and the learner on {gpu} would leave {left / GIB:.1f} GiB of it free, and an engine needs "
                f"{SPIKE_BYTES / GIB:g} GiB to take new weights: lower the gpu_memory_share of [actors] or [learner]"
            )
    return ""


def _asks_for_bfloat16(config: Config) -> str:
    """Return the first key that does, of workers with GPUs."""
    if config.learner.precision == "bfloat16" and any(pool.bundle.get("GPU") for pool in stage_pools(config)):
        return "learner.precision"
    for pool in actor_pools(config):
        if pool.config.dtype == "bfloat16" and pool.bundle.get("GPU"):
            return f"pools.{pool.name}.dtype" if pool.name in config.pools else "actors.dtype"
    return ""


# --- what training takes -----------------------------------------------------------------------------


def stage_need(config: Config) -> MemoryNeed | None:
    """Return the need of the stage that needs most; None if no stage has a GPU, or no model is here yet."""
    path = config.model.folder
    if not _gpus_of_stages(config) or path is None:
        return None
    frozen = list(config.model.frozen.values()) or [path]
    if not all(map(Path.exists, (path, *frozen))):
        return None
    from transformers import AutoConfig

    from learner.device import memory_need

    learner, needs = config.learner, config.algorithm.needs
    model, *references = (AutoConfig.from_pretrained(each, local_files_only=True) for each in (path, *frozen))
    samples = learner.groups_per_step * config.actors.group_size
    draw_tokens = samples * config.actors.max_model_tokens
    return memory_need(
        model,
        learner,
        update_tokens=draw_tokens // learner.num_minibatches,
        scored_tokens=draw_tokens if needs.reference or needs.proximal or needs.critic else 0,
        references=references if needs.reference else (),
        num_models=2 if needs.critic == "model" else 1,
    )


def too_small(config: Config, need: MemoryNeed, gpus: Sequence[Gpu]) -> str:
    """Return which GPU that a stage may get is too small, and what would help; '' if none is."""
    limit = config.learner.model_copy(update={"gpus": _gpus_of_stages(config)}).memory_limit or 1.0
    smallest = min(gpus, key=lambda gpu: gpu.total_bytes, default=None)
    if smallest is None or need.size_bytes <= int(limit * smallest.total_bytes):
        return ""
    remedies = ["lower learner.token_budget", "more learner.num_stages"]
    if config.learner.reference_offload == "none" and config.algorithm.needs.reference:
        remedies.insert(0, "learner.reference_offload = 'cpu'")
    if not config.learner.activation_checkpointing and config.learner.schedule != "zero_bubble":
        remedies.insert(0, "learner.activation_checkpointing = true")
    share = f"{limit:g} of " if limit < 1 else ""
    return f"{need.describe()}; {share}{smallest} does not hold it: {'; or '.join(remedies)}"


def describe_gpus(config: Config) -> list[str]:
    """Return the lines of a dry run about GPUs: what a stage takes, and `gpu_notes`."""
    lines = []
    if config.launch.colocate:
        lines.append(
            f"GPU        the actor and the learner share one and take {colocated_share(config):g} of its memory"
        )
    if (need := stage_need(config)) is not None:
        lines.append(f"GPU        {need.describe()}")
    return [*lines, *(f"warning    {note}" for note in gpu_notes(config))]


def gpu_notes(config: Config) -> Iterator[str]:
    """Yield a sentence for each stage or engine that a GPU of this machine may not hold, and what makes stages slow."""
    gpus = gpus_here() if config.launch.ray_address is None else []
    if (need := stage_need(config)) is not None and (small := too_small(config, need, gpus)):
        yield small
    num_served = _num_served(_sizes(config.model.folder)) if gpus else 0
    for pool in (each for each in actor_pools(config) if each.config.gpus and num_served):
        smallest = min(gpus, key=lambda gpu: gpu.total_bytes)
        kv_cache_gib = pool.config.kv_cache_gib
        # an engine that has a GPU alone and a fixed cache ignores its share
        share = 1.0 if kv_cache_gib is not None and pool.config.gpus >= 1 else pool.config.gpu_memory_share
        weights = _BYTES[pool.config.dtype] * num_served // pool.config.tensor_parallel_size
        needed = weights + ON_GPU_BYTES + int((kv_cache_gib or 0) * GIB)
        if needed >= share * smallest.total_bytes:
            yield (
                f"an engine of pool '{pool.name}' takes {gib(needed)}, and its share is {share:g} of {smallest}: raise "
                "actors.gpu_memory_share or actors.tensor_parallel_size, or lower actors.kv_cache_gib"
            )
    learner = config.learner
    if _gpus_of_stages(config) and learner.precision == "float32":
        yield (
            "learner.precision = 'float32', the default, leaves most of a GPU's speed unused: 'bfloat16' is several "
            "times as fast, and keeps weights and optimizer in float32"
        )
    if _gpus_of_stages(config) and learner.token_budget <= SMALL_BUDGET:
        yield (
            f"learner.token_budget = {learner.token_budget} gives a GPU less work at a time than it takes to start it: "
            "use 8192, or what fits"
        )


def _gpus_of_stages(config: Config) -> float:
    """What a stage reserves, at least; 0 if it computes on the CPU."""
    return min(pool.bundle.get("GPU", 0.0) for pool in stage_pools(config))


# --- memory, disk and shared memory -----------------------------------------------------------------

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# Measured with the demo (PSS): engine with actor 1.3 GiB, stage 0.4 GiB, the rest 1.0 GiB on one host.
ENGINE_BYTES = int(1.3 * GIB)
"""A vLLM engine and its actor without a model, on CPU; taken for one on a GPU as well."""
STAGE_BYTES = int(0.5 * GIB)
REST_BYTES = int(1.1 * GIB)
PROMPT_BYTES = 4
"""Per byte of a file of prompts, in each process that loads it."""
LARGE_BYTES = GIB // 4
"""Prompts below it are not mentioned."""
TRAINED_BYTES = 16
"""Per parameter: float32 weight, gradient and two moments."""
REFERENCE_BYTES = 4
CHECKPOINT_BYTES = 12
"""Per parameter: weight and two moments, in a checkpoint and in its host copy."""
HOST_COPIES = 3
"""Of the published weights, in each dtype: two, and a third for deltas."""
TOKEN_BYTES = 12
"""Of a stored token: id, log-probability, reference log-probability."""
SAMPLE_BYTES = 1536
"""Of a stored sample besides, with its place in the indexes."""
BROADCAST_BYTES = 160 * 2**20
"""What vLLM sends to the workers of an engine of several GPUs: ten messages of its largest."""
ANSWERS_BYTES = 240 * 2**20
NCCL_BYTES = 64 * 2**20
"""Of a rank among others on its host, if GPUs do not reach each other directly."""


class Need(NamedTuple):
    size_bytes: int
    parts: str

    @classmethod
    def of(cls, parts: Mapping[str, int]) -> Need:
        return cls(sum(parts.values()), ", ".join(f"{name} {gib(size)}" for name, size in parts.items()))


@dataclass(frozen=True)
class MachineNeeds:
    """Rough figures, on the safe side, but without activations."""

    disk: Need
    memory: Need
    """On this machine, if it is the only one."""
    staging_bytes: int
    """In /dev/shm, for weights that came over the network."""
    queues_bytes: int = 0
    """In /dev/shm, between the processes of an engine of several GPUs, and between stages on GPUs."""

    @classmethod
    def of(cls, config: Config) -> MachineNeeds | None:
        """None if the model is not here yet."""
        sizes = _sizes(config.model.folder)
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
        per_parameter = num_trained * (CHECKPOINT_BYTES + TRAINED_BYTES * _trains_on_cpu(config))
        stages = (
            num_stages * STAGE_BYTES + HOST_COPIES * sum(served) + learner.num_replicas * per_parameter * num_served
        )
        stages += _frozen_bytes(config, num_served)
        disk = {
            "buffer": _buffer_bytes(config),
            "checkpoints": (KEPT_CHECKPOINTS + 1) * CHECKPOINT_BYTES * num_trained * num_parameters,
            "weights": (KEPT_VERSIONS + 1) * sum(served) + 4 * num_parameters,
        }
        memory = {
            f"{sum(pool.count for pool, _ in engines)} engines": on_cpu + ENGINE_BYTES * sum(num for _, num in engines),
            f"{num_stages} stages": stages,
            **_of_prompts(config.task, sum(pool.count for pool, _ in engines)),
            "the rest": REST_BYTES,
        }
        staging_bytes = 0 if config.weight_sync.transport == "folder" else 3 * max(served, default=0)
        return cls(Need.of(disk), Need.of(memory), staging_bytes, _queues_bytes(config))


def _sizes(folder: Path | None) -> dict[str, int]:
    """Return the parameters of each tensor of a model; empty if it is not here."""
    tensors = {} if folder is None else tensors_in(folder)
    return {name: math.prod(tensor.shape) for name, tensor in tensors.items()}


def _num_served(sizes: Mapping[str, int]) -> int:
    """Return the parameters, counting a tied head: it is served, and held by the first and the last stage."""
    return sum(sizes.values()) + sum(
        size for name, size in sizes.items() if name.endswith(EMBEDDING_SUFFIX) and HEAD not in sizes
    )


def _trains_on_cpu(config: Config) -> bool:
    pools = [pool.gpus for pool in config.pools.values() if pool.role == "learner" and pool.gpus is not None]
    return not max([config.learner.gpus, *pools])


def _frozen_bytes(config: Config, num_served: int) -> int:
    """Return the host memory of all stages for the models that score; without any of its own it is the model."""
    on_host = _trains_on_cpu(config) or config.learner.reference_offload == "cpu"
    if not config.algorithm.needs.reference or not on_host:
        return 0
    num_frozen = sum([_num_served(_sizes(path)) for path in config.model.frozen.values()] or [num_served])
    return config.learner.num_replicas * REFERENCE_BYTES * num_frozen


def _of_prompts(task: TaskConfig, num_actors: int) -> dict[str, int]:
    """Return the bytes that this command and all actors hold of a large file of prompts."""
    files = [task.path, task.heldout_path] if isinstance(task, FileTask) else []
    size_bytes = PROMPT_BYTES * sum(os.path.getsize(file) for file in files if file and os.path.exists(file))
    return {"prompts": (1 + num_actors) * size_bytes} if size_bytes > LARGE_BYTES else {}


def _queues_bytes(config: Config) -> int:
    """At most, with all of them on this machine."""
    split = [pool for pool in actor_pools(config) if pool.config.tensor_parallel_size > 1]
    queues = sum(pool.count * (BROADCAST_BYTES + pool.config.tensor_parallel_size * ANSWERS_BYTES) for pool in split)
    num_ranks = sum(pool.count for pool in stage_pools(config) if pool.bundle.get("GPU"))
    return queues + (num_ranks * NCCL_BYTES if num_ranks > 1 else 0)


def _buffer_bytes(config: Config) -> int:
    """At most: all samples of the run at full length, or the buffer's capacity."""
    learner, buffer = config.learner, config.buffer
    num_samples = learner.num_steps * learner.groups_per_step * config.actors.group_size
    longest = TOKEN_BYTES * config.actors.max_model_tokens + SAMPLE_BYTES
    return min(num_samples * 5 // 4, buffer.capacity_trajectories) * longest
