"""Tasks of the service between turns (syncing, watching readers, scrubbing), and its bookkeeping of turns.

The bookkeeping covers the time of each stage, whether all messages were read, and the client of each connection.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from math import inf

from leeway.buffer.config import BufferConfig
from leeway.buffer.errors import CorruptRecord, StoreBusy
from leeway.buffer.protocol import STAGES, InvalidMessages
from leeway.buffer.store import Reader, Store
from leeway.buffer.transaction import Transaction

log = logging.getLogger(__name__)

SYNC_EVERY_S = 0.1
"""Seconds between syncs with durability 'interval'; bounds the data that a power loss can destroy."""
SCRUB_PAUSE_S = 600.0
"""Seconds between two passes over all records; a pass reads at most 20 MiB/s."""
_WATCH_EVERY_S = 0.25
_PINNED_AFTER_S = 0.1
"""Seconds after which an open read transaction may block pushes; most readers end their transactions sooner."""
_WATCH_EVERY_BYTES = 4 * 2**20
"""Growth of the file after which the readers are checked."""
_WARN_AFTER_S = 5.0
_SLACK_BYTES = 16 * 2**20
_SCRUB_EVERY_S = 0.2
_SCRUB_BYTES = 4 * 2**20
_STALL_S = 1.0
"""Seconds after which a pause of the disk or the machine counts as a stall; a stall must not expire leases."""
_UNREAD_S = 60.0
MAX_SENDERS = 64
"""Maximum number of senders counted individually; all further senders are counted together."""
OTHERS = "others"
_MAX_CONNECTIONS = 4096
_MAX_FIRST = 200


class Timers:
    """Seconds that the service has spent in each stage."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._since = time.perf_counter()

    def end(self, stage: str) -> None:
        """Add the time since the end of the previous stage to `stage`."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._since
        self._since = now


class Upkeep:
    """Periodic tasks of a served store: syncing, limiting the growth of its file, and checking for damage."""

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
        """Run the tasks that are due; raise StoreError if the disk fails."""
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
    """Detection of read transactions that stay open.

    LMDB cannot reuse a page that a reader may still read, so the file grows while a read transaction is open. The watch
    logs the reader's process, and blocks pushes before the file is twice as large as its contents.
    """

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._checked_at = -1.0
        self._checked_size = 0
        self._seen: dict[Reader, tuple[float, int]] = {}
        """Reader -> time when it was first seen, and size of the file at that time."""
        self._warned: set[Reader] = set()
        self._limit_bytes = 0
        """Size of the file above which an open reader blocks pushes."""
        self.pushes_wait_for = ""
        """Reason why pushes are blocked; '' if pushes are not blocked."""

    def run(self) -> None:
        """Check the reader table a few times per second and, while there are readers, the file size in every turn."""
        now = self._clock()
        size = self._store.size_bytes
        if now - self._checked_at >= _WATCH_EVERY_S or size - self._checked_size >= _WATCH_EVERY_BYTES:
            self._checked_at, self._checked_size = now, size
            self._check_readers(now)
        waits_for = self._why_wait(now) if self._seen else ""
        if waits_for and not self.pushes_wait_for:
            log.warning("pushes wait: %s", waits_for)
        self.pushes_wait_for = waits_for

    def _check_readers(self, now: float) -> None:
        size = self._store.size_bytes
        readers = [reader for reader in self._store.readers() if reader.pid != os.getpid()]
        self._seen = {reader: self._seen.get(reader, (now, size)) for reader in readers}
        self._warned &= self._seen.keys()
        for reader, (since, _) in self._seen.items():
            if now - since >= _WARN_AFTER_S and reader not in self._warned:
                self._warned.add(reader)
                log.warning(
                    "process %d has kept a read transaction of the buffer open for %.0f s", reader.pid, now - since
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
            f"process {oldest.pid} has been reading the store for {now - since:.0f} s, so pages cannot be reused "
            f"and the file has grown to {size // 2**20} MiB, above the limit of {self._limit_bytes // 2**20} MiB. "
            "End that process"
        )


class Scrub:
    """Repeated slow read of all records, so that damage is found while other copies still exist."""

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
                log.error("scrubbing found the block of record %d damaged: %s", record, error)  # noqa: TRY400 - a traceback adds nothing
        return None


class LastSeen:
    """Tracker of unread messages: a lease must not expire while a renewal that was sent in time is unread.

    Messages stay unread if the service stalls, or if there are more messages than one turn reads. The wait is bounded.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._polled_at = clock()
        self._settles_at = -inf
        """Time after a stall until which earlier messages may still arrive."""
        self._unread_since: float | None = None

    def polled(self, since_s: float, wait_s: float) -> None:
        """Record that a poll for messages, which started at `since_s` with timeout `wait_s`, has returned."""
        now = self._clock()
        stalled_s = max(since_s - self._polled_at, now - since_s - max(0.0, wait_s))
        # Wait at most once in ten seconds; otherwise leases would never expire if every turn is slow.
        if stalled_s > _STALL_S and now > self._settles_at + 10 * _STALL_S:
            self._settles_at = now + _STALL_S
        self._polled_at = now

    def read(self, *, is_all: bool) -> None:
        """Record that a turn read all waiting messages, or only as many as one turn may read."""
        if is_all:
            self._unread_since = None
        elif self._unread_since is None:
            self._unread_since = self._polled_at

    def settles_in_s(self, now: float) -> float:
        """Return the seconds until all messages sent during a stall have arrived."""
        return max(0.0, self._settles_at - now)

    def is_complete(self, now: float) -> bool:
        is_read = self._unread_since is None or now - self._unread_since > _UNREAD_S
        return is_read and now >= self._settles_at and now - self._polled_at <= _STALL_S


class Senders:
    """Clients by connection, and counts of invalid messages per sender, in memory only.

    A sender is a known client, identified by name, or an unknown one, identified by address.
    """

    def __init__(self) -> None:
        self._names: dict[bytes, str] = {}
        self._invalid_messages: dict[str, InvalidMessages] = {}

    def register(self, connection: bytes, name: str) -> None:
        if self._names.get(connection) != name:
            self._names[connection] = _plain(name)
            while len(self._names) > _MAX_CONNECTIONS:
                del self._names[next(iter(self._names))]

    def name(self, connection: bytes, peer: str) -> str:
        return self._names.get(connection, peer)

    def record_invalid(self, sender: str, what: str, count: int = 1) -> None:
        if sender not in self._invalid_messages and len(self._invalid_messages) >= MAX_SENDERS:
            sender = OTHERS
        known = self._invalid_messages.get(sender, InvalidMessages(0, _plain(what[:_MAX_FIRST])))
        self._invalid_messages[sender] = InvalidMessages(known.count + count, known.first)

    def snapshot(self) -> dict[str, InvalidMessages]:
        return dict(self._invalid_messages)


def _plain(text: str) -> str:
    """Replace non-printable characters, which could end a line or move a terminal's cursor."""
    return "".join(each if each.isprintable() else "?" for each in text)
