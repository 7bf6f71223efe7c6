"""StepBatch: the trajectories of a step as flat arrays, built directly from Arrow columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from leeway.algorithms.base import LossInputs, group_advantages
from leeway.buffer.rows import flat_values, part_values
from leeway.common.run import OVERLONG
from leeway.common.staleness import PolicyVersion, effective_version
from leeway.learner.packing import IntArray, PackedBatch, PackingRule, pack

Lag0ByActor = dict[str, tuple[float, int]]
"""Actor -> (mean absolute difference of log-probabilities in nats, number of tokens)."""
LagByActor = dict[str, dict[int, int]]
"""Actor -> lag in versions -> number of tokens trained on."""


@dataclass(frozen=True)
class Leaves:
    """Model outputs that a loss reads, per completion token; or the gradient of the loss with respect to them."""

    logprobs_T: Tensor
    values_T: Tensor | None = None
    """Critic value of the state before each token; None without a critic."""

    def of(self, where_T: Tensor) -> Leaves:
        return Leaves(self.logprobs_T[where_T], None if self.values_T is None else self.values_T[where_T])


COLUMNS = (
    "group_id", "sample_index", "prompt_id", "prompt_length", "finished_s", "actor", "finish_reason", "token_ids",
    "logprobs", "spans", "reward", "reward_parts", "reference_logprobs",
)  # fmt: skip


@dataclass(frozen=True)
class StepBatch:
    """The data of one step, or the part of it that one update trains on.

    T indexes the completion tokens of the B sequences, in order.
    """

    rows: pa.RecordBatch
    packed: PackedBatch
    rule: PackingRule
    version: int
    """Learner version at which training uses these tokens."""
    resumed_at: Mapping[int, int]
    """Learner incarnation (restart number) -> policy version from which the incarnation started."""
    sequence_T: IntArray
    group_B: IntArray
    prompt_B: IntArray
    """Task prompt index of each sequence; the same in all groups of a prompt."""
    counted_T: IntArray
    """Version from which the lag of each token is counted; it takes learner restarts into account."""
    abandoned_T: npt.NDArray[np.bool_]
    """Tokens sampled by versions that a restart discarded; their lag is counted from the resumed checkpoint."""
    single_version_B: npt.NDArray[np.bool_]
    normalised: Mapping[str, float]
    """Weights of the rewards to standardise by group, as in the run's facts; empty: use the rewards of the rows."""

    @classmethod
    def build(
        cls,
        rows: pa.RecordBatch,
        version: int,
        resumed_at: Mapping[int, int],
        rule: PackingRule,
        normalised: Mapping[str, float] | None = None,
    ) -> StepBatch:
        """Flatten and pack rows of `leeway.buffer.schema.SCHEMA`; each row has a reward.

        Raises ValueError if a sequence exceeds the token budget, or if there is no sequence.
        """
        rows = rows.select(COLUMNS)
        packed = pack_rows(rows, rule)
        incarnation_S, version_S, start_S, end_S = map(np.asarray, rows.column("spans").flatten().flatten())
        row_S = np.repeat(np.arange(rows.num_rows), rows.column("spans").value_lengths())
        versions_of_rows = np.unique(np.stack([row_S, incarnation_S, version_S]), axis=1)
        counted_T = np.repeat(counted_versions(rows, resumed_at), end_S - start_S)
        return cls(
            rows=rows,
            packed=packed,
            rule=rule,
            version=version,
            resumed_at=resumed_at,
            sequence_T=np.repeat(np.arange(rows.num_rows), rows.column("logprobs").value_lengths()),
            group_B=_numbers(rows, "group_id"),
            prompt_B=np.array(rows.column("prompt_id")),
            counted_T=counted_T,
            abandoned_T=counted_T < np.repeat(version_S, end_S - start_S),
            single_version_B=np.bincount(versions_of_rows[0], minlength=rows.num_rows) == 1,
            normalised=normalised or {},
        )

    def part(self, sequences: IntArray, version: int) -> StepBatch:
        """Return a batch of these sequences: ascending indices that form whole groups."""
        return StepBatch.build(self.rows.take(sequences), version, self.resumed_at, self.rule, self.normalised)

    def pack(self, sequences: IntArray) -> PackedBatch:
        """Pack these sequences for a scoring pass. Groups and prompts may be split: scoring is a single pass."""
        return pack_rows(self.rows.take(sequences), replace(self.rule, unit="sequence"))

    def tokens_of(self, sequences: IntArray) -> IntArray:
        """Return the indices in T of the completion tokens of these sequences."""
        is_chosen_B = np.zeros(self.rows.num_rows, np.bool_)
        is_chosen_B[sequences] = True
        return np.flatnonzero(is_chosen_B[self.sequence_T])

    @property
    def num_groups(self) -> int:
        return int(self.group_B.max()) + 1

    @property
    def lag_T(self) -> IntArray:
        """Lag of each token at training, in versions."""
        return self.version - self.counted_T

    @property
    def fresh_T(self) -> npt.NDArray[np.bool_]:
        """Tokens of lag 0 in single-version sequences, except tokens that a restart discarded."""
        return (self.lag_T == 0) & self.single_version_B[self.sequence_T] & ~self.abandoned_T

    def unscored(self) -> IntArray:
        """Return the indices of sequences without reference log-probabilities."""
        return np.flatnonzero(self.rows.column("reference_logprobs").is_null())

    def bounds_T(self) -> IntArray:
        """Return the start of each completion in T, and the end of the last: [B + 1]."""
        return np.searchsorted(self.sequence_T, np.arange(self.rows.num_rows + 1)).astype(np.int64)

    def loss_inputs(self, leaves: Leaves, old: Leaves, reference_T: Tensor, progress: float = 0.0) -> LossInputs:
        """Return the inputs of the loss; the current log-probabilities and values are differentiable leaves.

        `old` has the outputs of the weights at the start of the step; `LossInputs` describes `progress`.
        """
        device, dtype = leaves.logprobs_T.device, leaves.logprobs_T.dtype

        def floats(column: pa.Array) -> Tensor:
            return torch.tensor(np.asarray(column), dtype=dtype, device=device)

        def integers(values: IntArray) -> Tensor:
            return torch.from_numpy(values).to(device)

        column = self.rows.column
        prompts, prompt_B = np.unique(self.prompt_B, return_inverse=True)
        inputs = LossInputs(
            logprobs_T=leaves.logprobs_T.detach().clone().requires_grad_(),
            proximal_logprobs_T=old.logprobs_T.detach(),
            behaviour_logprobs_T=floats(column("logprobs").flatten()),
            reference_logprobs_T=reference_T,
            sequence_T=integers(self.sequence_T),
            group_B=integers(self.group_B),
            rewards_B=floats(column("reward")),
            finished_B=torch.tensor(np.asarray(column("finish_reason")) == "stop", device=device),
            num_groups=self.num_groups,
            prompt_B=integers(prompt_B),
            num_prompts=len(prompts),
            values_T=None if leaves.values_T is None else leaves.values_T.detach().clone().requires_grad_(),
            old_values_T=None if old.values_T is None else old.values_T.detach(),
            lag_T=integers(self.lag_T),
            progress=progress,
        )
        if not self.normalised:
            return inputs
        return replace(inputs, rewards_B=normalised_rewards_B(inputs, column("reward_parts"), self.normalised))


def normalised_rewards_B(inputs: LossInputs, parts: pa.Array, weights: Mapping[str, float]) -> Tensor:
    """Return the weighted sum of the rewards, each standardised in its group as for 'grpo', plus the length penalty: B.

    A reward that does not apply to a sample adds 0.
    """
    total_B = torch.from_numpy(np.nan_to_num(part_values(parts, OVERLONG))).to(inputs.rewards_B)
    for name, weight in weights.items():
        value_B = torch.from_numpy(part_values(parts, name)).to(inputs.rewards_B)
        known_B = ~value_B.isnan()
        own = replace(inputs, group_B=inputs.group_B[known_B], rewards_B=value_B[known_B])
        total_B[known_B] += weight * group_advantages(own, own.rewards_B, "grpo")
    return total_B


def lag0_by_actor(batch: StepBatch, logprobs_T: Tensor) -> Lag0ByActor:
    """Return the metric `mismatch/lag0_abs` by actor.

    Only tokens of lag 0 count: their difference comes from different implementations or wrong weights, not from lag.
    """
    sampled_T = np.asarray(batch.rows.column("logprobs").flatten(), np.float64)
    actor_B = np.asarray(batch.rows.column("actor"))
    difference_T = np.abs(sampled_T - logprobs_T.detach().double().cpu().numpy())
    counts_T = batch.fresh_T & np.isfinite(difference_T)
    found: Lag0ByActor = {}
    for actor in np.unique(actor_B):
        where_T = counts_T & (actor_B == actor)[batch.sequence_T]
        if where_T.any():
            found[actor] = float(difference_T[where_T].mean()), int(where_T.sum())
    return found


def lag_by_actor(updates: Sequence[StepBatch]) -> LagByActor:
    """Return the lag distribution of each actor, as in the metrics `lag/token_...`; a token counts once per update."""
    found: LagByActor = {}
    for batch in updates:
        actors, actor_B = np.unique(np.asarray(batch.rows.column("actor")), return_inverse=True)
        width = int(batch.lag_T.max(initial=0)) + 1
        counts = np.bincount(actor_B[batch.sequence_T] * width + batch.lag_T)
        for key in np.flatnonzero(counts):
            lags = found.setdefault(str(actors[key // width]), {})
            lags[int(key % width)] = lags.get(int(key % width), 0) + int(counts[key])
    return found


def counted_versions(rows: pa.RecordBatch, resumed_at: Mapping[int, int]) -> IntArray:
    """Return the version from which the lag of each span's tokens is counted, after learner restarts."""
    incarnations, versions, *_ = rows.column("spans").flatten().flatten()
    sampled_S = list(zip(incarnations.to_pylist(), versions.to_pylist(), strict=True))
    counted = {each: effective_version(PolicyVersion(*each), resumed_at) for each in set(sampled_S)}
    return np.array([counted[each] for each in sampled_S], np.int64)


def pack_rows(rows: pa.RecordBatch, rule: PackingRule) -> PackedBatch:
    """Pack trajectories, given as Arrow columns; raise the errors of `pack`."""
    tokens, bounds = flat_values(rows.column("token_ids"))
    sequences = [tokens[start:end] for start, end in pairwise(bounds.tolist())]
    unit_B = _numbers(rows, "prompt_id" if rule.unit == "prompt" else "group_id")
    return pack(sequences, rows.column("prompt_length").to_pylist(), rule, unit_B)


def _numbers(rows: pa.RecordBatch, name: str) -> IntArray:
    """Return the values of a column, renumbered from 0."""
    return np.unique(rows.column(name), return_inverse=True)[1].reshape(-1)
