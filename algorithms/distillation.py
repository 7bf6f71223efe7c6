"""On-policy distillation: the policy learns to match a teacher token by token on its own samples.

Objective:
    sum over the states s of a completion of KL(pi(.|s) || teacher(.|s)), with states visited by the policy
    d_t = log(pi / teacher) of the sampled token
    L   = 1/T * sum_t 1/2 * d_t^2, and 10 * (|d_t| - 5) for tokens with |d_t| > FAR = 10 nats

Estimator:
    Token t has the gradient w_t * d_t / T * grad log pi_t. The mean of d_t * grad log pi_t over tokens of the policy is
    the gradient of the reverse KL at the state. Future states do not enter, because the teacher supervises each state
    separately. Rewards are not read. T counts all completion tokens of the batch.

Where the off-policy correction enters:
    The correction is w_t = pi / mu of the token, bounded by `corrections` (default: token_tis). w_t corrects the
    distribution of the token. The loss also trains on states that the policy no longer visits, but this adds no bias.

What we left out:
    The KL over the whole vocabulary or its largest entries; the forward KL; several teachers per prompt. To combine a
    reward with a teacher, use off_policy_ppo with kl_in = "loss", whose KL to the reference is this loss.

References:
    MiniLLM, arXiv 2306.08543; GKD, arXiv 2306.13649 (on-policy, reverse KL).
"""

from __future__ import annotations

from typing import Literal

from torch.nn import functional as F

from leeway.algorithms.base import Algorithm, LossInputs, LossOutput, Needs, share_of
from leeway.algorithms.corrections import WeighedSection, weigh_gradient

FAR = 10.0
"""Nats of log(pi / teacher) beyond which the gradient of a token is constant."""


class DistillationConfig(WeighedSection):
    """Settings of on-policy distillation; the teacher is `model.reference_path`, or one of `model.teachers`."""

    type: Literal["distillation"] = "distillation"

    @property
    def needs(self) -> Needs:
        return Needs(reference=True, behaviour=bool(self.corrections), separable="sequence")


def distillation(config: DistillationConfig, inputs: LossInputs) -> LossOutput:
    """Evaluate the loss on a whole batch; see the module's docstring for the formula.

    Returns:
        The loss, and the metric `distillation/far_frac` (fraction of tokens beyond FAR).
    """
    inputs, weights_T, shares = weigh_gradient(inputs, config.corrections)
    num_tokens = max(1, inputs.logprobs_T.numel())
    log_ratio_T = inputs.logprobs_T - inputs.reference_logprobs_T
    loss = F.huber_loss(inputs.logprobs_T, inputs.reference_logprobs_T, reduction="sum", delta=FAR) / num_tokens
    metrics = {"distillation/far_frac": share_of(log_ratio_T.detach().abs() > FAR, num_tokens), **shares}
    return LossOutput(loss, metrics, weights_T)


ALGORITHM = Algorithm(DistillationConfig, distillation)
