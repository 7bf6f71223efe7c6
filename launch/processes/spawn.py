"""Starts single processes of a run on Ray, each told exactly what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from actors.spec import ActorSpec
from launch.checks import Plan
from launch.observe.status import actor_name
from launch.pools import ActorPool, serving_dtypes
from launch.processes.placement import Place
from learner.spec import LearnerSpec


def spawn(role: type, log: Path, *arguments: object, place: Place, threads: int, concurrency: int) -> Any:  # noqa: ANN401 -- a Ray handle
    """Start a role in a process of its own.

    Args:
        role: the class, whose first argument is the log.
        log: where the process writes everything it prints.
        arguments: further arguments of the class.
        place: what it reserves, and on which host.
        threads: compute threads; set in the environment, because libraries read it when they load.
        concurrency: how many calls may run at the same time.
    """
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if "GPU" not in place.bundle:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # Ray hides GPUs from those alone that have reserved some
    options = {
        **place.options(),
        "max_concurrency": concurrency,
        "max_restarts": 0,  # the supervisor restarts, because a fresh process must be told the newest state
        "runtime_env": {"env_vars": environment},
    }
    return ray.remote(role).options(**options).remote(log, *arguments)


@dataclass(frozen=True)
class Addresses:
    """Where the services of a run are; they keep their addresses when they are started again."""

    buffer: Sequence[str]
    """tcp://HOST:PORT of the buffer services, shard by shard."""
    weights: str
    """tcp://HOST:PORT of the weight service; empty where there is none."""


def stage_spec(plan: Plan, rank: int, model_path: Path, addresses: Addresses, rendezvous: str) -> LearnerSpec:
    """What the stage of this rank is told."""
    config = plan.config
    reference = config.model.reference_path
    return LearnerSpec(
        rank=rank,
        rendezvous=rendezvous,
        model_path=model_path,
        reference_path=Path(reference) if reference else model_path,
        temperature=config.actors.temperature,
        max_tokens=config.actors.max_model_tokens,
        run_id=plan.run_id,
        seed=config.run.seed,
        buffer_addresses=tuple(addresses.buffer),
        run_folder=plan.folder.root,
        weights_folder=plan.weights_folder,
        weights_address=addresses.weights,
        publish_dtypes=serving_dtypes(config),
        startup_timeout_s=config.launch.startup_timeout_s,
        config=config.learner,
        algorithm=config.algorithm,
        weight_sync=config.weight_sync,
        buffer=config.buffer,
        keys=plan.client_keys,
    )


def actor_spec(
    plan: Plan, pool: ActorPool, number: int, serving_path: Path, model_path: Path, addresses: Addresses
) -> ActorSpec:
    """What the actor of this number is told."""
    config = plan.config
    return ActorSpec(
        name=actor_name(number),
        index=number,
        run_id=plan.run_id,
        seed=config.run.seed,
        serving_model_path=serving_path,
        tokenizer_path=model_path,
        weights_folder=plan.weights_folder,
        weights_address=addresses.weights,
        buffer_addresses=tuple(addresses.buffer),
        pool=pool.name,
        config=pool.config,
        task=config.task,
        weight_sync=plan.weight_sync,
        buffer=config.buffer,
        keys=plan.client_keys,
    )
