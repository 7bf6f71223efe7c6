"""StepBatch: the trajectories of a draw as the flat arrays that a step computes with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from algorithms.base import LossInputs
from buffer.trajectory import Trajectory
from common.staleness import effective_version
from learner.packing import IntArray, PackedBatch, PackingRule, pack

Lag0ByActor = dict[str, tuple[float, int]]
"""Actor -> mean absolute difference of log-probabilities (nats), and over how many tokens."""
LagByActor = dict[str, dict[int, int]]
"""Actor -> lag in versions -> trained tokens."""


@dataclass(frozen=True)
class Leaves:
    """What a loss reads of the weights, for each completion token; or its gradient with respect to that."""

    logprobs_T: Tensor
    values_T: Tensor | None = None
    """The critic's value of the state before each token; None where there is no critic."""

    def of(self, where_T: Tensor) -> Leaves:
        """Those of some tokens."""
        return Leaves(self.logprobs_T[where_T], None if self.values_T is None else self.values_T[where_T])


def trainable(trajectories: Sequence[Trajectory]) -> list[int]:
    """Indices of the trajectories that have a reward; the others were counted as filtered."""
    return [i for i, trajectory in enumerate(trajectories) if trajectory.reward is not None]


@dataclass(frozen=True)
class StepBatch:
    """One step's data, or the part of it that an update trains.

    T runs over the completion tokens of the B sequences, in order.
    """

    trajectories: tuple[Trajectory, ...]
    packed: PackedBatch
    """Of all replicas."""
    rule: PackingRule
    version: int
    """The learner's, at which these tokens are trained."""
    sequence_T: IntArray
    group_B: IntArray
    """0..num_groups-1, for each sequence."""
    prompt_B: IntArray
    """The task's number of each sequence's prompt: the same in all its groups."""
    counted_T: IntArray
    """The version that each token counts with, after restarts of the learner."""
    abandoned_T: npt.NDArray[np.bool_]
    """Tokens of versions that a learner restart abandoned; their lag counts from the checkpoint it resumed from."""
    single_version_B: npt.NDArray[np.bool_]

    @classmethod
    def build(
        cls,
        trajectories: Sequence[Trajectory],
        version: int,
        resumed_at: Mapping[int, int],
        rule: PackingRule,
    ) -> StepBatch:
        """Flatten and pack.

        Args:
            trajectories: all with a reward.
            version: the learner's, at which these tokens are trained.
            resumed_at: for every incarnation, the version that it started from.
            rule: of the packing.

        Raises:
            ValueError: a sequence does not fit the budget, or there is none.
        """
        sampled_T, counted_T = _versions(trajectories, resumed_at)
        lengths = np.array([trajectory.num_completion_tokens for trajectory in trajectories], np.int64)
        return cls(
            trajectories=tuple(trajectories),
            packed=pack_rows(trajectories, rule),
            rule=rule,
            version=version,
            sequence_T=np.repeat(np.arange(len(trajectories)), lengths),
            group_B=_group_numbers(trajectories),
            prompt_B=np.array([trajectory.prompt_id for trajectory in trajectories], np.int64),
            counted_T=counted_T,
            abandoned_T=counted_T < sampled_T,
            single_version_B=np.array([len({span.version for span in t.spans}) == 1 for t in trajectories]),
        )

    def part(self, sequences: IntArray, version: int) -> StepBatch:
        """Some of the sequences as a batch of their own.

        Args:
            sequences: their indices, ascending; whole groups.
            version: the learner's, at which they are trained.
        """
        rows = [self.trajectories[i] for i in sequences]
        where_T = self.tokens_of(sequences)
        return replace(
            self,
            trajectories=tuple(rows),
            packed=pack_rows(rows, self.rule),
            version=version,
            sequence_T=np.searchsorted(sequences, self.sequence_T[where_T]).astype(np.int64),
            group_B=_numbered(self.group_B[sequences]),
            prompt_B=self.prompt_B[sequences],
            counted_T=self.counted_T[where_T],
            abandoned_T=self.abandoned_T[where_T],
            single_version_B=self.single_version_B[sequences],
        )

    def tokens_of(self, sequences: IntArray) -> IntArray:
        """Where the completion tokens of these sequences stand in T, in order."""
        is_chosen_B = np.zeros(len(self.trajectories), np.bool_)
        is_chosen_B[sequences] = True
        return np.flatnonzero(is_chosen_B[self.sequence_T])

    @property
    def num_groups(self) -> int:
        """How many groups there are."""
        return int(self.group_B.max()) + 1

    @property
    def lag_T(self) -> IntArray:
        """Versions between the sampling of each token and its training."""
        return self.version - self.counted_T

    def unscored(self) -> IntArray:
        """Indices of sequences that the reference model has not scored yet."""
        return np.flatnonzero([trajectory.reference_logprobs is None for trajectory in self.trajectories])

    def bounds_T(self) -> IntArray:
        """Where each sequence's completion starts in T, and where the last ends (B + 1 values)."""
        return np.searchsorted(self.sequence_T, np.arange(len(self.trajectories) + 1)).astype(np.int64)

    def loss_inputs(self, leaves: Leaves, old: Leaves, reference_T: Tensor, step: int) -> LossInputs:
        """What the loss reads, with the log-probabilities and values of now as leaves to differentiate.

        Args:
            leaves: of the weights as they are.
            old: of the weights at the start of the draw: the proximal policy's, and the old values.
            reference_T: log-probabilities of the reference model.
            step: optimizer steps taken so far.
        """
        device, dtype = leaves.logprobs_T.device, leaves.logprobs_T.dtype

        def floats(values: npt.NDArray[np.floating] | list[float]) -> Tensor:
            return torch.tensor(np.asarray(values), dtype=dtype, device=device)

        def integers(values: IntArray) -> Tensor:
            return torch.from_numpy(values).to(device)

        rows = self.trajectories
        return LossInputs(
            logprobs_T=leaves.logprobs_T.detach().clone().requires_grad_(),
            proximal_logprobs_T=old.logprobs_T.detach(),
            behaviour_logprobs_T=floats(np.concatenate([row.logprobs for row in rows])),
            reference_logprobs_T=reference_T,
            sequence_T=integers(self.sequence_T),
            group_B=integers(self.group_B),
            rewards_B=floats([row.reward if row.reward is not None else np.nan for row in rows]),
            finished_B=torch.tensor([row.finish_reason == "stop" for row in rows], device=device),
            num_groups=self.num_groups,
            step=step,
            prompt_B=integers(self.prompt_B),
            values_T=None if leaves.values_T is None else leaves.values_T.detach().clone().requires_grad_(),
            old_values_T=None if old.values_T is None else old.values_T.detach(),
        )


def lag0_by_actor(batch: StepBatch, logprobs_T: Tensor) -> Lag0ByActor:
    """The metric `mismatch/lag0_abs`, actor by actor.

    Only tokens of lag 0 in sequences of a single version count: there the difference is an implementation gap, or
    wrong weights, and not staleness.

    Args:
        batch: the draw.
        logprobs_T: the learner's, at the weights with which the step begins.
    """
    sampled_T = np.concatenate([trajectory.logprobs for trajectory in batch.trajectories]).astype(np.float64)
    difference_T = np.abs(sampled_T - logprobs_T.detach().double().cpu().numpy())
    counts_T = (batch.lag_T == 0) & batch.single_version_B[batch.sequence_T] & np.isfinite(difference_T)
    found: Lag0ByActor = {}
    for actor in sorted({trajectory.actor for trajectory in batch.trajectories}):
        is_its_B = np.array([trajectory.actor == actor for trajectory in batch.trajectories])
        where_T = counts_T & is_its_B[batch.sequence_T]
        if where_T.any():
            found[actor] = float(difference_T[where_T].mean()), int(where_T.sum())
    return found


def lag_by_actor(updates: Sequence[StepBatch]) -> LagByActor:
    """The distribution behind the metrics `lag/token_...`, actor by actor: exact, and all that is needed to add up.

    Args:
        updates: what each update trained, at its own version; a token counts once for each.
    """
    found: LagByActor = {}
    for batch in updates:
        actors, actor_B = np.unique([trajectory.actor for trajectory in batch.trajectories], return_inverse=True)
        width = int(batch.lag_T.max(initial=0)) + 1
        counts = np.bincount(actor_B[batch.sequence_T] * width + batch.lag_T)
        for key in np.flatnonzero(counts):
            lags = found.setdefault(str(actors[key // width]), {})
            lags[int(key % width)] = lags.get(int(key % width), 0) + int(counts[key])
    return found


def pack_rows(trajectories: Sequence[Trajectory], rule: PackingRule) -> PackedBatch:
    """Pack trajectories by a rule; see `learner.packing.pack`."""
    tokens = [trajectory.token_ids for trajectory in trajectories]
    return pack(tokens, [trajectory.prompt_length for trajectory in trajectories], rule)


def _versions(trajectories: Sequence[Trajectory], resumed_at: Mapping[int, int]) -> tuple[IntArray, IntArray]:
    """The version that sampled each completion token, and the one that it counts with."""
    spans = [span for trajectory in trajectories for span in trajectory.spans]
    lengths = np.array([span.end - span.start for span in spans], np.int64)
    sampled = np.array([span.version.version for span in spans], np.int64)
    counted = np.array([effective_version(span.version, resumed_at) for span in spans], np.int64)
    return np.repeat(sampled, lengths), np.repeat(counted, lengths)


def _group_numbers(trajectories: Sequence[Trajectory]) -> IntArray:
    """The group of each sequence, numbered from 0; a group that a draw with replacement names twice counts as two."""
    seen: Counter[tuple[int, int]] = Counter()
    keys = []
    for trajectory in trajectories:
        sample = (trajectory.group_id, trajectory.sample_index)
        keys.append((trajectory.group_id, seen[sample]))
        seen[sample] += 1
    return _numbered(np.array(keys))


def _numbered(keys: npt.NDArray[np.int64]) -> IntArray:
    """Equal rows as equal numbers from 0, in the order of the keys."""
    return np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
