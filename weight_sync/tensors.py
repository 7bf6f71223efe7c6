"""Tensors as bytes, bytes as tensors, and the memory that GPUs copy from: the one place where weights meet torch."""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from common.staleness import PolicyVersion
from weight_sync.manifest import ITEM_BYTES, Manifest, TensorEntry, header_of
from weight_sync.store import WeightStore

DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES if getattr(torch, name).is_floating_point}
"""Dtypes of published weights: name -> torch's dtype."""
_FREE_PER_PINNED = 4
_MOST_PINNED_BYTES = 32 * 2**30

_log = logging.getLogger(__name__)


def host_bytes(tensor: Tensor) -> memoryview:
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    flat = tensor.detach().reshape(-1)
    # not `view` alone: it does not take a tensor without values to a smaller dtype
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def tensor_of(entry: TensorEntry, data: memoryview) -> Tensor:
    """Return the bytes as a tensor, without a copy. It must not be written to: they may be a map of a file."""
    dtype = getattr(torch, entry.dtype)
    if len(data) == 0:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.from_numpy(np.asarray(_ReadOnly(data))).view(dtype).view(entry.shape)


def read_tensors(
    store: WeightStore, manifest: Manifest, dtype: str, room: PinnedRoom | None = None
) -> dict[str, Tensor]:
    """Return all tensors of a variant as checked views of the store's files, or of a `room` if it has place.

    Views of a room are valid until it is filled again.
    """
    size_bytes = sum(entry.size_bytes for entry in manifest.variant(dtype))
    with contextlib.nullcontext() if room is None else room.filled(manifest.policy, size_bytes) as into:
        return {entry.name: tensor_of(entry, data) for entry, data in store.tensors(manifest, dtype, into)}


def pinned_memory(size_bytes: int, gpu: torch.device) -> Tensor:
    """Return host memory, as bytes, that a GPU reads and writes by itself; it is freed with the last view of it.

    It is registered with CUDA: torch's allocator would take the next power of two. OSError if it cannot be had.
    """
    array = np.frombuffer(mmap.mmap(-1, max(size_bytes, 1)), np.uint8)
    # in a thread of its own the current device is GPU 0, where a context of this process would take memory for nothing
    with torch.cuda.device(gpu):
        if problem := pin(array):
            raise OSError(
                f"{size_bytes / 2**30:.1f} GiB of host memory cannot be pinned for {gpu} (CUDA error {problem})"
            )
    return torch.from_numpy(array)[:size_bytes]


def pin(memory: npt.NDArray[np.uint8]) -> int:
    """Have CUDA lock host memory in place until its last view is given up; CUDA's error code, 0 where it did."""
    address, gpu = memory.ctypes.data, torch.cuda.current_device()
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register() -> int:
        torch.cuda.set_device(gpu)
        return int(cuda.cudaHostRegister(address, memory.nbytes, 0))

    # CUDA remembers an error in the thread that met it, where the next kernel would be blamed for it
    with ThreadPoolExecutor(1) as thread:
        code = thread.submit(register).result()
    if not code:
        weakref.finalize(memory, cuda.cudaHostUnregister, address).atexit = False
    return code


class PinnedRoom:
    """Pinned host memory for one version at a time, kept for all that follow.

    Each rank of an engine has its own: at most a quarter of the free memory when its first version comes, and 32 GiB.
    """

    def __init__(self, gpu: torch.device) -> None:
        self._gpu = gpu
        self._memory: Tensor | None = None
        self._is_refused = False
        self._filling = threading.Lock()
        self.awaited: PolicyVersion | None = None
        """The version to be filled; a thread that was given up and comes late finds another one."""

    @contextlib.contextmanager
    def filled(self, version: PolicyVersion, size_bytes: int) -> Iterator[memoryview | None]:
        """So many bytes, to be filled in the block; None where there are none or another version or thread has them."""
        if not self._filling.acquire(blocking=False):
            yield None
            return
        try:
            memory = self._taken(size_bytes) if version == self.awaited else None
            yield None if memory is None else host_bytes(memory)[:size_bytes]
        finally:
            self._filling.release()

    def _taken(self, size_bytes: int) -> Tensor | None:
        if self._memory is None and not self._is_refused:
            try:
                self._memory = self._pin(size_bytes)
            except OSError as error:
                self._is_refused = True
                _log.warning(
                    "weights are copied to %s from memory that is not pinned, which is slower: %s", self._gpu, error
                )
        fits = self._memory is not None and size_bytes <= len(self._memory)
        return self._memory if fits else None

    def _pin(self, size_bytes: int) -> Tensor:
        limit_bytes = min(psutil.virtual_memory().available // _FREE_PER_PINNED, _MOST_PINNED_BYTES)
        if size_bytes > limit_bytes:
            raise OSError(
                f"a version has {size_bytes / 2**30:.1f} GiB, and at most {limit_bytes / 2**30:.1f} GiB are pinned: a "
                f"quarter of what is free, and {_MOST_PINNED_BYTES // 2**30} GiB"
            )
        return pinned_memory(size_bytes, self._gpu)


class TensorSlot(NamedTuple):
    """Where a tensor lies in the buffers of a `HostCopy`, in values."""

    name: str
    shape: tuple[int, ...]
    start: int
    end: int


class HostCopy:
    """A reused copy of a stage's tensors in host memory, in every dtype that is published.

    A dtype is one buffer, in which the tensors lie back to back, by name: the data of a safetensors file.
    """

    def __init__(
        self, places: Sequence[TensorSlot], dtypes: Sequence[str], gpu: torch.device | None, *, is_needed: bool = True
    ) -> None:
        """Make room, and touch it. `places` have no gaps.

        Copies from a GPU are asynchronous only to pinned memory; a copy that `is_needed` does without, any other raises
        OSError.
        """
        self.places = tuple(places)
        self.dtypes = tuple(dtypes)
        self._gpu = gpu
        length = places[-1].end if places else 0
        self._buffers = {name: _buffer(length, name, gpu, is_needed=is_needed) for name in dtypes}

    @classmethod
    def like(cls, tensors: Mapping[str, Tensor], dtypes: Sequence[str]) -> HostCopy:
        """Room for these tensors; ValueError if one does not hold floating-point values."""
        places: list[TensorSlot] = []
        start = 0
        for name in sorted(tensors):
            tensor = tensors[name]
            if not tensor.is_floating_point():
                raise ValueError(f"tensor '{name}' is {tensor.dtype}; weights are floating-point values")
            places.append(TensorSlot(name, tuple(tensor.shape), start, start + tensor.numel()))
            start += tensor.numel()
        return cls(places, dtypes, next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None))

    def another(self) -> HostCopy:
        return HostCopy(self.places, self.dtypes, self._gpu, is_needed=False)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors, rounded to every dtype; ValueError if they are not those that there is room for."""
        if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != {p.name: p.shape for p in self.places}:
            raise ValueError("these are other tensors than before: a publisher publishes one architecture")
        gpus = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        for buffer in self._buffers.values():
            for name, shape, start, end in self.places:
                buffer[start:end].view(shape).copy_(tensors[name].detach(), non_blocking=bool(gpus))
        for gpu in gpus:
            torch.cuda.synchronize(gpu)

    def bytes_of(self, dtype: str) -> memoryview:
        return host_bytes(self._buffers[dtype])

    def tensor_bytes(self, place: TensorSlot, dtype: str) -> memoryview:
        size = ITEM_BYTES[dtype]
        return self.bytes_of(dtype)[place.start * size : place.end * size]

    def header(self, dtype: str) -> bytes:
        return header_of((place.name, dtype, place.shape) for place in self.places)


def _buffer(length: int, dtype: str, gpu: torch.device | None, *, is_needed: bool) -> Tensor:
    if gpu is not None:
        try:
            return pinned_memory(ITEM_BYTES[dtype] * length, gpu).view(DTYPES[dtype])
        except OSError as error:
            if not is_needed:
                raise
            _log.warning("weights are copied from %s to memory that is not pinned, which is slower: %s", gpu, error)
    return torch.empty(length, dtype=DTYPES[dtype]).zero_()


class _ReadOnly:
    """Bytes that numpy takes for writable: torch knows no other kind and warns of them."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        address = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        self.__array_interface__ = {"data": (address, False), "shape": (len(data),), "typestr": "|u1", "version": 3}
