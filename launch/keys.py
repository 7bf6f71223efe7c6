"""The keys of a run: whether its sockets are locked, and on which interface its services listen."""

from __future__ import annotations

from common.rpc.auth import LOOPBACK, RunKeys, is_loopback
from launch.config import Config
from launch.errors import ConfigError

ENCRYPTION_KEY = "launch.encryption"


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
