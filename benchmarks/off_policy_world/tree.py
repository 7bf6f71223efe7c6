"""All completions of a small vocabulary as one tree: a node is a prefix, a completion is a path.

Suffixes: V tokens of the vocabulary, L tokens of a completion, P prompts, N nodes, S completions of a prompt,
numbered by their tokens as digits. C = N * V choices: a token after a prefix.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUM_TOKENS = 4
LENGTH = 5
NUM_PROMPTS = 2
NUM_SEQUENCES = NUM_TOKENS**LENGTH
FIRST_OF_DEPTH = [sum(NUM_TOKENS**depth for depth in range(upto)) for upto in range(LENGTH)]
"""Number of the first node of each depth: nodes are numbered by depth, then by their tokens as digits."""
NUM_NODES = FIRST_OF_DEPTH[-1] + NUM_TOKENS ** (LENGTH - 1)
NUM_CHOICES = NUM_NODES * NUM_TOKENS


def _nodes_SL() -> Tensor:
    number_S = torch.arange(NUM_SEQUENCES)
    return torch.stack([FIRST_OF_DEPTH[t] + number_S // NUM_TOKENS ** (LENGTH - t) for t in range(LENGTH)], dim=1)


def _ancestors_NL(nodes_SL: Tensor, depth_N: Tensor) -> Tensor:
    """Read off the path of any completion through each node."""
    through_N = torch.empty(NUM_NODES, dtype=torch.int64)
    through_N[nodes_SL] = torch.arange(NUM_SEQUENCES)[:, None].expand(-1, LENGTH)
    above_NL = (depth_N[:, None] - torch.arange(LENGTH)).clamp_min(0)
    return nodes_SL[through_N].gather(1, above_NL)


TOKENS_SL = torch.arange(NUM_SEQUENCES)[:, None] // NUM_TOKENS ** torch.arange(LENGTH - 1, -1, -1) % NUM_TOKENS
"""The tokens of each completion."""
NODES_SL = _nodes_SL()
"""The prefix before each of them."""
CHOICES_SL = NODES_SL * NUM_TOKENS + TOKENS_SL
"""The choice that each of them is."""
DEPTH_N = torch.arange(LENGTH).repeat_interleave(NUM_TOKENS ** torch.arange(LENGTH))
"""Tokens of each prefix."""
LAST_TOKEN_N = (torch.arange(NUM_NODES) - torch.tensor(FIRST_OF_DEPTH)[DEPTH_N]) % NUM_TOKENS
"""Last token of each prefix; without meaning for the empty one."""
ANCESTORS_NL = _ancestors_NL(NODES_SL, DEPTH_N)
"""The node itself, its parent, its parent's parent and so on; the empty prefix where there are no more."""
IS_ANCESTOR_NL = DEPTH_N[:, None] >= torch.arange(LENGTH)
"""False where there are no more."""
