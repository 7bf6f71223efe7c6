"""Estimates of the resources of a run before it starts, and the GPUs of this machine.

The GPUs are listed by `nvidia-smi`, because a CUDA context of the launcher would take half a gigabyte on a GPU.

    check_gpus          errors in GPU settings that do not depend on the machine
    missing_resources   GPUs and CPUs that the config reserves and this machine lacks
    stage_need          GPU memory that training needs per stage
    MachineNeeds        memory, disk and shared memory of the whole run
"""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from leeway.actors.config import ON_GPU_BYTES
from leeway.actors.tasks import TaskError
from leeway.actors.tasks.config import FileTask, TaskConfig
from leeway.actors.tasks.sources import files_of
from leeway.common.hf_folder import EMBEDDING_SUFFIX, HEAD, tensors_in
from leeway.common.process import usable_cpus
from leeway.launch.config import Config
from leeway.launch.errors import ConfigError
from leeway.launch.pools import PART_OF_GPU, WorkerPool, actor_pools, serving_dtypes, stage_pools
from leeway.launch.text import GIB, gib
from leeway.learner.checkpoint_files import KEPT_CHECKPOINTS
from leeway.weight_sync.store import KEPT_VERSIONS

if TYPE_CHECKING:  # the module imports torch
    from leeway.learner.device import MemoryNeed

USABLE_SHARE = 0.95
"""Maximum sum of the memory shares of an actor and a stage on one GPU; CUDA contexts and libraries use the rest."""
SPIKE_BYTES = int(1.5 * GIB)
"""Temporary memory of an engine beyond its share while it loads the new weights of a layer."""
BFLOAT16_CAPABILITY = 8.0
MIN_DRIVER = 580
"""Oldest driver for the CUDA 13 wheels, which the pinned torch and vLLM use."""
SMALL_BUDGET = 1024
"""Largest token budget for which `gpu_notes` warns; equal to the default budget, which suits a CPU."""
SMI_LIMIT_S = 10.0


class Gpu(NamedTuple):
    """A GPU of this machine, as reported by its driver."""

    number: int
    uuid: str
    name: str
    driver: str
    total_bytes: int
    used_bytes: int
    capability: float
    """Compute capability, such as 9.0; 0 if an old driver does not report it."""

    def __str__(self) -> str:
        return f"GPU {self.number} ({self.name}, {self.total_bytes / GIB:.0f} GiB)"


def list_gpus(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES allows; an empty list if the driver does not answer."""
    query = "--query-gpu=index,uuid,name,driver_version,memory.total,memory.used"
    found = []
    for row in _query_smi(f"{query},compute_cap") or _query_smi(query):  # an old driver rejects an unknown field
        with suppress(ValueError, IndexError):  # a part of a GPU (MIG) has no values of its own
            number, uuid, name, driver, total, used = int(row[0]), *row[1:4], int(row[4]) * 2**20, int(row[5]) * 2**20
            text = "".join(row[6:])
            capability = float(text) if text.replace(".", "").isdigit() else 0.0
            found.append(Gpu(number, uuid, name, driver, total, used, capability))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    chosen = [each.strip() for each in visible.split(",") if each.strip()]
    return [gpu for gpu in found if any(each == str(gpu.number) or gpu.uuid.startswith(each) for each in chosen)]


def _query_smi(query: str) -> list[list[str]]:
    """Return the rows that nvidia-smi prints; empty if it is missing or fails."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SMI_LIMIT_S, check=True
        )
        return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return []


# --- checks of the config ----------------------------------------------------------------------------


def check_gpus(config: Config) -> None:
    """Raise ConfigError for fractions of a GPU, idle GPUs of a worker, and an invalid `launch.colocate`."""
    engines = [(pool, pool.config.tensor_parallel_size) for pool in actor_pools(config)]
    for pool, most in [*((pool, 1) for pool in stage_pools(config)), *engines]:
        if (gpus := pool.bundle.get("GPU", 0.0)) > most:
            raise ConfigError(
                f"pool '{pool.name}' reserves {gpus:g} GPUs per worker, but a worker uses {most} (a stage uses 1, an "
                "engine actors.tensor_parallel_size): lower gpus, and add workers to use more GPUs"
            )
        if gpus % 1 and not config.launch.colocate:
            raise ConfigError(
                f"pool '{pool.name}' reserves {gpus:g} GPUs per worker: use whole GPUs, or launch.colocate = true for "
                "one actor and one stage on the same GPU"
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
            f"launch.colocate = true is for one actor and one stage on a GPU, but the config has {', '.join(wrong)}: "
            f"set {', '.join(ones)} to 1, and remove [pools]"
        )
    if (share := colocated_share(config)) > USABLE_SHARE + 1e-9:
        raise ConfigError(
            f"actors.gpu_memory_share and learner.gpu_memory_share (unset: {PART_OF_GPU:g}) add up to {share:g} of a "
            f"GPU, but launch.colocate allows at most {USABLE_SHARE:g}: lower one of them"
        )


def colocated_share(config: Config) -> float:
    """Return the share of GPU memory that actor and stage use together with `launch.colocate`; 0 if it is false."""
    if not config.launch.colocate:
        return 0.0
    return round(config.actors.gpu_memory_share + (config.learner.gpu_memory_share or PART_OF_GPU), 6)


def _check_stages(pools: Sequence[WorkerPool]) -> None:
    """Check that either all stages have GPUs or none has."""
    per_stage = {pool.name: pool.bundle.get("GPU", 0.0) for pool in pools}
    without = [name for name, gpus in per_stage.items() if not gpus]
    listed = ", ".join(f"{name} {gpus:g}" for name, gpus in per_stage.items())
    if 0 < len(without) < len(per_stage):
        raise ConfigError(
            f"stages on GPUs and stages on CPUs cannot train together (GPUs per stage, by pool: {listed}): give GPUs "
            "to all learner pools, or to none"
        )


# --- checks of this machine --------------------------------------------------------------------------


def missing_resources(config: Config) -> str:
    """Return an error that names the reserved resources that this machine lacks; "" if none, or on a cluster."""
    if config.launch.ray_address is not None:
        return ""
    import torch

    pools = [*stage_pools(config), *actor_pools(config)]
    for kind, available in (("GPU", torch.cuda.device_count()), ("CPU", usable_cpus())):
        requests = [pool for pool in pools if pool.bundle.get(kind)]
        total, key = sum(pool.count * pool.bundle[kind] for pool in requests), f"{kind.lower()}s"
        if total > available:
            return (
                f"{key} of the workers add up to {total:g} ({'; '.join(pool.describe() for pool in requests)}), but "
                f"this machine has {available}: lower {key} or the number of workers, or join a cluster with "
                "launch.ray_address; leeway doctor lists the hardware of this machine"
            )
    if not any(pool.bundle.get("GPU") for pool in pools):
        return ""
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} (CUDA build: {torch.version.cuda or 'none'}) cannot use the driver's GPUs: the "
            f"CUDA 13 wheels need driver {MIN_DRIVER} or newer; run leeway doctor for details"
        )
    return unfit(config, list_gpus())


def unfit(config: Config, gpus: Sequence[Gpu]) -> str:
    """Return why one of these GPUs cannot run a worker that Ray may place on it; '' if every GPU can."""
    old = [gpu for gpu in gpus if 0 < gpu.capability < BFLOAT16_CAPABILITY]
    if old and (key := _bfloat16_key(config)):
        return (
            f"{key} = 'bfloat16', but {old[0]} has compute capability {old[0].capability:g}, and bfloat16 needs "
            f"{BFLOAT16_CAPABILITY:g} or more: set 'float32' (actors also accept 'float16'), or hide that GPU with "
            "CUDA_VISIBLE_DEVICES"
        )
    for gpu in gpus if config.launch.colocate else ():
        if (left := (1 - colocated_share(config)) * gpu.total_bytes) < SPIKE_BYTES:
            return (
                f"an actor and the learner on {gpu} leave {left / GIB:.1f} GiB free, but an engine needs "
                f"{SPIKE_BYTES / GIB:g} GiB to load new weights: lower the gpu_memory_share of [actors] or [learner]"
            )
    return ""


def _bfloat16_key(config: Config) -> str:
    """Return the first key that requests bfloat16 for workers on GPUs; "" if none does."""
    if config.learner.precision == "bfloat16" and any(pool.bundle.get("GPU") for pool in stage_pools(config)):
        return "learner.precision"
    for pool in actor_pools(config):
        if pool.config.dtype == "bfloat16" and pool.bundle.get("GPU"):
            return f"pools.{pool.name}.dtype" if pool.name in config.pools else "actors.dtype"
    return ""


# --- needs of training -------------------------------------------------------------------------------


def stage_need(config: Config) -> MemoryNeed | None:
    """Return the GPU memory need of the largest stage; None if no stage has a GPU or a model is not downloaded yet."""
    path = config.model.folder
    if not _gpus_of_stages(config) or path is None:
        return None
    frozen = list(config.model.frozen.values()) or [path]
    if not all(map(Path.exists, (path, *frozen))):
        return None
    from transformers import AutoConfig

    from leeway.learner.device import memory_need

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
    """Return an error with fixes if the smallest GPU is too small for a stage; '' if every GPU suffices."""
    limit = config.learner.model_copy(update={"gpus": _gpus_of_stages(config)}).memory_limit or 1.0
    smallest = min(gpus, key=lambda gpu: gpu.total_bytes, default=None)
    if smallest is None or need.size_bytes <= int(limit * smallest.total_bytes):
        return ""
    fixes = ["lower learner.token_budget", "raise learner.num_stages"]
    if config.learner.reference_offload == "none" and config.algorithm.needs.reference:
        fixes.insert(0, "set learner.reference_offload = 'cpu'")
    if not config.learner.activation_checkpointing and config.learner.schedule != "zero_bubble":
        fixes.insert(0, "set learner.activation_checkpointing = true")
    share = f"{limit:g} of " if limit < 1 else ""
    return f"{need.describe()}; {share}{smallest} is too small: {', or '.join(fixes)}"


def describe_gpus(config: Config) -> list[str]:
    """Return the lines of a dry run about GPUs: the need of a stage, and `gpu_notes`."""
    lines = []
    if config.launch.colocate:
        lines.append(
            f"GPU        the actor and the learner share a GPU and use {colocated_share(config):g} of its memory"
        )
    if (need := stage_need(config)) is not None:
        lines.append(f"GPU        {need.describe()}")
    return [*lines, *(f"warning    {note}" for note in gpu_notes(config))]


def gpu_notes(config: Config) -> Iterator[str]:
    """Yield warnings on stages and engines that may not fit the memory of a GPU, and on slow settings of stages."""
    gpus = list_gpus() if config.launch.ray_address is None else []
    if (need := stage_need(config)) is not None and (small := too_small(config, need, gpus)):
        yield small
    num_served = _num_served(_sizes(config.model.folder)) if gpus else 0
    for pool in (each for each in actor_pools(config) if each.config.gpus and num_served):
        smallest = min(gpus, key=lambda gpu: gpu.total_bytes)
        kv_cache_gib = pool.config.kv_cache_gib
        # an engine with a whole GPU and a fixed cache ignores its share
        share = 1.0 if kv_cache_gib is not None and pool.config.gpus >= 1 else pool.config.gpu_memory_share
        weights = _BYTES[pool.config.dtype] * num_served // pool.config.tensor_parallel_size
        needed = weights + ON_GPU_BYTES + int((kv_cache_gib or 0) * GIB)
        if needed >= share * smallest.total_bytes:
            yield (
                f"an engine of pool '{pool.name}' needs {gib(needed)}, but its share is {share:g} of {smallest}: raise "
                "actors.gpu_memory_share or actors.tensor_parallel_size, or lower actors.kv_cache_gib"
            )
    learner = config.learner
    if _gpus_of_stages(config) and learner.precision == "float32":
        yield (
            "learner.precision = 'float32', the default, uses little of a GPU's speed: set 'bfloat16', which is "
            "several times as fast and keeps weights and optimizer in float32"
        )
    if _gpus_of_stages(config) and learner.token_budget <= SMALL_BUDGET:
        yield (
            f"learner.token_budget = {learner.token_budget} is too little work per kernel launch: use 8192, or the "
            "largest budget that fits"
        )


def _gpus_of_stages(config: Config) -> float:
    """Return the smallest GPU reservation of a stage; 0 if stages run on the CPU."""
    return min(pool.bundle.get("GPU", 0.0) for pool in stage_pools(config))


# --- memory, disk and shared memory -----------------------------------------------------------------

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# Measured with the demo on one host (PSS): engine with actor 1.3 GiB, stage 0.4 GiB, other processes 1.0 GiB.
ENGINE_BYTES = int(1.3 * GIB)
"""Host memory of a vLLM engine and its actor on the CPU, without the model; also assumed for a GPU."""
STAGE_BYTES = int(0.5 * GIB)
REST_BYTES = int(1.1 * GIB)
PROMPT_BYTES = 4
"""Bytes of memory per byte of a prompt file, in each process that loads it."""
LARGE_BYTES = GIB // 4
"""The estimate omits prompts that take up to this many bytes of memory."""
TRAINED_BYTES = 16
"""Bytes per trained parameter: float32 weight, gradient and two moments."""
REFERENCE_BYTES = 4
CHECKPOINT_BYTES = 12
"""Bytes per parameter of a checkpoint and of its host copy: weight and two moments."""
HOST_COPIES = 3
"""Number of host copies of the published weights in each dtype: two, and a third one for deltas."""
TOKEN_BYTES = 12
"""Bytes per stored token: id, log-probability, reference log-probability."""
SAMPLE_BYTES = 1536
"""Bytes per stored sample in addition to its tokens, including index entries."""
BROADCAST_BYTES = 160 * 2**20
"""Size of the queue from vLLM to the workers of an engine on several GPUs: ten messages of maximum size."""
ANSWERS_BYTES = 240 * 2**20
NCCL_BYTES = 64 * 2**20
"""Shared memory per rank if its host has several ranks whose GPUs lack peer access."""


class Need(NamedTuple):
    size_bytes: int
    parts: str

    @classmethod
    def of(cls, parts: Mapping[str, int]) -> Need:
        return cls(sum(parts.values()), ", ".join(f"{name} {gib(size)}" for name, size in parts.items()))


@dataclass(frozen=True)
class MachineNeeds:
    """Rough upper estimates of the resources of a run, without activations."""

    disk: Need
    memory: Need
    """Memory on this machine, assuming that it is the only host."""
    staging_bytes: int
    """Space in /dev/shm for weights received over the network."""
    queues_bytes: int = 0
    """Space in /dev/shm for queues between the processes of an engine on several GPUs and between stages on GPUs."""

    @classmethod
    def of(cls, config: Config) -> MachineNeeds | None:
        """Estimate the needs of a run; None if the model is not downloaded yet."""
        if (folder := config.model.folder) is None:
            return None
        shapes = {name: tensor.shape for name, tensor in tensors_in(folder).items()}
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        num_parameters, num_served = sum(sizes.values()), _num_served(sizes)
        learner = config.learner
        num_trained = 2 if config.algorithm.needs.critic == "model" else 1
        served = [_BYTES[dtype] * num_served for dtype in serving_dtypes(config)]
        engines = [(pool, pool.count * pool.config.tensor_parallel_size) for pool in actor_pools(config)]
        vocab_size = max((shape[0] for name, shape in shapes.items() if name.endswith(EMBEDDING_SUFFIX)), default=0)
        on_cpu = sum(
            num * (actors.kv_cache_bytes_on_cpu + actors.batch_bytes(vocab_size) + _BYTES[actors.dtype] * num_served)
            for (pool, num), actors in ((each, each[0].config) for each in engines)
            if not actors.gpus
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
    """Return the number of parameters of each tensor of a model; empty if it is not downloaded."""
    tensors = {} if folder is None else tensors_in(folder)
    return {name: math.prod(tensor.shape) for name, tensor in tensors.items()}


def _num_served(sizes: Mapping[str, int]) -> int:
    """Return the number of parameters; a tied head counts twice, because it is published and two stages hold it."""
    return sum(sizes.values()) + sum(
        size for name, size in sizes.items() if name.endswith(EMBEDDING_SUFFIX) and HEAD not in sizes
    )


def _trains_on_cpu(config: Config) -> bool:
    pools = [pool.gpus for pool in config.pools.values() if pool.role == "learner" and pool.gpus is not None]
    return not max([config.learner.gpus, *pools])


def _frozen_bytes(config: Config, num_served: int) -> int:
    """Return the host memory of all stages for frozen models that score samples, by default the initial model."""
    on_host = _trains_on_cpu(config) or config.learner.reference_offload == "cpu"
    if not config.algorithm.needs.reference or not on_host:
        return 0
    num_frozen = sum([_num_served(_sizes(path)) for path in config.model.frozen.values()] or [num_served])
    return config.learner.num_replicas * REFERENCE_BYTES * num_frozen


def _of_prompts(task: TaskConfig, num_actors: int) -> dict[str, int]:
    """Return the bytes that the launcher and all actors use for a large prompt file; empty for a small one."""
    sources = [task.path, task.heldout_path] if isinstance(task, FileTask) else []
    size_bytes = 0
    for each in filter(None, sources):
        with suppress(TaskError):  # the check of the task reports missing files; the size of a Hub data set is unknown
            size_bytes += PROMPT_BYTES * sum(os.path.getsize(file) for file in files_of(each, "task.path"))
    return {"prompts": (1 + num_actors) * size_bytes} if size_bytes > LARGE_BYTES else {}


def _queues_bytes(config: Config) -> int:
    """Return the maximum size of all queues, assuming that all workers run on this machine."""
    split = [pool for pool in actor_pools(config) if pool.config.tensor_parallel_size > 1]
    queues = sum(pool.count * (BROADCAST_BYTES + pool.config.tensor_parallel_size * ANSWERS_BYTES) for pool in split)
    num_ranks = sum(pool.count for pool in stage_pools(config) if pool.bundle.get("GPU"))
    return queues + (num_ranks * NCCL_BYTES if num_ranks > 1 else 0)


def _buffer_bytes(config: Config) -> int:
    """Return the maximum size of the buffer: all samples of the run at full length, but at most its capacity."""
    learner, buffer = config.learner, config.buffer
    num_samples = learner.num_steps * learner.groups_per_step * config.actors.group_size
    longest = TOKEN_BYTES * config.actors.max_model_tokens + SAMPLE_BYTES
    return min(num_samples * 5 // 4, buffer.capacity_trajectories) * longest
