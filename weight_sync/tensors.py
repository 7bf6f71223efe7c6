"""Tensors as bytes, bytes as tensors, and the memory that GPUs copy from: the one place where weights meet torch."""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from common.staleness import PolicyVersion
from weight_sync.manifest import ITEM_BYTES, Manifest, TensorEntry
from weight_sync.store import WeightStore

DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES if getattr(torch, name).is_floating_point}
"""In what weights may be published: name -> torch's dtype."""
_FREE_PER_PINNED = 4
_MOST_PINNED_BYTES = 32 * 2**30

_log = logging.getLogger(__name__)


def host_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, in C order, without a copy."""
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    flat = tensor.detach().reshape(-1)
    # not `view` alone: it does not take a tensor without values to a smaller dtype
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def tensor_of(entry: TensorEntry, data: memoryview) -> Tensor:
    """`entry.size_bytes` bytes as a tensor, without a copy; it keeps them alive.

    They may be a map of a file: the tensor must not be written to.
    """
    dtype = getattr(torch, entry.dtype)
    if len(data) == 0:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.from_numpy(np.asarray(_ReadOnly(data))).view(dtype).view(entry.shape)


def read_tensors(
    store: WeightStore, manifest: Manifest, dtype: str, room: PinnedRoom | None = None
) -> dict[str, Tensor]:
    """All tensors of a variant as views of the store's files, every one checked as in `WeightStore.tensors`.

    With a `room` they are views of it, until it is filled again; where it has no place they are those of the files.
    """
    size_bytes = sum(entry.size_bytes for entry in manifest.variant(dtype))
    with contextlib.nullcontext() if room is None else room.filled(manifest.policy, size_bytes) as into:
        return {entry.name: tensor_of(entry, data) for entry, data in store.tensors(manifest, dtype, into)}


def pinned_memory(size_bytes: int, gpu: torch.device) -> Tensor:
    """Host memory, as bytes, that a GPU reads and writes by itself; it is given back with the last view of it.

    Registered with CUDA as it is, whole pages of its own: torch's allocator would take the next power of two.

    Raises:
        OSError: it cannot be had.
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
    """Pinned host memory for one version at a time: made for the first one, and kept for all that follow.

    Each rank of an engine has its own: at most a quarter of the memory that is free on the host when its first one
    comes, and 32 GiB.
    """

    def __init__(self, gpu: torch.device) -> None:
        """Nothing is taken before it is filled."""
        self._gpu = gpu
        self._memory: Tensor | None = None
        self._is_refused = False
        self._filling = threading.Lock()
        self.awaited: PolicyVersion | None = None
        """Of which version it is to be filled: whoever was given up on and comes late finds another one."""

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


class _ReadOnly:
    """Bytes that numpy takes for writable: torch knows no other kind and warns of them."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        address = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        self.__array_interface__ = {"data": (address, False), "shape": (len(data),), "typestr": "|u1", "version": 3}
