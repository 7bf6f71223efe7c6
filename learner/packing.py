"""Packing: whole sequences into micro-batches of one shape, and micro-batches onto replicas.

    best fit   longest first, each into the fullest micro-batch that still takes it: a least number. Every replica
               runs as many, and a schedule asks for a least number: there may have to be more
    spread     over that number the sequences are laid out anew, each into the cheapest micro-batch that takes it; where
               one finds no room, because there is hardly any to spare, the layout of best fit stands
    deal       onto the replicas, equal counts, the dearest replica cheap
    order      within a replica: from the cheapest up to the dearest, and down again
    whole      all of it with groups or prompts in the place of sequences, where a loss compares no further

Every micro-batch is [1, L] with L = token_budget: real sequences side by side, padding on the right, some of it
empty. One shape lets the pipeline keep its buffers, and whole sequences keep attention and positions exact; a stage
computes no padding. All of it follows from the lengths alone: every rank finds the same packing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from algorithms.base import Unit

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_ONE_PASS = 3 / 4
"""What an update costs in one pass, where a forward pass costs a third of a forward and backward one."""

PAD_TOKEN = 0
"""Any valid token id: padding is attended to by nothing, and no loss reads it."""


@dataclass(frozen=True)
class CostModel:
    """Cost of a sequence of n tokens: per_token * n + per_token_squared * n^2, in any unit.

    The first term is the weights' share (a token passes through each of them once), the second that of attention,
    where every token looks at those before it in its own sequence. Only their ratio matters. The default counts tokens.
    """

    per_token: float = 1.0
    per_token_squared: float = 0.0

    def of(self, lengths_B: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The cost of each sequence, from its tokens: [B] -> [B]."""
        tokens_B = np.asarray(lengths_B, np.float64)
        return self.per_token * tokens_B + self.per_token_squared * tokens_B**2


@dataclass(frozen=True)
class PackingRule:
    """How many micro-batches there may be, and of what shape."""

    token_budget: int
    """L, tokens of a micro-batch."""
    num_replicas: int = 1
    """R, which share the micro-batches, as many each."""
    min_micro_batches: int = 1
    """Least number per replica."""
    multiple: int = 1
    """The number per replica is a multiple of this."""
    cost: CostModel = field(default_factory=CostModel)
    unit: Unit = "sequence"
    """What is kept whole in a micro-batch, where the budget has room for every one of them and it pays: a loss that
    compares no further takes one pass then."""
    num_stages: int = 1
    """P, of the pipeline of a replica."""

    @property
    def least_tokens(self) -> int:
        """What a pass has room for that keeps every stage of every replica busy once."""
        return self.num_replicas * max(self.min_micro_batches, self.num_stages) * self.token_budget

    def num_micro_batches(self, needed: int) -> int:
        """Of all replicas, where `needed` would hold the tokens."""
        per_replica = max(-(-needed // self.num_replicas), self.min_micro_batches, 1)
        return self.num_replicas * (-(-per_replica // self.multiple) * self.multiple)


@dataclass(frozen=True)
class PackedBatch:
    """A batch as M micro-batches of L tokens, and the way back to its T completion tokens.

    T runs over the sequences in the order they were given, whatever micro-batch each landed in. Of all replicas, M
    is R times what each runs, and rows r * M / R and on are replica r's; `of_replica` cuts them out.
    """

    tokens_ML: IntArray
    positions_ML: IntArray
    """Position within its sequence; 0 on padding."""
    members: tuple[IntArray, ...]
    """Per micro-batch: the indices of its sequences, from left to right; none in an empty one."""
    bounds: tuple[IntArray, ...]
    """Per micro-batch: where its sequences start, and where the last ends (num_sequences + 1 values). An empty one
    shows a sequence of one padding token, [0, 1], so that attention need not know of it."""
    predicting: tuple[IntArray, ...]
    """Per micro-batch: the positions whose next token is a completion token, ascending."""
    predicted: tuple[IntArray, ...]
    """Per micro-batch: which of the T completion tokens those are."""
    output_T: IntArray
    """For each completion token, the flat index m * L + l of the output that holds its log-probability; -1 where
    that is another replica's."""
    cost_M: FloatArray
    """Cost of each micro-batch; 0 of an empty one."""
    unit: Unit = "sequence"
    """What lies in one micro-batch as a whole."""

    @property
    def num_micro_batches(self) -> int:
        """M."""
        return len(self.bounds)

    @property
    def num_tokens(self) -> int:
        """Real tokens, prompts included."""
        return sum(int(edges[-1]) for edges, members in zip(self.bounds, self.members, strict=True) if len(members))

    @property
    def num_empty(self) -> int:
        """Micro-batches without a sequence."""
        return sum(len(members) == 0 for members in self.members)

    @property
    def width(self) -> int:
        """L, tokens of each micro-batch with padding."""
        return int(self.tokens_ML.shape[1])

    @property
    def efficiency(self) -> float:
        """Real tokens over the tokens that the micro-batches have room for, 0..1."""
        return self.num_tokens / self.tokens_ML.size

    def cost_balance(self, num_replicas: int) -> float:
        """Mean cost of the replicas over that of the dearest: 1 is even, 1 / R is all of it on one."""
        cost_R = self.cost_M.reshape(num_replicas, -1).sum(axis=1)
        return float(cost_R.mean() / cost_R.max())

    def of_replica(self, replica: int, num_replicas: int) -> PackedBatch:
        """What one replica runs: its M / R micro-batches, and still all T entries of `output_T`."""
        if num_replicas == 1:
            return self
        share = self.num_micro_batches // num_replicas
        rows = slice(replica * share, (replica + 1) * share)
        first = replica * share * self.width
        is_ours_T = (self.output_T >= first) & (self.output_T < first + share * self.width)
        return replace(
            self,
            tokens_ML=self.tokens_ML[rows],
            positions_ML=self.positions_ML[rows],
            members=self.members[rows],
            bounds=self.bounds[rows],
            predicting=self.predicting[rows],
            predicted=self.predicted[rows],
            output_T=np.where(is_ours_T, self.output_T - first, -1),
            cost_M=self.cost_M[rows],
        )


def best_fit(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Assign sequences to bins, longest first, each into the fullest that still takes it: their indices per bin.

    Raises:
        ValueError: a sequence is longer than the budget; names it.
    """
    descending = longest_first(lengths)
    if descending and lengths[descending[0]] > token_budget:
        raise ValueError(
            f"sequence {descending[0]} of the batch has {lengths[descending[0]]} tokens, and a micro-batch takes "
            f"learner.token_budget = {token_budget}. Raise token_budget to the longest prompt plus completion, or more"
        )
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, bin), ascending
    for i in descending:
        at = bisect_left(free, (lengths[i], -1))
        if at == len(free):
            bins.append([])
            room, chosen = token_budget, len(bins) - 1
        else:
            room, chosen = free.pop(at)
        bins[chosen].append(i)
        insort(free, (room - lengths[i], chosen))
    return bins


def spread(lengths: Sequence[int], cost_B: FloatArray, token_budget: int, num_bins: int) -> list[list[int]] | None:
    """Assign sequences to `num_bins` bins of like cost: longest first, each into the cheapest bin that takes it.

    As `best_fit`, empty bins included; None where a sequence found no room left, which best fit may have.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    cost_N, room_N = np.zeros(num_bins), np.full(num_bins, token_budget)
    for i in longest_first(lengths):
        chosen = int(np.where(room_N >= lengths[i], cost_N, np.inf).argmin())
        if room_N[chosen] < lengths[i]:
            return None
        bins[chosen].append(i)
        cost_N[chosen] += cost_B[i]
        room_N[chosen] -= lengths[i]
    return bins


def deal(cost_N: FloatArray, num_replicas: int) -> list[list[int]]:
    """Share N bins among R replicas, N / R each, so that the dearest replica is cheap.

    In rounds of R bins, dearest first, each replica gets one of a round, and who has least so far the dearest. As no
    bin of a round is cheaper than one of the next, two replicas differ by no more than the dearest bin differs from
    the cheapest, so the dearest replica is above the mean by (1 - 1/R) (max - min) at most.
    """
    rounds_MR = np.argsort(-cost_N, kind="stable").reshape(-1, num_replicas)
    share_RM = np.zeros(rounds_MR.T.shape, np.int64)
    cost_R = np.zeros(num_replicas)
    for m, round_R in enumerate(rounds_MR):
        poorest_first = np.argsort(cost_R, kind="stable")
        share_RM[poorest_first, m] = round_R
        cost_R[poorest_first] += cost_N[round_R]
    return [share.tolist() for share in share_RM]


def order(cost_N: FloatArray, bins: Sequence[int]) -> list[int]:
    """The order in which a pipeline runs bins: the cheap ones at both ends, the dearest in the middle.

    Stages are idle while the first bins fill the pipeline and the last ones drain it, and 1F1B has a stage do forward
    and backward of bins that stand near each other at one time. GPipe takes as long in any order: every stage costs a
    bin alike, and of such a flow shop the duration is sum + (P - 1) max.
    """
    rising = sorted(bins, key=lambda n: (cost_N[n], n))
    return rising[0::2] + rising[1::2][::-1]


def longest_first(lengths: Sequence[int]) -> list[int]:
    """The order in which sequences are assigned: by length, then by index."""
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def plan(lengths: Sequence[int], rule: PackingRule) -> list[list[int]]:
    """Which sequences each micro-batch takes, replica by replica; errors as `best_fit`."""
    return _plan(lengths, rule.cost.of(lengths), rule)


def _plan(lengths: Sequence[int], cost_B: FloatArray, rule: PackingRule) -> list[list[int]]:
    fewest = best_fit(lengths, rule.token_budget)
    num_bins = rule.num_micro_batches(len(fewest))
    bins = spread(lengths, cost_B, rule.token_budget, num_bins)
    if bins is None:
        bins = fewest + [[] for _ in range(num_bins - len(fewest))]
    cost_N = np.array([cost_B[members].sum() for members in bins])
    return [bins[n] for share in deal(cost_N, rule.num_replicas) for n in order(cost_N, share)]


def _whole(lengths: Sequence[int], cost_B: FloatArray, unit_B: IntArray, rule: PackingRule) -> list[list[int]] | None:
    """As `plan`, with the sequences of a unit in one micro-batch; None where one does not fit."""
    length_U = np.bincount(unit_B, lengths).astype(np.int64)
    if length_U.max() > rule.token_budget:
        return None
    bins = _plan(length_U.tolist(), np.bincount(unit_B, cost_B).astype(np.float64), rule)
    sequences_U = np.split(np.argsort(unit_B, kind="stable"), np.cumsum(np.bincount(unit_B))[:-1])
    return [[i for unit in units for i in sequences_U[unit].tolist()] for units in bins]


def _duration(bins: Sequence[Sequence[int]], cost_B: FloatArray, rule: PackingRule) -> float:
    """How long a pipeline takes for them, in units of cost: see `order`."""
    cost_RM = np.array([cost_B[members].sum() for members in bins]).reshape(rule.num_replicas, -1)
    return float((cost_RM.sum(axis=1) + (rule.num_stages - 1) * cost_RM.max(axis=1)).max())


def pack(
    sequences: Sequence[npt.NDArray[np.integer]],
    prompt_lengths: Sequence[int],
    rule: PackingRule,
    unit_B: IntArray | None = None,
) -> PackedBatch:
    """Pack sequences (prompt of at least 1 token, then completion) into the micro-batches of all replicas.

    Where the rule has a unit, `unit_B` is that of each sequence, numbered from 0.

    Raises:
        ValueError: there is no sequence, one is longer than the budget, or one has no prompt.
    """
    if not sequences:
        raise ValueError("there is nothing to pack: the batch has no sequence")
    for i, prompt_length in enumerate(prompt_lengths):
        if prompt_length < 1:
            raise ValueError(f"sequence {i} has no prompt token, so nothing predicts its first completion token")
    lengths = [len(sequence) for sequence in sequences]
    length_B, prompt_B = np.array(lengths), np.array(prompt_lengths)
    cost_B = rule.cost.of(length_B)
    bins, unit = _plan(lengths, cost_B, rule), PackedBatch.unit
    whole = None if unit_B is None else _whole(lengths, cost_B, unit_B, rule)
    if whole is not None and _ONE_PASS * _duration(whole, cost_B, rule) <= _duration(bins, cost_B, rule):
        bins, unit = whole, rule.unit
    members = [np.array(indices, np.int64) for indices in bins]
    bounds = [np.concatenate([[0], np.cumsum(length_B[indices])]) for indices in members]
    start_B = np.zeros(len(lengths), np.int64)
    tokens_ML = np.full((len(members), rule.token_budget), PAD_TOKEN, np.int64)
    positions_ML = np.zeros_like(tokens_ML)
    counting = np.arange(rule.token_budget)
    for m, (indices, edges) in enumerate(zip(members, bounds, strict=True)):
        start_B[indices] = m * rule.token_budget + edges[:-1]
        for i, start in zip(indices.tolist(), edges.tolist(), strict=False):
            tokens_ML[m, start : start + lengths[i]] = sequences[i]
            positions_ML[m, start : start + lengths[i]] = counting[: lengths[i]]
    completion_B = length_B - prompt_B
    first_T = np.cumsum(completion_B) - completion_B
    # the output at position l holds log pi of the token at l + 1
    output_T = _runs(start_B + prompt_B - 1, completion_B)
    predicted = [_runs(first_T[indices], completion_B[indices]) for indices in members]
    return PackedBatch(
        tokens_ML,
        positions_ML,
        members=tuple(members),
        bounds=tuple(edges if len(edges) > 1 else np.array([0, 1]) for edges in bounds),
        predicting=tuple(output_T[where_T] - m * rule.token_budget for m, where_T in enumerate(predicted)),
        predicted=tuple(predicted),
        output_T=output_T,
        cost_M=np.array([cost_B[indices].sum() for indices in members]),
        unit=unit,
    )


def _runs(start_B: IntArray, length_B: IntArray) -> IntArray:
    """start, start + 1 .. start + length - 1 of each, one behind the other."""
    ends_B = np.cumsum(length_B)
    offsets = np.arange(ends_B[-1] if len(ends_B) else 0)
    return offsets + np.repeat(start_B - (ends_B - length_B), length_B)
