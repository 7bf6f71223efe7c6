"""Manifest of a published version: its tensors by name and dtype, their files and checksums.

A manifest is JSON, sealed with a checksum of itself. Two further hashes link versions: the fingerprint covers the
architecture (names, dtypes, shapes), and the chain covers the content of the version and the chain of its parent.

A version holds the same tensors in every dtype that an engine serves: its variants. Its files are safetensors files,
written from the buffers that hold the tensors and read as views of a memory map. The module needs no torch.
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

from leeway.common.errors import LeewayError
from leeway.common.files import mapped
from leeway.common.hf_folder import StoredTensor, pack_header, parse_header
from leeway.common.staleness import PolicyVersion

FORMAT_VERSION = 2
_PIECE_BYTES = 2**20
"""Number of bytes copied at a time; the copied bytes are still in the CPU cache when they are hashed."""
MANIFEST_NAME = "manifest.json"
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4}
"""Bytes of one value, for every dtype of weights."""
CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64", "int64": "I64", "int32": "I32"}

Encoding = Literal["same", "xor", "raw"]
"""Encoding of a tensor in a delta: unchanged ('same'), compressed XOR with the parent ('xor'), or whole ('raw')."""


class WeightsError(LeewayError):
    """Base class of errors about published weights."""


class WeightsCorrupt(WeightsError):
    """The data differ from the published data: they were truncated or changed, or belong to another version."""


class WeightsGone(WeightsError):
    """The version is not in the store: it was never committed, or retention has removed it."""


class TransferFailed(WeightsError):
    """The weight service did not reply in time, or refused the request; retry later."""


class PublishFailed(WeightsError):
    """A version could not be published; the previous version remains the newest."""


class DeltaEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Position of a tensor in the delta file of its part."""

    encoding: Encoding
    offset: int
    size_bytes: int


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a version, in one dtype."""

    name: str
    """Name as in a Hugging Face checkpoint."""
    dtype: str
    """Name of the torch dtype without its prefix: 'float32', 'bfloat16'."""
    shape: tuple[int, ...]
    file: str
    """The safetensors file that holds the tensor under `name`."""
    checksum: str
    """xxh3-64 of the bytes of the tensor (C order, little endian), as hex."""
    delta: DeltaEntry | None = None
    """Position in `delta_name(file)`. Either all tensors of a file have a delta or none has."""

    @property
    def size_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    size_bytes: int


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    """The last fields of every document, in all formats."""

    format_version: int = FORMAT_VERSION
    checksum: str = ""
    """Seal: xxh3-64 of this document with an empty checksum."""


class Part(_Document, frozen=True, forbid_unknown_fields=True):
    """Contribution of one pipeline stage to a version; stored beside its files until all parts exist."""

    rank: int
    version: str
    parent: str | None
    """Base version of the deltas of this part."""
    tensors: tuple[TensorEntry, ...]
    files: tuple[FileEntry, ...]


class Manifest(_Document, frozen=True, forbid_unknown_fields=True):
    """Description of a committed version, written last: a version without a manifest does not exist."""

    incarnation: int
    version: int
    parent: str | None
    """The previous newest version, as 'INCARNATION.VERSION'; base version of the deltas."""
    parent_chain: str
    """The field `chain` of the parent; empty without a parent."""
    fingerprint: str
    """Hash of names, dtypes and shapes; the same in all versions of one architecture."""
    chain: str
    """Hash of the parent's chain and the content of this version."""
    created_s: float
    """Wall time, seconds since the Unix epoch."""
    tensors: tuple[TensorEntry, ...]
    files: tuple[FileEntry, ...]

    @property
    def policy(self) -> PolicyVersion:
        return PolicyVersion(self.incarnation, self.version)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(entry.dtype for entry in self.tensors))

    def variant(self, dtype: str) -> tuple[TensorEntry, ...]:
        """Return the tensors in one dtype; raise WeightsCorrupt if the version lacks the dtype."""
        found = tuple(entry for entry in self.tensors if entry.dtype == dtype)
        if not found:
            raise WeightsCorrupt(
                f"version {self.policy} was published in {', '.join(self.dtypes) or 'no dtype'}, not in {dtype}; "
                "the learner publishes in the dtypes of its actors: check that both belong to the same run"
            )
        return found

    def size_of(self, file: str) -> int:
        for entry in self.files:
            if entry.name == file:
                return entry.size_bytes
        raise WeightsCorrupt(f"version {self.policy}: the manifest does not list the file {file}")

    def files_of(self, dtype: str) -> dict[str, list[TensorEntry]]:
        return by_file(self.variant(dtype))

    def whole_bytes(self, dtype: str) -> int:
        return sum(self.size_of(name) for name in self.files_of(dtype))

    def change_bytes(self, dtype: str) -> int | None:
        """Return the size of the deltas of a variant; None if a tensor has no delta."""
        files = self.files_of(dtype)
        if self.parent is None or any(entry.delta is None for entries in files.values() for entry in entries):
            return None
        return sum(self.size_of(delta_name(name)) for name in files)


Sealed = TypeVar("Sealed", Part, Manifest)

FILE_NAME = re.compile(r"part-[0-9]{1,6}\.[a-z0-9]{1,16}\.(safetensors|delta)")
"""Names of the weight files of a version; excludes folders and documents."""

# created at import, because msgspec is not thread-safe at the first use of a type
_ANY_FORMAT = msgspec.json.Decoder(_Document)
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


def copy_and_hash(data: memoryview, into: memoryview) -> str:
    """Copy bytes and return the checksum of the copy; other threads keep running."""
    source, target, found = np.asarray(data), np.asarray(into), xxhash.xxh3_64()
    for start in range(0, len(source), _PIECE_BYTES):
        piece = target[start : start + _PIECE_BYTES]
        np.copyto(piece, source[start : start + _PIECE_BYTES])
        found.update(piece.data)
    return found.hexdigest()


def build_manifest(
    version: PolicyVersion, parts: Sequence[Part], parent: Manifest | None, created_s: float
) -> Manifest:
    """Assemble the manifest of a version from all its parts; raise PublishFailed if parts share a tensor name.

    Deltas whose base version is not the parent are dropped.
    """
    parts = [_without_foreign_delta(part, parent) for part in parts]
    ordered = tuple(sorted((e for part in parts for e in part.tensors), key=lambda e: (e.dtype, e.name)))
    for before, after in itertools.pairwise(ordered):
        if (before.name, before.dtype) == (after.name, after.dtype):
            raise PublishFailed(
                f"version {version}: tensor '{after.name}' is in {before.file} and in {after.file}; "
                "exactly one pipeline stage must publish each tensor"
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
    """Parse the output of `encode`; raise WeightsCorrupt, naming `source`, if its format differs or it was changed."""
    try:
        # check the version first, so that another format is not reported as damage
        found = _ANY_FORMAT.decode(data).format_version
        if found != FORMAT_VERSION:
            raise WeightsCorrupt(
                f"{source} has format version {found}, but this program reads {FORMAT_VERSION}; "
                "run learner and actors from the same release"
            )
        document: Sealed = _DECODERS[kind].decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsCorrupt(f"{source} is not a valid {kind.__name__.lower()}: {error}") from error
    if document.checksum != _seal(document):
        raise WeightsCorrupt(f"{source} does not match its own checksum; the file was changed or truncated")
    _check_entries(document, source)
    return document


def header_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Return the header of a file: length, then name, dtype and shape of each tensor in the order of their bytes."""
    header: dict[str, StoredTensor] = {}
    start = 0
    for name, dtype, shape in tensors:
        end = start + ITEM_BYTES[dtype] * math.prod(shape)
        header[name] = StoredTensor(CODES[dtype], shape, start, end)
        start = end
    return pack_header(header)


class TensorFile:
    """A memory-mapped safetensors file. Freeing the last view of the map frees the map."""

    def __init__(self, path: Path) -> None:
        """Map a file and read its header; raise WeightsCorrupt if it is missing, cut, or not a safetensors file."""
        self.path = path
        try:
            self._data = mapped(path)
            self._start, self.tensors = parse_header(self._data)
        except FileNotFoundError as error:
            raise WeightsCorrupt(f"{path} is missing, but the manifest lists it") from error
        except OSError as error:
            raise WeightsCorrupt(f"cannot read {path}: {error}") from error
        except ValueError as error:
            raise WeightsCorrupt(f"{path} is not a valid safetensors file: {error}") from error

    def view(self, name: str) -> memoryview:
        """Return the bytes of a tensor, read-only; raise WeightsCorrupt if the file lacks the tensor."""
        facts = self.tensors.get(name)
        if facts is None:
            raise WeightsCorrupt(f"{self.path}: tensor '{name}' is missing, but the manifest lists it")
        return self._data[self._start + facts.start : self._start + facts.end]


def _check_entries(document: Part | Manifest, source: Path | str) -> None:
    """Validate the content of a document; the seal of a document proves only that the content is unchanged."""
    sizes = {file.name: file.size_bytes for file in document.files}
    for name in sizes:
        if not FILE_NAME.fullmatch(name):
            raise WeightsCorrupt(f"{source}: '{name}' is not a valid name of a weight file")
    for entry in document.tensors:
        if entry.dtype not in ITEM_BYTES:
            raise WeightsCorrupt(f"{source}: tensor '{entry.name}' has the unknown dtype '{entry.dtype}'")
        if entry.file not in sizes:
            raise WeightsCorrupt(f"{source}: tensor '{entry.name}' is in the unlisted file {entry.file}")
        if any(extent < 0 for extent in entry.shape) or entry.size_bytes > sizes[entry.file]:
            raise WeightsCorrupt(
                f"{source}: tensor '{entry.name}' of shape {list(entry.shape)} does not match the size of its file"
            )
        delta, limit = entry.delta, sizes.get(delta_name(entry.file), -1)
        if delta is not None and not 0 <= delta.offset <= delta.offset + delta.size_bytes <= limit:
            raise WeightsCorrupt(f"{source}: the delta of tensor '{entry.name}' is outside its file")
    if isinstance(document, Manifest) and document.chain != chain_of(document.parent_chain, document.tensors):
        raise WeightsCorrupt(f"{source}: the chain does not match the parent and the content")


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
