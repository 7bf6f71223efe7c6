"""What a published version consists of: every tensor by name, and a checksum for each.

A manifest is JSON that a person can read. It is sealed: it carries the checksum of itself, so a
half-written or edited one is refused. Two further hashes tie versions together: the architecture
(names, dtypes, shapes) and the chain (this version's content on top of its parent's).

    WeightsError
      WeightsCorrupt   what is on disk is not what was published
      WeightsGone      the version is not in the store, or no longer
      PublishFailed    a version could not be published
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import xxhash

from weight_sync.staleness import PolicyVersion

FORMAT_VERSION = 1

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32)
}
"""Dtypes that a manifest may name."""


class WeightsError(Exception):
    """Base of everything that can go wrong with published weights."""


class WeightsCorrupt(WeightsError):
    """What is on disk is not what was published: a file was cut, changed or belongs to another version."""


class WeightsGone(WeightsError):
    """The version is not in the store: it was never committed, or retention has removed it."""


class PublishFailed(WeightsError):
    """A version could not be published; the previous one remains the newest."""


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a version."""

    name: str
    """Name as in a Hugging Face checkpoint."""
    dtype: str
    """As torch prints it, without the prefix: 'float32', 'bfloat16'."""
    shape: tuple[int, ...]
    part: str
    """The safetensors file, beside the manifest, that holds it under `name`."""
    checksum: str
    """xxh3-64 of its bytes (C order, little endian), as hex."""


class _AnyFormat(msgspec.Struct, frozen=True):
    """What every document has, whatever its format."""

    format_version: int = FORMAT_VERSION


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one pipeline stage contributed to a version; lies beside its safetensors file until all have come."""

    rank: int
    version: str
    tensors: tuple[TensorEntry, ...]
    format_version: int = FORMAT_VERSION
    checksum: str = ""
    """Seal: xxh3-64 of this document with an empty checksum."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A committed version. It is written last: a version without a manifest does not exist."""

    incarnation: int
    version: int
    parent: str | None
    """The version that was the newest before this one, as 'INCARNATION.VERSION'."""
    fingerprint: str
    """Hash over the names, dtypes and shapes: equal for every version of one architecture."""
    chain: str
    """Hash over the parent's chain and this version's content."""
    created_s: float
    """Wall time, seconds since the Unix epoch."""
    tensors: tuple[TensorEntry, ...]
    """Sorted by name."""
    format_version: int = FORMAT_VERSION
    checksum: str = ""
    """Seal: xxh3-64 of this document with an empty checksum."""

    @property
    def policy(self) -> PolicyVersion:
        """The version that this manifest describes."""
        return PolicyVersion(self.incarnation, self.version)


Sealed = TypeVar("Sealed", Part, Manifest)


def checksum_of(tensor: torch.Tensor) -> str:
    """xxh3-64 of a CPU tensor's bytes, as hex."""
    return xxhash.xxh3_64_hexdigest(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def entry_of(name: str, tensor: torch.Tensor, part: str) -> TensorEntry:
    """Describe a CPU tensor.

    Raises:
        PublishFailed: its dtype is not one that weights are published in.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise PublishFailed(f"tensor '{name}' has dtype {dtype}; weights are published as one of {', '.join(DTYPES)}")
    return TensorEntry(name, dtype, tuple(tensor.shape), part, checksum_of(tensor))


def build_manifest(
    version: PolicyVersion, tensors: Sequence[TensorEntry], parent: Manifest | None, created_s: float
) -> Manifest:
    """Assemble the manifest of a version from the entries of all its parts.

    Raises:
        PublishFailed: two parts hold a tensor of the same name.
    """
    ordered = tuple(sorted(tensors, key=lambda entry: entry.name))
    for before, after in itertools.pairwise(ordered):
        if before.name == after.name:
            raise PublishFailed(
                f"version {version}: tensor '{after.name}' is in {before.part} and in {after.part}; "
                "every tensor is published by exactly one pipeline stage"
            )
    fingerprint = xxhash.xxh3_128()
    content = xxhash.xxh3_128((parent.chain if parent else "").encode())
    for entry in ordered:
        fingerprint.update(f"{entry.name}|{entry.dtype}|{entry.shape}\n".encode())
        content.update(f"{entry.name}|{entry.checksum}\n".encode())
    return Manifest(
        incarnation=version.incarnation,
        version=version.version,
        parent=str(parent.policy) if parent else None,
        fingerprint=fingerprint.hexdigest(),
        chain=content.hexdigest(),
        created_s=created_s,
        tensors=ordered,
    )


def encode(document: Part | Manifest) -> bytes:
    """Seal a document and write it as indented JSON."""
    sealed = msgspec.structs.replace(document, checksum=_seal(document))
    return msgspec.json.format(msgspec.json.encode(sealed), indent=1)


def decode(data: bytes, kind: type[Sealed], source: Path) -> Sealed:
    """Read what `encode` wrote.

    Args:
        data: the JSON text.
        kind: `Part` or `Manifest`.
        source: the file it came from, for the error.

    Raises:
        WeightsCorrupt: it is not such a document, its format is newer, or it was changed.
    """
    try:
        # first of all, so that a newer format is not taken for damage
        found = msgspec.json.decode(data, type=_AnyFormat).format_version
        if found != FORMAT_VERSION:
            raise WeightsCorrupt(
                f"{source}: format version {found}, but this program reads {FORMAT_VERSION}; "
                "run learner and actors from the same release"
            )
        document = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WeightsCorrupt(f"{source}: not a valid {kind.__name__.lower()}: {error}") from error
    if document.checksum != _seal(document):
        raise WeightsCorrupt(f"{source}: its content does not match its own checksum; it was changed or cut")
    unknown = next((entry for entry in document.tensors if entry.dtype not in DTYPES), None)
    if unknown is not None:
        raise WeightsCorrupt(f"{source}: tensor '{unknown.name}' has the unknown dtype '{unknown.dtype}'")
    return document


def _seal(document: Part | Manifest) -> str:
    bare = msgspec.structs.replace(document, checksum="")
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(bare))
