"""The ranks of the learner: their places, their rendezvous, and how they agree.

With P stages and R replicas there are R * P ranks, one process each: rank = replica * P + stage. The last stage of
replica 0 is the coordinator: it evaluates the loss and talks to the buffer.

    MeshPlace, Mesh   a rank's place among stages and replicas, and its process groups
    join_group        the rendezvous. torch's channels have no authentication, and by default listen on every interface
                      (store), the host name's (gloo) or any (NCCL). Here all stay on the interface of the rendezvous:
                      loopback on one machine, and between machines that of their private network
    Agreement         what several ranks do as one is done on all of them, or failed on all for the same reason
    StageLost         a rank died or fell silent; GpuFailed: its GPU did
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
from torch.distributed.checkpoint.api import CheckpointException


@dataclass(frozen=True)
class MeshPlace:
    """One rank's place; needs no process group."""

    rank: int
    num_stages: int = 1
    num_replicas: int = 1
    """R, pipelines that train the same weights on shares of each batch."""

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
        """Replicas hold the same weights: the first one writes them."""
        return self.replica == 0

    @property
    def name(self) -> str:
        return f"stage {self.stage}" + (f" of replica {self.replica}" if self.num_replicas > 1 else "")


@dataclass(frozen=True)
class Mesh:
    """A rank's place, with its process groups."""

    place: MeshPlace
    pipeline: dist.ProcessGroup
    """The stages of this replica, in order."""
    replicas: dist.ProcessGroup
    """This stage in all replicas, in order."""
    ends: dist.ProcessGroup | None
    """First and last stage of this replica; None on the stages between, and if one stage is both."""

    @classmethod
    def build(cls, place: MeshPlace, timeout: timedelta | None = None) -> Mesh:
        """Make the groups, all ranks together. Collectives do not inherit the timeout of the default group."""
        num_stages, num_replicas = place.num_stages, place.num_replicas

        def group(replicas: Sequence[int], stages: Sequence[int]) -> dist.ProcessGroup:
            return dist.new_group([r * num_stages + p for r in replicas for p in stages], timeout=timeout)

        # every rank has to make every group, in the same order
        pipelines = [group([r], range(num_stages)) for r in range(num_replicas)]
        stages = [group(range(num_replicas), [p]) for p in range(num_stages)]
        ends = [group([r], [0, num_stages - 1]) for r in range(num_replicas)] if num_stages > 1 else []
        at_an_end = place.stage in (0, num_stages - 1)
        return cls(
            place, pipelines[place.replica], stages[place.stage], ends[place.replica] if ends and at_an_end else None
        )


_SIGNS_OF_DEATH = ("pair closure", "Connection closed by peer", "Connection reset by peer")
"""In messages of the communication library when another rank is gone."""
_SIGNS_OF_LOSS = (*_SIGNS_OF_DEATH, "gloo", "NCCL")
"""The same, or silent."""
_SIGNS_OF_FAULT = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "memory over nvlink or a hardware error",
    "unspecified launch failure",
)
"""In messages of CUDA when a GPU or a link failed, also through NCCL. The last may be a bug: it is all that CUDA
says of faults without a name."""
_WOULD_COME_AGAIN = (
    *("Duplicate GPU detected", "invalid usage", "ncclInvalidUsage", "ncclInvalidArgument"),
    *("illegal memory access", "device-side assert"),
)
"""In messages of NCCL about ranks that it cannot serve as placed, and of CUDA about a bug."""


def join_group(
    rendezvous: str,
    device: torch.device,
    *,
    rank: int,
    num_ranks: int,
    timeout: timedelta,
    meets_within: timedelta | None = None,
) -> None:
    """Join the process group at tcp://HOST:PORT, an address of the machine of rank 0; all ranks do so at the same time.

    Tensors on `device` are exchanged by NCCL, all others by gloo. `timeout` bounds every collective, `meets_within` the
    rendezvous. DistStoreError if not all came in time, OSError if rank 0 cannot listen there.
    """
    place = urlsplit(rendezvous)
    assert place.hostname is not None, rendezvous
    assert place.port is not None, rendezvous
    name = _interface_to(place.hostname, place.port)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        # a bare name would be a prefix
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    listening = None
    if rank == 0:  # on this address alone; torch's own would listen on all. The store closes it
        family = socket.AF_INET6 if ":" in place.hostname else socket.AF_INET
        listening = socket.create_server((place.hostname, place.port), family=family, backlog=1024).detach()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        place.hostname, place.port, num_ranks, rank == 0, meets_within or timeout, master_listen_fd=listening
    )
    store.set_timeout(timeout)
    on_gpu = device.type != "cpu"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
        # else NCCL guesses it from the thread of the first collective; for sends between stages see docs/learner.md
        device_id=device if on_gpu else None,
    )


def _interface_to(host: str, port: int) -> str | None:
    """Return the interface over which this machine reaches the host; None if none has its own address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # nothing is sent
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            return str(name)
    return None


COLLECTIVE_TIMEOUT_S = 600.0
"""A rank that waits longer for another raises, and all are started again. A rank waits for the others' micro-batches,
which may be long, and while it loads and exports for `common.run.STARTUP_S` instead."""

R = TypeVar("R")

_SAID_BYTES = 2048
"""Length to which a rank's message to the others is cut."""


class Disagreement(RuntimeError):
    """A rank could not do its part; the text, the same on all ranks, says which and why."""


class Agreement:
    """Has a gloo group of its own, so that another thread than that of training may use it."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        """Make the group, all ranks together; one that is silent for longer is lost."""
        self._rank = rank
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def say(self, text: str) -> list[str]:
        """Return every rank's text, in order, once all have come; RuntimeError if one died or was silent too long."""
        said = text.encode()[:_SAID_BYTES].ljust(_SAID_BYTES, b"\0")
        row = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        rows = [torch.zeros_like(row) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(rows, row, group=self.group)
        return [found.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for found in rows]

    def together(self, action: Callable[[], R], what: str) -> R:
        """Do something that may raise OSError or ValueError, or a collective of DCP, on every rank.

        Disagreement, on all ranks, if it failed on one: "rank 1 could not WHAT".
        """
        problem, results = "", []
        try:
            results.append(action())
        except CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            problem = f"rank {rank} could not {what}: {first_line(cause)}"
        except (OSError, ValueError) as error:
            problem = f"rank {self._rank} could not {what}: {first_line(error)}"
        problems = [said for said in self.say(problem) if said]
        if problems:
            raise Disagreement(problems[0])
        return results[0]

    def close(self) -> None:
        dist.destroy_process_group(self.group)


def first_line(error: BaseException) -> str:
    """Return the kind of error, and the first line of its text."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


class StageLost(RuntimeError):
    """Another rank died or did not answer in time."""


class GpuFailed(StageLost):
    """The GPU of this rank failed as hardware does: a new process often works on it again."""


def tells_of_loss(error: Exception) -> bool:
    """Return whether an error says that another rank is gone or silent, so that a new start may help."""
    text = str(error)
    if any(sign in text for sign in _WOULD_COME_AGAIN):
        return False
    # an error of ours, which has a class of its own, may name a folder that is called so
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and any(sign in text for sign in _SIGNS_OF_LOSS)
    )


def tells_of_death(error: BaseException) -> bool:
    """Return whether an error says that another rank is gone, rather than silent."""
    return any(sign in str(error) for sign in _SIGNS_OF_DEATH)


def tells_of_fault(error: Exception) -> bool:
    """Return whether an error says that the GPU of this rank failed, so that a new start may help."""
    text = str(error)
    return any(sign in text for sign in _SIGNS_OF_FAULT) and not any(sign in text for sign in _WOULD_COME_AGAIN)
