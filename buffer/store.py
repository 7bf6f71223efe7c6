"""The LMDB environment of one folder: opened, checked, owned, written and read.

A truncated file ends in SIGBUS, so its length is checked before it is read. Commits go without writemap, and by default
are synchronous: what was acknowledged survives a power cut.
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

from buffer import pages
from buffer.errors import CorruptRecord, StoreBusy, StoreError, StoreFull
from buffer.rows import SCHEMA_VERSION
from buffer.tables import Identity
from buffer.transaction import TABLES, Table, Transaction
from common.files import FULL, NoLocks, sync, try_lock
from common.run import RunFacts

log = logging.getLogger(__name__)

T = TypeVar("T")

Durability = Literal["commit", "interval", "os"]

DATA = "data.mdb"
PORT = "port"
"""The file with a service's port; it exists once a store was served."""
RESTORE = "restore it from a copy, or start a new run folder"
_OWNER = "owner.lock"
_NO_ROOM_BYTES = 2**20
_MAX_READERS = 1024
_OWN_RETRY_S = 1.0
"""A process that checks whether a folder is served holds its lock for a moment."""
_FIRST_MAP_SIZE = 2**30
_encoder = msgspec.msgpack.Encoder()
_identity_decoder = msgspec.msgpack.Decoder(Identity)


class Reader(NamedTuple):
    """A read transaction that some process holds open."""

    pid: int
    thread: str
    transaction: int
    """Number of the commit that it sees: pages freed since then cannot be used again."""


def buffer_folder(path: Path) -> Path:
    """Return the buffer's folder, from the folder of its run or its own; StoreError if there is none."""
    for folder in (path, path / "buffer"):
        if (folder / DATA).exists():
            return folder
    raise StoreError(
        f"there is no buffer in {path}: neither {DATA} nor buffer/{DATA} is there. Give the folder of a run, "
        "as in runs/NAME"
    )


class Store:
    """One folder, one owner that writes, any number of readers that never block it."""

    def __init__(
        self,
        folder: Path,
        facts: RunFacts | None,
        *,
        durability: Durability = "commit",
        first_map_size: int = _FIRST_MAP_SIZE,
    ) -> None:
        """Open the store, or create it.

        Args:
            folder: of the store.
            facts: of the run, compared with those of an old store. None opens any store to `read` only.
            durability: "commit" syncs every commit; the others leave it to `sync`, or to the system.
            first_map_size: bytes of a new store's map.

        Raises:
            StoreError: another process owns the folder, it belongs to another run or schema, or it is damaged.
        """
        self.folder = folder
        self._read_only = facts is None
        self._durability = durability
        self._lock: int | None = None
        if self._read_only and not (folder / DATA).exists():
            raise StoreError(f"there is no buffer in {folder}: {DATA} is missing. It lies in the folder of a run")
        if not self._read_only:
            self._lock = own(folder)
        try:
            identity = self._open(first_map_size)
            self.facts = self._facts_of(identity) if facts is None else self._adopt(identity, facts)
        except BaseException:
            self.close()
            raise

    def _open(self, first_map_size: int) -> Identity | None:
        """Open the file and its tables, and return whose store it is; None: that is not written yet.

        Of another schema version the identity is all that is looked at.
        """
        data = self.folder / DATA
        size = data.stat().st_size if data.exists() else 0
        if size == 0 and (self.folder / PORT).exists():
            raise StoreError(
                f"{data} is empty, but was served before: it was cut off. Restore it, or start a new run folder"
            )
        if size and not (self._read_only and is_served(self.folder)):
            try:
                pages.check(data)
            except StoreError:
                if not (self._read_only and is_served(self.folder)):  # else a service began to write meanwhile
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
            # LMDB syncs the file, but not its name: a power cut could take that away.
            sync(self.folder)
            sync(self.folder.parent)
        return identity

    def _table(self, name: str) -> lmdb._Database:
        return self._mapped(lambda: self._env.open_db(name.encode(), create=not self._read_only))

    def _identity(self, meta: lmdb._Database) -> Identity | None:
        stored = self._look(lambda txn: Table[bytes]("meta", txn, meta, caches=False).get("identity"))
        identity = None if stored is None else _identity_decoder.decode(stored)
        if identity is not None and identity.schema_version != SCHEMA_VERSION:
            raise StoreError(
                f"the buffer in {self.folder} has schema version {identity.schema_version}, and this Leeway reads and "
                f"writes version {SCHEMA_VERSION}: use the version of Leeway that wrote it, or a new run folder"
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
                    f"the buffer in {self.folder} is being written, and to read it meanwhile its lock file must be "
                    "written too: ask for write permission on the folder, or wait until the run is over"
                ) from None
            return opened(lock=False)  # a folder or medium that takes no lock file, and nobody writes there

    def _facts_of(self, identity: Identity | None) -> RunFacts:
        if identity is None:
            raise StoreError(f"the buffer in {self.folder} is empty: its service ended before it had begun")
        return RunFacts.model_validate_json(identity.facts)

    def _adopt(self, theirs: Identity | None, facts: RunFacts) -> RunFacts:
        mine = Identity(facts.run_id, SCHEMA_VERSION, facts.model_dump_json())
        if theirs is not None:
            self._refuse_another(theirs, mine)
        if theirs != mine:
            self.write(lambda tx: tx.meta.put(_encoder.encode(mine), "identity"))
        return facts

    def _refuse_another(self, theirs: Identity, mine: Identity) -> None:
        if theirs.run_id != mine.run_id:
            raise StoreError(
                f"the buffer in {self.folder} belongs to run '{theirs.run_id}', this service is for '{mine.run_id}'. "
                "Use another run folder, or that run's name"
            )
        if _lasting(theirs.facts) != _lasting(mine.facts):
            raise StoreError(
                f"the buffer in {self.folder} was made with {_difference(theirs.facts, mine.facts)}. Start it with the "
                "configuration of that run, or use a new run folder"
            )

    def write(self, change: Callable[[Transaction], T]) -> T:
        """Run `change` in one transaction and commit it; grow the map and run it anew if it is full.

        `change` may run several times, so it changes only what a second run overwrites.

        Raises:
            StoreFull: the disk is full; nothing was committed, and it may be tried again.
            StoreError: the disk failed; nothing was committed, and the store must be opened anew.
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
                        f"no space is left for the buffer in {self.folder} ({error}). Free some: it goes on by itself"
                    ) from error
                raise StoreError(
                    f"writing to the buffer in {self.folder} failed ({error}); nothing of this turn was acknowledged. "
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
            for take_back in reversed(undo):
                take_back()
            raise
        return result

    def _is_full(self, error: lmdb.Error) -> bool:
        """Had the disk, or its quota, no room? LMDB calls a write that was cut short an input/output error."""
        if isinstance(error, lmdb.DiskError) or any(os.strerror(number) in str(error) for number in FULL):
            return True
        return os.strerror(errno.EIO) in str(error) and not self._has_room()

    def _has_room(self) -> bool:
        disk = os.statvfs(self.folder)
        if disk.f_bavail * disk.f_frsize < _NO_ROOM_BYTES:
            return False
        try:
            with tempfile.TemporaryFile(dir=self.folder) as probe:  # a quota shows in no figure of the disk
                os.posix_fallocate(probe.fileno(), 0, _NO_ROOM_BYTES)
        except OSError as error:
            return error.errno not in FULL
        return True

    def read(self, look: Callable[[Transaction], T]) -> T:
        """Run `look` in a read-only transaction; CorruptRecord if what it looks at is damaged."""
        return self._look(lambda txn: look(Transaction(txn, self._dbs, caches=False)))

    def _look(self, look: Callable[[lmdb.Transaction], T]) -> T:
        try:
            with self._mapped(lambda: self._env.begin(buffers=True)) as txn:
                return look(txn)
        except lmdb.ReadersFullError as error:
            raise StoreBusy(
                f"the buffer in {self.folder} has {_MAX_READERS} readers already; end some of them"
            ) from error
        except lmdb.Error as error:
            raise CorruptRecord(f"the buffer in {self.folder} is damaged ({error}): {RESTORE}") from error

    def _mapped(self, begin: Callable[[], T]) -> T:
        """Begin to read, once more where the writer has grown the file beyond our map."""
        try:
            return begin()
        except lmdb.MapResizedError:
            self._env.set_mapsize(0)
            return begin()

    def sync(self) -> None:
        """Force everything that was committed to disk; StoreError if the disk failed."""
        try:
            self._env.sync(True)
        except lmdb.Error as error:
            raise StoreError(f"the buffer in {self.folder} could not be synced ({error}). Check the disk") from error

    def readers(self) -> list[Reader]:
        """Who reads now; readers whose process is gone are removed."""
        self._env.reader_check()
        rows = [line.split() for line in self._env.readers().splitlines()[1:]]
        return [Reader(int(row[0]), row[1], int(row[2])) for row in rows if len(row) == 3 and row[2].isdigit()]

    def structure_faults(self) -> list[str] | None:
        """What is wrong with the pages of the file; None: a service writes them, so they cannot be checked."""
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
    """Lock the folder, made if missing, until the returned descriptor is closed or the process ends.

    StoreError if another process owns it, or it cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StoreError(f"the buffer's folder {folder} cannot be used: {error}. Check its path and rights") from error
    if not try_lock(lock, limit_s=_OWN_RETRY_S):
        owner = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
        os.close(lock)
        raise StoreError(
            f"the buffer in {folder} is in use by process {owner or 'unknown'}: one service owns a folder. "
            "Stop that one, or use another run folder"
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
    except NoLocks:  # no process can own one there
        return False
    finally:
        os.close(lock)


def _difference(theirs: str, mine: str) -> str:
    """The first fields in which two facts of a run differ and may not, as a sentence."""
    old, new = _lasting(theirs), _lasting(mine)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return ", ".join(f"{name} = {old.get(name)} where this service has {new.get(name)}" for name in names[:4])


def _lasting(facts: str) -> dict[str, Any]:
    """Return the facts that may not change; what is longer than the longest sample is filtered when drawn."""
    known = msgspec.json.decode(facts)
    return {name: value for name, value in known.items() if name not in ("max_tokens", "token_budget")}
