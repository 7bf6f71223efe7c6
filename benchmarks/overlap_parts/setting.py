"""The config, prompts and reward of the runs, written into a folder."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from benchmarks.overlap_parts.long_tail import CLASSES

PARTS = Path(__file__).resolve().parent
GROUP_SIZE = 4
MAX_NEW_TOKENS = 240
NUM_PROMPTS = 4096
PROMPT_TOKENS = 8
SEED = 0


@dataclass(frozen=True)
class Setting:
    """Sizes of both runs."""

    num_steps: int
    num_warmup: int
    """Steps at the beginning that do not count."""
    groups_per_step: int
    """Prompts of a step, GROUP_SIZE samples each. More of them make training longer, and generation hardly."""

    @property
    def samples_per_step(self) -> int:
        """Also what the actor keeps in flight: one step's samples at once, as a synchronous system would."""
        return self.groups_per_step * GROUP_SIZE


def write_setting(folder: Path, setting: Setting) -> Path:
    """Write prompts and config.

    Args:
        folder: is made.
        setting: sizes.

    Returns:
        The config's path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(SEED)
    questions = [f"{number:07d}{chance.choice(CLASSES)}" for number in range(NUM_PROMPTS)]
    lines = [json.dumps({"question": question}) for question in questions]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    path = folder / "overlap.toml"
    path.write_text(_config(folder, setting))
    return path


def _config(folder: Path, setting: Setting) -> str:
    return f"""\
[model]
path = "{folder / "long_tail_model"}"
recipe = "{PARTS / "long_tail.py"}"

[task]
type = "file"
path = "{folder / "prompts.jsonl"}"
rewards = ["{PARTS / "reward.py"}:even"]
heldout_share = 0.01
num_heldout = 8

[algorithm]
type = "trajectory_balance"

[actors]
num_actors = 1
group_size = {GROUP_SIZE}
max_prompt_tokens = {PROMPT_TOKENS}
max_new_tokens = {MAX_NEW_TOKENS}
max_running_samples = {setting.samples_per_step}

[learner]
num_stages = 1
num_steps = {setting.num_steps}
groups_per_step = {setting.groups_per_step}
token_budget = 1024
learning_rate = 1e-8
checkpoint_every = 1000

[tracking]
wandb = "disabled"

[run]
seed = {SEED}
"""
