"""Tables within one LMDB transaction, with a checksum on every value.

The checksum of a value is seeded by its key, so a damaged value, or the value of another key, is never returned.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast, get_args, get_type_hints

import lmdb
import msgspec
import xxhash

from leeway.buffer.errors import CorruptRecord
from leeway.buffer.rows import records_in
from leeway.buffer.tables import Actor, DrawRecord, Group, PromptPosterior, ReturnedPrompt, StoreState, Tries, Waiting

V = TypeVar("V")

_SEAL = struct.Struct("<Q")
_INTEGERS = [struct.Struct(f">{number}Q") for number in range(8)]
_encoder = msgspec.msgpack.Encoder()
_state_decoder = msgspec.msgpack.Decoder(StoreState)


def _pack(parts: tuple[int | str, ...]) -> bytes:
    """Return a key that sorts by its parts: integers are big-endian, texts end with a zero byte."""
    if isinstance(parts[0], int):
        return _INTEGERS[len(parts)].pack(*parts)
    return b"".join(
        part.to_bytes(8, "big") if isinstance(part, int) else part.encode("utf-8", "replace") + b"\0" for part in parts
    )


def _digest(key: bytes, payload: bytes | memoryview) -> int:
    return int(xxhash.xxh3_64_intdigest(payload, seed=xxhash.xxh3_64_intdigest(key)))


class Table(Generic[V]):
    """One table within a transaction; reading a value with a wrong checksum raises CorruptRecord.

    Structs are decoded once: within a write transaction, repeated calls of `get` return the same object, and `put`
    defers writing to the end of the transaction. Call `put` after changing a struct.
    """

    def __init__(self, name: str, txn: lmdb.Transaction, db: lmdb._Database, *, caches: bool) -> None:
        """Open the table in a transaction that was begun with buffers=True; `caches` enables the row cache."""
        self._name = name
        self._txn = txn
        self._db = db
        self._decoder = _DECODERS.get(name)
        self._caches = caches and self._decoder is not None
        self._verified: set[bytes] | None = set() if caches else None
        """Keys whose values have been verified in this transaction."""
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
        """Return a view, valid until the next write or transaction end; raise CorruptRecord if the key is missing."""
        payload = self._payload(_pack(key))
        if payload is None:
            raise self._missing(key)
        return payload

    def view_at_or_below(self, key: int) -> memoryview | None:
        """Return the value of the greatest key up to `key`, like `view`; None if all keys are greater."""
        cursor, packed = self._txn.cursor(db=self._db), _pack((key,))
        if not (cursor.set_range(packed) and bytes(cursor.key()) == packed) and not cursor.prev():
            return None
        return self._checked(bytes(cursor.key()), cast("memoryview", cursor.value()))

    def require(self, *key: int | str) -> V:
        value = self.get(*key)
        if value is None:
            raise self._missing(key)
        return value

    def put(self, value: V, *key: int | str) -> None:
        packed = _pack(key)
        if self._caches:
            self._rows[packed] = self._unwritten[packed] = value
        else:
            self._write(packed, value)

    def append(self, pieces: Sequence[bytes | memoryview], *key: int | str) -> None:
        """Write concatenated pieces under a key above all stored keys; appending is faster and fills pages better."""
        packed = _pack(key)
        value = bytearray().join([bytes(_SEAL.size), *pieces])
        _SEAL.pack_into(value, 0, _digest(packed, memoryview(value)[_SEAL.size :]))
        self._txn.put(packed, value, append=True, db=self._db)

    def delete(self, *key: int | str) -> bool:
        """Delete a key; return whether it existed."""
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
        """Bytes of the pages in the file that the table uses."""
        stat = self._txn.stat(self._db)
        return int(stat["psize"] * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]))

    def all_keys(self, first: int = 0) -> Iterator[tuple[int, ...]]:
        """Yield integer keys, ascending from `first`. The table must not change during the iteration."""
        for packed, _ in self._scan(first, values=False):
            yield self._unpack(packed)

    def all_items(self) -> Iterator[tuple[tuple[int, ...], V]]:
        """Yield integer keys and their values, ascending. The table must not change during the iteration."""
        for packed, value in self._scan(values=True):
            key = bytes(packed)
            cached = self._rows.get(key)
            yield self._unpack(key), self._open(self._checked(key, value)) if cached is None else cached

    def damaged(self) -> Iterator[str]:
        """Yield a message for each value that does not match its checksum."""
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
        """Return the number of keys by the text that is their first part. Reads all keys."""
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
                f"the store's table '{self._name}' has a key of {len(packed)} bytes ({bytes(packed).hex()}) instead of "
                "8-byte integers: the file is damaged, or was written by another program"
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

    def _missing(self, key: tuple[int | str, ...]) -> CorruptRecord:
        return CorruptRecord(f"the store's table '{self._name}' has no key {key}, which another table references")


class Transaction:
    """All tables and the state record, changed atomically."""

    meta: Table[bytes]
    groups: Table[Group]
    returned_prompts: Table[ReturnedPrompt]
    window: Table[Waiting]
    """Position in the order of the prompt law -> the prompt."""
    lengths: Table[PromptPosterior]
    tries: Table[Tries]
    draws: Table[DrawRecord]
    actors: Table[Actor]
    seen: Table[bytes]
    """Received (actor, epoch, seq) at or above the actor's low-water mark."""
    records: Table[bytes]
    """Lowest record of a block -> the block (`leeway.buffer.rows`)."""
    scores: Table[bytes]
    partials: Table[bytes]
    """(group, sample index) -> a block of one row."""

    def __init__(self, txn: lmdb.Transaction, dbs: dict[str, lmdb._Database], *, caches: bool) -> None:
        self._tables: list[Table[Any]] = [Table(name, txn, dbs[name], caches=caches) for name in TABLES]
        for name, table in zip(TABLES, self._tables, strict=True):
            setattr(self, name, table)
        self.undo: list[Callable[[], None]] = []
        """Functions that undo changes of in-memory state if the transaction fails; they run in reverse order."""
        self._read = self.meta.get("state")
        self.state: StoreState = StoreState() if self._read is None else _state_decoder.decode(self._read)

    def flush(self) -> None:
        """Write the cached rows and the state; call this right before the commit."""
        for table in self._tables:
            table.flush()
        encoded = _encoder.encode(self.state)
        if encoded != self._read:
            self.meta.put(encoded, "state")

    def find_block(self, record: int) -> tuple[memoryview, dict[int, int]] | None:
        """Return the block with a record, and its `records_in`, or None. The block is valid as long as a `Table.view`.

        Raise CorruptRecord if the block is damaged.
        """
        block = self.records.view_at_or_below(record) if record >= 0 else None
        inside = {} if block is None else records_in(block)
        return None if block is None or record not in inside else (block, inside)

    def blocks_of(self, records: Iterable[int]) -> list[memoryview]:
        """Return the blocks with these records, each once; valid until the next write or the transaction's end.

        Raise CorruptRecord if a record is missing, or if its block is damaged.
        """
        found: list[memoryview] = []
        held: set[int] = set()
        for record in records:
            if record not in held:
                if (holder := self.find_block(record)) is None:
                    raise CorruptRecord(f"the store has no record {record}, which another table references")
                found.append(holder[0])
                held.update(holder[1])
        return found

    def damaged(self) -> Iterator[str]:
        """Yield a message for each value of any table that does not match its checksum. Reads all values."""
        for table in self._tables:
            yield from table.damaged()

    @property
    def live_bytes(self) -> int:
        """Bytes of the file that hold rows; the rest of the file is reusable."""
        return sum(table.size_bytes for table in self._tables)


TABLES: dict[str, Any] = {name: get_args(table)[0] for name, table in get_type_hints(Transaction).items()}
"""Name of each table -> the type of its values."""
_DECODERS: dict[str, Any] = {name: msgspec.msgpack.Decoder(kind) for name, kind in TABLES.items() if kind is not bytes}
