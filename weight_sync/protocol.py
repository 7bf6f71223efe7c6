"""Messages between `WeightClient` and `WeightService`; the body is bytes of a file or a document.

Requests are idempotent, and the service keeps nothing about a client, so it may be killed and restarted between any
two messages. What a client may ask depends on its role alone.
"""

from __future__ import annotations

from errno import EIO
from typing import Annotated

import msgspec

from common.rpc.messages import DAMAGED, ROLES, Count, Message, Protocol, Refused, Role
from common.staleness import PolicyVersion
from weight_sync.manifest import FILE_NAME, PublishFailed, TransferFailed, WeightsCorrupt, WeightsError, WeightsGone

MAX_CHUNK_BYTES = 64 * 2**20
MAX_DOCUMENT_BYTES = 256 * 2**20  # the manifest of a million tensors fits
MAX_REASON = 4000

ChunkBytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK_BYTES)]
FileName = Annotated[str, msgspec.Meta(max_length=200)]
VersionText = Annotated[str, msgspec.Meta(max_length=40)]


class WholeFilesNeeded(WeightsError):
    """The deltas of a part do not serve: its files are to be sent whole."""


# --- requests -------------------------------------------------------------------------------------


class StoreRequest(Message, frozen=True):
    """Ask which store it is."""

    name: str
    """Of the client, for the log."""


class NewestRequest(Message, frozen=True):
    """Ask which version is the newest, to fetch it."""


class ManifestRequest(Message, frozen=True):
    """The manifest of a version, as it was written."""

    version: VersionText
    """Empty: of the newest, for a publisher; it is not kept from removal."""


class ReadRequest(Message, frozen=True):
    """Bytes of a file that the manifest names."""

    version: VersionText
    file: FileName
    offset: Count
    size: ChunkBytes


class WriteRequest(Message, frozen=True):
    """The next bytes of a file; the body holds them. An empty one asks how many are there."""

    version: VersionText
    file: FileName
    offset: Count
    total_bytes: Count


class PartDone(Message, frozen=True):
    """All files of a part are uploaded, its deltas alone or whole files; the body is its document."""


class PartRequest(Message, frozen=True):
    """Ask for the part of a stage."""

    version: VersionText
    rank: Count


class CommitRequest(Message, frozen=True):
    """Make a version exist; the body is its manifest."""

    keep_versions: Annotated[int, msgspec.Meta(ge=1, le=2**53)]


# --- replies --------------------------------------------------------------------------------------


class StoreFacts(Message, frozen=True):
    """Answers `StoreRequest`."""

    store_id: str
    folder: str
    """Where the versions lie on the service's machine, for people."""


class Newest(Message, frozen=True):
    """Answers `NewestRequest`."""

    version: VersionText


class Document(Message, frozen=True):
    """Answer to ManifestRequest and PartRequest: the body is the document; empty where there is none."""


class Chunk(Message, frozen=True):
    """Answer to ReadRequest; the body holds the bytes."""

    total_bytes: Count


class WriteStatus(Message, frozen=True):
    """Answers `WriteRequest`."""

    num_bytes: Count
    """How many are there, from the start."""


Question = StoreRequest | NewestRequest | ManifestRequest | ReadRequest | WriteRequest | PartRequest
Request = Question | PartDone | CommitRequest
Reply = StoreFacts | Newest | Document | Chunk | WriteStatus

ASKED_BY: dict[type[Message], frozenset[Role]] = {
    StoreRequest: ROLES,
    NewestRequest: ROLES,
    ManifestRequest: ROLES,
    ReadRequest: ROLES,
    WriteRequest: frozenset({"learner"}),
    PartDone: frozenset({"learner"}),
    PartRequest: frozenset({"learner"}),
    CommitRequest: frozenset({"learner"}),
}

PROTOCOL = Protocol("weight service", 4, Request, Reply, asked_by=ASKED_BY, max_header_bytes=64 * 2**10)

_ERRORS: dict[str, type[WeightsError]] = {
    "gone": WeightsGone,
    "corrupt": WeightsCorrupt,
    "whole": WholeFilesNeeded,
    "publish": PublishFailed,
    DAMAGED: WeightsCorrupt,
}
"""Kind of a refusal -> what the client raises."""
_DISK = "disk"


def refusal_of(error: Exception) -> Refused:
    """Return what a service answers if it meets an error."""
    if isinstance(error, OSError):
        return Refused(str(error)[:MAX_REASON], _DISK, error.errno or EIO)
    kind = next((kind for kind, raised in _ERRORS.items() if isinstance(error, raised)), "")
    return Refused(str(error)[:MAX_REASON], kind)


def error_of(refused: Refused, text: str) -> Exception:
    """Return what a client raises, with this sentence."""
    if refused.kind == _DISK:
        return OSError(refused.errno or EIO, text)
    return _ERRORS.get(refused.kind, TransferFailed)(text)


def version_of(text: str) -> PolicyVersion:
    """Return the version that a message names; ValueError if it is not spelt as `key`: each spelling is a folder."""
    version = PolicyVersion.parse(text)
    if version.key != text:
        raise ValueError(f"'{text}' is not a policy version: {version.key} is spelt without leading zeros")
    return version


def upload_name(file: str) -> str:
    """Return the name if a stage may upload under it, else ValueError: no folder, and no document."""
    if FILE_NAME.fullmatch(file) is None:
        raise ValueError(f"'{file}' is no name of a part's file, as part-0.bfloat16.safetensors is")
    return file
