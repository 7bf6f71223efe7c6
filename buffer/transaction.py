"""Tables within one LMDB transaction, and the checksum that every value carries.

Every value is sealed with a checksum seeded by its key: a damaged value, or one of another key, is never returned.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

import lmdb
import msgspec
import xxhash

from buffer.errors import CorruptRecord
from buffer.rows import records_in
from buffer.tables import Actor, DrawRecord, Group, ReturnedPrompt, StoreState, Tries, Visit, Waiting

V = TypeVar("V")

TABLES: dict[str, Any] = {
    "meta": bytes,
    "groups": Group,
    "returned_prompts": ReturnedPrompt,
    "window": Waiting,
    "lengths": Visit,
    "tries": Tries,
    "draws": DrawRecord,
    "actors": Actor,
    "seen": bytes,
    "records": bytes,
    "scores": bytes,
    "partials": bytes,
}

_SEAL = struct.Struct("<Q")
_INTEGERS = [struct.Struct(f">{number}Q") for number in range(8)]
_encoder = msgspec.msgpack.Encoder()
_DECODERS: dict[str, Any] = {name: msgspec.msgpack.Decoder(kind) for name, kind in TABLES.items() if kind is not bytes}
_state_decoder = msgspec.msgpack.Decoder(StoreState)


def _pack(parts: tuple[int | str, ...]) -> bytes:
    """A key that sorts by its parts: integers big-endian, texts closed by a zero byte."""
    if isinstance(parts[0], int):
        return _INTEGERS[len(parts)].pack(*parts)
    return b"".join(
        part.to_bytes(8, "big") if isinstance(part, int) else part.encode("utf-8", "replace") + b"\0" for part in parts
    )


def _digest(key: bytes, payload: bytes | memoryview) -> int:
    return int(xxhash.xxh3_64_intdigest(payload, seed=xxhash.xxh3_64_intdigest(key)))


class Table(Generic[V]):
    """One table within a transaction; a value that fails its checksum raises CorruptRecord.

    Structs are decoded once: within a write transaction `get` returns the same object again, and what was `put` is
    written when it ends. A struct that was changed must be put.
    """

    def __init__(self, name: str, txn: lmdb.Transaction, db: lmdb._Database, *, caches: bool) -> None:
        """Open the table in a transaction that was begun with buffers=True; `caches` keeps decoded rows."""
        self._name = name
        self._txn = txn
        self._db = db
        self._decoder = _DECODERS.get(name)
        self._caches = caches and self._decoder is not None
        self._verified: set[bytes] | None = set() if caches else None
        """Keys whose values matched their checksums in this transaction."""
        self._rows: dict[bytes, V] = {}
        self._unwritten: dict[bytes, V] = {}

    def get(self, *key: int | str) -> V | None:
        packed = _pack(key)
        if self._caches and (row := self._rows.get(packed)) is not None:
            return row
        payload = self._payload(packed)
        if payload is None:
            return None
        opened = self._open(payload)
        if self._caches:
            self._rows[packed] = opened
        return opened

    def view(self, *key: int | str) -> memoryview:
        """The bytes of a value that must be there, where they lie: valid until the next write or the end."""
        payload = self._payload(_pack(key))
        if payload is None:
            raise self._lacks(key)
        return payload

    def view_at_or_below(self, key: int) -> memoryview | None:
        """As `view`, of the greatest key up to this one; None where all are above it."""
        cursor, packed = self._txn.cursor(db=self._db), _pack((key,))
        if not (cursor.set_range(packed) and bytes(cursor.key()) == packed) and not cursor.prev():
            return None
        return self._checked(bytes(cursor.key()), cast("memoryview", cursor.value()))

    def require(self, *key: int | str) -> V:
        value = self.get(*key)
        if value is None:
            raise self._lacks(key)
        return value

    def put(self, value: V, *key: int | str) -> None:
        packed = _pack(key)
        if self._caches:
            self._rows[packed] = self._unwritten[packed] = value
        else:
            self._write(packed, value)

    def append(self, pieces: Sequence[bytes | memoryview], *key: int | str) -> None:
        """Write bytes, given in pieces, under a key above all others, which fills pages better and is quicker."""
        packed = _pack(key)
        value = bytearray().join([bytes(_SEAL.size), *pieces])
        _SEAL.pack_into(value, 0, _digest(packed, memoryview(value)[_SEAL.size :]))
        self._txn.put(packed, value, append=True, db=self._db)

    def delete(self, *key: int | str) -> bool:
        """Remove a key; False where it was not there."""
        packed = _pack(key)
        unwritten = self._unwritten.pop(packed, None) is not None
        self._rows.pop(packed, None)
        return bool(self._txn.delete(packed, db=self._db)) or unwritten

    def has(self, *key: int | str) -> bool:
        packed = _pack(key)
        return packed in self._rows or self._txn.get(packed, db=self._db) is not None

    @property
    def count(self) -> int:
        self.flush()
        return int(self._txn.stat(self._db)["entries"])

    @property
    def size_bytes(self) -> int:
        """Of the pages of the file that the table's rows fill."""
        stat = self._txn.stat(self._db)
        return int(stat["psize"] * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]))

    def all_keys(self, first: int = 0) -> Iterator[tuple[int, ...]]:
        """Integer keys, ascending from `first`. The table must not change while they are read."""
        for packed, _ in self._scan(first, values=False):
            yield self._unpack(packed)

    def all_items(self) -> Iterator[tuple[tuple[int, ...], V]]:
        """Integer keys and their values, ascending. The table must not change while they are read."""
        for packed, value in self._scan(values=True):
            key = bytes(packed)
            cached = self._rows.get(key)
            yield self._unpack(key), self._open(self._checked(key, value)) if cached is None else cached

    def damaged(self) -> Iterator[str]:
        """One sentence for every value that does not match its checksum."""
        for packed, value in self._scan(values=True):
            try:
                self._checked(bytes(packed), value)
            except CorruptRecord as error:
                yield str(error)

    def delete_texts(self, first: str) -> None:
        cursor, prefix = self._txn.cursor(db=self._db), _pack((first,))
        found = cursor.set_range(prefix)
        while found and bytes(cursor.key()).startswith(prefix):
            found = cursor.delete()

    def count_texts(self) -> Counter[str]:
        """How many keys have each text as their first part. Reads all of them."""
        keys = (bytes(packed) for packed, _ in self._scan(values=False))
        return Counter(key.partition(b"\0")[0].decode("utf-8", "replace") for key in keys)

    def flush(self) -> None:
        if self._unwritten:
            for packed in sorted(self._unwritten):
                self._write(packed, self._unwritten[packed])
            self._unwritten.clear()

    def _scan(self, first: int = 0, *, values: bool) -> Iterator[tuple[Any, Any]]:
        self.flush()
        cursor = self._txn.cursor(db=self._db)
        if first and not cursor.set_range(_pack((first,))):
            return
        if values:
            yield from cursor.iternext(keys=True, values=True)
        else:
            yield from ((packed, None) for packed in cursor.iternext(keys=True, values=False))

    def _unpack(self, packed: bytes | memoryview) -> tuple[int, ...]:
        if len(packed) % 8:
            raise CorruptRecord(
                f"the store's table '{self._name}' has a key of {len(packed)} bytes ({bytes(packed).hex()}), "
                "where keys are made of 8-byte integers: the file is damaged, or was written by another program"
            )
        return struct.unpack(f">{len(packed) // 8}Q", packed)

    def _payload(self, packed: bytes) -> memoryview | None:
        try:
            value = cast("memoryview | None", self._txn.get(packed, db=self._db))
        except lmdb.Error as error:
            raise CorruptRecord(
                f"the store's table '{self._name}' cannot be read at {packed.hex()} ({error})"
            ) from error
        return None if value is None else self._checked(packed, value)

    def _checked(self, key: bytes, value: memoryview) -> memoryview:
        payload = value[_SEAL.size :]
        if self._verified is not None and key in self._verified:
            return payload
        if len(value) < _SEAL.size or _SEAL.unpack_from(value)[0] != _digest(key, payload):
            raise CorruptRecord(
                f"the store's table '{self._name}' has a value of {len(value)} bytes under key {key.hex()} that does "
                "not match its checksum: the disk or the file is damaged"
            )
        if self._verified is not None:
            self._verified.add(key)
        return payload

    def _open(self, payload: memoryview) -> V:
        opened: V = self._decoder.decode(payload) if self._decoder is not None else cast(V, bytes(payload))
        return opened

    def _write(self, packed: bytes, value: V) -> None:
        payload = value if self._decoder is None else _encoder.encode(value)
        assert isinstance(payload, bytes)
        self._txn.put(packed, _SEAL.pack(_digest(packed, payload)) + payload, db=self._db)

    def _lacks(self, key: tuple[int | str, ...]) -> CorruptRecord:
        return CorruptRecord(f"the store's table '{self._name}' lacks {key}, which another table names")


class Transaction:
    """All tables and the state record, changed together or not at all."""

    meta: Table[bytes]
    groups: Table[Group]
    returned_prompts: Table[ReturnedPrompt]
    window: Table[Waiting]
    """By its place in the order of the law."""
    lengths: Table[Visit]
    tries: Table[Tries]
    draws: Table[DrawRecord]
    actors: Table[Actor]
    seen: Table[bytes]
    """(actor, epoch, seq) at or above the actor's low-water mark."""
    records: Table[bytes]
    """Least record of a block -> the block (`buffer.rows`)."""
    scores: Table[bytes]
    partials: Table[bytes]
    """(group, sample index) -> a block of one row."""

    def __init__(self, txn: lmdb.Transaction, dbs: dict[str, lmdb._Database], *, caches: bool) -> None:
        self._tables: list[Table[Any]] = [Table(name, txn, dbs[name], caches=caches) for name in TABLES]
        for name, table in zip(TABLES, self._tables, strict=True):
            setattr(self, name, table)
        self.undo: list[Callable[[], None]] = []
        """What takes back changes of memory, last first, if the transaction fails."""
        self._read = self.meta.get("state")
        self.state: StoreState = StoreState() if self._read is None else _state_decoder.decode(self._read)

    def flush(self) -> None:
        """Write what is kept in memory; belongs right before the commit."""
        for table in self._tables:
            table.flush()
        encoded = _encoder.encode(self.state)
        if encoded != self._read:
            self.meta.put(encoded, "state")

    def find_block(self, record: int) -> tuple[memoryview, dict[int, int]] | None:
        """Return the block that holds a record, and its `records_in`; None: there is none. Valid as a view is.

        CorruptRecord if the block is damaged.
        """
        block = self.records.view_at_or_below(record) if record >= 0 else None
        inside = {} if block is None else records_in(block)
        return None if block is None or record not in inside else (block, inside)

    def blocks_of(self, records: Iterable[int]) -> list[memoryview]:
        """Return the blocks that hold these records, each once; valid until the next write or the end.

        CorruptRecord if a record is not there, or its block is damaged.
        """
        found: list[memoryview] = []
        held: set[int] = set()
        for record in records:
            if record not in held:
                if (holder := self.find_block(record)) is None:
                    raise CorruptRecord(f"the store has no record {record}, which another table names")
                found.append(holder[0])
                held.update(holder[1])
        return found

    def damaged(self) -> Iterator[str]:
        """One sentence for every value of any table that does not match its checksum. Reads everything."""
        for table in self._tables:
            yield from table.damaged()

    @property
    def live_bytes(self) -> int:
        """Bytes of the file that hold rows; what is beyond them is free to be used again."""
        return sum(table.size_bytes for table in self._tables)
