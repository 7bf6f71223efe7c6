"""The ranks of the learner: positions, rendezvous and collective error handling.

With P stages and R replicas there are R * P ranks, one process each: rank = replica * P + stage. The last stage of
replica 0 is the coordinator: it evaluates the loss and is connected to the buffer.

    MeshPlace, Mesh   position of a rank among stages and replicas, and its process groups
    join_group        rendezvous. torch's channels have no authentication. By default, the store listens on all
                      interfaces, gloo on the interface of the host name, and NCCL on any interface. This function
                      makes all three use the interface of the rendezvous address (loopback on one machine)
    Agreement         runs an action on all ranks: the action succeeds on all, or fails on all with the same error
    StageLost         another rank died or timed out; GpuFailed: the GPU of this rank failed
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar
from urllib.parse import urlsplit

import psutil
import torch
import torch.distributed as dist


@dataclass(frozen=True)
class MeshPlace:
    """Position of a rank; needs no process group."""

    rank: int
    num_stages: int = 1
    num_replicas: int = 1
    """R, the number of pipelines that train the same weights on parts of each batch."""

    @property
    def num_ranks(self) -> int:
        return self.num_replicas * self.num_stages

    @property
    def stage(self) -> int:
        return self.rank % self.num_stages

    @property
    def replica(self) -> int:
        return self.rank // self.num_stages

    @property
    def coordinator(self) -> int:
        return self.num_stages - 1

    @property
    def is_coordinator(self) -> bool:
        return self.rank == self.coordinator

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def publishes(self) -> bool:
        """Whether this rank publishes weights: only the first replica does, since all hold the same weights."""
        return self.replica == 0

    @property
    def name(self) -> str:
        return f"stage {self.stage}" + (f" of replica {self.replica}" if self.num_replicas > 1 else "")


@dataclass(frozen=True)
class Mesh:
    """Position of a rank, with its process groups."""

    place: MeshPlace
    pipeline: dist.ProcessGroup
    """All stages of this replica, in order."""
    replicas: dist.ProcessGroup
    """The ranks of this stage in all replicas, in order."""
    ends: dist.ProcessGroup | None
    """First and last stage of this replica; None on stages in between, and if there is only one stage."""

    @classmethod
    def build(cls, place: MeshPlace, timeout: timedelta | None = None) -> Mesh:
        """Create the groups on all ranks together. New groups do not inherit the timeout of the default group."""
        num_stages, num_replicas = place.num_stages, place.num_replicas

        def group(replicas: Sequence[int], stages: Sequence[int]) -> dist.ProcessGroup:
            return dist.new_group([r * num_stages + p for r in replicas for p in stages], timeout=timeout)

        # every rank must create every group, in the same order
        pipelines = [group([r], range(num_stages)) for r in range(num_replicas)]
        stages = [group(range(num_replicas), [p]) for p in range(num_stages)]
        ends = [group([r], [0, num_stages - 1]) for r in range(num_replicas)] if num_stages > 1 else []
        at_an_end = place.stage in (0, num_stages - 1)
        return cls(
            place, pipelines[place.replica], stages[place.stage], ends[place.replica] if ends and at_an_end else None
        )


_DEATH_PATTERNS = ("pair closure", "Connection closed by peer", "Connection reset by peer")
"""Substrings of communication errors if another rank died."""
_LOSS_PATTERNS = (*_DEATH_PATTERNS, "gloo", "NCCL")
"""Substrings of communication errors if another rank died or timed out."""
_GPU_FAULT_PATTERNS = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "memory over nvlink or a hardware error",
    "unspecified launch failure",
)
"""Substrings of CUDA errors, also through NCCL, if a GPU or a link failed. The last string may also mean a bug:
CUDA reports it for all faults without their own code."""
_PERMANENT_PATTERNS = (
    *("Duplicate GPU detected", "invalid usage", "ncclInvalidUsage", "ncclInvalidArgument"),
    *("illegal memory access", "device-side assert"),
)
"""Substrings of errors that a restart cannot fix: unsupported rank placement (NCCL) or a bug (CUDA)."""


def join_group(
    rendezvous: str,
    device: torch.device,
    *,
    rank: int,
    num_ranks: int,
    timeout: timedelta,
    rendezvous_timeout: timedelta | None = None,
) -> None:
    """Join the process group at tcp://HOST:PORT, an address on the host of rank 0; all ranks must join.

    Tensors on `device` use NCCL, all others gloo. `timeout` bounds every collective, `rendezvous_timeout` (default:
    `timeout`) the rendezvous. Raises DistStoreError if the rendezvous times out, OSError if rank 0 cannot listen.
    """
    place = urlsplit(rendezvous)
    assert place.hostname is not None, rendezvous
    assert place.port is not None, rendezvous
    name = _interface_to(place.hostname, place.port)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        # "=" requests an exact match; a bare name is a prefix
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    listening = None
    if rank == 0:  # listen on this address only: torch would listen on all addresses. The store closes the socket
        family = socket.AF_INET6 if ":" in place.hostname else socket.AF_INET
        listening = socket.create_server((place.hostname, place.port), family=family, backlog=1024).detach()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        place.hostname, place.port, num_ranks, rank == 0, rendezvous_timeout or timeout, master_listen_fd=listening
    )
    store.set_timeout(timeout)
    on_gpu = device.type != "cpu"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
        # without this, NCCL infers the device from the first collective's thread; for sends, see docs/learner.md
        device_id=device if on_gpu else None,
    )


def _interface_to(host: str, port: int) -> str | None:
    """Return the interface through which this machine reaches the host; None if no interface has that address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # for UDP, connecting sends nothing
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            return str(name)
    return None


COLLECTIVE_TIMEOUT_S = 600.0
"""Seconds before a collective times out; all ranks are then restarted. A rank waits for the micro-batches of others,
which may take long. While loading and exporting, `leeway.common.run.STARTUP_S` applies instead."""

R = TypeVar("R")

_MESSAGE_BYTES = 2048
"""Maximum length of a message between ranks; longer messages are truncated."""


class RankFailed(RuntimeError):
    """An action failed on a rank; the message, the same on all ranks, names the rank and the reason."""


class Agreement:
    """Collective actions of all ranks; a separate gloo group allows use outside the training thread."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        """Create the group; all ranks must create it together. Collectives time out after `timeout_s`."""
        self._rank = rank
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def all_gather(self, text: str) -> list[str]:
        """Return the texts of all ranks, in rank order; raise RuntimeError if a rank died or timed out."""
        message = text.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
        row = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        rows = [torch.zeros_like(row) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(rows, row, group=self.group)
        return [found.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for found in rows]

    def run_on_all(self, action: Callable[[], R], what: str) -> R:
        """Run an action on every rank. The action may raise OSError or ValueError, or run a checkpoint collective.

        Raises RankFailed on all ranks if the action failed on any rank: "rank 1 could not WHAT".
        """
        from torch.distributed.checkpoint.api import CheckpointException  # slow, and not needed in the launcher

        problem, results = "", []
        try:
            results.append(action())
        except CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            problem = f"rank {rank} could not {what}: {first_line(cause)}"
        except (OSError, ValueError) as error:
            problem = f"rank {self._rank} could not {what}: {first_line(error)}"
        problems = [text for text in self.all_gather(problem) if text]
        if problems:
            raise RankFailed(problems[0])
        return results[0]

    def close(self) -> None:
        dist.destroy_process_group(self.group)


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


class StageLost(RuntimeError):
    """Another rank died or timed out."""


class GpuFailed(StageLost):
    """The GPU of this rank reported a hardware fault; a new process can often use it again."""


def is_rank_loss(error: Exception) -> bool:
    """Return whether an error means that another rank died or timed out, so a restart may help."""
    text = str(error)
    if any(pattern in text for pattern in _PERMANENT_PATTERNS):
        return False
    # subclasses of RuntimeError are excluded: the message of a learner error may contain these words in a path
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and any(pattern in text for pattern in _LOSS_PATTERNS)
    )


def is_rank_death(error: BaseException) -> bool:
    """Return whether an error means that another rank died, rather than timed out."""
    return any(pattern in str(error) for pattern in _DEATH_PATTERNS)


def is_gpu_fault(error: Exception) -> bool:
    """Return whether an error means that the GPU of this rank failed, so a restart may help."""
    text = str(error)
    return any(each in text for each in _GPU_FAULT_PATTERNS) and not any(each in text for each in _PERMANENT_PATTERNS)
