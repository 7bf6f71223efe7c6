"""What others can reach of a run: the modes of its files, the keys of its sockets, and where its services listen."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from common.rpc.auth import LOOPBACK, RunKeys, is_loopback
from launch.errors import ConfigError

if TYPE_CHECKING:
    from launch.config import Config

ENCRYPTION_KEY = "launch.encryption"
_OWNER_ONLY = 0o077


def run_keys(config: Config) -> RunKeys | None:
    """New keys for a run; None where its sockets are not locked.

    Raises:
        ConfigError: the knob would leave a socket open to other machines.
    """
    wanted, is_cluster = config.launch.encryption, config.launch.ray_address is not None
    hosts = _hosts(config)
    reached = [key for key, host in hosts.items() if (is_cluster if host is None else not is_loopback(host))]
    if wanted == "off" and reached:
        key = reached[0]
        what = f"{key} = '{hosts[key]}'"
        if hosts[key] is None:
            what = f"{key} is unset, which on a cluster is its machine's address there, and"
        remedy = "use 'auto'" if is_cluster else f"use 'auto', or leave {key} unset"
        raise ConfigError(
            f"{ENCRYPTION_KEY} = 'off', but {what} can be reached from other machines, which could then push samples "
            f"or weights into the run: {remedy}"
        )
    if wanted == "off" or (wanted == "auto" and not reached and not is_cluster):
        return None
    return RunKeys.make()


def host_of_service(host: str | None, config: Config) -> str | None:
    """Where a service is to listen: the knob, else loopback; None on a cluster, where the process knows its address."""
    return LOOPBACK if host is None and config.launch.ray_address is None else host


def _hosts(config: Config) -> dict[str, str | None]:
    """By config key."""
    hosts = {"buffer.host": config.buffer.host}
    if config.weight_sync.transport != "folder":
        hosts["weight_sync.host"] = config.weight_sync.host
    return hosts


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
