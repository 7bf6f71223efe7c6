"""Training data, and straightforward ("plain") training loops with which the learner is compared.

A plain loop trains a Transformers model in one process. The loop has the loss, the optimizer and the clipping of the
learner's step, and accumulates gradients over its batches in the same way. `padded` is the usual layout: sequences in
order of arrival, padded to the longest sequence of the batch. `packed` has the learner's micro-batches and attention
per sequence, and computes logits only at completion tokens, so that only the pipeline differs from the learner.
`PlainLoop` implements PPO. `BalanceLoop` implements trajectory balance, only on the learner's micro-batches.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.lib.learner import sample
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from leeway.algorithms.off_policy_ppo import OffPolicyPPOConfig
from leeway.algorithms.trajectory_balance import TrajectoryBalanceConfig
from leeway.buffer.schema import Trajectory
from leeway.learner.attention import IMPLEMENTATION
from leeway.learner.config import LearnerConfig
from leeway.learner.mesh import Mesh
from leeway.learner.model import DeviceBatch
from leeway.learner.optimizer import ADAM_BETAS, ADAM_EPS
from leeway.learner.packing import PackedBatch

MEDIAN, SIGMA, LONGEST, TOKEN_BUDGET = 200, 1.0, 2048, 4096
PROMPT = 64
"""Maximum number of prompt tokens; a sequence with fewer than twice as many tokens has a prompt of half its length."""

LogProbabilities = Callable[[PreTrainedModel], Tensor]


def long_tailed(
    num: int, seed: int, *, median: float = MEDIAN, sigma: float = SIGMA, longest: int = LONGEST
) -> list[int]:
    """Return log-normal lengths in tokens, in order of arrival, clipped to 2..longest."""
    drawn = np.random.default_rng(seed).lognormal(math.log(median), sigma, num)
    return [int(length) for length in np.clip(np.rint(drawn), 2, longest)]


def trajectories(lengths: Sequence[int], vocab_size: int, seed: int) -> list[Trajectory]:
    """Return samples of random tokens in groups of GROUP_SIZE, with rewards and behaviour log-probabilities.

    Args:
        lengths: lengths of prompt and completion together, in tokens.
        vocab_size: V, the size of the vocabulary; the behaviour policy is uniform.
        seed: seed of tokens and rewards.
    """
    random = np.random.default_rng(seed)
    rows = []
    for number, length in enumerate(lengths):
        completion = length - min(PROMPT, length // 2)
        token_ids = random.integers(0, vocab_size, length).astype(np.int32)
        logprobs = np.full(completion, -math.log(vocab_size), np.float32)
        rows.append(sample(number, token_ids, logprobs, float(random.random()), "stop"))
    return rows


def scored_by_themselves(rows: Sequence[Trajectory]) -> list[Trajectory]:
    """Use the behaviour log-probabilities as reference scores; their values do not affect the cost."""
    return [replace(row, reference_logprobs=row.logprobs) for row in rows]


def small_llama(folder: Path, *, hidden_size: int, num_layers: int, vocab_size: int) -> Path:
    """Write a checkpoint of a random Llama with head size 64, MLP width 8/3 hidden_size, and untied embeddings."""
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


def configured(mesh: Mesh, **changes: Any) -> LearnerConfig:  # noqa: ANN401 -- keys of the section
    """Return the `[learner]` section with the mesh's number of stages and a learning rate too small to change weights.

    All steps then have the same gradient, so that gradient norms verify that all sides compute the same function.
    """
    return LearnerConfig.model_validate({"num_stages": mesh.place.num_stages, "learning_rate": 1e-12, **changes})


# --- the other side: a plain loop ----------------------------------------------------------------


@dataclass(frozen=True)
class PlainBatch:
    """Batch of one forward and backward pass. n is its number of completion tokens."""

    logprobs: LogProbabilities
    """Log-probabilities of the completion tokens under the model: [n]."""
    behaviour: Tensor
    """Log-probabilities under the behaviour policy: [n]."""
    advantage: Tensor
    """Advantage of each completion token: [n]."""
    num_slots: int
    """Number of tokens that the pass computes, including padding."""


class _Loop:
    """Model with float32 weights, its optimizer, and optional bf16 autocast."""

    def __init__(self, model_path: Path, config: LearnerConfig, attention: str) -> None:
        """Load a checkpoint; `attention` is the name of a Transformers attention implementation."""
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation=attention)
        self.model: PreTrainedModel = model.train()
        self._config = config
        self._is_bf16 = config.precision == "bfloat16"
        if self._is_bf16:
            self._round_weights()
        self._adam = torch.optim.AdamW(
            model.parameters(),
            lr=config.learning_rate,
            betas=ADAM_BETAS,
            weight_decay=0.0,
            eps=ADAM_EPS,
            fused=True,
        )

    @torch.no_grad()
    def _round_weights(self) -> None:
        """Round all weights to bf16, like those of published checkpoints."""
        for parameter in self.model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))

    def _logprobs(self, found: LogProbabilities, model: PreTrainedModel) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._is_bf16):
            return found(model)

    def _update(self) -> float:
        """Apply the accumulated gradients; return the gradient norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        return float(norm)


class PlainLoop(_Loop):
    """Plain loop of PPO with precomputed advantages."""

    def __init__(
        self, model_path: Path, algorithm: OffPolicyPPOConfig, config: LearnerConfig, *, attention: str = "sdpa"
    ) -> None:
        """Load a checkpoint; `attention` is the name of a Transformers attention implementation."""
        assert algorithm.proximal == "behaviour"
        assert not algorithm.corrections
        assert algorithm.kl_beta == 0
        super().__init__(model_path, config, attention)
        self._algorithm = algorithm

    def step(self, batches: Sequence[PlainBatch]) -> float:
        """Take one optimizer step over all batches; return the gradient norm before clipping."""
        num_tokens = sum(len(batch.advantage) for batch in batches)
        for batch in batches:
            self._loss(batch, num_tokens).backward()
        return self._update()

    def _loss(self, batch: PlainBatch, num_tokens: int) -> Tensor:
        algorithm = self._algorithm
        ratio = torch.exp(self._logprobs(batch.logprobs, self.model) - batch.behaviour)
        clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
        return -torch.minimum(ratio * batch.advantage, clipped * batch.advantage).sum() / num_tokens


@dataclass(frozen=True)
class BalanceBatch:
    """Batch of one pass of trajectory balance, forward and backward, with n completion tokens of b samples."""

    logprobs: LogProbabilities
    """Log-probabilities of the completion tokens under a model: [n]."""
    sample: Tensor
    """Index of the sample of each token: [n]."""
    reward: Tensor
    """Reward of each sample: [b]."""
    group: Tensor
    """Group of each sample, numbered over all batches of a step: [b]."""


class BalanceLoop(_Loop):
    """Plain loop of trajectory balance without gradient weights, which also computes reference scores and log Z."""

    def __init__(self, model_path: Path, algorithm: TrajectoryBalanceConfig, config: LearnerConfig) -> None:
        """Load a checkpoint as policy and reference, with the learner's attention."""
        assert not algorithm.corrections
        super().__init__(model_path, config, IMPLEMENTATION)
        self._beta = algorithm.beta
        self._reference = copy.deepcopy(self.model).requires_grad_(requires_grad=False)

    def step(self, batches: Sequence[BalanceBatch], *, one_pass: bool) -> float:
        """Take one optimizer step over all batches; return the gradient norm before clipping.

        Log Z is a mean over the samples of a group. If a group may be in several batches, log Z takes a separate
        forward pass. With one pass, log Z is computed from the micro-batch, which must contain the whole group.
        """
        num_groups = 1 + int(max(batch.group.max() for batch in batches))
        with torch.no_grad():
            references = [self._logprobs(batch.logprobs, self._reference) for batch in batches]
            log_z = None
            if not one_pass:
                distances = [self._distance(*each) for each in zip(batches, references, strict=True)]
                log_z = _means(torch.cat(distances), torch.cat([batch.group for batch in batches]), num_groups)
        for batch, reference in zip(batches, references, strict=True):
            distance = self._distance(batch, reference)
            mean = _means(distance.detach(), batch.group, num_groups) if log_z is None else log_z
            size = torch.bincount(batch.group, minlength=num_groups)[batch.group]
            ((distance - mean[batch.group]).square() / size / num_groups).sum().backward()
        return self._update()

    def _distance(self, batch: BalanceBatch, reference: Tensor) -> Tensor:
        """Return log pi - log pi_ref - r / beta of each sample, in nats: [b]."""
        log_ratio = self._logprobs(batch.logprobs, self.model) - reference
        return torch.zeros_like(batch.reward).index_add(0, batch.sample, log_ratio) - batch.reward / self._beta


def _means(value: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Return the mean of each group. A group without samples has a meaningless value, which is not used."""
    sums = torch.zeros(num_groups).index_add(0, group, value)
    return sums / torch.bincount(group, minlength=num_groups)


def padded(rows: Sequence[Trajectory], batch_size: int, temperature: float) -> list[PlainBatch]:
    """Return batches in order of arrival, each padded on the right to its longest sequence."""
    advantages = _rloo(rows)
    batches = []
    for start in range(0, len(rows), batch_size):
        chosen = rows[start : start + batch_size]
        longest = max(len(row.token_ids) for row in chosen)
        tokens_BL = torch.zeros(len(chosen), longest, dtype=torch.int64)
        mask_BL = torch.zeros(len(chosen), longest, dtype=torch.int64)
        completion_BL = torch.zeros(len(chosen), longest, dtype=torch.bool)
        for i, row in enumerate(chosen):
            length = len(row.token_ids)
            tokens_BL[i, :length] = torch.from_numpy(row.token_ids)
            mask_BL[i, :length] = 1
            completion_BL[i, row.prompt_length : length] = True
        batches.append(
            PlainBatch(
                _padded_logprobs(tokens_BL, mask_BL, completion_BL, temperature),
                *_behaviour_and_advantages(chosen, advantages[start : start + batch_size]),
                tokens_BL.numel(),
            )
        )
    return batches


def packed(
    batch: PackedBatch, rows: Sequence[Trajectory], on_device: DeviceBatch, temperature: float
) -> list[PlainBatch]:
    """Return the learner's micro-batches for a plain loop, whose model must use the learner's attention."""
    advantages = _rloo(rows)
    batches = []
    for m, members in enumerate(batch.members):
        chosen = [rows[i] for i in members]
        batches.append(
            PlainBatch(
                _packed_logprobs(on_device, m, temperature),
                *_behaviour_and_advantages(chosen, [advantages[i] for i in members]),
                on_device.num_tokens[m],
            )
        )
    return batches


def packed_for_balance(
    batch: PackedBatch, rows: Sequence[Trajectory], on_device: DeviceBatch, temperature: float
) -> list[BalanceBatch]:
    """Return the learner's micro-batches for trajectory balance, which contain whole groups."""
    assert batch.unit == "group"
    batches = []
    for m, members in enumerate(batch.members):
        chosen = [rows[i] for i in members]
        batches.append(
            BalanceBatch(
                _packed_logprobs(on_device, m, temperature),
                torch.repeat_interleave(torch.tensor([row.num_completion_tokens for row in chosen])),
                torch.tensor([float(row.reward or 0.0) for row in chosen]),
                torch.tensor([row.group_id for row in chosen]),
            )
        )
    return batches


def _padded_logprobs(tokens_BL: Tensor, mask_BL: Tensor, completion_BL: Tensor, temperature: float) -> LogProbabilities:
    def logprobs(model: PreTrainedModel) -> Tensor:
        logits = model(input_ids=tokens_BL, attention_mask=mask_BL, use_cache=False).logits[:, :-1].float()
        found = F.log_softmax(logits / temperature, dim=-1).gather(2, tokens_BL[:, 1:, None]).squeeze(2)
        return found[completion_BL[:, 1:]]

    return logprobs


def _packed_logprobs(on_device: DeviceBatch, m: int, temperature: float) -> LogProbabilities:
    where = on_device.predicting[m]
    layout = on_device.layouts[m]
    real = slice(0, on_device.num_tokens[m])

    def logprobs(model: PreTrainedModel) -> Tensor:
        logits = model(
            input_ids=on_device.tokens_ML[m : m + 1, real],
            position_ids=on_device.positions_ML[m : m + 1, real],
            layout=layout,
            use_cache=False,
            logits_to_keep=where,
        ).logits[0]
        tokens = on_device.tokens_ML[m, on_device.completions[m]]
        return F.log_softmax(logits.float() / temperature, dim=-1).gather(1, tokens[:, None]).squeeze(1)

    return logprobs


def _behaviour_and_advantages(rows: Sequence[Trajectory], advantages: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return behaviour log-probabilities and advantages of the completion tokens."""
    lengths = torch.tensor([row.num_completion_tokens for row in rows])
    behaviour = torch.cat([torch.from_numpy(row.logprobs) for row in rows])
    return behaviour, torch.repeat_interleave(torch.tensor(advantages, dtype=torch.float32), lengths)


def _rloo(rows: Sequence[Trajectory]) -> list[float]:
    """Return the reward of each row minus the mean reward of the other rows of its group."""
    groups: dict[int, list[float]] = {}
    for row in rows:
        groups.setdefault(row.group_id, []).append(float(row.reward or 0.0))
    found = []
    for row in rows:
        rewards, own = groups[row.group_id], float(row.reward or 0.0)
        found.append(own - (sum(rewards) - own) / max(1, len(rewards) - 1))
    return found
