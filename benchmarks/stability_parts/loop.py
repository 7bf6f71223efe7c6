"""Training loop in one process and one thread, with a sample queue instead of the replay buffer.

The loop reproduces the lag of the system without its processes. A `Sampler` replaces the engine. The
`StalenessContract` of the run admits new samples, and the `LagControl` of the run controls the lag.
"""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from benchmarks.lib.machine import ROOT
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from leeway.actors.tasks import load_reward, load_task
from leeway.actors.tasks.task import Problem
from leeway.algorithms.base import LossInputs
from leeway.algorithms.corrections import off_policy_metrics
from leeway.algorithms.registry import loss_for
from leeway.common.staleness import StalenessContract
from leeway.launch.config import Config, load_config
from leeway.learner.lag_control import LagControl, drift_per_token, masked, older_lag, root_length
from leeway.learner.optimizer import ADAM_BETAS, ADAM_EPS, learning_rate

CONFIG = ROOT / "examples" / "sums.toml"
PARTS = 4
"""Number of parts per step; new samples are admitted one part at a time."""


@dataclass(frozen=True)
class Samples:
    """B completions of one or more policies. T indexes all tokens in order, including end-of-sequence tokens."""

    prompts: list[list[int]]
    """Prompt of each completion."""
    completions: list[list[int]]
    logprobs_T: Tensor
    finished_B: Tensor

    @property
    def sequence_T(self) -> Tensor:
        """Return the index of the completion of each token."""
        lengths = torch.tensor([len(completion) for completion in self.completions])
        return torch.arange(len(self.completions)).repeat_interleave(lengths)


class Sampler:
    """Sampler that draws from a model like vLLM, at temperature 1 and over the full vocabulary."""

    def __init__(self, model: PreTrainedModel, pad: int, eos: int, max_new_tokens: int) -> None:
        self._model = model
        self._pad = pad
        self._eos = eos
        self._max_new_tokens = max_new_tokens

    @torch.no_grad()
    def sample(self, prompts: Sequence[list[int]], group_size: int, random: torch.Generator | None = None) -> Samples:
        """Return `group_size` completions of each prompt; decode greedily if `random` is None."""
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
    """Return the differentiable log-probability of each completion token under a model, of shape T."""
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
    # padding is on the right, so no token of a causal model attends to padding
    logits = model(tokens[:, :-1], use_cache=False).logits
    chosen = is_completion[:, 1:]
    logprobs_T: Tensor = logits[chosen].log_softmax(-1).gather(1, tokens[:, 1:][chosen][:, None])[:, 0]
    return logprobs_T


@dataclass(frozen=True)
class Part:
    """Queued groups that no update has used yet."""

    version: int
    """Version of the policy that sampled the groups."""
    samples: Samples
    rewards_B: Tensor


@dataclass
class Curve:
    """Metrics of a run, with one entry per update."""

    reward: list[float] = field(default_factory=list)
    """Mean reward of the samples of an update."""
    lag: list[float] = field(default_factory=list)
    """Mean lag of the tokens of an update, in policy versions."""
    allowed: list[int] = field(default_factory=list)
    """Maximum lag at which new samples were admitted after an update."""
    drift: list[float] = field(default_factory=list)
    """Mean drift per token of the samples of an update, in nats."""
    root: list[float] = field(default_factory=list)
    """Factor of the drift per token: `root_length` of an update."""
    lr_scale: list[float] = field(default_factory=list)
    masked: list[float] = field(default_factory=list)
    """Fraction of tokens whose gradient was masked."""
    ess: list[float] = field(default_factory=list)
    """Effective sample share over sequences, computed from raw importance weights."""
    k1: list[float] = field(default_factory=list)
    """Mean of log mu - log pi over tokens."""
    k3: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    sampled: dict[int, float] = field(default_factory=dict)
    """Number of updates -> accuracy on the held-out problems, at temperature 1."""


class DelayedRun:
    """One run with the task, model and settings of a config. Each step has one update."""

    def __init__(self, overrides: list[str], seed: int, config: Path = CONFIG, pace: float = 2.0) -> None:
        """Load the config, task, tokenizer and models.

        Args:
            overrides: overrides of the config, in the form that `leeway train` accepts.
            seed: seed of the prompt order and of the samples.
            config: config of a run; its task has one synchronous reward function, and its max_lag is a number.
            pace: number of steps whose samples can be generated while one step trains. Above 1, the queue is always as
                full as admission permits, and every token has the resulting lag.
        """
        self.config: Config = load_config(config, overrides)
        learner = self.config.learner
        self._contract = StalenessContract(self.config.weight_sync, learner.groups_per_step)
        self._control = LagControl(self._contract) if self.config.weight_sync.controls_lag else None
        self._pace = pace
        self._part_size = learner.groups_per_step // PARTS
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
        self._past: deque[list[Tensor]] = deque(maxlen=self._contract.actor_lag + 1)
        """Weights of the newest versions, which actors may still serve; the oldest version is first."""
        self._prompts: list[Problem] = []
        self._queue: deque[Part] = deque()
        self._adam = torch.optim.AdamW(
            self._policy.parameters(),
            betas=ADAM_BETAS,
            eps=ADAM_EPS,
            weight_decay=0.0,
        )
        self._loss = loss_for(self.config.algorithm)
        self._rate, self._rate_factor = 0.0, 1.0

    @property
    def _pad(self) -> int:
        return int(self._tokenizer.pad_token_id)

    @property
    def _eos(self) -> int:
        return int(self._tokenizer.eos_token_id)

    def train(self, num_updates: int, eval_every: int = 0, tenfold_from: int | None = None) -> Curve:
        """Run `num_updates` updates; evaluate after the last one, and every `eval_every` updates if that is not 0.

        From update `tenfold_from` on, the learning rate is ten times that of the config.
        """
        curve = Curve()
        for version in range(num_updates):
            self._rate_factor = 10.0 if tenfold_from is not None and version >= tenfold_from else 1.0
            self._past.append([parameter.detach().clone() for parameter in self._policy.parameters()])
            if version == 0:
                self._fill(version, math.inf, 0)
            while len(self._queue) < PARTS:  # the learner waits for samples
                self._generate(version)
            drawn = [self._queue.popleft() for _ in range(PARTS)]
            self._fill(version, PARTS * self._pace, self.config.learner.groups_per_step)
            self._update(version, drawn, curve)
            if version + 1 == num_updates or (eval_every and (version + 1) % eval_every == 0):
                curve.sampled[version + 1] = self.accuracy()
        return curve

    def _fill(self, version: int, most: float, held: int) -> None:
        """Generate up to `most` parts while admission is open; `held` groups are in the current step."""
        allowed = None if self._control is None else self._control.allowed
        while most > 0 and not self._contract.admit(
            len(self._queue) * self._part_size + held, version=version, published=version, allowed=allowed
        ):
            self._generate(version)
            most -= 1

    def _generate(self, version: int) -> None:
        """Queue a part sampled from the oldest policy that an actor may serve."""
        self._load(self._past[0])
        if len(self._prompts) < self._part_size:
            self._prompts = self._order.sample(self._problems, len(self._problems))
        drawn = [self._prompts.pop() for _ in range(self._part_size)]
        samples, rewards_B = self._answers(drawn, self.config.actors.group_size, self._random)
        self._queue.append(Part(version - (len(self._past) - 1), samples, rewards_B))

    def accuracy(self, *, greedy: bool = False) -> float:
        """Return the accuracy of the current policy on the held-out problems, at temperature 1 or greedy."""
        self._load([parameter.detach() for parameter in self._policy.parameters()])
        _, rewards_B = self._answers(self._heldout, 1, None if greedy else self._random)
        return float((rewards_B == 1).float().mean())

    def _load(self, values: list[Tensor]) -> None:
        """Copy weights into the policy of the sampler."""
        with torch.no_grad():
            for parameter, value in zip(self._behaviour.parameters(), values, strict=True):
                parameter.copy_(value)

    def _answers(
        self, problems: Sequence[Problem], size: int, random: torch.Generator | None
    ) -> tuple[Samples, Tensor]:
        """Sample completions from the policy of the sampler; return them with their rewards."""
        prompts = [self._tokenizer.encode(problem.text, add_special_tokens=False) for problem in problems]
        samples = self._sampler.sample(prompts, size, random)
        texts = self._tokenizer.batch_decode(samples.completions, skip_special_tokens=True)
        asked = [problem for problem in problems for _ in range(size)]
        return samples, torch.tensor(self._scorer(asked, texts), dtype=torch.float32)

    def _update(self, version: int, drawn: Sequence[Part], curve: Curve) -> None:
        """Apply one optimizer step in the same way as the learner, and record its metrics."""
        learner, size = self.config.learner, self.config.actors.group_size
        samples = Samples(
            prompts=[prompt for part in drawn for prompt in part.samples.prompts],
            completions=[completion for part in drawn for completion in part.samples.completions],
            logprobs_T=torch.cat([part.samples.logprobs_T for part in drawn]),
            finished_B=torch.cat([part.samples.finished_B for part in drawn]),
        )
        rewards_B = torch.cat([part.rewards_B for part in drawn])
        lag_T = torch.tensor([version - part.version for part in drawn]).repeat_interleave(self._part_size * size)[
            samples.sequence_T
        ]
        with torch.no_grad():
            needs_reference = self.config.algorithm.needs.reference
            nothing_T = torch.full_like(samples.logprobs_T, torch.nan)
            reference_T = completion_logprobs(self._reference, samples, self._pad) if needs_reference else nothing_T
        logprobs_T = completion_logprobs(self._policy, samples, self._pad)
        inputs = LossInputs(
            logprobs_T=logprobs_T,
            proximal_logprobs_T=logprobs_T.detach(),
            behaviour_logprobs_T=samples.logprobs_T,
            reference_logprobs_T=reference_T,
            sequence_T=samples.sequence_T,
            group_B=torch.arange(learner.groups_per_step).repeat_interleave(size),
            rewards_B=rewards_B,
            finished_B=samples.finished_B,
            num_groups=learner.groups_per_step,
            lag_T=lag_T,
            progress=learner.progress(version),
        )
        output = self._loss(inputs)
        metrics = off_policy_metrics(inputs, lag_T == 0, output.weights_T)
        (gradient_T,) = torch.autograd.grad(output.loss, logprobs_T, retain_graph=True)
        self._rate = learning_rate(learner, version, self._rate)
        rate, scale, pushed_T = self._rate * self._rate_factor, 1.0, gradient_T
        drift, root = drift_per_token(inputs), root_length(inputs)
        if self._control is not None:
            pushed_T = masked(gradient_T, inputs)
            scale = self._control.observe(drift, older_lag(lag_T.numpy()), rate, root)
        self._adam.zero_grad()
        logprobs_T.backward(pushed_T)
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), learner.max_grad_norm)
        for group in self._adam.param_groups:
            group["lr"] = rate * scale
        self._adam.step()
        curve.reward.append(float(rewards_B.mean()))
        curve.lag.append(float(lag_T.double().mean()))
        curve.allowed.append(self._contract.bound() or 0 if self._control is None else self._control.allowed)
        curve.drift.append(math.nan if drift is None else drift)
        curve.root.append(root)
        curve.lr_scale.append(scale)
        curve.masked.append(float((pushed_T != gradient_T).double().mean()))
        curve.ess.append(metrics["off_policy/ess_sequence"] or 0.0)
        curve.k1.append(metrics["mismatch/k1"] or 0.0)
        curve.k3.append(metrics["mismatch/k3"] or 0.0)
        curve.grad_norm.append(float(norm))
