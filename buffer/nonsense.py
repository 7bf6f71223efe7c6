"""Quarantine of invalid messages and rows, with counts per sender.

Quarantine  counts all, and keeps the newest to look at, with a share for every sender
Senders     which connection is which client, and how often each sent something invalid

A sender is a greeted client, by its name, or a stranger, by its address.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from buffer.errors import CorruptRecord
from buffer.protocol import Nonsense
from buffer.transaction import Transaction
from common.rpc.server import STRANGER

MAX_QUARANTINED = 1024
MAX_QUARANTINED_BYTES = 64 * 2**10
MAX_SENDERS = 64
"""More senders are counted together."""
OTHERS = "others"

_PACED_FROM = 64
_PACE_S = 1.0
"""Seconds between two kept entries of a sender that has `_PACED_FROM`: a flood is not written to disk."""
_MAX_CONNECTIONS = 4096
_MAX_FIRST = 200


class SetAside(NamedTuple):
    """A row of the quarantine."""

    reason: str
    sender: str
    """'' : not known."""
    data: bytes
    """First bytes of a row as a record, or of a message."""

    @classmethod
    def of(cls, value: bytes) -> SetAside:
        head, _, data = value.partition(b"\n")
        reason, _, sender = head.decode("utf-8", "replace").partition("\t")
        return cls(reason, sender, data)

    def row(self) -> bytes:
        return f"{_plain(self.reason)}\t{_plain(self.sender)}\n".encode() + self.data


class Quarantine:
    """When full, the sender with the most entries makes room. Strangers have one share together."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._shares: dict[str, deque[int]] | None = None
        """Sender -> the numbers of its entries, oldest first; None: to be read anew."""
        self._kept_at: dict[str, float] = {}

    def set_aside(
        self, tx: Transaction, reason: str, data: bytes | memoryview, *, sender: str, matches_lease: bool = False
    ) -> None:
        state = tx.state
        state.ledger.quarantine(reason, matches_lease=matches_lease)
        tx.undo.append(self._forget)
        if self._shares is None:
            self._shares = _read_shares(tx)
        whose, now = _share_of(sender), self._clock()
        mine = self._shares.setdefault(whose, deque())
        if len(mine) >= _PACED_FROM and now - self._kept_at.get(whose, -_PACE_S) < _PACE_S:
            return
        self._kept_at[whose] = now
        tx.quarantine.put(SetAside(reason, sender, bytes(data[:MAX_QUARANTINED_BYTES])).row(), state.next_quarantine)
        mine.append(state.next_quarantine)
        state.next_quarantine += 1
        while sum(map(len, self._shares.values())) > MAX_QUARANTINED:
            largest = max(self._shares.values(), key=lambda share: (len(share), -share[0] if share else 0))
            tx.quarantine.delete(largest.popleft())
        self._shares = {each: share for each, share in self._shares.items() if share}

    def _forget(self) -> None:
        self._shares = None
        self._kept_at.clear()


class Senders:
    """Follows connections and names them. Nothing of it is stored: it begins anew with the service."""

    def __init__(self) -> None:
        self._names: dict[bytes, str] = {}
        self._nonsense: dict[str, Nonsense] = {}

    def heard(self, connection: bytes, name: str) -> None:
        if self._names.get(connection) != name:
            self._names[connection] = _plain(name)
            while len(self._names) > _MAX_CONNECTIONS:
                del self._names[next(iter(self._names))]

    def name(self, connection: bytes, peer: str) -> str:
        return self._names.get(connection, peer)

    def blame(self, sender: str, what: str, count: int = 1) -> None:
        if sender not in self._nonsense and len(self._nonsense) >= MAX_SENDERS:
            sender = OTHERS
        known = self._nonsense.get(sender, Nonsense(0, _plain(what[:_MAX_FIRST])))
        self._nonsense[sender] = Nonsense(known.count + count, known.first)

    def told(self) -> dict[str, Nonsense]:
        return dict(self._nonsense)


def _share_of(sender: str) -> str:
    return STRANGER if sender.startswith(STRANGER) else sender


def _plain(text: str) -> str:
    """Without what would end a line or a field, or move a terminal's cursor."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _read_shares(tx: Transaction) -> dict[str, deque[int]]:
    shares: dict[str, deque[int]] = {}
    for (number,) in list(tx.quarantine.all_keys()):
        try:
            sender = SetAside.of(tx.quarantine.require(number)).sender
        except CorruptRecord:
            sender = ""
        shares.setdefault(_share_of(sender), deque()).append(number)
    return shares
