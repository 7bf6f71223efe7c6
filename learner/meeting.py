"""Where the ranks of the learner meet, and over which interface they talk.

torch's channels ask nobody for a key. Left to itself its store listens on every interface, and gloo on the one that
the host's name resolves to. Here both stay on the interface of the meeting point: loopback on one machine, and
between machines that of their private network.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from urllib.parse import urlsplit

import psutil
import torch
import torch.distributed as dist

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def meet(rendezvous: str, device: torch.device, *, rank: int, num_ranks: int, timeout: timedelta) -> None:
    """Join the process group; all ranks are in this call at the same time.

    Args:
        rendezvous: tcp://HOST:PORT, an address of the machine of rank 0.
        device: where this rank computes; tensors there are exchanged by NCCL, all others by gloo.
        rank: of this process.
        num_ranks: of the group.
        timeout: of the meeting and of every collective after it.

    Raises:
        dist.DistStoreError: not all came in time.
        OSError: rank 0 cannot listen there.
    """
    place = urlsplit(rendezvous)
    assert place.hostname is not None, rendezvous
    assert place.port is not None, rendezvous
    name = _interface_to(place.hostname, place.port)
    if name is not None:
        os.environ.setdefault(GLOO_INTERFACE, name)
    listening = _listen(place.hostname, place.port) if rank == 0 else None
    store = dist.TCPStore(  # type: ignore[attr-defined]
        place.hostname, place.port, num_ranks, rank == 0, timeout, master_listen_fd=listening
    )
    on_gpu = device.type != "cpu"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
        # said here, NCCL need not guess it from the thread that asks for the first collective
        device_id=device if on_gpu else None,
    )


def _listen(host: str, port: int) -> int:
    """A socket that listens on this address alone; torch's own would listen on all. The store closes it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024).detach()


def _interface_to(host: str, port: int) -> str | None:
    """The interface over which this machine reaches the host; None where none has the address that it would use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # nothing is sent
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            return str(name)
    return None
