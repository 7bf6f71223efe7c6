"""Ports, Ray, and Weights & Biases."""

from __future__ import annotations

import netrc
import os
import socket
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from launch.config import Config
from launch.doctor.finding import Finding, ok, problem, warning
from launch.host import CONNECT_S, answers

LOOPBACK = "127.0.0.1"
CLUSTER_FILE = "ray_current_cluster"
"""In which Ray notes, in its folder, the address of the cluster that `ray start` made on this machine."""
WANDB_HOST = "https://api.wandb.ai"


def check_curve() -> list[Finding]:
    """Can ZeroMQ lock sockets with keys?"""
    if zmq.has("curve"):
        return ok("ZeroMQ", f"libzmq {zmq.zmq_version()} with CURVE")
    return problem(
        "ZeroMQ", f"libzmq {zmq.zmq_version()} without CURVE", "install pyzmq's own wheel: pip install -U pyzmq"
    )


def check_ports(config: Config) -> list[Finding]:
    """Is every port that the config names free on this machine?"""
    found: list[Finding] = []
    free: list[int] = []
    for key, host, port in _ports(config):
        error = _cannot_bind(host, port)
        if error:
            found += problem(
                "port", f"{key} = {port}: {host}:{port} cannot be bound ({error})", f"choose another {key}, or 0"
            )
        else:
            free.append(port)
    return found or ok("ports", f"{', '.join(map(str, free))} free" if free else "free ones are taken")


def _ports(config: Config) -> Iterator[tuple[str, str, int]]:
    if config.buffer.port:
        for shard in range(config.buffer.shards):
            yield "buffer.port", config.buffer.host or LOOPBACK, config.buffer.port + shard
    if config.weight_sync.port and config.weight_sync.transport != "folder":
        yield "weight_sync.port", config.weight_sync.host or LOOPBACK, config.weight_sync.port
    if config.tracking.prometheus_port:
        yield "tracking.prometheus_port", LOOPBACK, config.tracking.prometheus_port


def _cannot_bind(host: str, port: int) -> str:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with closing(socket.socket(family, kind, proto)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def check_ray(
    config: Config | None, environment: Mapping[str, str] = os.environ, places: Sequence[Path] | None = None
) -> list[Finding]:
    """Which cluster would a run join, and is Ray's token authentication on?

    Args:
        config: of the run; None: of none.
        environment: as the run would have it.
        places: Ray's folders; None: its own, and those of launch/cluster.sh.
    """
    if places is None:
        state = Path(environment.get("LEEWAY_STATE") or f"/tmp/leeway-{os.geteuid()}")
        places = (Path("/tmp/ray"), *sorted(state.glob("ray-*")))
    return [*_check_cluster(config, environment, places), *_check_token(environment)]


def _check_cluster(config: Config | None, environment: Mapping[str, str], places: Sequence[Path]) -> list[Finding]:
    wanted = config.launch.ray_address if config is not None else None
    noted = dict.fromkeys(_read(place / CLUSTER_FILE) for place in places)
    running = [each for each in noted if each and answers(each)]
    if wanted == "auto":
        address = environment.get("RAY_ADDRESS") or next(iter(running), "")
        if not address:
            return problem("Ray", "launch.ray_address = 'auto', and no cluster runs here", "launch/cluster.sh up HOSTS")
        wanted = address
    if wanted is not None:
        if not answers(wanted):
            return problem(
                "Ray",
                f"no cluster answers at launch.ray_address = '{wanted}' within {CONNECT_S:g} s",
                "launch/cluster.sh status HOSTS; is a firewall between? Unset it, and Ray starts itself here",
            )
        return ok("Ray", f"the cluster at {wanted} answers")
    others = [f"RAY_ADDRESS = {environment['RAY_ADDRESS']}"] if environment.get("RAY_ADDRESS") else []
    others += [f"a cluster at {each}" for each in running]
    if others:
        return warning(
            "Ray",
            f"{' and '.join(others)}: a run without launch.ray_address starts a Ray of its own beside it",
            "to join that cluster, --launch.ray_address ADDRESS; else leave it as it is",
        )
    return ok("Ray", "no cluster runs here; a run starts its own")


def _check_token(environment: Mapping[str, str]) -> list[Finding]:
    mode = environment.get("RAY_AUTH_MODE", "token")
    if mode != "token":
        return problem(
            "Ray token",
            f"RAY_AUTH_MODE = {mode}: whoever reaches Ray's ports can run programs as you",
            "unset RAY_AUTH_MODE",
        )
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077:
        return warning("Ray token", f"others of this machine can read {path}", f"chmod 600 {path}")
    return ok("Ray token", "authentication is on")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def check_wandb(
    config: Config | None, environment: Mapping[str, str] = os.environ, home: Callable[[], Path] = Path.home
) -> list[Finding]:
    """Where do the figures go, and is there a key where one is needed?"""
    mode = config.tracking.wandb if config is not None else "offline"
    forced = environment.get("WANDB_MODE", "")
    if mode == "disabled":
        return ok("W&B", "disabled")
    if forced and forced != mode:
        return warning(
            "W&B", f"tracking.wandb = '{mode}', and WANDB_MODE = {forced} in the environment", "unset WANDB_MODE"
        )
    if mode == "offline":
        return ok("W&B", "offline: into the run's folder")
    host = urlsplit(environment.get("WANDB_BASE_URL", WANDB_HOST)).hostname or ""
    if environment.get("WANDB_API_KEY") or _in_netrc(host, _netrc(environment, home())):
        return ok("W&B", f"online, with a key for {host}")
    return problem("W&B", f"online, and there is no key for {host}", "wandb login, or tracking.wandb = 'offline'")


def _netrc(environment: Mapping[str, str], home: Path) -> Path:
    return Path(environment["NETRC"]).expanduser() if environment.get("NETRC") else home / ".netrc"


def _in_netrc(host: str, path: Path) -> bool:
    try:
        return netrc.netrc(str(path)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
