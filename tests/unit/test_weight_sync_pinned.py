"""What a GPU is given in the pause of an update, and from which memory: no GPU, and no vLLM.

`Cuda` stands for the parts of torch.cuda that pin memory: it registers nothing. vLLM's base class, its model and its
reload are stand-ins that keep what they are given.
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

from tests.unit.published import DTYPE, PART, publish, same, v, weights
from weight_sync import store, tensors, vllm_engine
from weight_sync.tensors import HostCopy

GPU = torch.device("cuda", 1)
FIRST, SECOND = v(1), v(2)
SIZE_BYTES = sum(tensor.nbytes for tensor in weights().values())
Init, Update = TypeVar("Init"), TypeVar("Update")


class Cuda:
    """What was registered, for which GPU, and what was given back; an error stays with the thread that met it."""

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
        """Fail for whatever went wrong in this thread before, as CUDA does."""
        assert not getattr(self._current, "last_error", 0)


class BaseEngine(Generic[Init, Update]):
    """Stands for vLLM's WeightTransferEngine."""

    def __init__(self, device: torch.device, model: "Model", model_config: SimpleNamespace) -> None:
        self.device, self.model, self.model_config = device, model, model_config


class Model:
    """Stands for the served model: copies what it is given, and remembers where that lay."""

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.addresses: list[int] = []

    def load_weights(self, pairs) -> None:
        for name, tensor in pairs:
            self.addresses.append(tensor.data_ptr())
            self.loaded[name] = tensor.clone()


@pytest.fixture
def transfer(monkeypatch) -> type:
    """StoreWeightTransfer on stand-ins of vLLM."""
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
        copied = store.copied

        def counting(data, into):
            self.num_copied += len(data)
            return copied(data, into)

        monkeypatch.setattr(store, "copied", counting)
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
        """The pause: what the model has then."""
        self.engine.receive_weights(self.info(version))
        self.engine.finish_weight_update()
        return self.engine.model.loaded

    def spoil(self, version) -> None:
        """Every byte of its file becomes another, in place: a map of the file shows it."""
        path = self.folder / version.key / PART
        with path.open("r+b") as file:
            file.write(bytes(255 - byte for byte in path.read_bytes()))

    @property
    def are_pinned(self) -> bool:
        """Did all that the model was given lie in registered memory?"""
        inside = [(at, at + size) for at, size, _ in self.cuda.registered]
        return all(any(start <= address < end for start, end in inside) for address in self.engine.model.addresses)


@pytest.fixture
def world(transfer, tmp_path, monkeypatch) -> World:
    return World(transfer, tmp_path, monkeypatch, GPU)


def test_a_gpu_is_given_in_the_pause_what_was_verified_from_pinned_memory_and_nothing_is_copied_before(world: World):
    world.begin(FIRST)
    assert world.verified() == ""
    assert world.num_copied == SIZE_BYTES
    world.spoil(FIRST)  # nobody reads it any more
    assert same(world.load(FIRST), weights(1))
    assert world.num_copied == SIZE_BYTES
    assert world.are_pinned


def test_its_memory_is_taken_once_exactly_and_for_the_gpu_of_the_engine(world: World):
    for version in (FIRST, SECOND):
        world.begin(version)
        assert world.verified() == ""
        assert same(world.load(version), weights(version.version))
    assert [(size, gpu) for _, size, gpu in world.cuda.registered] == [(SIZE_BYTES, GPU)]
    assert world.are_pinned


def test_on_a_cpu_the_map_is_loaded_from_as_ever(transfer, tmp_path, monkeypatch):
    world = World(transfer, tmp_path, monkeypatch, torch.device("cpu"))
    world.begin(FIRST)
    assert world.verified() == ""
    assert same(world.load(FIRST), weights(1))
    assert (world.cuda.registered, world.num_copied) == ([], 0)


@pytest.mark.parametrize("why", ["CUDA has none", "little memory is free", "it is too large"])
def test_a_version_that_cannot_be_pinned_is_loaded_from_the_map_and_that_is_said_once(
    world: World, monkeypatch, caplog, why
):
    if why == "CUDA has none":
        world.cuda.error = 2
    elif why == "it is too large":
        monkeypatch.setattr(tensors, "_MOST_PINNED_BYTES", SIZE_BYTES - 1)
    else:
        memory = SimpleNamespace(available=4 * SIZE_BYTES - 1)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    for version in (FIRST, SECOND):
        world.begin(version)
        assert world.verified() == ""
        assert same(world.load(version), weights(version.version))
    assert (world.cuda.registered, world.num_copied) == ([], 0)
    said = [record.getMessage() for record in caplog.records]
    assert ["weights are copied to cuda:1 from memory that is not pinned" in text for text in said] == [True]


def test_what_is_damaged_is_refused_in_pinned_memory_too_and_the_next_version_is_taken(world: World):
    world.begin(FIRST)
    assert world.verified() == ""
    world.load(FIRST)
    world.spoil(SECOND)
    world.begin(SECOND)
    assert "not a readable safetensors file" in world.verified()
    assert same(world.engine.model.loaded, weights(1))
    with pytest.raises(RuntimeError, match="not a readable safetensors file"):
        world.load(SECOND)
    assert same(world.engine.model.loaded, weights(1))
    world.begin(FIRST)
    assert world.verified() == ""


def overtake(world: World, held: threading.Event, go_on: threading.Event, seen: list[threading.Thread]) -> None:
    """Verify the second version while the first is held, and load it once the first has ended."""
    world.begin(FIRST)
    assert held.wait(60)
    world.begin(SECOND)
    assert world.verified() == ""
    go_on.set()
    seen[0].join(60)
    assert same(world.load(SECOND), weights(2))


def test_a_verification_that_was_given_up_never_writes_into_what_a_later_one_has_verified(world: World, monkeypatch):
    """The first is held at its last tensor, until the second is verified and about to be loaded."""
    copied, held, go_on = store.copied, threading.Event(), threading.Event()
    seen: list[threading.Thread] = []

    def slow(data, into):
        if threading.current_thread() not in seen:
            seen.append(threading.current_thread())
        if threading.current_thread() is seen[0]:
            held.set()
            assert go_on.wait(60)
        return copied(data, into)

    monkeypatch.setattr(store, "copied", slow)
    overtake(world, held, go_on, seen)
    world.begin(FIRST)
    assert world.verified() == ""
    assert same(world.load(FIRST), weights(1))


def test_a_verification_that_was_given_up_and_comes_late_finds_the_memory_taken(world: World, monkeypatch):
    """The first is held before it has read what the version holds, until the second is verified."""
    manifest, held, go_on = store.WeightStore.manifest, threading.Event(), threading.Event()
    seen: list[threading.Thread] = []

    def slow(self, version):
        if version == FIRST:
            seen.append(threading.current_thread())
            held.set()
            assert go_on.wait(60)
        return manifest(self, version)

    monkeypatch.setattr(store.WeightStore, "manifest", slow)
    overtake(world, held, go_on, seen)
    assert world.are_pinned


def test_a_stages_copies_for_publication_take_of_pinned_memory_what_they_need_and_give_it_back(monkeypatch):
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
    assert len(cuda.unregistered) == 3  # the last view keeps its memory
    del view
    assert sorted(cuda.unregistered) == sorted(address for address, _, _ in cuda.registered)


def test_a_stage_whose_memory_cannot_be_pinned_publishes_all_the_same_and_makes_no_further_copy(monkeypatch, caplog):
    cuda = Cuda(monkeypatch)
    cuda.error = 2
    places = HostCopy.like(weights(), ["bfloat16"]).places
    copy = HostCopy(places, ["bfloat16"], GPU)
    cuda.launch_kernel()
    copy.fill(weights(3))
    assert cuda.registered == []
    assert "weights are copied from cuda:1 to memory that is not pinned" in caplog.text
    with pytest.raises(OSError, match="cannot be pinned"):
        copy.another()
