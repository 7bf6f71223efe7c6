"""TrainingState: host copies of all that a checkpoint holds of one rank, under names of the whole model.

    NAME                        a parameter, as the Hugging Face checkpoint calls it
    optimizer.exp_avg.NAME      a moment of it; also exp_avg_sq, and step, the updates that it had
    critic.NAME                 either of the above, of a critic that is a model of its own
    rng.RANK, rng_cuda.RANK     random generators; the only tensors that belong to a rank and not to the model

Training goes on while the copies are written, and a checkpoint is read into them first: whatever goes wrong there, the
live tensors are those of before.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from learner.networks import Network, Networks

RNG = "rng"
RNG_CUDA = "rng_cuda"


class TrainingState:
    """Copies of one rank's tensors; they take as much host memory as the rank's weights and moments."""

    def __init__(self, rank: int) -> None:
        """Nothing is copied yet; `rank` is whose random generators are meant."""
        self._rank = rank
        self._copies: dict[str, Tensor] = {}

    def prepare(self, networks: Networks) -> None:
        """Make room: the first touch of so much memory takes longer than to fill it later, while a step waits."""
        for name, tensors in live_tensors(networks).items():
            self._copy_of(name, tensors[0]).zero_()

    def take(self, networks: Networks) -> dict[str, Tensor]:
        """Copy everything to host memory; the copies are those of the call before, with new values."""
        on_gpu = networks.policy.device.type == "cuda"
        live = live_tensors(networks)
        for name, tensors in live.items():
            self._copy_of(name, tensors[0]).copy_(tensors[0], non_blocking=on_gpu)
        taken = {name: self._copies[name] for name in live}
        taken[f"{RNG}.{self._rank}"] = torch.get_rng_state()
        if on_gpu:
            taken[f"{RNG_CUDA}.{self._rank}"] = torch.cuda.get_rng_state(networks.policy.device)
            torch.cuda.synchronize(networks.policy.device)
        return taken

    def to_read(self, networks: Networks, stored: Container[str]) -> dict[str, Tensor]:
        """Host tensors for a checkpoint to be read into.

        A rank that the checkpoint, with these names stored, does not know takes the generators of rank 0.
        """
        wanted = {name: self._copy_of(name, tensors[0]) for name, tensors in live_tensors(networks).items()}
        generators = {RNG: torch.get_rng_state()}
        if networks.policy.device.type == "cuda":
            generators[RNG_CUDA] = torch.cuda.get_rng_state(networks.policy.device)
        for kind, state in generators.items():
            known = [name for name in (f"{kind}.{self._rank}", f"{kind}.0") if name in stored]
            if known:
                wanted[known[0]] = state
        return wanted

    def put(self, networks: Networks, read: dict[str, Tensor]) -> None:
        """Make what was read into the tensors of `to_read` the state of training."""
        for name, tensors in live_tensors(networks).items():
            for tensor in tensors:
                tensor.copy_(read[name])
        for name, state in read.items():
            if name.startswith(f"{RNG}."):
                torch.set_rng_state(state)
            elif name.startswith(f"{RNG_CUDA}."):
                torch.cuda.set_rng_state(state, networks.policy.device)

    def _copy_of(self, name: str, tensor: Tensor) -> Tensor:
        copy = self._copies.get(name)
        if copy is None:
            # pinned, or a copy from a GPU would not be asynchronous
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._copies[name] = copy
        return copy


def is_of_a_rank(name: str) -> bool:
    """Is this a random generator's state, and not a tensor of the model?"""
    return name.startswith((f"{RNG}.", f"{RNG_CUDA}."))


def live_tensors(networks: Networks) -> dict[str, list[Tensor]]:
    """This rank's tensors by the name under which they are saved; a tied weight may have two copies on one rank."""
    found = _tensors_of(networks.policy, "")
    if networks.critic is not None:
        found |= _tensors_of(networks.critic, "critic.")
    return found


def _tensors_of(network: Network, prefix: str) -> dict[str, list[Tensor]]:
    named = [(name, parameter.detach()) for name, parameter in network.named_parameters()]
    for optimizer in network.optimizers:
        named += [(f"optimizer.{name}", tensor) for name, tensor in optimizer.state().items()]
    found: dict[str, list[Tensor]] = {}
    for name, tensor in named:
        # embedding and head are one tensor, perhaps on two ranks: saved once, read by both
        found.setdefault(prefix + network.stored_name(name), []).append(tensor)
    return found
