"""TrainStep: a step trains one draw, in one or several updates that are exact for every loss built from its leaves.

    scores   log-probabilities of the reference; of the whole draw forward only: the proximal policy's, and old values
    then for every minibatch of every epoch an update, which makes a policy version:
    pass 1   forward only: log-probabilities, and the critic's values, of the minibatch as the weights are now
    loss     on the last stage: evaluate the algorithm once on the whole minibatch, g = dL / d(leaf)
    pass 2   the training schedule with the scalar sum(sg[g] * leaf) per micro-batch
    update   AdamW on every stage, or on none where loss or gradient are not finite

A group-level loss cannot be cut into micro-batches and a pipeline can run nothing else; with the
coefficients in between neither knows of the other. Minibatches hold whole groups. The first update of a draw
that is not divided needs no pass 1 of its own. All ranks call `run` with the same batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from algorithms.registry import AlgorithmConfig
from learner.batch import StepBatch
from learner.config import LearnerConfig
from learner.judge import DrawScores, Judge, Judgement, distance
from learner.minibatches import minibatches
from learner.model import DeviceBatch
from learner.networks import Networks
from learner.packing import IntArray
from learner.reference import Reference, Scores
from learner.updates import Metrics, Update, mean_metrics

BetweenUpdates = Callable[[int], None]


@dataclass(frozen=True)
class StepResult:
    """What a step did. On other ranks than the last the loss, the metrics of it and the scores are missing."""

    version: int
    """After the step: each update that was taken made one."""
    updates: tuple[Update, ...]
    metrics: Metrics
    new_scores: Scores = field(default_factory=dict)
    """Reference log-probabilities computed in this step."""

    @property
    def skipped(self) -> bool:
        """Was no update taken?"""
        return not any(update.result.taken for update in self.updates)

    @property
    def num_sick(self) -> int:
        """How many updates were not taken because loss or gradient were not finite."""
        return sum(update.result.sick for update in self.updates)


class TrainStep:
    """Runs steps on one rank of the pipeline."""

    def __init__(
        self,
        networks: Networks,
        reference: Reference,
        algorithm: AlgorithmConfig,
        config: LearnerConfig,
        seed: int = 0,
    ) -> None:
        """Wire the parts of a step.

        Args:
            networks: what is trained.
            reference: scores the samples.
            algorithm: its loss, of whole minibatches, is evaluated on the last rank only.
            config: minibatches, epochs, and the rule of the effective sample size.
            seed: of the order of minibatches; the same on all ranks.
        """
        self._networks = networks
        self._reference = reference
        self._config = config
        self._seed = seed
        self._keeps_prompts_whole = algorithm.needs.prompts
        self._judge = Judge(algorithm, config)

    def run(self, batch: StepBatch, step: int, between_updates: BetweenUpdates | None = None) -> StepResult:
        """Take one step.

        Args:
            batch: the same on all ranks, at the version that the step begins with.
            step: 0-based number of the step, for the learning-rate schedule and the order of minibatches.
            between_updates: called with the version before every update but the first.
        """
        clock = _Clock()
        self._judge.begin_step()
        draw, new_scores = self._score(batch, clock)
        updates: list[Update] = []
        version = batch.version
        for number, sequences in enumerate(self._divide(batch, step)):
            if updates and between_updates is not None:
                between_updates(version)
                clock.lap("time/publish")
            part = draw.part(sequences, version)
            is_scored = part.is_whole and not updates
            updates.append(self._update(part, step * self._config.updates_per_step + number, is_scored, clock))
            version += updates[-1].result.taken
        distances = draw.distance()
        clock.lap("time/loss")
        means = mean_metrics(updates, acts_on_ess=self._config.ess_budget is not None)
        return StepResult(version, tuple(updates), {**means, **distances, **clock.laps_s}, new_scores)

    def _score(self, batch: StepBatch, clock: _Clock) -> tuple[_Draw, Scores]:
        on_device = DeviceBatch(batch.packed, self._networks.policy.module.device)
        reference_T, new_scores = self._reference.score(batch, on_device)
        clock.lap("time/reference")
        old = self._networks.forward_only(on_device)
        clock.lap("time/forward")
        scores = None if old is None or reference_T is None else DrawScores(old, reference_T)
        return _Draw(batch, on_device, scores), new_scores

    def _divide(self, batch: StepBatch, step: int) -> list[IntArray]:
        """The sequences of each update."""
        config = self._config
        unit_B = batch.prompt_B if self._keeps_prompts_whole else batch.group_B
        return minibatches(unit_B, config.num_minibatches, config.num_epochs, (self._seed, step))

    def _update(self, part: _Part, number: int, is_scored: bool, clock: _Clock) -> Update:
        """One update; `is_scored`: the draw's scores are those of the present weights, computed in this packing."""
        if is_scored:
            leaves = None if part.scores is None else part.scores.old
        else:
            leaves = self._networks.forward_only(part.on_device)
            clock.lap("time/forward")
        judgement: Judgement | None = None
        if leaves is not None and part.scores is not None:
            judgement = self._judge.judge(part.batch, leaves, part.scores)
            part.remember(judgement.weights_T)
        clock.lap("time/loss")
        self._networks.train(part.on_device, None if judgement is None else judgement.gradient)
        clock.lap("time/backward")
        result = self._networks.update(number, None if judgement is None else judgement.verdict)
        clock.lap("time/optimizer")
        return Update(part.batch, result, {} if judgement is None else judgement.metrics)


@dataclass(frozen=True)
class _Part:
    """What an update trains."""

    batch: StepBatch
    is_whole: bool
    """Is it all of the draw?"""
    on_device: DeviceBatch
    scores: DrawScores | None
    where_T: Tensor
    """Its tokens among those of the draw."""
    applied_T: Tensor | None
    """Of the draw: where the applied weights are written down."""

    def remember(self, weights_T: Tensor | None) -> None:
        """Write the applied importance weights down; NaN stands for none."""
        if self.applied_T is not None and weights_T is not None:
            self.applied_T[self.where_T] = weights_T


class _Draw:
    """A draw on its way through its updates; scores and leaves are known on the last rank alone."""

    def __init__(self, batch: StepBatch, on_device: DeviceBatch, scores: DrawScores | None) -> None:
        self._batch = batch
        self._on_device = on_device
        self._scores = scores
        self._applied_T = None if scores is None else torch.full_like(scores.old.logprobs_T, torch.nan)

    def part(self, sequences: IntArray, version: int) -> _Part:
        """Some of its sequences, to be trained at a version."""
        device = self._on_device.tokens_ML.device
        where_T = torch.from_numpy(self._batch.tokens_of(sequences)).to(device)
        scores = None if self._scores is None else self._scores.of(where_T)
        if len(sequences) == len(self._batch.trajectories):
            batch = replace(self._batch, version=version)
            return _Part(batch, True, self._on_device, scores, where_T, self._applied_T)
        batch = self._batch.part(sequences, version)
        return _Part(batch, False, DeviceBatch(batch.packed, device), scores, where_T, self._applied_T)

    def distance(self) -> Metrics:
        """How far the data were from the policy when the draw began."""
        if self._scores is None or self._applied_T is None:
            return {}
        old = self._scores.old
        inputs = self._batch.loss_inputs(old, old, self._scores.reference_T, self._batch.version)
        applied = bool(torch.isfinite(self._applied_T).all()) and self._applied_T.numel() > 0
        return distance(self._batch, inputs, self._applied_T if applied else None)


class _Clock:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self.laps_s: dict[str, float] = {}
        self._last_s = time.perf_counter()

    def lap(self, name: str) -> None:
        """Count the seconds since the last lap."""
        now_s = time.perf_counter()
        self.laps_s[name] = self.laps_s.get(name, 0.0) + now_s - self._last_s
        self._last_s = now_s
