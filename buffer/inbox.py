"""What arrived at the service, opened as far as that needs no transaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from buffer import protocol as p
from buffer.core import OpenedPushes
from buffer.intake import MAX_QUARANTINED_BYTES
from buffer.schema import bomb

_MAX_HEADER_BYTES = 256 * 2**10
"""Room for some ten thousand lease ids; each id of a longer list would cost its time before anyone else is served."""
_LARGE_BYTES = 2**20
_NOTHING = memoryview(b"")


class Asked(NamedTuple):
    """A request to answer."""

    identity: bytes
    request_id: int
    message: p.Request
    body: memoryview


class Pushed(NamedTuple):
    """Pushes that arrived one after the other."""

    requests: list[Asked]
    opened: OpenedPushes


class Spoiled(NamedTuple):
    """A message to set aside."""

    identity: bytes
    request_id: int
    reason: str
    data: bytes | memoryview
    reply: p.Refused | None
    """None: there is no request to answer. Whoever sent it will send it again, or is no client of ours."""


class Refusal(NamedTuple):
    """A request that is refused without looking at the store."""

    identity: bytes
    request_id: int
    reply: p.Refused


Arrival = Asked | Pushed | Spoiled | Refusal


def opened(frames: Iterable[Sequence[memoryview]], pushes_wait_for: str) -> list[Arrival]:
    """Open messages, in order.

    Args:
        frames: of each message: the sender's identity, header, and body where there is one.
        pushes_wait_for: why no trajectory is taken in now; '' where they are.
    """
    arrivals: list[Arrival] = []
    pushes: list[Asked] = []
    unread: list[tuple[p.Push, memoryview]] = []

    def join() -> None:
        if pushes:
            arrivals.append(Pushed(list(pushes), OpenedPushes(unread)))
            pushes.clear()
            unread.clear()

    for identity, *rest in frames:
        arrival = _open(bytes(identity), rest, pushes_wait_for)
        if isinstance(arrival, Asked) and isinstance(arrival.message, p.Push):
            pushes.append(arrival)
            unread.append((arrival.message, arrival.body))
        else:
            join()
            arrivals.append(arrival)
    join()
    return arrivals


def requests_in(arrivals: Iterable[Arrival]) -> list[tuple[bytes, int]]:
    """Identity and number of every request that somebody waits for."""
    found = []
    for arrival in arrivals:
        if isinstance(arrival, Pushed):
            found += [(push.identity, push.request_id) for push in arrival.requests]
        elif not isinstance(arrival, Spoiled) or arrival.reply is not None:
            found.append((arrival.identity, arrival.request_id))
    return found


def _open(identity: bytes, frames: Sequence[memoryview], pushes_wait_for: str) -> Asked | Spoiled | Refusal:
    try:
        header, body = (*frames, _NOTHING)[:2] if 1 <= len(frames) <= 2 else (_NOTHING, _NOTHING)
        envelope = p.decode(header, max_bytes=_MAX_HEADER_BYTES)
    except msgspec.DecodeError:
        data = b"|".join(frame[:MAX_QUARANTINED_BYTES] for frame in frames)
        return Spoiled(identity, 0, "header", data, None)
    message, request_id = envelope.message, envelope.request_id
    if len(body) > _LARGE_BYTES and (reason := bomb(body)):
        # Before its checksum is computed: that takes long for what is large.
        refused = p.Refused(f"the message was quarantined: {reason}")
        return Spoiled(identity, request_id, "schema", body, refused)
    if envelope.body_checksum != p.checksum(body):
        return Spoiled(identity, request_id, "checksum", body, p.Refused("the body arrived damaged", retry=True))
    if not isinstance(message, p.Request):
        return Spoiled(identity, request_id, "header", header, None)
    if isinstance(message, p.Push) and pushes_wait_for:
        return Refusal(identity, request_id, p.Refused(pushes_wait_for, retry=True))
    return Asked(identity, request_id, message, body)
