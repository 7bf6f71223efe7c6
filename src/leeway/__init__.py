"""Leeway: asynchronous off-policy reinforcement learning for language models.

    train, resume    start a run as a separate process
    load_run, Run    read a run, active or ended
    load_config      validate a config and return it
    algorithm        decorator: make a function from LossInputs to LossOutput a loss that a config can name
    LeewayError      base class of errors about input, files and services

docs/api.md has examples. Importing this package imports neither torch nor Ray nor vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leeway.algorithms.base import LossInputs, LossOutput, algorithm
    from leeway.common.errors import LeewayError
    from leeway.launch.api import Run, load_run, resume, train
    from leeway.launch.config import Config, load_config

_MODULES = {
    "Config": "launch.config",
    "LeewayError": "common.errors",
    "LossInputs": "algorithms.base",
    "LossOutput": "algorithms.base",
    "Run": "launch.api",
    "algorithm": "algorithms.base",
    "load_config": "launch.config",
    "load_run": "launch.api",
    "resume": "launch.api",
    "train": "launch.api",
}
__all__ = [
    "Config",
    "LeewayError",
    "LossInputs",
    "LossOutput",
    "Run",
    "algorithm",
    "load_config",
    "load_run",
    "resume",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'leeway' has no attribute '{name}'")
    return getattr(import_module(f"leeway.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
