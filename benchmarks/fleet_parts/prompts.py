"""FleetPrompts: the prompts and lengths of a real fleet, for the simulation of this fleet.

The config determines the order of prompts in the buffer, the seeds of samples and the lengths of sleeping engines.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from benchmarks.fleet_parts.setting import score_of

from leeway.actors.sample import group_seed
from leeway.actors.tasks import load_encoded
from leeway.buffer.groups import order_of
from leeway.launch.config import Config
from leeway.planning.lengths import LengthDistribution, PromptStream


class FleetPrompts(PromptStream):
    """Prompt stream determined by the config instead of a seed."""

    def __init__(self, config: Config, distribution: LengthDistribution) -> None:
        """Load the prompts of the config's task."""
        task, _ = load_encoded(config.task, Path(config.model.path), config.actors.max_prompt_tokens)
        tokens = [problem.token_ids for problem in task.train]
        super().__init__(distribution, len(tokens), config.actors.group_size, config.run.seed)
        self._scores = np.array([score_of(*ids) for ids in tokens])
        self._seed, self.num_prompts = config.run.seed, len(tokens)
        self.mean_prompt_tokens = sum(map(len, tokens)) / len(tokens)
        self._cursor = self._group = 0

    def anew(self) -> FleetPrompts:
        """Restart at the first prompt; return this object."""
        self._cursor = self._group = 0
        return self

    def next(self) -> int:
        """Return the next prompt in the buffer's order."""
        epoch, position = divmod(self._cursor, self.num_prompts)
        self._cursor += 1
        return int(order_of(self._seed, epoch, self.num_prompts)[position])

    def lengths(self, prompt: int) -> list[float]:
        """Return the length in tokens of each sample of the next group, whose prompt is `prompt`."""
        self._group += 1
        seeds = [group_seed(self._seed, self._group, 1) + index for index in range(self._group_size)]
        scores = [score_of("sample", seed) for seed in seeds]
        return self._distribution.lengths(float(self._scores[prompt]), scores).tolist()
