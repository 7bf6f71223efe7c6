"""Asynchronous online DPO: the best answer of a group against its worst.

Objective:
    h = log(pi / pi_ref)(y+) - log(pi / pi_ref)(y-), with y+ = argmax r and y- = argmin r of a group
    sigmoid: L = mean over pairs of -log sigmoid(beta * h)
    ipo:     L = mean over pairs of (h - 1 / (2 * beta))^2
    log(pi / pi_ref)(y) is the sum over the tokens of y, as in the papers; variants "..._mean" take their mean, as TRL's
    ipo does, so that a margin does not grow with length.

Estimator:
    One pair per group, or per prompt with `compare = "prompt"`: then best and worst may come from different
    policy versions. Among equal rewards the first sample in the group counts. A group whose rewards are all
    equal has no preference and no gradient: it is dropped, counted in `dpo/tied_frac`, and leaves the mean.
    An answer without an end-of-sequence token loses `missing_eos_penalty` before the comparison.

Where the off-policy correction enters:
    A preference between two answers holds whoever wrote them, so the loss has none. Its gradient has: each token's
    share is multiplied by pi / mu, bounded by the corrections (token_tis unless a run says otherwise). Without it the
    worse answers of stale pairs are pushed down long after the policy has given them up, and under delay it collapses.

What we left out:
    All pairs of a group, label smoothing, and SimPO, which has no reference.

References:
    Asynchronous RLHF, arXiv 2410.18252, section 3; DPO, arXiv 2305.18290, equation 7; IPO, arXiv 2310.12036, eq. 17.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor
from torch.nn import functional as F

from algorithms.base import BASIC, Algorithm, GroupSection, LossInputs, LossOutput, Needs, share_of
from algorithms.corrections import WeighedSection, weigh_gradient


class OnlineDPOConfig(WeighedSection, GroupSection):
    """Knobs of online DPO."""

    type: Literal["online_dpo"] = "online_dpo"
    beta: PositiveFloat = Field(
        default=0.1, description="Strength of the pull towards the reference.", json_schema_extra=BASIC
    )
    variant: Literal["sigmoid", "ipo", "sigmoid_mean", "ipo_mean"] = Field(
        default="sigmoid",
        description="Loss of a pair. An answer's log ratio is the sum over its tokens; '_mean': their mean, whatever "
        "its length.",
    )
    missing_eos_penalty: NonNegativeFloat = Field(
        default=1.0, description="Taken from the reward of an answer that ended by length."
    )

    @property
    def needs(self) -> Needs:
        return Needs(
            groups=True,
            prompts=self.compare == "prompt",
            reference=True,
            behaviour=bool(self.corrections),
            separable=self.compare,
        )


def _first_of_each_group(chosen_B: Tensor, group_B: Tensor, num_groups: int) -> Tensor:
    """Index of the first sequence of each group with `chosen_B` true: B, B -> G. Every group must have one."""
    num_sequences = chosen_B.numel()
    index_B = torch.arange(num_sequences, device=chosen_B.device)
    candidate_B = torch.where(chosen_B, index_B, num_sequences)
    first_G = torch.full((num_groups,), num_sequences, device=chosen_B.device)
    return first_G.scatter_reduce(0, group_B, candidate_B, reduce="amin")


def best_and_worst(rewards_B: Tensor, group_B: Tensor, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pair of every group.

    Returns:
        best_G, worst_G: int64, sequence indices; tied_G: bool, all rewards of the group are equal.
    """
    top_G = torch.full((num_groups,), -torch.inf, dtype=rewards_B.dtype, device=rewards_B.device)
    top_G = top_G.scatter_reduce(0, group_B, rewards_B, reduce="amax")
    low_G = torch.full_like(top_G, torch.inf).scatter_reduce(0, group_B, rewards_B, reduce="amin")
    best_G = _first_of_each_group(rewards_B == top_G[group_B], group_B, num_groups)
    worst_G = _first_of_each_group(rewards_B == low_G[group_B], group_B, num_groups)
    return best_G, worst_G, top_G == low_G


def online_dpo(config: OnlineDPOConfig, inputs: LossInputs) -> LossOutput:
    """Evaluate the loss on a whole batch; see the module's docstring for the formula.

    Returns:
        The loss (0 where every group is tied), and metrics `dpo/tied_frac` (share of groups dropped), and, None
        where there is no pair, `dpo/margin` (mean beta * h), `dpo/accuracy` (share of pairs with h > 0) and
        `dpo/cross_frac` (share of pairs between two groups of a prompt, so mostly between two policy versions).
    """
    lease_B = inputs.group_B
    inputs, weights_T, shares = weigh_gradient(config.compared(inputs), config.corrections)
    rewards_B = inputs.penalised_rewards_B(config.missing_eos_penalty)
    best_G, worst_G, tied_G = best_and_worst(rewards_B, inputs.group_B, inputs.num_groups)
    of_answer = inputs.sum_per_sequence if config.variant in ("sigmoid", "ipo") else inputs.mean_per_sequence
    log_ratio_B = of_answer(inputs.logprobs_T - inputs.reference_logprobs_T)
    # how many pairs there are is not asked for: a GPU would have to finish first
    num_pairs = (~tied_G).sum()
    # tied groups leave before anything is computed of them, so that none has a gradient that is not finite
    margin_G = torch.where(tied_G, 0.0, log_ratio_B[best_G] - log_ratio_B[worst_G])
    if config.variant.startswith("sigmoid"):
        loss_G = -F.logsigmoid(config.beta * margin_G)
    else:
        loss_G = (margin_G - 1 / (2 * config.beta)).square()
    # a sum over no pairs is 0 and still part of the graph, where a mean would be NaN
    loss = torch.where(tied_G, 0.0, loss_G).sum() / num_pairs.clamp_min(1)
    margin_G = margin_G.detach()
    is_cross_G = (lease_B[best_G] != lease_B[worst_G]) & ~tied_G
    return LossOutput(
        loss,
        {
            "dpo/tied_frac": share_of(tied_G, inputs.num_groups),
            "dpo/margin": config.beta * margin_G.sum() / num_pairs,
            "dpo/accuracy": share_of(margin_G > 0, num_pairs),
            "dpo/cross_frac": share_of(is_cross_G, num_pairs),
            **shares,
        },
        weights_T,
    )


ALGORITHM = Algorithm(OnlineDPOConfig, online_dpo)
