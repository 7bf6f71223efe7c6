"""Starts Ray and single processes on it, each told exactly what it needs."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import ray

from actors.spec import ActorSpec
from launch.checks import Plan
from launch.config import Config
from launch.role_process import RunFailed
from learner.spec import LearnerSpec

OBJECT_STORE_BYTES = 80 * 2**20
"""Only control passes through Ray, so its object store stays near the smallest that it accepts."""


RAY_GOODBYE_S = 3.0
"""How long Ray's own processes may take to end after it was shut down."""


def start_ray(config: Config, namespace: str) -> None:
    """Start Ray here, or join the cluster at launch.ray_address.

    Raises:
        RunFailed: the roles reserve more CPUs or GPUs than there are.
    """
    address = config.launch.ray_address
    local: dict[str, Any] = {}
    if address is None:
        local = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "num_cpus": os.cpu_count()}
    try:
        ray.init(
            address=address or "local",  # unset, Ray would look for a cluster in the environment
            namespace=namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            **local,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"no Ray cluster answers at launch.ray_address = '{address}'" if address else "Ray does not start here"
        raise RunFailed(f"{where}: {str(error).splitlines()[0]}") from error
    have = ray.cluster_resources()
    for kind in ("cpus", "gpus"):
        needed = config.actors.num_actors * getattr(config.actors, kind)
        needed += config.learner.num_replicas * config.learner.num_stages * getattr(config.learner, kind)
        available = have.get(kind[:-1].upper(), 0.0)
        if needed > available:
            raise RunFailed(
                f"the roles reserve {needed:g} {kind[:-1].upper()}s and Ray has {available:g}; lower actors.{kind} or "
                f"learner.{kind} (a reservation, not a limit), or start fewer actors, stages or replicas"
            )


def end_ray() -> None:
    """End what `start_ray` started here, and whichever of Ray's own processes outlives that.

    Stopped in the middle of its start, Ray leaves agents behind that go on for a minute or two.
    """
    family = [child for child in psutil.Process().children(recursive=True) if _is_of_ray(child)]
    ray.shutdown()
    _, alive = psutil.wait_procs(family, timeout=RAY_GOODBYE_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _is_of_ray(process: psutil.Process) -> bool:
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    return bool(command) and (command[0].startswith("ray::") or any("site-packages/ray/" in part for part in command))


def spawn(role: type, log: Path, *arguments: object, cpus: float, gpus: float, threads: int, concurrency: int) -> Any:  # noqa: ANN401 -- a Ray handle
    """Start a role in a process of its own.

    Args:
        role: the class, whose first argument is the log.
        log: where the process writes everything it prints.
        arguments: further arguments of the class.
        cpus: Ray CPUs to reserve.
        gpus: Ray GPUs to reserve.
        threads: compute threads; set in the environment, because libraries read it when they load.
        concurrency: how many calls may run at the same time.
    """
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    options = {
        "num_cpus": cpus,
        "num_gpus": gpus,
        "max_concurrency": concurrency,
        "max_restarts": 0,  # the supervisor restarts, because a fresh process must be told the newest state
        "runtime_env": {"env_vars": environment},
    }
    return ray.remote(role).options(**options).remote(log, *arguments)


def stage_spec(
    plan: Plan, rank: int, model_path: Path, buffer_addresses: Sequence[str], rendezvous: str
) -> LearnerSpec:
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
        buffer_addresses=tuple(buffer_addresses),
        run_folder=plan.folder.root,
        config=config.learner,
        algorithm=config.algorithm,
        weight_sync=config.weight_sync,
        buffer=config.buffer,
    )


def actor_spec(
    plan: Plan, number: int, serving_path: Path, model_path: Path, buffer_addresses: Sequence[str]
) -> ActorSpec:
    """What the actor of this number is told."""
    config = plan.config
    actor_lag = config.weight_sync.actor_lag_for(config.learner.updates_per_step)
    return ActorSpec(
        name=f"actor-{number}",
        index=number,
        run_id=plan.run_id,
        seed=config.run.seed,
        serving_model_path=serving_path,
        tokenizer_path=model_path,
        weights_folder=plan.folder.weights,
        buffer_addresses=tuple(buffer_addresses),
        config=config.actors,
        task=config.task,
        weight_sync=config.weight_sync.model_copy(update={"max_actor_lag": actor_lag}),
        buffer=config.buffer,
    )
