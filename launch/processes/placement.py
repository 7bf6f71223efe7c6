"""Place the processes of a run on hosts, with a timeout on every wait; `spawn` starts a placed process."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup as RayPlacementGroup
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from leeway.actors.config import ADDED_ENV
from leeway.common.process import threads_of
from leeway.launch.processes.role_process import RoleProcess, RunFailed

if TYPE_CHECKING:  # service processes import this module and must not load compute libraries
    from leeway.launch.pools import Bundle, WorkerPool

PLACEMENT_S = 60.0
"""Timeout in seconds of a worker's wait for a host of a cluster; a host needs a few seconds to join."""
_POLL_S = 0.2
_BLOCK_SIGTERM = (
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
"""Program that blocks SIGTERM, also for its threads and child processes, and then becomes Ray's worker."""
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
ON_GPU = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Environment of ranks with a GPU. Batches vary in shape, so memory blocks of a fixed size would fragment memory."""


class Reservation(NamedTuple):
    """Resources of one worker, and Ray's scheduling strategy; without a strategy, any host is allowed."""

    bundle: Bundle
    strategy: Any = None


def here() -> Reservation:
    """Return a reservation of this machine without resources; this machine has the folder of the run."""
    return Reservation({}, NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False))


class PlacementGroup:
    """Resources of workers, reserved all at once, until `release` is called or the run ends."""

    def __init__(self, bundles: Sequence[Bundle], what: str) -> None:
        """Request one bundle per worker from Ray, without blocking. `what` describes the request in error messages."""
        self.what = what
        self._bundles = bundles
        self._missing_since_s: float | None = None
        reserving = [dict(bundle) for bundle in bundles if bundle]
        self._group: RayPlacementGroup | None = placement_group(reserving, strategy="PACK") if reserving else None

    @property
    def is_placed(self) -> bool:
        """Whether every worker has a host; False from the loss of a host until another host replaces the lost one."""
        if self._group is None or placement_group_table(self._group)["state"] == "CREATED":
            self._missing_since_s = None
            return True
        self._missing_since_s = self._missing_since_s or time.monotonic()
        return False

    @property
    def missing_s(self) -> float:
        return 0.0 if self._missing_since_s is None else time.monotonic() - self._missing_since_s

    def wait(self, timeout_s: float, *, hosts_may_join: bool) -> None:
        """Wait for hosts. Raise RunFailed after `timeout_s`, or at once if no host is big enough and none may join."""
        while not self.is_placed:
            if self.missing_s > timeout_s or not (hosts_may_join or self._fits_some_host()):
                raise RunFailed(self.shortage())
            time.sleep(_POLL_S)

    def _fits_some_host(self) -> bool:
        """Return whether each worker on its own would fit on some host."""
        hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return all(
            any(all(host.get(kind, 0.0) >= amount for kind, amount in bundle.items()) for host in hosts)
            for bundle in self._bundles
        )

    def reservation(self, number: int) -> Reservation:
        bundle = self._bundles[number]
        if self._group is None or not bundle:
            return Reservation(bundle)
        index = sum(1 for each in self._bundles[:number] if each)
        return Reservation(bundle, PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index))

    def shortage(self) -> str:
        """Return the requested resources, and the free and total resources of each live host."""
        free = ray._private.state.available_resources_per_node()
        hosts = "; ".join(
            f"{node['NodeManagerAddress']}: {_amounts(free.get(node['NodeID'], {}), node['Resources'])}"
            for node in ray.nodes()
            if node["Alive"]
        )
        return (
            f"{self.what}, but no host had these resources free within {self.missing_s:.0f} s. Free: {hosts}. "
            f"Lower count, cpus or gpus (reservations, not limits), or add hosts to the pool"
        )

    def release(self) -> None:
        """Release the resources. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                remove_placement_group(group)


def place_of(role: str, number: int, pool: WorkerPool) -> PlacementGroup:
    """Request the resources of one worker of a pool."""
    return PlacementGroup([pool.bundle], f"{role}.{number} of {replace(pool, count=1).describe()}")


@dataclass
class PlacedProcess(RoleProcess):
    """A process with its own placement. A process that dies too often or finds no host is lost."""

    placement: PlacementGroup = field(kw_only=True)
    """Resources of the process; a restart keeps the resources."""
    lost: str = ""
    """Reason that the process is lost and not restarted; '' if the process is not lost."""

    @property
    def state(self) -> str:
        if self.lost:
            return f"lost: {self.lost}"
        return "waiting for resources" if self.handle is None else super().state

    def end(self) -> None:
        """Kill the process, and release its resources."""
        self.kill()
        self.placement.release()

    def lose(self, why: str) -> None:
        self.end()
        self.lost = why


def _amounts(free: Mapping[str, float], total: Mapping[str, float]) -> str:
    names = ["CPU", "GPU", *sorted(name for name in total if name.startswith("pool_"))]
    shown = [f"{free.get(name, 0.0):g} of {total[name]:g} {name}" for name in names if name in total]
    return ", ".join(shown) or "nothing"


def spawn(
    role: type,
    log: Path,
    *arguments: object,
    on: Reservation,
    concurrency: int,
    variables: Mapping[str, str] | None = None,
    takes_sigterm: bool = False,
) -> Any:  # noqa: ANN401 -- a Ray handle
    """Start a role in its own process, with its output in `log`.

    `variables` extend the environment of the process. `takes_sigterm` blocks SIGTERM there, for `signal.sigwait`.
    """
    # set the number of compute threads in the environment, because libraries read this number at import
    threads = str(threads_of(on.bundle.get("CPU", 0.0)))
    environment = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        **{name: os.environ.get(name, "1") for name in _OFFLINE},
        ADDED_ENV: ",".join(name for name in _OFFLINE if name not in {**os.environ, **(variables or {})}),
        **(variables or {}),
    }
    if "GPU" not in on.bundle:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # Ray sets this variable only if the process reserved GPUs
    runtime: dict[str, Any] = {"env_vars": environment}
    if takes_sigterm:
        # Ray's threads start before our code runs, so the process must start with SIGTERM blocked
        runtime["py_executable"] = shlex.join([sys.executable, "-S", "-E", "-c", _BLOCK_SIGTERM])
    options = {
        "num_cpus": on.bundle.get("CPU", 0.0),
        "num_gpus": on.bundle.get("GPU", 0.0),
        "resources": {kind: amount for kind, amount in on.bundle.items() if kind not in ("CPU", "GPU")},
        "max_concurrency": concurrency,
        "max_restarts": 0,  # the supervisor restarts the process, because a new process needs the newest state
        "runtime_env": runtime,
    }
    if on.strategy is not None:
        options["scheduling_strategy"] = on.strategy
    return ray.remote(role).options(**options).remote(log, *arguments)
