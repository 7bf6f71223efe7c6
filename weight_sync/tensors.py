"""Tensors as bytes, and bytes as tensors: the one place where weights meet torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weight_sync.manifest import Manifest, TensorEntry
from weight_sync.store import WeightStore
from weight_sync.tensor_file import ITEM_BYTES

DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES if getattr(torch, name).is_floating_point}
"""In what weights may be published: name -> torch's dtype."""


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


def read_tensors(store: WeightStore, manifest: Manifest, dtype: str) -> dict[str, Tensor]:
    """All tensors of a variant as views of the store's files, every one checked as in `WeightStore.tensors`."""
    return {entry.name: tensor_of(entry, data) for entry, data in store.tensors(manifest, dtype)}


class _ReadOnly:
    """Bytes that numpy takes for writable: torch knows no other kind and warns of them."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        address = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        self.__array_interface__ = {"data": (address, False), "shape": (len(data),), "typestr": "|u1", "version": 3}
