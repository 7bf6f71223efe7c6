"""Deltas: a tensor as what changed since its parent version, without loss.

    tensor     blocks of `BLOCK_BYTES`, in order
    block      one plane for every byte of a value: all first bytes, then all second ones
    plane      kind, number of places, stored size (9 bytes), then its content: new XOR old

An optimizer step moves most weights by less than a bfloat16 can show, and the rest by its last bits. So most planes
are zero; in the others the places that changed, by their distances, are smaller than compressed zeros.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from common.files import mapped, write_whole
from weight_sync.manifest import ITEM_BYTES, Encoding, TensorEntry, TensorFile, WeightsCorrupt, checksum_of, header_of

BLOCK_BYTES = 2**20
"""Of a tensor; fits a core's cache, and is a multiple of the size of every value."""
_HEADER = struct.Struct("<BII")
_ZERO, _PACKED, _PLACES = 0, 2, 3
"""A plane: nothing but zeros; compressed; distances of the places that are not zero, then their values."""
_PLACES_BELOW = 0.25
"""Share of nonzero bytes from which on places cost more than compression."""
_FAR = 255
"""Longest distance of a byte; longer ones have places of value zero in between."""
_ZSTD_LEVEL = 1
"""Higher ones are slower and save less than 1 %."""

Bytes = npt.NDArray[np.uint8]


def encode_delta(new: memoryview, old: memoryview, item_bytes: int) -> tuple[Encoding, bytes | memoryview]:
    """Return 'same' and nothing; 'xor' and a blob for `decode_delta`; or 'raw' and `new`, if xor is not smaller."""
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
    """Return the bytes of a tensor, from those of its parent and what `encode_delta` gave.

    Takes no more memory than the parent and one block, whatever the blob claims. The caller compares the tensor's
    checksum: a wrong parent is not noticed here.

    Raises:
        WeightsCorrupt: the blob does not fit the tensor.
    """
    if encoding == "same":
        _must(len(blob) == 0, f"an unchanged tensor has {len(blob)} bytes")
        return old
    if encoding == "raw":
        _must(len(blob) == len(old), f"{len(blob)} bytes for a tensor of {len(old)}")
        return blob
    _must(len(old) % item_bytes == 0, f"{len(old)} bytes are no values of {item_bytes}")
    new, old_bytes = np.empty(len(old), np.uint8), np.frombuffer(old, np.uint8)
    offset = 0
    for start in range(0, len(old), BLOCK_BYTES):
        block = np.zeros(min(BLOCK_BYTES, len(old) - start), np.uint8)
        for k in range(item_bytes):
            offset = _decode_plane(blob, offset, block[k::item_bytes])
        np.bitwise_xor(block, old_bytes[start : start + BLOCK_BYTES], out=new[start : start + BLOCK_BYTES])
    _must(offset == len(blob), f"{len(blob) - offset} bytes are left over")
    return new.data


def rebuild_file(
    entries: Sequence[TensorEntry],
    delta: Path,
    parent_file: Path,
    out: Path,
    next_tensor: Callable[[], None] = lambda: None,
) -> None:
    """Make a whole safetensors file, byte for byte as published, from that of the parent version and a delta file.

    Every tensor is checked before `out` appears. `next_tensor` is called before each of them.

    Raises:
        WeightsCorrupt: names the tensor and the delta file: it was cut or changed, or the parent is another one.
        OSError: the disk is full or not writable.
    """
    ordered = sorted(entries, key=lambda entry: entry.name)
    parent = TensorFile(parent_file)
    try:
        blobs = mapped(delta)
    except OSError as error:
        raise WeightsCorrupt(f"{delta}: cannot be read: {error}") from error
    header = header_of((entry.name, entry.dtype, entry.shape) for entry in ordered)

    # one tensor after the other: as large as the file is, little of it is in memory at a time
    def rebuilt() -> Iterator[bytes | memoryview]:
        for entry in ordered:
            next_tensor()
            yield _rebuilt(entry, blobs, parent, delta)

    write_whole(out, itertools.chain([header], rebuilt()), len(header) + sum(entry.size_bytes for entry in ordered))


def _rebuilt(entry: TensorEntry, blobs: memoryview, parent: TensorFile, delta: Path) -> bytes | memoryview:
    place = entry.delta
    try:
        _must(place is not None, "the manifest gives it no delta")
        assert place is not None
        blob = blobs[place.offset : place.offset + place.size_bytes]
        _must(len(blob) == place.size_bytes, f"{len(blobs)} bytes end before it does")
        if place.encoding == "raw":
            # also what the parent does not have, or has in another size
            _must(len(blob) == entry.size_bytes, f"{len(blob)} bytes for a tensor of {entry.size_bytes}")
            data: bytes | memoryview = blob
        else:
            old = parent.view(entry.name)
            _must(len(old) == entry.size_bytes, f"in the parent it has {len(old)} bytes, not {entry.size_bytes}")
            data = decode_delta(place.encoding, blob, old, ITEM_BYTES[entry.dtype])
        _must(checksum_of(data) == entry.checksum, "its checksum is another: it was changed, or its parent was")
    except WeightsCorrupt as error:
        raise WeightsCorrupt(f"{delta}: tensor '{entry.name}' cannot be had from {parent.path}: {error}") from error
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
    """(distances, then values; their number) of what is not zero."""
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
    """Fill a plane of zeros from what lies at `offset`; returns where the next one begins."""
    _must(offset + _HEADER.size <= len(blob), "it ends too soon")
    kind, count, size = _HEADER.unpack_from(blob, offset)
    start = offset + _HEADER.size
    content = blob[start : start + size]
    _must(len(content) == size, "it ends too soon")
    if kind == _ZERO:
        _must(size == 0, "a plane of zeros has content")
    elif kind == _PACKED:
        out[:] = _unpacked(content, len(out))
    elif kind == _PLACES:
        _must(0 < count <= len(out), f"{count} places in a plane of {len(out)} bytes")
        both = _unpacked(content, 2 * count)
        places = np.cumsum(both[:count], dtype=np.int64) - 1
        _must(both[:count].min() > 0 and places[-1] < len(out), "a place lies outside of its plane")
        out[places] = both[count:]
    else:
        _must(False, f"a plane of the unknown kind {kind}")
    return start + size


def _unpacked(content: memoryview, size: int) -> Bytes:
    try:
        return np.frombuffer(_codec().decompress(content, decompressed_size=size), np.uint8)
    except OSError as error:
        raise WeightsCorrupt(f"a plane cannot be decompressed: {error}") from error


def _codec() -> pa.Codec:
    return pa.Codec("zstd", compression_level=_ZSTD_LEVEL)


def _must(holds: bool, complaint: str) -> None:
    if not holds:
        raise WeightsCorrupt(complaint)
