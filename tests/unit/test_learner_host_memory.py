"""Pinned host memory for tensors of a GPU: one block that is as large as all tensors together. CUDA is faked."""

import gc
import logging

import pytest
import torch

from leeway.algorithms.trajectory_balance import TrajectoryBalanceConfig
from leeway.learner.checkpoint import TrainingState
from leeway.learner.config import LearnerConfig
from leeway.learner.device import Offload, allocate_host_copies
from leeway.learner.networks import Network
from tests.unit.small_models import Model, load
from tests.world.learner import make_models, make_networks, single_rank

BALANCE = TrajectoryBalanceConfig()
TENSORS = {
    "a": torch.randn(3, 5),
    "b": torch.tensor(2.5),
    "c": torch.randn(7).to(torch.bfloat16),
    "d": torch.empty(0, 4),
    "e": torch.arange(6, dtype=torch.float64).view(2, 3),
}


class Cuda:
    """Fake CUDA runtime that records pinned memory, or returns the error `code`."""

    def __init__(self, monkeypatch, code: int = 0) -> None:
        self.pinned: dict[int, int] = {}
        self._code = code
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:
        if not self._code:
            self.pinned[address] = size
        return self._code

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def test_host_copies_share_one_pinned_block_of_about_their_size(monkeypatch):
    cuda = Cuda(monkeypatch)
    copies = allocate_host_copies(TENSORS, pinned=True)
    ((start, size),) = cuda.pinned.items()
    assert size <= sum(tensor.nbytes for tensor in TENSORS.values()) + 64 * len(TENSORS)
    for name, tensor in TENSORS.items():
        copy = copies[name].copy_(tensor)
        assert (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype)
        # a view of a larger storage would be copied again when it is written to a file
        assert copy.untyped_storage().nbytes() == tensor.nbytes
        assert not tensor.numel() or start <= copy.data_ptr() <= copy.data_ptr() + copy.nbytes <= start + size
        assert copy.data_ptr() % 64 == 0 or not tensor.numel()
    assert all(torch.equal(copies[name], tensor) for name, tensor in TENSORS.items())
    kept = copies.pop("c")
    del copies, copy
    gc.collect()
    assert cuda.pinned, "a copy is still in use"
    del kept
    gc.collect()
    assert not cuda.pinned, "the block is unpinned before it is freed"


def test_memory_that_cannot_be_pinned_is_used_unpinned_with_a_warning(monkeypatch, caplog):
    Cuda(monkeypatch, code=2)
    with caplog.at_level(logging.WARNING):
        copies = allocate_host_copies(TENSORS, pinned=True)
    assert "CUDA could not pin 0.0 GiB of host memory (error 2)" in caplog.text
    copies["a"].copy_(TENSORS["a"])
    gc.collect()


def test_copies_for_a_cpu_are_not_pinned(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("CUDA is called"))
    assert {name: copy.shape for name, copy in allocate_host_copies(TENSORS, pinned=False).items()} == {
        name: tensor.shape for name, tensor in TENSORS.items()
    }


def test_a_frozen_stage_off_loads_to_pinned_memory_and_returns_asynchronously(tmp_path, monkeypatch):
    cuda = Cuda(monkeypatch)
    stage = load(Model("llama", False).save(tmp_path), dtype=torch.bfloat16).requires_grad_(False)
    weights = {name: weight.detach().clone() for name, weight in stage.named_parameters()}
    offload = Offload(stage, torch.device("cuda"))
    offload.release()
    assert all(parameter.is_meta for parameter in stage.parameters())
    (size,) = cuda.pinned.values()
    assert 0 <= size - sum(weight.nbytes for weight in weights.values()) <= 64 * len(weights)
    moves = []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: moves.append((args, kwargs)) or self.clone())
    offload.fetch()
    monkeypatch.undo()
    assert moves == [((torch.device("cuda"),), {"non_blocking": True})] * len(weights)
    assert all(torch.equal(weight, weights[name]) for name, weight in stage.named_parameters())
    del offload
    gc.collect()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_host_copy_of_a_checkpoint_takes_12_bytes_per_parameter(tmp_path, monkeypatch, precision):
    cuda = Cuda(monkeypatch)
    make_models(tmp_path)
    with single_rank():
        networks, _ = make_networks(tmp_path / "tied", LearnerConfig(), BALANCE, precision=precision)
        monkeypatch.setattr(Network, "device", torch.device("cuda"))
        state = TrainingState(0)
        state.prepare(networks)
        (size,) = cuda.pinned.values()
        num_tensors = 4 * len(networks.optimizers[0].parameters)
        num_parameters = sum(weight.numel() for weight in networks.optimizers[0].parameters.values())
        assert 0 <= size - 12 * num_parameters <= 64 * num_tensors
        del state
        gc.collect()
        assert not cuda.pinned
