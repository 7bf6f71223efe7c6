"""FusedPasses: a pass of the policy and one of the critic, whose pipelines run against each other, at once.

Each rank follows its part of an order (`planning.orders`), and sends and receives along the way. Between two neighbours
the states of a network on their way out, and the gradients on their way back, have a process group of their own. Within
it both sides count micro-batches alike, so messages meet in any order of the networks, and none waits behind another:
NCCL takes what a rank asks of one group in the order in which it was asked. At the first message between two ranks NCCL
connects them, and neither call returns before the other was made; so every group is connected when it was made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig

from learner.config import LearnerConfig, default_most_held
from learner.decoders import critic_share
from learner.mesh import COLLECTIVE_TIMEOUT_S, Mesh
from learner.model import DeviceBatch, StageModule
from learner.pipeline import Coefficients, OutOfMemory, say_memory
from planning.orders import NUM_NETWORKS, Work, find_order

_Groups = Mapping[int, dist.ProcessGroup]
"""Those of two neighbours, by the lower of their ranks."""


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

        Args:
            mesh: of one chunk per stage.
            work: of a training pass, of both.
            most_held: micro-batches whose activations a rank keeps at once, of both.
            timeout: of a message.
            device: where the modules compute.
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
        """A message through each group, in an order in which no two ranks wait for each other in a circle."""
        rank, nothing = self._mesh.place.rank, torch.zeros(1, device=device)
        for first, group in groups.items():
            if rank in (first, first + 1):
                exchange = dist.send if (rank == first) == upwards else dist.recv
                exchange(nothing, 2 * first + 1 - rank, group)

    @torch.no_grad()
    def forward_only(self, batch: DeviceBatch) -> list[Tensor | None]:
        """What each network says, [M, L], where this rank has its last stage; else None."""
        return self._run(batch, None)

    def train(self, batch: DeviceBatch, coefficients: Sequence[Coefficients | None]) -> list[Tensor | None]:
        """Add the gradients of sum(coefficients * outputs) of each network; the rest as `forward_only`.

        Raises:
            OutOfMemory: the pass does not fit into the memory of the device.
        """
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
    """One network's stage on this rank, during one pass."""

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
        """The next of them, once it is here."""
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
