"""Types shared by the requests and replies of all services.

A message is [header, body]: an `Envelope` as msgpack, and optional bytes. No message is unpickled. Header and body are
verified by xxh3 checksums before use. The header's checksum precedes the header; the body's checksum is in the header.

A request names its client (`ClientIdentity`), and a `Protocol` defines which roles may send it. A request gets one
reply. If it is resent while the service works on it, a `Working` reply comes first. Requests are idempotent.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args

import msgspec
import xxhash

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A count or number that leaves headroom for sums in 64 bits."""

Role = Literal["actor", "learner", "ranker", "launch", "observer"]
"""Role of a client; 'launch' is the launcher, and an 'observer' has read-only access."""
ROLES: frozenset[Role] = frozenset(get_args(Role))

_SEAL = struct.Struct("<Q")

M = TypeVar("M")


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base class of requests and replies. The tag is the name of the class."""

    is_bulk: ClassVar[bool] = False
    """Whether messages of this class are sent after all other messages, in any order."""


class Done(Message, frozen=True):
    """Reply to a request that returns nothing."""


class Working(Message, frozen=True):
    """Interim reply: the service is working on the request."""


class Refused(Message, frozen=True):
    reason: str
    kind: str = ""
    """RETRY: retry later. DAMAGED: the request was damaged in transit. Other values select the client's exception."""
    errno: int = 0


RETRY, DAMAGED = "retry", "damaged"


class ClientIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(max_length=256)]
    role: Role
    session: Annotated[str, msgspec.Meta(max_length=64)]
    """Random secret of the client process, which identifies the client after its Hello message."""


class Envelope(msgspec.Struct, Generic[M], frozen=True, forbid_unknown_fields=True):
    """A request or reply, with the number that matches a reply to its request."""

    request_id: Count
    message: M
    body_checksum: int = 0
    """xxh3-64 of the body; 0 without a body."""
    run_id: str = ""
    """Run id of the sender; a service refuses messages of other runs."""
    protocol: Count = 0
    asker: ClientIdentity | None = None
    """The sender; None in replies."""


class Protocol:
    """The messages of one type of service."""

    def __init__(
        self,
        service: str,
        version: int,
        requests: Any,  # noqa: ANN401 -- a union of structs
        replies: Any,  # noqa: ANN401 -- a union of structs
        *,
        allowed_roles: Mapping[type[Message], Collection[Role]],
        max_header_bytes: int,
    ) -> None:
        """Define the protocol.

        Args:
            service: name of the service in log lines and errors, for example "buffer service".
            version: incremented when messages change.
            requests: union of the requests.
            replies: union of the replies, without those shared by all services.
            allowed_roles: roles that may send each request.
            max_header_bytes: maximum size of a request header; longer headers are refused.
        """
        self.service = service
        self.version = version
        self.allowed_roles = allowed_roles
        assert allowed_roles.keys() == set(get_args(requests)), "every request needs its roles"
        self.requests = requests
        self.replies = replies | Done | Working | Refused
        self.max_header_bytes = max_header_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Envelope[self.requests | self.replies])  # type: ignore[name-defined]

    def encode(
        self,
        request_id: int,
        message: Message,
        body: bytes | memoryview = b"",
        *,
        run_id: str = "",
        client: ClientIdentity | None = None,
    ) -> bytes:
        envelope = Envelope(request_id, message, checksum(body), run_id, self.version, client)
        return sealed(self._encoder.encode(envelope))

    def refusal(self, message: Message, client: ClientIdentity | None) -> str:
        """Return why the client may not send the request; '' if the client may send it."""
        what, roles = type(message).__name__, self.allowed_roles[type(message)]
        if client is None:
            return f"{what} has no sender: a request must name its client, with role and session"
        if client.role in roles:
            return ""
        return f"{what} requires role {' or '.join(sorted(roles))}, but '{client.name}' has role '{client.role}'"

    def decode(self, header: bytes | memoryview, *, max_bytes: int | None = None) -> Envelope[Any]:
        """Decode a header frame; raise DecodeError if the header is damaged, unknown, or longer than `max_bytes`."""
        if max_bytes is not None and len(header) > max_bytes:
            raise msgspec.DecodeError(f"a header of {len(header)} bytes exceeds the limit of {max_bytes}")
        payload = memoryview(header)[_SEAL.size :]
        if len(payload) == 0 or _SEAL.unpack_from(header)[0] != checksum(payload):
            raise msgspec.DecodeError(f"a header of {len(header)} bytes does not match its checksum")
        try:
            envelope: Envelope[Any] = self._decoder.decode(payload)
        except (RecursionError, UnicodeDecodeError) as error:
            # msgspec does not convert these errors, which deep nesting and invalid UTF-8 cause
            kind = type(error).__name__
            raise msgspec.DecodeError(f"cannot decode a header of {len(header)} bytes ({kind})") from None
        return envelope


def checksum(body: bytes | memoryview) -> int:
    return int(xxhash.xxh3_64_intdigest(body)) if len(body) else 0


def sealed(payload: bytes) -> bytes:
    return _SEAL.pack(checksum(payload)) + payload
