"""What a published version consists of: its tensors by name and dtype, their files and checksums.

A manifest is JSON, and sealed with the checksum of itself. Two further hashes tie versions together: the fingerprint of
the architecture (names, dtypes, shapes) and the chain (this version's content on top of its parent's).

A version holds the same tensors in every dtype that an engine asks for: its variants. Its files are safetensors,
written from the buffers that hold the tensors and read as views of a memory map. This module needs no torch.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import xxhash

from common.files import mapped
from common.hf_folder import StoredTensor, pack_header, parse_header
from common.staleness import PolicyVersion

FORMAT_VERSION = 2
_PIECE_BYTES = 2**20
"""Of a copy: still in the processor's cache when its checksum is taken."""
MANIFEST_NAME = "manifest.json"
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4}
"""Bytes of one value, for every dtype of weights."""
CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64", "int64": "I64", "int32": "I32"}

Encoding = Literal["same", "xor", "raw"]
"""How a delta gives a tensor: as the parent's; as a compressed XOR with it; or whole."""


class WeightsError(Exception):
    """Base of everything that can go wrong with published weights."""


class WeightsCorrupt(WeightsError):
    """What was read is not what was published: it was cut, changed or belongs to another version."""


class WeightsGone(WeightsError):
    """The version is not in the store: it was never committed, or retention has removed it."""


class TransferFailed(WeightsError):
    """The weight service did not answer in time, or refused; try again later."""


class PublishFailed(WeightsError):
    """A version could not be published; the previous one remains the newest."""


class DeltaEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a tensor lies in the delta file of its part."""

    encoding: Encoding
    offset: int
    size_bytes: int


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a version, in one dtype."""

    name: str
    """Name as in a Hugging Face checkpoint."""
    dtype: str
    """As torch prints it, without the prefix: 'float32', 'bfloat16'."""
    shape: tuple[int, ...]
    file: str
    """The safetensors file that holds it under `name`."""
    checksum: str
    """xxh3-64 of its bytes (C order, little endian), as hex."""
    delta: DeltaEntry | None = None
    """Its place in `delta_name(file)`. All tensors of a file have one, or none has."""

    @property
    def size_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    size_bytes: int


class _AnyFormat(msgspec.Struct, frozen=True):
    """What every document has, whatever its format."""

    format_version: int = FORMAT_VERSION


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one pipeline stage contributed to a version; lies beside its files until all have come."""

    rank: int
    version: str
    parent: str | None
    """The version that its deltas are against."""
    tensors: tuple[TensorEntry, ...]
    files: tuple[FileEntry, ...]
    format_version: int = FORMAT_VERSION
    checksum: str = ""
    """Seal: xxh3-64 of this document with an empty checksum."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A committed version. It is written last: a version without a manifest does not exist."""

    incarnation: int
    version: int
    parent: str | None
    """The newest version before this one, as 'INCARNATION.VERSION'; deltas are against it."""
    parent_chain: str
    """The parent's chain; empty without a parent."""
    fingerprint: str
    """Hash over the names, dtypes and shapes: equal for all versions of one architecture."""
    chain: str
    """Hash over the parent's chain and this version's content."""
    created_s: float
    """Wall time, seconds since the Unix epoch."""
    tensors: tuple[TensorEntry, ...]
    files: tuple[FileEntry, ...]
    format_version: int = FORMAT_VERSION
    checksum: str = ""
    """Seal: xxh3-64 of this document with an empty checksum."""

    @property
    def policy(self) -> PolicyVersion:
        return PolicyVersion(self.incarnation, self.version)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(entry.dtype for entry in self.tensors))

    def variant(self, dtype: str) -> tuple[TensorEntry, ...]:
        """The tensors in one dtype; WeightsCorrupt if the version was not published in it."""
        found = tuple(entry for entry in self.tensors if entry.dtype == dtype)
        if not found:
            raise WeightsCorrupt(
                f"version {self.policy} was published in {', '.join(self.dtypes) or 'no dtype'}, not in {dtype}; "
                "the learner publishes in the dtypes of the actors: is it of the same run?"
            )
        return found

    def size_of(self, file: str) -> int:
        for entry in self.files:
            if entry.name == file:
                return entry.size_bytes
        raise WeightsCorrupt(f"version {self.policy}: the manifest names no file {file}")

    def files_of(self, dtype: str) -> dict[str, list[TensorEntry]]:
        return by_file(self.variant(dtype))

    def whole_bytes(self, dtype: str) -> int:
        return sum(self.size_of(name) for name in self.files_of(dtype))

    def change_bytes(self, dtype: str) -> int | None:
        """Size of the deltas of a variant; None where it does not have them all."""
        files = self.files_of(dtype)
        if self.parent is None or any(entry.delta is None for entries in files.values() for entry in entries):
            return None
        return sum(self.size_of(delta_name(name)) for name in files)


Sealed = TypeVar("Sealed", Part, Manifest)

# made here, for msgspec is not safe against threads that each use a type for the first time
FILE_NAME = re.compile(r"part-[0-9]{1,6}\.[a-z0-9]{1,16}\.(safetensors|delta)")
"""Names of the files of a version: no folder, no document."""

_ANY_FORMAT = msgspec.json.Decoder(_AnyFormat)
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {kind: msgspec.json.Decoder(kind) for kind in (Part, Manifest)}


def file_name(rank: int, dtype: str) -> str:
    return f"part-{rank}.{dtype}.safetensors"


def by_file(tensors: Iterable[TensorEntry]) -> dict[str, list[TensorEntry]]:
    files: dict[str, list[TensorEntry]] = {}
    for entry in tensors:
        files.setdefault(entry.file, []).append(entry)
    return files


def delta_name(file: str) -> str:
    return f"{file.removesuffix('.safetensors')}.delta"


def part_name(rank: int) -> str:
    return f"part-{rank}.json"


def checksum_of(data: bytes | memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def copied(data: memoryview, into: memoryview) -> str:
    """Copy bytes, and the checksum of what arrived; other threads run meanwhile."""
    source, target, found = np.asarray(data), np.asarray(into), xxhash.xxh3_64()
    for start in range(0, len(source), _PIECE_BYTES):
        piece = target[start : start + _PIECE_BYTES]
        np.copyto(piece, source[start : start + _PIECE_BYTES])
        found.update(piece.data)
    return found.hexdigest()


def build_manifest(
    version: PolicyVersion, parts: Sequence[Part], parent: Manifest | None, created_s: float
) -> Manifest:
    """Assemble the manifest of a version from all its parts; PublishFailed if two hold a tensor of the same name.

    Deltas against another version than the parent are left out.
    """
    parts = [_without_foreign_delta(part, parent) for part in parts]
    ordered = tuple(sorted((e for part in parts for e in part.tensors), key=lambda e: (e.dtype, e.name)))
    for before, after in itertools.pairwise(ordered):
        if (before.name, before.dtype) == (after.name, after.dtype):
            raise PublishFailed(
                f"version {version}: tensor '{after.name}' is in {before.file} and in {after.file}; "
                "every tensor is published by exactly one pipeline stage"
            )
    fingerprint = xxhash.xxh3_128()
    for entry in ordered:
        fingerprint.update(f"{entry.name}|{entry.dtype}|{entry.shape}\n".encode())
    parent_chain = parent.chain if parent else ""
    return Manifest(
        incarnation=version.incarnation,
        version=version.version,
        parent=parent.policy.key if parent else None,
        parent_chain=parent_chain,
        fingerprint=fingerprint.hexdigest(),
        chain=chain_of(parent_chain, ordered),
        created_s=created_s,
        tensors=ordered,
        files=tuple(file for part in parts for file in part.files),
    )


def chain_of(parent_chain: str, tensors: Sequence[TensorEntry]) -> str:
    content = xxhash.xxh3_128(parent_chain.encode())
    for entry in tensors:
        content.update(f"{entry.name}|{entry.dtype}|{entry.checksum}\n".encode())
    return content.hexdigest()


def encode(document: Part | Manifest) -> bytes:
    """Seal a document and write it as indented JSON."""
    sealed = msgspec.structs.replace(document, checksum=_seal(document))
    return msgspec.json.format(msgspec.json.encode(sealed), indent=1)


def decode(data: bytes | memoryview, kind: type[Sealed], source: Path | str) -> Sealed:
    """Read what `encode` wrote; WeightsCorrupt, with its `source`, if it has another format, or was changed."""
    try:
        # first of all, so that another format is not taken for damage
        found = _ANY_FORMAT.decode(data).format_version
        if found != FORMAT_VERSION:
            raise WeightsCorrupt(
                f"{source}: format version {found}, but this program reads {FORMAT_VERSION}; "
                "run learner and actors from the same release"
            )
        document: Sealed = _DECODERS[kind].decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsCorrupt(f"{source}: not a valid {kind.__name__.lower()}: {error}") from error
    if document.checksum != _seal(document):
        raise WeightsCorrupt(f"{source}: its content does not match its own checksum; it was changed or cut")
    _check_entries(document, source)
    return document


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
    """A mapped safetensors file. The map lasts as long as any view of it."""

    def __init__(self, path: Path) -> None:
        """Map a file and read its header; WeightsCorrupt if it is missing, cut, or no safetensors file."""
        self.path = path
        try:
            self._data = mapped(path)
            self._start, self.tensors = parse_header(self._data)
        except FileNotFoundError as error:
            raise WeightsCorrupt(f"{path}: missing, though the manifest names it") from error
        except OSError as error:
            raise WeightsCorrupt(f"{path}: cannot be read: {error}") from error
        except ValueError as error:
            raise WeightsCorrupt(f"{path}: not a readable safetensors file: {error}") from error

    def view(self, name: str) -> memoryview:
        """The bytes of a tensor, read-only; WeightsCorrupt if the file has no such tensor."""
        facts = self.tensors.get(name)
        if facts is None:
            raise WeightsCorrupt(f"{self.path}: tensor '{name}' of the manifest is missing")
        return self._data[self._start + facts.start : self._start + facts.end]


def _check_entries(document: Part | Manifest, source: Path | str) -> None:
    """What a seal cannot show: that the document makes sense, whoever sealed it."""
    sizes = {file.name: file.size_bytes for file in document.files}
    for name in sizes:
        if not FILE_NAME.fullmatch(name):
            raise WeightsCorrupt(f"{source}: '{name}' is no name of a file beside a manifest")
    for entry in document.tensors:
        if entry.dtype not in ITEM_BYTES:
            raise WeightsCorrupt(f"{source}: tensor '{entry.name}' has the unknown dtype '{entry.dtype}'")
        if entry.file not in sizes:
            raise WeightsCorrupt(f"{source}: tensor '{entry.name}' is in {entry.file}, which is none of its files")
        if any(extent < 0 for extent in entry.shape) or entry.size_bytes > sizes[entry.file]:
            raise WeightsCorrupt(f"{source}: tensor '{entry.name}' has the shape {list(entry.shape)}, beyond its file")
        delta = entry.delta
        if delta is not None and not 0 <= delta.offset <= delta.offset + delta.size_bytes <= sizes.get(
            delta_name(entry.file), -1
        ):
            raise WeightsCorrupt(f"{source}: the delta of tensor '{entry.name}' lies outside its file")
    if isinstance(document, Manifest) and document.chain != chain_of(document.parent_chain, document.tensors):
        raise WeightsCorrupt(f"{source}: its chain is not that of its parent and content")


def _without_foreign_delta(part: Part, parent: Manifest | None) -> Part:
    if part.parent is None or (parent is not None and part.parent == parent.policy.key):
        return part
    deltas = {delta_name(entry.file) for entry in part.tensors}
    return msgspec.structs.replace(
        part,
        parent=None,
        tensors=tuple(msgspec.structs.replace(entry, delta=None) for entry in part.tensors),
        files=tuple(file for file in part.files if file.name not in deltas),
    )


def _seal(document: Part | Manifest) -> str:
    bare = msgspec.structs.replace(document, checksum="")
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(bare))
