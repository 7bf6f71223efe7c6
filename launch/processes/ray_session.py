"""Starts Ray for a run, or joins it, and ends what was started."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

from launch.config import Config
from launch.local_ray import OBJECT_STORE_BYTES, make_sessions_folder, sessions_folder
from launch.pools import resources_of
from launch.processes.ray_watch import RayWatch, is_of_ray
from launch.processes.role_process import RunFailed

RAY_GOODBYE_S = 3.0
"""How long Ray's own processes may take to end after it was shut down."""


def start_ray(config: Config, namespace: str) -> RayWatch:
    """Start Ray here, or join the cluster at launch.ray_address.

    Returns:
        What sees that it died.

    Raises:
        RunFailed: it does not start, or no cluster answers there.
    """
    address = config.launch.ray_address
    # where no other host is to reach them, Ray's own servers listen on loopback alone, and not on every interface
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = address is not None
    try:
        with _our_signals():
            ray.init(
                address=address or "local",  # unset, Ray would look for a cluster in the environment
                namespace=namespace,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
                **({} if address else _of_this_machine(config)),
            )
    except (OSError, RuntimeError, ValueError, RayError) as error:
        where = f"no Ray cluster answers at launch.ray_address = '{address}'" if address else "Ray does not start here"
        raise RunFailed(f"{where}: {(str(error).splitlines() or [type(error).__name__])[0]}") from error
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    return RayWatch(ray.get_runtime_context().gcs_address, logs)


def _of_this_machine(config: Config) -> dict[str, Any]:
    """How Ray is started here: the machine is a host of every pool."""
    return {
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "num_cpus": os.cpu_count(),
        "resources": dict.fromkeys(resources_of(config), 1.0),
        "_temp_dir": str(make_sessions_folder()),
    }


@contextlib.contextmanager
def _our_signals() -> Iterator[None]:
    """Keep our handlers of signals while Ray starts.

    In Python it would put one of SIGTERM in place that ends this process with exit status 15. In C++ it does put some
    in place, and that of SIGTERM ends the process 3 s later, whoever else has heard the signal.
    """
    utils = ray._private.utils
    install, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = install
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.getsignal(number))  # Python's own, in the place of C++'s


def end_ray() -> None:
    """End what `start_ray` started here, whichever of Ray's own processes outlives that, and remove its session.

    Stopped in the middle of its start, Ray leaves agents behind that go on for a minute or two.
    """
    family = [child for child in psutil.Process().children(recursive=True) if is_of_ray(child)]
    ray.shutdown()
    _, alive = psutil.wait_procs(family, timeout=RAY_GOODBYE_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for session in sessions_folder().glob(f"session_*_{os.getpid()}"):
        shutil.rmtree(session, ignore_errors=True)


_abandoned = False


def abandon_ray(watch: RayWatch) -> None:
    """End every process of Ray's here without asking Ray, whose own processes are dead."""
    global _abandoned
    _abandoned = True
    watch.end_all()
    watch.close()


def was_abandoned() -> bool:
    """Is Ray dead, and all of it here ended?"""
    return _abandoned


def leave(status: int) -> None:
    """End this process now where Ray was abandoned, for its hooks at exit wait for what is dead; all is closed before.

    Args:
        status: the exit status.
    """
    if _abandoned:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
