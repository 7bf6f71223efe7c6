"""The description of a run as a test makes it: only what the test is about need be said."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from actors.config import ActorsConfig
from buffer.config import BufferConfig
from common.run import RunContext, RunFacts
from common.staleness import StalenessConfig
from weight_sync.config import WeightSyncConfig


def run_facts(**changes) -> RunFacts:
    """Of a small run; the knobs of staleness are told by their own names."""
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
    """As a role of a run is handed it.

    Args:
        folder: of the run, and of its model where `model_path` says no other.
        facts: of the run; None: those of a small one.
        changes: sections of the config by their names, and fields of RunContext.
    """
    # with these comes torch, which the processes of a buffer's tests start without
    from algorithms.trajectory_balance import TrajectoryBalanceConfig
    from learner.config import LearnerConfig

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
