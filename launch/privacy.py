"""What a process of a run lets others see: the modes of its files, and the interface that it listens on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from common.rpc.auth import ServiceKeys, is_loopback

_OWNER_ONLY = 0o077


def keep_files_private() -> None:
    """From now on whatever this process writes, and those that it starts, is readable by its owner only."""
    os.umask(_OWNER_ONLY)


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """The same for the length of a block."""
    earlier = os.umask(_OWNER_ONLY)
    try:
        yield
    finally:
        os.umask(earlier)


def interface(host: str | None, keys: ServiceKeys | None) -> str:
    """The address that a service of a run binds; asked in its own process.

    Args:
        host: an address; None for that of this machine in the Ray cluster.
        keys: what its socket is locked with.

    Raises:
        RuntimeError: it could be reached from other machines, and is not locked.
    """
    if host is None:
        import ray

        host = str(ray.util.get_node_ip_address())
    if keys is None and not is_loopback(host):
        raise RuntimeError(
            f"{host} can be reached from other machines, and launch.encryption = 'off' leaves the service open: "
            "use 'auto'"
        )
    return host
