"""What the requests and replies of every service share.

A message is [header, body]: the header is an `Envelope` as msgpack, the body, where there is one, bytes. Nothing is
ever unpickled. Both are checked against an xxh3 checksum before they are looked at: the header's leads it, the body's
is in it.

A request says who asks (`Asker`), and the table of its `Protocol` which role may ask it.

A request is answered by exactly one reply, or, where the answer takes long and the request comes again, by `Working`
first. It is safe to send any request again: each names what it is about, so the service recognises it.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args

import msgspec
import xxhash

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""What a message counts or numbers: so large a number leaves room to add to it in 64 bits."""

Role = Literal["actor", "learner", "ranker", "launch", "observer"]
"""What a client of the services of a run is; 'launch' is the command, and an observer only looks."""
ROLES: frozenset[Role] = frozenset(get_args(Role))

_SEAL = struct.Struct("<Q")

M = TypeVar("M")


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all requests and replies. The tag is the name of the class."""

    is_bulk: ClassVar[bool] = False
    """Has it no order among the others, and goes behind them?"""


class Done(Message, frozen=True):
    """Answer to a request that returns nothing."""


class Working(Message, frozen=True):
    """The service has the request and works on it; the answer is still to come."""


class Refused(Message, frozen=True):
    """The request cannot be served."""

    reason: str
    kind: str = ""
    """RETRY: not now. DAMAGED: the request was damaged on its way. Else a word of the service, from which its client
    makes an error; '' where there is nothing to tell apart."""
    errno: int = 0


RETRY, DAMAGED = "retry", "damaged"


class Asker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who asks."""

    name: Annotated[str, msgspec.Meta(max_length=256)]
    role: Role
    session: Annotated[str, msgspec.Meta(max_length=64)]
    """Random per client process: by this a service knows again whom it has greeted, so nobody else is told it."""


class Envelope(msgspec.Struct, Generic[M], frozen=True, forbid_unknown_fields=True):
    """A request or reply, with the number that pairs them."""

    request_id: Count
    message: M
    body_checksum: int = 0
    """xxh3-64 of the body; 0 where there is none."""
    run_id: str = ""
    """A message of another run is refused, whatever it asks."""
    protocol: Count = 0
    asker: Asker | None = None
    """Of a request; a reply has none."""


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
            requests: the union of what may be asked.
            replies: the union of what is answered beside what every service does.
            asked_by: for every request the roles that may ask it.
            max_header_bytes: a longer header of a request is not looked at.
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
        """The header frame of a message: its checksum, then the envelope."""
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
        """Read a header frame; a longer one than `max_bytes` is not looked at.

        Raises:
            msgspec.DecodeError: the frame is damaged or no known message; it is never guessed at.
        """
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
