"""Host memory for what is on a GPU: one pinned piece of its own size. CUDA is a stand-in here."""

import gc
import logging

import pytest
import torch

from algorithms.trajectory_balance import TrajectoryBalanceConfig
from learner.checkpoint import TrainingState
from learner.config import LearnerConfig
from learner.device import Offload, host_room
from learner.networks import Network
from tests.unit.small_models import Model, load
from tests.world.learner import alone, make_models, make_networks

BALANCE = TrajectoryBalanceConfig()
TENSORS = {
    "a": torch.randn(3, 5),
    "b": torch.tensor(2.5),
    "c": torch.randn(7).to(torch.bfloat16),
    "d": torch.empty(0, 4),
    "e": torch.arange(6, dtype=torch.float64).view(2, 3),
}


class Cuda:
    """Notes what is pinned; refuses with an error code."""

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


def test_copies_lie_in_one_pinned_piece_that_is_hardly_larger_than_they_are(monkeypatch):
    cuda = Cuda(monkeypatch)
    room = host_room(TENSORS, pinned=True)
    ((start, size),) = cuda.pinned.items()
    assert size <= sum(tensor.nbytes for tensor in TENSORS.values()) + 64 * len(TENSORS)
    for name, tensor in TENSORS.items():
        copy = room[name].copy_(tensor)
        assert (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype)
        # what is a part of a larger storage is copied once more when it is written to a file
        assert copy.untyped_storage().nbytes() == tensor.nbytes
        assert not tensor.numel() or start <= copy.data_ptr() <= copy.data_ptr() + copy.nbytes <= start + size
        assert copy.data_ptr() % 64 == 0 or not tensor.numel()
    assert all(torch.equal(room[name], tensor) for name, tensor in TENSORS.items())
    kept = room.pop("c")
    del room, copy
    gc.collect()
    assert cuda.pinned, "one of them is still in use"
    del kept
    gc.collect()
    assert not cuda.pinned, "given up before the memory is"


def test_memory_that_cannot_be_pinned_is_used_as_it_is_and_said(monkeypatch, caplog):
    Cuda(monkeypatch, code=2)
    with caplog.at_level(logging.WARNING):
        room = host_room(TENSORS, pinned=True)
    assert "CUDA could not pin 0.0 GiB of host memory (error 2)" in caplog.text
    room["a"].copy_(TENSORS["a"])
    gc.collect()


def test_what_is_on_a_cpu_is_not_pinned(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("no GPU is asked"))
    assert {name: copy.shape for name, copy in host_room(TENSORS, pinned=False).items()} == {
        name: tensor.shape for name, tensor in TENSORS.items()
    }


def test_a_frozen_stage_of_a_gpu_waits_in_pinned_memory_and_comes_back_without_a_wait(tmp_path, monkeypatch):
    cuda = Cuda(monkeypatch)
    stage = load(Model("llama", False).save(tmp_path), dtype=torch.bfloat16).requires_grad_(False)
    weights = {name: weight.detach().clone() for name, weight in stage.named_parameters()}
    offload = Offload(stage, torch.device("cuda"))
    offload.release()
    assert all(parameter.is_meta for parameter in stage.parameters())
    (size,) = cuda.pinned.values()
    assert 0 <= size - sum(weight.nbytes for weight in weights.values()) <= 64 * len(weights)
    asked = []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: asked.append((args, kwargs)) or self.clone())
    offload.fetch()
    monkeypatch.undo()
    assert asked == [((torch.device("cuda"),), {"non_blocking": True})] * len(weights)
    assert all(torch.equal(weight, weights[name]) for name, weight in stage.named_parameters())
    del offload
    gc.collect()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_host_copy_of_a_checkpoint_takes_twelve_bytes_a_parameter(tmp_path, monkeypatch, precision):
    cuda = Cuda(monkeypatch)
    make_models(tmp_path)
    with alone():
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
