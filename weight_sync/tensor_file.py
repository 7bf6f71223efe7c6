"""The safetensors format, byte for byte and without torch.

    8 bytes           length of the header, little endian
    header            JSON: name -> dtype, shape, data_offsets; padded with spaces to a multiple of 8
    data              the tensors, back to back

Files are written from the buffers that hold the tensors and read as views of a memory map: no copy.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from weight_sync.errors import WeightsCorrupt

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4}
"""Bytes of one value, for every dtype that weights may have."""
_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64", "int64": "I64", "int32": "I32"}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100 * 2**20


class TensorFacts(NamedTuple):
    """What a header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """Of its bytes, counted from the start of the data."""
    end: int


def header_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The first bytes of a file: length and header.

    Args:
        tensors: name, dtype and shape of each, in the order in which their bytes follow.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, dtype, shape in tensors:
        size = ITEM_BYTES[dtype]
        for extent in shape:
            size *= extent
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


class TensorFile:
    """A mapped safetensors file. Views of it stay valid after it is closed, as long as somebody holds them."""

    def __init__(self, path: Path) -> None:
        """Map a file and read its header.

        Raises:
            WeightsCorrupt: it is missing, cut, or no safetensors file.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise WeightsCorrupt(f"{path}: missing, though the manifest names it") from error
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise WeightsCorrupt(f"{path}: cannot be read: {error}") from error
        self._data = memoryview(self._map)
        self.tensors = self._read_header()

    def view(self, name: str) -> memoryview:
        """The bytes of a tensor, read-only.

        Raises:
            WeightsCorrupt: the file has no such tensor.
        """
        facts = self.tensors.get(name)
        if facts is None:
            raise WeightsCorrupt(f"{self.path}: tensor '{name}' of the manifest is missing")
        return self._data[self._start + facts.start : self._start + facts.end]

    def close(self) -> None:
        """Let go of the file; the map ends with the last view of it."""
        self._data.release()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_header(self) -> dict[str, TensorFacts]:
        try:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > min(_MAX_HEADER_BYTES, len(self._data) - _LENGTH.size):
                raise ValueError(f"its header of {length} bytes is longer than the file")  # noqa: TRY301 -- one sentence for all
            self._start = _LENGTH.size + length
            header = json.loads(bytes(self._data[_LENGTH.size : self._start]))
            header.pop("__metadata__", None)
            found = {name: self._facts(name, entry) for name, entry in header.items()}
        except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightsCorrupt(f"{self.path}: not a readable safetensors file: {error}") from error
        return found

    def _facts(self, name: str, entry: dict[str, object]) -> TensorFacts:
        dtype = _DTYPES[str(entry["dtype"])]
        shape = tuple(int(extent) for extent in entry["shape"])  # type: ignore[attr-defined]  # checked by the caller
        start, end = (int(offset) for offset in entry["data_offsets"])  # type: ignore[attr-defined]
        size = ITEM_BYTES[dtype]
        for extent in shape:
            size *= extent
        if min(shape, default=0) < 0 or not 0 <= start <= end <= len(self._data) - self._start or end - start != size:
            raise ValueError(f"tensor '{name}' lies outside of it")
        return TensorFacts(dtype, shape, start, end)
