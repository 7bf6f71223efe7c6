"""Run contexts for tests: a test gives only the settings that matter to it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from leeway.actors.config import ActorsConfig
from leeway.buffer.config import BufferConfig
from leeway.common.run import RunContext, RunFacts
from leeway.common.staleness import StalenessConfig
from leeway.weight_sync.config import WeightSyncConfig


def run_facts(**changes) -> RunFacts:
    """Return the facts of a small run; staleness settings are given by their own names."""
    staleness = {key: changes.pop(key) for key in list(changes) if key in StalenessConfig.model_fields}
    small = {
        "run_id": "test",
        "seed": 0,
        "num_prompts": 64,
        "group_size": 4,
        "groups_per_step": 2,
        "vocab_size": 64,
        "max_tokens": 16,
        "staleness": StalenessConfig(**staleness),
    }
    return RunFacts(**{**small, **changes})


def run_context(folder: Path, facts: RunFacts | None = None, **changes) -> RunContext:
    """Return the context that a role of a run receives.

    Args:
        folder: run folder, and model folder unless `model_path` is given.
        facts: facts of the run; None for those of a small run.
        changes: config sections by name, and fields of RunContext.
    """
    # imported here because they import torch, which processes of buffer tests start without
    from leeway.algorithms.trajectory_balance import TrajectoryBalanceConfig
    from leeway.learner.config import LearnerConfig

    sections = {
        "actors": ActorsConfig(),
        "task": None,
        "algorithm": TrajectoryBalanceConfig(),
        "learner": LearnerConfig(),
        "buffer": BufferConfig(),
        "weight_sync": WeightSyncConfig(),
    }
    sections |= {name: changes.pop(name) for name in list(changes) if name in sections}
    model = changes.pop("model_path", folder)
    places = {
        "folder": folder,
        "weights_folder": folder / "weights",
        "model_path": model,
        "reference_paths": (model,),
        "temperature": 1.0,
        "serving_dtypes": ("float32",),
        "startup_timeout_s": 60.0,
    }
    return RunContext(config=SimpleNamespace(**sections), facts=facts or run_facts(), **{**places, **changes})
