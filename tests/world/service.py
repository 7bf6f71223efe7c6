"""The buffer service with one protection disabled, a small first map, or other constants.

`python -m tests.world.service CHANGE ...`, followed by the arguments of `buffer_process`. A change is the name of a
function here, or MODULE.NAME=NUMBER. The positive controls of the fault matrix use it, and tests that need another
value of a constant.
"""

import contextlib
import importlib
import sys
import time
from types import SimpleNamespace
from unittest import mock

import lmdb
import pyarrow as pa
import zmq

from leeway.buffer import ingest, schema, store
from leeway.buffer.errors import BadBody
from leeway.buffer.ingest import Ingest
from leeway.buffer.leases import Leases
from leeway.buffer.service import BufferService
from leeway.buffer.store import Store
from leeway.buffer.transaction import Table
from leeway.buffer.upkeep import ReaderWatch
from tests.world import buffer_process as program


def tuned(path, number):
    """Set a constant to another value."""
    module, _, name = path.rpartition(".")
    assert module.startswith("leeway."), "other names import another copy of a module"
    owner = importlib.import_module(module)
    return mock.patch.object(owner, name, type(getattr(owner, name))(float(number)))


# --- disk -----------------------------------------------------------------------------------------


def with_small_map():
    """Give a new store a map of 4 MiB."""
    return mock.patch.dict(Store.__init__.__kwdefaults__, first_map_size=4 * 2**20)


def with_fixed_small_map():
    """Give a new store a map of 4 MiB that cannot grow."""
    refuse = mock.Mock(side_effect=lmdb.MapFullError("the map is full"))
    with_small_map().start()
    return _environment(lambda real: _Environment(real, set_mapsize=refuse))


def without_commit_before_acknowledgement():
    """Commit every 0.3 s and reply without waiting for the commit."""
    return _environment(_LateCommits)


def without_commit_errors():
    """Ignore errors of commits."""
    return _environment(_UncheckedCommits)


def without_reader_watch():
    """Disable the watch for long read transactions."""
    return mock.patch.object(ReaderWatch, "run", return_value=None)


def without_checksums():
    """Read values without checking the 8 bytes of checksum before them."""
    return mock.patch.object(Table, "_checked", lambda self, key, value: value[8:])


# --- wire -----------------------------------------------------------------------------------------


def without_epochs():
    """Treat a new process of an actor as the old one."""
    original = Leases.hello

    def hello(self, tx, message):
        actor = tx.actors.get(message.name)
        if actor is None:
            return original(self, tx, message)
        if message.session not in (actor.session, *actor.replaced):
            actor.session, actor.replaced = message.session, [*actor.replaced, actor.session]
            tx.actors.put(actor, actor.name)
        return actor

    return mock.patch.object(Leases, "hello", hello)


def without_monotonic_time():
    """Measure deadlines on the wall clock."""
    original = BufferService.__init__

    def init(self, *arguments, **named):
        original(self, *arguments, clock=time.time, **named)

    return mock.patch.object(BufferService, "__init__", init)


def without_deduplication():
    """Count every arrival of a trajectory as the first one."""

    def push_group(self, tx, actor, group_id, rows, bad, as_bytes):
        self.commit(tx, tx.groups.require(group_id), list(rows), rows, as_bytes)
        return {}

    patches = contextlib.ExitStack()
    patches.enter_context(mock.patch.object(Ingest, "_find_settled", return_value={}))
    patches.enter_context(mock.patch.object(Ingest, "_push_group", push_group))
    return patches


def without_validation():
    """Accept everything that Arrow can open."""

    def read_stream(body, expected=schema.SCHEMA, *, max_rows=None):
        try:
            return pa.ipc.open_stream(pa.py_buffer(body)).read_next_batch()
        except (pa.ArrowException, OSError, StopIteration) as error:
            raise BadBody("body", str(error)) from error

    patches = contextlib.ExitStack()
    patches.enter_context(mock.patch.object(schema, "read_stream", read_stream))
    patches.enter_context(mock.patch.object(ingest, "faults", return_value={}))
    return patches


def without_size_limits():
    """Accept messages of any size, compressed ones included."""

    class Limitless(zmq.Socket):
        def setsockopt(self, option, value):
            if option != zmq.MAXMSGSIZE:
                super().setsockopt(option, value)

    patches = contextlib.ExitStack()
    patches.enter_context(mock.patch.object(zmq.Context, "_socket_class", Limitless))
    patches.enter_context(mock.patch.object(schema, "is_compressed", return_value=False))
    return patches


# --- a faulty LMDB --------------------------------------------------------------------------------


def _environment(wrap):
    """Wrap the LMDB environment that the store opens."""

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
    """Continue a write transaction in the next one, and commit after 0.3 s."""

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


class _UncheckedCommits(_Environment):
    """Ignores errors of commits."""

    def begin(self, *arguments, write=False, **options):
        txn = self._real.begin(*arguments, write=write, **options)
        return _UncheckedCommit(txn) if write else txn


class _UncheckedCommit:
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
            print(f"a commit failed; the error is ignored: {failed}", file=sys.stderr)


if __name__ == "__main__":
    with contextlib.ExitStack() as changes:
        while not sys.argv[1].startswith("--"):
            change, is_constant, number = sys.argv.pop(1).partition("=")
            changes.enter_context(tuned(change, number) if is_constant else globals()[change]())
        sys.exit(program.main())
