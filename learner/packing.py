"""Packing: whole sequences into micro-batches of one shape, and micro-batches onto replicas.

    best fit   longest first, each into the fullest micro-batch that takes it: a least number
    spread     over that number, or more if a schedule asks for it: each sequence into the cheapest micro-batch that
               takes it; if one finds no room, the layout of best fit stands
    deal       onto the replicas, equal counts, the dearest replica cheap
    order      within a replica: from the cheapest up to the dearest, and down again
    whole      all of it with groups or prompts in the place of sequences, if a loss compares no further or samples
               share prompts
    lay out    sequences with the same prompt in a micro-batch have it there once

Every micro-batch is [1, L] with L = token_budget: one shape lets the pipeline keep its buffers. Attention gathers a
prompt's keys for each sequence, so a budget is filled as if none were shared. All of it follows from the sequences
alone: every rank finds the same packing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # with torch, which planning does without
    from algorithms.base import Unit

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

MOST_EVALUATED = 2**27
"""Tokens times micro-batches up to which one pass is cheaper than two: a second or two of evaluating the loss."""
ONE_PASS = 3 / 4
"""Cost of an update in one pass, if a forward pass costs a third of a forward and backward one."""

PAD_TOKEN = 0
"""Any valid token id."""


@dataclass(frozen=True)
class CostModel:
    """Cost of a sequence of n tokens: per_token * n + per_token_squared * n^2, in any unit.

    The first term is the weights' share, the second that of attention. Only their ratio matters. The default counts
    tokens.
    """

    per_token: float = 1.0
    per_token_squared: float = 0.0

    def of(self, lengths_B: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the cost of each sequence, from its tokens: [B] -> [B]."""
        tokens_B = np.asarray(lengths_B, np.float64)
        return self.per_token * tokens_B + self.per_token_squared * tokens_B**2


@dataclass(frozen=True)
class PackingRule:
    """The number and the shape of micro-batches."""

    token_budget: int
    num_replicas: int = 1
    """R, which share the micro-batches, as many each."""
    min_micro_batches: int = 1
    multiple: int = 1
    """The number per replica is a multiple of this."""
    cost: CostModel = field(default_factory=CostModel)
    unit: Unit = "sequence"
    """What a loss that compares no further has to find whole in a micro-batch to take one pass; packed so if every
    one fits the budget and it pays."""
    num_stages: int = 1
    """P, of the pipeline of a replica."""

    @classmethod
    def of_schedule(
        cls, schedule: str, num_stages: int, token_budget: int, num_replicas: int, cost: CostModel, unit: Unit
    ) -> PackingRule:
        """Return the rule of a pipeline whose schedule decides how many micro-batches it runs."""
        least, multiple = micro_batches_asked(schedule, num_stages)
        return cls(token_budget, num_replicas, least, multiple, cost, unit, num_stages)

    def num_micro_batches(self, needed: int) -> int:
        """Of all replicas, if `needed` would hold the tokens."""
        per_replica = max(-(-needed // self.num_replicas), self.min_micro_batches, 1)
        return self.num_replicas * (-(-per_replica // self.multiple) * self.multiple)


def micro_batches_asked(schedule: str, num_stages: int) -> tuple[int, int]:
    """Return the least number of micro-batches that a replica has to run by its schedule, and of what it is a multiple.

    1F1B and fused passes take at least one per stage, schedules in rounds whole rounds of them.
    """
    if num_stages == 1:
        return 1, 1
    return num_stages, 1 if schedule in ("1f1b", "fused") else num_stages


@dataclass(frozen=True)
class PackedBatch:
    """A batch as M micro-batches of L tokens, and the way back to its T completion tokens.

    T runs over the sequences in the order they were given. M is R times what each replica runs, and rows r * M / R and
    on are replica r's; `of_replica` cuts them out.
    """

    tokens_ML: IntArray
    positions_ML: IntArray
    """Position within its sequence; 0 on padding."""
    members: tuple[IntArray, ...]
    """Per micro-batch: the indices of its sequences, from left to right."""
    bounds: tuple[IntArray, ...]
    """Per micro-batch: the starts of its sequences, each with its own prompt, and the end of the last. An empty one
    shows a sequence of one padding token, [0, 1]."""
    places: tuple[IntArray, ...]
    """Per micro-batch: the place of each token of those sequences; that of a shared prompt occurs several times."""
    predicting: tuple[IntArray, ...]
    """Per micro-batch: the positions before its completion tokens."""
    predicted: tuple[IntArray, ...]
    """Per micro-batch: which of the T completion tokens those are."""
    output_T: IntArray
    """For each completion token, the flat index m * L + l of it and of its log-probability in the output; -1 if that
    is another replica's."""
    cost_M: FloatArray
    unit: Unit = "sequence"
    """What lies in one micro-batch as a whole."""

    @property
    def num_micro_batches(self) -> int:
        return len(self.bounds)

    @property
    def num_tokens(self) -> int:
        """Real tokens, with a prompt for each sequence."""
        return sum(int(edges[-1]) for edges, members in zip(self.bounds, self.members, strict=True) if len(members))

    @property
    def num_empty(self) -> int:
        return sum(len(members) == 0 for members in self.members)

    @property
    def width(self) -> int:
        """L, tokens of each micro-batch with padding."""
        return int(self.tokens_ML.shape[1])

    @property
    def efficiency(self) -> float:
        """Real tokens over the room of the micro-batches."""
        return self.num_tokens / self.tokens_ML.size

    @property
    def shared_frac(self) -> float:
        """Share of the real tokens that is not computed: prompts that another sample has in its micro-batch."""
        held = [
            int(places.max()) + 1 for places, members in zip(self.places, self.members, strict=True) if len(members)
        ]
        return 1 - sum(held) / self.num_tokens

    def cost_balance(self, num_replicas: int) -> float:
        """Mean cost of the replicas over that of the dearest: 1 is even."""
        cost_R = self.cost_M.reshape(num_replicas, -1).sum(axis=1)
        return float(cost_R.mean() / cost_R.max())

    def of_replica(self, replica: int, num_replicas: int) -> PackedBatch:
        """Return what one replica runs: its M / R micro-batches, and all T entries of `output_T`."""
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
            places=self.places[rows],
            predicting=self.predicting[rows],
            predicted=self.predicted[rows],
            output_T=np.where(is_ours_T, self.output_T - first, -1),
            cost_M=self.cost_M[rows],
        )


def best_fit(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Assign sequences to bins, longest first, each into the fullest that takes it; ValueError if one is too long."""
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

    None if a sequence finds no room, which best fit may have.
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
        for each in full:  # there may be room for what is shorter
            heappush(cheapest, each)
    return bins


def deal(cost_N: FloatArray, num_replicas: int) -> list[list[int]]:
    """Share N bins among R replicas, N / R each, so that the dearest replica is cheap.

    In rounds of R bins, dearest first, the replica with least so far gets the dearest. No bin of a round is cheaper
    than one of the next, so two replicas differ by no more than the dearest bin from the cheapest, and the dearest
    replica is above the mean by (1 - 1/R) (max - min) at most.
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
    """Return the order in which a pipeline runs bins: the cheap ones at both ends, the dearest in the middle.

    Stages are idle while the first bins fill the pipeline and the last ones drain it, and 1F1B has a stage do forward
    and backward of neighbouring bins at one time. A forward-only pass (GPipe) takes sum + (P - 1) max in any order.
    """
    rising = sorted(bins, key=lambda n: (cost_N[n], n))
    return rising[0::2] + rising[1::2][::-1]


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Return the order by length, then by index."""
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def plan(lengths: Sequence[int], cost_B: FloatArray, rule: PackingRule) -> list[list[int]]:
    """Return the sequences of each micro-batch, replica by replica; errors as `best_fit`."""
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
    """A number of the prompt: the same for the same tokens."""
    cost_B: FloatArray
    rule: PackingRule

    def cost_of(self, home_B: IntArray, num_homes: int) -> FloatArray:
        """Return the cost of each home, a micro-batch or a unit, which computes each prompt once."""
        _, first = np.unique(home_B * len(home_B) + self.same_B, return_index=True)
        saved_B = self.rule.cost.of(self.prompt_B)
        saved_B[first] = 0.0
        return np.bincount(home_B, self.cost_B - saved_B, num_homes).astype(np.float64, copy=False)

    def cost_of_bins(self, bins: Sequence[Sequence[int]]) -> FloatArray:
        home_B = np.zeros(len(self.length_B), np.int64)
        for m, members in enumerate(bins):
            home_B[members] = m
        return self.cost_of(home_B, len(bins))

    def bins(self, unit_B: IntArray | None) -> tuple[list[list[int]], FloatArray, Unit]:
        """Return the sequences and the cost of each micro-batch, and what lies in one whole."""
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
        """As `plan`, with the sequences of a unit in one micro-batch; None if one does not fit."""
        length_U = np.bincount(unit_B, self.length_B).astype(np.int64)
        if length_U.max() > self.rule.token_budget:
            return None
        bins = plan(length_U.tolist(), self.cost_of(unit_B, len(length_U)), self.rule)
        sequences_U = np.split(np.argsort(unit_B, kind="stable"), np.cumsum(np.bincount(unit_B))[:-1])
        return [[i for unit in units for i in sequences_U[unit].tolist()] for units in bins]


def _duration(cost_M: FloatArray, rule: PackingRule) -> float:
    """Return a pipeline's time for micro-batches, in units of cost: see `order`."""
    cost_RM = cost_M.reshape(rule.num_replicas, -1)
    return float((cost_RM.sum(axis=1) + (rule.num_stages - 1) * cost_RM.max(axis=1)).max())


def pack(
    sequences: Sequence[npt.NDArray[np.integer]],
    prompt_lengths: Sequence[int],
    rule: PackingRule,
    unit_B: IntArray | None = None,
) -> PackedBatch:
    """Pack sequences (prompt of at least 1 token, then completion) into the micro-batches of all replicas.

    `unit_B` is the unit of each sequence, numbered from 0; of a rule without one, whose prompt it may share. ValueError
    if there is no sequence, one is longer than the budget, or one has no prompt.
    """
    if not sequences:
        raise ValueError("there is nothing to pack: the batch has no sequence")
    for i, prompt_length in enumerate(prompt_lengths):
        if prompt_length < 1:
            raise ValueError(f"sequence {i} has no prompt token, so nothing predicts its first completion token")
    lengths = [len(sequence) for sequence in sequences]
    same_B = same_prompts(sequences, prompt_lengths)
    samples = _Samples(np.array(lengths), np.array(prompt_lengths), same_B, rule.cost.of(lengths), rule)
    bins, cost_M, unit = samples.bins(unit_B)
    return _lay_out(sequences, samples, [np.array(members, np.int64) for members in bins], cost_M, unit)


def same_prompts(sequences: Sequence[npt.NDArray[np.integer]], prompt_lengths: Sequence[int]) -> IntArray:
    """Number each sequence's prompt from 0, the same for the same tokens: [B]."""
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
    """Return the cost of each micro-batch that `pack` would make, and what lies in one whole, from lengths alone.

    `same_B` numbers prompts as `same_prompts`; the rule has costs in the unit that is wanted.
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
    """Lay out the micro-batches of these sequences; S runs over them as they stand there."""
    width, length_B, prompt_B = samples.rule.token_budget, samples.length_B, samples.prompt_B
    completion_B = length_B - prompt_B
    order_S, home_S = np.concatenate(members), np.repeat(np.arange(len(members)), list(map(len, members)))
    _, first, which_S = np.unique(
        home_S * len(order_S) + samples.same_B[order_S], return_index=True, return_inverse=True
    )
    holder_S = first[which_S.reshape(-1)]  # who has the prompt that this one reads
    own_S = completion_B[order_S] + np.where(holder_S == np.arange(len(order_S)), prompt_B[order_S], 0)
    before_S, filled_M = np.cumsum(own_S) - own_S, np.bincount(home_S, own_S, len(members)).astype(np.int64)
    start_S = before_S + (np.arange(len(members)) * width - np.cumsum(filled_M) + filled_M)[home_S]
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
    """Return start, start + 1 .. start + length - 1 of each, one behind the other."""
    ends_B = np.cumsum(length_B)
    offsets = np.arange(ends_B[-1] if len(ends_B) else 0)
    return offsets + np.repeat(start_B - (ends_B - length_B), length_B)
