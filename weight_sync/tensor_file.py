"""Files of published tensors, in the safetensors format and without torch.

They are written from the buffers that hold the tensors, back to back, and read as views of a memory map: no copy.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable
from pathlib import Path

from common.hf_folder import StoredTensor, pack_header, parse_header
from weight_sync.errors import WeightsCorrupt

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4}
"""Bytes of one value, for every dtype that weights may have."""
CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64", "int64": "I64", "int32": "I32"}
"""What a header calls them."""


def header_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The first bytes of a file: length, and name, dtype and shape of each tensor, in the order of their bytes."""
    header: dict[str, StoredTensor] = {}
    start = 0
    for name, dtype, shape in tensors:
        end = start + ITEM_BYTES[dtype] * math.prod(shape)
        header[name] = StoredTensor(CODES[dtype], shape, start, end)
        start = end
    return pack_header(header)


class TensorFile:
    """A mapped safetensors file. Views of it stay valid after it is closed, as long as somebody holds them."""

    def __init__(self, path: Path) -> None:
        """Map a file and read its header; WeightsCorrupt if it is missing, cut, or no safetensors file."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise WeightsCorrupt(f"{path}: missing, though the manifest names it") from error
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise WeightsCorrupt(f"{path}: cannot be read: {error}") from error
        self._data = memoryview(self._map)
        try:
            self._start, self.tensors = parse_header(self._data)
        except ValueError as error:
            raise WeightsCorrupt(f"{self.path}: not a readable safetensors file: {error}") from error

    def view(self, name: str) -> memoryview:
        """The bytes of a tensor, read-only; WeightsCorrupt if the file has no such tensor."""
        facts = self.tensors.get(name)
        if facts is None:
            raise WeightsCorrupt(f"{self.path}: tensor '{name}' of the manifest is missing")
        return self._data[self._start + facts.start : self._start + facts.end]

    def close(self) -> None:
        """Let go of the file; the map ends with the last view of it."""
        self._data.release()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
