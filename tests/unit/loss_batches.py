"""Helpers for loss tests: batches, one config of every kind, a policy with few possible answers, and gradients."""

import itertools
import math
from dataclasses import fields, replace

import torch

from leeway.algorithms.base import LossInputs
from leeway.algorithms.distillation import DistillationConfig
from leeway.algorithms.oapl import OAPLConfig
from leeway.algorithms.off_policy_ppo import OffPolicyPPOConfig
from leeway.algorithms.online_dpo import OnlineDPOConfig
from leeway.algorithms.registry import loss_for
from leeway.algorithms.trajectory_balance import TrajectoryBalanceConfig

LENGTHS = [3, 1, 4, 2, 5, 2, 0, 3, 2]
GROUPS = [0, 1, 0, 2, 1, 0, 2, 2, 1]
PROMPTS = [7, 4, 7, 7, 4, 7, 7, 7, 4]  # groups 0 and 2 have the same prompt

TIGHT = {"type": "token_tis", "cap": 1.2, "floor": 0.8}
"""Bounds close enough to 1 to limit some tokens of every batch on both sides."""

PROXIMAL_RLOO = {"proximal": "behaviour", "corrections": ["sequence_clip"], "kl_beta": 0.05}

GROUP_CONFIGS = {
    "tb": TrajectoryBalanceConfig(beta=0.3),
    "tb by prompt": TrajectoryBalanceConfig(beta=0.3, compare="prompt"),
    "tb without weights": TrajectoryBalanceConfig(beta=0.3, corrections=[]),
    "tb with sequence_tis": TrajectoryBalanceConfig(beta=0.3, corrections=[{"type": "sequence_tis", "cap": 1.2}]),
    "oapl": OAPLConfig(beta=0.4),
    "oapl by prompt": OAPLConfig(beta=0.4, compare="prompt"),
    "oapl without weights": OAPLConfig(beta=0.4, corrections=[]),
    "oapl masked": OAPLConfig(beta=0.4, corrections=[{"type": "icepop", "low": 0.8, "high": 1.3}]),
    "dpo": OnlineDPOConfig(beta=0.7),
    "dpo without weights": OnlineDPOConfig(beta=0.7, corrections=[]),
    "dpo by prompt": OnlineDPOConfig(beta=0.7, compare="prompt"),
    "ipo": OnlineDPOConfig(beta=0.7, variant="ipo"),
    "ipo_mean": OnlineDPOConfig(beta=0.7, variant="ipo_mean", corrections=[]),
    "rloo": OffPolicyPPOConfig(corrections=[TIGHT]),
    "rloo without corrections": OffPolicyPPOConfig(corrections=[]),
    "rloo by prompt": OffPolicyPPOConfig(compare="prompt", corrections=[]),
    "grpo": OffPolicyPPOConfig(baseline="grpo", kl_beta=0.2, clip_low=0.1, clip_high=0.4, corrections=[]),
    "dr_grpo without corrections": OffPolicyPPOConfig(baseline="dr_grpo", corrections=[]),
    "dr_grpo": OffPolicyPPOConfig(baseline="dr_grpo", mean_over=4.0, corrections=[TIGHT]),
    "proximal behaviour": OffPolicyPPOConfig(proximal="behaviour"),
    "interpolated": OffPolicyPPOConfig(
        proximal="interpolated", clip_low=0.1, clip_high=0.1, kl_beta=0.1, corrections=[TIGHT]
    ),
    "proximal rloo": OffPolicyPPOConfig(**PROXIMAL_RLOO),
    "sequence_tis": OffPolicyPPOConfig(corrections=[{"type": "sequence_tis", "cap": 1.2}]),
    "icepop": OffPolicyPPOConfig(corrections=[{"type": "icepop", "low": 0.8, "high": 1.3}]),
    "geometric_mask": OffPolicyPPOConfig(corrections=[{"type": "geometric_mask", "low": 0.9, "high": 1.1}]),
    "sequence_clip": OffPolicyPPOConfig(corrections=[{"type": "sequence_clip", "clip_low": 0.1}]),
    "sequence_clip over sequences": OffPolicyPPOConfig(**PROXIMAL_RLOO, mean_over="sequences"),
    "gspo": OffPolicyPPOConfig(corrections=[{"type": "gspo", "clip_low": 0.1, "clip_high": 0.2}]),
    "gspo over sequences": OffPolicyPPOConfig(
        mean_over="sequences", corrections=[{"type": "gspo", "clip_low": 0.1, "clip_high": 0.2}, TIGHT]
    ),
    "cispo": OffPolicyPPOConfig(corrections=[{"type": "cispo", "low": 0.8, "high": 1.2}]),
    "composed": OffPolicyPPOConfig(
        baseline="grpo",
        kl_beta=0.1,
        corrections=[
            {"type": "geometric_mask", "low": 0.7, "high": 1.3},
            {"type": "cispo", "low": 0.7, "high": 1.5},
            TIGHT,
            {"type": "icepop", "low": 0.7},
        ],
    ),
}
"""Configs whose gradient is zero for groups of one sample."""

OTHER_CONFIGS = {
    "k2 in the loss": OffPolicyPPOConfig(kl_beta=0.3, kl_in="loss", corrections=[TIGHT]),
    "k3 in the loss": OffPolicyPPOConfig(kl_beta=0.3, kl_in="loss_k3", corrections=[]),
    "entropy bonus": OffPolicyPPOConfig(entropy_coef=0.3, corrections=[TIGHT]),
    "batch baseline": OffPolicyPPOConfig(baseline="batch", kl_beta=0.2, corrections=[]),
    "distillation": DistillationConfig(),
    "distillation without weights": DistillationConfig(corrections=[]),
    "critic": OffPolicyPPOConfig(baseline="value_head", gae_lambda=0.8, kl_beta=0.1, corrections=[]),
    "critic model": OffPolicyPPOConfig(baseline="critic", corrections=["gspo"]),
    "critic composed": OffPolicyPPOConfig(
        baseline="value_head",
        kl_beta=0.1,
        kl_in="loss",
        corrections=["sequence_tis", {"type": "icepop", "low": 0.8}, "sequence_clip"],
    ),
}

CONFIGS = GROUP_CONFIGS | OTHER_CONFIGS


def make_inputs(seed=0, groups=GROUPS, lengths=LENGTHS, prompts=None, **changes) -> LossInputs:
    """Return a batch of random float64 values whose tokens are stored sequence by sequence."""
    random = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)

    def uniform(size):
        return torch.rand(size, generator=random, dtype=torch.float64)

    inputs = LossInputs(
        logprobs_T=-uniform(num_tokens) - 0.1,
        proximal_logprobs_T=-uniform(num_tokens) - 0.1,
        behaviour_logprobs_T=-uniform(num_tokens) - 0.1,
        reference_logprobs_T=-uniform(num_tokens) - 0.1,
        sequence_T=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        group_B=torch.tensor(groups),
        rewards_B=uniform(len(lengths)),
        finished_B=uniform(len(lengths)) < 0.7,
        num_groups=max(groups) + 1,
        prompt_B=torch.tensor(PROMPTS if groups is GROUPS and prompts is None else (prompts or groups)),
        values_T=uniform(num_tokens),
        old_values_T=uniform(num_tokens),
        lag_T=torch.randint(4, (num_tokens,), generator=random),
    )
    return replace(inputs, **changes)


ANSWERS = list(itertools.product(range(3), repeat=3))
"""All 27 sequences of three tokens from a vocabulary of three."""


def tabular_logits(seed: int) -> torch.Tensor:
    """Return random next-token logits after each of 13 prefixes, which can represent any policy on `ANSWERS`."""
    return torch.randn(13, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tabular_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Return log pi(token | prefix) of every token of every answer, as a tensor of 27 x 3."""
    choices = logits.log_softmax(1)
    prefixes = torch.tensor([[0, 1 + a, 4 + 3 * a + b] for a, b, _ in ANSWERS])
    return choices[prefixes, torch.tensor(ANSWERS)]


def per_token(inputs: LossInputs) -> dict[str, torch.Tensor]:
    """Return the fields of the batch that have one value per token."""
    return {each.name: getattr(inputs, each.name) for each in fields(inputs) if each.name.endswith("_T")}


def interleaved(inputs: LossInputs, seed=0) -> tuple[LossInputs, torch.Tensor]:
    """Interleave the tokens of different sequences. Return the new batch and the old index of each token.

    The tokens of a sequence keep their order.
    """
    random = torch.Generator().manual_seed(seed)
    mixed_T = inputs.sequence_T[torch.randperm(inputs.sequence_T.numel(), generator=random)]
    order = torch.empty_like(mixed_T)
    for b in range(inputs.num_sequences):
        order[mixed_T == b] = torch.nonzero(inputs.sequence_T == b).flatten()
    return replace(inputs, **{name: values[order] for name, values in per_token(inputs).items()}), order


def permuted(inputs: LossInputs, order: torch.Tensor) -> tuple[LossInputs, torch.Tensor]:
    """Return the batch with its sequences in the given order, and the old index of each token."""
    tokens = torch.cat([torch.nonzero(inputs.sequence_T == b).flatten() for b in order])
    lengths = torch.tensor([int((inputs.sequence_T == b).sum()) for b in order])
    changes = {name: values[tokens] for name, values in per_token(inputs).items()}
    changes["sequence_T"] = torch.arange(len(order)).repeat_interleave(lengths)
    for each in fields(inputs):
        if each.name.endswith("_B"):
            changes[each.name] = getattr(inputs, each.name)[order]
    return replace(inputs, **changes), tokens


def evaluate(config, inputs) -> tuple[float, torch.Tensor, torch.Tensor, dict]:
    """Return the loss, its gradients w.r.t. log-probabilities and values (zeros for unused inputs), and its metrics."""
    leaves = [inputs.logprobs_T.detach().clone().requires_grad_(), inputs.values_T.detach().clone().requires_grad_()]
    output = loss_for(config)(replace(inputs, logprobs_T=leaves[0], values_T=leaves[1]))
    slopes = torch.autograd.grad(output.loss, leaves, allow_unused=True, materialize_grads=True)
    return output.loss.item(), slopes[0], slopes[1], output.metrics


def gradient(config, inputs) -> tuple[float, torch.Tensor]:
    """Return the loss and its gradient with respect to the log-probabilities."""
    return evaluate(config, inputs)[:2]


def tokens_of(inputs: LossInputs) -> list[list[int]]:
    """Return the token indices of each sequence in order."""
    return [[t for t, own in enumerate(inputs.sequence_T.tolist()) if own == b] for b in range(inputs.num_sequences)]


def sums(inputs: LossInputs, values_T: torch.Tensor) -> list[float]:
    """Return the sum of the values of each sequence, computed by a loop."""
    return [math.fsum(float(values_T[t]) for t in tokens) for tokens in tokens_of(inputs)]


def mates_of(inputs: LossInputs, b: int, by="group") -> list[int]:
    """Return all sequences of the group (or prompt) of sequence b, including b."""
    key_B = (inputs.group_B if by == "group" else inputs.prompt_B).tolist()
    return [j for j, key in enumerate(key_B) if key == key_B[b]]
