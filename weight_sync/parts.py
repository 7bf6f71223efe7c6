"""What a stage contributes to a version: a copy of its tensors in host memory, and the files made of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from common.staleness import PolicyVersion
from weight_sync.delta import encode_delta
from weight_sync.manifest import (
    ITEM_BYTES,
    DeltaEntry,
    Encoding,
    FileEntry,
    Part,
    TensorEntry,
    checksum_of,
    delta_name,
    file_name,
    header_of,
)
from weight_sync.store import Buffers
from weight_sync.tensors import DTYPES, host_bytes, pinned_memory

_log = logging.getLogger(__name__)

DELTA_BELOW = 0.8
"""A delta that is not smaller than this share of the tensors is not kept."""

_TRY_AGAIN_EVERY = 10
"""Versions from one try of a delta that was in vain to the next: large updates, as at the start, may become small."""


class TensorSlot(NamedTuple):
    """Where a tensor lies in the buffers of a `HostCopy`, in values."""

    name: str
    shape: tuple[int, ...]
    start: int
    end: int


class HostCopy:
    """One copy of a stage's tensors in host memory, in every dtype that is published; used again and again.

    A dtype is one buffer, in which the tensors lie back to back, by name: the data of a safetensors file.
    """

    def __init__(
        self, places: Sequence[TensorSlot], dtypes: Sequence[str], gpu: torch.device | None, *, is_needed: bool = True
    ) -> None:
        """Make room, and touch it: the first touch of memory takes longer than to fill it later.

        `places` have no gaps. Copies from a GPU are asynchronous to pinned memory alone; a needed one does without.

        Raises:
            OSError: there is no pinned memory for one that is not needed.
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
        """Room for the same tensors, which is not needed; OSError where there is none."""
        return HostCopy(self.places, self.dtypes, self._gpu, is_needed=False)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors, rounded to every dtype; they may change once this returns.

        ValueError if they are not those that there is room for.
        """
        if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != {p.name: p.shape for p in self.places}:
            raise ValueError("these are other tensors than before: a publisher publishes one architecture")
        gpus = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        for buffer in self._buffers.values():
            for name, shape, start, end in self.places:
                buffer[start:end].view(shape).copy_(tensors[name].detach(), non_blocking=bool(gpus))
        for gpu in gpus:
            torch.cuda.synchronize(gpu)

    def bytes_of(self, dtype: str) -> memoryview:
        """All tensors in one dtype, back to back."""
        return host_bytes(self._buffers[dtype])

    def tensor_bytes(self, place: TensorSlot, dtype: str) -> memoryview:
        size = ITEM_BYTES[dtype]
        return self.bytes_of(dtype)[place.start * size : place.end * size]

    def header(self, dtype: str) -> bytes:
        """What precedes them in a safetensors file."""
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


@dataclass(frozen=True)
class _Parent:
    version: PolicyVersion
    copy: HostCopy
    checksums: dict[tuple[str, str], str]


class PartMaker:
    """Makes the files of one stage: whole ones, and deltas against the version that it made before."""

    def __init__(self, rank: int, full_every: int) -> None:
        """Make parts of a stage, with deltas but for every `full_every`-th version."""
        self._rank = rank
        self._full_every = full_every
        self._num_made = 0
        self._parent: _Parent | None = None
        self._not_smaller: set[tuple[str, str]] = set()
        """(dtype, name) of tensors whose delta was not smaller, and is not tried for a while."""

    def make(self, version: PolicyVersion, copy: HostCopy) -> tuple[Part, dict[str, Buffers]]:
        """The document of a part and its files, name -> content. The content is that of `copy`, which must stay."""
        parent = self._parent
        if parent is None or self._num_made % _TRY_AGAIN_EVERY == 0:
            self._not_smaller.clear()
        self._num_made += 1
        entries: list[TensorEntry] = []
        files: dict[str, Buffers] = {}
        for dtype in copy.dtypes:
            name = file_name(self._rank, dtype)
            of_file = [
                TensorEntry(place.name, dtype, place.shape, name, checksum_of(copy.tensor_bytes(place, dtype)))
                for place in copy.places
            ]
            files[name] = [copy.header(dtype), copy.bytes_of(dtype)]
            deltas = self._deltas(copy, parent, of_file) if parent is not None else None
            if deltas is not None:
                of_file, files[delta_name(name)] = deltas
            entries += of_file
        part = Part(
            rank=self._rank,
            version=version.key,
            parent=parent.version.key if parent is not None and any(entry.delta for entry in entries) else None,
            tensors=tuple(entries),
            files=tuple(FileEntry(name, sum(map(len, content))) for name, content in files.items()),
        )
        return part, files

    def keep(self, version: PolicyVersion, copy: HostCopy, part: Part, *, as_parent: bool) -> list[HostCopy]:
        """After a version is written: which copies are free again.

        `part` is what `make` returned; `as_parent`: the next version may be given as changes of this one.
        """
        free = [] if self._parent is None else [self._parent.copy]
        self._parent = None
        if as_parent and self._num_made % self._full_every:
            self._parent = _Parent(version, copy, {(e.dtype, e.name): e.checksum for e in part.tensors})
        else:
            free.append(copy)
        return free

    def _deltas(
        self, copy: HostCopy, parent: _Parent, entries: Sequence[TensorEntry]
    ) -> tuple[list[TensorEntry], list[bytes | memoryview]] | None:
        """The entries of a file with their deltas, and the delta file; None where it is not smaller."""
        limit = DELTA_BELOW * sum(entry.size_bytes for entry in entries)
        found: list[TensorEntry] = []
        blobs: list[bytes | memoryview] = []
        offset = 0
        for place, entry in zip(copy.places, entries, strict=True):
            encoding, blob = self._delta(copy, parent, place, entry)
            delta = DeltaEntry(encoding, offset, len(blob))
            found.append(msgspec.structs.replace(entry, delta=delta))
            blobs.append(blob)
            offset += len(blob)
            if offset >= limit:
                self._not_smaller |= {(entry.dtype, entry.name) for entry in entries}
                return None
        return found, blobs

    def _delta(
        self, copy: HostCopy, parent: _Parent, place: TensorSlot, entry: TensorEntry
    ) -> tuple[Encoding, bytes | memoryview]:
        key = (entry.dtype, entry.name)
        if entry.checksum == parent.checksums[key]:
            return "same", b""
        new = copy.tensor_bytes(place, entry.dtype)
        if key in self._not_smaller:
            return "raw", new
        encoding, blob = encode_delta(new, parent.copy.tensor_bytes(place, entry.dtype), ITEM_BYTES[entry.dtype])
        if encoding == "raw":
            self._not_smaller.add(key)
        return encoding, blob
