"""What the service does between turns (it syncs, watches readers of the store, and scrubs), and what it notes of them.

Noted are the time of each stage, whether all messages were read, and which client is behind a connection.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from math import inf

from buffer.config import BufferConfig
from buffer.errors import CorruptRecord, StoreBusy
from buffer.protocol import STAGES, Nonsense
from buffer.store import Reader, Store
from buffer.transaction import Transaction

log = logging.getLogger(__name__)

SYNC_EVERY_S = 0.1
"""With durability 'interval': what a power cut may cost."""
SCRUB_PAUSE_S = 600.0
"""Between two passes over all records, which read 20 MiB/s at most."""
_WATCH_EVERY_S = 0.25
_PINNED_AFTER_S = 0.1
"""A reader that resumes in order ends its transaction sooner."""
_WATCH_EVERY_BYTES = 4 * 2**20
"""Growth of the file after which readers are looked at."""
_WARN_AFTER_S = 5.0
_SLACK_BYTES = 16 * 2**20
_SCRUB_EVERY_S = 0.2
_SCRUB_BYTES = 4 * 2**20
_STILL_S = 1.0
"""A longer standstill, of a disk or the machine, must not cost leases."""
_UNREAD_S = 60.0
MAX_SENDERS = 64
"""More senders are counted together."""
OTHERS = "others"
_MAX_CONNECTIONS = 4096
_MAX_FIRST = 200


class Stages:
    """Measures where the service's time goes."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._since = time.perf_counter()

    def end(self, stage: str) -> None:
        """What has passed since the last stage ended was this one; the next begins."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._since
        self._since = now


class Upkeep:
    """Keeps a store durable, small and sound while it is served."""

    def __init__(self, config: BufferConfig, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._sync_every_s = SYNC_EVERY_S if config.durability == "interval" else None
        self._synced_at = clock()
        self.watch = ReaderWatch(store, clock)
        self.scrub = Scrub(store, clock)

    @property
    def due_in_s(self) -> float:
        return _WATCH_EVERY_S if self._sync_every_s is None else min(_WATCH_EVERY_S, self._sync_every_s)

    def run(self) -> None:
        """Do what is due; StoreError if the disk failed."""
        now = self._clock()
        if self._sync_every_s is not None and now - self._synced_at >= self._sync_every_s:
            self._store.sync()
            self._synced_at = self._clock()
        try:
            self.watch.run()
            self.scrub.run()
        except StoreBusy as busy:
            log.warning("%s", busy)


class ReaderWatch:
    """Notices a read transaction that stays open.

    LMDB cannot reuse a page that may still be read, so the file grows as long as one reader stays. The watch names its
    process, and lets pushes wait before the file is twice as large as what it holds.
    """

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._looked_at = -1.0
        self._looked_at_size = 0
        self._seen: dict[Reader, tuple[float, int]] = {}
        """Reader -> when it was first seen, and the size of the file then."""
        self._warned: set[Reader] = set()
        self._limit_bytes = 0
        """How large the file may become while it is read."""
        self.pushes_wait_for = ""
        """Why no trajectory may be taken in; '' if one may."""

    def run(self) -> None:
        """Look at the reader table a few times a second, and at the size of the file in every turn while it matters."""
        now = self._clock()
        size = self._store.size_bytes
        if now - self._looked_at >= _WATCH_EVERY_S or size - self._looked_at_size >= _WATCH_EVERY_BYTES:
            self._looked_at, self._looked_at_size = now, size
            self._look(now)
        waits_for = self._why_wait(now) if self._seen else ""
        if waits_for and not self.pushes_wait_for:
            log.warning("pushes wait: %s", waits_for)
        self.pushes_wait_for = waits_for

    def _look(self, now: float) -> None:
        size = self._store.size_bytes
        readers = [reader for reader in self._store.readers() if reader.pid != os.getpid()]
        self._seen = {reader: self._seen.get(reader, (now, size)) for reader in readers}
        self._warned &= self._seen.keys()
        for reader, (since, _) in self._seen.items():
            if now - since >= _WARN_AFTER_S and reader not in self._warned:
                self._warned.add(reader)
                log.warning(
                    "process %d has been reading the buffer for %.0f s without a pause", reader.pid, now - since
                )
        if readers:
            live = self._store.read(lambda tx: tx.live_bytes)
            self._limit_bytes = max(live * 3 // 2, live + _SLACK_BYTES)

    def _why_wait(self, now: float) -> str:
        oldest = min(self._seen, key=lambda reader: self._seen[reader])
        since, size_then = self._seen[oldest]
        size = self._store.size_bytes
        if now - since < _PINNED_AFTER_S or size <= max(self._limit_bytes, size_then):
            return ""
        return (
            f"process {oldest.pid} has been reading the store for {now - since:.0f} s, so pages cannot be used again "
            f"and the file has grown to {size // 2**20} MiB, at most {self._limit_bytes // 2**20} are sensible. "
            "End that process"
        )


class Scrub:
    """Reads every record again and again, slowly, so that damage is found while there are copies elsewhere."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._next = 0
        self._resume_at = clock()
        self._found: set[int] = set()
        self.num_damaged = 0

    def run(self) -> None:
        if self._clock() < self._resume_at:
            return
        self._resume_at = self._clock() + _SCRUB_EVERY_S
        following = self._store.read(self._read_some)
        if following is None:
            self.num_damaged = len(self._found)
            self._resume_at = self._clock() + SCRUB_PAUSE_S
        self._next = following or 0

    def _read_some(self, tx: Transaction) -> int | None:
        if self._next == 0:
            self._found = set()
        num_bytes = 0
        for (record,) in tx.records.all_keys(self._next):
            if num_bytes >= _SCRUB_BYTES:
                return record
            try:
                num_bytes += len(tx.records.view(record))
            except CorruptRecord as error:
                self._found.add(record)
                self.num_damaged = max(self.num_damaged, len(self._found))
                log.error("scrubbing found the block of record %d damaged: %s", record, error)  # noqa: TRY400 - the text says all
        return None


class Hearing:
    """Tells whether all messages that were sent in time were read: a lease that was renewed is not over.

    The service may have stood still, or have more to read than it takes at once. The wait is bounded.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._listened_at = clock()
        self._settles_at = -inf
        """After a standstill: until then messages that were sent before come in."""
        self._unread_since: float | None = None

    def listened(self, since_s: float, wait_s: float) -> None:
        """It waited for messages from `since_s` on, for `wait_s` at most, and does so no longer."""
        now = self._clock()
        stood_still_s = max(since_s - self._listened_at, now - since_s - max(0.0, wait_s))
        # once in ten seconds: a service that is slow at every turn goes on losing leases, by what it has read
        if stood_still_s > _STILL_S and now > self._settles_at + 10 * _STILL_S:
            self._settles_at = now + _STILL_S
        self._listened_at = now

    def read(self, *, is_all: bool) -> None:
        """It took what was there, or as much as it takes at once."""
        if is_all:
            self._unread_since = None
        elif self._unread_since is None:
            self._unread_since = self._listened_at

    def settles_in_s(self, now: float) -> float:
        """Seconds until what was sent while it stood still has come in."""
        return max(0.0, self._settles_at - now)

    def is_complete(self, now: float) -> bool:
        is_read = self._unread_since is None or now - self._unread_since > _UNREAD_S
        return is_read and now >= self._settles_at and now - self._listened_at <= _STILL_S


class Senders:
    """Names connections, and counts invalid messages by sender, in memory alone.

    A sender is a greeted client, by its name, or a stranger, by its address.
    """

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


def _plain(text: str) -> str:
    """Replace what would end a line or move a terminal's cursor."""
    return "".join(each if each.isprintable() else "?" for each in text)
