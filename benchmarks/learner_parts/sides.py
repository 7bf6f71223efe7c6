"""What is trained, and the two sides that train it: the learner's own step, and a loop as most would write it down.

The plain loop trains a Transformers model in one process. It has the loss, the optimizer and the clipping of the
learner's step, and accumulates gradients over its batches as that does. `padded` is the usual layout: sequences in
order of arrival, padded to the longest of the batch. `packed` has the learner's own micro-batches and its attention per
sequence, and computes logits where they are needed alone: what is left between the two is the pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from algorithms.off_policy_ppo import OffPolicyPPOConfig
from buffer.trajectory import Trajectory, VersionSpan
from common.staleness import PolicyVersion
from learner.batch import StepBatch
from learner.config import LearnerConfig
from learner.mesh import Mesh
from learner.model import DeviceBatch
from learner.networks import Network, Networks, Reference, chunk_loader
from learner.packing import PackingRule
from learner.pipeline import micro_batch_rule
from learner.step import TrainStep

MEDIAN, SIGMA, LONGEST, TOKEN_BUDGET = 200, 1.0, 2048, 4096
GROUP_SIZE = 8
PROMPT = 64
"""Tokens of a prompt, or half of the sequence where that is less."""
TEMPERATURE = 1.0
ALGORITHM = OffPolicyPPOConfig(proximal="behaviour", baseline="rloo")
"""Plain PPO with a group baseline: separable, needs no reference, and short to write down a second time."""

LogProbabilities = Callable[[PreTrainedModel], Tensor]


def long_tailed(
    num: int, seed: int, *, median: float = MEDIAN, sigma: float = SIGMA, longest: int = LONGEST
) -> list[int]:
    """Log-normal lengths in tokens, in order of arrival, clipped to 2..longest."""
    drawn = np.random.default_rng(seed).lognormal(math.log(median), sigma, num)
    return [int(length) for length in np.clip(np.rint(drawn), 2, longest)]


def trajectories(lengths: Sequence[int], vocab_size: int, seed: int) -> list[Trajectory]:
    """Samples of random tokens in groups of GROUP_SIZE, with rewards and behaviour log-probabilities.

    Args:
        lengths: of prompt and completion together.
        vocab_size: V; the behaviour policy is uniform over it.
        seed: of tokens and rewards.
    """
    random = np.random.default_rng(seed)
    rows = []
    for number, length in enumerate(lengths):
        prompt_length = min(PROMPT, length // 2)
        completion = length - prompt_length
        rows.append(
            Trajectory(
                lease_id=0,
                attempt=0,
                group_id=number // GROUP_SIZE,
                sample_index=number % GROUP_SIZE,
                prompt_id=number // GROUP_SIZE,
                token_ids=random.integers(0, vocab_size, length).astype(np.int32),
                prompt_length=prompt_length,
                logprobs=np.full(completion, -math.log(vocab_size), np.float32),
                spans=(VersionSpan(PolicyVersion(0, 0), 0, completion),),
                reward=float(random.random()),
                finish_reason="stop",
            )
        )
    return rows


def small_llama(folder: Path, *, hidden_size: int, num_layers: int, vocab_size: int) -> Path:
    """A random Llama as a checkpoint folder; heads of 64, MLP 8/3 wide, tied embeddings off."""
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


# --- our side: the learner's own training step, on batches that are ready ------------------------


def configured(mesh: Mesh, **changes: Any) -> LearnerConfig:  # noqa: ANN401 -- keys of the section
    """The `[learner]` section with this mesh's number of stages, and a learning rate that float32 weights do not feel.

    So all steps on all sides have one gradient, by which they are held to compute the same.
    """
    return LearnerConfig.model_validate({"num_stages": mesh.place.num_stages, "learning_rate": 1e-12, **changes})


class Learner:
    """This rank of a learner that trains on its own schedule, without buffer and actors."""

    def __init__(self, model_path: Path, mesh: Mesh, config: LearnerConfig, device: torch.device | None = None) -> None:
        """Load this rank's chunks of a checkpoint; all ranks of the mesh call it together. Default: on the CPU."""
        self.device = device or torch.device("cpu")
        chunks = chunk_loader(config, TEMPERATURE, mesh, self.device)(model_path, "token")
        networks = Networks(Network.build(chunks, config, mesh), None, config, mesh)
        self.num_parameters = sum(parameter.numel() for _, parameter in networks.policy.named_parameters())
        """Of this rank."""
        self._config = config
        self._mesh = mesh
        reference = Reference(None, networks)
        self._steps = {
            one_pass: TrainStep(networks, reference, ALGORITHM, config.model_copy(update={"one_pass": one_pass}))
            for one_pass in (True, False)
        }

    def batch(self, rows: Sequence[Trajectory], *, min_micro_batches: int = 1) -> StepBatch:
        """Samples as a step trains them, packed as the schedule asks."""
        wanted = micro_batch_rule(self._config.schedule, self._mesh.place.num_stages)
        rule = PackingRule(
            self._config.token_budget,
            min_micro_batches=max(wanted.least, min_micro_batches),
            multiple=wanted.multiple,
        )
        return StepBatch.build(rows, 0, {0: 0}, rule)

    def step(self, batch: StepBatch, *, one_pass: bool = True) -> float:
        """One step, in one pass or in two. Returns the gradient norm before clipping."""
        (update,) = self._steps[one_pass].run(batch, 0).updates
        if not update.result.taken:
            raise RuntimeError("the learner did not take the step: loss or gradient are not finite")
        return update.result.grad_norms[0]


# --- the other side: a plain loop ----------------------------------------------------------------


@dataclass(frozen=True)
class PlainBatch:
    """What one forward and backward pass trains, n completion tokens."""

    logprobs: LogProbabilities
    """Log-probabilities of its completion tokens by the model: [n]."""
    behaviour: Tensor
    """Those of the policy that sampled: [n]."""
    advantage: Tensor
    """[n]."""
    num_slots: int
    """Tokens computed, padding included."""


class PlainLoop:
    """Model, loss and optimizer; float32 weights, bf16 autocast where wanted."""

    def __init__(
        self, model_path: Path, algorithm: OffPolicyPPOConfig, config: LearnerConfig, *, attention: str = "sdpa"
    ) -> None:
        """Load a checkpoint, with the attention of a name that Transformers knows."""
        assert algorithm.proximal == "behaviour"
        assert not algorithm.corrections
        assert algorithm.kl_beta == 0
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation=attention)
        self.model: PreTrainedModel = model.train()
        self._algorithm = algorithm
        self._config = config
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        self._adam = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )

    def step(self, batches: Sequence[PlainBatch]) -> float:
        """One optimizer step over all batches. Returns the gradient norm before clipping."""
        num_tokens = sum(len(batch.advantage) for batch in batches)
        for batch in batches:
            self._loss(batch, num_tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        return float(norm)

    def _loss(self, batch: PlainBatch, num_tokens: int) -> Tensor:
        algorithm = self._algorithm
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._config.precision == "bfloat16"):
            logprobs = batch.logprobs(self.model)
        ratio = torch.exp(logprobs - batch.behaviour)
        clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
        return -torch.minimum(ratio * batch.advantage, clipped * batch.advantage).sum() / num_tokens


def padded(rows: Sequence[Trajectory], batch_size: int, temperature: float) -> list[PlainBatch]:
    """Batches in order of arrival, each padded on the right to its longest."""
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
                *_told(chosen, advantages[start : start + batch_size]),
                tokens_BL.numel(),
            )
        )
    return batches


def packed(batch: StepBatch, on_device: DeviceBatch, temperature: float) -> list[PlainBatch]:
    """The learner's micro-batches; needs a model with the learner's attention."""
    advantages = _rloo(batch.trajectories)
    batches = []
    for m, members in enumerate(batch.packed.members):
        chosen = [batch.trajectories[i] for i in members]
        batches.append(
            PlainBatch(
                _packed_logprobs(on_device, m, temperature),
                *_told(chosen, [advantages[i] for i in members]),
                int(batch.packed.bounds[m][-1]),
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
    real = slice(0, int(on_device.packed.bounds[m][-1]))

    def logprobs(model: PreTrainedModel) -> Tensor:
        logits = model(
            input_ids=on_device.tokens_ML[m : m + 1, real],
            position_ids=on_device.positions_ML[m : m + 1, real],
            layout=layout,
            use_cache=False,
            logits_to_keep=where,
        ).logits[0]
        tokens = on_device.tokens_ML[m, where + 1]
        return F.log_softmax(logits.float() / temperature, dim=-1).gather(1, tokens[:, None]).squeeze(1)

    return logprobs


def _told(rows: Sequence[Trajectory], advantages: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Behaviour log-probabilities and advantages of the completion tokens."""
    lengths = torch.tensor([row.num_completion_tokens for row in rows])
    behaviour = torch.cat([torch.from_numpy(row.logprobs) for row in rows])
    return behaviour, torch.repeat_interleave(torch.tensor(advantages, dtype=torch.float32), lengths)


def _rloo(rows: Sequence[Trajectory]) -> list[float]:
    """Reward minus the mean reward of the others of the group."""
    groups: dict[int, list[float]] = {}
    for row in rows:
        groups.setdefault(row.group_id, []).append(float(row.reward or 0.0))
    found = []
    for row in rows:
        rewards, own = groups[row.group_id], float(row.reward or 0.0)
        found.append(own - (sum(rewards) - own) / max(1, len(rewards) - 1))
    return found
