"""Prompts with known rewards, a reference policy, and the optimum that both define."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.off_policy_world.policy import WIDTH, TreePolicy
from benchmarks.off_policy_world.tree import CHOICES_SL, LENGTH, NUM_PROMPTS, NUM_TOKENS, TOKENS_SL

BETA = 0.5
"""Of the optimum pi* ~ pi_ref * exp(r / beta)."""


@dataclass(frozen=True)
class World:
    """What is to be learned, and how far a policy is from it."""

    rewards_PS: Tensor
    """Of every completion; mean 0 and standard deviation 1 over the completions of a prompt."""
    reference: TreePolicy
    """Every run starts from it."""
    optimum_logprobs_PS: Tensor
    """log pi*, float64."""

    @classmethod
    def made_from(cls, seed: int) -> World:
        """A world of random rewards, with structure: tokens by their place, neighbours, and the first with the last."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            place_PLV = torch.randn(NUM_PROMPTS, LENGTH, NUM_TOKENS)
            neighbours_PVV = torch.randn(NUM_PROMPTS, NUM_TOKENS, NUM_TOKENS)
            ends_PVV = torch.randn(NUM_PROMPTS, NUM_TOKENS, NUM_TOKENS)
            reference = TreePolicy()
            # logits with a standard deviation of 1: it has preferences, and excludes nothing
            torch.nn.init.normal_(reference.head.weight, std=WIDTH**-0.5)
        rewards_PS = place_PLV[:, torch.arange(LENGTH), TOKENS_SL].sum(-1)
        rewards_PS = rewards_PS + neighbours_PVV[:, TOKENS_SL[:, :-1], TOKENS_SL[:, 1:]].sum(-1)
        rewards_PS = rewards_PS + ends_PVV[:, TOKENS_SL[:, 0], TOKENS_SL[:, -1]]
        rewards_PS = (rewards_PS - rewards_PS.mean(1, keepdim=True)) / rewards_PS.std(1, keepdim=True)
        return cls(rewards_PS, reference, optimum_logprobs(sequence_logprobs(reference), rewards_PS))

    def kl(self, logprobs_PS: Tensor) -> float:
        """KL(pi || pi*) in nats, mean over prompts, of a policy given by log pi of every completion."""
        return float((logprobs_PS.exp() * (logprobs_PS - self.optimum_logprobs_PS)).sum(1).mean())

    def expected_reward(self, logprobs_PS: Tensor) -> float:
        """Mean over prompts, of a policy given by log pi of every completion."""
        return float((logprobs_PS.exp() * self.rewards_PS).sum(1).mean())


def optimum_logprobs(reference_logprobs_PS: Tensor, rewards_PS: Tensor) -> Tensor:
    """The log pi*, normalised by enumeration: P, S."""
    return torch.log_softmax(reference_logprobs_PS + rewards_PS.double() / BETA, dim=1)


def sequence_logprobs(policy: TreePolicy) -> Tensor:
    """The log pi of every completion, float64: P, S."""
    with torch.no_grad():
        return of_sequences(policy()[0])


def of_sequences(choices_PC: Tensor) -> Tensor:
    """From log-probabilities of choices, good to 1e-7, to those of completions, float64: P, C -> P, S."""
    return choices_PC.double()[:, CHOICES_SL].sum(-1)
