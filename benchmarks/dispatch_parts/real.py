"""Two pools of a real engine each: one has a core of its own, the other shares its core with the learner and the rest.

The model is that of `benchmarks/overlap.py`, whose answers end at random: the prompt explains little of their length,
so it is what runs long that goes on on the faster engine.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.lib.runs import FinishedRun
from benchmarks.overlap import train_on_cores
from benchmarks.overlap_parts.long_tail import GROUP_SIZE, Setting, write_setting
from launch.config import load_config
from planning.plans import world_of
from planning.profile import Profile
from planning.simulator import Simulation

GROUPS, SLOTS, NUM_PROMPTS = 8, 16, 96
FIRST_ACTOR = "actor-0"
SAID = (
    *("--pools.alone.role", "actors", "--pools.alone.count", "1"),
    *("--pools.beside.role", "actors", "--pools.beside.count", "1"),
    *("--actors.num_actors", "2", "--actors.max_running_samples", str(SLOTS)),
    *("--weight_sync.max_lag", "2", "--weight_sync.on_stale", "wait", "--task.num_heldout", "1"),
)
"""Actors are numbered pool by pool, in the order of the config."""


def run(folder: Path, name: str, policy: str, seed: int, num_steps: int) -> FinishedRun:
    """A run with this policy.

    Raises:
        MeasurementFailed: it did not end well.
    """
    said = _said(policy, seed, num_steps)
    return train_on_cores(_config(folder), folder / f"{name}.log", said, only=FIRST_ACTOR)


def simulated(folder: Path, policy: str, seed: int, profile: Profile, steps: tuple[int, int]) -> float:
    """Trained samples per second of the same run, simulated at the costs of a profile; the first steps do not count."""
    learned, num_steps = steps[0], sum(steps)
    config = load_config(_config(folder), _said(policy, seed, num_steps))
    world = replace(world_of(config, profile), num_prompts=NUM_PROMPTS)
    return Simulation(world, seed).run(num_steps, learned).samples_per_s


def _config(folder: Path) -> Path:
    return write_setting(folder / "setting", Setting(1, 0, GROUPS), NUM_PROMPTS)


def _said(policy: str, seed: int, num_steps: int) -> tuple[str, ...]:
    steps = ("--learner.num_steps", str(num_steps), "--actors.group_size", str(GROUP_SIZE))
    return (*SAID, *steps, "--buffer.dispatch", policy, "--run.seed", str(seed))
