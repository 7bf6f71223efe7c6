"""MachineNeeds: what a run of a config takes of a machine, as far as it can be told before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from common.hf_folder import EMBEDDING_SUFFIX, HEAD, tensors_in
from launch.config import Config
from launch.pools import actor_pools, serving_dtypes

GIB = 2**30
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# Measured with the demo (PSS): engine with actor 1.3 GiB, stage 0.4 GiB, the rest 1.0 GiB on one host.
ENGINE_BYTES = int(1.3 * GIB)
"""A vLLM engine and its actor without a model, on CPU."""
STAGE_BYTES = int(0.5 * GIB)
"""A stage without a model: torch and Transformers loaded."""
REST_BYTES = int(1.1 * GIB)
"""Ray, the services and the command."""
TRAINED_BYTES = 16
"""Per parameter: float32 weight, gradient and two moments."""
REFERENCE_BYTES = 4
"""Per parameter of the frozen reference."""
CHECKPOINT_BYTES = 12
"""Per parameter: weight and two moments, in a checkpoint and in the host copy that it is written from."""
HOST_COPIES = 3
"""Of the weights that are published, in each dtype: two, and a third where deltas are made."""
TOKEN_BYTES = 12
"""Of a stored token: id, log-probability, reference log-probability."""
SAMPLE_BYTES = 1536
"""Of a stored sample besides, with its place in the indexes."""


@dataclass(frozen=True)
class MachineNeeds:
    """Rough figures, on the safe side, but that activations are not in them."""

    disk_bytes: int
    disk_parts: str
    memory_bytes: int
    """On this machine, where it is the only one."""
    memory_parts: str
    staging_bytes: int
    """In /dev/shm, for weights that came over the network."""

    @classmethod
    def of(cls, config: Config) -> MachineNeeds | None:
        """None where the model is not here yet, so that its size is not known."""
        sizes = _sizes(Path(config.model.path)) if config.model.path is not None else {}
        if not sizes:
            return None
        num_parameters = sum(sizes.values())
        num_served = num_parameters + _tied(sizes)
        learner, pools = config.learner, actor_pools(config)
        buffer = _buffer_bytes(config)
        num_trained = 2 if config.algorithm.needs.critic == "model" else 1
        checkpoints = (learner.keep_checkpoints + 1) * CHECKPOINT_BYTES * num_trained * num_parameters
        served = [_BYTES[dtype] * num_served for dtype in serving_dtypes(config)]
        versions = (config.weight_sync.keep_versions + 1) * sum(served) + 4 * num_parameters
        on_cpu = [pool for pool in pools if not pool.config.gpus]
        engines = sum(
            pool.count * (ENGINE_BYTES + int(pool.config.kv_cache_gib * GIB) + _BYTES[pool.config.dtype] * num_served)
            for pool in on_cpu
        )
        num_engines = sum(pool.count for pool in on_cpu)
        num_stages = learner.num_stages * learner.num_replicas
        # the first and the last stage each have a tied embedding
        stages = num_stages * STAGE_BYTES + HOST_COPIES * sum(served) + _in_stages(config, num_trained) * num_served
        return cls(
            disk_bytes=buffer + checkpoints + versions,
            disk_parts=f"buffer {_gib(buffer)}, checkpoints {_gib(checkpoints)}, weights {_gib(versions)}",
            memory_bytes=engines + stages + REST_BYTES,
            memory_parts=f"{num_engines} engines {_gib(engines)}, {num_stages} stages {_gib(stages)}, the rest "
            f"{_gib(REST_BYTES)}",
            staging_bytes=0 if config.weight_sync.transport == "folder" else 3 * max(served, default=0),
        )


def parameters_in(model_path: Path) -> int:
    """Numbers in the safetensors files of a folder, read from their headers; 0 where there are none."""
    return sum(_sizes(model_path).values())


def _sizes(model_path: Path) -> dict[str, int]:
    """Numbers in each tensor of a folder."""
    return {name: prod(tensor.shape) for name, tensor in tensors_in(model_path).items()}


def _tied(sizes: Mapping[str, int]) -> int:
    """Numbers in the embedding that is the head as well; 0 where the head is a tensor of its own."""
    if HEAD in sizes:
        return 0
    return sum(size for name, size in sizes.items() if name.endswith(EMBEDDING_SUFFIX))


def _in_stages(config: Config, num_trained: int) -> int:
    """Bytes of host memory per parameter that all stages hold together, without what they publish."""
    learner = config.learner
    pools = [pool.gpus for pool in config.pools.values() if pool.role == "learner" and pool.gpus is not None]
    on_cpu = learner.device == "cpu" or (learner.device == "auto" and not max([learner.gpus, *pools]))
    kept = num_trained * CHECKPOINT_BYTES
    if on_cpu:
        kept += num_trained * TRAINED_BYTES
    keeps_reference = learner.reference_offload == "cpu" or (on_cpu and learner.reference_offload == "none")
    if config.algorithm.needs.reference and keeps_reference:
        kept += REFERENCE_BYTES
    return learner.num_replicas * kept


def _buffer_bytes(config: Config) -> int:
    """At most: all samples of the run, as long as they may be, or what the buffer may hold."""
    learner, buffer = config.learner, config.buffer
    num_samples = learner.num_steps * learner.groups_per_step * config.actors.group_size
    longest = TOKEN_BYTES * config.actors.max_model_tokens + SAMPLE_BYTES
    most = min(num_samples * 5 // 4, buffer.capacity_trajectories) * longest
    return min(most, int(buffer.capacity_gib * GIB)) if buffer.capacity_gib else most


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
