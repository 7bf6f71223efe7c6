"""Messages between `WeightClient` and `WeightService`; the body is bytes of a file or a document.

No request changes what it has changed before, and the service keeps nothing about a client, so that it may be killed
and restarted between any two messages. So nobody is greeted here: who may ask what goes by the role alone, and by what
a request asks, for it names the version, and a version that is complete never changes.
"""

from __future__ import annotations

from errno import EIO
from typing import Annotated

import msgspec

from common.rpc.messages import DAMAGED, ROLES, Count, Message, Protocol, Refused, Role
from common.staleness import PolicyVersion
from weight_sync.manifest import FILE_NAME, PublishFailed, TransferFailed, WeightsCorrupt, WeightsError, WeightsGone

MAX_CHUNK_BYTES = 64 * 2**20
MAX_DOCUMENT_BYTES = 256 * 2**20
"""Of a manifest: that of a million tensors fits."""
MAX_REASON = 4000

ChunkBytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK_BYTES)]
FileName = Annotated[str, msgspec.Meta(max_length=200)]
VersionText = Annotated[str, msgspec.Meta(max_length=40)]


class WholeFilesNeeded(WeightsError):
    """The deltas of a part do not serve: its files are to be sent whole."""


# --- requests -------------------------------------------------------------------------------------


class StoreRequest(Message, frozen=True):
    """Which store is it?"""

    name: str
    """Of the one who asks, for the log."""


class NewestRequest(Message, frozen=True):
    """Which version is the newest? Asked by those that will fetch it."""


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


class WriteStatusRequest(Message, frozen=True):
    """How far has a file been uploaded?"""

    version: VersionText
    file: FileName
    total_bytes: Count


class WriteRequest(Message, frozen=True):
    """The next bytes of a file; the body holds them."""

    version: VersionText
    file: FileName
    offset: Count
    total_bytes: Count


class PartDone(Message, frozen=True):
    """All files of a part are uploaded, its deltas alone or whole files; the body is its document."""


class PartRequest(Message, frozen=True):
    """What did this stage contribute?"""

    version: VersionText
    rank: Count


class CommitRequest(Message, frozen=True):
    """Make a version exist; the body is its manifest."""

    keep_versions: Annotated[int, msgspec.Meta(ge=1, le=2**53)]


# --- replies --------------------------------------------------------------------------------------


class StoreFacts(Message, frozen=True):
    """Answer to StoreRequest."""

    store_id: str
    """By which a client sees that it has the same folder before it."""
    folder: str
    """For people: where the versions lie on the service's machine."""


class Newest(Message, frozen=True):
    """Answer to NewestRequest."""

    version: VersionText


class Document(Message, frozen=True):
    """Answer to ManifestRequest and PartRequest: the body is the document; empty where there is none."""


class Chunk(Message, frozen=True):
    """Answer to ReadRequest; the body holds the bytes."""

    total_bytes: Count


class WriteStatus(Message, frozen=True):
    """Answer to WriteRequest and WriteStatusRequest."""

    num_bytes: Count
    """So many are there, from the start: go on behind them."""


Question = (
    StoreRequest | NewestRequest | ManifestRequest | ReadRequest | WriteStatusRequest | WriteRequest | PartRequest
)
Request = Question | PartDone | CommitRequest
Reply = StoreFacts | Newest | Document | Chunk | WriteStatus

ASKED_BY: dict[type[Message], frozenset[Role]] = {
    StoreRequest: ROLES,
    NewestRequest: ROLES,
    ManifestRequest: ROLES,
    ReadRequest: ROLES,
    WriteStatusRequest: frozenset({"learner"}),
    WriteRequest: frozenset({"learner"}),
    PartDone: frozenset({"learner"}),
    PartRequest: frozenset({"learner"}),
    CommitRequest: frozenset({"learner"}),
}
"""Everybody may read; only the learner's stages write."""

PROTOCOL = Protocol("weight service", 3, Request, Reply, asked_by=ASKED_BY, max_header_bytes=64 * 2**10)

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
    """What a service says of an error."""
    if isinstance(error, OSError):
        return Refused(str(error)[:MAX_REASON], _DISK, error.errno or EIO)
    kind = next((kind for kind, raised in _ERRORS.items() if isinstance(error, raised)), "")
    return Refused(str(error)[:MAX_REASON], kind)


def error_of(refused: Refused, text: str) -> Exception:
    """What a client raises of it, with this sentence."""
    if refused.kind == _DISK:
        return OSError(refused.errno or EIO, text)
    return _ERRORS.get(refused.kind, TransferFailed)(text)


def version_of(text: str) -> PolicyVersion:
    """The version that a message names.

    Raises:
        ValueError: it names none, or not as this program writes it: two spellings would be two folders.
    """
    version = PolicyVersion.parse(text)
    if version.key != text:
        raise ValueError(f"'{text}' is not a policy version: {version.key} is spelt without leading zeros")
    return version


def upload_name(file: str) -> str:
    """A name under which a stage may upload, or ValueError: never with a folder in it, nor that of a document."""
    if FILE_NAME.fullmatch(file) is None:
        raise ValueError(f"'{file}' is no name of a part's file, as part-0.bfloat16.safetensors is")
    return file
