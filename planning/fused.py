"""FusedPasses: run the passes of policy and critic concurrently, in pipelines of opposite direction.

Each rank executes its part of a schedule, with sends and receives in between. The forward states and the backward
gradients of each network have separate process groups between each pair of neighbours. Within a group, both sides
process micro-batches in the same order, so messages match for any interleaving of the networks and do not block:
NCCL executes the operations of a rank on one group in the order of the calls. NCCL connects two ranks at their first
message, which blocks each call until the peer's call, so every group is connected when it is created.

The critic's pipeline runs in reverse: the rank with the policy's first stage has the critic's last stage. A rank
computes one network while it waits for the other, which fills the bubbles at both ends of a pass. RLHFuse (arXiv
2409.13221, section 5) searches such schedules by annealing. This module runs a list scheduler repeatedly, each time
with different limits on held micro-batches and noise in the priorities, and keeps the best schedule. The search takes
about a second and is deterministic across machines. For up to eight stages the result is within 2 % of the lower bound
if both networks cost the same, and within 7 % if the critic costs three quarters of the policy.
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

from leeway.learner.config import LearnerConfig, default_most_held, stage_of
from leeway.learner.decoders import critic_share
from leeway.learner.mesh import COLLECTIVE_TIMEOUT_S, Mesh
from leeway.learner.model import DeviceBatch, StageModule
from leeway.learner.pipeline import Coefficients, OutOfMemory, explain_out_of_memory

_Groups = Mapping[int, dist.ProcessGroup]
"""Process groups of neighbouring ranks, by the lower rank."""
NUM_NETWORKS = 2
_MOST_TRIES = 300
_SEARCHED = 20_000
"""Maximum of micro-batches times stages over all tries; limits the search, for which every rank waits, to a second."""
_NEAR = 1.01
"""Ratio of makespan to lower bound at which the search stops."""
_SEED = 0


class StageCost(NamedTuple):
    """Time of one micro-batch in one stage of a network, in any unit."""

    forward: float
    backward: float


class Action(NamedTuple):
    """One micro-batch through one stage, forward or backward."""

    network: int
    """0 for the policy, 1 for the critic, whose pipeline runs in reverse."""
    is_backward: bool
    micro_batch: int


@dataclass(frozen=True)
class PassSchedule:
    """Actions of every rank, in execution order."""

    ranks: tuple[tuple[Action, ...], ...]
    makespan: float
    """Time from the first action to the end of the last action, in the unit of the stage costs."""
    most_held: int
    """Maximum number of micro-batches of both networks whose activations a rank holds; 0 if forward only."""


@lru_cache(256)
def find_schedule(
    num_stages: int, num_micro_batches: int, work: tuple[StageCost, StageCost], most_held: int
) -> PassSchedule:
    """Return the shortest schedule found; ties go to the schedule with the fewest held micro-batches.

    `most_held`, at least 2, bounds PassSchedule.most_held. Forward-only passes hold no activations.
    """
    assert most_held >= NUM_NETWORKS, "each network needs one micro-batch in flight"
    bound = shortest_possible(num_stages, num_micro_batches, work)
    rng = random.Random(_SEED)
    best: PassSchedule | None = None
    tries = max(20, min(_MOST_TRIES, _SEARCHED // (num_stages * num_micro_batches)))
    for number in range(tries):
        # the first try has the limits of 1F1B for each network
        more = rng.randint(0, num_stages) if number else 0
        limits = [[num_stages - stage + rng.randint(0, more) for stage in range(num_stages)] for _ in work]
        if number % 2:  # without division, one network can fill a rank and block the other network
            _divide(limits, most_held, rng)
        heuristic = _Heuristic.drawn(rng) if number else _Heuristic()
        found = _ListScheduler(num_stages, num_micro_batches, work, most_held, limits, heuristic).run()
        if found is None:
            continue
        if best is None or (found.makespan, found.most_held) < (best.makespan, best.most_held):
            best = found
        if best.makespan <= bound * _NEAR:
            break
    assert best is not None, "a schedule with divided limits always completes"
    return best


def _divide(limits: list[list[int]], most_held: int, rng: random.Random) -> None:
    """Lower the limits of each rank so that their sum is at most `most_held`."""
    num_stages = len(limits[0])
    for rank in range(num_stages):
        of_first = rng.randint(1, most_held - 1)
        for network, most in enumerate((of_first, most_held - of_first)):
            stage = stage_of(network, rank, num_stages)
            limits[network][stage] = min(limits[network][stage], most)


def shortest_possible(num_stages: int, num_micro_batches: int, work: tuple[StageCost, StageCost]) -> float:
    """Return a lower bound of the makespan, from each single network, and from the work and idle time of each rank."""
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
class _Heuristic:
    """Priorities of a list scheduler for ranks with several ready actions."""

    backward_first: float = 100.0
    """Urgency that is added to backward actions."""
    noise: float = 0.0
    seed: float = 0.0

    @classmethod
    def drawn(cls, rng: random.Random) -> _Heuristic:
        return cls(rng.choice((100.0, rng.uniform(-3.0, 3.0))), rng.choice((0.0, 0.5, 1.0, 2.0, 4.0)), rng.random())


class _Stage:
    """Progress of one stage of one network; micro-batch counts are [forward, backward]."""

    def __init__(self, network: int, stage: int, limit: int) -> None:
        self.network = network
        self.stage = stage
        self.limit = limit
        """Maximum number of micro-batches that the stage may hold."""
        self.arrived = [0, 0]
        """Micro-batches whose inputs have arrived."""
        self.begun = [0, 0]
        self.ended = [0, 0]

    @property
    def held(self) -> int:
        return self.begun[0] - self.ended[1]


class _ListScheduler:
    """List scheduler: a free rank immediately starts its most urgent ready action."""

    def __init__(
        self,
        num_stages: int,
        num_micro_batches: int,
        work: tuple[StageCost, StageCost],
        most_held: int,
        limits: Sequence[Sequence[int]],
        heuristic: _Heuristic,
    ) -> None:
        self._num_stages = num_stages
        self._num_micro_batches = num_micro_batches
        self._work = work
        self._most_held = most_held
        self._heuristic = heuristic
        self._rng = random.Random(heuristic.seed)
        self._trains = work[0].backward > 0
        self._stages = [
            [_Stage(network, stage, limit) for stage, limit in enumerate(own)] for network, own in enumerate(limits)
        ]
        for own in self._stages:
            own[0].arrived[0] = num_micro_batches

    def run(self) -> PassSchedule | None:
        """Return the schedule, or None if all ranks are blocked by their limits."""
        ranks: list[list[Action]] = [[] for _ in range(self._num_stages)]
        free = set(range(self._num_stages))
        running: list[tuple[float, int, _Stage, int]] = []
        now, held = 0.0, 0
        while True:
            for rank in sorted(free):
                chosen = self._choose(rank)
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
        return PassSchedule(tuple(map(tuple, ranks)), now, held if self._trains else 0)

    def _of_rank(self, rank: int) -> list[_Stage]:
        return [own[stage_of(network, rank, self._num_stages)] for network, own in enumerate(self._stages)]

    def _held(self, rank: int) -> int:
        return sum(one.held for one in self._of_rank(rank))

    def _choose(self, rank: int) -> tuple[_Stage, int] | None:
        """Return the stage and direction of the next action of a free rank, or None if the rank must wait."""
        found: list[tuple[float, _Stage, int]] = []
        has_room = self._held(rank) < self._most_held
        for one in self._of_rank(rank):
            if one.begun[1] < one.arrived[1]:
                found.append((self._urgency(one, 1), one, 1))
            if one.begun[0] < one.arrived[0] and (not self._trains or (has_room and one.held < one.limit)):
                found.append((self._urgency(one, 0), one, 0))
        return max(found, key=lambda each: each[0])[1:] if found else None

    def _urgency(self, one: _Stage, backward: int) -> float:
        """Return the minimum time from the start of an action to the end of the pass, plus the heuristic's terms."""
        forward_s, backward_s = self._work[one.network]
        later = (self._num_micro_batches - 1 - one.begun[backward]) * (forward_s + backward_s)
        noise = self._heuristic.noise * self._rng.random()
        if backward:
            return later + (one.stage + 1) * backward_s + self._heuristic.backward_first + noise
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
    """Passes of packed batches through this rank's stage of both networks; collective over a replica's ranks."""

    def __init__(
        self,
        mesh: Mesh,
        work: tuple[StageCost, StageCost],
        most_held: int,
        timeout: timedelta | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Create the process groups before ranks load models, which takes longer; collective over the mesh's ranks.

        `work` is the cost of a training pass; a rank holds activations of at most `most_held` micro-batches in total.
        """
        self.modules: tuple[StageModule, ...] = ()
        """This rank's stages of the policy and (counted from the other end) the critic. Set before the first pass."""
        self._mesh = mesh
        self._work = work
        self._most_held = most_held
        place = mesh.place
        firsts = [rank for rank in range(place.num_ranks) if (rank + 1) % place.num_stages]
        # every rank has to create every group, in the same order
        self._groups: list[tuple[_Groups, _Groups]] = [
            (_groups_of(firsts, timeout), _groups_of(firsts, timeout)) for _ in range(NUM_NETWORKS)
        ]
        """Per network: groups for forward states and groups for backward gradients."""
        for network, groups_of_network in enumerate(self._groups):
            for is_gradient, groups in enumerate(groups_of_network):
                # the policy's states and the critic's gradients go to higher ranks
                self._connect(groups, device, upwards=network == is_gradient)

    def _connect(self, groups: _Groups, device: torch.device | None, *, upwards: bool) -> None:
        """Send a message through each group, in an order that cannot deadlock."""
        rank, nothing = self._mesh.place.rank, torch.zeros(1, device=device)
        for first, group in groups.items():
            if rank in (first, first + 1):
                exchange = dist.send if (rank == first) == upwards else dist.recv
                exchange(nothing, 2 * first + 1 - rank, group)

    @torch.no_grad()
    def forward_only(self, batch: DeviceBatch) -> list[Tensor | None]:
        """Return the outputs of each network, [M, L], or None for a network whose last stage is on another rank."""
        return self._run(batch, None)

    def train(self, batch: DeviceBatch, coefficients: Sequence[Coefficients | None]) -> list[Tensor | None]:
        """Accumulate the gradients of sum(coefficients * outputs) of each network; OutOfMemory if memory runs out."""
        return self._run(batch, coefficients)

    def _run(self, batch: DeviceBatch, coefficients: Sequence[Coefficients | None] | None) -> list[Tensor | None]:
        place, trains = self._mesh.place, coefficients is not None
        work = self._work if trains else tuple(each._replace(backward=0.0) for each in self._work)
        schedule = find_schedule(place.num_stages, batch.packed.num_micro_batches, work, self._most_held)
        with contextlib.ExitStack() as bound:
            passes = []
            for network, (module, groups) in enumerate(zip(self.modules, self._groups, strict=True)):
                module.batch = batch
                bound.callback(setattr, module, "batch", None)
                passes.append(_NetworkPass(module, batch, groups, place.rank, 1 - 2 * network, trains=trains))
            try:
                for network, is_backward, micro_batch in schedule.ranks[place.stage]:
                    if is_backward:
                        passes[network].backward(micro_batch, coefficients[network] if coefficients else None)
                    else:
                        passes[network].forward(micro_batch)
            except torch.OutOfMemoryError as error:
                failed = error
            else:
                return [each.finish() for each in passes]
        raise OutOfMemory(explain_out_of_memory(place, self.modules[0], batch.packed, failed, train=trains)) from failed


def fused_passes(path: Path, config: LearnerConfig, mesh: Mesh, device: torch.device) -> FusedPasses:
    """Return the fused passes of a checkpoint folder's policy and critic model; collective over all ranks."""
    # rounded, so that checkpoints that differ only in their vocabulary share schedules
    share = max(1, round(8 * critic_share(AutoConfig.from_pretrained(path, local_files_only=True)))) / 8
    backward = 2.0 + config.activation_checkpointing
    work = StageCost(1.0, backward), StageCost(share, share * backward)
    most_held = default_most_held(config.num_stages)
    return FusedPasses(mesh, work, most_held, timedelta(seconds=COLLECTIVE_TIMEOUT_S), device)


def _groups_of(firsts: Sequence[int], timeout: timedelta | None) -> _Groups:
    return {first: dist.new_group([first, first + 1], timeout=timeout) for first in firsts}


class _NetworkPass:
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
        """Connect to `rank` + `step`, which has the next stage, and to `rank` - `step`, which has the previous one."""
        share, packed = module.share, batch.packed
        self._module = module
        self._tokens_ML = batch.tokens_ML
        self._trains = trains
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        """Micro-batch -> input and output, with its graph, until its backward pass."""
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
        """Compute the forward pass of a micro-batch and send its output to the next stage."""
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
        """Compute the gradients of a micro-batch and send the gradient of its input to the previous stage."""
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
        """Wait for all sends; return the outputs [M, L] of the last stage, or None on other stages."""
        for outbox in (self._leaving, self._leaving_back):
            if outbox is not None:
                outbox.wait()
        return torch.cat(self._outputs) if self._outputs else None


class _Inbox:
    """Tensors received from another rank, in order; the next receive is always posted ahead."""

    def __init__(self, group: dist.ProcessGroup, source: int, like: Tensor, count: int) -> None:
        self._group = group
        self._source = source
        self._like = like
        self._left = count
        self._post()

    def take(self) -> Tensor:
        work, tensor = self._posted
        self._post()
        work.wait()
        return tensor

    def _post(self) -> None:
        if not self._left:
            return
        self._left -= 1
        tensor = torch.empty_like(self._like)
        work = dist.irecv(tensor, self._source, self._group)
        assert work is not None, "this rank belongs to the group"
        self._posted = work, tensor


class _Outbox:
    """Tensors sent to another rank; each tensor is kept until all sends complete."""

    def __init__(self, group: dist.ProcessGroup, target: int) -> None:
        self._group = group
        self._target = target
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def put(self, tensor: Tensor) -> None:
        work = dist.isend(tensor, self._target, self._group)
        assert work is not None, "this rank belongs to the group"
        self._sent.append((work, tensor))

    def wait(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
