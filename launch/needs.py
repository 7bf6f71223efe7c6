"""What a run takes of a machine: memory, disk and shared memory, estimated before anything starts."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from actors.tasks.config import FileTask, TaskConfig
from common.hf_folder import EMBEDDING_SUFFIX, HEAD, tensors_in
from common.process import memory_left
from launch.checks import Plan
from launch.config import Config
from launch.host import low_limits
from launch.pools import actor_pools, serving_dtypes, stage_pools
from launch.text import GIB, gib
from learner.checkpoint_files import KEPT_CHECKPOINTS
from weight_sync.store import KEPT_VERSIONS

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
_SURE_SHARE = 0.8
"""Of the predicted memory; the demo took more."""
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
    """Room that a run takes."""

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


def with_limits(plan: Plan) -> Plan:
    """Return the plan, with the first limit of this process that the run would exceed as `lacking`."""
    config, left = plan.config, memory_left()
    if plan.lacking or config.launch.ray_address is not None:
        return plan
    workers = [pool.count for pool in (*stage_pools(config), *actor_pools(config))]
    lacking, needs = low_limits(sum(workers)), MachineNeeds.of(config)
    if not lacking and needs is not None and left < _SURE_SHARE * needs.memory.size_bytes:
        lacking = (
            f"its control group leaves {gib(left)} of memory, and the run takes about {gib(needs.memory.size_bytes)} "
            f"({needs.memory.parts}): raise the group's limit, or lower actors.num_actors or actors.kv_cache_gib"
        )
    return replace(plan, lacking=lacking)


def _sizes(folder: Path) -> dict[str, int]:
    """Return the parameters of each tensor of a model; empty if it is not here."""
    return {name: math.prod(tensor.shape) for name, tensor in tensors_in(folder).items()}


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


def weights_of_engines(config: Config) -> dict[str, int]:
    """Return the bytes on each GPU of an engine, by pool with GPUs, if the model is here."""
    num = _num_served(_sizes(Path(config.model.path))) if config.model.path is not None else 0
    with_gpus = [pool for pool in actor_pools(config) if pool.config.gpus] if num else []
    return {pool.name: _BYTES[pool.config.dtype] * num // pool.config.tensor_parallel_size for pool in with_gpus}
