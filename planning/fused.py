"""FusedPasses: a pass of the policy and one of the critic, whose pipelines run against each other, at once.

Each rank follows its part of an order, and sends and receives along the way. Between two neighbours
the states of a network on their way out, and the gradients on their way back, have a process group of their own. Within
it both sides count micro-batches alike, so messages meet in any order of the networks, and none waits behind another:
NCCL takes what a rank asks of one group in the order in which it was asked. At the first message between two ranks NCCL
connects them, and neither call returns before the other was made; so every group is connected when it was made.

The second network runs backwards: the rank with the policy's first stage has the critic's last. So each rank finds work
of the one while it waits for the other, and the bubbles at both ends of a pass fill up. RLHFuse (arXiv 2409.13221,
section 5) searches such orders by annealing. Here a list schedule is made over and over, with other limits on what
stages hold and other noise in what comes first, and the best is taken. It is found within a second or so, and is the
same on every machine. For up to eight stages it is within 2 % of the lower bound where networks are alike, and within
7 % where the critic costs three quarters of the policy.
"""

from __future__ import annotations

import contextlib
import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig

from learner.config import LearnerConfig, default_most_held, stage_of
from learner.decoders import critic_share
from learner.mesh import COLLECTIVE_TIMEOUT_S, Mesh
from learner.model import DeviceBatch, StageModule
from learner.pipeline import Coefficients, OutOfMemory, say_memory

_Groups = Mapping[int, dist.ProcessGroup]
"""Those of two neighbours, by the lower of their ranks."""
NUM_NETWORKS = 2
_MOST_TRIES = 300
_SEARCHED = 20_000
"""Micro-batches of stages in all tries together: less than a second, for the step waits meanwhile, on every rank."""
_NEAR = 1.01
"""Makespan over its lower bound at which the search ends."""
_SEED = 0


class Work(NamedTuple):
    """Time of one micro-batch in one stage of a network, in any unit."""

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
    """The actions of every rank, in their order."""

    ranks: tuple[tuple[Action, ...], ...]
    makespan: float
    """From the first action to the end of the last, in the unit of the work."""
    most_held: int
    """Micro-batches whose activations a rank keeps at once, at most, of both networks; 0 forward only."""


@lru_cache(256)
def find_order(num_stages: int, num_micro_batches: int, work: tuple[Work, Work], most_held: int) -> Order:
    """Return the shortest order that was found; of equal ones the first that holds least.

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
        if number % 2:  # so that no rank fills up with one network and stops the other
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
    """Return a lower bound, from each network alone, and from each rank's work and its waits before and after."""
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
    """Preferences of a list schedule, for ranks that have a choice."""

    backward_first: float = 100.0
    """Added to the urgency of what is backward."""
    noise: float = 0.0
    seed: float = 0.0

    @classmethod
    def drawn(cls, rng: random.Random) -> _Taste:
        return cls(rng.choice((100.0, rng.uniform(-3.0, 3.0))), rng.choice((0.0, 0.5, 1.0, 2.0, 4.0)), rng.random())


class _Stage:
    """Progress of one stage of one network; counts of micro-batches are [forward, backward]."""

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
        """Return the order; None if all ranks come to wait for room."""
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
        """Return the stage and the direction that a free rank begins with; None if it has to wait."""
        found: list[tuple[float, _Stage, int]] = []
        has_room = self._held(rank) < self._most_held
        for one in self._of_rank(rank):
            if one.begun[1] < one.arrived[1]:
                found.append((self._urgency(one, 1), one, 1))
            if one.begun[0] < one.arrived[0] and (not self._trains or (has_room and one.held < one.limit)):
                found.append((self._urgency(one, 0), one, 0))
        return max(found, key=lambda each: each[0])[1:] if found else None

    def _urgency(self, one: _Stage, backward: int) -> float:
        """Return the least time from the beginning of an action to the end of the pass."""
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


# --- the passes ---------------------------------------------------------------------------------------


class FusedPasses:
    """Runs packed batches through this rank's stage of both networks. All ranks of a replica call alike."""

    def __init__(
        self,
        mesh: Mesh,
        work: tuple[Work, Work],
        most_held: int,
        timeout: timedelta | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Make the process groups; all ranks of the mesh call it together, before they load: that takes longer.

        `work` is that of a training pass; a rank keeps the activations of `most_held` micro-batches of both at once.
        """
        self.modules: tuple[StageModule, ...] = ()
        """This rank's stage of the policy; and of the critic, counted from the other end. Set before the first pass."""
        self._mesh = mesh
        self._work = work
        self._most_held = most_held
        place = mesh.place
        firsts = [rank for rank in range(place.num_ranks) if (rank + 1) % place.num_stages]
        # every rank has to make every group, in the same order
        self._groups: list[tuple[_Groups, _Groups]] = [
            (_groups_of(firsts, timeout), _groups_of(firsts, timeout)) for _ in range(NUM_NETWORKS)
        ]
        """Of each network: for states on their way out, and for gradients on their way back."""
        for network, groups_of_network in enumerate(self._groups):
            for goes_back, groups in enumerate(groups_of_network):
                # the policy's states go to higher ranks, as the critic's gradients do
                self._connect(groups, device, upwards=network == goes_back)

    def _connect(self, groups: _Groups, device: torch.device | None, *, upwards: bool) -> None:
        """Send a message through each group, in an order in which ranks do not wait for each other in a circle."""
        rank, nothing = self._mesh.place.rank, torch.zeros(1, device=device)
        for first, group in groups.items():
            if rank in (first, first + 1):
                exchange = dist.send if (rank == first) == upwards else dist.recv
                exchange(nothing, 2 * first + 1 - rank, group)

    @torch.no_grad()
    def forward_only(self, batch: DeviceBatch) -> list[Tensor | None]:
        """Return the outputs of each network, [M, L], if this rank has its last stage, else None."""
        return self._run(batch, None)

    def train(self, batch: DeviceBatch, coefficients: Sequence[Coefficients | None]) -> list[Tensor | None]:
        """Add the gradients of sum(coefficients * outputs) of each network; OutOfMemory if that does not fit."""
        return self._run(batch, coefficients)

    def _run(self, batch: DeviceBatch, coefficients: Sequence[Coefficients | None] | None) -> list[Tensor | None]:
        place, trains = self._mesh.place, coefficients is not None
        work = self._work if trains else tuple(each._replace(backward=0.0) for each in self._work)
        order = find_order(place.num_stages, batch.packed.num_micro_batches, work, self._most_held)
        with contextlib.ExitStack() as bound:
            lines = []
            for network, (module, groups) in enumerate(zip(self.modules, self._groups, strict=True)):
                module.batch = batch
                bound.callback(setattr, module, "batch", None)
                lines.append(_Line(module, batch, groups, place.rank, 1 - 2 * network, trains=trains))
            try:
                for network, is_backward, micro_batch in order.ranks[place.stage]:
                    if is_backward:
                        lines[network].backward(micro_batch, coefficients[network] if coefficients else None)
                    else:
                        lines[network].forward(micro_batch)
            except torch.OutOfMemoryError as error:
                failed = error
            else:
                return [line.finish() for line in lines]
        raise OutOfMemory(say_memory(place, self.modules[0], batch.packed, failed, train=trains)) from failed


def fused_passes(path: Path, config: LearnerConfig, mesh: Mesh, device: torch.device) -> FusedPasses:
    """Return the passes of a checkpoint folder's policy and its critic model; all ranks call it together."""
    # rounded, so that checkpoints that are alike but for their vocabulary share orders
    share = max(1, round(8 * critic_share(AutoConfig.from_pretrained(path, local_files_only=True)))) / 8
    backward = 2.0 + config.activation_checkpointing
    work = Work(1.0, backward), Work(share, share * backward)
    most_held = default_most_held(config.num_stages)
    return FusedPasses(mesh, work, most_held, timedelta(seconds=COLLECTIVE_TIMEOUT_S), device)


def _groups_of(firsts: Sequence[int], timeout: timedelta | None) -> _Groups:
    return {first: dist.new_group([first, first + 1], timeout=timeout) for first in firsts}


class _Line:
    def __init__(
        self,
        module: StageModule,
        batch: DeviceBatch,
        groups: tuple[_Groups, _Groups],
        rank: int,
        step: int,
        *,
        trains: bool,
    ) -> None:
        """Take the neighbours `rank` + step, which has the next stage, and `rank` - step."""
        share, packed = module.share, batch.packed
        self._module = module
        self._tokens_ML = batch.tokens_ML
        self._trains = trains
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        """Of micro-batches whose backward pass is to come: what went in, and what came out with its graph."""
        self._outputs: list[Tensor] = []
        like = torch.empty(1, packed.width, module.hidden_size, dtype=module.states_dtype, device=module.device)
        states, gradients = groups
        before, after = min(rank, rank - step), min(rank, rank + step)
        self._arriving: _Inbox | None = None
        self._leaving: _Outbox | None = None
        self._arriving_back: _Inbox | None = None
        self._leaving_back: _Outbox | None = None
        if not share.is_first:
            self._arriving = _Inbox(states[before], rank - step, like, packed.num_micro_batches)
            self._leaving_back = _Outbox(gradients[before], rank - step)
        if not share.is_last:
            self._leaving = _Outbox(states[after], rank + step)
            self._arriving_back = _Inbox(gradients[after], rank + step, like, packed.num_micro_batches * trains)

    def forward(self, micro_batch: int) -> None:
        """Compute a micro-batch, and pass on what comes out."""
        if self._arriving is None:
            states = self._tokens_ML[micro_batch : micro_batch + 1]
        else:
            states = self._arriving.take().requires_grad_(self._trains)
        out = self._module(states, torch.tensor([micro_batch]))
        if self._trains:
            self._kept[micro_batch] = states, out
        if self._leaving is None:
            self._outputs.append(out.detach())
        else:
            self._leaving.put(out.detach())

    def backward(self, micro_batch: int, coefficients: Coefficients | None) -> None:
        """Compute its gradients, and pass on that of what came in."""
        states, out = self._kept.pop(micro_batch)
        if self._arriving_back is None:
            assert coefficients is not None, "the last stage needs coefficients to train"
            gradient = coefficients(micro_batch, out.detach())
        else:
            gradient = self._arriving_back.take()
        torch.autograd.backward(out, gradient)
        if self._leaving_back is not None:
            assert states.grad is not None
            self._leaving_back.put(states.grad)

    def finish(self) -> Tensor | None:
        """Wait until all has gone; what the last stage said."""
        for outbox in (self._leaving, self._leaving_back):
            if outbox is not None:
                outbox.wait()
        return torch.cat(self._outputs) if self._outputs else None


class _Inbox:
    """Tensors that another rank sends in order; one more than was asked for may be on its way."""

    def __init__(self, group: dist.ProcessGroup, source: int, like: Tensor, count: int) -> None:
        self._group = group
        self._source = source
        self._like = like
        self._left = count
        self._expect()

    def take(self) -> Tensor:
        work, tensor = self._expected
        self._expect()
        work.wait()
        return tensor

    def _expect(self) -> None:
        if not self._left:
            return
        self._left -= 1
        tensor = torch.empty_like(self._like)
        work = dist.irecv(tensor, self._source, self._group)
        assert work is not None, "this rank is of the group"
        self._expected = work, tensor


class _Outbox:
    """Tensors that another rank is sent, each kept until all have gone."""

    def __init__(self, group: dist.ProcessGroup, target: int) -> None:
        self._group = group
        self._target = target
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def put(self, tensor: Tensor) -> None:
        work = dist.isend(tensor, self._target, self._group)
        assert work is not None, "this rank is of the group"
        self._sent.append((work, tensor))

    def wait(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
