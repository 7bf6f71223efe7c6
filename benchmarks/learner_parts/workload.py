"""What is trained: long-tailed sequences as the buffer would hand them to the learner, and small models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from buffer.trajectory import Trajectory, VersionSpan
from common.staleness import PolicyVersion

MEDIAN, SIGMA, LONGEST, TOKEN_BUDGET = 200, 1.0, 2048, 4096
GROUP_SIZE = 8
PROMPT = 64
"""Tokens of a prompt, or half of the sequence where that is less."""


def long_tailed(
    num: int, seed: int, *, median: float = MEDIAN, sigma: float = SIGMA, longest: int = LONGEST
) -> list[int]:
    """Log-normal lengths in tokens, in order of arrival, clipped to 2..longest."""
    drawn = np.random.default_rng(seed).lognormal(math.log(median), sigma, num)
    return [int(length) for length in np.clip(np.rint(drawn), 2, longest)]


def trajectories(lengths: Sequence[int], vocab_size: int, seed: int) -> list[Trajectory]:
    """Samples of random tokens in groups of GROUP_SIZE, with rewards and behaviour log-probabilities.

    Args:
        lengths: of prompt and completion together.
        vocab_size: V; the behaviour policy is uniform over it.
        seed: of tokens and rewards.
    """
    random = np.random.default_rng(seed)
    rows = []
    for number, length in enumerate(lengths):
        prompt_length = min(PROMPT, length // 2)
        completion = length - prompt_length
        rows.append(
            Trajectory(
                lease_id=0,
                attempt=0,
                group_id=number // GROUP_SIZE,
                sample_index=number % GROUP_SIZE,
                prompt_id=number // GROUP_SIZE,
                token_ids=random.integers(0, vocab_size, length).astype(np.int32),
                prompt_length=prompt_length,
                logprobs=np.full(completion, -math.log(vocab_size), np.float32),
                spans=(VersionSpan(PolicyVersion(0, 0), 0, completion),),
                reward=float(random.random()),
                finish_reason="stop",
            )
        )
    return rows


def small_llama(folder: Path, *, hidden_size: int, num_layers: int, vocab_size: int) -> Path:
    """A random Llama as a checkpoint folder; heads of 64, MLP 8/3 wide, tied embeddings off."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3 // 16 * 16,
        num_hidden_layers=num_layers,
        num_attention_heads=max(1, hidden_size // 64),
        num_key_value_heads=max(1, hidden_size // 64),
        max_position_embeddings=LONGEST,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
