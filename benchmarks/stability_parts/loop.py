"""Trains a config in one process and one thread, on samples of the policy of so many updates ago.

The lag of the system, without the system: a Sampler stands in the place of the engine.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from actors.tasks import load_reward, load_task
from actors.tasks.task import Problem
from algorithms.base import LossInputs
from algorithms.corrections import ess_scale, off_policy_metrics
from algorithms.registry import loss_for
from benchmarks.lib.machine import ROOT
from launch.config import Config, load_config
from learner.optimizer import ADAM_BETAS, ADAM_EPS, learning_rate
from learner.step import ESS_METRIC

CONFIG = ROOT / "examples" / "sums.toml"


@dataclass(frozen=True)
class Samples:
    """B completions; T runs over their tokens, in order, with the end-of-sequence token where there is one."""

    prompts: list[list[int]]
    """Of each completion."""
    completions: list[list[int]]
    logprobs_T: Tensor
    finished_B: Tensor

    @property
    def sequence_T(self) -> Tensor:
        """The completion of each token."""
        lengths = torch.tensor([len(completion) for completion in self.completions])
        return torch.arange(len(self.completions)).repeat_interleave(lengths)


class Sampler:
    """Samples from a model as vLLM would: at temperature 1, over the full vocabulary."""

    def __init__(self, model: PreTrainedModel, pad: int, eos: int, max_new_tokens: int) -> None:
        self._model = model
        self._pad = pad
        self._eos = eos
        self._max_new_tokens = max_new_tokens

    @torch.no_grad()
    def sample(self, prompts: Sequence[list[int]], group_size: int, random: torch.Generator | None = None) -> Samples:
        """So many completions of each prompt; greedy ones without a generator."""
        width = max(map(len, prompts))
        padded = torch.tensor([[self._pad] * (width - len(prompt)) + prompt for prompt in prompts])
        seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        place = (seen.cumsum(1) - 1).clamp_min(0)
        cache = DynamicCache()
        output = self._model(padded, attention_mask=seen, position_ids=place, past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(group_size)
        logits = output.logits[:, -1].repeat_interleave(group_size, 0)
        seen, place = seen.repeat_interleave(group_size, 0), place[:, -1:].repeat_interleave(group_size, 0)
        alive = torch.ones(len(logits), dtype=torch.bool)
        tokens, logprobs, written = [], [], []
        for number in range(self._max_new_tokens):
            choices = logits.log_softmax(-1)
            if random is None:
                token = choices.argmax(-1, keepdim=True)
            else:
                token = torch.multinomial(choices.exp(), 1, generator=random)
            tokens.append(token)
            logprobs.append(choices.gather(1, token))
            written.append(alive[:, None])
            alive = alive & (token[:, 0] != self._eos)
            if not alive.any() or number + 1 == self._max_new_tokens:
                break
            seen, place = torch.cat([seen, torch.ones_like(token)], 1), place + 1
            output = self._model(token, attention_mask=seen, position_ids=place, past_key_values=cache, use_cache=True)
            logits = output.logits[:, -1]
        written_BL = torch.cat(written, 1)
        rows = zip(torch.cat(tokens, 1).tolist(), written_BL.sum(1).tolist(), strict=True)
        return Samples(
            prompts=[prompt for prompt in prompts for _ in range(group_size)],
            completions=[row[:length] for row, length in rows],
            logprobs_T=torch.cat(logprobs, 1)[written_BL],
            finished_B=~alive,
        )


def completion_logprobs(model: PreTrainedModel, samples: Samples, pad: int) -> Tensor:
    """The log-probability of each token of some completions under a model, differentiable: T."""
    rows = [prompt + completion for prompt, completion in zip(samples.prompts, samples.completions, strict=True)]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    is_completion = torch.tensor(
        [
            [0] * len(prompt) + [1] * len(completion) + [0] * (width - len(prompt) - len(completion))
            for prompt, completion in zip(samples.prompts, samples.completions, strict=True)
        ],
        dtype=torch.bool,
    )
    # padding stands behind, where a causal model does not look
    logits = model(tokens[:, :-1], use_cache=False).logits
    chosen = is_completion[:, 1:]
    logprobs_T: Tensor = logits[chosen].log_softmax(-1).gather(1, tokens[:, 1:][chosen][:, None])[:, 0]
    return logprobs_T


@dataclass
class Curve:
    """What a run came to, an entry for each update."""

    reward: list[float] = field(default_factory=list)
    """Mean over the samples that it trained, so of the policy of `lag` updates ago."""
    ess: list[float] = field(default_factory=list)
    """Effective sample share over sequences, raw weights."""
    k1: list[float] = field(default_factory=list)
    """Mean of log mu - log pi over tokens."""
    k3: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    sampled: dict[int, float] = field(default_factory=dict)
    """Number of updates -> accuracy on the held-out problems, at temperature 1."""


class DelayedRun:
    """One run; the task, the model and every knob are those of the config."""

    def __init__(self, overrides: list[str], lag: int, seed: int, config: Path = CONFIG) -> None:
        """Load everything.

        Args:
            overrides: of the config, as `leeway train` takes them.
            lag: the policy that samples is that of so many updates before the one that trains, or the first one.
            seed: of the prompts' order and the samples.
            config: of a run. Its task has one reward function, which is not asynchronous.
        """
        self.config: Config = load_config(config, overrides)
        self.lag = lag
        task = load_task(self.config.task)
        (reward,) = task.rewards
        self._scorer = load_reward(reward)
        self._tokenizer = AutoTokenizer.from_pretrained(self.config.model.path)
        self._problems = task.train
        self._heldout = task.heldout
        self._order = random.Random(seed)
        self._random = torch.Generator().manual_seed(seed)
        self._policy: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            self.config.model.path, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._reference = copy.deepcopy(self._policy)
        self._behaviour = copy.deepcopy(self._policy)
        self._sampler = Sampler(self._behaviour, self._pad, self._eos, self.config.actors.max_new_tokens)
        self._past: deque[list[Tensor]] = deque(maxlen=lag + 1)
        self._adam = torch.optim.AdamW(
            self._policy.parameters(),
            betas=ADAM_BETAS,
            eps=ADAM_EPS,
            weight_decay=0.0,
        )
        self._loss = loss_for(self.config.algorithm)

    @property
    def _pad(self) -> int:
        return int(self._tokenizer.pad_token_id)

    @property
    def _eos(self) -> int:
        return int(self._tokenizer.eos_token_id)

    def train(self, num_updates: int, eval_every: int = 0) -> Curve:
        """Take so many updates, and evaluate after the last."""
        curve = Curve()
        queue: list[Problem] = []
        for number in range(num_updates):
            self._past.append([parameter.detach().clone() for parameter in self._policy.parameters()])
            self._load(self._past[0])
            if len(queue) < self.config.learner.groups_per_step:
                queue = self._order.sample(self._problems, len(self._problems))
            drawn = [queue.pop() for _ in range(self.config.learner.groups_per_step)]
            samples, rewards_B = self._answers(drawn, self.config.actors.group_size, self._random)
            self._update(number, samples, rewards_B, curve)
            if number + 1 == num_updates or (eval_every and (number + 1) % eval_every == 0):
                curve.sampled[number + 1] = self.accuracy()
        return curve

    def accuracy(self, *, greedy: bool = False) -> float:
        """Of the present policy on the held-out problems; sampled at temperature 1, or greedy."""
        self._load([parameter.detach() for parameter in self._policy.parameters()])
        _, rewards_B = self._answers(self._heldout, 1, None if greedy else self._random)
        return float((rewards_B == 1).float().mean())

    def _load(self, values: list[Tensor]) -> None:
        """Give the sampler a policy."""
        with torch.no_grad():
            for parameter, value in zip(self._behaviour.parameters(), values, strict=True):
                parameter.copy_(value)

    def _answers(
        self, problems: Sequence[Problem], size: int, random: torch.Generator | None
    ) -> tuple[Samples, Tensor]:
        """Completions of the sampler's policy, and their rewards."""
        prompts = [self._tokenizer.encode(problem.text, add_special_tokens=False) for problem in problems]
        samples = self._sampler.sample(prompts, size, random)
        texts = self._tokenizer.batch_decode(samples.completions, skip_special_tokens=True)
        asked = [problem for problem in problems for _ in range(size)]
        return samples, torch.tensor(self._scorer(asked, texts), dtype=torch.float32)

    def _update(self, number: int, samples: Samples, rewards_B: Tensor, curve: Curve) -> None:
        """One optimizer step, as the learner takes it."""
        learner = self.config.learner
        with torch.no_grad():
            needs_reference = self.config.algorithm.needs.reference
            nothing_T = torch.full_like(samples.logprobs_T, torch.nan)
            reference_T = completion_logprobs(self._reference, samples, self._pad) if needs_reference else nothing_T
        logprobs_T = completion_logprobs(self._policy, samples, self._pad)
        group_B = torch.arange(learner.groups_per_step).repeat_interleave(self.config.actors.group_size)
        inputs = LossInputs(
            logprobs_T=logprobs_T,
            proximal_logprobs_T=logprobs_T.detach(),
            behaviour_logprobs_T=samples.logprobs_T,
            reference_logprobs_T=reference_T,
            sequence_T=samples.sequence_T,
            group_B=group_B,
            rewards_B=rewards_B,
            finished_B=samples.finished_B,
            num_groups=learner.groups_per_step,
            lag_T=torch.full_like(samples.sequence_T, min(number, self.lag)),
        )
        output = self._loss(inputs)
        fresh_T = torch.full_like(samples.sequence_T, min(number, self.lag) == 0, dtype=torch.bool)
        metrics = off_policy_metrics(inputs, fresh_T, output.weights_T)
        self._adam.zero_grad()
        output.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), learner.max_grad_norm)
        rate = learning_rate(learner, number)
        if learner.ess_budget is not None:
            rate *= ess_scale(metrics[ESS_METRIC], learner.ess_budget)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        curve.reward.append(float(rewards_B.mean()))
        curve.ess.append(metrics["off_policy/ess_sequence"] or 0.0)
        curve.k1.append(metrics["mismatch/k1"] or 0.0)
        curve.k3.append(metrics["mismatch/k3"] or 0.0)
        curve.grad_norm.append(float(norm))
