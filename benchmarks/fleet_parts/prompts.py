"""FleetPrompts: the very prompts and lengths that a fleet will have, for its simulation.

The buffer's order of prompts, the seeds of samples and the lengths of a sleeping engine all follow from the config.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from actors.sample import sample_seed
from actors.tasks import load_encoded
from benchmarks.fleet_parts.setting import score_of
from buffer.groups import order_of
from launch.config import Config
from planning.lengths import LengthLaw, PromptStream


class FleetPrompts(PromptStream):
    """The stream, where the config and not a seed says what comes."""

    def __init__(self, config: Config, law: LengthLaw) -> None:
        """Of the task of a config."""
        task, _ = load_encoded(config.task, Path(config.model.path), config.actors.max_prompt_tokens)
        tokens = [problem.token_ids for problem in task.train]
        super().__init__(law, len(tokens), config.actors.group_size, config.run.seed)
        self._scores = np.array([score_of(*ids) for ids in tokens])
        self._seed, self.num_prompts = config.run.seed, len(tokens)
        self.mean_prompt_tokens = sum(map(len, tokens)) / len(tokens)
        self._cursor = self._group = 0

    def anew(self) -> FleetPrompts:
        """From the first prompt on."""
        self._cursor = self._group = 0
        return self

    def next(self) -> int:
        """The next prompt of the data's order."""
        epoch, position = divmod(self._cursor, self.num_prompts)
        self._cursor += 1
        return int(order_of(self._seed, epoch, self.num_prompts)[position])

    def lengths(self, prompt: int) -> list[float]:
        """Tokens of each sample of the next group, which is of this prompt."""
        self._group += 1
        seeds = [sample_seed(self._seed, self._group, index, 1) for index in range(self._group_size)]
        return self._law.lengths(float(self._scores[prompt]), [score_of("sample", seed) for seed in seeds]).tolist()
