"""The LMDB environment: its tables, their checksums, and transactions over them.

LMDB itself does not notice flipped bits, and a truncated file ends in SIGBUS. So every value
carries a checksum seeded by its key, and the file's length is checked before it is read. Commits
are synchronous and without writemap: what was acknowledged survives a power cut.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import lmdb
import msgspec
import xxhash

from buffer.config import RunFacts
from buffer.errors import CorruptRecord, StoreError
from buffer.tables import Actor, Draw, Group, Identity, ReturnedPrompt, State
from buffer.trajectory import SCHEMA_VERSION

log = logging.getLogger(__name__)

V = TypeVar("V")
T = TypeVar("T")

_TABLES: dict[str, Any] = {
    "meta": bytes,
    "groups": Group,
    "leases": int,
    "open_groups": bytes,
    "unleased_groups": bytes,
    "ready_groups": bytes,
    "returned_prompts": ReturnedPrompt,
    "draws": Draw,
    "actors": Actor,
    "seen": bytes,
    "records": bytes,
    "scores": bytes,
    "evictable": int,
    "quarantine": bytes,
}
_DATA = "data.mdb"
_FIRST_MAP_SIZE = 64 * 2**20
_SEAL = struct.Struct("<Q")


def _pack(parts: tuple[int | str, ...]) -> bytes:
    """A key that sorts by its parts: integers big-endian, texts closed by a zero byte."""
    return b"".join(
        part.to_bytes(8, "big") if isinstance(part, int) else part.encode("utf-8", "replace") + b"\0" for part in parts
    )


def _digest(key: bytes, payload: bytes | memoryview) -> int:
    return int(xxhash.xxh3_64_intdigest(payload, seed=xxhash.xxh3_64_intdigest(key)))


class Table(Generic[V]):
    """One table within a transaction; a value that fails its checksum raises CorruptRecord."""

    def __init__(self, name: str, txn: lmdb.Transaction, db: lmdb._Database) -> None:
        self._name = name
        self._txn = txn
        self._db = db
        self._decoder = _DECODERS.get(name)

    def get(self, *key: int | str) -> V | None:
        """The value, or None."""
        packed = _pack(key)
        value = self._txn.get(packed, db=self._db)
        return None if value is None else self._open(packed, bytes(value))

    def require(self, *key: int | str) -> V:
        """The value of a key that must be there."""
        value = self.get(*key)
        if value is None:
            raise CorruptRecord(f"the store's table '{self._name}' lacks {key}, which another table names")
        return value

    def put(self, value: V, *key: int | str) -> None:
        """Write a value."""
        packed = _pack(key)
        payload = value if self._decoder is None else _encoder.encode(value)
        assert isinstance(payload, bytes)
        self._txn.put(packed, _SEAL.pack(_digest(packed, payload)) + payload, db=self._db)

    def delete(self, *key: int | str) -> bool:
        """Remove a key; False where it was not there."""
        return bool(self._txn.delete(_pack(key), db=self._db))

    def has(self, *key: int | str) -> bool:
        """Is the key there?"""
        return self._txn.get(_pack(key), db=self._db) is not None

    @property
    def count(self) -> int:
        """Number of entries."""
        return int(self._txn.stat(self._db)["entries"])

    def all_keys(self) -> Iterator[tuple[int, ...]]:
        """Keys made of integers, ascending. The table must not change while they are read."""
        for packed in self._txn.cursor(db=self._db).iternext(keys=True, values=False):
            yield struct.unpack(f">{len(packed) // 8}Q", packed)

    def all_items(self) -> Iterator[tuple[tuple[int, ...], V]]:
        """Integer keys and their values, ascending. The table must not change while they are read."""
        for packed, value in self._txn.cursor(db=self._db).iternext(keys=True, values=True):
            yield struct.unpack(f">{len(packed) // 8}Q", packed), self._open(bytes(packed), bytes(value))

    def delete_texts(self, first: str) -> None:
        """Remove every key whose first part is this text."""
        cursor, prefix = self._txn.cursor(db=self._db), _pack((first,))
        found = cursor.set_range(prefix)
        while found and bytes(cursor.key()).startswith(prefix):
            found = cursor.delete()

    def _open(self, key: bytes, value: bytes) -> V:
        payload = value[_SEAL.size :]
        if len(value) < _SEAL.size or _SEAL.unpack_from(value)[0] != _digest(key, payload):
            raise CorruptRecord(
                f"the store's table '{self._name}' has a value of {len(value)} bytes under key {key.hex()} that does "
                "not match its checksum: the disk or the file is damaged"
            )
        opened: V = self._decoder.decode(payload) if self._decoder is not None else cast(V, payload)
        return opened


_encoder = msgspec.msgpack.Encoder()
_DECODERS: dict[str, Any] = {name: msgspec.msgpack.Decoder(kind) for name, kind in _TABLES.items() if kind is not bytes}
_state_decoder = msgspec.msgpack.Decoder(State)
_identity_decoder = msgspec.msgpack.Decoder(Identity)


class Transaction:
    """All tables and the state record, changed together or not at all."""

    def __init__(self, txn: lmdb.Transaction, dbs: dict[str, lmdb._Database]) -> None:
        tables: dict[str, Any] = {name: Table(name, txn, dbs[name]) for name in _TABLES}
        self.meta: Table[bytes] = tables["meta"]
        self.groups: Table[Group] = tables["groups"]
        self.leases: Table[int] = tables["leases"]
        """Open leases: lease -> group."""
        self.open_groups: Table[bytes] = tables["open_groups"]
        self.unleased_groups: Table[bytes] = tables["unleased_groups"]
        """Open groups whose missing samples are to be issued again."""
        self.ready_groups: Table[bytes] = tables["ready_groups"]
        """(version of the oldest token, group): in the order of age."""
        self.returned_prompts: Table[ReturnedPrompt] = tables["returned_prompts"]
        self.draws: Table[Draw] = tables["draws"]
        """By step."""
        self.actors: Table[Actor] = tables["actors"]
        self.seen: Table[bytes] = tables["seen"]
        """(actor, epoch, seq) at or above the actor's low-water mark."""
        self.records: Table[bytes] = tables["records"]
        self.scores: Table[bytes] = tables["scores"]
        """record -> float32 reference log-probabilities."""
        self.evictable: Table[int] = tables["evictable"]
        """record -> group: nothing will ask for these again."""
        self.quarantine: Table[bytes] = tables["quarantine"]
        self._read = self.meta.get("state")
        self.state: State = State() if self._read is None else _state_decoder.decode(self._read)

    def flush(self) -> None:
        """Write the state record where it changed; belongs right before the commit."""
        encoded = _encoder.encode(self.state)
        if encoded != self._read:
            self.meta.put(encoded, "state")


class Store:
    """One folder, one owner."""

    def __init__(self, folder: Path, facts: RunFacts | None, *, first_map_size: int = _FIRST_MAP_SIZE) -> None:
        """Open the store, or create it.

        Args:
            folder: where it lies.
            facts: of the run, written into a new store and compared with those of an old one. None opens
                the store of a run that is over to `read`: whatever run it is, and changing nothing.
            first_map_size: bytes of a new store's map.

        Raises:
            StoreError: another process owns the folder, it belongs to another run or schema, or it is damaged.
        """
        self.folder = folder
        self._read_only = facts is None
        if self._read_only and not (folder / _DATA).exists():
            raise StoreError(f"there is no buffer in {folder}: {_DATA} is missing. It lies in the folder of a run")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _own(folder)
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(
                f"the buffer's folder {folder} cannot be used: {error}. Check its path and rights"
            ) from error
        try:
            self._open(first_map_size)
            self.run_id = self._check_identity(facts)
        except BaseException:
            self.close()
            raise

    def _open(self, first_map_size: int) -> None:
        data = self.folder / _DATA
        size = data.stat().st_size if data.exists() else 0
        try:
            self._env = lmdb.open(
                str(self.folder),
                map_size=max(first_map_size, size),
                max_dbs=len(_TABLES),
                writemap=False,
                sync=True,
                readonly=self._read_only,
                lock=not self._read_only,  # the folder is ours already
            )
            used = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
            if size and data.stat().st_size < used:
                raise StoreError(
                    f"{data} is {data.stat().st_size} bytes long but its pages need {used}: it was cut off. "
                    "Restore it from a copy, or start a new run folder"
                )
            self._dbs = {name: self._env.open_db(name.encode(), create=not self._read_only) for name in _TABLES}
        except lmdb.Error as error:
            raise StoreError(f"{data} cannot be opened ({error}). Restore it, or start a new run folder") from error

    def _check_identity(self, facts: RunFacts | None) -> str:
        """Compare the stored identity with ours, or store ours; returns the run's id."""

        def check(tx: Transaction) -> str:
            stored = tx.meta.get("identity")
            theirs = None if stored is None else _identity_decoder.decode(stored)
            if facts is not None:
                mine = Identity(facts.run_id, SCHEMA_VERSION, facts.model_dump_json())
            elif theirs is not None:
                mine = msgspec.structs.replace(theirs, schema_version=SCHEMA_VERSION)
            else:
                raise StoreError(f"the buffer in {self.folder} is empty: its service ended before it had begun")
            if theirs is None:
                tx.meta.put(_encoder.encode(mine), "identity")
                return mine.run_id
            for name in ("run_id", "schema_version", "facts"):
                if getattr(theirs, name) != getattr(mine, name):
                    raise StoreError(
                        f"the buffer in {self.folder} was made with {name} = {getattr(theirs, name)}, this service has "
                        f"{getattr(mine, name)}. Start it with the configuration of that run, or use a new folder"
                    )

            return mine.run_id

        return self.read(check) if self._read_only else self.write(check)

    def write(self, change: Callable[[Transaction], T]) -> T:
        """Run `change` in one transaction and commit it to disk; grow the map and run it anew where it is full.

        `change` may run several times, so it must touch nothing outside of the transaction that a
        second run would not simply overwrite.

        Raises:
            StoreError: the disk is full or failed; nothing was committed.
        """
        while True:
            try:
                with self._env.begin(write=True) as txn:
                    tx = Transaction(txn, self._dbs)
                    result = change(tx)
                    tx.flush()
            except lmdb.MapFullError:
                grown = self._env.info()["map_size"] * 2
                log.info("the map of %s is full; growing it to %d MiB", self.folder, grown // 2**20)
                self._env.set_mapsize(grown)
            except lmdb.Error as error:
                raise StoreError(
                    f"writing to the buffer in {self.folder} failed ({error}); nothing of this turn was acknowledged. "
                    "Check free disk space, then start the service again"
                ) from error
            else:
                return result

    def read(self, look: Callable[[Transaction], T]) -> T:
        """Run `look` in a read-only transaction, which ends with it: a pinned reader would let the file grow."""
        with self._env.begin() as txn:
            return look(Transaction(txn, self._dbs))

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return (self.folder / _DATA).stat().st_size

    def close(self) -> None:
        """Give the folder back."""
        if hasattr(self, "_env"):
            self._env.close()
        os.close(self._lock)


def _own(folder: Path) -> int:
    """Lock the folder for this process; the lock ends with the process, whatever ends it."""
    lock = os.open(folder / "owner.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
        os.close(lock)
        raise StoreError(
            f"the buffer in {folder} is in use by process {owner or 'unknown'}: one service owns a folder. "
            "Stop that one, or use another run folder"
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock
