"""The buffer service without one of its protections against kills and disks, or with a small first map.

`python -m tests.faults.careless_service NAME ...`, then the arguments of `python -m buffer`. The positive
controls of rows 1 to 9 of the fault matrix run it.
"""

import sys
import time
from types import SimpleNamespace
from unittest import mock

import lmdb

from buffer import __main__ as program
from buffer import store
from buffer.store import Store
from buffer.transaction import Table
from buffer.upkeep import ReaderWatch


def with_small_map():
    """A new store's map has 4 MiB; nothing else differs from the real service."""
    return mock.patch.dict(Store.__init__.__kwdefaults__, first_map_size=4 * 2**20)


def with_small_map_that_stays():
    """A map of 4 MiB that cannot grow."""
    refuse = mock.Mock(side_effect=lmdb.MapFullError("the map is full"))
    with_small_map().start()
    return _environment(lambda real: _Environment(real, set_mapsize=refuse))


def without_commit_before_acknowledgement():
    """A transaction is committed every 0.3 s; its answers do not wait for that."""
    return _environment(_LateCommits)


def without_regard_for_errors():
    """A commit that failed is taken for one that did not."""
    return _environment(_DeafCommits)


def without_reader_watch():
    """Nobody looks at who reads."""
    return mock.patch.object(ReaderWatch, "run", return_value=None)


def without_checksums():
    """Values are taken as they are read: 8 bytes of checksum, then the value."""
    return mock.patch.object(Table, "_checked", lambda self, key, value: value[8:])


def _environment(wrap):
    """Let the store see LMDB through this."""

    def opened(*arguments, **options):
        real = lmdb.open(*arguments, **options)
        return real if options.get("readonly") else wrap(real)

    parts = {name: getattr(lmdb, name) for name in dir(lmdb)}
    return mock.patch.object(store, "lmdb", SimpleNamespace(**{**parts, "open": opened}))


class _Environment:
    """An LMDB environment with some methods replaced."""

    def __init__(self, real, **replaced):
        self._real = real
        self.__dict__.update(replaced)

    def __getattr__(self, name):
        return getattr(self._real, name)


class _LateCommits(_Environment):
    """Write transactions go on in the next one, and are committed when 0.3 s have passed."""

    def __init__(self, real):
        super().__init__(real)
        self._txn, self._began_at = None, 0.0

    def begin(self, *arguments, write=False, **options):
        if not write:
            self.commit()
            return self._real.begin(*arguments, **options)
        return self

    def __enter__(self):
        if self._txn is None:
            self._txn, self._began_at = self._real.begin(write=True, buffers=True), time.monotonic()
        return self._txn

    def __exit__(self, kind, error, trace):
        if kind is not None:
            self._txn.abort()
            self._txn = None
        elif time.monotonic() - self._began_at > 0.3:
            self.commit()

    def commit(self):
        if self._txn is not None:
            self._txn.commit()
            self._txn = None

    def close(self):
        self.commit()
        self._real.close()


class _DeafCommits(_Environment):
    """Commits whose errors are not heard."""

    def begin(self, *arguments, write=False, **options):
        txn = self._real.begin(*arguments, write=write, **options)
        return _DeafCommit(txn) if write else txn


class _DeafCommit:
    def __init__(self, txn):
        self._txn = txn

    def __enter__(self):
        return self._txn

    def __exit__(self, kind, error, trace):
        if kind is not None:
            self._txn.abort()
            return
        try:
            self._txn.commit()
        except lmdb.MapFullError:
            raise
        except lmdb.Error as failed:
            print(f"a commit failed and nobody hears it: {failed}", file=sys.stderr)


if __name__ == "__main__":
    change = globals()[sys.argv.pop(1)]
    with change():
        sys.exit(program.main())
