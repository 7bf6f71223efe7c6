"""Store: opens, checks, locks, writes and reads the LMDB environment of one folder.

Reading a truncated file would raise SIGBUS, so its length is checked first. Commits do not use writemap, and by default
are synchronous: acknowledged data survives a power loss.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import lmdb
import msgspec

from leeway.buffer import pages
from leeway.buffer.errors import CorruptRecord, StoreBusy, StoreError, StoreFull
from leeway.buffer.rows import SCHEMA_VERSION
from leeway.buffer.tables import Identity
from leeway.buffer.transaction import TABLES, Table, Transaction
from leeway.common.files import FULL, NoLocks, sync, try_lock
from leeway.common.run import RunFacts

log = logging.getLogger(__name__)

T = TypeVar("T")

Durability = Literal["commit", "interval", "os"]

DATA = "data.mdb"
PORT = "port"
"""File with the port of the service; exists once the store has been served."""
RESTORE = "restore it from a copy, or start a new run folder"
_MUTABLE = ("max_tokens", "token_budget", "normalised_rewards", "informative_rewards")
_OWNER = "owner.lock"
_MIN_FREE_BYTES = 2**20
_MAX_READERS = 1024
_OWN_RETRY_S = 1.0
"""Seconds to retry the lock; a process that checks whether a folder is served holds the lock briefly."""
_FIRST_MAP_SIZE = 2**30
_encoder = msgspec.msgpack.Encoder()
_identity_decoder = msgspec.msgpack.Decoder(Identity)


class Reader(NamedTuple):
    """An open read transaction of some process."""

    pid: int
    thread: str
    transaction: int
    """Number of the commit that the process reads; pages freed after this commit cannot be reused."""


def buffer_folder(path: Path) -> Path:
    """Return the buffer folder at `path` or in the run folder `path`; raise StoreError if there is none."""
    for folder in (path, path / "buffer"):
        if (folder / DATA).exists():
            return folder
    raise StoreError(
        f"no buffer found in {path}: neither {DATA} nor buffer/{DATA} exists. Pass the folder of a run, "
        "such as runs/NAME"
    )


class Store:
    """The store in one folder, with one writer, and any number of readers that never block the writer."""

    def __init__(
        self,
        folder: Path,
        facts: RunFacts | None,
        *,
        durability: Durability = "commit",
        first_map_size: int = _FIRST_MAP_SIZE,
    ) -> None:
        """Open or create the store.

        Args:
            folder: folder of the store.
            facts: facts of the run, compared with those of an existing store; None opens any store read-only.
            durability: "commit" syncs every commit, "interval" syncs when `sync` is called, "os" lets the system sync.
            first_map_size: size of the memory map of a new store, in bytes.

        Raises:
            StoreError: another process owns the folder, it belongs to another run or schema, or it is damaged.
        """
        self.folder = folder
        self._read_only = facts is None
        self._durability = durability
        self._lock: int | None = None
        if self._read_only and not (folder / DATA).exists():
            raise StoreError(f"no buffer found in {folder}: {DATA} is missing. Pass the buffer folder of a run")
        if not self._read_only:
            self._lock = own(folder)
        try:
            identity = self._open(first_map_size)
            self.facts = self._facts_of(identity) if facts is None else self._adopt(identity, facts)
        except BaseException:
            self.close()
            raise

    def _open(self, first_map_size: int) -> Identity | None:
        """Open the file and its tables, and return the store's identity; None if no identity is stored.

        If the schema version differs, only the identity is read.
        """
        data = self.folder / DATA
        size = data.stat().st_size if data.exists() else 0
        if size == 0 and (self.folder / PORT).exists():
            raise StoreError(
                f"{data} is empty, but a service has used the file. Restore the file, or start a new run folder"
            )
        if size and not (self._read_only and is_served(self.folder)):
            try:
                pages.check(data)
            except StoreError:
                if not (self._read_only and is_served(self.folder)):  # ignore faults if a service writes now
                    raise
        try:
            self._env = self._environment(max(first_map_size, size))
            try:
                meta = self._table("meta")
            except lmdb.NotFoundError:
                return None
            identity = self._identity(meta)
            if identity is None and self._read_only:
                return None
            self._dbs = {"meta": meta} | {name: self._table(name) for name in TABLES if name != "meta"}
        except lmdb.Error as error:
            raise StoreError(f"{data} cannot be opened ({error}). Restore it, or start a new run folder") from error
        if size == 0:
            # LMDB syncs the file but not its directory entry, which a power loss could remove.
            sync(self.folder)
            sync(self.folder.parent)
        return identity

    def _table(self, name: str) -> lmdb._Database:
        return self._mapped(lambda: self._env.open_db(name.encode(), create=not self._read_only))

    def _identity(self, meta: lmdb._Database) -> Identity | None:
        stored = self._read(lambda txn: Table[bytes]("meta", txn, meta, caches=False).get("identity"))
        identity = None if stored is None else _identity_decoder.decode(stored)
        if identity is not None and identity.schema_version != SCHEMA_VERSION:
            raise StoreError(
                f"the buffer in {self.folder} has schema version {identity.schema_version}, but this Leeway supports "
                f"only version {SCHEMA_VERSION}: use the version of Leeway that wrote it, or a new run folder"
            )
        return identity

    def _environment(self, map_size: int) -> lmdb.Environment:
        def opened(*, lock: bool) -> lmdb.Environment:
            return lmdb.open(
                str(self.folder),
                map_size=map_size,
                max_dbs=len(TABLES),
                max_readers=_MAX_READERS,
                writemap=False,
                sync=self._durability == "commit",
                readonly=self._read_only,
                lock=lock,
                create=not self._read_only,
            )

        try:
            return opened(lock=True)
        except lmdb.Error:
            if not self._read_only or os.access(self.folder, os.W_OK):
                raise
            if is_served(self.folder):
                raise StoreError(
                    f"the buffer in {self.folder} is being written, so readers must be able to write its lock file: "
                    "get write permission on the folder, or wait until the run has ended"
                ) from None
            return opened(lock=False)  # no lock file can be created in the folder, and no service writes there

    def _facts_of(self, identity: Identity | None) -> RunFacts:
        if identity is None:
            raise StoreError(f"the buffer in {self.folder} is empty: its service exited before it wrote anything")
        return RunFacts.model_validate_json(identity.facts)

    def _adopt(self, stored: Identity | None, facts: RunFacts) -> RunFacts:
        current = Identity(facts.run_id, SCHEMA_VERSION, facts.model_dump_json())
        if stored is not None and stored.run_id != current.run_id:
            raise StoreError(
                f"the buffer in {self.folder} belongs to run '{stored.run_id}', but this service is for run "
                f"'{current.run_id}'. Use another run folder, or the name of that run"
            )
        if stored is not None and _immutable(stored.facts) != _immutable(current.facts):
            raise StoreError(
                f"the buffer in {self.folder} was created with {_difference(stored.facts, current.facts)}. Start it "
                "with the configuration of that run, or use a new run folder"
            )
        if stored != current:
            self.write(lambda tx: tx.meta.put(_encoder.encode(current), "identity"))
        return facts

    def write(self, change: Callable[[Transaction], T]) -> T:
        """Run `change` in one transaction and commit it; if the map is full, grow it and run `change` again.

        `change` may run several times, so it must only change state that a second call overwrites.

        Raises:
            StoreFull: the disk is full; nothing was committed, and the write may be retried.
            StoreError: the disk failed; nothing was committed, and the store must be reopened.
        """
        while True:
            try:
                return self._write_once(change)
            except lmdb.MapFullError:
                grown = self._env.info()["map_size"] * 2
                log.info("the map of %s is full; growing it to %d MiB", self.folder, grown // 2**20)
                self._env.set_mapsize(grown)
            except lmdb.Error as error:
                if self._is_full(error):
                    raise StoreFull(
                        f"no space is left for the buffer in {self.folder} ({error}). Free space, then the run resumes"
                    ) from error
                raise StoreError(
                    f"writing to the buffer in {self.folder} failed ({error}); pending messages were not acknowledged. "
                    "Check the disk, then start the service again"
                ) from error

    def _write_once(self, change: Callable[[Transaction], T]) -> T:
        undo: list[Callable[[], None]] = []
        try:
            with self._env.begin(write=True, buffers=True) as txn:
                tx = Transaction(txn, self._dbs, caches=True)
                undo = tx.undo
                result = change(tx)
                tx.flush()
        except BaseException:
            for restore in reversed(undo):
                restore()
            raise
        return result

    def _is_full(self, error: lmdb.Error) -> bool:
        """Return whether the disk or its quota is full. LMDB reports a short write as an input/output error."""
        if isinstance(error, lmdb.DiskError) or any(os.strerror(number) in str(error) for number in FULL):
            return True
        return os.strerror(errno.EIO) in str(error) and not self._has_space()

    def _has_space(self) -> bool:
        disk = os.statvfs(self.folder)
        if disk.f_bavail * disk.f_frsize < _MIN_FREE_BYTES:
            return False
        try:
            with tempfile.TemporaryFile(dir=self.folder) as probe:  # statvfs does not show quotas
                os.posix_fallocate(probe.fileno(), 0, _MIN_FREE_BYTES)
        except OSError as error:
            return error.errno not in FULL
        return True

    def read(self, query: Callable[[Transaction], T]) -> T:
        """Run `query` in a read-only transaction; raise CorruptRecord if a value that it reads is damaged."""
        return self._read(lambda txn: query(Transaction(txn, self._dbs, caches=False)))

    def _read(self, query: Callable[[lmdb.Transaction], T]) -> T:
        try:
            with self._mapped(lambda: self._env.begin(buffers=True)) as txn:
                return query(txn)
        except lmdb.ReadersFullError as error:
            raise StoreBusy(
                f"the buffer in {self.folder} already has the maximum of {_MAX_READERS} readers: end some readers"
            ) from error
        except lmdb.Error as error:
            raise CorruptRecord(f"the buffer in {self.folder} is damaged ({error}): {RESTORE}") from error

    def _mapped(self, begin: Callable[[], T]) -> T:
        """Return `begin()`; retry once if the writer has grown the file beyond this process's map."""
        try:
            return begin()
        except lmdb.MapResizedError:
            self._env.set_mapsize(0)
            return begin()

    def sync(self) -> None:
        """Sync all commits to disk; raise StoreError if the disk fails."""
        try:
            self._env.sync(True)
        except lmdb.Error as error:
            raise StoreError(f"the buffer in {self.folder} could not be synced ({error}). Check the disk") from error

    def readers(self) -> list[Reader]:
        """Return the current readers, after removing those of dead processes."""
        self._env.reader_check()
        rows = [line.split() for line in self._env.readers().splitlines()[1:]]
        return [Reader(int(row[0]), row[1], int(row[2])) for row in rows if len(row) == 3 and row[2].isdigit()]

    def structure_faults(self) -> list[str] | None:
        """Return the structural faults of the file; None if it cannot be checked because a service is writing it."""
        faults: list[str] = []
        if not is_served(self.folder):
            try:
                pages.check(self.folder / DATA, deep=True)
            except StoreError as error:
                faults = [str(error)]
        return None if is_served(self.folder) else faults

    @property
    def size_bytes(self) -> int:
        return (self.folder / DATA).stat().st_size

    def close(self) -> None:
        if hasattr(self, "_env"):
            if not self._read_only and self._durability != "commit":
                self.sync()
            self._env.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def own(folder: Path) -> int:
    """Lock the folder until the returned descriptor is closed or the process ends; create the folder if missing.

    Raise StoreError if another process owns the folder, or if the folder cannot be created or opened.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StoreError(f"cannot use the buffer folder {folder}: {error}. Check its path and permissions") from error
    if not try_lock(lock, limit_s=_OWN_RETRY_S):
        owner = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
        os.close(lock)
        raise StoreError(
            f"the buffer in {folder} is in use by process {owner or 'unknown'}, and only one service may own a folder. "
            "Stop that process, or use another run folder"
        )
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock


def is_served(folder: Path) -> bool:
    try:
        lock = os.open(folder / _OWNER, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not try_lock(lock, shared=True)
    except NoLocks:  # the file system has no locks, so no process can own the folder
        return False
    finally:
        os.close(lock)


def _difference(stored: str, current: str) -> str:
    """Return the first immutable facts that differ, with both values."""
    old, new = _immutable(stored), _immutable(current)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return ", ".join(f"{name} = {old.get(name)} (this service has {new.get(name)})" for name in names[:4])


def _immutable(facts: str) -> dict[str, Any]:
    """Return the facts that must not change; length limits may change, as too long samples are filtered when drawn."""
    known = msgspec.json.decode(facts)
    return {name: value for name, value in known.items() if name not in _MUTABLE}
