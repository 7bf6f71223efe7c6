"""What the requests and replies of every service share.

A message is [header, body]: an `Envelope` as msgpack, and bytes, if any. Nothing is ever unpickled. Both are compared
with an xxh3 checksum first: the header's leads it, the body's is in it.

A request names its client (`Asker`), and its `Protocol` which role may ask it. It is answered by one reply; if that
takes long and the request is sent again, by `Working` first. Requests are idempotent.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args

import msgspec
import xxhash

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A count or number, with room to add to it in 64 bits."""

Role = Literal["actor", "learner", "ranker", "launch", "observer"]
"""Of a client of the services of a run; 'launch' is the command, and an observer only looks."""
ROLES: frozenset[Role] = frozenset(get_args(Role))

_SEAL = struct.Struct("<Q")

M = TypeVar("M")


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all requests and replies. The tag is the name of the class."""

    is_bulk: ClassVar[bool] = False
    """It is sent after others, and in any order."""


class Done(Message, frozen=True):
    """Answer to a request that returns nothing."""


class Working(Message, frozen=True):
    """The service has the request and works on it; the answer is still to come."""


class Refused(Message, frozen=True):
    reason: str
    kind: str = ""
    """RETRY: not now. DAMAGED: the request was damaged on its way. Else a word from which the client makes an error."""
    errno: int = 0


RETRY, DAMAGED = "retry", "damaged"


class Asker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(max_length=256)]
    role: Role
    session: Annotated[str, msgspec.Meta(max_length=64)]
    """Random per client process: a secret by which a service recognises a greeted client."""


class Envelope(msgspec.Struct, Generic[M], frozen=True, forbid_unknown_fields=True):
    """A request or reply, with the number that pairs them."""

    request_id: Count
    message: M
    body_checksum: int = 0
    """xxh3-64 of the body; 0 without one."""
    run_id: str = ""
    """A message of another run is refused."""
    protocol: Count = 0
    asker: Asker | None = None
    """None in replies."""


class Protocol:
    """The messages of one kind of service."""

    def __init__(
        self,
        service: str,
        version: int,
        requests: Any,  # noqa: ANN401 -- a union of structs
        replies: Any,  # noqa: ANN401 -- likewise
        *,
        asked_by: Mapping[type[Message], Collection[Role]],
        max_header_bytes: int,
    ) -> None:
        """Describe them.

        Args:
            service: its name in sentences, as in "buffer service".
            version: counted up when messages change.
            requests: their union.
            replies: their union, without those of every service.
            asked_by: for every request the roles that may ask it.
            max_header_bytes: a longer header of a request is refused.
        """
        self.service = service
        self.version = version
        self.asked_by = asked_by
        assert asked_by.keys() == set(get_args(requests)), "every request has its roles"
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
        asker: Asker | None = None,
    ) -> bytes:
        envelope = Envelope(request_id, message, checksum(body), run_id, self.version, asker)
        return sealed(self._encoder.encode(envelope))

    def refusal(self, message: Message, asker: Asker | None) -> str:
        """Why this client may not ask this; '' where it may."""
        what, roles = type(message).__name__, self.asked_by[type(message)]
        if asker is None:
            return f"{what} came from nobody: a client of a run says its name, its role and its session"
        if asker.role in roles:
            return ""
        return f"{what} is for {' or '.join(sorted(roles))}, and '{asker.name}' is of role '{asker.role}'"

    def decode(self, header: bytes | memoryview, *, max_bytes: int | None = None) -> Envelope[Any]:
        """Read a header frame; DecodeError if it is damaged, no known message, or longer than `max_bytes`."""
        if max_bytes is not None and len(header) > max_bytes:
            raise msgspec.DecodeError(f"a header of {len(header)} bytes, at most {max_bytes} are read")
        payload = memoryview(header)[_SEAL.size :]
        if len(payload) == 0 or _SEAL.unpack_from(header)[0] != checksum(payload):
            raise msgspec.DecodeError(f"a header of {len(header)} bytes does not match its checksum")
        try:
            envelope: Envelope[Any] = self._decoder.decode(payload)
        except (RecursionError, UnicodeDecodeError) as error:
            # what msgspec does not call its own: nested too deeply, or text that is none
            kind = type(error).__name__
            raise msgspec.DecodeError(f"a header of {len(header)} bytes cannot be read ({kind})") from None
        return envelope


def checksum(body: bytes | memoryview) -> int:
    return int(xxhash.xxh3_64_intdigest(body)) if len(body) else 0


def sealed(payload: bytes) -> bytes:
    return _SEAL.pack(checksum(payload)) + payload
