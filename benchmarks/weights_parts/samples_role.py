"""What the learner trains on: completions that the model itself sampled, as one step after another would get them.

Sampled once, by Transformers, and kept in a file: gradients have the size and the noise of real ones, and every
measurement trains the same.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from buffer.trajectory import Trajectory, VersionSpan
from common.staleness import PolicyVersion

GROUP_SIZE = 8
NEW_TOKENS = 24
TEMPLATE = "3 + 4 = 7\n{} + {} ="
_NUMBER = re.compile(r"-?\d+")


class Role:
    """Samples and keeps."""

    def __init__(self, *, model: str) -> None:
        """Load the model.

        Args:
            model: checkpoint folder.
        """
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def make(self, *, path: str, num_groups: int) -> None:
        """Sample sums of two numbers, K = GROUP_SIZE completions to each, and write them.

        Args:
            path: of the .npz file.
            num_groups: prompts.
        """
        random = np.random.default_rng(11)
        torch.manual_seed(11)
        sums = random.integers(10, 90, (num_groups, 2))
        prompts = [self._tokenizer(TEMPLATE.format(a, b))["input_ids"] for a, b in sums]
        length = max(len(prompt) for prompt in prompts)
        # of one length: a longer example instead of padding, so that nothing has to be masked
        prompts = [[*prompt[: length - len(prompt)], *prompt] for prompt in prompts]
        tokens = torch.tensor(prompts).repeat_interleave(GROUP_SIZE, 0)
        logprobs = []
        cache, new = None, tokens
        with torch.inference_mode():
            for _ in range(NEW_TOKENS):
                output = self._model(new, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = output.past_key_values
                chances = torch.log_softmax(output.logits[:, -1].float(), dim=-1)
                new = torch.multinomial(chances.exp(), 1)
                logprobs.append(chances.gather(1, new)[:, 0])
                tokens = torch.cat([tokens, new], 1)
        texts = self._tokenizer.batch_decode(tokens[:, length:])
        rewards = [closeness(text, int(sums[i // GROUP_SIZE].sum())) for i, text in enumerate(texts)]
        np.savez(
            path,
            tokens=tokens.numpy().astype(np.int32),
            logprobs=torch.stack(logprobs, 1).numpy().astype(np.float32),
            rewards=np.asarray(rewards, np.float64),
        )

    def close(self) -> None:
        """Nothing is open."""


def trajectories(path: Path) -> list[Trajectory]:
    """What `make` wrote, group by group."""
    with np.load(path) as saved:
        tokens, logprobs, rewards = saved["tokens"], saved["logprobs"], saved["rewards"]
    num = logprobs.shape[1]
    return [
        Trajectory(
            lease_id=0,
            attempt=0,
            group_id=i // GROUP_SIZE,
            sample_index=i % GROUP_SIZE,
            prompt_id=i // GROUP_SIZE,
            token_ids=tokens[i],
            prompt_length=tokens.shape[1] - num,
            logprobs=logprobs[i],
            spans=(VersionSpan(PolicyVersion(0, 0), 0, num),),
            reward=float(rewards[i]),
            finish_reason="length",
        )
        for i in range(len(tokens))
    ]


def closeness(text: str, right: int) -> float:
    """1 for the right number first, up to 0.5 for a near one, 0 where there is none."""
    found = _NUMBER.search(text)
    if found is None:
        return 0.0
    distance = abs(int(found.group()[:12]) - right)
    return 1.0 if distance == 0 else 0.5 / (1.0 + distance / 5.0)
