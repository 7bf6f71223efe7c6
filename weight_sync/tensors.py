"""Conversion between tensors and bytes, and pinned host memory: the only module of the package that imports torch."""

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

from leeway.common.staleness import PolicyVersion
from leeway.weight_sync.manifest import ITEM_BYTES, Manifest, TensorEntry, header_of
from leeway.weight_sync.store import WeightStore

DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES if getattr(torch, name).is_floating_point}
"""Dtypes of published weights: name -> torch dtype."""
_FREE_PER_PINNED = 4
_MOST_PINNED_BYTES = 32 * 2**30

_log = logging.getLogger(__name__)


def host_bytes(tensor: Tensor) -> memoryview:
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    flat = tensor.detach().reshape(-1)
    # `view` rejects an empty tensor for a smaller dtype
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def tensor_of(entry: TensorEntry, data: memoryview) -> Tensor:
    """Return the bytes as a tensor without copying. Do not write to the tensor: its bytes may be a mapped file."""
    dtype = getattr(torch, entry.dtype)
    if len(data) == 0:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.from_numpy(np.asarray(_ReadOnly(data))).view(dtype).view(entry.shape)


def read_tensors(
    store: WeightStore, manifest: Manifest, dtype: str, pinned: PinnedBuffer | None = None
) -> dict[str, Tensor]:
    """Return all verified tensors of a variant: views of the store's files, or of the `pinned` buffer if they fit.

    Views of the pinned buffer are valid until the buffer is filled again.
    """
    size_bytes = sum(entry.size_bytes for entry in manifest.variant(dtype))
    with contextlib.nullcontext() if pinned is None else pinned.filled(manifest.policy, size_bytes) as into:
        return {entry.name: tensor_of(entry, data) for entry, data in store.tensors(manifest, dtype, into)}


def pinned_memory(size_bytes: int, gpu: torch.device) -> Tensor:
    """Return pinned host memory as bytes, for DMA by a GPU; it is freed with its last view.

    CUDA pins the memory directly: torch's allocator rounds sizes up to powers of two. Raise OSError if pinning fails.
    """
    array = np.frombuffer(mmap.mmap(-1, max(size_bytes, 1)), np.uint8)
    # a new thread defaults to GPU 0, where a CUDA context would waste memory
    with torch.cuda.device(gpu):
        if problem := pin(array):
            raise OSError(f"cannot pin {size_bytes / 2**30:.1f} GiB of host memory for {gpu} (CUDA error {problem})")
    return torch.from_numpy(array)[:size_bytes]


def pin(memory: npt.NDArray[np.uint8]) -> int:
    """Pin host memory with CUDA until its last view is freed; return the CUDA error code, 0 on success."""
    address, gpu = memory.ctypes.data, torch.cuda.current_device()
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register() -> int:
        torch.cuda.set_device(gpu)
        return int(cuda.cudaHostRegister(address, memory.nbytes, 0))

    # CUDA keeps an error per thread and reports it at the next kernel launch, so use a separate thread
    with ThreadPoolExecutor(1) as thread:
        code = thread.submit(register).result()
    if not code:
        weakref.finalize(memory, cuda.cudaHostUnregister, address).atexit = False
    return code


class PinnedBuffer:
    """Pinned host memory for one version at a time, reused for all later versions.

    Each engine rank has one buffer of at most 32 GiB, and at most a quarter of the memory free at its first use.
    """

    def __init__(self, gpu: torch.device) -> None:
        self._gpu = gpu
        self._memory: Tensor | None = None
        self._has_failed = False
        self._filling = threading.Lock()
        self.expected: PolicyVersion | None = None
        """The only version that may fill the buffer now; excludes a late thread of an abandoned verification."""

    @contextlib.contextmanager
    def filled(self, version: PolicyVersion, size_bytes: int) -> Iterator[memoryview | None]:
        """Yield `size_bytes` to fill; None if they do not fit, or if another thread or version uses the buffer."""
        if not self._filling.acquire(blocking=False):
            yield None
            return
        try:
            memory = self._allocated(size_bytes) if version == self.expected else None
            yield None if memory is None else host_bytes(memory)[:size_bytes]
        finally:
            self._filling.release()

    def _allocated(self, size_bytes: int) -> Tensor | None:
        if self._memory is None and not self._has_failed:
            try:
                self._memory = self._pin(size_bytes)
            except OSError as error:
                self._has_failed = True
                _log.warning("weights are copied to %s from unpinned memory, which is slower: %s", self._gpu, error)
        fits = self._memory is not None and size_bytes <= len(self._memory)
        return self._memory if fits else None

    def _pin(self, size_bytes: int) -> Tensor:
        limit_bytes = min(psutil.virtual_memory().available // _FREE_PER_PINNED, _MOST_PINNED_BYTES)
        if size_bytes > limit_bytes:
            raise OSError(
                f"a version takes {size_bytes / 2**30:.1f} GiB, but the limit for pinned memory is "
                f"{limit_bytes / 2**30:.1f} GiB (a quarter of free memory, at most {_MOST_PINNED_BYTES // 2**30} GiB)"
            )
        return pinned_memory(size_bytes, self._gpu)


class TensorSlot(NamedTuple):
    """Position of a tensor in the buffers of a `HostCopy`, counted in values."""

    name: str
    shape: tuple[int, ...]
    start: int
    end: int


class HostCopy:
    """A reusable copy of a stage's tensors in host memory, in every published dtype.

    Each dtype has one buffer with the tensors back to back, sorted by name: the data section of a safetensors file.
    """

    def __init__(
        self, places: Sequence[TensorSlot], dtypes: Sequence[str], gpu: torch.device | None, *, is_needed: bool = True
    ) -> None:
        """Allocate the buffers and touch their pages. `places` must be contiguous.

        With a GPU, the buffers are pinned, which asynchronous copies require. If pinning fails, unpinned memory is used
        if `is_needed`; otherwise OSError is raised.
        """
        self.places = tuple(places)
        self.dtypes = tuple(dtypes)
        self._gpu = gpu
        length = places[-1].end if places else 0
        self._buffers = {name: _buffer(length, name, gpu, is_needed=is_needed) for name in dtypes}

    @classmethod
    def like(cls, tensors: Mapping[str, Tensor], dtypes: Sequence[str]) -> HostCopy:
        """Allocate a copy with the layout of these tensors; raise ValueError if a tensor is not floating-point."""
        places: list[TensorSlot] = []
        start = 0
        for name, tensor in sorted(tensors.items()):
            if not tensor.is_floating_point():
                raise ValueError(f"tensor '{name}' has dtype {tensor.dtype}; weights must be floating-point")
            places.append(TensorSlot(name, tuple(tensor.shape), start, start + tensor.numel()))
            start += tensor.numel()
        return cls(places, dtypes, next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None))

    def another(self) -> HostCopy:
        return HostCopy(self.places, self.dtypes, self._gpu, is_needed=False)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors, rounded to every dtype; raise ValueError if names or shapes differ from the layout."""
        if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != {p.name: p.shape for p in self.places}:
            raise ValueError("tensor names or shapes changed: a publisher publishes one architecture")
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
            _log.warning("weights are copied from %s to unpinned memory, which is slower: %s", gpu, error)
    return torch.empty(length, dtype=DTYPES[dtype]).zero_()


class _ReadOnly:
    """Read-only bytes that numpy reports as writable, because torch warns about read-only arrays."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        address = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        self.__array_interface__ = {"data": (address, False), "shape": (len(data),), "typestr": "|u1", "version": 3}
