"""FleetPrompts: the very prompts and lengths that a fleet will have, for its simulation.

The buffer's order of prompts, the seeds of samples and the lengths of a sleeping engine all follow from the config.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

from actors.sample import sample_seed
from actors.tasks import load_task
from actors.tasks.task import PromptCodec
from buffer.leases import _order
from launch.config import Config
from planning.lengths import LengthLaw, score_of


class FleetPrompts:
    """As `planning.world.Prompts`."""

    def __init__(self, config: Config, law: LengthLaw) -> None:
        """Of the task of a config."""
        codec = PromptCodec(Path(config.model.path or ""), config.task.chat, config.task.system_prompt)
        task = load_task(config.task).encoded(codec.encode, config.actors.max_prompt_tokens)
        tokens = [problem.token_ids for problem in task.train]
        self._scores = [score_of(*ids) for ids in tokens]
        self._law, self._seed, self._group_size = law, config.run.seed, config.actors.group_size
        self.num_prompts = len(tokens)
        self.mean_prompt_tokens = sum(map(len, tokens)) / len(tokens)
        self._cursor = self._group = 0
        self._returned: deque[int] = deque()

    def anew(self) -> FleetPrompts:
        """From the first prompt on."""
        self._cursor = self._group = 0
        self._returned.clear()
        return self

    def next(self) -> tuple[int, list[float]]:
        """A prompt, and the tokens of each of its samples."""
        self._group += 1
        if self._returned:
            prompt = self._returned.popleft()
        else:
            epoch, position = divmod(self._cursor, self.num_prompts)
            self._cursor += 1
            prompt = int(_order(self._seed, epoch, self.num_prompts)[position])
        seeds = [sample_seed(self._seed, self._group, index, 1) for index in range(self._group_size)]
        return prompt, self._law.lengths(self._scores[prompt], [score_of("sample", seed) for seed in seeds]).tolist()

    def give_back(self, prompt: int) -> None:
        """A group of it was dropped."""
        self._returned.append(prompt)
