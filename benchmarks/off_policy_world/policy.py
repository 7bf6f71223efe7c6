"""A small transformer that is evaluated on every prefix of every completion at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.off_policy_world.tree import (
    ANCESTORS_NL,
    DEPTH_N,
    IS_ANCESTOR_NL,
    LAST_TOKEN_N,
    LENGTH,
    NUM_PROMPTS,
    NUM_TOKENS,
)

WIDTH = 32
NUM_HEADS = 2
NUM_LAYERS = 2


class Block(nn.Module):
    """Attention of each prefix to the prefixes that it begins with, then a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.feed_norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden_PNW: Tensor) -> Tensor:
        """P, N, WIDTH -> P, N, WIDTH."""
        projected_PNW = self.query_key_value(self.attention_norm(hidden_PNW))
        query, key, value = projected_PNW.unflatten(-1, (3, NUM_HEADS, -1)).unbind(2)
        # every node meets its own few ancestors, which come next after P, N; masking all pairs would cost more
        score = (query.unsqueeze(2) * key[:, ANCESTORS_NL]).sum(-1) / math.sqrt(WIDTH // NUM_HEADS)
        attention = score.masked_fill(~IS_ANCESTOR_NL.unsqueeze(-1), -math.inf).softmax(2)
        seen = (attention.unsqueeze(-1) * value[:, ANCESTORS_NL]).sum(2)
        hidden_PNW = hidden_PNW + self.mix(seen.flatten(2))
        fed_PNW: Tensor = self.narrow(F.gelu(self.widen(self.feed_norm(hidden_PNW))))
        return hidden_PNW + fed_PNW


class TreePolicy(nn.Module):
    """A causal transformer over a prompt token and a completion, with a value head that begins at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_TOKENS + NUM_PROMPTS, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_TOKENS)
        self.value_head = nn.Linear(WIDTH, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Log-probability of each choice and value of each prefix: P, C and P, N."""
        input_PN = LAST_TOKEN_N.repeat(NUM_PROMPTS, 1)
        input_PN[:, 0] = NUM_TOKENS + torch.arange(NUM_PROMPTS)
        hidden_PNW = self.norm(self.blocks(self.embed(input_PN) + self.place(DEPTH_N)))
        return F.log_softmax(self.head(hidden_PNW), dim=-1).flatten(1), self.value_head(hidden_PNW).squeeze(-1)
