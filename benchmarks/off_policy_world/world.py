"""A world small enough to enumerate, so that the optimal policy pi* is known exactly.

The completions over a small vocabulary form a tree: a node is a prefix, a completion is a path. A small transformer is
evaluated on all prefixes at once. Rewards and a reference policy define the optimum; the KL to the optimum is exact.

Suffixes of names are dimensions: V tokens of the vocabulary, L tokens of a completion, P prompts, N nodes, and S
completions of a prompt, numbered by their tokens as digits. C = N * V counts choices; a choice is a token after a
prefix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_TOKENS = 4
LENGTH = 5
NUM_PROMPTS = 2
NUM_SEQUENCES = NUM_TOKENS**LENGTH
FIRST_OF_DEPTH = [sum(NUM_TOKENS**depth for depth in range(upto)) for upto in range(LENGTH)]
"""Index of the first node of each depth; nodes are ordered by depth, then by their tokens as digits."""
NUM_NODES = FIRST_OF_DEPTH[-1] + NUM_TOKENS ** (LENGTH - 1)
NUM_CHOICES = NUM_NODES * NUM_TOKENS


def _nodes_SL() -> Tensor:
    number_S = torch.arange(NUM_SEQUENCES)
    return torch.stack([FIRST_OF_DEPTH[t] + number_S // NUM_TOKENS ** (LENGTH - t) for t in range(LENGTH)], dim=1)


def _ancestors_NL(nodes_SL: Tensor, depth_N: Tensor) -> Tensor:
    """Return the ancestors of each node, read from the path of any completion through the node."""
    through_N = torch.empty(NUM_NODES, dtype=torch.int64)
    through_N[nodes_SL] = torch.arange(NUM_SEQUENCES)[:, None].expand(-1, LENGTH)
    above_NL = (depth_N[:, None] - torch.arange(LENGTH)).clamp_min(0)
    return nodes_SL[through_N].gather(1, above_NL)


TOKENS_SL = torch.arange(NUM_SEQUENCES)[:, None] // NUM_TOKENS ** torch.arange(LENGTH - 1, -1, -1) % NUM_TOKENS
"""Tokens of each completion."""
NODES_SL = _nodes_SL()
"""Prefix before each token of each completion."""
CHOICES_SL = NODES_SL * NUM_TOKENS + TOKENS_SL
"""Choice of each token of each completion."""
DEPTH_N = torch.arange(LENGTH).repeat_interleave(NUM_TOKENS ** torch.arange(LENGTH))
"""Number of tokens of each prefix."""
LAST_TOKEN_N = (torch.arange(NUM_NODES) - torch.tensor(FIRST_OF_DEPTH)[DEPTH_N]) % NUM_TOKENS
"""Last token of each prefix; the value of the empty prefix has no meaning."""
ANCESTORS_NL = _ancestors_NL(NODES_SL, DEPTH_N)
"""Each node, its parent, its grandparent and so on, filled up with the empty prefix."""
IS_ANCESTOR_NL = DEPTH_N[:, None] >= torch.arange(LENGTH)
"""False for the fill values of ANCESTORS_NL."""


# --- the policy ----------------------------------------------------------------------------------


WIDTH = 32
NUM_HEADS = 2
NUM_LAYERS = 2


class Block(nn.Module):
    """Layer with attention of each prefix to its own prefixes, followed by a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.feed_norm = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden_PNW: Tensor) -> Tensor:
        """Map P, N, WIDTH to P, N, WIDTH."""
        projected_PNW = self.query_key_value(self.attention_norm(hidden_PNW))
        query, key, value = projected_PNW.unflatten(-1, (3, NUM_HEADS, -1)).unbind(2)
        # gather only the few ancestors of every node, in the dimension after P, N, because masking all pairs costs more
        score = (query.unsqueeze(2) * key[:, ANCESTORS_NL]).sum(-1) / math.sqrt(WIDTH // NUM_HEADS)
        attention = score.masked_fill(~IS_ANCESTOR_NL.unsqueeze(-1), -math.inf).softmax(2)
        seen = (attention.unsqueeze(-1) * value[:, ANCESTORS_NL]).sum(2)
        hidden_PNW = hidden_PNW + self.mix(seen.flatten(2))
        fed_PNW: Tensor = self.narrow(F.gelu(self.widen(self.feed_norm(hidden_PNW))))
        return hidden_PNW + fed_PNW


class TreePolicy(nn.Module):
    """A causal transformer over a prompt token and a completion, with a value head that starts at 0."""

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
        """Return the log-probability of each choice, shape (P, C), and the value of each prefix, shape (P, N)."""
        input_PN = LAST_TOKEN_N.repeat(NUM_PROMPTS, 1)
        input_PN[:, 0] = NUM_TOKENS + torch.arange(NUM_PROMPTS)
        hidden_PNW = self.norm(self.blocks(self.embed(input_PN) + self.place(DEPTH_N)))
        return F.log_softmax(self.head(hidden_PNW), dim=-1).flatten(1), self.value_head(hidden_PNW).squeeze(-1)


# --- rewards, reference and optimum --------------------------------------------------------------


BETA = 0.5
"""Beta of the optimum pi* ~ pi_ref * exp(r / beta)."""


@dataclass(frozen=True)
class World:
    """Rewards, reference policy and optimum, with exact distances of a policy to the optimum."""

    rewards_PS: Tensor
    """Reward of every completion; mean 0 and standard deviation 1 over the completions of a prompt."""
    reference: TreePolicy
    """Reference policy, from which every run starts."""
    optimum_logprobs_PS: Tensor
    """log pi* of every completion, in float64."""

    @classmethod
    def made_from(cls, seed: int) -> World:
        """Make a world with random scores of tokens by position, adjacent tokens, and the first token with the last."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            place_PLV = torch.randn(NUM_PROMPTS, LENGTH, NUM_TOKENS)
            neighbours_PVV = torch.randn(NUM_PROMPTS, NUM_TOKENS, NUM_TOKENS)
            ends_PVV = torch.randn(NUM_PROMPTS, NUM_TOKENS, NUM_TOKENS)
            reference = TreePolicy()
            # logits have a standard deviation of 1, so that the reference has preferences but excludes no token
            torch.nn.init.normal_(reference.head.weight, std=WIDTH**-0.5)
        rewards_PS = place_PLV[:, torch.arange(LENGTH), TOKENS_SL].sum(-1)
        rewards_PS = rewards_PS + neighbours_PVV[:, TOKENS_SL[:, :-1], TOKENS_SL[:, 1:]].sum(-1)
        rewards_PS = rewards_PS + ends_PVV[:, TOKENS_SL[:, 0], TOKENS_SL[:, -1]]
        rewards_PS = (rewards_PS - rewards_PS.mean(1, keepdim=True)) / rewards_PS.std(1, keepdim=True)
        return cls(rewards_PS, reference, optimum_logprobs(sequence_logprobs(reference), rewards_PS))

    def optimum_PC(self) -> Tensor:
        """Return log pi* of each choice in float32, like the log-probabilities of a policy: P, C."""
        total_PN = torch.full((NUM_PROMPTS, NUM_NODES), -math.inf, dtype=torch.float64)
        total_PC = torch.full((NUM_PROMPTS, NUM_CHOICES), -math.inf, dtype=torch.float64)
        for t in range(LENGTH):
            logprobs_PS = self.optimum_logprobs_PS
            total_PN = _logaddexp_at(total_PN, NODES_SL[:, t], logprobs_PS)
            total_PC = _logaddexp_at(total_PC, CHOICES_SL[:, t], logprobs_PS)
        return (total_PC - total_PN.repeat_interleave(NUM_TOKENS, dim=1)).float()

    def kl(self, logprobs_PS: Tensor) -> float:
        """Return KL(pi || pi*) in nats, as a mean over prompts, from log pi of every completion."""
        return float((logprobs_PS.exp() * (logprobs_PS - self.optimum_logprobs_PS)).sum(1).mean())

    def expected_reward(self, logprobs_PS: Tensor) -> float:
        """Return the expected reward of a policy, as a mean over prompts, from log pi of every completion."""
        return float((logprobs_PS.exp() * self.rewards_PS).sum(1).mean())


def _logaddexp_at(total: Tensor, where_S: Tensor, logprobs_PS: Tensor) -> Tensor:
    """Sum probabilities that have the same index; arguments and result are logarithms."""
    top = logprobs_PS.max()
    added = torch.zeros_like(total).index_add(1, where_S, (logprobs_PS - top).exp())
    return torch.logaddexp(total, added.log() + top)


def optimum_logprobs(reference_logprobs_PS: Tensor, rewards_PS: Tensor) -> Tensor:
    """Return log pi*, normalized by enumeration: P, S."""
    return torch.log_softmax(reference_logprobs_PS + rewards_PS.double() / BETA, dim=1)


def sequence_logprobs(policy: TreePolicy) -> Tensor:
    """Return log pi of every completion, float64: P, S."""
    with torch.no_grad():
        return of_sequences(policy()[0])


def of_sequences(choices_PC: Tensor) -> Tensor:
    """Sum log-probabilities of choices to log-probabilities of completions, exact to 1e-7: float64, P, C -> P, S."""
    return choices_PC.double()[:, CHOICES_SL].sum(-1)
