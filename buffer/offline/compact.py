"""Rewrites the store of a run that is over without its free pages.

The old file stays in place until the new one is on disk and holds the same rows, byte for byte; then
one rename puts the new one there. Killed at any point, the folder holds one whole store.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

import lmdb

from buffer.errors import StoreError
from buffer.store import DATA, Store, own, shard_folders
from buffer.transaction import TABLES
from common.files import sync

_LOCK = "lock.mdb"
_NEW = "compacting"
"""Name of the folder, within the store's, where the new file grows."""


class Compacted(NamedTuple):
    """Size of a store's file before and after."""

    folder: Path
    before_bytes: int
    after_bytes: int


def compact(folder: Path) -> list[Compacted]:
    """Compact every store of a buffer folder.

    Raises:
        StoreError: its service runs, it cannot be read, or there is no room for a second copy. The old
            file is then still there.
    """
    shards = shard_folders(folder)
    for shard in shards:
        Store(shard, None).close()  # it can be read, and was not cut off
    locks: list[int] = []
    try:
        for shard in shards:
            locks.append(own(shard))  # noqa: PERF401 -- those taken must be given back where the next one fails
        return [_compact(shard) for shard in shards]
    finally:
        for lock in locks:
            os.close(lock)


def _compact(folder: Path) -> Compacted:
    data, new = folder / DATA, folder / _NEW
    before = data.stat().st_size
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        with lmdb.open(str(folder), readonly=True, lock=False, max_dbs=len(TABLES), map_size=before) as env:
            _copy(env, new)
            _check_same(env, new)
        sync(new / DATA)
        after = (new / DATA).stat().st_size
        (new / DATA).replace(data)
        # Its reader table is of the old file: a process that opens the new one makes a table of its own.
        (folder / _LOCK).unlink(missing_ok=True)
        sync(folder)
    except (OSError, lmdb.Error) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(
            f"the buffer in {folder} could not be compacted ({error}); it is as it was. The copy needs as much free "
            "space as the store has live data"
        ) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return Compacted(folder, before, after)


def _copy(env: lmdb.Environment, folder: Path) -> None:
    env.copy(str(folder), compact=True)


def _check_same(old: lmdb.Environment, new: Path) -> None:
    """Compare every row of every table.

    Raises:
        StoreError: the copy differs.
    """
    size = (new / DATA).stat().st_size
    with lmdb.open(str(new), readonly=True, lock=False, max_dbs=len(TABLES), map_size=size) as copy:
        with old.begin() as tx:
            names = [bytes(name) for name in tx.cursor().iternext(keys=True, values=False)]
        tables = [(name, old.open_db(name, create=False), copy.open_db(name, create=False)) for name in names]
        with old.begin(buffers=True) as theirs, copy.begin(buffers=True) as ours:
            for name, before, after in tables:
                rows = zip(theirs.cursor(db=before), ours.cursor(db=after), strict=False)
                same = theirs.stat(before)["entries"] == ours.stat(after)["entries"]
                if not same or any(row != copied for row, copied in rows):
                    raise StoreError(
                        f"the compacted copy in {new} differs from the buffer in table '{name.decode()}'; it was "
                        "removed, and the buffer is as it was. Check the disk, then try again"
                    )
