"""Deltas: lossless encoding of a tensor as its changes since the parent version.

    tensor     blocks of `BLOCK_BYTES`, in order
    block      one plane per byte of a value: all first bytes, then all second bytes
    plane      kind, number of nonzero positions, stored size (9 bytes), then its content: new XOR old

An optimizer step changes most weights by less than the resolution of bfloat16, and the rest in their last bits. So most
planes are zero. In the other planes, the distances between changed positions take fewer bytes than compressed zeros.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from leeway.common.files import mapped, write_whole
from leeway.weight_sync.manifest import (
    ITEM_BYTES,
    Encoding,
    TensorEntry,
    TensorFile,
    WeightsCorrupt,
    checksum_of,
    header_of,
)

BLOCK_BYTES = 2**20
"""Bytes of a tensor per block; fits a core's cache, and is a multiple of every item size."""
_HEADER = struct.Struct("<BII")
_ZERO, _PACKED, _PLACES = 0, 2, 3
"""Kinds of planes: all zeros; compressed; distances between nonzero positions, then their values."""
_PLACES_BELOW = 0.25
"""Share of nonzero bytes above which positions take more bytes than compression."""
_FAR = 255
"""Longest distance that fits in one byte; longer distances are split by extra positions whose value is zero."""
_ZSTD_LEVEL = 1
"""Compression level; higher levels are slower and save less than 1 %."""

Bytes = npt.NDArray[np.uint8]


def encode_delta(new: memoryview, old: memoryview, item_bytes: int) -> tuple[Encoding, bytes | memoryview]:
    """Return 'same' and no bytes; 'xor' and a blob for `decode_delta`; or 'raw' and `new` if XOR is not smaller."""
    if len(new) != len(old) or len(new) % item_bytes:
        return "raw", new
    blob = bytearray()
    changed = False
    new_bytes, old_bytes = np.frombuffer(new, np.uint8), np.frombuffer(old, np.uint8)
    for start in range(0, len(new), BLOCK_BYTES):
        block = np.bitwise_xor(new_bytes[start : start + BLOCK_BYTES], old_bytes[start : start + BLOCK_BYTES])
        for k in range(item_bytes):
            plane = _encode_plane(np.ascontiguousarray(block[k::item_bytes]))
            changed = changed or plane[0] != _ZERO
            blob += plane
        if changed and len(blob) >= len(new):
            return "raw", new
    return ("xor", bytes(blob)) if changed else ("same", b"")


def decode_delta(encoding: Encoding, blob: memoryview, old: memoryview, item_bytes: int) -> bytes | memoryview:
    """Return the bytes of a tensor from those of its parent and the result of `encode_delta`.

    Even an invalid blob takes no more memory than the parent and one block. The caller must verify the checksum of the
    tensor, because this function does not detect a wrong parent.

    Raises:
        WeightsCorrupt: the blob does not fit the tensor.
    """
    if encoding == "same":
        _require(len(blob) == 0, f"an unchanged tensor has a delta of {len(blob)} bytes")
        return old
    if encoding == "raw":
        _require(len(blob) == len(old), f"the delta has {len(blob)} bytes, the tensor {len(old)}")
        return blob
    _require(len(old) % item_bytes == 0, f"{len(old)} bytes are not a multiple of the item size {item_bytes}")
    new, old_bytes = np.empty(len(old), np.uint8), np.frombuffer(old, np.uint8)
    offset = 0
    for start in range(0, len(old), BLOCK_BYTES):
        block = np.zeros(min(BLOCK_BYTES, len(old) - start), np.uint8)
        for k in range(item_bytes):
            offset = _decode_plane(blob, offset, block[k::item_bytes])
        np.bitwise_xor(block, old_bytes[start : start + BLOCK_BYTES], out=new[start : start + BLOCK_BYTES])
    _require(offset == len(blob), f"{len(blob) - offset} bytes are left over")
    return new.data


def rebuild_file(
    entries: Sequence[TensorEntry],
    delta: Path,
    parent_file: Path,
    out: Path,
    next_tensor: Callable[[], None] = lambda: None,
) -> None:
    """Rebuild a whole safetensors file, byte for byte as published, from the parent's file and a delta file.

    Verifies every tensor before `out` appears. Calls `next_tensor` before each tensor.

    Raises:
        WeightsCorrupt: the delta file was truncated or changed, or the parent is wrong; the error names both files.
        OSError: the disk is full or not writable.
    """
    ordered = sorted(entries, key=lambda entry: entry.name)
    parent = TensorFile(parent_file)
    try:
        blobs = mapped(delta)
    except OSError as error:
        raise WeightsCorrupt(f"cannot read {delta}: {error}") from error
    header = header_of((entry.name, entry.dtype, entry.shape) for entry in ordered)

    # one tensor at a time, so that only a small part of the file is in memory
    def rebuilt() -> Iterator[bytes | memoryview]:
        for entry in ordered:
            next_tensor()
            yield _rebuilt(entry, blobs, parent, delta)

    write_whole(out, itertools.chain([header], rebuilt()), len(header) + sum(entry.size_bytes for entry in ordered))


def _rebuilt(entry: TensorEntry, blobs: memoryview, parent: TensorFile, delta: Path) -> bytes | memoryview:
    place = entry.delta
    try:
        _require(place is not None, "the manifest has no delta for the tensor")
        assert place is not None
        blob = blobs[place.offset : place.offset + place.size_bytes]
        _require(len(blob) == place.size_bytes, f"the delta extends beyond the {len(blobs)} bytes of the file")
        if place.encoding == "raw":
            # do not read the parent: it may lack the tensor or have it in another size
            _require(len(blob) == entry.size_bytes, f"the delta has {len(blob)} bytes, the tensor {entry.size_bytes}")
            data: bytes | memoryview = blob
        else:
            old = parent.view(entry.name)
            _require(len(old) == entry.size_bytes, f"the parent has {len(old)} tensor bytes, not {entry.size_bytes}")
            data = decode_delta(place.encoding, blob, old, ITEM_BYTES[entry.dtype])
        _require(checksum_of(data) == entry.checksum, "wrong checksum: the delta or the parent was changed")
    except WeightsCorrupt as error:
        raise WeightsCorrupt(f"{delta}: cannot rebuild tensor '{entry.name}' from {parent.path}: {error}") from error
    return data


def _encode_plane(plane: Bytes) -> bytes:
    changed = plane != 0
    count = int(np.count_nonzero(changed))
    if count == 0:
        return _HEADER.pack(_ZERO, 0, 0)
    kind = _PACKED
    if count < _PLACES_BELOW * len(plane):
        kind, plane, count = _PLACES, *_places_of(plane, np.flatnonzero(changed))
    packed = _codec().compress(plane, asbytes=True)
    return _HEADER.pack(kind, count, len(packed)) + packed


def _places_of(plane: Bytes, places: npt.NDArray[np.intp]) -> tuple[Bytes, int]:
    """Return the distances and then the values of the nonzero positions, and the number of positions."""
    distances = np.diff(places, prepend=-1)
    steps = (distances - 1) // _FAR
    values = plane[places]
    if steps.any():
        last = np.cumsum(steps + 1) - 1
        near = np.full(last[-1] + 1, _FAR)
        near[last] = distances - _FAR * steps
        spread = np.zeros(len(near), np.uint8)
        spread[last] = values
        distances, values = near, spread
    return np.concatenate([distances.astype(np.uint8), values]), len(values)


def _decode_plane(blob: memoryview, offset: int, out: Bytes) -> int:
    """Decode the plane at `offset` into `out`, which holds zeros; return the offset of the next plane."""
    _require(offset + _HEADER.size <= len(blob), "its delta is truncated")
    kind, count, size = _HEADER.unpack_from(blob, offset)
    start = offset + _HEADER.size
    content = blob[start : start + size]
    _require(len(content) == size, "its delta is truncated")
    if kind == _ZERO:
        _require(size == 0, "a plane of zeros has content")
    elif kind == _PACKED:
        out[:] = _unpacked(content, len(out))
    elif kind == _PLACES:
        _require(0 < count <= len(out), f"{count} positions in a plane of {len(out)} bytes")
        both = _unpacked(content, 2 * count)
        places = np.cumsum(both[:count], dtype=np.int64) - 1
        _require(both[:count].min() > 0 and places[-1] < len(out), "a position is outside its plane")
        out[places] = both[count:]
    else:
        _require(False, f"unknown kind of plane: {kind}")
    return start + size


def _unpacked(content: memoryview, size: int) -> Bytes:
    try:
        return np.frombuffer(_codec().decompress(content, decompressed_size=size), np.uint8)
    except OSError as error:
        raise WeightsCorrupt(f"cannot decompress a plane: {error}") from error


def _codec() -> pa.Codec:
    return pa.Codec("zstd", compression_level=_ZSTD_LEVEL)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise WeightsCorrupt(message)
