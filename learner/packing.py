"""Packing of whole sequences into micro-batches of one shape, and assignment of micro-batches to replicas.

    best fit   place sequences, longest first, into the fullest micro-batch with room; counts the micro-batches
    spread     redistribute over the same number of micro-batches, or more if the schedule requires more: each sequence
               goes into the cheapest micro-batch with room; if a sequence does not fit, the best-fit result is used
    deal       assign equal numbers of micro-batches to the replicas, balanced by cost
    order      sort the micro-batches of a replica: increasing cost up to the most expensive, then decreasing
    whole      apply the steps above to groups or prompts instead of sequences, if the loss compares samples only
               within a group or prompt, or if samples share prompts
    lay out    store a prompt once if several sequences of a micro-batch share it

Every micro-batch is [1, L] with L = token_budget: a single shape lets the pipeline keep its buffers. Attention gathers
the keys of a prompt for each sequence, so shared prompts count in full towards the budget, unless `most_gathered` is
higher. The packing depends only on the sequences, so every rank computes the same packing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # at run time, this import would load torch, which planning must not load
    from leeway.algorithms.base import Unit

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

MOST_EVALUATED = 2**27
"""Maximum product of tokens and micro-batches for which one pass is cheaper than two; the loss then takes 1 to 2 s."""
ONE_PASS = 3 / 4
"""Cost of a one-pass update relative to two passes, assuming that a forward pass costs a third of a training pass."""

MOST_GATHERED = 4
"""`PackingRule.most_gathered` of a single stage on a CPU. More stages need several micro-batches to overlap, and the
memory estimate of a GPU counts keys once."""

PAD_TOKEN = 0
"""Token id of padding; any valid id works."""


@dataclass(frozen=True)
class CostModel:
    """Cost of a sequence of n tokens: per_token * n + per_token_squared * n^2, in any unit.

    The first term is the cost of the weights, the second that of attention. Only the ratio of both terms matters. The
    default counts tokens.
    """

    per_token: float = 1.0
    per_token_squared: float = 0.0

    def of(self, lengths_B: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the cost of each sequence from its length in tokens: [B] -> [B]."""
        tokens_B = np.asarray(lengths_B, np.float64)
        return self.per_token * tokens_B + self.per_token_squared * tokens_B**2


@dataclass(frozen=True)
class PackingRule:
    """Constraints on the number and shape of micro-batches."""

    token_budget: int
    num_replicas: int = 1
    """R, the number of replicas; each gets the same number of micro-batches."""
    min_micro_batches: int = 1
    multiple: int = 1
    """The number of micro-batches per replica is a multiple of this."""
    cost: CostModel = field(default_factory=CostModel)
    unit: Unit = "sequence"
    """Unit within which the loss compares samples. If every unit fits the budget, and whole units save time, each
    unit is kept whole in one micro-batch, which allows a one-pass update."""
    num_stages: int = 1
    """P, the number of pipeline stages per replica."""
    most_gathered: int = 1
    """If above 1, a unit that is kept whole counts each prompt once towards the budget, and the sequences of a
    micro-batch have at most this multiple of the budget in tokens."""

    @classmethod
    def of_schedule(
        cls, schedule: str, num_stages: int, token_budget: int, num_replicas: int, cost: CostModel, unit: Unit
    ) -> PackingRule:
        """Return the rule for a pipeline whose schedule constrains the number of micro-batches."""
        least, multiple = micro_batches_required(schedule, num_stages)
        return cls(token_budget, num_replicas, least, multiple, cost, unit, num_stages)

    def on_device(self, kind: str) -> PackingRule:
        return replace(self, most_gathered=MOST_GATHERED if kind == "cpu" and self.num_stages == 1 else 1)

    def num_micro_batches(self, needed: int) -> int:
        """Return the number of micro-batches over all replicas, given that `needed` of them hold the tokens."""
        per_replica = max(-(-needed // self.num_replicas), self.min_micro_batches, 1)
        return self.num_replicas * (-(-per_replica // self.multiple) * self.multiple)


def micro_batches_required(schedule: str, num_stages: int) -> tuple[int, int]:
    """Return the minimum number of micro-batches per replica that a schedule requires, and the required multiple.

    1F1B and fused passes need at least one per stage; interleaved schedules need a multiple of `num_stages`.
    """
    if num_stages == 1:
        return 1, 1
    return num_stages, 1 if schedule in ("1f1b", "fused") else num_stages


@dataclass(frozen=True)
class PackedBatch:
    """A batch as M micro-batches of L tokens, and the mapping back to its T completion tokens.

    T indexes completion tokens in the order of the given sequences. Each replica runs M / R micro-batches; those of
    replica r start at row r * M / R (see `of_replica`).
    """

    tokens_ML: IntArray
    positions_ML: IntArray
    """Position of each token within its sequence; 0 on padding."""
    members: tuple[IntArray, ...]
    """Per micro-batch: indices of its sequences, from left to right."""
    bounds: tuple[IntArray, ...]
    """Per micro-batch: starts of its sequences, each including its prompt, and the end of the last. An empty
    micro-batch has one sequence of one padding token, [0, 1]."""
    places: tuple[IntArray, ...]
    """Per micro-batch: packed position of each token of its sequences; positions of a shared prompt repeat."""
    predicting: tuple[IntArray, ...]
    """Per micro-batch: positions of the states that predict its completion tokens."""
    predicted: tuple[IntArray, ...]
    """Per micro-batch: indices of its completion tokens in T."""
    output_T: IntArray
    """Flat index m * L + l of each completion token, and of its log-probability in the output; -1 if it belongs to
    another replica."""
    cost_M: FloatArray
    unit: Unit = "sequence"
    """Unit that is never split across micro-batches."""

    @property
    def num_micro_batches(self) -> int:
        return len(self.bounds)

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding; a shared prompt counts once per sequence."""
        return sum(int(edges[-1]) for edges, members in zip(self.bounds, self.members, strict=True) if len(members))

    @property
    def num_empty(self) -> int:
        return sum(len(members) == 0 for members in self.members)

    @property
    def width(self) -> int:
        """L, tokens per micro-batch, including padding."""
        return int(self.tokens_ML.shape[1])

    @property
    def efficiency(self) -> float:
        """`num_tokens` divided by the size of the micro-batches; above 1 only if the budget counts prompts once."""
        return self.num_tokens / self.tokens_ML.size

    @property
    def shared_frac(self) -> float:
        """Fraction of `num_tokens` that is not computed, as another sample of the micro-batch has the same prompt."""
        held = [
            int(places.max()) + 1 for places, members in zip(self.places, self.members, strict=True) if len(members)
        ]
        return 1 - sum(held) / self.num_tokens

    def cost_balance(self, num_replicas: int) -> float:
        """Return the mean cost of the replicas divided by the maximum; 1 is balanced."""
        cost_R = self.cost_M.reshape(num_replicas, -1).sum(axis=1)
        return float(cost_R.mean() / cost_R.max())

    def of_replica(self, replica: int, num_replicas: int) -> PackedBatch:
        """Return the M / R micro-batches of one replica, with all T entries of `output_T`."""
        if num_replicas == 1:
            return self
        share = self.num_micro_batches // num_replicas
        rows = slice(replica * share, (replica + 1) * share)
        first = replica * share * self.width
        is_own_T = (self.output_T >= first) & (self.output_T < first + share * self.width)
        return replace(
            self,
            tokens_ML=self.tokens_ML[rows],
            positions_ML=self.positions_ML[rows],
            members=self.members[rows],
            bounds=self.bounds[rows],
            places=self.places[rows],
            predicting=self.predicting[rows],
            predicted=self.predicted[rows],
            output_T=np.where(is_own_T, self.output_T - first, -1),
            cost_M=self.cost_M[rows],
        )


def best_fit(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Assign sequences, longest first, to the fullest bin with room; raise ValueError if one exceeds the budget."""
    descending = longest_first(lengths)
    if descending and lengths[descending[0]] > token_budget:
        raise ValueError(
            f"sequence {descending[0]} of the batch has {lengths[descending[0]]} tokens, but learner.token_budget = "
            f"{token_budget}: raise token_budget to at least the longest prompt plus completion"
        )
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free tokens, bin), ascending
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
    """Assign sequences to `num_bins` bins of similar cost: longest first, each to the cheapest bin with room.

    Return None if a sequence does not fit, even if best fit succeeds.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room_N, costs = [token_budget] * num_bins, cost_B.tolist()
    cheapest = [(0.0, n) for n in range(num_bins)]
    for i in longest_first(lengths):
        full: list[tuple[float, int]] = []
        while cheapest and room_N[cheapest[0][1]] < lengths[i]:
            full.append(heappop(cheapest))
        if not cheapest:
            return None
        cost, chosen = cheapest[0]
        bins[chosen].append(i)
        room_N[chosen] -= lengths[i]
        heapreplace(cheapest, (cost + costs[i], chosen))
        for each in full:  # these bins may have room for shorter sequences
            heappush(cheapest, each)
    return bins


def deal(cost_N: FloatArray, num_replicas: int) -> list[list[int]]:
    """Assign N bins to R replicas, N / R each, balanced by cost.

    Bins are assigned in rounds of R, in decreasing order of cost. In each round, the replica with the lowest total cost
    gets the most expensive bin. No bin of a round is cheaper than a bin of the next round. So two totals differ by at
    most max - min (over bins), and the highest total exceeds the mean by at most (1 - 1/R) (max - min).
    """
    rounds_MR = np.argsort(-cost_N, kind="stable").reshape(-1, num_replicas)
    share_RM = np.zeros(rounds_MR.T.shape, np.int64)
    cost_R = np.zeros(num_replicas)
    for m, round_R in enumerate(rounds_MR):
        cheapest_first = np.argsort(cost_R, kind="stable")
        share_RM[cheapest_first, m] = round_R
        cost_R[cheapest_first] += cost_N[round_R]
    return [share.tolist() for share in share_RM]


def order(cost_N: FloatArray, bins: Sequence[int]) -> list[int]:
    """Return the order in which a pipeline runs bins: cheap ones at both ends, the most expensive in the middle.

    Stages are idle while the first bins fill the pipeline and the last ones drain it, and 1F1B overlaps forward and
    backward of adjacent bins. A forward-only pass (GPipe) costs sum + (P - 1) * max in any order.
    """
    rising = sorted(bins, key=lambda n: (cost_N[n], n))
    return rising[0::2] + rising[1::2][::-1]


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Return indices sorted by decreasing length, then by index."""
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def plan(lengths: Sequence[int], cost_B: FloatArray, rule: PackingRule) -> list[list[int]]:
    """Return the sequences of each micro-batch, replica by replica; raise the errors of `best_fit`."""
    fewest = best_fit(lengths, rule.token_budget)
    num_bins = rule.num_micro_batches(len(fewest))
    bins = spread(lengths, cost_B, rule.token_budget, num_bins)
    if bins is None:
        bins = fewest + [[] for _ in range(num_bins - len(fewest))]
    cost_N = np.array([cost_B[members].sum() for members in bins])
    return [bins[n] for share in deal(cost_N, rule.num_replicas) for n in order(cost_N, share)]


@dataclass(frozen=True)
class _Samples:
    length_B: IntArray
    prompt_B: IntArray
    same_B: IntArray
    """Prompt number of each sequence; equal prompts have equal numbers."""
    cost_B: FloatArray
    rule: PackingRule

    def shared(self, bin_B: IntArray) -> IntArray:
        """Return the prompt lengths, but 0 for the first sequence of each prompt in its bin (a micro-batch or unit)."""
        _, first = np.unique(bin_B * len(bin_B) + self.same_B, return_index=True)
        return np.where(np.isin(np.arange(len(bin_B)), first), 0, self.prompt_B)

    def cost_of(self, bin_B: IntArray, num_bins: int) -> FloatArray:
        saved_B = self.rule.cost.of(self.shared(bin_B))
        return np.bincount(bin_B, self.cost_B - saved_B, num_bins).astype(np.float64, copy=False)

    def cost_of_bins(self, bins: Sequence[Sequence[int]]) -> FloatArray:
        bin_B = np.zeros(len(self.length_B), np.int64)
        for m, members in enumerate(bins):
            bin_B[members] = m
        return self.cost_of(bin_B, len(bins))

    def bins(self, unit_B: IntArray | None) -> tuple[list[list[int]], FloatArray, Unit]:
        """Return the sequences and cost of each micro-batch, and the unit that is kept whole."""
        bins = plan(self.length_B.tolist(), self.cost_B, self.rule)
        cost_M = self.cost_of_bins(bins)
        shares = len(np.unique(self.same_B)) < len(self.same_B)
        if unit_B is not None and (self.rule.unit != "sequence" or shares):
            whole = self.whole(unit_B)
            whole_M = cost_M if whole is None else self.cost_of_bins(whole)
            passes = 1.0 if self.rule.unit == "sequence" else ONE_PASS
            if whole is not None and passes * _duration(whole_M, self.rule) <= _duration(cost_M, self.rule):
                return whole, whole_M, self.rule.unit
        return bins, cost_M, PackedBatch.unit

    def whole(self, unit_B: IntArray) -> list[list[int]] | None:
        """Return `plan` with the sequences of each unit in one micro-batch; None if a unit does not fit."""
        gathered_U = np.ceil(np.bincount(unit_B, self.length_B) / self.rule.most_gathered)
        length_U = np.maximum(gathered_U, np.bincount(unit_B, self.length_B - self.shared(unit_B))).astype(np.int64)
        if length_U.max() > self.rule.token_budget:
            return None
        bins = plan(length_U.tolist(), self.cost_of(unit_B, len(length_U)), self.rule)
        sequences_U = np.split(np.argsort(unit_B, kind="stable"), np.cumsum(np.bincount(unit_B))[:-1])
        return [[i for unit in units for i in sequences_U[unit].tolist()] for units in bins]


def _duration(cost_M: FloatArray, rule: PackingRule) -> float:
    """Return the time that the pipelines need for micro-batches, in units of cost; see `order`."""
    cost_RM = cost_M.reshape(rule.num_replicas, -1)
    return float((cost_RM.sum(axis=1) + (rule.num_stages - 1) * cost_RM.max(axis=1)).max())


def pack(
    sequences: Sequence[npt.NDArray[np.integer]],
    prompt_lengths: Sequence[int],
    rule: PackingRule,
    unit_B: IntArray | None = None,
) -> PackedBatch:
    """Pack sequences (prompt of at least 1 token, then completion) into the micro-batches of all replicas.

    `unit_B` is the unit of each sequence, numbered from 0; if `rule.unit` is "sequence", it groups sequences that may
    share a prompt. Raises ValueError if there is no sequence, or if one exceeds the budget or has no prompt.
    """
    if not sequences:
        raise ValueError("cannot pack an empty batch: it has no sequences")
    for i, prompt_length in enumerate(prompt_lengths):
        if prompt_length < 1:
            raise ValueError(f"sequence {i} has no prompt token to predict its first completion token from")
    lengths = [len(sequence) for sequence in sequences]
    same_B = same_prompts(sequences, prompt_lengths)
    samples = _Samples(np.array(lengths), np.array(prompt_lengths), same_B, rule.cost.of(lengths), rule)
    bins, cost_M, unit = samples.bins(unit_B)
    return _lay_out(sequences, samples, [np.array(members, np.int64) for members in bins], cost_M, unit)


def same_prompts(sequences: Sequence[npt.NDArray[np.integer]], prompt_lengths: Sequence[int]) -> IntArray:
    """Return the prompt number of each sequence, from 0; equal prompts have equal numbers: [B]."""
    numbers: dict[bytes, int] = {}
    return np.array(
        [
            numbers.setdefault(sequence[:length].tobytes(), len(numbers))
            for sequence, length in zip(sequences, prompt_lengths, strict=True)
        ]
    )


def cost_of_micro_batches(
    length_B: IntArray, prompt_B: IntArray, same_B: IntArray, rule: PackingRule, unit_B: IntArray
) -> tuple[FloatArray, Unit]:
    """Return the cost of each micro-batch that `pack` would create, and the unit kept whole, from lengths only.

    `same_B` has the prompt numbers of `same_prompts`. Costs are in the unit of `rule.cost`.
    """
    samples = _Samples(length_B, prompt_B, same_B, rule.cost.of(length_B), rule)
    _, cost_M, unit = samples.bins(unit_B)
    return cost_M, unit


def _lay_out(
    sequences: Sequence[npt.NDArray[np.integer]],
    samples: _Samples,
    members: list[IntArray],
    cost_M: FloatArray,
    unit: Unit,
) -> PackedBatch:
    """Build the micro-batches of these sequences; S indexes sequences in packed order."""
    width, length_B, prompt_B = samples.rule.token_budget, samples.length_B, samples.prompt_B
    completion_B = length_B - prompt_B
    order_S, bin_S = np.concatenate(members), np.repeat(np.arange(len(members)), list(map(len, members)))
    _, first, which_S = np.unique(
        bin_S * len(order_S) + samples.same_B[order_S], return_index=True, return_inverse=True
    )
    holder_S = first[which_S.reshape(-1)]  # the sequence that stores the prompt of each sequence
    own_S = completion_B[order_S] + np.where(holder_S == np.arange(len(order_S)), prompt_B[order_S], 0)
    before_S, filled_M = np.cumsum(own_S) - own_S, np.bincount(bin_S, own_S, len(members)).astype(np.int64)
    start_S = before_S + (np.arange(len(members)) * width - np.cumsum(filled_M) + filled_M)[bin_S]
    prompt_at_B, completion_at_B = np.zeros_like(length_B), np.zeros_like(length_B)
    prompt_at_B[order_S], completion_at_B[order_S] = start_S[holder_S], start_S + own_S - completion_B[order_S]
    runs = np.stack([prompt_at_B, completion_at_B, prompt_B, completion_B])[:, order_S]
    place = _runs(runs[:2].T.reshape(-1), runs[2:].T.reshape(-1))
    tokens_ML = np.full((len(members), width), PAD_TOKEN, np.int64)
    positions_ML = np.zeros_like(tokens_ML)
    tokens_ML.reshape(-1)[place] = np.concatenate([sequences[i] for i in order_S.tolist()])
    positions_ML.reshape(-1)[place] = _runs(np.zeros_like(order_S), length_B[order_S])
    bounds = [np.concatenate([[0], np.cumsum(length_B[indices])]) for indices in members]
    places = np.split(place, np.cumsum([edges[-1] for edges in bounds])[:-1])
    first_T = np.cumsum(completion_B) - completion_B
    output_T = _runs(completion_at_B, completion_B)
    state_T = output_T - 1
    state_T[first_T[completion_B > 0]] = (prompt_at_B + prompt_B - 1)[completion_B > 0]
    predicted = [_runs(first_T[indices], completion_B[indices]) for indices in members]
    return PackedBatch(
        tokens_ML,
        positions_ML,
        members=tuple(members),
        bounds=tuple(edges if len(edges) > 1 else np.array([0, 1]) for edges in bounds),
        places=tuple(each - m * width if len(each) else np.array([0]) for m, each in enumerate(places)),
        predicting=tuple(state_T[where_T] - m * width for m, where_T in enumerate(predicted)),
        predicted=tuple(predicted),
        output_T=output_T,
        cost_M=cost_M,
        unit=unit,
    )


def _runs(start_B: IntArray, length_B: IntArray) -> IntArray:
    """Return the concatenated ranges start, start + 1, ..., start + length - 1."""
    ends_B = np.cumsum(length_B)
    offsets = np.arange(ends_B[-1] if len(ends_B) else 0)
    return offsets + np.repeat(start_B - (ends_B - length_B), length_B)
