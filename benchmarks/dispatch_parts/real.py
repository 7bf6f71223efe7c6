"""Runs with two pools of one real engine each. One engine has its own core; the other shares a core with the learner.

The model is that of `benchmarks/overlap.py`, whose completions end at random. The prompt explains little of a length,
so the gain comes from moving long-running samples to the faster engine.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.lib.runs import FinishedRun
from benchmarks.overlap import train_on_cores
from benchmarks.overlap_parts.long_tail import GROUP_SIZE, Setting, write_setting

from leeway.launch.config import load_config
from leeway.planning.plans import world_of
from leeway.planning.profile import Profile
from leeway.planning.simulator import Simulation

GROUPS, SLOTS, NUM_PROMPTS = 8, 16, 96
FIRST_ACTOR = "actor-0"
OVERRIDES = (
    *("--pools.alone.role", "actors", "--pools.alone.count", "1"),
    *("--pools.beside.role", "actors", "--pools.beside.count", "1"),
    *("--actors.num_actors", "2", "--actors.max_running_samples", str(SLOTS)),
    *("--weight_sync.max_lag", "2", "--weight_sync.on_stale", "wait", "--task.num_heldout", "1"),
)
"""Overrides of every run. Actors are numbered pool by pool, so FIRST_ACTOR is the actor of the first pool, `alone`."""


def run(folder: Path, name: str, policy: str, seed: int, num_steps: int) -> FinishedRun:
    """Run the two pools with a dispatch policy.

    Raises:
        MeasurementFailed: the run failed.
    """
    overrides = _overrides(policy, seed, num_steps)
    return train_on_cores(_config(folder), folder / f"{name}.log", overrides, only=FIRST_ACTOR)


def simulated(folder: Path, policy: str, seed: int, profile: Profile, steps: tuple[int, int]) -> float:
    """Simulate such a run with the costs of a profile; return samples per second after the steps that learn lengths."""
    learned, num_steps = steps[0], sum(steps)
    config = load_config(_config(folder), _overrides(policy, seed, num_steps))
    world = replace(world_of(config, profile), num_prompts=NUM_PROMPTS)
    return Simulation(world, seed).run(num_steps, learned).samples_per_s


def _config(folder: Path) -> Path:
    return write_setting(folder / "setting", Setting(1, 0, GROUPS), NUM_PROMPTS)


def _overrides(policy: str, seed: int, num_steps: int) -> tuple[str, ...]:
    steps = ("--learner.num_steps", str(num_steps), "--actors.group_size", str(GROUP_SIZE))
    return (*OVERRIDES, *steps, "--buffer.dispatch", policy, "--run.seed", str(seed))
