"""On-policy distillation: on its own samples the policy becomes its teacher, token by token.

Objective:
    sum over the states s of a completion of KL(pi(.|s) || teacher(.|s)), the states as the policy meets them
    d_t = log(pi / teacher) of the token that was sampled
    L   = 1/T * sum_t 1/2 * d_t^2, and 10 * (|d_t| - 5) where |d_t| is beyond FAR = 10 nats

Estimator:
    Token t has the gradient w_t * d_t / T * grad log pi_t: on average over tokens of the policy that of the reverse KL
    at its state. Nothing is said of states to come: the teacher is trusted at each by itself, which a reward at the end
    of a completion cannot do. Rewards are not read. T counts all completion tokens of the batch.

Where the off-policy correction enters:
    In w_t = pi / mu of the token, bounded by the corrections (token_tis unless a run says otherwise). That repairs the
    choice of the token; states that the policy no longer meets are learned too, which costs time and no bias at any
    state.

What we left out:
    The KL over the whole vocabulary, or its greatest entries; the forward KL; several teachers of one prompt. For a
    reward beside the teacher take off_policy_ppo with kl_in = "loss": its KL to the reference is this loss.

References:
    MiniLLM, arXiv 2306.08543; GKD, arXiv 2306.13649 (on-policy, reverse KL).
"""

from __future__ import annotations

from typing import Literal

from torch.nn import functional as F

from algorithms.base import Algorithm, LossInputs, LossOutput, Needs
from algorithms.corrections import WeighedSection, weigh_gradient

FAR = 10.0
"""Nats of log(pi / teacher) beyond which a token's pull grows no further."""


class DistillationConfig(WeighedSection):
    """Knobs of on-policy distillation; the teacher is `model.reference_path`, or one of `model.teachers`."""

    type: Literal["distillation"] = "distillation"

    @property
    def needs(self) -> Needs:
        return Needs(reference=True, behaviour=bool(self.corrections), separable="sequence")


def distillation(config: DistillationConfig, inputs: LossInputs) -> LossOutput:
    """Evaluate the loss on a whole batch; see the module's docstring for the formula.

    Returns:
        The loss, and metrics `distillation/kl` (mean over tokens of log(pi / teacher), in nats) and
        `distillation/far_frac` (share of tokens beyond FAR).
    """
    inputs, weights_T, shares = weigh_gradient(inputs, config.corrections)
    num_tokens = max(1, inputs.logprobs_T.numel())
    log_ratio_T = inputs.logprobs_T - inputs.reference_logprobs_T
    loss = F.huber_loss(inputs.logprobs_T, inputs.reference_logprobs_T, reduction="sum", delta=FAR) / num_tokens
    far_T = log_ratio_T.detach().abs() > FAR
    return LossOutput(
        loss,
        {
            "distillation/kl": log_ratio_T.detach().sum().double() / num_tokens,
            "distillation/far_frac": far_T.sum().double() / num_tokens,
            **shares,
        },
        weights_T,
    )


ALGORITHM = Algorithm(DistillationConfig, distillation)
