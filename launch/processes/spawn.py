"""Starts single processes of a run on Ray, each told exactly what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from launch.processes.placement import Place


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
