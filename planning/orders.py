"""In which order a rank takes the passes of two networks whose pipelines run against each other.

The second network runs backwards: the rank with the policy's first stage has the critic's last. So each rank finds work
of the one while it waits for the other, and the bubbles at both ends of a pass fill up. RLHFuse (arXiv 2409.13221,
section 5) searches such orders by annealing. Here a list schedule is made over and over, with other limits on what
stages hold and other noise in what comes first, and the best is taken. It is found within a second or so, and is the
same on every machine. For up to eight stages it is within 2 % of the lower bound where networks are alike, and within
7 % where the critic costs three quarters of the policy.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from learner.config import stage_of

NUM_NETWORKS = 2
_MOST_TRIES = 300
_SEARCHED = 20_000
"""Micro-batches of stages in all tries together: less than a second, for the step waits meanwhile, on every rank."""
_NEAR = 1.01
"""An order that takes so much of the lower bound is short enough."""
_SEED = 0


class Work(NamedTuple):
    """What one micro-batch takes in one stage of a network, in any unit of time."""

    forward: float
    backward: float


class Action(NamedTuple):
    """One micro-batch through one stage, forward or backward."""

    network: int
    """0 is the policy, 1 the critic, which runs backwards."""
    is_backward: bool
    micro_batch: int


@dataclass(frozen=True)
class Order:
    """What every rank does, one after the other."""

    ranks: tuple[tuple[Action, ...], ...]
    makespan: float
    """From the first action to the end of the last, in the unit of the work."""
    most_held: int
    """Micro-batches whose activations a rank keeps at once, at most, of both networks; 0 forward only."""


@lru_cache(256)
def find_order(num_stages: int, num_micro_batches: int, work: tuple[Work, Work], most_held: int) -> Order:
    """The shortest order that was found; of those as short the first that holds least.

    `most_held`, 2 or more, bounds Order.most_held. Forward only there is nothing to hold.
    """
    assert most_held >= NUM_NETWORKS, "each network needs one micro-batch on its way"
    bound = shortest_possible(num_stages, num_micro_batches, work)
    rng = random.Random(_SEED)
    best: Order | None = None
    tries = max(20, min(_MOST_TRIES, _SEARCHED // (num_stages * num_micro_batches)))
    for number in range(tries):
        # the first try holds what 1F1B holds of each network
        more = rng.randint(0, num_stages) if number else 0
        limits = [[num_stages - stage + rng.randint(0, more) for stage in range(num_stages)] for _ in work]
        if number % 2:  # and no rank can fill up with one network, which would stop all where the other has to go on
            _divide(limits, most_held, rng)
        taste = _Taste.drawn(rng) if number else _Taste()
        found = _List(num_stages, num_micro_batches, work, most_held, limits, taste).run()
        if found is None:
            continue
        if best is None or (found.makespan, found.most_held) < (best.makespan, best.most_held):
            best = found
        if best.makespan <= bound * _NEAR:
            break
    assert best is not None, "with divided limits every schedule comes to an end"
    return best


def _divide(limits: list[list[int]], most_held: int, rng: random.Random) -> None:
    """Lower limits until those of each rank add up to no more than it may hold."""
    num_stages = len(limits[0])
    for rank in range(num_stages):
        of_first = rng.randint(1, most_held - 1)
        for network, most in enumerate((of_first, most_held - of_first)):
            stage = stage_of(network, rank, num_stages)
            limits[network][stage] = min(limits[network][stage], most)


def shortest_possible(num_stages: int, num_micro_batches: int, work: tuple[Work, Work]) -> float:
    """A lower bound: of one network alone, and of each rank's work with what it waits for before and after it."""
    alone = max((num_micro_batches + num_stages - 1) * (each.forward + each.backward) for each in work)
    busy = num_micro_batches * sum(each.forward + each.backward for each in work)
    bounds = [alone]
    for rank in range(num_stages):
        stages = [stage_of(network, rank, num_stages) for network in range(NUM_NETWORKS)]
        fill = min(stage * each.forward for stage, each in zip(stages, work, strict=True))
        if work[0].backward:
            drain = min(stage * each.backward for stage, each in zip(stages, work, strict=True))
        else:
            drain = min((num_stages - 1 - stage) * each.forward for stage, each in zip(stages, work, strict=True))
        bounds.append(fill + busy + drain)
    return max(bounds)


@dataclass(frozen=True)
class _Taste:
    """What a list schedule prefers where a rank may choose."""

    backward_first: float = 100.0
    """Added to the urgency of what is backward."""
    noise: float = 0.0
    seed: float = 0.0

    @classmethod
    def drawn(cls, rng: random.Random) -> _Taste:
        return cls(rng.choice((100.0, rng.uniform(-3.0, 3.0))), rng.choice((0.0, 0.5, 1.0, 2.0, 4.0)), rng.random())


class _Stage:
    """How far one stage of one network is. Counts are of micro-batches, forward and backward."""

    def __init__(self, network: int, stage: int, limit: int) -> None:
        self.network = network
        self.stage = stage
        self.limit = limit
        """Micro-batches that it may hold."""
        self.arrived = [0, 0]
        """Those that it could have begun so far."""
        self.begun = [0, 0]
        self.ended = [0, 0]

    @property
    def held(self) -> int:
        return self.begun[0] - self.ended[1]


class _List:
    """A list schedule: no rank waits while it may do something, and of several things it does the most urgent."""

    def __init__(
        self,
        num_stages: int,
        num_micro_batches: int,
        work: tuple[Work, Work],
        most_held: int,
        limits: Sequence[Sequence[int]],
        taste: _Taste,
    ) -> None:
        self._num_stages = num_stages
        self._num_micro_batches = num_micro_batches
        self._work = work
        self._most_held = most_held
        self._taste = taste
        self._rng = random.Random(taste.seed)
        self._trains = work[0].backward > 0
        self._stages = [
            [_Stage(network, stage, limit) for stage, limit in enumerate(own)] for network, own in enumerate(limits)
        ]
        for own in self._stages:
            own[0].arrived[0] = num_micro_batches

    def run(self) -> Order | None:
        """None where all come to wait for room."""
        ranks: list[list[Action]] = [[] for _ in range(self._num_stages)]
        free = set(range(self._num_stages))
        running: list[tuple[float, int, _Stage, int]] = []
        now, held = 0.0, 0
        while True:
            for rank in sorted(free):
                chosen = self._choice(rank)
                if chosen is None:
                    continue
                one, backward = chosen
                ranks[rank].append(Action(one.network, bool(backward), one.begun[backward]))
                one.begun[backward] += 1
                held = max(held, self._held(rank))
                free.remove(rank)
                heapq.heappush(running, (now + self._work[one.network][backward], rank, one, backward))
            if not running:
                break
            now = running[0][0]
            while running and running[0][0] <= now + 1e-9:
                _, rank, one, backward = heapq.heappop(running)
                self._end(one, backward)
                free.add(rank)
        num_actions = NUM_NETWORKS * self._num_stages * self._num_micro_batches * (1 + self._trains)
        if sum(map(len, ranks)) < num_actions:
            return None
        return Order(tuple(map(tuple, ranks)), now, held if self._trains else 0)

    def _of_rank(self, rank: int) -> list[_Stage]:
        return [own[stage_of(network, rank, self._num_stages)] for network, own in enumerate(self._stages)]

    def _held(self, rank: int) -> int:
        return sum(one.held for one in self._of_rank(rank))

    def _choice(self, rank: int) -> tuple[_Stage, int] | None:
        """What a rank that is free begins."""
        found: list[tuple[float, _Stage, int]] = []
        has_room = self._held(rank) < self._most_held
        for one in self._of_rank(rank):
            if one.begun[1] < one.arrived[1]:
                found.append((self._urgency(one, 1), one, 1))
            if one.begun[0] < one.arrived[0] and (not self._trains or (has_room and one.held < one.limit)):
                found.append((self._urgency(one, 0), one, 0))
        return max(found, key=lambda each: each[0])[1:] if found else None

    def _urgency(self, one: _Stage, backward: int) -> float:
        """How long it is at least from its beginning to the end of the pass."""
        forward_s, backward_s = self._work[one.network]
        later = (self._num_micro_batches - 1 - one.begun[backward]) * (forward_s + backward_s)
        noise = self._taste.noise * self._rng.random()
        if backward:
            return later + (one.stage + 1) * backward_s + self._taste.backward_first + noise
        return later + (self._num_stages - one.stage) * forward_s + self._num_stages * backward_s + noise

    def _end(self, one: _Stage, backward: int) -> None:
        own = self._stages[one.network]
        one.ended[backward] += 1
        if backward:
            if one.stage:
                own[one.stage - 1].arrived[1] += 1
        elif one.stage + 1 < self._num_stages:
            own[one.stage + 1].arrived[0] += 1
        elif self._trains:
            one.arrived[1] += 1
