"""Asynchronous online DPO: preference loss between the best and the worst answer of a group.

Objective:
    h = log(pi / pi_ref)(y+) - log(pi / pi_ref)(y-), with y+ = argmax r and y- = argmin r of a group
    sigmoid: L = mean over pairs of -log sigmoid(beta * h)
    ipo:     L = mean over pairs of (h - 1 / (2 * beta))^2
    log(pi / pi_ref)(y) is the sum over the tokens of y, as in the papers. The variants "..._mean" use the mean, as in
    TRL's ipo, so that the margin does not grow with length.

Estimator:
    One pair per group, or per prompt with `compare = "prompt"`, where best and worst may come from different policy
    versions. Among equal rewards, the first sample in the group is used. A group with only equal rewards has no
    preference and no gradient: it is dropped, counted in `dpo/tied_frac`, and excluded from the mean.

Where the off-policy correction enters:
    A preference between two answers does not depend on the policy that sampled them, so the loss has no correction. The
    gradient has a correction: the contribution of each token is multiplied by pi / mu, bounded by `corrections`
    (default: token_tis). Without this factor, stale pairs keep lowering the probability of answers that the policy no
    longer produces, and the policy collapses under delay.

What we left out:
    All pairs of a group, label smoothing, and SimPO, which has no reference.

References:
    Asynchronous RLHF, arXiv 2410.18252, section 3; DPO, arXiv 2305.18290, equation 7; IPO, arXiv 2310.12036, eq. 17.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor
from torch.nn import functional as F

from leeway.algorithms.base import BASIC, Algorithm, GroupSection, LossInputs, LossOutput, Needs, share_of
from leeway.algorithms.corrections import WeighedSection, weigh_gradient


class OnlineDPOConfig(WeighedSection, GroupSection):
    """Settings of online DPO."""

    type: Literal["online_dpo"] = "online_dpo"
    beta: PositiveFloat = Field(
        default=0.1, description="Strength of the pull towards the reference.", json_schema_extra=BASIC
    )
    variant: Literal["sigmoid", "ipo", "sigmoid_mean", "ipo_mean"] = Field(
        default="sigmoid",
        description="Loss of a pair, on log ratios summed over tokens; '_mean': averaged over tokens.",
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
    """Return the index of the first chosen sequence of each group, which must have at least one: B, B -> G."""
    num_sequences = chosen_B.numel()
    index_B = torch.arange(num_sequences, device=chosen_B.device)
    candidate_B = torch.where(chosen_B, index_B, num_sequences)
    first_G = torch.full((num_groups,), num_sequences, device=chosen_B.device)
    return first_G.scatter_reduce(0, group_B, candidate_B, reduce="amin")


def best_and_worst(rewards_B: Tensor, group_B: Tensor, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best and the worst sequence of every group.

    Returns:
        best_G, worst_G: int64, sequence indices; tied_G: bool, whether all rewards of the group are equal.
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
        The loss (0 if every group is tied), and metrics: `dpo/tied_frac` (fraction of groups dropped), `dpo/margin`
        (mean beta * h), `dpo/accuracy` (fraction of pairs with h > 0) and `dpo/cross_frac` (fraction of pairs between
        two groups of a prompt, mostly of two policy versions). Without a pair, all except `dpo/tied_frac` are None.
    """
    lease_B = inputs.group_B
    inputs, weights_T, shares = weigh_gradient(config.compared(inputs), config.corrections)
    best_G, worst_G, tied_G = best_and_worst(inputs.rewards_B, inputs.group_B, inputs.num_groups)
    reduce = inputs.sum_per_sequence if config.variant in ("sigmoid", "ipo") else inputs.mean_per_sequence
    log_ratio_B = reduce(inputs.logprobs_T - inputs.reference_logprobs_T)
    # keep a tensor, because reading the number would synchronize with the GPU
    num_pairs = (~tied_G).sum()
    # mask tied groups before any computation, so that no gradient is infinite or NaN
    margin_G = torch.where(tied_G, 0.0, log_ratio_B[best_G] - log_ratio_B[worst_G])
    if config.variant.startswith("sigmoid"):
        loss_G = -F.logsigmoid(config.beta * margin_G)
    else:
        loss_G = (margin_G - 1 / (2 * config.beta)).square()
    # without pairs, the sum is 0 and still part of the graph; a mean would be NaN
    loss = torch.where(tied_G, 0.0, loss_G).sum() / num_pairs.clamp_min(1)
    margin_G = margin_G.detach()
    is_cross_G = (lease_B[best_G] != lease_B[worst_G]) & ~tied_G
    metrics = {
        "dpo/tied_frac": share_of(tied_G, inputs.num_groups),
        "dpo/margin": config.beta * margin_G.sum() / num_pairs,
        "dpo/accuracy": share_of(margin_G > 0, num_pairs),
        "dpo/cross_frac": share_of(is_cross_G, num_pairs),
        **shares,
    }
    return LossOutput(loss, metrics, weights_T)


ALGORITHM = Algorithm(OnlineDPOConfig, online_dpo)
