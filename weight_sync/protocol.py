"""Messages between `WeightClient` and `WeightService`; a body holds the bytes of a file or a document.

Requests are idempotent and the service keeps no state per client, so it may be killed and restarted between any two
messages. Only the role of a client decides which requests the client may send.
"""

from __future__ import annotations

from errno import EIO
from typing import Annotated

import msgspec

from leeway.common.rpc.messages import DAMAGED, ROLES, Count, Message, Protocol, Refused, Role
from leeway.common.staleness import PolicyVersion
from leeway.weight_sync.manifest import (
    FILE_NAME,
    PublishFailed,
    TransferFailed,
    WeightsCorrupt,
    WeightsError,
    WeightsGone,
)

MAX_CHUNK_BYTES = 64 * 2**20
MAX_DOCUMENT_BYTES = 256 * 2**20  # fits the manifest of a million tensors
MAX_REASON = 4000

ChunkBytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK_BYTES)]
FileName = Annotated[str, msgspec.Meta(max_length=200)]
VersionText = Annotated[str, msgspec.Meta(max_length=40)]


class WholeFilesNeeded(WeightsError):
    """The deltas of a part cannot be applied; upload its whole files."""


# --- requests -------------------------------------------------------------------------------------


class StoreRequest(Message, frozen=True):
    """Request the identity of the store."""

    name: str
    """Client name, for the log."""


class NewestRequest(Message, frozen=True):
    """Request the newest version, to fetch it next."""


class ManifestRequest(Message, frozen=True):
    """Request the manifest of a version, as written."""

    version: VersionText
    """An empty text requests the newest version for a publisher, without protecting this version from removal."""


class ReadRequest(Message, frozen=True):
    """Request bytes of a file of the manifest."""

    version: VersionText
    file: FileName
    offset: Count
    size: ChunkBytes


class WriteRequest(Message, frozen=True):
    """Append the body to a file; an empty body requests the number of stored bytes."""

    version: VersionText
    file: FileName
    offset: Count
    total_bytes: Count


class PartDone(Message, frozen=True):
    """Finish a part whose files, or only their deltas, are uploaded; the body is the document of the part."""


class PartRequest(Message, frozen=True):
    """Request the part of a stage."""

    version: VersionText
    rank: Count


class CommitRequest(Message, frozen=True):
    """Commit a version; the body is its manifest."""

    keep_versions: Annotated[int, msgspec.Meta(ge=1, le=2**53)]


# --- replies --------------------------------------------------------------------------------------


class StoreFacts(Message, frozen=True):
    """Reply to `StoreRequest`."""

    store_id: str
    folder: str
    """Folder of the versions on the service's machine, for log lines."""


class Newest(Message, frozen=True):
    """Reply to `NewestRequest`."""

    version: VersionText


class Document(Message, frozen=True):
    """Reply to `ManifestRequest` and `PartRequest`; the body is the document, or empty if there is none."""


class Chunk(Message, frozen=True):
    """Reply to `ReadRequest`; the body holds the bytes."""

    total_bytes: Count


class WriteStatus(Message, frozen=True):
    """Reply to `WriteRequest`."""

    num_bytes: Count
    """Number of stored bytes, from the start of the file."""


Question = StoreRequest | NewestRequest | ManifestRequest | ReadRequest | WriteRequest | PartRequest
Request = Question | PartDone | CommitRequest
Reply = StoreFacts | Newest | Document | Chunk | WriteStatus

ALLOWED_ROLES: dict[type[Message], frozenset[Role]] = {
    **dict.fromkeys((StoreRequest, NewestRequest, ManifestRequest, ReadRequest), ROLES),
    **dict.fromkeys((WriteRequest, PartDone, PartRequest, CommitRequest), frozenset({"learner"})),
}

PROTOCOL = Protocol("weight service", 4, Request, Reply, allowed_roles=ALLOWED_ROLES, max_header_bytes=64 * 2**10)

_ERRORS: dict[str, type[WeightsError]] = {
    "gone": WeightsGone,
    "corrupt": WeightsCorrupt,
    "whole": WholeFilesNeeded,
    "publish": PublishFailed,
    DAMAGED: WeightsCorrupt,
}
"""Kind of a refusal -> exception that the client raises."""
_DISK = "disk"


def refusal_of(error: Exception) -> Refused:
    """Return the reply that reports an error of the service."""
    if isinstance(error, OSError):
        return Refused(str(error)[:MAX_REASON], _DISK, error.errno or EIO)
    kind = next((kind for kind, raised in _ERRORS.items() if isinstance(error, raised)), "")
    return Refused(str(error)[:MAX_REASON], kind)


def error_of(refused: Refused, text: str) -> Exception:
    """Return the exception, with this text, that a client raises for a refusal."""
    if refused.kind == _DISK:
        return OSError(refused.errno or EIO, text)
    return _ERRORS.get(refused.kind, TransferFailed)(text)


def version_of(text: str) -> PolicyVersion:
    """Parse the version of a message; raise ValueError if it is not the version's `key`, which names a folder."""
    version = PolicyVersion.parse(text)
    if version.key != text:
        raise ValueError(f"'{text}' is not a policy version: write {version.key}, without leading zeros")
    return version


def upload_name(file: str) -> str:
    """Return the name if a stage may upload under it; raise ValueError for folders and documents."""
    if FILE_NAME.fullmatch(file) is None:
        raise ValueError(f"'{file}' is not the name of a part's file; expected for example part-0.bfloat16.safetensors")
    return file
