"""Messages between `WeightClient` and `WeightService`.

A message is [header, body]: the header is one of these structs as msgpack (tagged by its type), the body, where there
is one, bytes of a file or a document. Nothing is ever unpickled. Both are checked against an xxh3 checksum before they
are looked at: the header's leads it, the body's is in it.

A request is answered by exactly one reply, or, where the answer takes long and the request comes again, by `Working`
first. It is safe to send any request again: none changes what it has changed before, and the service keeps nothing
about a client, so that it may be killed and restarted between any two messages.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from common.staleness import PolicyVersion
from common.wire import checksum as checksum
from common.wire import sealed, unsealed
from weight_sync.errors import WeightsError
from weight_sync.manifest import FILE_NAME

PROTOCOL_VERSION = 1
MAX_CHUNK_BYTES = 64 * 2**20
MAX_HEADER_BYTES = 64 * 2**10
MAX_DOCUMENT_BYTES = 256 * 2**20
"""Of a manifest: that of a million tensors fits."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
ChunkBytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK_BYTES)]
FileName = Annotated[str, msgspec.Meta(max_length=200)]
VersionText = Annotated[str, msgspec.Meta(max_length=40)]
"""A version as `str` writes it."""


class WholeFilesNeeded(WeightsError):
    """The deltas of a part do not serve: its files are to be sent whole."""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of every header. The tag is the name of the class."""


# --- requests -------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Who are you?"""

    name: str
    """Of the one who asks, for the log."""
    protocol_version: Count = PROTOCOL_VERSION


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


class Welcome(Message, frozen=True):
    """Answer to Hello."""

    store_id: str
    """By which a client sees that it has the same folder before it."""
    folder: str
    """For people: where the versions lie on the service's machine."""
    protocol_version: Count = PROTOCOL_VERSION


class Newest(Message, frozen=True):
    """Answer to NewestRequest."""

    version: VersionText
    """Empty before the first."""


class Document(Message, frozen=True):
    """Answer to ManifestRequest and PartRequest: the body is the document; empty where there is none."""


class Chunk(Message, frozen=True):
    """Answer to ReadRequest; the body holds the bytes."""

    total_bytes: Count
    """Of the whole file."""


class WriteStatus(Message, frozen=True):
    """Answer to WriteRequest and WriteStatusRequest."""

    num_bytes: Count
    """So many are there, from the start: go on behind them."""


class Working(Message, frozen=True):
    """The answer takes longer; ask again later."""


class Done(Message, frozen=True):
    """Answer to a request that returns nothing."""


Kind = Literal["gone", "corrupt", "publish", "whole", "disk", "damaged", "failed"]
"""Of a refusal: the version is gone; what the store holds is corrupt; a version cannot follow the newest; deltas do not
serve, whole files are needed; the disk is full or not writable; the body was damaged on its way; anything else."""


class Refused(Message, frozen=True):
    """The request cannot be served; the client raises with this text."""

    reason: str
    kind: Kind
    errno: int = 0
    """Of the disk's error."""


Request = (
    Hello | NewestRequest | ManifestRequest | ReadRequest | WriteStatusRequest | WriteRequest | PartDone | PartRequest
    | CommitRequest
)  # fmt: skip
Reply = Welcome | Newest | Document | Chunk | WriteStatus | Working | Done | Refused


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request or reply with the number that pairs them."""

    request_id: Count
    run_id: str
    """A message of another run is refused, whatever it asks."""
    message: Request | Reply
    body_checksum: int = 0
    """xxh3-64 of the body; 0 where there is none."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope) -> bytes:
    """The header frame of a message: its checksum, then the envelope."""
    return sealed(_encoder.encode(envelope))


def decode(header: bytes | memoryview) -> Envelope:
    """Read a header frame.

    Raises:
        msgspec.DecodeError: the frame is damaged or no known message; it is dropped, never guessed at.
    """
    return unsealed(header, _decoder, max_bytes=MAX_HEADER_BYTES)


def version_of(text: str) -> PolicyVersion:
    """The version that a message names.

    Raises:
        ValueError: it names none, or not as this program writes it: two spellings would be two folders.
    """
    version = PolicyVersion.parse(text)
    if str(version) != text:
        raise ValueError(f"'{text}' is not a policy version: {version} is spelt without leading zeros")
    return version


def upload_name(file: str) -> str:
    """A name under which a stage may upload: never one with a folder in it, nor that of a document.

    Raises:
        ValueError: it is another.
    """
    if FILE_NAME.fullmatch(file) is None:
        raise ValueError(f"'{file}' is no name of a part's file, as part-0.bfloat16.safetensors is")
    return file
