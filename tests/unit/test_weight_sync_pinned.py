"""Weights that a GPU loads from pinned memory in the pause of an update, tested without GPU and vLLM.

`Cuda` replaces the functions of torch.cuda that pin memory, and pins nothing. The base class, model and reload of vLLM
are stand-ins that record their inputs.
"""

import contextlib
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Generic, TypeVar

import psutil
import pytest
import torch
from safetensors.torch import save_file

from leeway.weight_sync import store, tensors, vllm_engine
from leeway.weight_sync.tensors import HostCopy
from tests.unit.published import DTYPE, PART, publish, same, v, weights

GPU = torch.device("cuda", 1)
FIRST, SECOND = v(1), v(2)
SIZE_BYTES = sum(tensor.nbytes for tensor in weights().values())
Init, Update = TypeVar("Init"), TypeVar("Update")


class Cuda:
    """Records registered memory with its GPU, and unregistered memory; an error persists in the failing thread."""

    def __init__(self, monkeypatch) -> None:
        self.registered: list[tuple[int, int, torch.device | None]] = []
        self.unregistered: list[int] = []
        self.error = 0
        self._current = threading.local()
        monkeypatch.setattr(torch.cuda, "device", self._device)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(self._current, "device", device))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(self._current, "device", None))
        cudart = SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self.unregistered.append)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)

    @contextlib.contextmanager
    def _device(self, device: torch.device):
        self._current.device = device
        yield
        self._current.device = None

    def _register(self, address: int, size_bytes: int, flags: int) -> int:
        if not self.error:
            self.registered.append((address, size_bytes, getattr(self._current, "device", None)))
        self._current.last_error = self.error
        return self.error

    def launch_kernel(self) -> None:
        """Fail if an earlier call of the thread failed, as CUDA does."""
        assert not getattr(self._current, "last_error", 0)


class BaseEngine(Generic[Init, Update]):
    """Stand-in for vLLM's WeightTransferEngine."""

    def __init__(self, device: torch.device, model: "Model", model_config: SimpleNamespace) -> None:
        self.device, self.model, self.model_config = device, model, model_config


class Model:
    """Stand-in for the served model: copies loaded tensors and records their addresses."""

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.addresses: list[int] = []

    def load_weights(self, pairs) -> None:
        for name, tensor in pairs:
            self.addresses.append(tensor.data_ptr())
            self.loaded[name] = tensor.clone()


@pytest.fixture
def transfer(monkeypatch) -> type:
    """Return StoreWeightTransfer based on stand-ins of vLLM."""
    base = SimpleNamespace(WeightTransferEngine=BaseEngine)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", base)
    reload = {"initialize_layerwise_reload": lambda model: None, "finalize_layerwise_reload": lambda *_: None}
    reloading = SimpleNamespace(layerwise=SimpleNamespace(__name__="reload"), **reload)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.reload", reloading)
    return vllm_engine.transfer_class()


class World:
    """An engine's worker on a device, and a folder of versions."""

    def __init__(self, transfer: type, folder: Path, monkeypatch, device: torch.device) -> None:
        self.folder = folder / "weights"
        self.cuda = Cuda(monkeypatch)
        served = folder / "served"
        served.mkdir()
        save_file(weights(), served / "model.safetensors")
        config = SimpleNamespace(model=str(served), dtype=torch.float32, hf_config=SimpleNamespace())
        self.engine = transfer(device, Model(), config)
        self.worker = vllm_engine.WorkerCalls()
        self.worker.weight_transfer_engine = self.engine
        self.num_copied = 0
        copied = store.copy_and_hash

        def counting(data, into):
            self.num_copied += len(data)
            return copied(data, into)

        monkeypatch.setattr(store, "copy_and_hash", counting)
        publish(self.folder, FIRST, SECOND)

    def info(self, version):
        return {"folder": str(self.folder), "version": version.key, "dtype": DTYPE}

    def begin(self, version) -> None:
        self.worker.begin_weight_verification(self.info(version))

    def verified(self) -> str:
        deadline_s = time.monotonic() + 60
        while (refusal := self.worker.weight_verification()) is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        return refusal

    def load(self, version) -> dict[str, torch.Tensor]:
        """Load a version as the engine does in its pause, and return the weights of the model."""
        self.engine.receive_weights(self.info(version))
        self.engine.finish_weight_update()
        return self.engine.model.loaded

    def spoil(self, version) -> None:
        """Change every byte of the version's file in place, which also changes mappings of the file."""
        path = self.folder / version.key / PART
        with path.open("r+b") as file:
            file.write(bytes(255 - byte for byte in path.read_bytes()))

    @property
    def are_pinned(self) -> bool:
        """True if every tensor loaded by the model was in registered memory."""
        inside = [(at, at + size) for at, size, _ in self.cuda.registered]
        return all(any(start <= address < end for start, end in inside) for address in self.engine.model.addresses)


@pytest.fixture
def world(transfer, tmp_path, monkeypatch) -> World:
    return World(transfer, tmp_path, monkeypatch, GPU)


def test_a_gpu_loads_verified_weights_from_pinned_memory_after_one_host_copy(world: World):
    world.begin(FIRST)
    assert world.verified() == ""
    assert world.num_copied == SIZE_BYTES
    world.spoil(FIRST)  # the load must not read the file
    assert same(world.load(FIRST), weights(1))
    assert world.num_copied == SIZE_BYTES
    assert world.are_pinned


def test_memory_is_pinned_once_in_exact_size_for_the_gpu_of_the_engine(world: World):
    for version in (FIRST, SECOND):
        world.begin(version)
        assert world.verified() == ""
        assert same(world.load(version), weights(version.version))
    assert [(size, gpu) for _, size, gpu in world.cuda.registered] == [(SIZE_BYTES, GPU)]
    assert world.are_pinned


def test_a_cpu_loads_from_the_mapped_file(transfer, tmp_path, monkeypatch):
    world = World(transfer, tmp_path, monkeypatch, torch.device("cpu"))
    world.begin(FIRST)
    assert world.verified() == ""
    assert same(world.load(FIRST), weights(1))
    assert (world.cuda.registered, world.num_copied) == ([], 0)


@pytest.mark.parametrize("reason", ["CUDA fails", "little memory is free", "it is too large"])
def test_a_version_that_cannot_be_pinned_loads_from_the_mapped_file_with_one_warning(
    world: World, monkeypatch, caplog, reason
):
    if reason == "CUDA fails":
        world.cuda.error = 2
    elif reason == "it is too large":
        monkeypatch.setattr(tensors, "_MOST_PINNED_BYTES", SIZE_BYTES - 1)
    else:
        memory = SimpleNamespace(available=4 * SIZE_BYTES - 1)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    for version in (FIRST, SECOND):
        world.begin(version)
        assert world.verified() == ""
        assert same(world.load(version), weights(version.version))
    assert (world.cuda.registered, world.num_copied) == ([], 0)
    messages = [record.getMessage() for record in caplog.records]
    assert ["weights are copied to cuda:1 from unpinned memory" in text for text in messages] == [True]


def test_a_damaged_version_is_refused_and_a_later_verification_succeeds(world: World):
    world.begin(FIRST)
    assert world.verified() == ""
    world.load(FIRST)
    world.spoil(SECOND)
    world.begin(SECOND)
    assert "is not a valid safetensors file" in world.verified()
    assert same(world.engine.model.loaded, weights(1))
    with pytest.raises(RuntimeError, match="is not a valid safetensors file"):
        world.load(SECOND)
    assert same(world.engine.model.loaded, weights(1))
    world.begin(FIRST)
    assert world.verified() == ""


def overtake(world: World, blocked: threading.Event, resume: threading.Event, threads: list[threading.Thread]) -> None:
    """Verify the second version while the first verification is blocked; load the second after both have ended."""
    world.begin(FIRST)
    assert blocked.wait(60)
    world.begin(SECOND)
    assert world.verified() == ""
    resume.set()
    threads[0].join(60)
    assert same(world.load(SECOND), weights(2))


def test_an_abandoned_verification_does_not_overwrite_a_later_one(world: World, monkeypatch):
    """The first verification is blocked in its copy until the second version is about to be loaded."""
    copied, blocked, resume = store.copy_and_hash, threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def slow(data, into):
        if threading.current_thread() not in threads:
            threads.append(threading.current_thread())
        if threading.current_thread() is threads[0]:
            blocked.set()
            assert resume.wait(60)
        return copied(data, into)

    monkeypatch.setattr(store, "copy_and_hash", slow)
    overtake(world, blocked, resume, threads)
    world.begin(FIRST)
    assert world.verified() == ""
    assert same(world.load(FIRST), weights(1))


def test_an_abandoned_verification_that_continues_late_finds_its_memory_in_use(world: World, monkeypatch):
    """The first verification is blocked before it reads its manifest, until the second version is verified."""
    manifest, blocked, resume = store.WeightStore.manifest, threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def slow(self, version):
        if version == FIRST:
            threads.append(threading.current_thread())
            blocked.set()
            assert resume.wait(60)
        return manifest(self, version)

    monkeypatch.setattr(store.WeightStore, "manifest", slow)
    overtake(world, blocked, resume, threads)
    assert world.are_pinned


def test_host_copies_of_a_stage_pin_the_memory_they_need_and_release_it(monkeypatch):
    cuda = Cuda(monkeypatch)
    on_cpu = HostCopy.like(weights(), ["float32", "bfloat16"])
    assert cuda.registered == []
    copies = [HostCopy(on_cpu.places, on_cpu.dtypes, GPU)]
    copies.append(copies[0].another())
    sizes = [SIZE_BYTES, SIZE_BYTES // 2]
    assert [(size, gpu) for _, size, gpu in cuda.registered] == [(size, GPU) for size in 2 * sizes]
    for copy in (on_cpu, *copies):
        copy.fill(weights(3))
    assert {bytes(copy.bytes_of("bfloat16")) for copy in copies} == {bytes(on_cpu.bytes_of("bfloat16"))}
    view = copies[0].bytes_of("float32")
    copies.clear()
    del copy
    assert len(cuda.unregistered) == 3  # an open view keeps its memory registered
    del view
    assert sorted(cuda.unregistered) == sorted(address for address, _, _ in cuda.registered)


def test_a_stage_without_pinned_memory_publishes_but_makes_no_further_copy(monkeypatch, caplog):
    cuda = Cuda(monkeypatch)
    cuda.error = 2
    places = HostCopy.like(weights(), ["bfloat16"]).places
    copy = HostCopy(places, ["bfloat16"], GPU)
    cuda.launch_kernel()
    copy.fill(weights(3))
    assert cuda.registered == []
    assert "weights are copied from cuda:1 to unpinned memory" in caplog.text
    with pytest.raises(OSError, match="cannot pin"):
        copy.another()
